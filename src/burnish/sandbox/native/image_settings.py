"""What an image says about how to run it: checked once, when its helper is started."""

import errno
import os

from burnish.core.errors import UserError
from burnish.sandbox.images.base import ImageRoot
from burnish.sandbox.images.running import ImageUser, image_user
from burnish.sandbox.native.client import machine_problem
from burnish.sandbox.native.identities import Identities

# What says that the machine is busy or bounded, not that an image is broken.
_OUT_OF = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EUSERS)


def job_user(image: ImageRoot | None, ids: Identities) -> ImageUser:
    """Nobody for the host's programs; for an image whom it names, else root without powers.

    Raises:
        UserError: the image names nobody whom it has, or an id that boxes do not have here.
    """
    if image is None:
        return ImageUser(ids.nobody, ids.nobody)
    user = image_user(image)
    last = max(0, ids.num_ids - 2)
    if max(user) > last:
        raise UserError(
            f"image {image.name} runs as user {user.uid}:{user.gid}, boxes have the ids 0 to "
            f"{last} here.",
            fix="give this user a range in /etc/subuid and /etc/subgid and install newuidmap "
            "(package uidmap), or use an image that runs as root",
        )
    return user


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
