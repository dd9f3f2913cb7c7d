"""The keeper: a small process that owns all boxes of a pool.

It exists because the trainer must not do this itself: a large process with threads forks slowly and
unsafely, its event loop stalls while it computes (limits would bite late), and mounts made in its
namespace would outlive a crash. The keeper has one thread; when its owner dies it ends, and with it
every box, every mount and every process.
"""

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
from typing import NamedTuple, Protocol

from burnish.core.boxes import ExecResult
from burnish.core.errors import FileTooLargeError, UserError, one_line
from burnish.sandbox.keeper.pipes import above_shell
from burnish.sandbox.keeper.protocol import (
    HEADER,
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    Cancel,
    CreateBox,
    DestroyBox,
    Done,
    Exec,
    Failed,
    Forget,
    Hello,
    Listen,
    ReadFile,
    Reply,
    Request,
    Restore,
    Save,
    WriteFile,
    decode_request,
    encode,
)
from burnish.sandbox.keeper.stored_box import StoredBox
from burnish.sandbox.outcome import infra_error


class Start(NamedTuple):
    """What every keeper is started with."""

    connection: socket.socket
    """To the owner."""
    listeners: socket.socket
    """Where the owner gets sockets of boxes."""
    max_boxes: int
    use_control_groups: bool
    others: tuple[str, ...]
    """What else is on the command line."""


def parse_start(arguments: list[str]) -> Start:
    """From `SOCKET_FD LISTENERS_FD MAX_BOXES CONTROL_GROUPS...`."""
    connection, listeners = (socket.socket(fileno=above_shell(int(n))) for n in arguments[:2])
    listeners.setblocking(False)
    return Start(
        connection, listeners, int(arguments[2]), arguments[3] == "1", tuple(arguments[4:])
    )


class BoxMaker(Protocol):
    """Makes the boxes of one keeper."""

    async def make(self, name: str, slot: int, request: CreateBox) -> StoredBox:
        """A box with the user ids of a free slot.

        Raises:
            OSError: the host is out of something.
            UserError: its user is nobody here.
        """
        ...

    def forget(self, state: int) -> None:
        """Free what a box saved."""
        ...

    async def close(self) -> None:
        """Free what is left when no box lives any more."""
        ...


class Keeper:
    """Serves one owner over one connection."""

    def __init__(self, maker: BoxMaker, *, max_boxes: int) -> None:
        """Boxes get the user ids of free slots, so at most `max_boxes` live at once."""
        self._maker = maker
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(max_boxes):
            self._slots.put_nowait(slot)
        self._boxes: dict[int, tuple[StoredBox, int]] = {}
        self._num_made = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, set[asyncio.Task[None]]] = {}
        self._listeners: socket.socket | None = None

    async def serve(self, start: Start, owner_fd: int | None = None) -> None:
        """Until the owner hangs up or dies.

        Args:
            start: connections to the owner.
            owner_fd: pidfd of the owner; by default of our parent.
        """
        self._listeners = start.listeners
        reader, writer = await asyncio.open_unix_connection(sock=start.connection)
        owner_gone = asyncio.Event()
        owner_fd = os.pidfd_open(os.getppid()) if owner_fd is None else owner_fd
        asyncio.get_running_loop().add_reader(owner_fd, owner_gone.set)
        waiting = asyncio.ensure_future(owner_gone.wait())
        serving = asyncio.ensure_future(self._requests(reader, writer))
        await asyncio.wait((waiting, serving), return_when=asyncio.FIRST_COMPLETED)
        asyncio.get_running_loop().remove_reader(owner_fd)
        waiting.cancel()
        serving.cancel()
        await self._close()
        writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                assert size <= MAX_MESSAGE_BYTES
                request = decode_request(await reader.readexactly(size))
                if isinstance(request, Cancel):
                    if task := self._tasks.get(request.id):
                        task.cancel()
                    continue
                task = asyncio.create_task(self._answer(request, writer))
                self._tasks[request.id] = task
                if isinstance(request, Exec | Listen | ReadFile | WriteFile | Save | Restore):
                    self._running.setdefault(request.box, set()).add(task)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        reply: Reply
        try:
            reply = await self._do(request)
        except asyncio.CancelledError:
            reply = Failed(id=request.id, errno=0, message="cancelled")
        except UserError as error:
            reply = Failed(id=request.id, errno=0, message=error.what, fix=error.fix)
        except FileTooLargeError as error:
            reply = Failed(
                id=request.id,
                errno=errno.EFBIG,
                message=error.message,
                size_bytes=error.size_bytes,
            )
        except (OSError, subprocess.SubprocessError, KeyError) as error:
            number = error.errno or 0 if isinstance(error, OSError) else 0
            reply = Failed(id=request.id, errno=number, message=one_line(error))
        self._tasks.pop(request.id, None)
        if not writer.is_closing():
            writer.write(encode(reply))

    async def _do(self, request: Request) -> Reply:
        if isinstance(request, CreateBox):
            return Done(id=request.id, box=await self._create(request))
        if isinstance(request, DestroyBox):
            await self._destroy(request.box)
            return Done(id=request.id)
        if isinstance(request, Forget):
            self._maker.forget(request.state)
            return Done(id=request.id)
        assert not isinstance(request, Cancel)
        task = asyncio.current_task()
        assert task is not None
        try:
            box, _ = self._boxes[request.box]
            if isinstance(request, Exec):
                return Done(id=request.id, result=await _run(box, request))
            if isinstance(request, Listen):
                return self._hand_over(request, await box.listen())
            if isinstance(request, Save):
                return Done(id=request.id, state=await box.save())
            if isinstance(request, Restore):
                await box.restore(request.state)
                return Done(id=request.id)
            if isinstance(request, WriteFile):
                await box.write_file(os.fsdecode(request.path), request.data)
                return Done(id=request.id)
            most = min(request.limit_bytes, MAX_DATA_BYTES)
            data = await box.read_file(os.fsdecode(request.path), most)
            return Done(id=request.id, data=data)
        finally:
            self._running.get(request.box, set()).discard(task)

    def _hand_over(self, request: Listen, listener: socket.socket | None) -> Done:
        """Nothing is between the two messages: their order is the same on both connections."""
        if listener is None:
            return Done(id=request.id)
        assert self._listeners is not None
        with listener:
            socket.send_fds(self._listeners, [b"l"], [listener.fileno()])
        return Done(id=request.id, listening=True)

    async def _create(self, request: CreateBox) -> int:
        slot = await self._slots.get()
        number, self._num_made = self._num_made, self._num_made + 1
        try:
            box = await self._maker.make(f"box-{number}", slot, request)
        except BaseException:
            self._slots.put_nowait(slot)
            raise
        self._boxes[number] = (box, slot)
        return number

    async def _destroy(self, number: int) -> None:
        if number not in self._boxes:
            return
        box, slot = self._boxes.pop(number)
        running = self._running.pop(number, set())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        try:
            await box.destroy()
        finally:
            self._slots.put_nowait(slot)

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for number in list(self._boxes):
            await self._destroy(number)
        await self._maker.close()


async def _run(box: StoredBox, request: Exec) -> ExecResult:
    argv = tuple(os.fsdecode(arg) for arg in request.argv)
    try:
        return await box.run(argv, request)
    except (OSError, subprocess.SubprocessError) as error:
        return infra_error(one_line(error))


def send_hello(connection: socket.socket, hello: Hello) -> None:
    """The first words of a keeper; nobody may be listening any more."""
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(encode(hello))
