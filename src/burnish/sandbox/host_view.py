"""What boxes without an image of their own see of this host, and what the host must allow."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
OWN_PACKAGE = str(Path(__file__).parents[1])
"""Directory of `burnish` itself."""
PASSWD = "root:x:0:0::/nonexistent:/bin/false\nnobody:x:65534:65534::/work:/bin/sh\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"


class HostPath(NamedTuple):
    """A top-level directory of the host that programs need."""

    path: str
    """Such as `/bin`."""
    link: str | None
    """Target, if it is a symbolic link."""


def system_paths() -> tuple[HostPath, ...]:
    """The top-level directories that hold programs, as they are on this host."""
    found = []
    for path in _SYSTEM_PATHS:
        if os.path.islink(path):
            found.append(HostPath(path, os.readlink(path)))
        elif os.path.isdir(path):
            found.append(HostPath(path, None))
    return tuple(found)


def system_files() -> tuple[str, ...]:
    """What programs need besides, as far as it is on this host."""
    return tuple(path for path in _SYSTEM_FILES if os.path.exists(path))


def covered_paths() -> tuple[str, ...]:
    """Where a box has this host's files, or links to them, over whatever it stores itself."""
    return (*(entry.path for entry in system_paths()), *system_files())


def hidden_paths(search_path: Sequence[str], system: Sequence[HostPath]) -> tuple[str, ...]:
    """Where environments, their generators and so their answers lie in what a box sees.

    These are the directories of installed packages on our own search path, and this package itself.
    The standard library stays visible: it may be the one that code in the box runs on.
    """
    shown = [os.path.realpath(entry.path) + "/" for entry in system if entry.link is None]
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in search_path if path}):
        holds_packages = path.endswith(("/site-packages", "/dist-packages"))
        if not (holds_packages or path == os.path.realpath(OWN_PACKAGE)):
            continue
        covered = any(path.startswith(above + "/") for above in found)
        if path.startswith(tuple(shown)) and os.path.isdir(path) and not covered:
            found.append(path)
    return tuple(found)


def namespace_fix(number: int = 0) -> str:
    """The command that allows user namespaces here, as far as the host says what forbids them.

    Args:
        number: the errno of what failed, if it is known.
    """
    switches = (
        (
            "kernel/unprivileged_userns_clone",
            "0",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    )
    for name, bad, fix in switches:
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text(encoding="ascii").strip() == bad:
            return fix
    if number in (errno.ENOSPC, errno.EUSERS):
        return "end other sandboxes, or raise all of `sysctl user | grep max_.*_namespaces`"
    if number in (errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP):
        return "use Linux 5.14 or newer, with user namespaces, overlay and seccomp filters"
    return (
        "allow user namespaces; inside a container start it with "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    )


def groups_fix(systemd: Path = Path("/run/systemd/system")) -> str:
    """How to get exact limits, where there are no control groups for us.

    Args:
        systemd: exists where systemd runs the machine.
    """
    needed = "exact limits need root or a delegated control group"
    if os.geteuid() == 0 or not systemd.is_dir():
        return needed
    # A log-in's own group belongs to root; those of the user's manager belong to the user.
    return f"{needed} (systemd-run --user --scope COMMAND)"
