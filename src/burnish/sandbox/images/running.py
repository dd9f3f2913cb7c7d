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


def image_user(image: ImageRoot) -> ImageUser:
    """As container engines read it: NAME or UID, and after a colon GROUP or GID; else root.

    Raises:
        UserError: the image names somebody whom it does not have.
    """
    if not image.user:
        return ImageUser(0, 0)
    user, _, group = image.user.partition(":")
    gid = 0
    if not user.isdecimal():
        fields = _find(image, "passwd", user, 4)
        uid, gid = int(fields[2]), int(fields[3])
    else:
        uid = int(user)
    if group.isdecimal():
        gid = int(group)
    elif group:
        gid = int(_find(image, "group", group, 3)[2])
    if max(uid, gid) > _MAX_ID:
        raise UserError(
            f"image {image.name} runs as user {image.user[:100]!r}, a number that is none.",
            fix=f"burnish sandbox image add {image.name} PATH, of an image that is whole",
        )
    return ImageUser(uid, gid)


def _find(image: ImageRoot, table: str, name: str, num_fields: int) -> list[str]:
    """The line of a name in a table of the image; the fields from the third on are numbers."""
    for line in _read(image.root, table).splitlines():
        fields = line.split(":")
        numbers = fields[2:num_fields]
        whole = len(fields) >= num_fields and all(number.isdecimal() for number in numbers)
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
