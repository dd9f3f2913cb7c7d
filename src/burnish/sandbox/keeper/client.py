"""The owner's end of the connection to a keeper. Its methods may be used from any event loop."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import NamedTuple

from burnish.core.boxes import Capabilities
from burnish.core.errors import ClassifiedFailure, FileTooLargeError, UserError
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.keeper.protocol import (
    HEADER,
    Cancel,
    DestroyBox,
    Done,
    Failed,
    Forget,
    Hello,
    Listen,
    Request,
    decode_reply,
    encode,
)

_CLOSE_DEADLINE_S = 30.0


class _Answer(NamedTuple):
    done: Done
    listener: socket.socket | None


class KeeperClient:
    """Starts a keeper and talks to it."""

    def __init__(
        self,
        max_boxes: int,
        *,
        module: str,
        control_groups: bool = True,
        arguments: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (),
    ) -> None:
        """Start it and wait until it has tried a box.

        Args:
            max_boxes: alive at once.
            module: what the keeper runs.
            control_groups: use them where possible.
            arguments: more words on its command line.
            launcher: what runs it; by default we do.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        self._ids = itertools.count()
        self._pending: dict[int, Future[_Answer]] = {}
        self._lock = threading.Lock()
        self._dead = False
        self._socket, theirs = socket.socketpair()
        self._listeners, givers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listeners.setblocking(False)
        with theirs, givers:
            self._process = subprocess.Popen(
                [
                    *launcher,
                    sys.executable,
                    "-m",
                    module,
                    str(theirs.fileno()),
                    str(givers.fileno()),
                    str(max_boxes),
                    str(int(control_groups)),
                    *arguments,
                ],
                pass_fds=(theirs.fileno(), givers.fileno()),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": _search_path()},
                start_new_session=True,  # Ctrl-C is for the owner, who then ends us in order
            )
        self.capabilities = self._hello()
        self._thread = threading.Thread(target=self._receive, name="sandbox-keeper", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return not self._dead

    @property
    def pid(self) -> int:
        """Of the keeper."""
        return self._process.pid

    def _hello(self) -> Capabilities:
        body = self._read_message()
        hello = decode_reply(body) if body is not None else None
        if isinstance(hello, Hello) and hello.capabilities is not None:
            return hello.capabilities
        self._socket.close()
        self._listeners.close()
        code = self._process.wait()
        if isinstance(hello, Hello):
            raise UserError(hello.problem, fix=hello.fix)
        raise failure(f"the keeper ended with status {code} before its first word")

    async def ask(self, request: Request) -> Done:
        """Send and wait. If the caller is cancelled, so is the request.

        Raises:
            OSError: what the system said.
            ClassifiedFailure: of kind `sandbox`: the keeper is gone or the box is.
        """
        return (await self._ask(request)).done

    async def ask_listener(self, box: int) -> socket.socket | None:
        """The socket of the network of the next command of a box; None if it cannot run.

        Raises:
            OSError: what the system said.
            ClassifiedFailure: of kind `sandbox`: the keeper is gone or the box is.
        """
        return (await self._ask(Listen(id=self.next_id(), box=box))).listener

    async def _ask(self, request: Request) -> _Answer:
        future: Future[_Answer] = Future()
        data = encode(request)
        with self._lock:
            if self._dead:
                raise failure("the keeper of the boxes has ended")
            self._pending[request.id] = future
            try:
                self._socket.sendall(data)
            except OSError as error:
                del self._pending[request.id]
                raise failure(f"the keeper of the boxes cannot be reached: {error}") from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.send(Cancel(id=request.id))
            raise

    def send(self, request: Request) -> None:
        """Send without waiting for an answer; ignored if the keeper is gone."""
        with self._lock:
            if not self._dead:
                try:
                    self._socket.sendall(encode(request))
                except OSError:
                    return

    def next_id(self) -> int:
        """A fresh request number."""
        return next(self._ids)

    def close(self) -> None:
        """Hang up: the keeper then removes everything and ends. Blocks until it has."""
        self._shutdown()
        try:
            self._process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._socket.close()
        self._listeners.close()

    def _shutdown(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _receive(self) -> None:
        while (body := self._read_message()) is not None:
            reply = decode_reply(body)
            if isinstance(reply, Hello):
                continue
            listener = None
            if isinstance(reply, Done) and reply.listening:
                listener = self._read_listener()
            with self._lock:
                future = self._pending.pop(reply.id, None)
            if future is None or not future.set_running_or_notify_cancel():
                self._disown(reply, listener)
            elif isinstance(reply, Failed):
                future.set_exception(_exception(reply))
            else:
                future.set_result(_Answer(reply, listener))
        with self._lock:
            self._dead = True
            left, self._pending = list(self._pending.values()), {}
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure("the keeper of the boxes has ended"))

    def _disown(self, reply: Done | Failed, listener: socket.socket | None) -> None:
        """Nobody waits for it any more: a box made too late must not stay."""
        if listener is not None:
            listener.close()
        if isinstance(reply, Done) and reply.box >= 0:
            self.send(DestroyBox(id=self.next_id(), box=reply.box))
        if isinstance(reply, Done) and reply.state:
            self.send(Forget(id=self.next_id(), state=reply.state))

    def _read_listener(self) -> socket.socket | None:
        """It was sent before the message that announces it. None: we have no descriptor left."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._listeners, 1, 1)
        except OSError:
            return None
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def _read_message(self) -> bytes | None:
        header = self._read_exactly(HEADER.size)
        if header is None:
            return None
        return self._read_exactly(HEADER.unpack(header)[0])

    def _read_exactly(self, size: int) -> bytes | None:
        buffer = bytearray()
        while len(buffer) < size:
            try:
                chunk = self._socket.recv(size - len(buffer))
            except OSError:
                return None
            if not chunk:
                return None
            buffer += chunk
        return bytes(buffer)


def _search_path() -> str:
    return os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))


def failure(message: str) -> ClassifiedFailure:
    """A failure of the isolation layer."""
    return ClassifiedFailure(
        Failure(kind=FailureKind.SANDBOX, where="sandbox.keeper", message=message)
    )


def _exception(reply: Failed) -> Exception:
    if reply.fix:
        return UserError(reply.message, fix=reply.fix)
    if reply.size_bytes:
        return FileTooLargeError(reply.message, reply.size_bytes)
    if reply.errno:
        return OSError(reply.errno, reply.message)
    return failure(reply.message)
