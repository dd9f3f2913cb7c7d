"""Records of the image store, and the image that it hands out."""

import re
from pathlib import Path

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Record

VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")


class Image(Record, frozen=True, kw_only=True):
    """A root filesystem that is there."""

    name: str
    """What it was asked for as."""
    digest: str
    """`sha256:...` of its tree."""
    root: Path
    """The directory; never write to it."""
    env: dict[str, str]
    """Variables that its programs expect."""
    workdir: str
    """Where its programs expect to start; empty if it does not say."""
    user: str
    """As whom its programs expect to run, `name` or `uid:gid`; empty if it does not say."""


class Settings(Record, frozen=True, kw_only=True):
    """What an image says about how to run it."""

    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables."""
    workdir: str = ""
    """Directory to start in."""
    user: str = ""
    """User to run as."""


class NameRecord(Record, frozen=True, kw_only=True):
    """`names/<name>.json`."""

    version: int
    """Of this format."""
    name: str
    """The name."""
    digest: str
    """What it stands for."""
    settings: Settings
    """How to run it."""
    source: str
    """Where it came from, for people."""


class TreeRecord(Record, frozen=True, kw_only=True):
    """`trees/<digits>/tree.json`."""

    version: int
    """Of this format."""
    digest: str
    """Of the tree."""
    owner_uid: int | None
    """The ordinary user that owns all of it; None if owners were kept."""
    num_entries: int
    """Names in it."""
    data_bytes: int
    """Content of its files."""
    num_dropped: int
    """Devices, pipes and sockets that were left out."""


class ImageSummary(Record, frozen=True, kw_only=True):
    """One line of a listing."""

    name: str
    """The name."""
    digest: str
    """What it stands for."""
    source: str
    """Where it came from."""
    num_entries: int
    """Names in it."""
    data_bytes: int
    """Content of its files; shared with other names of the same digest."""


def check_name(name: str) -> str:
    """A name that may be given to an image.

    Raises:
        UserError: it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name[:140]!r} cannot name an image.",
            fix="use up to 128 letters, digits and . _ : + -, the first a letter or digit.",
        )
    return name


def read_record(path: Path, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Decode a record of this version.

    Raises:
        FileNotFoundError: it is not there.
        UserError: it is damaged or of another version.
    """
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version == VERSION:
            return msgspec.json.decode(data, type=kind)
        what = f"has version {version}; this Burnish reads {VERSION}"
    except msgspec.MsgspecError as error:
        what = f"is damaged: {error}"
    raise UserError(
        f"{path} {what}.", fix="remove the image store's directory and add the images again."
    )


class _Versioned(msgspec.Struct):
    version: int
