"""Death and garbage: nothing is left, nothing misleads."""

import array
import errno
import os
import shutil
import signal
import socket
import struct
from pathlib import Path

import pytest
from raw_helper import (
    COMMANDS,
    ROOT,
    RawBox,
    RawHelper,
    ended,
    many,
    memory_file,
    open_helper,
    shell,
    text,
)

from burnish.sandbox.cgroup import find_controllers, owner_name
from burnish.sandbox.native.binary import helper_problem
from burnish.sandbox.native.protocol import VERSION, Op


def test_the_end_of_an_init_is_reported(helper: RawHelper) -> None:
    box = helper.create()
    os.kill(box.pid, signal.SIGKILL)
    assert helper.receive_died(box.number) == signal.SIGKILL
    assert helper.tell(Op.DESTROY, box.number).op is Op.DONE
    helper.create()


def test_the_child_of_the_next_box_can_be_killed_like_any_process(helper: RawHelper) -> None:
    pid = helper.process.pid
    for number in range(5):
        waiting = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in waiting if number else ():
            if int(child) not in [box.pid for box in helper.boxes]:
                descriptor = os.pidfd_open(int(child))
                os.kill(int(child), signal.SIGKILL)
                assert ended(descriptor)
                os.close(descriptor)
                assert helper.tell(Op.DESTROY, 0).error == errno.ENOENT  # it has been reaped
        assert shell(helper.create(), "echo here") == "here\n"


@pytest.mark.skipif(not ROOT or not shutil.which("unshare"), reason="needs root and util-linux")
def test_a_box_for_which_there_is_no_process_ends_no_other() -> None:
    # In a pid namespace, as what went wrong here once was kill(-1).
    inner = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *COMMANDS["c"])
    controllers = find_controllers(
        Path("/proc/self/cgroup").read_text(),
        Path("/proc/self/mountinfo").read_text(),
        owner_name(part="faults"),
    )
    if controllers is None or not controllers.pids or helper_problem():
        pytest.skip("needs the pids controller and the compiled helper")
    group, helper = controllers.make("box"), RawHelper(inner)
    files = [Path(name) for name in group.attach_files()]
    (limit,) = [path for file in files if (path := file.with_name("pids.max")).exists()]
    try:
        box = helper.create()
        outer = helper.process.pid
        pid = Path(f"/proc/{outer}/task/{outer}/children").read_text().strip()
        for file in files:
            file.write_text(pid)
        limit.write_text("1")
        assert errno.EAGAIN in [refusal(helper) for _ in range(2, 6)]
        assert shell(box, "echo here") == "here\n"
        limit.write_text("max")
        assert shell(helper.create(), "echo here") == "here\n"
    finally:
        helper.end()
        while not group.remove():
            continue
        controllers.close()


def refusal(helper: RawHelper) -> int:
    """The error, or 0: a child that was made ahead needs no other."""
    helper.send_create()
    reply = helper.receive()
    assert reply is not None, "the helper is gone"
    if reply.op is Op.ERROR:
        return reply.error
    helper.boxes.append(RawBox(reply, helper.job_id))
    return 0


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_boxes_die_with_the_helper_and_the_helper_with_its_owner(
    helper: RawHelper, how: signal.Signals | None
) -> None:
    boxes = [helper.create() for _ in range(3)]
    boxes[0].start("sleep", "1000")
    watched = [os.dup(box.pidfd) for box in boxes]
    if how is not None:
        helper.process.send_signal(how)
    helper.close()
    assert all(ended(pidfd) for pidfd in watched)
    helper.process.wait(30)


def test_a_box_dies_when_its_owner_hangs_up(helper: RawHelper) -> None:
    box = helper.create()
    box.start("sleep", "1000")
    box.socket.shutdown(socket.SHUT_RDWR)
    died = helper.receive()
    assert died is not None
    assert died.op is Op.DIED


@pytest.mark.parametrize("data", [b"x", b"x" * 100, struct.pack("<IHHI", 12, 99, 0, 1)])
def test_an_init_that_gets_garbage_ends(helper: RawHelper, data: bytes) -> None:
    box = helper.create()
    box.socket.send(data)
    died = helper.receive()
    assert died is not None
    assert died.op is Op.DIED
    assert shell(helper.create(), "echo alive") == "alive\n"


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        struct.pack("<IHHI", 13, Op.DESTROY, 0, 1),
        struct.pack("<IHHI", 12, Op.DESTROY, 0, 1),
        struct.pack("<IHHI", 12, 99, 0, 1),
        struct.pack("<IHHI", 12, Op.EXEC, 0, 1),
        struct.pack("<IHHIII", 20, Op.DESTROY, 0, 1, 1, 1),
        struct.pack("<IHHII", 16, Op.DESTROY, 1, 1, 1),
        struct.pack("<IHHI", 44, Op.CREATE, 0, 1)
        + struct.pack("<IQIQII", 0, 1, 1, 1, 1, 2**32 - 1),
        struct.pack("<IHHIIQI", 28, Op.NEWLAYER, 0, 1, 7, 1 << 20, 100),
        bytes(200_000),
    ],
)
def test_a_malformed_message_ends_the_helper_with_one_line(helper_name: str, data: bytes) -> None:
    helper = open_helper(helper_name)
    box = helper.create()
    pidfd = os.dup(box.pidfd)
    helper.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    helper.socket.send(data)
    assert helper.receive() is None
    status, said = helper.end()
    assert status == 1
    assert len(said.splitlines()) == 1
    assert ended(pidfd)


@pytest.mark.parametrize("count", [1, 9, 16, 250])
def test_too_many_descriptors_end_the_helper(helper_name: str, count: int) -> None:
    helper = open_helper(helper_name)
    message = struct.pack("<IHHII", 16, Op.DESTROY, 0, 1, 1)
    rights = array.array("i", [0] * count)
    helper.socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    assert helper.receive() is None
    assert helper.end()[0] == 1


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_another_version_is_refused_in_words(helper_name: str, version: int) -> None:
    if helper_name == "c" and helper_problem():
        pytest.skip("the compiled helper is not there: install a C compiler, then Burnish again")
    helper = RawHelper(COMMANDS[helper_name], hello=False)
    body = struct.pack("<IIIII", version, 0, 0, 1, 0) + text("") + many([]) * 4
    file = memory_file(bytes(8))
    reply = helper.ask(Op.HELLO, body, [file])
    os.close(file)
    assert reply.op is Op.ERROR
    assert "version" in reply.stage
    helper.end()
