"""`burnish sandbox image`: root filesystems for boxes."""

import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.sandbox.images.manifest import Image

_JSON = Parameter(name="--json")


@dataclass(frozen=True, kw_only=True)
class Debian:
    """Flags of an image that is installed, not unpacked."""

    suite: str | None = None
    """Install a minimal Debian or Ubuntu instead, as bookworm; needs the network."""
    package: list[str] | None = None
    """With --suite: one more package; may be repeated."""
    mirror: str | None = None
    """With --suite: where to download from."""


def add(
    name: str,
    source: Path | None = None,
    /,
    *,
    tag: str | None = None,
    debian: Annotated[Debian, Parameter(name="*")] = Debian(),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Add an image. A name that exists stands for the new one from now on.

    Args:
        name: what to call it.
        source: directory of a root file system, tar of one, or OCI layout (directory or tar).
        tag: which image of an OCI layout.
        debian: another origin.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json

    image = _add(name, source, tag, debian)
    if as_json:
        write_json(image)
        return
    sys.stdout.write(f"{image.digest}\n")


def list_images(*, as_json: Annotated[bool, _JSON] = False) -> None:
    """List the images.

    Args:
        as_json: one JSON array.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.sandbox.images.store import ImagesConfig

    found = ImagesConfig().open().list()
    if as_json:
        write_json(found)
        return
    if not found:
        sys.stderr.write(
            "There are no images. burnish sandbox image add NAME DIRECTORY adds one.\n"
        )
        return
    rows = [
        (
            image.name,
            f"{image.data_bytes / 2**20:,.1f} MiB",
            f"{image.num_entries:,}",
            image.digest[:19],
            image.source,
        )
        for image in found
    ]
    people().print(table(("name", "size", "files", "digest", "source"), rows))


def remove(name: list[str], /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """Forget images; files go with the last name that has them.

    Args:
        name: names.
        as_json: one JSON array of the names.
    """
    from burnish.cli.console import write_json
    from burnish.sandbox.images.store import ImagesConfig

    if not name:
        raise UserError("there is no name.", fix="burnish sandbox image list")
    store = ImagesConfig().open()
    for each in name:
        store.remove(each)
    if as_json:
        write_json(name)


def verify(name: str, /, *, as_json: Annotated[bool, _JSON] = False) -> int:
    """Read an image again: is it still what its digest says? Exits with 1 if not.

    Args:
        name: of the image.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.sandbox.images.store import ImagesConfig

    store = ImagesConfig().open()
    sound = store.verify(name)
    if as_json:
        write_json({"name": name, "ok": sound})
    elif not sound:
        sys.stdout.write(f"{name} was changed: remove it, then add it again\n")
    return int(not sound)


def _add(name: str, source: Path | None, tag: str | None, debian: Debian) -> "Image":
    from burnish.core.disk import require_regular
    from burnish.sandbox.images.store import ImagesConfig

    fix = "burnish sandbox image add NAME DIRECTORY-OR-TAR, or --suite bookworm"
    if (source is None) == (debian.suite is None):
        raise UserError("an image comes from one place.", fix=fix)
    if debian.suite is None and (debian.package or debian.mirror):
        raise UserError("--package and --mirror go with --suite.", fix=fix)
    store = ImagesConfig().open()
    if debian.suite is not None:
        return store.add_debootstrap(name, debian.suite, debian.package or (), debian.mirror)
    assert source is not None
    if not source.exists():
        raise UserError(f"there is no {source}.", fix=fix)
    require_regular(source, fix)
    if not (any(source.iterdir()) if source.is_dir() else source.stat().st_size):
        raise UserError(f"{source} is empty: no program could run.", fix=fix)
    if tag is not None or _is_layout(source):
        return store.add_oci(name, source, tag)
    return store.add_directory(name, source) if source.is_dir() else store.add_tar(name, source)


def _is_layout(source: Path) -> bool:
    if source.is_dir():
        return (source / "oci-layout").is_file()
    try:
        # Tars of layouts are not compressed as a whole; their parts are.
        with tarfile.open(source, "r:") as tar:
            return any(entry.name.removeprefix("./") == "oci-layout" for entry in tar)
    except (tarfile.TarError, OSError, ValueError, ArithmeticError, LookupError):
        # Damage that `tarfile` does not expect either; our own reader says what it is.
        return False
