"""A box of the native sandbox as its user sees it: commands and files. See also `stateful.py`."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any, TypeVar

from burnish.core.boxes import ExecResult, ExecStatus, Limits, Policy
from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.cancellation import insist, resolve, uninterrupted
from burnish.sandbox.cgroup_files import BoxGroup
from burnish.sandbox.commands import BASE_ENV, WORK, check_argv
from burnish.sandbox.files import check_limit, read_whole, split_path
from burnish.sandbox.images.running import ImageUser
from burnish.sandbox.limits import check_enforced, check_limits, rlimits
from burnish.sandbox.memory_files import anonymous, sealed
from burnish.sandbox.native import wire
from burnish.sandbox.native.box_room import DEFAULT_ROOM, Room, cannot_change, holds_more, room_for
from burnish.sandbox.native.client import failure
from burnish.sandbox.native.disk_uppers import is_broken
from burnish.sandbox.native.disks import lost
from burnish.sandbox.native.gauge import Gauge
from burnish.sandbox.native.init import DESTROYED, ENDED, Init, listening
from burnish.sandbox.native.making import Making
from burnish.sandbox.native.protocol import Op
from burnish.sandbox.native.run import Request, Run, beyond_memory
from burnish.sandbox.native.services import Services
from burnish.sandbox.native.station import Station, kind_of
from burnish.sandbox.network.base import Attachment
from burnish.sandbox.outcome import infra_error, refused

T = TypeVar("T")
_DEFAULTS = Limits()
_rlimits = lru_cache(maxsize=64)(rlimits)
_HOLDS_MORE = refused(ExecStatus.DISK, "the box already holds more than it may")
_FILE_MODE = 0o644
# EIO, ETIMEDOUT: a program that was kept has killed or stopped the process that reads for us.
_BROKEN_OFF = (errno.EIO, errno.ETIMEDOUT)
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EISDIR, *_BROKEN_OFF)


class LiveBox:
    """Commands and files of one box. `NativeBox` adds what a state can do."""

    def __init__(
        self, station: Station, making: Making, hold: int, policy: Policy, services: Services
    ) -> None:
        """Take over a box that is being made, with its group, and a hold on its layers."""
        self.id = ""
        self._station = station
        self._services = services
        self._policy = policy
        self._kind = kind_of(policy)
        # What installs packages has to be root of the box.
        self._user = ImageUser(0, 0) if self._kind.packages else station.user
        image = station.image
        self._base_env = tuple({**BASE_ENV, **(image.env if image else {})}.items())
        self._workdir = (image.workdir if image else "") or WORK
        self._hold = hold
        self._group: BoxGroup | None = making.group
        self._gauge = Gauge(making.group, station.census if services.sampled else None)
        self._lock = asyncio.Lock()
        self._init: Init | None = None
        self._next: Making | None = making
        self._number = 0
        self._room = DEFAULT_ROOM
        self._disk: int | None = None
        self._limits: Limits | None = None
        self._gone = ""
        self._kept = self._destroyed = False
        self._attachment: Attachment | None = None
        self.since_s = time.monotonic()
        self.on_first: Callable[[], None] | None = None
        """Called once, when whoever waits for the first command has its result."""

    async def start(self) -> None:
        """Wait until the box is alive.

        Raises:
            OSError: the host is out of something.
            ClassifiedFailure: the helper has ended.
        """
        init = await self._ready()
        self.id = f"{self._station.helper.pid}-{init.number}"
        if self._policy.allow:
            await self._attach(init)

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Sandbox.write_file`.

        Raises:
            ValueError: `path` is absolute, empty or climbs out.
            OSError: no space left, or something in the way is not a directory.
            ClassifiedFailure: the box is gone.
        """
        body = wire.file_body(self._user, _FILE_MODE, "/".join(split_path(path)))
        async with self._lock:
            init = await self._ready()
            content = sealed(data)
            try:
                await self._steadily(init.transfer(Op.PUT, body, content, self._kind.packages))
            finally:
                os.close(content)

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.read_file`.

        Raises:
            ValueError: `path` is absolute, empty or climbs out, or the limit is no number of bytes.
            OSError: see there.
            ClassifiedFailure: the box is gone.
        """
        check_limit(limit_bytes)
        reader = self._station.user.uid
        # One more than the limit, as the file may grow meanwhile.
        body = wire.file_body((reader, reader), limit_bytes + 1, "/".join(split_path(path)))
        async with self._lock:
            init = await self._ready()
            content = anonymous()
            try:
                await self._steadily(init.transfer(Op.GET, body, content, self._kind.packages))
                return read_whole(content, path, limit_bytes)
            except OSError as error:
                if error.errno in _NO_FILE:
                    raise FileNotFoundError(errno.ENOENT, "no regular file", path) from error
                raise
            finally:
                os.close(content)

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
        python: wire.PythonPart | None = None,
    ) -> ExecResult:
        """Run a command; see `Sandbox.exec`. For `python` see `WarmBox.python`.

        Raises:
            ValueError: the command, environment or limits could not run on any machine.
            UserError: a limit that cannot be enforced here.
        """
        limits = _DEFAULTS if limits is None else limits
        cwd = self._workdir if cwd is None else cwd
        check_argv(argv, env or {}, cwd)
        if limits != self._limits:
            check_limits(limits)
            check_enforced(limits, self._services.capabilities)
        async with self._lock:
            begun_s = time.perf_counter()
            init = await self._prepared(limits)
            if isinstance(init, ExecResult):
                return init
            self._kept = keep
            request = Request(
                job=self._job(argv, limits, env, cwd)._replace(python=python),
                stdin=stdin,
                limits=limits,
                keep=keep,
                packages=self._kind.packages,
            )
            try:
                result = await Run(init, self._gauge, request, self._services.null_fd).result()
            finally:
                if init.dead:
                    self._kept = False
            if init.dead:
                result = await self._after(init, result)
            elif self._station.disks is not None and is_broken(init.upper_fd):
                self.end(lost().failure.message)
                result = infra_error(self._gone)
            self._services.observe_exec(time.perf_counter() - begun_s)
            if self.on_first is not None:
                on_first, self.on_first = self.on_first, None
                asyncio.get_running_loop().call_soon(on_first)
            return result

    async def _prepared(self, limits: Limits) -> Init | ExecResult:
        """The live init, with these limits; or a result, if there can be no command."""
        try:
            init = await self._ready()
            if limits != self._limits:
                if refusal := await self._apply(init, limits):
                    return refusal
                init = await self._ready()
            elif self._group is not None:
                self._group.set_limits(limits)
            self._gauge.begin(limits, init, busy=self._kept)
        except ClassifiedFailure as error:
            return infra_error(error.failure.message)
        except OSError as error:
            return infra_error(f"the box cannot run a command: {error}")
        return init

    def _job(
        self, argv: tuple[str, ...], limits: Limits, env: dict[str, str] | None, cwd: str
    ) -> wire.Job:
        services = self._services
        most = None if services.counts_pids else limits.num_pids + services.init_counts
        if self._attachment is not None:
            env = {**self._attachment.env, **(env or {})}
        return wire.Job(
            wall_us=wire.u64(limits.wall_s * 1e6),
            uid=self._user.uid,
            gid=self._user.gid,
            rlimits=_rlimits(
                limits,
                num_processes=most,
                memory_is_sampled=not services.counts_memory,
            ),
            cwd=cwd,
            argv=argv,
            base_env=self._base_env,
            env=env or {},
        )

    async def _after(self, init: Init, result: ExecResult) -> ExecResult:
        """A box that ran out of memory as a whole can go on; one that died otherwise cannot."""
        if result.status is ExecStatus.OOM:
            try:
                await self._steadily(self._restart())
            except (OSError, ClassifiedFailure) as error:
                self._gone = f"the box ended and cannot be started again: {error}"
            return result
        gone, self._gone = self._gone, self._gone or ENDED
        return infra_error(gone) if gone and result.status is ExecStatus.INFRA_ERROR else result

    async def _ready(self) -> Init:
        """The live init of the box; waits for one that is on its way."""
        if self._gone:
            raise failure(self._gone)
        if self._init is None:
            assert self._next is not None
            making = self._next
            self._init = await making.wait()
            self._number = self._init.number
            self._next = None
            if self._attachment is not None:
                await self._attach(self._init)
        return self._init

    async def _apply(self, init: Init, limits: Limits) -> ExecResult | None:
        """Make the box fit for new limits. A result if it is already beyond one."""
        room = room_for(limits)
        if room != self._room and (refusal := await self._change_room(init, room)):
            return refusal
        if self._group is not None:
            init = await self._ready()
            if self._group.must_join(limits):
                await self._steadily(asyncio.to_thread(self._group.join, init.pid))
            if self._station.disks is not None:
                await self._station.disks.pace(init.number, limits, self._group)
            try:
                self._group.set_limits(limits)
            except OSError as error:
                return beyond_memory(error)
        self._limits = limits
        return None

    async def _change_room(self, init: Init, room: Room) -> ExecResult | None:
        disks, old = self._station.disks, self._room
        if disks is None and room.shm_bytes == old.shm_bytes:
            try:
                await self._steadily(self._station.resize(init, room))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return _HOLDS_MORE
            self._room = room
            return None
        if self._kept:
            raise cannot_change(old, room)
        if disks is not None:
            if holds_more(init.room(), old, room):
                return _HOLDS_MORE
            # Before the box ends: where the host has no room for it, the box goes on as it was.
            self._disk = await disks.made(room.disk_bytes, room.num_inodes)
        self._room = room
        await self._steadily(self._restart())
        return None

    async def _restart(self) -> None:
        """A new init for the same files."""
        try:
            init = await self._ready()
            if not await self._freeze(init):
                await self._station.ended(init)
                self._init = None
                self._continue()
        finally:
            self._station.unused(self._disk)
            self._disk = None

    async def _freeze(self, init: Init) -> bool:
        """Let all that was written become a layer; False if there is nothing."""
        try:
            if not await self._station.freeze(init, self._hold):
                return False
        except ClassifiedFailure as error:
            self.end(error.failure.message)
            raise
        self._init = None
        self._continue()
        return True

    def _continue(self) -> None:
        """Have the next init ready for the next command."""
        self._kept = False
        if self._group is not None:
            # Whoever starts anew is outside of the trees that the last one joined.
            self._group.left()
            self._limits = None
        disk, self._disk = self._disk, None
        self._next = self._station.make(
            self._kind,
            self._group,
            room=self._room,
            hold=self._hold,
            lent=True,
            after=self._number,
            disk=disk,
        )

    async def _attach(self, init: Init) -> None:
        async def listen(port: int) -> socket.socket:
            _, descriptor = await self._steadily(init.ask(Op.LISTEN, wire.numbers_body("H", port)))
            return listening(descriptor)

        if self._attachment is not None:
            await self._attachment.restore(listen)
        else:
            assert self._services.network is not None
            network = self._services.network
            self._attachment = await network.attach(listen, self._policy, self.id)

    async def _steadily(self, work: Coroutine[Any, Any, T]) -> T:
        """Cancelled half-way, the box and we would disagree about its state."""
        return await uninterrupted(asyncio.ensure_future(work))

    def end(self, reason: str) -> None:
        """Kill all that runs; further commands say why. `destroy` must still be called."""
        self._gone = self._gone or reason
        if self._init is not None:
            self._init.kill()

    async def destroy(self) -> None:
        """End everything and free it. May be called again, and be cancelled: it happens anyway."""
        if self._destroyed:
            return
        self._destroyed = True
        try:
            if self._attachment is not None:
                await self._attachment.close()
        finally:
            if self._lock.locked():
                # What is being done in it ends at once, and then leaves its state in order.
                self.end(DESTROYED)
            cancelled = await insist(self._lock.acquire)
            try:
                await self._destroy()
                if cancelled is not None:
                    raise cancelled
            finally:
                self._lock.release()
                del cancelled

    async def _destroy(self) -> None:
        self._gone = DESTROYED if self._gone in ("", ENDED) else self._gone
        station, group, hold = self._station, self._group, self._hold
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended() -> None:
            station.give_group(group)
            station.let_go(hold)
            resolve(done, None)

        init, making, self._init, self._next = self._init, self._next, None, None
        if init is None:
            assert making is not None
            try:
                init = await making.wait()
            except (OSError, ClassifiedFailure):
                ended()
                return
            except asyncio.CancelledError:
                making.group = group
                station.let_go(hold)
                making.abandon()
                raise
        station.end(init, ended)
        with station.helper.watching():
            await done
