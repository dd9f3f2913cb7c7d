"""What an image says about how to run it: checked once, when its helper is started."""

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.sandbox.archive.beneath import FOLDER, PARENT, open_beneath
from burnish.sandbox.commands import WORK
from burnish.sandbox.images.base import ImageRoot
from burnish.sandbox.native.client import machine_problem
from burnish.sandbox.native.identities import Identities

_MAX_TABLE_BYTES = 2**20
# Every box has these, whatever its image holds.
_ALWAYS_THERE = (WORK, "/tmp")


# What says that the machine is busy or bounded, not that an image is broken.
_OUT_OF = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EUSERS)


class JobUser(NamedTuple):
    """Whom commands run as, unless they install packages."""

    uid: int
    gid: int


def job_user(image: ImageRoot | None, ids: Identities) -> JobUser:
    """Nobody for the host's programs; for an image whom it names, else root without powers.

    Raises:
        UserError: the image names nobody whom it has, or an id that boxes do not have here.
    """
    if image is None:
        return JobUser(ids.nobody, ids.nobody)
    user = _look_up(image)
    last = max(0, ids.num_ids - 2)
    if max(user) > last:
        raise UserError(
            f"image {image.name} runs as user {user.uid}:{user.gid}, boxes have the ids 0 to "
            f"{last} here.",
            fix="give this user a range in /etc/subuid and /etc/subgid and install newuidmap "
            "(package uidmap), or use an image that runs as root",
        )
    return user


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


def is_machines(error: OSError) -> bool:
    """Whether this machine is out of something."""
    return error.errno in _OUT_OF


def refusal_of(name: str, number: int, stage: str) -> UserError:
    """What it means that a helper could not open this image."""
    error = OSError(number, os.strerror(number))
    if is_machines(error):
        return machine_problem(number, stage)
    return image_problem(name, f"{stage}: {error.strerror}")


def image_problem(name: str, what: str) -> UserError:
    """An image is not what it should be."""
    return UserError(
        f"image {name} cannot be used: {what}.",
        fix=f"see whether `burnish sandbox image verify {name}` finds it whole, or add it again",
    )


def _look_up(image: ImageRoot) -> JobUser:
    """As container engines read it: NAME or UID, and after a colon GROUP or GID."""
    if not image.user:
        return JobUser(0, 0)
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
    return JobUser(uid, gid)


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
