"""The owner's end of the connection to one helper. May be used from any thread and event loop.

No thread of ours reads the replies: whichever loop waits for one reads them all and hands over what
belongs to others. So the usual case, one loop, never changes threads.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.cancellation import resolve
from burnish.sandbox.host_view import namespace_fix
from burnish.sandbox.memory_files import anonymous, sealed
from burnish.sandbox.native import wire
from burnish.sandbox.native.binary import detached_copy
from burnish.sandbox.native.fading import Fading
from burnish.sandbox.native.protocol import VERSION, Ability, Op
from burnish.sandbox.native.wire import BadReply, Hello, Reply

_START_DEADLINE_S = 60.0
_CLOSE_DEADLINE_S = 30.0
# So many requests fit into the socket's buffer (208 KiB at 768 bytes and more each), so sending
# never waits: two ends that both wait for room would wait for ever.
_MAX_IN_FLIGHT = 64
_MAX_REPLY_FDS = 3
_NUM_FDS = {Op.CREATED: (_MAX_REPLY_FDS,), Op.ERROR: (0,)}
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_REPLY_FDS * 4)


class Answer(NamedTuple):
    """A reply with its descriptors, which belong to whoever takes it."""

    reply: Reply
    fds: tuple[int, ...]


OnAnswer = Callable[[Answer | None], None]
"""Called once, in any thread; None if the helper ended."""


def failure(what: str) -> ClassifiedFailure:
    """A failure of the isolation layer."""
    return ClassifiedFailure(
        Failure(kind=FailureKind.SANDBOX, where="sandbox.native", message=what)
    )


def machine_problem(number: int, stage: str) -> UserError:
    """A helper could not set itself up."""
    return UserError(
        f"this machine does not let us make boxes: {stage}: {os.strerror(number)}.",
        fix=namespace_fix(number),
    )


@contextlib.contextmanager
def _program(command: Sequence[str]) -> Iterator[tuple[Sequence[str], tuple[int, ...]]]:
    """What to run, and the descriptors that takes. See `detached_copy`; root owns more than boxes.

    The interpreter of the helper in Python cannot be copied: `launch.helper_command` chooses it.
    """
    if "--zygote" not in command or os.geteuid() == 0:
        yield command, ()
        return
    try:
        copy = detached_copy(command[-1])
    except OSError as error:
        raise UserError(
            f"the native sandbox cannot run its helper from memory: {error}.",
            fix="sudo sysctl -w vm.memfd_noexec=0",
        ) from error
    try:
        yield (*command[:-1], f"/proc/self/fd/{copy}"), (copy,)
    finally:
        os.close(copy)


class Helper:
    """One helper process."""

    def __init__(
        self,
        command: Sequence[str],
        hello: Hello,
        seccomp: bytes,
        refusal: Callable[[int, str], UserError] = machine_problem,
    ) -> None:
        """Start it and wait until it is ready. Blocks.

        Args:
            command: to which the number of its socket is added.
            hello: what it serves.
            seccomp: filter of system calls for boxes.
            refusal: what it means if it says this error number and text.

        Raises:
            UserError: this machine does not let it make boxes.
            ClassifiedFailure: it ended or spoke another protocol.
        """
        self._refusal = refusal
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, OnAnswer] = {}
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._in_flight = 0
        self._dead = False
        self._closed = False
        self._watchers: Counter[asyncio.AbstractEventLoop] = Counter()
        self.died: dict[int, int] = {}
        """Box -> wait status of its init, until it is destroyed."""
        self.fading = Fading()
        self._stderr = anonymous()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, _program(command) as (started, passed):
            self._process = subprocess.Popen(
                [*started, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *passed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the owner, who then ends us in order
            )
        try:
            self.abilities = self._greet(hello, seccomp)
        except BaseException:
            self.close()
            raise
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether requests can be answered, as far as we know."""
        return not self._dead

    def _greet(self, hello: Hello, seccomp: bytes) -> Ability:
        program = sealed(seccomp)
        try:
            data = wire.message(Op.HELLO, 0, wire.hello_body(hello))
            self._socket.settimeout(_START_DEADLINE_S)
            socket.send_fds(self._socket, [data], [program])
            answer = self._socket.recv(wire.REPLY_BYTES)
        except OSError as error:
            raise failure(f"the helper did not start: {self._said() or error}") from error
        finally:
            os.close(program)
        if not answer:
            raise failure(f"the helper ended at its start: {self._said() or 'without a word'}")
        try:
            reply = wire.split(answer)
            if problem := wire.read_error(reply):
                number, stage = problem
                raise self._refusal(number, stage)
            version, abilities = wire.read_numbers(reply, Op.READY, "II")
        except BadReply as error:
            raise failure(f"the helper speaks another protocol: {error}") from error
        if version != VERSION:
            raise failure(f"the helper speaks version {version} of the protocol, not {VERSION}")
        return Ability(abilities)

    def _said(self) -> str:
        """The end of what the helper wrote to stderr, in one line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        size = os.fstat(self._stderr).st_size
        text = os.pread(self._stderr, 300, max(0, size - 300))
        return " ".join(text.decode("utf-8", "replace").split())

    def submit(
        self,
        op: Op,
        body: bytes,
        on_answer: OnAnswer,
        *,
        flags: int = 0,
        fds: tuple[int, ...] = (),
    ) -> None:
        """Send a request. `fds` must stay open until the answer, which some later `poll` finds."""
        with self._lock:
            dead = self._dead
            if not dead:
                number = next(self._numbers) & 0xFFFFFFFF
                self._pending[number] = on_answer
                self._queue.append((wire.message(op, number, body, flags), fds))
                broken = self._flush()
        if dead:
            on_answer(None)
        elif broken:
            self._end()

    def _flush(self) -> bool:
        """Send what may be sent; True if the connection is gone. The lock is held."""
        while self._queue and self._in_flight < _MAX_IN_FLIGHT:
            data, fds = self._queue.popleft()
            rights = struct.pack(f"{len(fds)}i", *fds)
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
            try:
                self._socket.sendmsg([data], control)
            except OSError:
                return True
            self._in_flight += 1
        return False

    async def ask(
        self, op: Op, body: bytes, *, flags: int = 0, fds: tuple[int, ...] = ()
    ) -> Answer:
        """Send a request and wait for its answer. When cancelled, the answer is thrown away.

        Raises:
            OSError: the helper said so.
            ClassifiedFailure: the helper has ended.
        """
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.submit(op, body, lambda a: resolve(future, a, _discard), flags=flags, fds=fds)
        try:
            with self.watching():
                answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                _discard(future.result())
            raise
        return self.checked(answer)

    def checked(self, answer: Answer | None) -> Answer:
        """The answer, unless it tells of a failure (see `ask`)."""
        if answer is None:
            raise failure("the helper of the boxes has ended")
        if problem := wire.read_error(answer.reply):
            number, stage = problem
            raise OSError(number, f"{os.strerror(number)} ({stage})")
        return answer

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While in here, the running loop reads the answers."""
        loop = asyncio.get_running_loop()
        with self._lock:
            dead = self._dead
            if not dead:
                self._watchers[loop] += 1
            first = self._watchers[loop] == 1
        if dead:
            # All who waited have been told, and the socket may be closed.
            yield
            return
        if first:
            loop.add_reader(self._socket.fileno(), self.poll)
        try:
            yield
        finally:
            with self._lock:
                self._watchers[loop] -= 1
                last = not self._watchers[loop]
                if last:
                    del self._watchers[loop]
            if last:
                loop.remove_reader(self._socket.fileno())
            self._close_if_unwatched()

    def poll(self) -> None:
        """Hand over all answers that are there now. Never waits."""
        while not self._dead:
            with self._lock:
                try:
                    data, control, _, _ = self._socket.recvmsg(
                        wire.REPLY_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    return
                except OSError:
                    data, control = b"", []
                fds = _descriptors(control)
                taken = self._take(data, len(fds)) if data else None
            if taken is None:
                _close_all(fds)
                self._end()
                return
            reply, on_answer = taken
            if on_answer is None:
                _close_all(fds)
            else:
                on_answer(Answer(reply, fds))
                if not self._pending:
                    return

    def still_runs(self) -> bool:
        """Look whether it has ended: its end of the socket may stay open in the hand of a child."""
        if self._pending:
            self.poll()
        if not self._dead and self._process.poll() is not None:
            self._end()
        return not self._dead

    def _take(self, data: bytes, num_fds: int) -> tuple[Reply, OnAnswer | None] | None:
        """Who gets a reply; None if the helper cannot be trusted. The lock is held."""
        try:
            reply = wire.split(data)
            if reply.op == Op.DIED:
                box, status = wire.read_numbers(reply, Op.DIED, "Ii")
                if not self.fading.ended(box):
                    self.died[box] = status
                return reply, None
            wire.read_error(reply)
            allowed = _NUM_FDS.get(Op(reply.op), (0, 1))
        except (BadReply, ValueError):
            return None
        on_answer = self._pending.pop(reply.id, None)
        if on_answer is None or num_fds not in allowed:
            return None
        self._in_flight -= 1
        if self._flush():
            return None
        return reply, on_answer

    def _end(self) -> None:
        """Nothing can be asked any more: kill it, if it is not dead, and tell all who wait."""
        with self._lock:
            self._dead = True
            left = list(self._pending.values())
            self._pending.clear()
            self._queue.clear()
        self.kill()
        for on_answer in left:
            on_answer(None)
        self.fading.all_ended()

    def kill(self) -> None:
        """End it at once, with all boxes."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Hang up: the helper ends all boxes and itself. Blocks until it has. May be repeated."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end()
        self._closed = True
        self._close_if_unwatched()

    def _close_if_unwatched(self) -> None:
        """A loop must forget a descriptor before its number can mean something else."""
        with self._lock:
            if not self._closed or self._watchers or self._stderr < 0:
                return
            os.close(self._stderr)
            self._stderr = -1
        self._socket.close()


def _descriptors(control: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found: list[int] = []
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return tuple(found)


def _close_all(fds: tuple[int, ...]) -> None:
    for descriptor in fds:
        os.close(descriptor)


def _discard(answer: Answer | None) -> None:
    if answer is not None:
        _close_all(answer.fds)
