"""What boxes of each runtime can do on this host, as data."""

from burnish.core.boxes import Capabilities, Feature
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.keeper.capabilities import enforced, group_notes
from burnish.sandbox.oci.runtime import SENTRY_BYTES, FilterForm, Runtime, RuntimeName
from burnish.sandbox.oci.users import BoxUsers

# It reads ahead and from the host's cache whatever programs ask for, so that nobody could tell.
_NOT_GVISORS = frozenset({"read_bytes_per_s"})
_RELAY_NOTE = (
    "boxes with an allow-list need python3 in PATH, for a relay, and gVisor opens the one socket "
    "of that relay to them (--host-uds=open)"
)
_NO_RELAY_NOTE = (
    "no allow-list: it takes python3 below /usr, a runsc with --host-uds (December 2022 or newer) "
    "and a pool with a network"
)


def describe(
    runtime: Runtime,
    exact: Controllers | None,
    users: BoxUsers,
    *,
    rootless: bool,
    has_network: bool,
    without_processes: str = "",
) -> Capabilities:
    """What was found.

    `without_processes` says why this runtime, which could, does not save processes.
    """
    features = {Feature.IMAGES}
    if has_network:
        features.add(Feature.ALLOW_LIST)
    if runtime.name is RuntimeName.RUNC and not without_processes:
        features |= {Feature.BACKGROUND, Feature.PROCESSES}
    notes = [*_kernel_notes(runtime), *group_notes(exact)]
    if rootless:
        notes.append("not root: boxes run as your own user id, in their own namespaces")
    if users.inside.uid == 0:
        notes.append(
            f"{runtime.name} needs a user 0 in the box and you have one id only: programs see "
            "themselves as root there, without any capability"
        )
        if runtime.counted_whole:
            notes.append(
                "so the program owns `/dev`, files in memory that gVisor lets nobody make "
                "read-only: memory_bytes bounds what is written there, disk_bytes does not"
            )
    if runtime.has_own_network:
        notes.append(_RELAY_NOTE if has_network else _NO_RELAY_NOTE)
    if without_processes:
        notes.append(f"no processes are kept, nor part of snapshots: {without_processes}")
    return Capabilities(
        backend=runtime.backend,
        enforces=enforced(exact) - (_NOT_GVISORS if runtime.counted_whole else frozenset()),
        isolation=runtime.isolation,
        features=frozenset(features),
        seccomp=True,
        notes=tuple(notes),
    )


def _kernel_notes(runtime: Runtime) -> list[str]:
    if runtime.counted_whole:
        return [
            "a kernel in user space stands between the box and this machine's",
            f"memory is limited to memory_bytes + {SENTRY_BYTES // 2**20} MiB, which gVisor itself "
            "may use",
            "coreutils 9 needs gVisor of 2023 or newer: with the 2022 release `ls` and `stat` fail "
            "with `Invalid argument`",
            "processes are limited by gVisor's own RLIMIT_NPROC: a refused fork counts as exit, "
            "not as pids",
        ]
    notes = ["namespaces share the host's kernel: a kernel bug is a way out of the box"]
    if runtime.filter_form is FilterForm.NAMES:
        notes.append(
            "system calls are filtered by name: what is not listed does not exist (ENOSYS)"
        )
    return notes
