"""A hundred thousand replies of a hostile init, judged by the owner as a second reader judges them.

About half are what is due; the others are forged, cut, padded, doubled, or come with descriptors.
"""

import asyncio
import os
import random
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Limits
from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.native import wire
from burnish.sandbox.native.gauge import Gauge
from burnish.sandbox.native.init import Init
from burnish.sandbox.native.protocol import HEADER, Ending, Op
from burnish.sandbox.native.run import Request, Run
from burnish.sandbox.outcome import cpu_used_up

JOB = wire.Job(1_000_000, 1, 2, (), "/work", ("true",), (), {})
REQUEST = Request(JOB, b"", Limits(), False, False)
READY = wire.message(Op.READY, 0)
EDGES = (0, 1, 2, 9, 64, 65, 255, 256, 4095, 4096, 2**31 - 1, 2**31, 2**32 - 1)
SIGNALS = {
    signal.SIGSYS: ExecStatus.POLICY,
    signal.SIGXFSZ: ExecStatus.DISK,
    signal.SIGXCPU: ExecStatus.TIMEOUT,
}
"""Those that limits are enforced with."""
MOST_READ_BYTES = 512
"""The owner takes no more of a reply."""


class Forger:
    """Replies between right and random; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def u32(self, most: int) -> int:
        dice = self.random
        return dice.choice(EDGES) if dice.random() < 0.2 else dice.randrange(most + 1)

    def end(self, number: int) -> bytes:
        """Of a command: mostly an end that it can have."""
        dice = self.random
        ending = self.u32(len(Ending) - 1)
        code = self.u32({0: 255, 1: 64, 3: 40}.get(ending, 0))
        used = (dice.choice((0, 1, 10**6, 2**64 - 1)) for _ in range(4))
        return wire.message(Op.EXITED, number, struct.pack("<IIQQQQ", ending, code, *used))

    def error(self, number: int) -> bytes:
        stage = self.random.randbytes(self.random.randrange(20))
        length = len(stage) if self.random.random() < 0.8 else self.u32(30)
        return wire.message(Op.ERROR, number, struct.pack("<II", self.u32(133), length) + stage)

    def reply(self, number: int, due: Op) -> bytes:
        """To request `number`, with something wrong in about half of all cases."""
        dice = self.random
        if dice.random() < 0.05:
            number = dice.choice((0, number - 1, number + 1, 2**32 - 1)) % 2**32
        if dice.random() < 0.05:
            op = dice.choice((*Op, dice.randrange(2**16)))
            data = HEADER.pack(HEADER.size, op, 0, number)
        elif due is Op.EXITED:
            data = self.end(number)
        else:
            data = self.error(number) if dice.random() < 0.3 else wire.message(due, number)
        return self.spoiled(data) if dice.random() < 0.4 else data

    def spoiled(self, data: bytes) -> bytes:
        dice = self.random
        kind = dice.randrange(5)
        if kind == 0:
            return data[: dice.randrange(1, len(data))]
        if kind == 1:
            return data + dice.randbytes(dice.choice((1, 4, 100, 600, 5000)))
        if kind == 2:
            return dice.randbytes(dice.randrange(1, 100))
        if kind == 3:
            size = dice.choice((*EDGES, MOST_READ_BYTES))
            return struct.pack("<I", size) + data[4:] + bytes(dice.choice((0, 600)))
        changed = bytearray(data)
        for _ in range(dice.randrange(1, 4)):
            changed[dice.randrange(len(data))] = dice.randrange(256)
        return bytes(changed)

    def num_fds(self) -> int:
        return self.random.choice((0, 0, 0, 1, 2, 3, 50))


class Reading(NamedTuple):
    """What a reply is by the protocol."""

    op: int
    numbers: tuple[int, ...]


def read(data: bytes, number: int) -> Reading | None:
    """A second reader, with nothing of the first. None: it breaks the protocol."""
    if len(data) < 12:
        return None
    size, op, flags, answered = struct.unpack("<IHHI", data[:12])
    if (size, flags, answered) != (len(data), 0, number):
        return None
    body = data[12:]
    if op == Op.ERROR:
        if len(body) < 8:
            return None
        error, length = struct.unpack("<iI", body[:8])
        return Reading(op, (error,)) if 0 < error < 4096 and length == len(body) - 8 else None
    if op == Op.EXITED:
        if len(body) != 40:
            return None
        ending, code = struct.unpack("<Ii", body[:8])
        first, last = {0: (0, 255), 1: (1, 64), 2: (0, 0), 3: (1, 4095), 4: (0, 0)}.get(
            ending, (1, 0)
        )
        return Reading(op, (ending, code)) if first <= code <= last else None
    return Reading(op, ())


class Stage:
    """An owner's end, and a hostile one. Its process has ended: there is nothing to be killed."""

    def __init__(self, ended_pid: int, first: bytes = READY) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = (ours.detach(), os.pidfd_open(ended_pid), os.open("/", os.O_RDONLY))
        self.init = Init(1, ended_pid, files)
        self.num_asked = 0
        self.theirs.send(first)

    def send(self, data: bytes, fds: list[int]) -> None:
        socket.send_fds(self.theirs, [data], fds)

    def close(self) -> None:
        self.init.close()
        self.theirs.close()


