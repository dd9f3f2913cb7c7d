"""What an image says about how to run it: looked up where the image lies, without trust."""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.sandbox.archive.beneath import FOLDER, PARENT, open_beneath
from burnish.sandbox.commands import WORK
from burnish.sandbox.images.base import ImageRoot

_MAX_TABLE_BYTES = 2**20
_MAX_ID = 2**32 - 2
_MAX_ID_DIGITS = len(str(_MAX_ID))
_MAX_USER_CHARS = 512
# Every box has these, whatever its image holds.
_ALWAYS_THERE = (WORK, "/tmp")


class ImageUser(NamedTuple):
    """Whom commands of an image run as."""

    uid: int
    gid: int


def check_workdir(image: ImageRoot | None) -> None:
    """Refuse an image whose commands could not start.

    Raises:
        UserError: its directory is not in it.
    """
    if image is None or not image.workdir:
        return
    path = os.path.normpath(image.workdir)
    if path in _ALWAYS_THERE:
        return
    if path.startswith("/"):
        try:
            os.close(_open(image.root, os.fsencode(path).strip(b"/"), PARENT))
        except (OSError, ValueError):
            pass
        else:
            return
    raise UserError(
        f"image {image.name} starts in {image.workdir[:200]!r}, a directory that it does not have.",
        fix=f"burnish sandbox image add {image.name} PATH, of an image that is whole",
    )


def check_user(user: str) -> None:
    """Refuse what no image can run as, whatever its tables say.

    Raises:
        ValueError: a number that is no id, or more than names have.
    """
    numbers = filter(_is_digits, user.split(":", 1))
    if len(user) > _MAX_USER_CHARS or not all(map(_is_id, numbers)):
        raise ValueError(f"it runs as user {user[:100]!r}, which nobody can be")


def image_user(image: ImageRoot) -> ImageUser:
    """As container engines read it: NAME or UID, and after a colon GROUP or GID; else root.

    Raises:
        UserError: the image names somebody whom it does not have.
    """
    if not image.user:
        return ImageUser(0, 0)
    user, _, group = image.user.partition(":")
    gid = 0
    if not _is_digits(user):
        fields = _find(image, "passwd", user, 4)
        uid, gid = int(fields[2]), int(fields[3])
    else:
        uid = _id(image, user)
    if _is_digits(group):
        gid = _id(image, group)
    elif group:
        gid = int(_find(image, "group", group, 3)[2])
    return ImageUser(uid, gid)


def _id(image: ImageRoot, digits: str) -> int:
    if _is_id(digits):
        return int(digits)
    raise UserError(
        f"image {image.name} runs as user {image.user[:100]!r}, a number that is none.",
        fix=f"burnish sandbox image add {image.name} PATH, of an image that is whole",
    )


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _is_id(text: str) -> bool:
    """Python itself refuses to read numbers of thousands of digits."""
    return _is_digits(text) and len(text) <= _MAX_ID_DIGITS and int(text) <= _MAX_ID


def _find(image: ImageRoot, table: str, name: str, num_fields: int) -> list[str]:
    """The line of a name in a table of the image; the fields from the third on are ids."""
    for line in _read(image.root, table).splitlines():
        fields = line.split(":")
        numbers = fields[2:num_fields]
        whole = len(fields) >= num_fields and all(map(_is_id, numbers))
        if whole and fields[0] == name:
            return fields
    raise UserError(
        f"image {image.name} runs as {image.user[:100]!r}, but its /etc/{table} has no {name!r}.",
        fix=f"burnish sandbox image add {image.name} PATH, of an image that is whole",
    )


def _read(root: Path, table: str) -> str:
    try:
        descriptor = _open(root, b"etc/" + table.encode(), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return file.read(_MAX_TABLE_BYTES).decode("utf-8", "replace")


def _open(root: Path, path: bytes, flags: int) -> int:
    """Links of the image lead to what is in it."""
    top = os.open(root, FOLDER)
    try:
        return open_beneath(top, path, flags, follow=True)
    finally:
        os.close(top)
