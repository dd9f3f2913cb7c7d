"""The owner's end of a live box: the socket of its process 1, and what it holds.

Whatever comes through the socket is untrusted. A reply that breaks the protocol, or none at all in
time, ends the box; it never hangs or misleads the owner.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct

from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.native import wire
from burnish.sandbox.native.box_process import BoxProcess
from burnish.sandbox.native.client import failure
from burnish.sandbox.native.protocol import HEADER, Ending, Op
from burnish.sandbox.native.wire import BadReply, Reply

ENDED = "the box has ended"
"""What its commands say then. A rollback lets it live again."""
DESTROYED = "the box was destroyed"
"""What they say afterwards, however it came to its end before: nothing lets it live again."""
GRACE_S = 30.0
"""For an init on an overloaded machine, beyond what it was asked to do."""
_REPLY_BYTES = 512
_KILL = HEADER.pack(HEADER.size, Op.KILL, 0, 0)


class Init:
    """Process 1 of one box."""

    __slots__ = (
        *("_next", "_process", "_socket", "_started", "dead", "fileno", "number", "pid", "trouble"),
        "upper_fd",
    )

    def __init__(self, number: int, pid: int, fds: tuple[int, ...]) -> None:
        """Take over control socket, pidfd and the directory `u`, in this order."""
        self.number = number
        self.pid = pid
        control, pidfd, self.upper_fd = fds
        self._process = BoxProcess(pid, pidfd)
        self._socket = socket.socket(fileno=control)
        self._socket.setblocking(False)
        self.fileno = control
        self.dead = False
        self.trouble = ENDED
        """What happened, if it is dead."""
        self._started = False
        self._next = 0

    def send(self, op: Op, body: bytes, fds: tuple[int, ...] = (), flags: int = 0) -> int:
        """Send a request; returns its number.

        Raises:
            ClassifiedFailure: the init has ended or reads nothing.
        """
        self._next += 1
        self._send(wire.message(op, self._next, body, flags), fds)
        return self._next

    def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        rights = struct.pack(f"{len(fds)}i", *fds)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
        try:
            self._socket.sendmsg((data,), control)
        except OSError as error:
            what = f"the box does not answer: {error.strerror}"
            if not self._started and self.receive() == b"":
                what = self.trouble
            self.dead = True
            raise failure(what) from error

    def end_command(self) -> None:
        """Ask it to kill what runs."""
        with contextlib.suppress(OSError):
            self._socket.send(_KILL)

    def receive(self) -> bytes | None:
        """A reply that is there now, b"" if the init has ended, None if there is none.

        Descriptors that nobody asked for are dropped by the kernel.
        """
        while True:
            try:
                data = self._receive()
            except BlockingIOError:
                return None
            except OSError:
                return b""
            if self._started or not data:
                return data
            try:
                self._greet(data)
            except (OSError, ClassifiedFailure) as error:
                self.trouble = f"the box did not start: {error}"
                return b""

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_REPLY_BYTES)
        except ConnectionResetError:
            # It ended before it had read all, which is told before what it said last.
            return self._socket.recv(_REPLY_BYTES)

    def is_there(self) -> bool:
        """Whether it has said that it is ready, or that it never will be."""
        if self._started or self.fileno < 0:
            return True
        poll = select.poll()
        poll.register(self.fileno, select.POLLIN)
        return bool(poll.poll(0))

    async def ready(self) -> None:
        """Wait until it has set itself up. Requests may be sent before.

        Raises:
            OSError: the host is out of something.
            ClassifiedFailure: it ended, or said nonsense or nothing.
        """
        if self._started:
            return
        try:
            async with asyncio.timeout(GRACE_S):
                await self._readable()
        except TimeoutError as error:
            self.kill()
            raise failure("the box did not start in time") from error
        # Not above: an init may say ETIMEDOUT, which is a TimeoutError too.
        self._greet(self._receive())

    def _greet(self, data: bytes) -> None:
        """Judge its first message."""
        if not data:
            self.dead = True
            raise failure("the box ended while it started")
        try:
            reply = wire.split(data)
            problem = wire.read_error(reply)
            if reply.id or (not problem and (reply.op != Op.READY or reply.body)):
                raise BadReply(f"reply {reply.op} where READY was due")
        except BadReply as error:
            self.kill()
            raise failure(f"the box broke the protocol: {error}") from error
        if problem:
            self.kill()
            raise OSError(problem[0], f"{os.strerror(problem[0])} ({problem[1][:100]})")
        self._started = True

    def wrote(self) -> bool:
        """Whether there is anything to freeze."""
        with os.scandir(self.upper_fd) as entries:
            return next(entries, None) is not None

    def shared_files(self) -> int:
        """The directory that was its /dev/shm, if that counts as disk; for the caller to close."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open("../s", flags, dir_fd=self.upper_fd)

    async def ask(self, op: Op, body: bytes, fds: tuple[int, ...] = ()) -> tuple[Reply, int]:
        """Send a request that takes no time to speak of; returns reply and descriptor (or -1).

        Raises:
            OSError: the init says so.
            ClassifiedFailure: it ended, answered nonsense or not at all.
        """
        number = self.send(op, body, fds)
        data, descriptor = await self._answer()
        try:
            return self._judge(data, number), descriptor
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise

    async def transfer(self, op: Op, body: bytes, file: int, packages: bool) -> None:
        """PUT out of a file or GET into it, whatever lives in the box.

        Raises:
            OSError: as the init says; EIO if a process of the box killed the one that did it.
            ClassifiedFailure: it ended, answered nonsense or not at all.
        """
        flags = wire.exec_flags(keep=True, packages=packages)
        number = self.send(op, body, (file,) * 3, flags)
        data, descriptor = await self._answer()
        if descriptor >= 0:
            os.close(descriptor)
        try:
            exited = wire.read_exited(data, number)
        except BadReply:
            self._judge(data, number, Op.ERROR)  # raises, whatever it is
            raise
        if exited.ending is Ending.EXITED and exited.code == 0:
            return
        error = exited.code if exited.ending is Ending.NOT_STARTED else errno.EIO
        if exited.ending is Ending.TIMEOUT:
            error = errno.ETIMEDOUT
        raise OSError(error, os.strerror(error))

    async def _answer(self) -> tuple[bytes, int]:
        """The next reply, with its descriptor or -1."""
        await self.ready()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._readable()
            data, received, _, _ = socket.recv_fds(
                self._socket, _REPLY_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            self.kill()
            raise failure("the box did not answer in time") from error
        except OSError as error:
            self.kill()
            raise failure(f"the box has ended: {error.strerror}") from error
        # Room for one descriptor is, with padding, room for two.
        for extra in received[1:]:
            os.close(extra)
        return data, received[0] if received else -1

    def _judge(self, data: bytes, number: int, *allowed: Op) -> Reply:
        if not data:
            self.dead = True
            raise failure(ENDED)
        try:
            reply = wire.split(data)
            problem = wire.read_error(reply)
            if reply.id != number or reply.op not in (allowed or (Op.DONE, Op.ERROR)):
                raise BadReply(f"reply {reply.op} to {reply.id} where {number} was asked")
        except BadReply as error:
            self.kill()
            raise failure(f"the box broke the protocol: {error}") from error
        if problem:
            raise OSError(problem[0], f"{os.strerror(problem[0])} ({problem[1][:100]!r})")
        return reply

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def on_readable() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(self.fileno, on_readable)
        try:
            await arrived
        finally:
            loop.remove_reader(self.fileno)

    def kill(self) -> None:
        """End the box at once: with process 1 dies its whole pid namespace."""
        self.dead = True
        if not self._process.kill():
            # It ends with its socket, or when the helper is told that the box is not needed.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def room(self) -> os.statvfs_result:
        """Of the file system that holds what the box wrote."""
        return os.fstatvfs(self.upper_fd)

    def close(self) -> None:
        """Free the descriptors. May be called again."""
        if self.fileno >= 0:
            self.fileno = -1
            self._socket.close()
            self._process.close()
            os.close(self.upper_fd)


def listening(descriptor: int) -> socket.socket:
    """Check what came out of a box.

    Raises:
        ClassifiedFailure: it is not a listening TCP socket.
    """
    if descriptor < 0:
        raise failure("the box sent no socket")
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        raise failure(f"the box sent something that is no socket: {error}") from error
    is_tcp = listener.family is socket.AF_INET and listener.type is socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise failure("the box sent a socket that does not listen")
    return listener
