"""Garbage for both ends of the native sandbox's protocol, with the sanitizers watching."""

import array
import errno
import fcntl
import os
import random
import select
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_helper import (
    COMMANDS,
    NUM_IDS,
    ROOT,
    RawBox,
    RawHelper,
    Reply,
    many,
    memory_file,
    text,
)

from burnish.sandbox.native.binary import build_helper, find_compiler
from burnish.sandbox.native.protocol import HEADER, MAX_MESSAGE_BYTES, Op

SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Leaks are counted below, in descriptors and processes; the sanitizer's own search needs ptrace.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"}
GARBAGE_EXIT = 1 << 8
"""Wait status of an init that refused a message; a sanitizer's report is another one."""
BROKEN_RATIO = 1 / 3
"""Of what an init gets; it ends with the first that it refuses."""
EDGES = (0, 1, 2, 3, 15, 16, 17, 255, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
PATHS = ("", "/", "a", "a/b", "../a", "/etc", "/etc/passwd", "/work/x", "//", "a" * 300, "\xff")
OWNER_OPS = (Op.CREATE, Op.FREEZE, Op.DESTROY, Op.NEWLAYER, Op.LAYERFD, Op.RESIZE)
INIT_OPS = (Op.EXEC, Op.KILL, Op.PUT, Op.GET, Op.LISTEN, Op.PYTHON)


class Garbage:
    """Messages between well-formed and random; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_broken = 0

    def u32(self) -> bytes:
        value = (
            self.random.choice(EDGES) if self.random.random() < 0.3 else self.random.randrange(6)
        )
        return struct.pack("<I", value)

    def u64(self) -> bytes:
        near = self.random.choice(EDGES) * self.random.choice((1, 1, 4096, 2**32))
        return struct.pack("<Q", near % 2**64)

    def string(self) -> bytes:
        return text(self.random.choice(PATHS).encode("latin-1"))

    def list(self, item: Callable[[], bytes], most: int = 4) -> bytes:
        return many([item() for _ in range(self.random.randrange(most))])

    def body(self, op: Op) -> bytes:
        """Fields of the right kinds, with values that may make no sense."""
        pair = lambda: self.string() + self.string()  # noqa: E731
        if op is Op.HELLO:
            ids = [self.u32() for _ in range(4)]
            body = b"".join([struct.pack("<I", 1), *ids, self.string()])
            return (
                body + self.list(pair) + self.list(pair) + self.list(self.string) + self.list(pair)
            )
        if op is Op.CREATE:
            sizes = struct.pack("<IQI", 0, 1 << 20, 100) + self.u64() + self.u32()
            return sizes + self.list(self.u32, 20)
        if op in (Op.EXEC, Op.PUT, Op.GET):
            return self.job(op)
        if op is Op.LISTEN:
            return struct.pack("<H", self.random.randrange(2**16))
        if op in (Op.NEWLAYER, Op.RESIZE):
            number = self.u32() if op is Op.RESIZE else bytes(4)
            return number + self.u64() + self.u32()
        return b"" if op in (Op.KILL, Op.PYTHON) else self.u32()

    def job(self, op: Op) -> bytes:
        limits = [self.u32() + self.u64() + self.u64() for _ in range(self.random.randrange(3))]
        files = [text("/bin/true"), text("")][: self.random.randrange(3)]
        words = [text("true"), text("")][: self.random.randrange(3)]
        if op is not Op.EXEC:
            words = [self.string() for _ in range(self.random.randrange(3))]
        counts = struct.pack("<IIII", len(limits), len(files), len(words), len(files))
        start = struct.pack("<Q", 20_000) + self.u64() + self.u32() + self.u32()
        strings = [self.string(), *files, *words, *files]
        return start + counts + b"".join(limits) + b"".join(strings)

    def wire(self, op: Op, number: int, flags: int) -> bytes:
        body = self.body(op)
        return HEADER.pack(HEADER.size + len(body), op, flags, number) + body

    def broken(self, ops: tuple[Op, ...]) -> bytes:
        """A message with something wrong, most likely."""
        self.num_broken += 1
        op = self.random.choice(ops) if self.random.random() < 0.8 else self.random.randrange(2**16)
        known = Op(op) if op in Op.__members__.values() else Op.DESTROY
        data = bytearray(
            self.wire(known, 1, self.random.choice((0, 0, 0, 1, 2, 4, 8, 15, 2**16 - 1)))
        )
        how = self.random.randrange(6)
        if how == 0:
            del data[self.random.randrange(1, len(data)) :]
        elif how == 1:
            data += self.random.randbytes(self.random.choice((1, 4, 100)))
        elif how == 2:
            data = bytearray(self.random.randbytes(self.random.randrange(1, 200)))
        elif how == 3:
            data += bytes(self.random.choice((MAX_MESSAGE_BYTES - len(data), MAX_MESSAGE_BYTES)))
        for _ in range(self.random.randrange(4) if how == 4 else 0):
            data[self.random.randrange(len(data))] = self.random.randrange(256)
        if self.random.random() < 0.7 and len(data) >= 4:
            data[:4] = struct.pack("<I", len(data))
        return bytes(data)

    def num_fds(self, op: Op) -> int:
        if self.random.random() < 0.1:
            return self.random.choice((1, 2, 4, 8, 9, 20))
        return {Op.EXEC: 3, Op.PUT: 3, Op.GET: 3, Op.HELLO: 1}.get(op, 0)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The helper with address and undefined-behaviour sanitizers."""
    if find_compiler() is None:
        pytest.skip("needs a C compiler: sudo apt-get install gcc libc6-dev")
    folder = tmp_path_factory.mktemp("helper")
    made = folder / "helper"
    if problem := build_helper(made, SANITIZED):
        pytest.skip(f"no sanitizers here (sudo apt-get install gcc libc6-dev): {problem}")
    return (*COMMANDS["c"][:-1], str(made))


@pytest.fixture(scope="module", params=["sanitized", "python"])
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param == "python":
        return COMMANDS["python"]
    found: tuple[str, ...] = request.getfixturevalue("sanitized")
    return found


def open_helper(command: tuple[str, ...], hello: bool = True) -> RawHelper:
    ids = NUM_IDS if ROOT else 1
    helper = RawHelper(command, num_ids=ids, environment=OPTIONS, hello=hello)
    if hello and helper.ready.op is Op.ERROR and helper.ready.error in (errno.EPERM, errno.ENOSYS):
        helper.end()
        pytest.skip(f"this host allows no namespaces: {helper.ready.stage}")
    return helper


def send_raw(sock: socket.socket, data: bytes, num_fds: int) -> bool:
    """False if the other side is gone."""
    files = [memory_file() for _ in range(num_fds)]
    try:
        socket.send_fds(sock, [data], files)
    except (BrokenPipeError, ConnectionResetError):
        return False
    finally:
        for file in files:
            os.close(file)
    return True


def check_end(helper: RawHelper) -> None:
    """It ended of itself, with one line and no report of a sanitizer."""
    status, said = helper.end()
    assert status in (0, 1), (status, said)
    assert len(said.splitlines()) == status, said


def settle(helper: RawHelper, number: int) -> bool:
    """Read until the reply to `number`, closing what comes; False if the helper is gone."""
    while True:
        reply: Reply | None = helper.receive()
        if reply is None:
            return False
        for fd in reply.fds:
            os.close(fd)
        if reply.id == number and reply.op is not Op.DIED:
            return True


def children(helper: RawHelper) -> list[str]:
    pid = helper.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()


def fuzz_helper(command: tuple[str, ...], seed: int, num_messages: int) -> int:
    """Sense and nonsense to one helper until it has enough; returns how many messages it read."""
    garbage = Garbage(seed)
    helper = open_helper(command)
    helper.tell(Op.DESTROY, 0)  # once it answers this, it has opened all that it needs
    before = helper.num_fds()
    for number in range(2, num_messages):
        op = garbage.random.choice(OWNER_OPS)
        num_fds = 0 if op is not Op.CREATE else garbage.random.choice((0, 0, 0, 1))
        send_raw(helper.socket, garbage.wire(op, number, 0), num_fds)
        if not settle(helper, number):
            check_end(helper)
            raise AssertionError("a well-formed message ended the helper")
    for box in range(256):
        settle(helper, helper.send(Op.DESTROY, struct.pack("<I", box)))  # its init may have died
    assert helper.num_fds() <= before + 3  # a child made ahead may be there or not
    for _ in range(1000):  # what failed to start may be dying still
        settle(helper, helper.send(Op.DESTROY, struct.pack("<I", 0)))
        if len(children(helper)) <= 1:
            break
    assert len(children(helper)) <= 1
    for _ in range(20):  # until one of them is truly malformed
        number_fds = garbage.num_fds(Op.DESTROY)
        if not send_raw(helper.socket, garbage.broken(OWNER_OPS), number_fds):
            break
    helper.socket.shutdown(socket.SHUT_WR)
    while (reply := helper.receive()) is not None:
        for fd in reply.fds:
            os.close(fd)
    check_end(helper)
    return num_messages


def fuzz_hello(command: tuple[str, ...], seed: int) -> int:
    garbage = Garbage(seed)
    helper = open_helper(command, hello=False)
    broken = garbage.random.random() < 0.5
    data = garbage.broken((Op.HELLO,)) if broken else garbage.wire(Op.HELLO, 1, 0)
    send_raw(helper.socket, data, garbage.num_fds(Op.HELLO))
    helper.socket.shutdown(socket.SHUT_WR)
    while helper.receive() is not None:
        pass
    status, said = helper.end()
    assert status in (0, 1), (status, said)
    assert len(said.splitlines()) <= status, said
    return 1


def fuzz_init(helper: RawHelper, garbage: Garbage, num_messages: int) -> int:
    """To the init of one box. The helper lives on, and says that the init refused, if it did."""
    box = helper.create()
    sent = 0
    while sent < num_messages:
        op = garbage.random.choice(INIT_OPS)
        is_broken = garbage.random.random() < BROKEN_RATIO
        data = garbage.broken(INIT_OPS) if is_broken else garbage.wire(op, sent, 0)
        if not send_raw(box.socket, data, garbage.num_fds(op)):
            break
        sent += 1
        until_read(box)
        drain(box)
    if select.select([helper.socket], [], [], 0)[0] or sent < num_messages:
        assert helper.receive_died(box.number) == GARBAGE_EXIT
    helper.boxes.remove(box)
    box.close()
    settle(helper, helper.send(Op.DESTROY, struct.pack("<I", box.number)))
    return sent


def until_read(box: RawBox) -> None:
    """So that what counts as sent was judged. What an init that has ended did not read is gone."""
    unread = array.array("i", [1])
    while unread[0]:
        fcntl.ioctl(box.socket, termios.TIOCOUTQ, unread)
        os.sched_yield()


def drain(box: RawBox) -> None:
    """Takes replies out of the way, so that no queue fills."""
    while select.select([box.socket], [], [], 0)[0]:
        if (reply := box.receive()) is None:
            return
        for fd in reply.fds:
            os.close(fd)


SEEDS = st.integers(0, 2**64 - 1)
QUICK = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_no_message_breaks_the_helper(command: tuple[str, ...]) -> None:
    @QUICK
    @given(SEEDS)
    def run(seed: int) -> None:
        fuzz_helper(command, seed, 100)

    run()


def test_no_greeting_breaks_the_helper(command: tuple[str, ...]) -> None:
    @QUICK
    @given(SEEDS)
    def run(seed: int) -> None:
        fuzz_hello(command, seed)

    run()


@pytest.fixture
def fuzzed(command: tuple[str, ...]) -> Iterator[RawHelper]:
    helper = open_helper(command)
    yield helper
    check_end(helper)


def test_no_message_breaks_an_init(fuzzed: RawHelper) -> None:
    @QUICK
    @given(SEEDS)
    def run(seed: int) -> None:
        fuzz_init(fuzzed, Garbage(seed), 50)

    run()


@pytest.mark.slow
def test_a_hundred_thousand_messages_break_nothing(sanitized: tuple[str, ...]) -> None:
    num_messages = 0
    helper = open_helper(sanitized)
    helper.tell(Op.DESTROY, 0)
    before = helper.num_fds()
    # Few long lives, where states meet, and many short ones, as a refused message is the last.
    for seed in range(20):
        num_messages += fuzz_helper(sanitized, seed, 500)
        num_messages += fuzz_hello(sanitized, seed)
    for seed in range(20, 100):
        num_messages += fuzz_helper(sanitized, seed, 20)
        num_messages += fuzz_hello(sanitized, seed)
    garbage = Garbage(0)
    while num_messages < 100_000:
        num_messages += fuzz_init(helper, garbage, 250)
    assert garbage.num_broken > 25_000
    assert helper.num_fds() <= before + 3
    check_end(helper)
