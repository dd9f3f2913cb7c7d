"""The sandbox interface: policies, limits, typed results, capabilities.

Backends live in `burnish.sandbox`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from enum import StrEnum
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
    """Bounds for one command. All are enforced, or the backend refuses."""

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


class Policy(Record, frozen=True, kw_only=True):
    """What a box may touch."""

    network: bool = False
    """Whether the box sees any network beyond its own loopback."""


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


class Capabilities(Record, frozen=True, kw_only=True):
    """What a backend can do on this host, as data: ask before you try."""

    backend: str
    """Name."""
    enforces: frozenset[str]
    """Names of `Limits` fields that are enforced here."""
    no_network: bool
    """Can run without a network."""
    network: bool
    """Can run with the host's network."""
    seccomp: bool
    """Filters system calls."""
    notes: tuple[str, ...] = ()
    """What is weaker than it could be on this host, and the fix."""


class Sandbox(Protocol):
    """One live box with a private writable directory, `/work` inside."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file under `/work`; `path` is relative and may not climb out."""
        ...

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """The first `limit_bytes` of a regular file under `/work`, never through a symbolic link.

        Raises:
            FileNotFoundError: if it is absent or not a regular file.
        """
        ...

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
    ) -> ExecResult:
        """Run a command in `/work`. Never raises for what the program did."""
        ...


class SandboxPool(Protocol):
    """Where boxes come from."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do here."""
        ...

    def acquire(self, policy: Policy | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh box, destroyed on exit from the context.

        Raises:
            ClassifiedFailure: of kind `sandbox`, if it cannot start.
        """
        ...

    async def close(self) -> None:
        """Destroy all boxes."""
        ...
