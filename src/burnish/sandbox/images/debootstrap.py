"""A minimal Debian or Ubuntu as a tar, by mmdebstrap or debootstrap."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from burnish.core.errors import UserError

_SUITE = re.compile(r"[a-z][a-z0-9-]{0,40}")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{0,100}")
_MIRROR = re.compile(r"(https?|file|copy)://[^\s'\"]{1,300}|")
_LAST_BYTES = 400
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin"


def bootstrap(stage: Path, suite: str, packages: Sequence[str], mirror: str | None) -> Path:
    """Install a suite; returns a directory (from debootstrap) or a tar (from mmdebstrap).

    Needs the network, and minutes.

    Raises:
        UserError: bad names, neither tool is installed, or the tool failed.
    """
    _check(suite, packages, mirror or "")
    tool = shutil.which("mmdebstrap")
    included = [f"--include={','.join(packages)}"] if packages else []
    places = [mirror] if mirror else []
    if tool is not None:
        result = stage / "image.tar"
        mode = "root" if os.geteuid() == 0 else "unshare"
        command = [tool, "--variant=minbase", f"--mode={mode}", *included, suite, str(result)]
        _run([*command, *places], suite)
        return result
    tool = shutil.which("debootstrap", path=_SYSTEM_PATH)
    if tool is None or os.geteuid() != 0:
        raise UserError(
            "images of a suite need mmdebstrap (or, as root, debootstrap).",
            fix="sudo apt-get install mmdebstrap",
        )
    result = stage / "bootstrapped"
    _run([tool, "--variant=minbase", *included, suite, str(result), *places], suite)
    return result


def _check(suite: str, packages: Sequence[str], mirror: str) -> None:
    if not _SUITE.fullmatch(suite):
        raise UserError(f"{suite[:100]!r} is not a suite.", fix="name one, such as bookworm.")
    if wrong := [name for name in packages if not _PACKAGE.fullmatch(name)]:
        raise UserError(f"{wrong[0][:100]!r} is not a package.", fix="name packages of Debian.")
    if not _MIRROR.fullmatch(mirror):
        raise UserError(
            f"{mirror[:100]!r} is not a mirror.",
            fix="give a URL such as http://deb.debian.org/debian.",
        )


def _run(command: list[str], suite: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        tail = " ".join(done.stdout[-_LAST_BYTES:].decode("utf-8", "replace").split())
        raise UserError(
            f"{command[0]} could not make {suite}: {tail or f'exit status {done.returncode}'}.",
            fix="check the suite, the packages and the mirror; the network must reach it.",
        )
