"""Builds the command line of bubblewrap. Pure: the same input gives the same arguments."""

import re
import shlex
from collections.abc import Mapping
from enum import IntEnum

from burnish.core.records import Record
from burnish.sandbox.commands import BASE_ENV, HOSTNAME, INSIDE_ID, WORK
from burnish.sandbox.host_view import HostPath


class Fd(IntEnum):
    """Descriptors of bubblewrap and of the launcher in it. One digit each: shells know no more."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    GO = 3
    """The launcher waits for a line on it."""
    SCRIPT = 4
    """What it then runs."""
    STARTED = 5
    """Where it writes a byte just before it becomes the program."""
    ARGS = 6
    """Options of bubblewrap."""
    SECCOMP = 7
    """The filter."""
    INFO = 8
    """Where bubblewrap says who process 1 is."""
    BLOCK = 9
    """Until there is something to read, bubblewrap starts nothing."""


LAUNCHER = ("/bin/sh", "-c", f"read -r go <&{Fd.GO:d} && . /proc/self/fd/{Fd.SCRIPT:d}", "sh")
"""The command inside the box. Nothing but ours runs until the last word of the script."""


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
    hidden: tuple[str, ...]
    """Directories below `system` that must look empty."""
    empty: str
    """Host-side empty directory, shown in their place."""
    storage: str
    """Host-side directory with `work`, `tmp` and `shm`, on a file system of limited size."""


def parse_features(help_text: str, version_text: str) -> BwrapFeatures:
    """Read `bwrap --help` and `bwrap --version`."""
    options = frozenset(re.findall(r"^\s+(--[a-z0-9-]+)", help_text, re.MULTILINE))
    return BwrapFeatures(options=options, version=version_text.strip().removeprefix("bubblewrap "))


REQUIRED_OPTIONS = frozenset(
    {
        "--args", "--bind", "--block-fd", "--cap-drop", "--chdir", "--dev", "--die-with-parent",
        "--gid", "--hostname", "--info-fd", "--new-session", "--proc", "--remount-ro", "--ro-bind",
        "--seccomp", "--setenv", "--symlink", "--uid", "--unshare-all", "--unshare-user",
    }
)  # fmt: skip
"""Present since bubblewrap 0.4.0."""


def box_options(
    view: BoxView,
    features: BwrapFeatures,
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
    for path in view.hidden:
        options += ["--ro-bind", view.empty, path]
    for source, name in view.etc:
        options += ["--ro-bind", source, f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    # bubblewrap's own /dev and / are tmpfs of unlimited size that the box's user owns. What may be
    # written goes to the one file system with a size; the rest becomes read-only.
    for name, path in (("shm", "/dev/shm"), ("tmp", "/tmp"), ("work", WORK)):
        options += ["--bind", f"{view.storage}/{name}", path]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    options += ["--chdir", WORK]
    for key, value in BASE_ENV.items():
        options += ["--setenv", key, value]
    options += ["--seccomp", str(int(Fd.SECCOMP)), "--info-fd", str(int(Fd.INFO))]
    options += ["--block-fd", str(int(Fd.BLOCK))]
    return options


def encode_options(options: list[str]) -> bytes:
    """NUL-separated, as `--args` reads them. They never show in a process list."""
    assert not any("\0" in option for option in options)
    return b"".join(option.encode("utf-8", "surrogateescape") + b"\0" for option in options)


def launcher_script(
    argv: tuple[str, ...], env: Mapping[str, str], cwd: str, ulimits: list[str]
) -> bytes:
    """For the launcher: closes what is ours, sets limits, reports, becomes the program."""
    closing = " ".join(f"{fd:d}<&-" for fd in Fd if fd > Fd.STDERR and fd is not Fd.STARTED)
    words = [f"exec {closing}", *ulimits, "unset go PWD OLDPWD SHLVL _"]
    words += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    words += [f"echo s >&{Fd.STARTED:d}", f"exec {Fd.STARTED:d}>&-"]
    if cwd != WORK:
        # After the report: a directory that a program has removed is no failure of the box.
        words.append(f"{{ cd -- {shlex.quote(cwd)} || exit 127; }}")
    words.append(f"exec {shlex.join(argv)}")
    return " && ".join(words).encode("utf-8", "surrogateescape") + b"\n"
