"""How a helper is started and what it is told."""

import os
import sys
from pathlib import Path
from typing import Literal

from burnish.core.errors import UserError
from burnish.sandbox.host_view import (
    GROUP,
    OWN_PACKAGE,
    PASSWD,
    hidden_paths,
    system_files,
    system_paths,
)
from burnish.sandbox.images.base import ImageRoot
from burnish.sandbox.interpreter import find_python
from burnish.sandbox.native.binary import find_helper
from burnish.sandbox.native.identities import Identities
from burnish.sandbox.native.protocol import VERSION
from burnish.sandbox.native.wire import Hello

FALLBACK = Path(__file__).parent / "fallback"
_START = (sys.executable, "-I", "-S", "-B", str(FALLBACK))
HelperKind = Literal["auto", "c", "python"]


def helper_command(kind: HelperKind) -> tuple[str, ...]:
    """The helper's command line, to which the number of its socket is added.

    Both begin in Python, which makes the place where boxes are built.

    Raises:
        UserError: the compiled one was asked for and is absent.
    """
    binary = None if kind == "python" else find_helper()
    if binary is not None:
        return (*_START, "--zygote", str(binary))
    if kind == "c":
        raise UserError(
            "the compiled helper of the native sandbox is not there.",
            fix='install gcc and burnish again, or set helper = "python"',
        )
    return (_interpreter(), "-I", "-S", "-B", str(FALLBACK))


def _interpreter() -> str:
    """Ours, or the system's where ours belongs to an ordinary user: see `binary.detached_copy`.

    Where there is no other, a box of this user with images can change the mode of the file.
    """
    system = find_python()
    if os.geteuid() == 0 or system is None or os.stat(sys.executable).st_uid != os.geteuid():
        return sys.executable
    return system


def hello_for(image: ImageRoot | None, ids: Identities, job_uid: int) -> Hello:
    """What a helper serves; no image: this host's own programs, read-only."""
    if image is not None:
        return Hello(VERSION, *ids, job_uid, str(image.root))
    system = system_paths()
    binds = [(entry.path, entry.path) for entry in system if entry.link is None]
    binds += [(path, path) for path in system_files()]
    return Hello(
        VERSION,
        *ids,
        job_uid,
        "",
        binds=tuple(binds),
        links=tuple((entry.path, entry.link) for entry in system if entry.link is not None),
        hidden=hidden_paths([*sys.path, OWN_PACKAGE], system),
        files=(("/etc/passwd", PASSWD), ("/etc/group", GROUP)),
    )
