"""The sandbox interface: policies, limits, typed results, capabilities.

Backends live in `burnish.sandbox`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from burnish.core.records import Record


class ExecStatus(StrEnum):
    """How a command in a box ended."""

    OK = "ok"
    """Exit status 0."""
    EXIT = "exit"
    """Exit status other than 0."""
    SIGNAL = "signal"
    """Killed by a signal that no limit sent."""
    TIMEOUT = "timeout"
    """Wall-clock or CPU limit."""
    OOM = "oom"
    """Memory limit."""
    PIDS = "pids"
    """Process limit."""
    DISK = "disk"
    """Disk limit."""
    OUTPUT = "output"
    """Output limit: what was kept is a prefix."""
    POLICY = "policy"
    """A forbidden system call or access ended it."""
    INFRA_ERROR = "infra_error"
    """The box itself failed: says nothing about the program."""


class Limits(Record, frozen=True, kw_only=True):
    """Bounds for one command. All are enforced, or the backend refuses.

    A field whose default is None is not limited; a backend that cannot enforce it refuses a value.
    """

    wall_s: float = 10.0
    """Wall-clock seconds."""
    cpu_s: float = 10.0
    """CPU seconds over all processes."""
    memory_bytes: int = 256 * 2**20
    """Resident memory of the box, files on tmpfs included."""
    num_pids: int = 64
    """Processes and threads."""
    disk_bytes: int = 64 * 2**20
    """Writable space."""
    stdout_bytes: int = 64 * 2**10
    """Kept bytes of each of stdout and stderr."""
    num_files: int = 256
    """Open files of one process."""
    swap_bytes: int = 0
    """Swap beyond `memory_bytes`."""
    num_inodes: int | None = None
    """Files and directories written; None: one for each 4 KiB of `disk_bytes`."""
    shm_bytes: int | None = None
    """Shared memory (`/dev/shm`); None: within `disk_bytes`."""
    cpus: float | None = None
    """Processors' worth of time per second."""
    read_bytes_per_s: int | None = None
    """Reads from disks."""
    write_bytes_per_s: int | None = None
    """Writes to disks."""


class Privileges(StrEnum):
    """What root of the box may do in the box."""

    NONE = "none"
    """No capability at all."""
    PACKAGES = "packages"
    """What installing packages takes: change owners and modes, become another user of the box."""


class Policy(Record, frozen=True, kw_only=True):
    """What a box may touch. A backend that cannot enforce a part of it refuses."""

    allow: tuple[str, ...] = ()
    """Names that may be reached: `pypi.org`, `pypi.org:8443`, `*.pythonhosted.org`; without a port
    80 and 443. Empty: no network but the box's own loopback."""
    privileges: Privileges = Privileges.NONE
    """What root of the box may do."""
    deterministic: bool = False
    """Same process ids, host name, time zone, hash seed, addresses and one processor, where
    possible; `burnish.sandbox.determinism` lists what is guaranteed."""


class Usage(Record, frozen=True, kw_only=True):
    """What a command used; None where the backend cannot tell."""

    wall_s: float
    """Wall-clock seconds."""
    cpu_s: float | None = None
    """CPU seconds."""
    peak_memory_bytes: int | None = None
    """Peak memory."""


class ExecResult(Record, frozen=True, kw_only=True):
    """Outcome of one command."""

    status: ExecStatus
    """How it ended."""
    exit_code: int | None
    """Exit status if it exited."""
    signal: int | None
    """Signal if it was killed."""
    stdout: bytes
    """At most `Limits.stdout_bytes`."""
    stderr: bytes
    """At most `Limits.stdout_bytes`."""
    truncated: bool
    """True if output was cut."""
    usage: Usage
    """What it used."""
    message: str = ""
    """For `infra_error` and `policy`: one line."""


class Isolation(StrEnum):
    """What stands between a box and the machine that it runs on."""

    NONE = "none"
    """Nothing."""
    NAMESPACES = "namespaces"
    """The host's kernel: a bug in it is a way out."""
    USER_KERNEL = "user_kernel"
    """A kernel in user space, which talks to the host's through a narrow filter."""


class Feature(StrEnum):
    """What not every backend can do."""

    IMAGES = "images"
    """Boxes with a root file system of their own."""
    SNAPSHOTS = "snapshots"
    """Boxes are `StatefulSandbox`es: snapshot, fork, rollback."""
    ALLOW_LIST = "allow_list"
    """A network limited by `Policy.allow`."""
    PRIVILEGES = "privileges"
    """`Privileges.PACKAGES`."""
    DETERMINISTIC = "deterministic"
    """`Policy.deterministic`."""
    BACKGROUND = "background"
    """`exec(keep=True)`: processes that outlive their command."""
    WARM_PYTHON = "warm_python"
    """Python jobs start with their modules imported."""
    DISK_STORAGE = "disk_storage"
    """What boxes of this pool write lies on a disk: `disk_bytes` may be more than the memory."""
    PROCESSES = "processes"
    """Boxes are `ProcessSandbox`es: a snapshot holds the processes that were kept, too."""


