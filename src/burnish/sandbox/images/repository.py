"""The directory of an image store: whatever is in it is whole, whoever was killed when.

    lock            held (flock) while names or trees change hands
    names/<name>.json
    trees/<64 digits>/{tree.json, rootfs/}      complete as soon as they have their name
    leases/<64 digits>                          flock shared by users of a tree
    staging/<random>, <random>.lock             work in progress: alive while its lock is held

Locks are the kernel's, so a killed process holds none. Every change sweeps what killed ones left.
"""

import contextlib
import ctypes
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from burnish.core.disk import full_disk_is_one_line, write_atomically
from burnish.core.errors import UserError
from burnish.sandbox.archive.beneath import FOLDER
from burnish.sandbox.archive.removal import remove_tree
from burnish.sandbox.images.manifest import NameRecord, TreeRecord, read_record

_PREFIX = "sha256:"
_SUFFIX = ".json"
_LOCK = ".lock"


class Repository:
    """Names and trees on disk."""

    def __init__(self, root: Path) -> None:
        """Open or make the directory.

        Raises:
            UserError: it cannot be used.
        """
        self.root = root.absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for name in ("names", "trees", "leases", "staging"):
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the image store {root} cannot be made: {error.strerror}.",
                fix="give another directory.",
            ) from error

    def names(self) -> list[str]:
        """All names, sorted."""
        files = (self.root / "names").iterdir()
        return sorted(path.name.removesuffix(_SUFFIX) for path in files if _is_name(path.name))

    def read_name(self, name: str) -> NameRecord:
        """What a name stands for.

        Raises:
            FileNotFoundError: nothing.
        """
        record = read_record(self.root / "names" / (name + _SUFFIX), NameRecord)
        assert isinstance(record, NameRecord)
        return record

    def read_tree(self, digest: str) -> TreeRecord:
        """What is known of a tree.

        Raises:
            FileNotFoundError: it is not there.
        """
        record = read_record(self.tree(digest) / "tree.json", TreeRecord)
        assert isinstance(record, TreeRecord)
        return record

    def tree(self, digest: str) -> Path:
        """The directory of a tree."""
        return self.root / "trees" / digest.removeprefix(_PREFIX)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory for work in progress; gone afterwards, or at the next change if killed."""
        self._clean_staging()
        path = self.root / "staging" / secrets.token_hex(12)
        # The lock comes first and goes last: whoever finds the directory without one removes it.
        lock = _flock(_lock_of(path), fcntl.LOCK_EX)
        try:
            with full_disk_is_one_line(self.root):
                path.mkdir(mode=0o700)
                yield path
        finally:
            _remove(path)
            _lock_of(path).unlink()
            os.close(lock)

    def commit(self, stage: Path, tree: TreeRecord, name: NameRecord) -> None:
        """Give `stage / "rootfs"` its place, unless an equal tree is there, and name it.

        Two processes that add one name: the later wins, and both trees were whole all the time.
        """
        write_atomically(stage / "tree.json", msgspec.json.encode(tree))
        _sync_file_system(stage)
        with self.locked():
            if not self.tree(tree.digest).exists():
                whole = stage / "whole"
                whole.mkdir(mode=0o700)
                for part in ("rootfs", "tree.json"):
                    os.rename(stage / part, whole / part)
                os.rename(whole, self.tree(tree.digest))
            path = self.root / "names" / (name.name + _SUFFIX)
            write_atomically(path, msgspec.json.encode(name))
            self._set_aside()
        self._clean_staging()

    def remove_name(self, name: str) -> None:
        """Forget a name, and its tree if no other name has it and nobody uses it.

        Raises:
            FileNotFoundError: no such name.
            UserError: the tree is in use, and this is its last name.
        """
        with self.locked():
            digest = self.read_name(name).digest
            last = digest not in self._wanted(but=name)
            if last and self._is_leased(digest):
                raise UserError(
                    f"image {name} is in use by a running pool.", fix="stop it, then try again."
                )
            (self.root / "names" / (name + _SUFFIX)).unlink()
            self._set_aside()
        self._clean_staging()

    @contextlib.contextmanager
    def lease(self, digest: str) -> Iterator[None]:
        """Keep a tree while it is used.

        Raises:
            FileNotFoundError: it is not there.
        """
        with self.locked():
            self.read_tree(digest)
            descriptor = _flock(self._lease_path(digest), fcntl.LOCK_SH)
        try:
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes names and trees meanwhile. Held for moments only."""
        descriptor = _flock(self.root / "lock", fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    def _wanted(self, but: str = "") -> set[str]:
        return {self.read_name(name).digest for name in self.names() if name != but}

    def _lease_path(self, digest: str) -> Path:
        return self.root / "leases" / digest.removeprefix(_PREFIX)

    def _is_leased(self, digest: str) -> bool:
        descriptor = _try_flock(self._lease_path(digest))
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def _set_aside(self) -> None:
        """Move trees that nothing needs out of the way. Call with the lock held."""
        wanted = self._wanted()
        for path in (self.root / "trees").iterdir():
            digest = _PREFIX + path.name
            if digest not in wanted and not self._is_leased(digest):
                # A tree is whole or absent: it loses its name before it loses its first file.
                os.rename(path, self.root / "staging" / f"old-{secrets.token_hex(12)}")
                self._lease_path(digest).unlink(missing_ok=True)
        for path in (self.root / "names").iterdir():
            if not _is_name(path.name):
                path.unlink()

    def _clean_staging(self) -> None:
        """Remove what nobody works on any more."""
        for name in os.listdir(self.root / "staging"):
            path = self.root / "staging" / name.removesuffix(_LOCK)
            descriptor = _try_flock(_lock_of(path))
            if descriptor is not None:
                try:
                    _remove(path)
                    _lock_of(path).unlink(missing_ok=True)
                finally:
                    os.close(descriptor)


def _is_name(name: str) -> bool:
    return name.endswith(_SUFFIX) and not name.startswith(".")


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _sync_file_system(path: Path) -> None:
    """A tree that has its name must be whole after a power cut too; one call for all its files."""
    descriptor = os.open(path, FOLDER)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    parent = os.open(path.parent, FOLDER)
    try:
        remove_tree(parent, os.fsencode(path.name))
    finally:
        os.close(parent)


def _flock(path: Path, kind: int) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether a lock is on the file that others will find: one may go between open and flock."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _try_flock(path: Path) -> int | None:
    """The lock, or None if somebody has it."""
    try:
        return _flock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
