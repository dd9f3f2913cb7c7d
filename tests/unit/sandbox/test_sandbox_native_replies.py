"""Replies come out of boxes: whatever is wrong with one is found, and nothing else happens."""

import asyncio
import errno
import os
import socket
import struct
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.native import wire
from burnish.sandbox.native.init import Init
from burnish.sandbox.native.protocol import HEADER, MAX_MESSAGE_BYTES, Ending, Op
from burnish.sandbox.native.wire import BadReply

JOB = wire.Job(1000, 1, 2, ((7, 8, 9),), "/work", ("echo", "\udcff"), (("A", "1"),), {})


def exited(number: int = 1, ending: int = 0, code: int = 0) -> bytes:
    return wire.message(Op.EXITED, number, struct.pack("<IiQQQQ", ending, code, 1, 2, 3, 4))


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    with pytest.raises(BadReply):
        wire.read_exited(data, 1)


@given(
    data=st.builds(
        lambda number, ending, code, tail: exited(number, ending, code) + tail,
        st.integers(0, 3),
        st.integers(0, 6),
        st.integers(-2, 5000),
        st.binary(max_size=2),
    )
)
def test_only_an_end_that_a_command_can_have_is_believed(data: bytes) -> None:
    try:
        found = wire.read_exited(data, 1)
    except BadReply:
        return
    assert len(data) == len(exited())
    assert found.ending in Ending
    assert 0 <= found.code <= {Ending.EXITED: 255, Ending.SIGNALED: 64}.get(found.ending, 4095)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Ending.EXITED, 0),
        (Ending.EXITED, 255),
        (Ending.SIGNALED, 9),
        (Ending.TIMEOUT, 0),
        (Ending.NOT_STARTED, errno.ENOENT),
        (Ending.KILLED, 0),
    ],
)
def test_a_good_end_is_read(ending: Ending, code: int) -> None:
    found = wire.read_exited(exited(1, ending, code), 1)
    assert found == wire.Exited(ending, code, 1e-6, 5e-6, 4)


@pytest.mark.parametrize(
    ("ending", "code"),
    [(0, 256), (0, -1), (1, 0), (1, 65), (2, 1), (3, 0), (3, 4096), (4, 1), (5, 0)],
)
def test_an_impossible_end_is_refused(ending: int, code: int) -> None:
    with pytest.raises(BadReply):
        wire.read_exited(exited(1, ending, code), 1)


def test_the_answer_to_another_command_is_refused() -> None:
    with pytest.raises(BadReply):
        wire.read_exited(exited(2), 1)


@given(st.binary(max_size=40))
def test_errors_are_read_or_refused(body: bytes) -> None:
    reply = wire.Reply(Op.ERROR, 1, body)
    try:
        found = wire.read_error(reply)
    except BadReply:
        return
    assert found is not None
    assert 1 <= found[0] <= 4095
    assert struct.unpack_from("<I", body, 4)[0] == len(body) - 8


def test_the_body_of_a_command_has_the_layout_of_the_protocol() -> None:
    def begun(num_variables: int) -> bytes:
        return struct.pack("<QQIIIIII", 1000, 0, 1, 2, 1, 3, 2, num_variables)

    rest = struct.pack("<IQQ", 7, 8, 9) + b"/work\0"
    rest += b"/usr/local/bin/echo\0/usr/bin/echo\0/bin/echo\0echo\0\xff\0"
    assert wire.exec_body(JOB) == begun(1) + rest + b"A=1\0"
    named = wire.exec_body(JOB._replace(env={"A": "2", "B": "3"}))
    assert named == begun(2) + rest + b"A=2\0B=3\0"


def test_the_bodies_of_python_and_of_files_are_those_of_commands() -> None:
    part = wire.PythonPart(wire.PythonKind.MODULE, wire.PythonOption.ISOLATED, b"code")
    body = wire.exec_body(JOB._replace(python=part, rlimits=()))
    head = struct.pack("<QIIIIIIII", 1000, 2, 1, 1, 2, 0, 1, 1, 1)
    assert body == head + b"/work\0code\0\xff\0A=1\0"
    head = struct.pack("<QQIIIIII", 20_000_000, 0o644, 1, 2, 0, 0, 1, 0)
    assert wire.file_body((1, 2), 0o644, "a/b") == head + b"/\0a/b\0"


def test_a_message_that_is_too_long_is_not_built() -> None:
    assert len(wire.message(Op.EXEC, 1, bytes(MAX_MESSAGE_BYTES - HEADER.size))) > 0
    with pytest.raises(ValueError, match="bytes"):
        wire.message(Op.EXEC, 1, bytes(MAX_MESSAGE_BYTES))


def test_a_nul_byte_in_a_path_is_not_sent() -> None:
    with pytest.raises(ValueError, match="NUL"):
        wire.file_body((0, 0), 0, "a\0b")


