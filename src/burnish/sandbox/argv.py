"""Builds the command line of bubblewrap. Pure: the same input gives the same arguments."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from burnish.core.records import Record

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

_MAX_ENV_BYTES = 64 * 2**10
# One variable may have 128 KiB on Linux, and four bytes are the most that a character takes.

STARTED_FD = 3
"""The launcher writes one byte here and closes it before the program exists."""

# Runs inside the box before the program: nothing hostile has run yet, so what it says can be
# trusted. dash spells the process limit -p, bash -u (where -p is the pipe size and fails).
_LAUNCHER = '{ulimit}unset PWD OLDPWD SHLVL _; echo s >&3 && exec 3>&- && exec "$@"; exit 127'


class HostPath(NamedTuple):
    """A top-level directory of the host that programs need."""

    path: str
    """Such as `/bin`."""
    link: str | None
    """Target, if it is a symbolic link."""


class BwrapFeatures(Record, frozen=True, kw_only=True):
    """What the installed bubblewrap can do, read from its `--help`."""

    options: frozenset[str]
    """Long options, with the dashes."""
    version: str = ""
    """As printed."""

    def has(self, option: str) -> bool:
        """Whether the option exists."""
        return option in self.options


class BoxView(Record, frozen=True, kw_only=True):
    """What a box sees of the host."""

    system: tuple[HostPath, ...]
    """Read-only directories and links."""
    etc: tuple[tuple[str, str], ...]
    """(source, path below /etc) of read-only files and directories."""
    storage: str
    """Host-side directory with `work`, `tmp` and `shm`, on a file system of limited size."""


def parse_features(help_text: str, version_text: str) -> BwrapFeatures:
    """Read `bwrap --help` and `bwrap --version`."""
    options = frozenset(re.findall(r"^\s+(--[a-z0-9-]+)", help_text, re.MULTILINE))
    return BwrapFeatures(options=options, version=version_text.strip().removeprefix("bubblewrap "))


REQUIRED_OPTIONS = frozenset(
    {
        "--args", "--bind", "--cap-drop", "--chdir", "--dev", "--die-with-parent", "--gid",
        "--hostname", "--info-fd", "--new-session", "--proc", "--remount-ro", "--ro-bind",
        "--seccomp", "--setenv", "--symlink", "--uid", "--unshare-all", "--unshare-user",
    }
)  # fmt: skip
"""Present since bubblewrap 0.4.0."""


def box_options(
    view: BoxView,
    features: BwrapFeatures,
    env: Mapping[str, str],
    *,
    seccomp_fd: int,
    info_fd: int,
) -> list[str]:
    """Options for `bwrap --args`: everything but the command."""
    options = ["--unshare-all", "--unshare-user"]
    if features.has("--disable-userns"):
        options.append("--disable-userns")
    options += ["--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--hostname", HOSTNAME]
    options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for entry in view.system:
        if entry.link is not None:
            options += ["--symlink", entry.link, entry.path]
        else:
            options += ["--ro-bind", entry.path, entry.path]
    for source, name in view.etc:
        options += ["--ro-bind", source, f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    # bubblewrap's own /dev and / are tmpfs of unlimited size that the box's user owns. What may be
    # written goes to the one file system with a size; the rest becomes read-only.
    for name, path in (("shm", "/dev/shm"), ("tmp", "/tmp"), ("work", WORK)):
        options += ["--bind", f"{view.storage}/{name}", path]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    options += ["--chdir", WORK]
    for key, value in {**BASE_ENV, **env}.items():
        options += ["--setenv", key, value]
    options += ["--seccomp", str(seccomp_fd), "--info-fd", str(info_fd)]
    return options


def encode_options(options: list[str]) -> bytes:
    """NUL-separated, as `--args` reads them. They never show in a process list."""
    assert not any("\0" in option for option in options)
    return b"".join(option.encode("utf-8", "surrogateescape") + b"\0" for option in options)


def launcher(argv: tuple[str, ...], num_processes: int | None) -> list[str]:
    """The command inside the box: says that it started, limits processes, becomes the program."""
    ulimit = ""
    if num_processes is not None:
        n = num_processes
        ulimit = f"ulimit -p {n} 2>/dev/null || ulimit -u {n} 2>/dev/null || exit 126; "
    return ["/bin/sh", "-c", _LAUNCHER.format(ulimit=ulimit), "sh", *argv]


def check_argv(argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Refuse what no system could run.

    Raises:
        ValueError: an empty command, a NUL byte, a bad variable name.
    """
    if not argv or not argv[0]:
        raise ValueError("argv must name a program: it is empty")
    if any("\0" in arg for arg in argv):
        raise ValueError("argv must not contain NUL bytes")
    if sum(len(key) + 4 * len(value) for key, value in env.items()) > _MAX_ENV_BYTES:
        raise ValueError(f"env must be below {_MAX_ENV_BYTES} bytes: write a file instead")
    for key, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
            raise ValueError(f"env has a bad variable: {key!r}")
