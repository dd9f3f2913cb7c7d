"""A Python interpreter in a box whose namespace lasts, and checkpoints of the process by fork.

    await kernel.execute("x = 1")
    saved = await kernel.checkpoint()      the process freezes; a fork of it goes on
    await kernel.execute("x = 2")
    await kernel.restore(saved)            it is killed; another fork of the frozen one goes on
    await kernel.execute("x")              value '1'

The interpreter and a small supervisor (`kernel_supervisor.py`) are processes that the box keeps
between commands. So what ends the box's processes ends the kernel and its checkpoints: a command
without `keep`, a snapshot of changed files or a rollback of the box, a limit of the box. Then
results say `died`, and `restart` begins anew. A request costs the start of a bare Python.

A checkpoint is of memory only: files are as they are (the box's snapshots keep those), an open file
has one position in all forks, threads and child processes stay behind. Random numbers go on from
the state that was saved, so every restore repeats them.
"""

import secrets
from enum import StrEnum
from pathlib import Path

import msgspec

from burnish.core.boxes import ExecResult, ExecStatus, Limits, Sandbox
from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure, Record
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.interpreter import find_python

MAX_CHECKPOINTS = 32
"""Frozen processes of one kernel: each takes a place in `Limits.num_pids`."""
_FOLDER = Path(__file__).parent
_GONE = 3
# Exit status of `kernel_ask.py` when nobody listens.
_MARGIN_S = 5.0
# Beyond the timeout: 2 s for a kernel that ignores the interrupt, and the start of the messenger.
_CPU_S = 1e6
# The kernel's limit of CPU time is set once for its whole life; that of every request is the box's.
_MODULES = ("kernel_process", "kernel_supervisor")
_BOOT = """
import sys, types
for place, name in ((-2, "kernel_process"), (-1, "kernel_supervisor")):
    module = types.ModuleType("burnish.sandbox.session." + name)
    sys.modules[module.__name__] = module
    exec(compile(sys.argv[place], "<" + name + ">", "exec"), module.__dict__)
module.main()
"""
# The box does not see this package: the two modules come as arguments.
_ANSWER_FACTOR = 32
# One character of four texts takes up to 12 bytes as JSON; of two of them every byte is up to 6.


class KernelStatus(StrEnum):
    """How code ended."""

    OK = "ok"
    """It ran to its end."""
    ERROR = "error"
    """It raised; `error` is the traceback. The namespace is kept."""
    TIMEOUT = "timeout"
    """It was interrupted. The namespace is kept."""
    DIED = "died"
    """The interpreter is gone, with its namespace; `message` says why."""


class KernelResult(Record, frozen=True, kw_only=True):
    """What came of code. All of it was made by the code: believe nothing."""

    status: KernelStatus
    """How it ended."""
    stdout: bytes = b""
    """At most `max_bytes`."""
    stderr: bytes = b""
    """At most `max_bytes`."""
    value: str | None = None
    """`repr` of a last expression, unless that is None."""
    error: str | None = None
    """Traceback, if it raised or was interrupted."""
    truncated: bool = False
    """Something was cut."""
    message: str = ""
    """Why the kernel died."""


class Checkpoint(Record, frozen=True, kw_only=True):
    """A state of a kernel, which lives as long as the kernel's supervisor."""

    kernel: str
    """Which kernel, in which of its lives."""
    number: int
    """Unique in it."""


class KernelDied(ClassifiedFailure):
    """There is no kernel, or no such checkpoint, any more."""

    def __init__(self, message: str, *, box_broke: bool = False) -> None:
        """The job did it, unless the box broke."""
        kind = FailureKind.SANDBOX if box_broke else FailureKind.POLICY
        super().__init__(Failure(kind=kind, where="sandbox.session.kernel", message=message))


class _Answer(msgspec.Struct, forbid_unknown_fields=False):
    """What the supervisor says, as far as it is well-formed."""

    status: str
    why: str = ""
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    truncated: bool = False
    checkpoint: int | None = None