class HostileInit:
    """A process that stands for an init, and the box's end of its socket."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pidfd = os.pidfd_open(self.process.pid)
        folder = os.open("/", os.O_RDONLY)
        self.init = Init(1, self.process.pid, (ours.detach(), pidfd, folder))

    def close(self) -> None:
        self.init.close()
        self.theirs.close()
        self.process.kill()
        self.process.wait()


READY = wire.message(Op.READY, 0)


def answer(
    data: bytes, fds: tuple[int, ...] = (), first: bytes = READY, op: Op = Op.LISTEN
) -> tuple[HostileInit, BaseException | object]:
    hostile = HostileInit()
    hostile.theirs.send(first)

    async def ask() -> object:
        socket.send_fds(hostile.theirs, [data], fds)
        if op is Op.LISTEN:
            return await hostile.init.ask(op, b"")
        return await hostile.init.transfer(op, b"", hostile.init.upper_fd, False)

    try:
        return hostile, asyncio.run(ask())
    except (OSError, ClassifiedFailure) as error:
        return hostile, error
    finally:
        hostile.close()


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        bytes(12),
        wire.message(Op.DONE, 2),
        wire.message(Op.EXITED, 1),
        wire.message(Op.DONE, 1, flags=1),
        wire.message(Op.ERROR, 1, b"1234"),
        wire.message(Op.DONE, 1, bytes(5000)),
    ],
)
def test_an_init_that_breaks_the_protocol_is_killed(data: bytes) -> None:
    hostile, outcome = answer(data)
    assert isinstance(outcome, ClassifiedFailure)
    assert hostile.init.dead
    assert hostile.process.returncode == -9


@pytest.mark.parametrize(
    "data", [b"x", wire.message(Op.DONE, 1), exited(2), exited(1, 3, 0), wire.message(Op.EXITED, 1)]
)
def test_a_file_is_where_it_belongs_only_if_the_init_says_so(data: bytes) -> None:
    hostile, outcome = answer(data, op=Op.PUT)
    assert isinstance(outcome, ClassifiedFailure)
    assert hostile.process.returncode == -9


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (exited(1, Ending.NOT_STARTED, errno.ENOSPC), errno.ENOSPC),
        (exited(1, Ending.TIMEOUT), errno.ETIMEDOUT),
        (exited(1, Ending.SIGNALED, 9), errno.EIO),
        (exited(1, Ending.EXITED, 1), errno.EIO),
        (wire.message(Op.ERROR, 1, struct.pack("<iI", errno.EBUSY, 0)), errno.EBUSY),
    ],
)
def test_what_keeps_a_file_from_being_moved_is_an_error(data: bytes, number: int) -> None:
    hostile, outcome = answer(data, op=Op.GET)
    assert isinstance(outcome, OSError)
    assert outcome.errno == number
    assert not hostile.init.dead
    assert answer(exited(), op=Op.GET)[1] is None


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    null = os.open("/dev/null", os.O_RDONLY)
    hostile, outcome = answer(wire.message(Op.DONE, 2), (null, null, null))
    assert isinstance(outcome, ClassifiedFailure)
    assert answer(exited(), (null, null), op=Op.PUT)[1] is None
    hostile, outcome = answer(wire.message(Op.ERROR, 1, struct.pack("<iI", 2, 0)), (null, null))
    assert isinstance(outcome, FileNotFoundError)
    assert not hostile.init.dead
    os.close(null)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "first",
    [
        b"x",
        wire.message(Op.READY, 1),
        wire.message(Op.READY, 0, b"more"),
        wire.message(Op.DONE, 0),
        wire.message(Op.ERROR, 0, b"short"),
        wire.message(Op.ERROR, 1, struct.pack("<iI", errno.ENOMEM, 0)),
    ],
)
def test_an_init_that_begins_with_nonsense_is_killed(first: bytes) -> None:
    hostile, outcome = answer(wire.message(Op.DONE, 1), first=first)
    assert isinstance(outcome, ClassifiedFailure)
    assert hostile.process.returncode == -9


# The second is a TimeoutError, and none of ours.
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ETIMEDOUT])
def test_an_init_says_why_it_could_not_start(number: int) -> None:
    first = wire.message(Op.ERROR, 0, struct.pack("<iI", number, 5) + b"stage")
    _, outcome = answer(b"", first=first)
    assert isinstance(outcome, OSError)
    assert outcome.errno == number
    assert "stage" in str(outcome)


def test_an_init_that_hangs_up_is_a_broken_box_and_no_traceback() -> None:
    hostile = HostileInit()
    hostile.theirs.close()
    try:
        with pytest.raises(ClassifiedFailure):
            asyncio.run(hostile.init.ask(Op.LISTEN, b""))
    finally:
        hostile.close()
