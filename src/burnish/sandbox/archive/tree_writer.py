"""Put entries below a directory, whatever they are called and whatever already lies there."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from burnish.sandbox.archive.beneath import FOLDER, PARENT, open_beneath, split_parent
from burnish.sandbox.archive.creation import Creator
from burnish.sandbox.archive.entry import Entry, EntryKind, show
from burnish.sandbox.archive.removal import remove_tree

_PARENT_MODE = 0o755
# What a box has from the start: taken from its user or closed to programs, it is of no use.
_OF_THE_BOX = frozenset({b"work", b"tmp"})
OPAQUE = "user.overlay.opaque"
WHITEOUT = "user.overlay.whiteout"


class Rules(NamedTuple):
    """How entries become files."""

    uid_base: int | None
    """Added to every owner and group; None: all belongs to the caller, who is not root."""
    follow: bool
    """Whether directories on the way may be links (confined to the tree), as in a root
    filesystem with `/bin -> usr/bin`; otherwise such a name is refused."""
    readable: bool
    """Whether the owner may read all files and enter all directories, whatever the modes say:
    without root they could be neither used nor removed."""
    below_fd: int | None = None
    """Root of the files on top of which the tree comes to lie: a directory there keeps its owner
    and mode where no entry names it, and `/work` and `/tmp` in any case."""


class _Late(NamedTuple):
    mode: int
    mtime_ns: int | None


class TreeWriter:
    """Writes below one descriptor. Call `finish` at the end: directories get their modes then."""

    def __init__(self, root_fd: int, rules: Rules) -> None:
        """Write below `root_fd`, which stays open and belongs to the caller."""
        self._root = root_fd
        self._rules = rules
        self._creator = Creator(rules.uid_base, readable=rules.readable)
        # Modes and times of directories come last: they may forbid us to write, and writing
        # changes times.
        self._late: dict[bytes, _Late] = {}
        self._parent: tuple[bytes, int] | None = None

    def add(self, entry: Entry, chunks: Iterable[tuple[int, bytes]] = ()) -> None:
        """Create one member; an earlier one of that name goes, but directories are merged.

        Args:
            entry: not the top and not special.
            chunks: content of a file as (offset, data).

        Raises:
            ValueError: it would lead out, a directory on its way is none, or a hard link names
                what is not there.
            OSError: as the file system says, such as ENOSPC.
        """
        assert entry.path
        with _refusals(entry.path):
            parent, name = self._open_parent(entry.path)
            self._make_way(parent, name, entry)
            if entry.kind is EntryKind.FILE:
                self._creator.file(parent, name, entry, chunks)
            elif entry.kind is EntryKind.FOLDER:
                self._add_folder(parent, name, entry)
            elif entry.kind is EntryKind.SYMLINK:
                self._creator.symlink(parent, name, entry)
            else:
                assert entry.kind is EntryKind.HARDLINK
                self._add_hardlink(parent, name, entry)

    def whiteout(self, path: bytes) -> None:
        """Hide what lower layers have at `path`: call when all members are there."""
        with _refusals(path):
            parent, name = self._open_parent(path)
            try:
                mode = os.lstat(name, dir_fd=parent).st_mode
            except FileNotFoundError:
                make_whiteout(parent, name)
                return
            if stat.S_ISDIR(mode):
                self.opaque(path)

    def opaque(self, path: bytes) -> None:
        """Hide what lower layers have in the directory `path`."""
        with _refusals(path):
            folder = self._open_folder(path)
            try:
                make_opaque(folder)
            finally:
                os.close(folder)

    def remove(self, path: bytes) -> None:
        """Remove what is there, if anything."""
        parent, name = split_parent(path)
        try:
            folder = open_beneath(self._root, parent, PARENT, follow=self._rules.follow)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            remove_tree(folder, name)
        finally:
            os.close(folder)

    def empty(self, path: bytes) -> None:
        """Remove what is in a directory, if it is one."""
        try:
            folder = open_beneath(self._root, path, follow=self._rules.follow)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for name in os.listdir(folder):
                remove_tree(folder, os.fsencode(name))
        finally:
            os.close(folder)

    def finish(self) -> None:
        """Give directories their modes and times."""
        self.close()
        # Deepest first: a parent without permissions would lock us out.
        for path in sorted(self._late, key=lambda path: path.count(b"/"), reverse=True):
            late = self._late[path]
            try:
                folder = open_beneath(self._root, path, follow=self._rules.follow)
            except OSError as error:
                if error.errno in _NO_FOLDER:
                    # Replaced by a later member.
                    continue
                raise
            try:
                os.fchmod(folder, late.mode)
                if late.mtime_ns is not None:
                    os.utime(folder, ns=(late.mtime_ns, late.mtime_ns))
            finally:
                os.close(folder)
        self._late.clear()

    def close(self) -> None:
        """Close what is open; after `finish` there is nothing."""
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _open_parent(self, path: bytes) -> tuple[int, bytes]:
        parent, name = split_parent(path)
        if self._parent is None or self._parent[0] != parent:
            self.close()
            self._parent = (parent, self._open_folder(parent))
        return self._parent[1], name

    def _open_folder(self, path: bytes) -> int:
        """Open a directory; what is missing on the way is made."""
        try:
            return open_beneath(self._root, path, PARENT, follow=self._rules.follow)
        except FileNotFoundError:
            pass
        depth = path.count(b"/") + 1
        parts = path.split(b"/")
        while depth:
            depth -= 1
            try:
                current = open_beneath(
                    self._root, b"/".join(parts[:depth]), PARENT, follow=self._rules.follow
                )
                break
            except FileNotFoundError:
                continue
        for index in range(depth, len(parts)):
            try:
                os.mkdir(parts[index], 0o700, dir_fd=current)
                child = os.open(parts[index], FOLDER, dir_fd=current)
            finally:
                os.close(current)
            current = child
            path = b"/".join(parts[: index + 1])
            if not self._keep(current, path, None):
                self._creator.own(current, 0, 0)
                self._late[path] = _Late(_PARENT_MODE, None)
        return current

    def _keep(self, folder: int, path: bytes, mtime_ns: int | None) -> bool:
        """Let a directory be as the one below it; False if there is none."""
        if self._rules.below_fd is None:
            return False
        try:
            below = open_beneath(self._rules.below_fd, path, FOLDER | os.O_PATH)
        except OSError:
            # Absent, no directory, or of a mount, which hides what we write.
            return False
        try:
            status = os.fstat(below)
        finally:
            os.close(below)
        if self._rules.uid_base is not None:
            os.fchown(folder, status.st_uid, status.st_gid)
        self._late[path] = _Late(self._creator.mode(stat.S_IMODE(status.st_mode), 0o700), mtime_ns)
        return True

    def _make_way(self, parent: int, name: bytes, entry: Entry) -> None:
        try:
            mode = os.lstat(name, dir_fd=parent).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode) and entry.kind is EntryKind.FOLDER:
            return
        if entry.kind is EntryKind.HARDLINK and entry.target == entry.path:
            raise ValueError(f"{show(entry.path)} is a hard link to itself")
        if stat.S_ISDIR(mode):
            remove_tree(parent, name)
        else:
            os.unlink(name, dir_fd=parent)

    def _add_folder(self, parent: int, name: bytes, entry: Entry) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        folder = os.open(name, FOLDER, dir_fd=parent)
        try:
            for key, value in entry.xattrs.items():
                os.setxattr(folder, key, value)
            if entry.path in _OF_THE_BOX and self._keep(folder, entry.path, entry.mtime_ns):
                return
            self._creator.own(folder, entry.uid, entry.gid)
        finally:
            os.close(folder)
        self._late[entry.path] = _Late(self._creator.mode(entry.mode, 0o700), entry.mtime_ns)

    def _add_hardlink(self, parent: int, name: bytes, entry: Entry) -> None:
        above, target = split_parent(entry.target)
        try:
            folder = open_beneath(self._root, above, PARENT, follow=self._rules.follow)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(_no_target(entry)) from error
        try:
            if stat.S_ISDIR(os.lstat(target, dir_fd=folder).st_mode):
                raise ValueError(_no_target(entry))
            os.link(target, name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError as error:
            raise ValueError(_no_target(entry)) from error
        finally:
            os.close(folder)


def make_whiteout(folder: int, name: bytes) -> None:
    """Hide what lower layers have of this name in an open directory, which has nothing there."""
    os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)


def make_opaque(folder: int) -> None:
    """Hide what lower layers have in an open directory."""
    os.setxattr(folder, OPAQUE, b"y")


_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@contextlib.contextmanager
def _refusals(path: bytes) -> Iterator[None]:
    """Where a member cannot be is the archive's fault; all else is the file system's."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_FOLDER or isinstance(error, FileExistsError):
            raise ValueError(f"{show(path)} has no directory to be in") from error
        if error.errno in (errno.EXDEV, errno.ENAMETOOLONG):
            raise ValueError(f"{show(path)} leads out or is too long") from error
        raise


def _no_target(entry: Entry) -> str:
    return f"the hard link {show(entry.path)} names {show(entry.target)}, which is no file here"