class Capabilities(Record, frozen=True, kw_only=True):
    """What a backend can do on this host, as data: ask before you try."""

    backend: str
    """Name."""
    enforces: frozenset[str]
    """Names of `Limits` fields that are enforced here."""
    isolation: Isolation
    """What stands between the box and this machine."""
    features: frozenset[Feature] = frozenset()
    """What else it can do."""
    seccomp: bool
    """Filters system calls."""
    notes: tuple[str, ...] = ()
    """What is weaker than it could be on this host, and the fix."""


class Sandbox(Protocol):
    """One live box with a private writable directory, `/work` inside."""

    @property
    def id(self) -> str:
        """Unique among all boxes of this machine."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file under `/work`; `path` is relative and may not climb out."""
        ...

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """All of a regular file under `/work`, never through a symbolic link, never a part of it.

        Raises:
            FileTooLargeError: it has more than `limit_bytes`; says how many.
            FileNotFoundError: if it is absent or not a regular file.
            BlockingIOError: if processes that were kept leave no room for the one that reads.
        """
        ...

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
    ) -> ExecResult:
        """Run a command. Never raises for what the program did.

        Args:
            argv: program and arguments; the program is looked up in PATH.
            stdin: what it reads.
            limits: bounds; `Limits()` by default.
            env: variables added to the box's own.
            cwd: absolute directory inside the box in which it starts; None: where the image says
                that its programs start, else `/work`.
            keep: processes that it leaves behind stay alive until the next command without `keep`
                ends, or the box does. Without, all die when the command ends.
        """
        ...


class NetworkedSandbox(Sandbox, Protocol):
    """A box whose allow-list can change while it lives: install online, then deny."""

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """Replace `Policy.allow`, also for the command that runs now; `()` is no network.

        Connections that the new list does not allow are cut before this returns. It holds after a
        rollback and for forks too.

        Raises:
            UserError: a malformed entry, or a network that this backend cannot give; nothing was
                changed. Some give one only to boxes that were made with a list.
            ClassifiedFailure: the box is gone.
        """
        ...


class Snapshot(Record, frozen=True, kw_only=True):
    """Frozen files of a box; of a `ProcessSandbox` its kept processes, too."""

    id: str
    """Unique in the pool that made it."""
    image: str
    """What the box was made from."""
    num_layers: int
    """Layers above the image."""


class StatefulSandbox(Sandbox, Protocol):
    """A box whose files can be frozen, multiplied and put back."""

    async def snapshot(self) -> Snapshot:
        """Freeze all files. Processes that were kept end. Costs nothing if nothing changed."""
        ...

    async def rollback(self, snapshot: Snapshot) -> None:
        """Back to a snapshot of this pool and image; everything since, processes too, is gone."""
        ...

    async def forget(self, snapshot: Snapshot) -> None:
        """Free what only this snapshot needs; boxes keep their files.

        Nothing happens if it is not there. What is never forgotten lives as long as the pool, and
        on a server as long as the session of the box.
        """
        ...

    def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AbstractAsyncContextManager[tuple[StatefulSandbox, ...]]:
        """Boxes that start from a snapshot, or from the present state."""
        ...

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        """Write what was changed above the image as a tar; returns its content digest."""
        ...

    async def import_tar(self, source: Path) -> None:
        """Put the files of a tar (from `export_tar`, or of any origin) on top.

        Raises:
            ValueError: the archive tries to leave the box, or holds devices.
        """
        ...


class ProcessSandbox(Sandbox, Protocol):
    """A box whose files and kept processes are frozen, multiplied and put back as one state."""

    async def snapshot(self) -> Snapshot:
        """Save files and kept processes, which stand still meanwhile and then go on.

        Raises:
            UserError: a process holds something that cannot be saved; nothing was changed.
        """
        ...

    async def rollback(self, snapshot: Snapshot) -> None:
        """Back to a snapshot of this pool and image: files and processes, or if it fails neither.

        Raises:
            UserError: the snapshot is of another pool or image, or forgotten.
            ClassifiedFailure: of kind `sandbox`: it is damaged, or cannot be restored.
        """
        ...

    def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AbstractAsyncContextManager[tuple[ProcessSandbox, ...]]:
        """Boxes that go on from a snapshot, or from the present state, processes included."""
        ...

    async def forget(self, snapshot: Snapshot) -> None:
        """Free a snapshot. Nothing happens if it is not there."""
        ...


class SandboxPool(Protocol):
    """Where boxes come from."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do here."""
        ...

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh box, destroyed on exit from the context.

        Args:
            image: name of an image that the pool knows; None: this host's programs, read-only.
            policy: what it may touch; `Policy()` by default.

        Raises:
            UserError: the policy cannot be enforced, or the image does not exist, here.
            ClassifiedFailure: of kind `sandbox`, if it cannot start.
        """
        ...

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """Like `acquire`, for so many boxes at once: all, or none. Waits until all are there.

        Raises:
            ValueError: none, or more than the pool can have.
            UserError: as `acquire`.
            ClassifiedFailure: as `acquire`, if one of them cannot start; the others are destroyed.
        """
        ...

    async def close(self) -> None:
        """Destroy all boxes."""
        ...
