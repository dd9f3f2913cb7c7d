"""What every command in a box starts with, on every backend."""

import re
from collections.abc import Mapping

from burnish.sandbox.files import UNSPEAKABLE

INSIDE_ID = 65534
"""User and group inside the box: `nobody`, which owns nothing on the host."""
HOSTNAME = "box"
WORK = "/work"

BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}

# One variable may have 128 KiB on Linux, and four bytes are the most that a character takes.
_MAX_ENV_BYTES = 64 * 2**10


def check_argv(argv: tuple[str, ...], env: Mapping[str, str], cwd: str | None = None) -> None:
    """Refuse what no system could run.

    Raises:
        ValueError: an empty command, a NUL byte, a bad variable name, a relative `cwd`, what no
            bytes can be made from.
    """
    if cwd is not None and (not cwd.startswith("/") or "\0" in cwd):
        raise ValueError(f"cwd must be an absolute path, got {cwd[:100]!r}")
    if not argv or not argv[0]:
        raise ValueError("argv must name a program: it is empty")
    for what, words in (("argv", argv), ("env", env.values()), ("cwd", (cwd or "",))):
        if any(UNSPEAKABLE.search(word) for word in words):
            raise ValueError(f"{what} has a lone surrogate that stands for no byte")
    if any("\0" in arg for arg in argv):
        raise ValueError("argv must not contain NUL bytes")
    if sum(len(key) + 4 * len(value) for key, value in env.items()) > _MAX_ENV_BYTES:
        raise ValueError(f"env must be below {_MAX_ENV_BYTES} bytes: write a file instead")
    for key, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
            raise ValueError(f"env has a bad variable: {key!r}")
