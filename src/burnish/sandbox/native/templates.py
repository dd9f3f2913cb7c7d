"""Templates of warm Python: which there may be, how they are started, what went wrong.

A template is a helper whose boxes are forks of the image's own interpreter; see `fallback`.
"""

import os
import re
import sys
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.sandbox.interpreter import PYTHON_FIX, find_python
from burnish.sandbox.native.launch import FALLBACK

_MODULE = re.compile(r"\w+(\.\w+)*")


class Template(NamedTuple):
    """What is imported, and by whom."""

    modules: tuple[str, ...]
    """Imported in this order."""
    site: bool = False
    """Site packages of the image are searched."""
    paths: tuple[str, ...] = ()
    """Directories of the image that are searched before all others."""


def check_template(template: Template) -> None:
    """Refuse what cannot be.

    Raises:
        UserError: names what is no module or no directory.
    """
    for name in template.modules:
        if not _MODULE.fullmatch(name):
            raise UserError(f"{name!r} is not the name of a module.", fix='such as "json"')
    for path in template.paths:
        if not path.startswith("/") or ":" in path or "\0" in path:
            raise UserError(
                f"{path!r} is not a directory of an image.", fix='such as "/opt/packages"'
            )


def template_command(template: Template, *, has_image: bool) -> tuple[str, ...]:
    """The command line, to which the number of the socket is added.

    Its first part is our own interpreter, which opens the image and then only waits.

    Raises:
        UserError: this host has no interpreter for boxes without an image.
    """
    interpreter = "python3" if has_image else find_python()
    if interpreter is None:
        raise UserError("this host has no Python for boxes without an image.", fix=PYTHON_FIX)
    return (
        # Not a link of a virtual environment: its files must stay visible.
        *(sys.executable, "-I", "-S", "-B", str(FALLBACK)),
        *("--template", interpreter, "site" if template.site else "no-site"),
        *(":".join(template.paths), *template.modules),
    )


def template_problem(number: int, stage: str) -> UserError:
    """What its refusal to start means."""
    return UserError(
        f"warm Python does not start: {stage} ({os.strerror(number)}).",
        fix="name modules that the image has and that start no threads (site = true searches its "
        "site packages), or use acquire instead of acquire_python",
    )


def host_pid(pidfd: int) -> int:
    """The process id here: a template counts in a pid namespace of its own."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    raise ProcessLookupError(f"descriptor {pidfd} is of no process")
