"""What native boxes can do on this host: declared only after a box has shown it."""

import os
from pathlib import Path

from burnish.core.boxes import Capabilities, ExecResult, ExecStatus, Feature, Isolation
from burnish.core.errors import UserError
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.host_view import groups_fix, namespace_fix
from burnish.sandbox.interpreter import find_python
from burnish.sandbox.limits import group_enforced
from burnish.sandbox.native.identities import NUM_IDS, Identities
from burnish.sandbox.native.protocol import Ability

SELF_TEST = ("cat", "/proc/self/status")
_SELF_TEST_LINES = {
    "Seccomp:": "2",
    "NoNewPrivs:": "1",
    "CapEff:": "0" * 16,
    "CapBnd:": "0" * 16,
}
_ALWAYS = frozenset(
    {
        "wall_s", "cpu_s", "memory_bytes", "num_pids", "disk_bytes", "stdout_bytes", "num_files",
        "num_inodes", "shm_bytes",
    }
)  # fmt: skip
_FEATURES = frozenset(
    {Feature.SNAPSHOTS, Feature.BACKGROUND, Feature.PRIVILEGES, Feature.DETERMINISTIC}
)


def check_self_test(result: ExecResult) -> None:
    """Judge what `SELF_TEST` said in a box.

    Raises:
        UserError: boxes do not run here or would not hold.
    """
    if result.status is not ExecStatus.OK:
        detail = result.message or result.stderr.decode("utf-8", "replace").strip()[:300]
        raise UserError(
            f"the native sandbox cannot run a box here: {detail or result.status}.",
            fix=namespace_fix(),
        )
    seen = dict(line.split("\t", 1) for line in result.stdout.decode().splitlines() if "\t" in line)
    for name, wanted in _SELF_TEST_LINES.items():
        if seen.get(name) != wanted:
            raise UserError(
                f"a box runs with {name} {seen.get(name)} instead of {wanted}: it would not hold.",
                fix="use a kernel with seccomp filters and user namespaces",
            )


def describe(
    controllers: Controllers | None,
    ids: Identities,
    abilities: Ability,
    *,
    images: bool,
    network: bool,
    disk: Path | None = None,
) -> Capabilities:
    """Capabilities of a pool whose helper started.

    Args:
        controllers: control groups, if there are any.
        ids: user ids of boxes.
        abilities: what the helper found.
        images: somebody resolves names of images.
        network: somebody provides networks.
        disk: directory of what boxes write; None: that is in memory.
    """
    bases = controllers.bases if controllers else {}
    features = set(_FEATURES)
    if ids.num_ids < 3:
        features.discard(Feature.PRIVILEGES)
    if images:
        features.add(Feature.IMAGES)
    if images or find_python() is not None:
        features.add(Feature.WARM_PYTHON)
    if network and abilities & Ability.NETWORK:
        features.add(Feature.ALLOW_LIST)
    if disk is not None:
        features.add(Feature.DISK_STORAGE)
    return Capabilities(
        backend="native",
        enforces=_ALWAYS | group_enforced(bases, writes_to_disk=disk is not None),
        isolation=Isolation.NAMESPACES,
        features=frozenset(features),
        seccomp=True,
        notes=tuple(_notes(controllers, ids, abilities, disk)),
    )


def _notes(
    controllers: Controllers | None, ids: Identities, abilities: Ability, disk: Path | None
) -> list[str]:
    notes = ["namespaces share the host's kernel: a kernel bug is a way out of the box"]
    if controllers is None:
        notes.append(
            "no writable control groups: memory and CPU are sampled every 20 ms, processes are "
            f"limited by RLIMIT_NPROC; {groups_fix()}"
        )
    bases = controllers.bases if controllers is not None else {}
    lacking = [name for name in ("memory", "pids") if name not in bases]
    if controllers is not None and lacking:
        notes.append(f"no {' and '.join(lacking)} control group: sampled every 20 ms instead")
    if disk is not None:
        notes.append(f"boxes write to {disk}, where disk_bytes is set aside for each")
    if "blkio" in bases and disk is not None:
        notes.append(
            "control groups of version 1: with write_bytes_per_s every write waits for the disk"
        )
    if ids.num_ids < NUM_IDS:
        notes.append(
            f"boxes have {ids.num_ids} user ids, not {NUM_IDS}: give this user a range in "
            "/etc/subuid and /etc/subgid, and install newuidmap (package uidmap)"
        )
    if os.geteuid() != 0 and ids.num_ids == 1:
        notes.append("jobs have the user id of their process 1: its memory is closed to them")
    if not abilities & Ability.NETWORK:
        notes.append("boxes have no loopback of their own")
    return notes
