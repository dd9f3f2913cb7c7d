"""One box on the keeper's side: its storage, its control groups and what runs in it.

What actually isolates a command (bubblewrap, an OCI runtime) is up to the subclass.
"""

import asyncio
import errno
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from burnish.core.boxes import ExecResult, ExecStatus, Limits
from burnish.core.errors import UserError
from burnish.sandbox import files
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.cgroup_files import BoxGroup
from burnish.sandbox.keeper.namespace import Identity
from burnish.sandbox.keeper.process import (
    START_DEADLINE_S,
    Command,
    Launched,
    Run,
    uninterrupted,
)
from burnish.sandbox.keeper.protocol import Exec
from burnish.sandbox.keeper.storage import BoxFiles, Storage
from burnish.sandbox.limits import ulimits
from burnish.sandbox.outcome import refused
from burnish.sandbox.proctree import TreeUsage, read_processes, tree_usage

_REMOVAL_TRIES = 50
_REMOVAL_PAUSE_S = 0.01


class Preparing(Launched, Protocol):
    """A box process on its way to where it waits for its command."""

    async def prepare(self) -> None:
        """Bring it there.

        Raises:
            OSError: the control groups refused.
        """
        ...


class StoredBox(ABC):
    """A private directory of limited size, in which commands run one after another."""

    _counts_root = False
    """Whether the process whose tree is sampled is itself one of the box."""

    def __init__(
        self,
        base: Path,
        controllers: Controllers | None,
        name: str,
        identity: Identity | None,
        *,
        proxy_port: int = 0,
        storage: BoxFiles | None = None,
    ) -> None:
        """Make storage and control groups.

        Args:
            base: directory of the boxes.
            controllers: where control groups are made.
            name: unique among the boxes of the keeper.
            identity: owner of its files outside; None: ourselves.
            proxy_port: where its commands find their network; 0: nowhere.
            storage: what holds its files; by default a file system of our own below `base`.

        Raises:
            OSError: the host is out of something.
        """
        self._controllers = controllers
        self._proxy_port = proxy_port
        self._identity = identity
        self._lock = asyncio.Lock()
        self._files = storage or Storage(base / name, identity)
        self._storage = self._files.path
        self._group: BoxGroup | None = controllers.make(name) if controllers else None
        self._num_runs = 0
        self._warm: asyncio.Task[Launched] | None = None

    def warm_up(self) -> None:
        """Start the process of the first command ahead."""
        self._warm = asyncio.create_task(self._start())

    async def write_file(self, path: str, data: bytes) -> None:
        """See `files.write_file`."""
        owner = None if self._identity is None else files.Owner(*self._identity)
        async with self._lock:
            files.write_file(self._files.work_fd, path, data, owner)

    async def read_file(self, path: str, limit_bytes: int) -> bytes:
        """See `files.read_file`."""
        async with self._lock:
            return files.read_file(self._files.work_fd, path, limit_bytes)

    async def listen(self) -> socket.socket | None:
        """Make the network of the next command, whose process is started if it was not yet.

        Raises:
            OSError: the host is out of something.
        """
        async with self._lock:
            warm = self._warm = self._warm or asyncio.create_task(self._start())
            try:
                launch = await asyncio.shield(warm)
                return launch.listen(self._proxy_port)
            except OSError:
                self._warm = None
                await _dispose(warm)
                raise

    async def has_network(self) -> bool:
        """Whether commands here can be given one."""
        try:
            listener = await self.listen()
        except OSError:
            return False
        if listener is not None:
            listener.close()
        return listener is not None

    async def run(self, argv: tuple[str, ...], request: Exec) -> ExecResult:
        """Run a command to its end."""
        async with self._lock:
            if problem := await self._apply(request.limits):
                return problem
            launch = await self._take_launch()
            self._num_runs += 1
            await self._join(request.limits, launch)
            result = await self._finish(self._command(argv, request), launch, request)
            if self._group is not None:
                self._group.left()
            if self._num_runs > 1:
                # It was used again, so it is likely to be used once more.
                self._warm = asyncio.create_task(self._start())
            return result

    async def _finish(self, command: Command, launch: Launched, request: Exec) -> ExecResult:
        """Run it in a process that is ours."""
        assert not request.keep, "refused by the pool: nothing is kept here"
        return await Run(command, launch).result()

    async def save(self) -> int:
        """Keep files and processes as a state.

        Returns:
            Its number.

        Raises:
            UserError: a process cannot be saved, or boxes of this keeper have no states.
            OSError: no room.
        """
        raise _stateless()

    async def restore(self, state: int) -> None:
        """Go on from a state; if it fails all is as before.

        Raises:
            UserError: there is no such state, or boxes of this keeper have none.
            OSError: it is damaged, or the host is out of something.
        """
        raise _stateless()

    async def _take_launch(self) -> Launched:
        """The process that was started ahead, or a new one."""
        warm, self._warm = self._warm, None
        starting = warm or asyncio.create_task(self._start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _dispose(starting)
            raise

    async def _start(self) -> Launched:
        launch = self._launch()
        try:
            await asyncio.wait_for(launch.prepare(), START_DEADLINE_S)
        except BaseException:
            await uninterrupted(asyncio.ensure_future(launch.end()))
            launch.close()
            raise
        return launch

    @abstractmethod
    def _launch(self) -> Preparing:
        """Start a box process."""

    @abstractmethod
    def _script(self, argv: tuple[str, ...], request: Exec, bounds: list[str]) -> bytes:
        """What the waiting process shall do."""

    def _group_limits(self, limits: Limits) -> Limits:
        """Limits of the control groups, which may hold more than the program."""
        return limits

    def _num_processes(self, limits: Limits) -> int | None:
        """The bound on processes that `setrlimit` sets; None where a control group has it."""
        exact = self._controllers
        # Process 1 counts as well where the kernel counts per user namespace.
        return None if exact and exact.pids else limits.num_pids + 1

    async def destroy(self) -> None:
        """Free everything. No command runs any more."""
        await self._cool_down()
        self._files.close()
        for _ in range(_REMOVAL_TRIES):
            # A control group stays busy for a moment after its last process was reaped.
            if self._group is None or self._group.remove():
                return
            await asyncio.sleep(_REMOVAL_PAUSE_S)

    async def _cool_down(self) -> None:
        """End the process that was started ahead."""
        warm, self._warm = self._warm, None
        if warm is not None:
            await _dispose(warm)

    async def _apply(self, limits: Limits) -> ExecResult | None:
        """Set the limits that belong to the box. A result if it is already beyond one."""
        try:
            mount_anew = self._files.resize(limits)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return refused(ExecStatus.DISK, "the box already holds more than its disk limits")
        if mount_anew:
            await self._cool_down()
        if self._files.used_bytes() > limits.memory_bytes + limits.swap_bytes:
            return refused(ExecStatus.OOM, "the box already holds more than memory_bytes")
        if self._group is not None:
            try:
                self._group.set_limits(self._group_limits(limits))
            except OSError:
                return refused(ExecStatus.OOM, "the box already holds more than memory_bytes")
        return None

    async def _join(self, limits: Limits, launch: Launched) -> None:
        """Enter the groups of limits that few ask for. The process waits for its command.

        Takes the kernel up to 10 ms, in which the keeper does nothing else.
        """
        group = self._group
        if group is None or launch.process_1 is None or not group.must_join(limits):
            return
        try:
            group.join(launch.process_1)
            group.set_limits(self._group_limits(limits))
        except OSError:
            await uninterrupted(asyncio.ensure_future(launch.end()))
            launch.close()
            raise

    def _command(self, argv: tuple[str, ...], request: Exec) -> Command:
        limits = request.limits
        exact = self._controllers
        bounds = ulimits(
            limits,
            num_processes=self._num_processes(limits),
            memory_is_sampled=not (exact and exact.memory),
        )
        return Command(
            script=self._script(argv, request, bounds),
            stdin=request.stdin,
            limits=limits,
            group=self._group,
            sample=None if exact and exact.memory and exact.pids else self._sample,
            disk_full=self._files.is_full,
        )

    def _sample(self, root_pid: int) -> TreeUsage:
        usage = tree_usage(read_processes(), root_pid, with_root=self._counts_root)
        return usage._replace(memory_bytes=usage.memory_bytes + self._files.used_bytes())


async def _dispose(starting: asyncio.Task[Launched]) -> None:
    """End a process that nobody will use, wherever it is on its way; cancelling does not stop it.

    A command that is cancelled is often cancelled twice: by its caller, and with its box.
    """
    await uninterrupted(asyncio.ensure_future(_end_unused(starting)))


async def _end_unused(starting: asyncio.Task[Launched]) -> None:
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled() and starting.exception() is None:
        launch = starting.result()
        await launch.end()
        launch.close()


def _stateless() -> UserError:
    return UserError(
        "boxes have no snapshots here.",
        fix="use the native sandbox, or runc as root with CRIU 4 or later in PATH "
        "(`burnish doctor` says what is missing)",
    )
