"""The command lines of podman: an engine, which keeps records of its own.

It runs in the keeper's namespaces, as root of them: its store lies in the keeper's memory, beside
nobody else's, and vanishes with it. An ordinary user's keeper is started by `podman unshare`, which
brings the user ids that podman was given, also where nobody else may make a user namespace.
"""

import subprocess
from pathlib import Path

from burnish.core.errors import UserError, one_line
from burnish.sandbox.engine.options import container_options
from burnish.sandbox.keeper.namespace import mount_tmpfs
from burnish.sandbox.oci.runtime import Runtime
from burnish.sandbox.oci.spec import BoxSpec

SECCOMP_FILE = "seccomp.json"
MONITOR_FILE = "monitor"
"""Where the pid of podman's own monitor is written."""
_UNSHARE_DEADLINE_S = 60.0
_STORE = "podman"
_STORE_BYTES = 256 * 2**20
_LOCKS_BYTES = 16 * 2**20
_ROOT_FILES = ("etc/hostname", "run/.containerenv")


def unshare_command(runtime: Runtime) -> tuple[str, ...]:
    """What starts an ordinary user's keeper.

    Raises:
        UserError: podman cannot do it for this user.
    """
    command = (runtime.path, "unshare")
    try:
        subprocess.run(
            [*command, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_UNSHARE_DEADLINE_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
        said = " ".join(words.decode("utf-8", "replace").split())[:300]
        raise UserError(
            f"podman cannot run for this user: {said or one_line(error)}.",
            fix="see that `podman unshare true` works: it needs a home directory, the package "
            "uidmap, and a range for you in /etc/subuid and /etc/subgid",
        ) from error
    return command


def make_store(base: Path) -> None:
    """A place for its records, and one for its locks, which have a fixed name in `/dev/shm`."""
    store = base / _STORE
    store.mkdir(mode=0o711)
    mount_tmpfs(str(store), size_bytes=_STORE_BYTES, mode=0o711)
    mount_tmpfs("/dev/shm", size_bytes=_LOCKS_BYTES, mode=0o1777)


def add_mount_points(root: Path) -> None:
    """What podman mounts something on, and would make if it could write there.

    Args:
        root: of a file system of ours, in which `/etc` and `/run` exist.
    """
    (root / "sys").mkdir(mode=0o755)
    for name in _ROOT_FILES:
        (root / name).touch(mode=0o644)
    (root / "etc" / "mtab").symlink_to("/proc/mounts")


def run_command(
    runtime: Runtime, base: Path, bundle: Path, box: str, spec: BoxSpec, *, own_ids: bool
) -> list[str]:
    """Runs a container in the foreground; its status is the container's.

    Args:
        runtime: podman.
        base: of the keeper.
        bundle: directory with `seccomp.json`.
        box: name of the container.
        spec: what it is.
        own_ids: the box has user ids of its own.
    """
    options = [
        "--rm", "--cgroups=disabled", "--read-only-tmpfs=false", "--passwd=false", "--no-hosts",
        "--unsetenv-all", "--systemd=false", f"--pidfile={bundle}/pid",
        f"--conmon-pidfile={bundle}/{MONITOR_FILE}",
    ]  # fmt: skip
    for option, maps in (("--uidmap", spec.uid_map), ("--gidmap", spec.gid_map)):
        for mapping in maps if own_ids else ():
            options += [option, f"{mapping.container_id}:{mapping.host_id}:{mapping.size}"]
    for name, value in spec.annotations.items():
        options += ["--annotation", f"{name}={value}"]
    return [
        *_podman(runtime, base),
        "run",
        *options,
        *container_options(spec, box, bundle / SECCOMP_FILE),
        "--rootfs",
        spec.root,
        *spec.args,
    ]


def remove_command(runtime: Runtime, base: Path, box: str) -> list[str]:
    """Ends and forgets a container, if there is one."""
    return [*_podman(runtime, base), "rm", "--force", "--ignore", "--time=0", box]


def _podman(runtime: Runtime, base: Path) -> list[str]:
    store = base / _STORE
    return [
        runtime.path, f"--root={store}/root", f"--runroot={store}/run", f"--tmpdir={store}/tmp",
        f"--runtime-flag=root={store}/runtime", "--cgroup-manager=cgroupfs",
        "--events-backend=none", "--log-level=error",
        # It stores no image here, and the driver for overlays leaves a mount behind.
        "--storage-driver=vfs",
    ]  # fmt: skip
