"""Images by name, in one directory: add, resolve, lease, list, verify, remove."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from burnish.core.config import Config
from burnish.core.errors import UserError
from burnish.sandbox.archive.beneath import FOLDER
from burnish.sandbox.archive.compression import open_archive
from burnish.sandbox.archive.digest import tree_digest
from burnish.sandbox.archive.entry import ArchiveLimits
from burnish.sandbox.images.debootstrap import bootstrap
from burnish.sandbox.images.layout import Layout
from burnish.sandbox.images.manifest import (
    VERSION,
    Image,
    ImageSummary,
    NameRecord,
    Settings,
    TreeRecord,
    check_name,
)
from burnish.sandbox.images.oci import unpack_image
from burnish.sandbox.images.repository import Repository
from burnish.sandbox.images.unpacking import Unpacked, copy_directory, unpack_tar


class ImagesConfig(Config):
    """Where root filesystems for boxes are kept."""

    directory: Path | None = None
    """None: `burnish/images` below `$XDG_DATA_HOME` (`~/.local/share`)."""
    max_image_bytes: int = Field(default=32 * 2**30, ge=2**20)
    """Larger images are refused."""
    max_image_files: int = Field(default=2_000_000, ge=1)
    """Images with more names are refused."""

    def open(self) -> "ImageStore":
        """The store.

        Raises:
            UserError: the directory cannot be used.
        """
        limits = ArchiveLimits(num_entries=self.max_image_files, data_bytes=self.max_image_bytes)
        return ImageStore(self.directory or default_directory(), limits)


def default_directory() -> Path:
    """Where images are kept if nothing else is said."""
    given = os.environ.get("XDG_DATA_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "share"
    return base / "burnish" / "images"


class ImageStore:
    """Root filesystems, each kept once by content. Any number of processes may share one.

    Adding under a name that exists gives the name to the new image; who uses the old one keeps it.
    """

    def __init__(self, root: Path, limits: ArchiveLimits | None = None) -> None:
        """Open the store in a directory, which is made if it is missing.

        Raises:
            UserError: it cannot be used.
        """
        self._repository = Repository(root)
        self._limits = limits or ArchiveLimits()

    def add_directory(self, name: str, path: Path) -> Image:
        """Copy a root filesystem from a directory.

        Raises:
            UserError: not a directory, not readable, too large, or it has mounts in it.
        """
        check_name(name)
        with self._repository.staging() as stage:
            with _blame(path), _new_tree(stage) as tree_fd:
                unpacked = copy_directory(self._check_source(path), tree_fd, self._limits)
            return self._commit(name, stage, unpacked, Settings(), str(path))

    def add_tar(self, name: str, path: Path) -> Image:
        """Unpack a root filesystem from a tar, plain or compressed (gzip, bzip2, xz, zstd).

        Raises:
            UserError: not readable, damaged, hostile or too large.
        """
        check_name(name)
        with self._repository.staging() as stage:
            with _blame(path), _new_tree(stage) as tree_fd, open_archive(path) as stream:
                unpacked = unpack_tar(stream, tree_fd, self._limits)
            return self._commit(name, stage, unpacked, Settings(), str(path))

    def add_oci(self, name: str, layout_path: Path, tag: str | None = None) -> Image:
        """Unpack an image from an OCI layout, a directory or a tar of one.

        Args:
            name: what to call it.
            layout_path: such as `skopeo copy docker://IMAGE oci:DIRECTORY:TAG` makes.
            tag: which image of the layout; None: the only one, or `latest`.

        Raises:
            UserError: not a layout, no such tag, for another machine, damaged, hostile, too large.
        """
        check_name(name)
        with self._repository.staging() as stage:
            with _blame(layout_path):
                layout = self._open_layout(layout_path, stage)
                with _new_tree(stage) as tree_fd:
                    image = unpack_image(layout, tag, tree_fd, self._limits)
            source = f"{layout_path}:{tag}" if tag else str(layout_path)
            return self._commit(name, stage, image.unpacked, image.settings, source)

    def add_debootstrap(
        self, name: str, suite: str, packages: Sequence[str] = (), mirror: str | None = None
    ) -> Image:
        """Install a minimal Debian or Ubuntu. Needs the network, and minutes.

        Args:
            name: what to call it.
            suite: such as `bookworm`.
            packages: what to install beyond the minimum.
            mirror: where from; None: the tool's default.

        Raises:
            UserError: bad names, no tool, or the tool failed.
        """
        check_name(name)
        # Not in the staging directory: the tool may work as another user, who cannot enter it.
        with self._repository.staging() as stage, tempfile.TemporaryDirectory() as work:
            made = bootstrap(Path(work), suite, packages, mirror)
            with _blame(made), _new_tree(stage) as tree_fd:
                if made.is_dir():
                    unpacked = copy_directory(made, tree_fd, self._limits)
                else:
                    with open_archive(made) as stream:
                        unpacked = unpack_tar(stream, tree_fd, self._limits)
            source = " ".join(("debootstrap", suite, *packages))
            return self._commit(name, stage, unpacked, Settings(), source)

    def resolve(self, name: str) -> Image:
        """The image of a name. Use `lease` where it must stay.

        Raises:
            UserError: no such image.
        """
        try:
            record = self._repository.read_name(check_name(name))
            self._repository.read_tree(record.digest)
        except FileNotFoundError as error:
            raise self._unknown(name) from error
        return self._image(record)

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Image]:
        """An image that nobody can remove while the context lasts; it ends with the process.

        Raises:
            UserError: no such image.
        """
        with contextlib.ExitStack() as stack:
            image = self.resolve(name)
            try:
                stack.enter_context(self._repository.lease(image.digest))
            except FileNotFoundError as error:
                raise self._unknown(name) from error
            yield image

    def list(self) -> tuple[ImageSummary, ...]:
        """All images by name."""
        found = []
        for name in self._repository.names():
            # Another process may remove it while we look.
            with contextlib.suppress(FileNotFoundError):
                record = self._repository.read_name(name)
                tree = self._repository.read_tree(record.digest)
                summary = ImageSummary(
                    name=name,
                    digest=record.digest,
                    source=record.source,
                    num_entries=tree.num_entries,
                    data_bytes=tree.data_bytes,
                )
                found.append(summary)
        return tuple(found)

    def remove(self, name: str) -> None:
        """Forget a name; its files go with the last name that has them.

        Raises:
            UserError: no such image, or a running pool uses it.
        """
        try:
            self._repository.remove_name(check_name(name))
        except FileNotFoundError as error:
            raise self._unknown(name) from error

    def verify(self, name: str) -> bool:
        """Read all of an image again: whether it is what its digest says.

        Raises:
            UserError: no such image.
        """
        with self.lease(name) as image:
            tree = self._repository.read_tree(image.digest)
            descriptor = os.open(image.root, FOLDER)
            try:
                uid_base = 0 if tree.owner_uid is None else None
                return tree_digest([descriptor], uid_base, overlay=False) == image.digest
            finally:
                os.close(descriptor)

    def _commit(
        self, name: str, stage: Path, unpacked: Unpacked, settings: Settings, source: str
    ) -> Image:
        owner = None if os.geteuid() == 0 else os.geteuid()
        descriptor = os.open(stage / "rootfs", FOLDER)
        try:
            uid_base = 0 if owner is None else None
            digest = tree_digest([descriptor], uid_base, overlay=False)
        finally:
            os.close(descriptor)
        tree = TreeRecord(
            version=VERSION,
            digest=digest,
            owner_uid=owner,
            num_entries=unpacked.num_entries,
            data_bytes=unpacked.data_bytes,
            num_dropped=unpacked.num_dropped,
        )
        record = NameRecord(
            version=VERSION,
            name=name,
            digest=digest,
            settings=settings,
            source=os.fsencode(source).decode("utf-8", "replace"),
        )
        self._repository.commit(stage, tree, record)
        # Not what the name means now: another process may have given it to an image of its own.
        return self._image(record)

    def _image(self, record: NameRecord) -> Image:
        return Image(
            name=record.name,
            digest=record.digest,
            root=self._repository.tree(record.digest) / "rootfs",
            env=record.settings.env,
            workdir=record.settings.workdir,
            user=record.settings.user,
        )

    def _check_source(self, path: Path) -> Path:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory.", fix="give the root of a file system.")
        if self._repository.root.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"{path} holds the image store itself.", fix="keep images in another directory."
            )
        return path

    def _open_layout(self, path: Path, stage: Path) -> Layout:
        if path.is_dir():
            return Layout(path)
        unpacked = stage / "layout"
        unpacked.mkdir()
        descriptor = os.open(unpacked, FOLDER)
        try:
            with open_archive(path) as stream:
                unpack_tar(stream, descriptor, self._limits)
        finally:
            os.close(descriptor)
        return Layout(unpacked)

    def _unknown(self, name: str) -> UserError:
        known = ", ".join(self._repository.names()[:20]) or "(none)"
        return UserError(
            f"there is no image {name!r} in {self._repository.root}; there is: {known}.",
            fix=f"burnish sandbox image add {name} PATH",
        )


@contextlib.contextmanager
def _new_tree(stage: Path) -> Iterator[int]:
    path = stage / "rootfs"
    path.mkdir()
    path.chmod(0o755)
    descriptor = os.open(path, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _blame(path: Path) -> Iterator[None]:
    """What is wrong with a source, in one line."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}.", fix="use an archive that you trust.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # The store's disk, which `staging` names.
            raise
        raise UserError(
            f"{path}: {error.strerror} ({os.fsdecode(error.filename or '')}).",
            fix="make it readable, unmount what is mounted in it, and leave it alone meanwhile.",
        ) from error