@pytest.fixture
def ended_pid() -> Iterator[int]:
    """Of a child that nobody has waited for: the number belongs to nothing else, and no one."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


async def ask(stage: Stage, forger: Forger, null: int) -> None:
    """One question; what comes of it is what the second reader says."""
    stage.num_asked += 1
    data = forger.reply(stage.num_asked, Op.DONE)
    num_fds = forger.num_fds()
    stage.send(data, [null] * num_fds)
    found = read(data[:MOST_READ_BYTES], stage.num_asked)
    if found is None or found.op not in (Op.DONE, Op.ERROR):
        with pytest.raises(ClassifiedFailure):
            await stage.init.ask(Op.LISTEN, b"")
        assert stage.init.dead, data
    elif found.op == Op.ERROR:
        # Its class depends on the number, and may be TimeoutError.
        with pytest.raises(OSError) as caught:  # noqa: PT011
            await stage.init.ask(Op.LISTEN, b"")
        assert caught.value.errno == found.numbers[0]
        assert not stage.init.dead
    else:
        _, descriptor = await stage.init.ask(Op.LISTEN, b"")
        assert (descriptor >= 0) is (num_fds > 0)
        if descriptor >= 0:
            os.close(descriptor)
        assert not stage.init.dead
    stage.theirs.recv(1 << 16)


async def move(stage: Stage, forger: Forger, null: int) -> None:
    """One file; it is there only if the second reader says so."""
    stage.num_asked += 1
    data = forger.reply(stage.num_asked, Op.EXITED)
    stage.send(data, [null] * forger.num_fds())
    found = read(data[:MOST_READ_BYTES], stage.num_asked)
    if found is None or found.op not in (Op.EXITED, Op.ERROR):
        with pytest.raises(ClassifiedFailure):
            await stage.init.transfer(Op.PUT, b"", null, False)
        assert stage.init.dead, data
    elif found == Reading(Op.EXITED, (Ending.EXITED, 0)):
        await stage.init.transfer(Op.PUT, b"", null, False)
        assert not stage.init.dead
    else:
        with pytest.raises(OSError):  # noqa: PT011
            await stage.init.transfer(Op.PUT, b"", null, False)
        assert not stage.init.dead
    stage.theirs.recv(1 << 16)


async def run(stage: Stage, forger: Forger, null: int) -> None:
    """One command; an end is believed only if it is one."""
    gauge = Gauge(None, None)
    gauge.begin(REQUEST.limits, stage.init, busy=False)
    stage.num_asked += 1
    data = forger.reply(stage.num_asked, Op.EXITED)
    stage.send(data, [null] * forger.num_fds())
    result = await Run(stage.init, gauge, REQUEST, null).result()
    found = read(data, stage.num_asked)
    is_end = found is not None and found.op == Op.EXITED
    assert stage.init.dead is not is_end, data
    if found is not None and is_end:
        check_end(result, *found.numbers)
    else:
        assert result.status is ExecStatus.INFRA_ERROR, (data, result)
    stage.theirs.recv(1 << 16)


def check_end(result: ExecResult, ending: int, code: int) -> None:
    if ending == Ending.EXITED:
        assert result.status is (ExecStatus.EXIT if code else ExecStatus.OK)
        assert result.exit_code == code
    elif ending == Ending.SIGNALED:
        expected = SIGNALS.get(code, ExecStatus.SIGNAL)
        if code == signal.SIGXCPU and not cpu_used_up(result.usage.cpu_s, REQUEST.limits.cpu_s):
            expected = ExecStatus.SIGNAL
        assert result.status is expected
        assert (result.exit_code, result.signal) == (None, code)
    else:
        assert result.status is not ExecStatus.OK
        if ending == Ending.TIMEOUT:
            assert result.status is ExecStatus.TIMEOUT
        if ending == Ending.KILLED:
            assert result.status is ExecStatus.INFRA_ERROR  # we did not ask for it


async def greet(ended_pid: int, forger: Forger, null: int) -> None:
    """The first message of an init, and a question."""
    first = forger.reply(0, Op.READY)
    stage = Stage(ended_pid, first)
    stage.send(wire.message(Op.DONE, 1), [null] * forger.num_fds())
    found = read(first[:MOST_READ_BYTES], 0)
    is_ready = found is not None and found.op == Op.READY and len(first) == HEADER.size
    if found is not None and found.op == Op.ERROR:
        with pytest.raises(OSError) as caught:  # noqa: PT011
            await stage.init.ask(Op.LISTEN, b"")
        assert caught.value.errno == found.numbers[0]
    elif is_ready:
        _, descriptor = await stage.init.ask(Op.LISTEN, b"")
        if descriptor >= 0:
            os.close(descriptor)
    else:
        with pytest.raises(ClassifiedFailure):
            await stage.init.ask(Op.LISTEN, b"")
    assert stage.init.dead is not is_ready
    stage.close()


async def forge(ended_pid: int, seed: int, num_messages: int) -> None:
    forger, null = Forger(seed), os.open("/dev/null", os.O_RDONLY)
    stage = Stage(ended_pid)
    for number in range(num_messages):
        if number % 10 == 0:
            await greet(ended_pid, forger, null)
            continue
        await (run, ask, move)[number % 3](stage, forger, null)
        if stage.init.dead:
            stage.close()
            stage = Stage(ended_pid)
    stage.close()
    os.close(null)


def check_forged(ended_pid: int, num_messages: int) -> None:
    asyncio.run(forge(ended_pid, 0, 50))
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(forge(ended_pid, 1, num_messages))
    assert len(os.listdir("/proc/self/fd")) == before


def test_forged_replies_mislead_no_owner(ended_pid: int) -> None:
    check_forged(ended_pid, 2000)


@pytest.mark.slow
def test_a_hundred_thousand_forged_replies_mislead_no_owner(ended_pid: int) -> None:
    check_forged(ended_pid, 100_000)