class PythonKernel:
    """A persistent interpreter. One request at a time, as the box runs one command at a time."""

    def __init__(
        self,
        box: Sandbox,
        *,
        limits: Limits | None = None,
        python: tuple[str, ...] | None = None,
        max_checkpoints: int = MAX_CHECKPOINTS,
    ) -> None:
        """Begin; the interpreter starts with the first request.

        Args:
            box: of a backend with `Feature.BACKGROUND`.
            limits: of the box while code runs; `wall_s` and `stdout_bytes` are set per request.
            python: interpreter of the box with its options, at least 3.9; by default isolated.
            max_checkpoints: kept at once.
        """
        self._box = box
        self._limits = limits or Limits()
        self._python = python or (find_python() or "python3", "-I", "-B")
        self._max_checkpoints = max_checkpoints
        self._ask = (_FOLDER / "kernel_ask.py").read_text(encoding="ascii")
        self._name: str | None = None

    async def execute(
        self, code: str, *, timeout_s: float = 10.0, max_bytes: int = 64 * 2**10
    ) -> KernelResult:
        """Run code in the namespace.

        Args:
            code: any statements; the value is that of a last expression.
            timeout_s: then it is interrupted, as by Ctrl-C, and after 2 s more killed.
            max_bytes: kept of each of stdout, stderr, value and traceback.

        Raises:
            UserError: the backend keeps no processes.
            ClassifiedFailure: the box broke.
        """
        request = {"op": "execute", "code": code, "timeout_s": timeout_s, "max_bytes": max_bytes}
        try:
            answer = await self._request(request, timeout_s, max_bytes)
        except KernelDied as error:
            if error.failure.kind is not FailureKind.POLICY:
                raise
            return KernelResult(status=KernelStatus.DIED, message=error.failure.message)
        try:
            return KernelResult(
                status=KernelStatus(answer.status),
                stdout=answer.stdout.encode("latin-1")[:max_bytes],
                stderr=answer.stderr.encode("latin-1")[:max_bytes],
                value=None if answer.value is None else answer.value[: 2 * max_bytes],
                error=None if answer.error is None else answer.error[: 2 * max_bytes],
                truncated=answer.truncated,
                message=answer.why[:300],
            )
        except ValueError:
            return KernelResult(status=KernelStatus.DIED, message="the kernel answers nonsense")

    async def checkpoint(self) -> Checkpoint:
        """Save the process.

        Raises:
            KernelDied: there is none, it cannot be forked, or too many are saved.
        """
        answer = await self._request({"op": "checkpoint"})
        if answer.status == "full":
            raise KernelDied(f"{self._max_checkpoints} checkpoints are kept: drop some")
        if answer.status != "ok" or answer.checkpoint is None or self._name is None:
            raise KernelDied(f"no checkpoint: {answer.why[:300]}")
        return Checkpoint(kernel=self._name, number=answer.checkpoint)

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, as often as wanted; also after the kernel died.

        Raises:
            KernelDied: the checkpoint is gone.
        """
        if checkpoint.kernel != self._name:
            raise KernelDied("the checkpoint is of another kernel, or of before a restart")
        answer = await self._request({"op": "restore", "checkpoint": checkpoint.number})
        if answer.status != "ok":
            raise KernelDied("the checkpoint is gone")

    async def drop(self, checkpoint: Checkpoint) -> None:
        """Free a checkpoint."""
        if checkpoint.kernel == self._name:
            await self._request({"op": "drop", "checkpoint": checkpoint.number})

    async def restart(self) -> None:
        """A new interpreter with an empty namespace; the old one and its checkpoints end.

        Raises:
            KernelDied: it does not start.
        """
        if self._name is not None:
            # A command without `keep` ends all that was kept.
            await self._box.exec(("true",), limits=self._bounds(0.0, 0))
        self._name = None
        await self._start()

    async def _request(
        self, request: dict[str, object], timeout_s: float = 10.0, max_bytes: int = 0
    ) -> _Answer:
        if self._name is None:
            await self._start()
        assert self._name is not None
        argv = (*self._python, "-S", "-c", self._ask, self._name)
        result = await self._box.exec(
            argv,
            stdin=msgspec.json.encode(request),
            limits=self._bounds(timeout_s, max_bytes),
            keep=True,
        )
        if result.status is not ExecStatus.OK:
            raise _died(result)
        try:
            return msgspec.json.decode(result.stdout, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KernelDied("the kernel's supervisor answers nonsense") from error

    async def _start(self) -> None:
        name = f"burnish-kernel-{secrets.token_hex(8)}"
        sources = [(_FOLDER / f"{module}.py").read_text(encoding="ascii") for module in _MODULES]
        limits = msgspec.structs.replace(self._bounds(10.0, 0), cpu_s=_CPU_S)
        argv = (*self._python, "-c", _BOOT, name, str(self._max_checkpoints), *sources)
        result = await self._box.exec(argv, limits=limits, keep=True)
        if result.status is not ExecStatus.OK:
            said = result.message or result.stderr.decode("utf-8", "replace")[-300:]
            broke = result.status is ExecStatus.INFRA_ERROR
            raise KernelDied(f"the kernel does not start: {said}", box_broke=broke)
        self._name = name

    def _bounds(self, timeout_s: float, max_bytes: int) -> Limits:
        return msgspec.structs.replace(
            self._limits,
            wall_s=timeout_s + _MARGIN_S,
            stdout_bytes=_ANSWER_FACTOR * max_bytes + 64 * 2**10,
        )


def _died(result: ExecResult) -> KernelDied:
    if result.status is ExecStatus.INFRA_ERROR:
        return KernelDied(f"the box broke: {result.message}", box_broke=True)
    if result.status is ExecStatus.EXIT and result.exit_code == _GONE:
        return KernelDied("the kernel and its supervisor are gone: restart it")
    return KernelDied(f"the kernel could not be asked: {result.status.value} {result.message}")
