"""How a command ended: a pure function of what was observed from outside the box."""

import signal
from enum import StrEnum
from typing import NamedTuple

from burnish.core.boxes import ExecResult, ExecStatus, Usage


class Cause(StrEnum):
    """Why we ended a command before it ended by itself."""

    WALL = "wall"
    """Wall-clock limit."""
    CPU = "cpu"
    """CPU limit."""
    MEMORY = "memory"
    """Memory limit."""
    PIDS = "pids"
    """Process limit."""
    OUTPUT = "output"
    """Output limit."""
    START = "start"
    """The program did not get running in time."""


class Evidence(NamedTuple):
    """Everything that decides. Nothing in here can be written by the program."""

    started: bool
    """The launcher reported that the box was complete."""
    cause: Cause | None
    """Set if we killed it."""
    wait_code: int
    """Status of the monitor (bubblewrap, a runtime), or minus the signal that killed itself."""
    output_cut: bool
    """More was written than is kept."""
    oom_kills: int
    """Kills by the memory cgroup during the command."""
    pids_refused: int
    """Forks that the process limit refused."""
    disk_full: bool
    """No space or no inode was left at the end."""
    stderr: bytes
    """What came out on stderr: the words of what starts boxes if the program never started."""
    is_complete: bool = True
    """False if the box did not say that the program has ended, as those that can do say."""
    cpu_used_up: bool = False
    """See `Seen`."""


class Seen(NamedTuple):
    """What was observed of a command that did start, on any backend."""

    cause: Cause | None
    """Set if we killed it."""
    exit_code: int | None
    """Its exit status, if it exited."""
    signal: int | None
    """The signal that killed it, if one did."""
    output_cut: bool
    """More was written than is kept."""
    oom_kills: int
    """Kills by the memory cgroup during the command."""
    pids_refused: int
    """Forks that the process limit refused."""
    disk_full: bool
    """No space or no inode was left at the end."""
    cpu_used_up: bool = False
    """The CPU time that was measured may be what is allowed. If not, no limit sent SIGXCPU."""


class Ending(NamedTuple):
    """The verdict on a command."""

    status: ExecStatus
    exit_code: int | None
    signal: int | None
    message: str


_BY_CAUSE = {
    Cause.WALL: (ExecStatus.TIMEOUT, "wall-clock limit"),
    Cause.CPU: (ExecStatus.TIMEOUT, "CPU limit"),
    Cause.MEMORY: (ExecStatus.OOM, "memory limit"),
    Cause.PIDS: (ExecStatus.PIDS, "process limit"),
    Cause.OUTPUT: (ExecStatus.OUTPUT, "output limit"),
}

# The kernel sends SIGXCPU by the clock ticks that hit a process, which are not what it has used: of
# a limit of one second 0.82 to 1.01 were measured (two busy virtual processors, 14 backends).
_CPU_SHARE = 0.5

# A program can send itself these two as well, and no status tells it from the kernel.
_BY_SIGNAL = {
    signal.SIGXFSZ: (ExecStatus.DISK, "file size limit"),
    signal.SIGSYS: (ExecStatus.POLICY, "forbidden system call"),
}


def classify(evidence: Evidence) -> Ending:
    """Say how a command ended that a monitor (bubblewrap, a runtime) ran."""
    if not evidence.started:
        return Ending(ExecStatus.INFRA_ERROR, None, None, _not_started(evidence))
    if evidence.wait_code < 0 and not evidence.oom_kills and evidence.cause not in _BY_CAUSE:
        message = f"the monitor of the box was killed by signal {-evidence.wait_code} from outside"
        return Ending(ExecStatus.INFRA_ERROR, None, None, message)
    exit_code, number = _split(evidence.wait_code)
    # With a signal the program may have killed process 1, which no other kernel here lets it do.
    broken = not evidence.is_complete and number is None
    if broken and not evidence.oom_kills and evidence.cause is None:
        return Ending(ExecStatus.INFRA_ERROR, None, None, "the box broke under its program")
    return judge(
        Seen(
            cause=evidence.cause,
            exit_code=exit_code,
            signal=number,
            output_cut=evidence.output_cut,
            oom_kills=evidence.oom_kills,
            pids_refused=evidence.pids_refused,
            disk_full=evidence.disk_full,
            cpu_used_up=evidence.cpu_used_up,
        )
    )


def judge(seen: Seen) -> Ending:
    """Say how a command that did start ended."""
    # A kill by the kernel explains whatever else was seen, as it may have hit any process.
    if seen.oom_kills:
        return Ending(ExecStatus.OOM, None, signal.SIGKILL, "memory limit")
    if seen.cause is not None and seen.cause in _BY_CAUSE:
        status, message = _BY_CAUSE[seen.cause]
        return Ending(status, None, signal.SIGKILL, message)
    exit_code, number = seen.exit_code, seen.signal
    if seen.output_cut:
        return Ending(ExecStatus.OUTPUT, exit_code, number, "output limit")
    if exit_code == 0:
        return Ending(ExecStatus.OK, 0, None, "")
    if number == signal.SIGXCPU and seen.cpu_used_up:
        return Ending(ExecStatus.TIMEOUT, None, number, "CPU limit")
    if number in _BY_SIGNAL:
        status, message = _BY_SIGNAL[signal.Signals(number)]
        return Ending(status, None, number, message)
    if seen.pids_refused:
        return Ending(ExecStatus.PIDS, exit_code, number, "process limit")
    if seen.disk_full:
        return Ending(ExecStatus.DISK, exit_code, number, "disk limit")
    return Ending(ExecStatus.SIGNAL if number else ExecStatus.EXIT, exit_code, number, "")


def cpu_used_up(cpu_s: float, limit_s: float) -> bool:
    """Whether a command may have come to its limit, going by the CPU time measured outside it."""
    return cpu_s >= _CPU_SHARE * limit_s


def _split(wait_code: int) -> tuple[int | None, int | None]:
    """(exit code, signal). A monitor reports a death by signal n as 128 + n, like a shell.

    A program that itself exits with 128 + n, for a signal n that exists, looks the same.
    """
    number = wait_code - 128
    if number in signal.valid_signals():
        return None, number
    return wait_code, None


def _not_started(evidence: Evidence) -> str:
    said = " ".join(evidence.stderr.decode("utf-8", "replace").split())
    if evidence.cause is Cause.START:
        return "the box did not start in time"
    return f"the box did not start: {said[:300] or f'its monitor ended with {evidence.wait_code}'}"


def infra_error(message: str) -> ExecResult:
    """The box failed; says nothing about the program."""
    return refused(ExecStatus.INFRA_ERROR, message)


def refused(status: ExecStatus, message: str) -> ExecResult:
    """The result of a command that was not run, or of which nothing is known."""
    return ExecResult(
        status=status,
        exit_code=None,
        signal=None,
        stdout=b"",
        stderr=b"",
        truncated=False,
        usage=Usage(wall_s=0.0),
        message=" ".join(message.split()),
    )
