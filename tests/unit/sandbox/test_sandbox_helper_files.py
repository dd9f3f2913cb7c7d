"""Files that go in and out, and layers."""

import errno
import os
import signal
import struct

import pytest
from raw_helper import (
    COUNT,
    RawBox,
    RawHelper,
    ended,
    job_body,
    open_helper,
    shell,
)

from burnish.sandbox.native.protocol import Ending, Flag, Op

ENDING = (Op.FREEZE, Op.DESTROY)


def test_files_go_in_and_out(box: RawBox) -> None:
    data = os.urandom(3 << 20)
    assert box.put("a/b/c", data, mode=0o640) == 0
    assert shell(box, "stat -c '%a %u' a/b/c") == f"640 {box.job_id}\n"
    assert box.get("a/b/c", 1 << 30) == data
    # A hole, which says how long the file is.
    assert box.get("a/b/c", 10) == bytes(len(data))
    assert box.put("a/b/c", b"new") == 0
    assert box.get("a/b/c") == b"new"
    assert shell(box, "ls -A a/b") == "c\n"


def test_no_program_can_take_the_names_that_files_have_on_their_way_in(box: RawBox) -> None:
    shell(box, "i=0; while [ $i -lt 1000 ]; do : > .put-$i; : > .incoming-$i; i=$((i+1)); done")
    assert box.put("a", b"data") == 0
    assert box.get("a") == b"data"
    assert shell(box, "ls -A | wc -l") == "2001\n"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a/b/"])
def test_paths_that_leave_the_directory_are_refused(box: RawBox, path: str) -> None:
    assert box.put(path, b"x") > 0
    assert isinstance(box.get(path), int)


def test_links_and_specials_are_never_followed_or_read(box: RawBox) -> None:
    shell(box, "ln -s /etc/passwd link; ln -s /tmp away; mkfifo fifo; mkdir dir")
    for path in ("link", "fifo", "dir", "away/x", "absent"):
        assert box.get(path) == errno.ENOENT, path
    assert box.put("away/x", b"") > 0
    assert box.put("dir", b"") in (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
    assert box.put("link", b"mine") == 0
    assert box.get("link") == b"mine"
    assert shell(box, "cat /etc/passwd").startswith("root")


def test_files_go_in_and_out_beside_what_was_kept(box: RawBox) -> None:
    shell(box, "sleep 1000 & echo", flags=Flag.EXEC_KEEP)
    assert box.put("a", b"data") == 0
    assert box.get("a") == b"data"
    assert int(shell(box, COUNT, flags=Flag.EXEC_KEEP)) == 3


def test_a_file_that_takes_too_long_ends_no_process_that_was_kept() -> None:
    helper = open_helper("c")  # the one in Python needs no limit: nobody can stop its init
    box = helper.create()
    null = os.open("/dev/null", os.O_RDWR)
    shell(box, "truncate -s 8T endless; sleep 1000 & echo", flags=Flag.EXEC_KEEP)
    body = job_body(box.job_id, ["endless"], detail=2**64 - 1, wall_us=50_000)
    box.send(Op.GET, body, [null] * 3, Flag.EXEC_KEEP)
    assert box.exited()[:2] == (Ending.TIMEOUT, 0)
    assert int(shell(box, COUNT, flags=Flag.EXEC_KEEP)) == 3
    os.close(null)
    helper.end()


def test_a_path_is_what_the_message_has(box: RawBox) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for op in (Op.PUT, Op.GET):
        box.send(op, job_body(box.job_id), [null] * 3, Flag.EXEC_KEEP)
        assert box.exited()[:2] == (Ending.NOT_STARTED, errno.EINVAL)
    os.close(null)


def test_a_full_disk_is_an_error_and_leaves_no_rest(helper: RawHelper) -> None:
    box = helper.create(disk_bytes=1 << 20)
    assert box.put("big", bytes(2 << 20)) == errno.ENOSPC
    assert shell(box, "ls -A /work") == ""
    assert box.put("small", b"x") == 0


def test_sizes_and_numbers_of_files_are_bounded(helper: RawHelper) -> None:
    box = helper.create(disk_bytes=1 << 20, num_inodes=32, shm_bytes=1 << 20)
    assert shell(box, "head -c 2000000 /dev/zero > f; stat -c %s f") == f"{1 << 20}\n"
    assert (
        shell(box, "head -c 2000000 /dev/zero > /dev/shm/f; stat -c %s /dev/shm/f")
        == f"{1 << 20}\n"
    )
    shell(box, "rm f; cd /tmp; touch $(seq 100) 2>/dev/null; :")
    assert 20 <= int(shell(box, "ls /tmp | wc -l")) <= 32
    assert helper.resize(box.number, 4 << 20).op is Op.DONE
    assert shell(box, "head -c 2000000 /dev/zero > f; stat -c %s f") == "2000000\n"
    assert helper.resize(box.number, 1 << 20).error == errno.EINVAL


def test_shared_memory_can_be_a_part_of_the_disk(helper: RawHelper) -> None:
    box = helper.create(disk_bytes=1 << 20, shm_bytes=0)
    shell(box, "head -c 900000 /dev/zero > /dev/shm/f")
    assert box.put("f", bytes(400_000)) == errno.ENOSPC


def test_layers_stack_up_and_roll_back(helper: RawHelper) -> None:
    box = helper.create()
    shell(box, "echo one > a; echo keep > b")
    first = helper.freeze(box)
    assert ended(box.pidfd)
    box = helper.create(layers=[first])
    assert shell(box, "cat a b; rm b; echo two > a; cat a") == "one\nkeep\ntwo\n"
    second = helper.freeze(box)
    assert shell(helper.create(layers=[first, second]), "cat a; ls") == "two\na\n"
    forks = [helper.create(layers=[first]) for _ in range(4)]
    assert [shell(fork, "cat a; echo $RANDOM > a") for fork in forks] == ["one\n"] * 4


def test_nothing_changes_a_layer_once_the_freeze_is_answered(helper: RawHelper) -> None:
    box = helper.create()
    writer = "exec 3> a; (while echo more >&3; do :; done) & echo"
    box.exec("sh", "-c", writer, flags=Flag.EXEC_KEEP)
    shell(box, "while [ ! -s a ]; do :; done", flags=Flag.EXEC_KEEP)
    assert helper.tell(Op.FREEZE, box.number).op is Op.DONE
    size = os.stat("work/a", dir_fd=box.upper).st_size
    assert size > 0
    helper.receive_died(box.number)
    assert os.stat("work/a", dir_fd=box.upper).st_size == size


def test_the_freeze_of_a_dead_box_is_only_answered(helper: RawHelper) -> None:
    box = helper.create()
    shell(box, "echo one > a")
    os.kill(box.pid, signal.SIGKILL)
    helper.receive_died(box.number)
    assert helper.tell(Op.FREEZE, box.number).op is Op.DONE
    assert shell(helper.create(layers=[box.number]), "cat a") == "one\n"
    assert helper.tell(Op.FREEZE, box.number).error == errno.ENOENT


def test_a_layer_can_be_destroyed_while_its_processes_end(helper: RawHelper) -> None:
    box = helper.create()
    shell(box, "echo one > a; sleep 1000 &", flags=Flag.EXEC_KEEP)
    freeze, destroy = (helper.send(op, struct.pack("<I", box.number)) for op in ENDING)
    answers = [helper.receive(), helper.receive()]
    if answers[1] is not None and answers[1].op is Op.DIED:
        answers[1] = helper.receive()
    assert [answer.id for answer in answers if answer is not None] == [freeze, destroy]
    assert ended(box.pidfd)
    assert helper.tell(Op.LAYERFD, box.number).error == errno.ENOENT


def test_a_layer_that_is_dropped_stays_for_those_that_use_it(helper: RawHelper) -> None:
    box = helper.create()
    shell(box, "echo one > a")
    layer = helper.freeze(box)
    box = helper.create(layers=[layer])
    assert helper.tell(Op.DESTROY, layer).op is Op.DONE
    assert shell(box, "cat a") == "one\n"
    assert helper.tell(Op.DESTROY, layer).error == errno.ENOENT
    assert helper.refused(layers=[layer]) == errno.ENOENT


def test_the_owner_can_fill_a_layer(helper: RawHelper) -> None:
    reply = helper.new_layer()
    (directory,), (layer,) = reply.fds, struct.unpack("<I", reply.body)
    file = os.open("note", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=directory)
    os.write(file, b"from outside")
    os.close(file)
    assert shell(helper.create(layers=[layer]), "cat /note") == "from outside"
    (again,) = helper.tell(Op.LAYERFD, layer).fds
    assert os.listdir(again) == ["note"]
    os.close(again)
    os.close(directory)
    assert helper.resize(layer, 1 << 20).error == errno.ENOENT
    assert helper.tell(Op.LAYERFD, 999).error == errno.ENOENT


def test_sixteen_layers_are_enough_for_everybody(helper: RawHelper) -> None:
    layers: list[int] = []
    for number in range(16):
        box = helper.create(layers=layers)
        shell(box, f"echo {number} > {number}")
        layers.append(helper.freeze(box))
    assert len(shell(helper.create(layers=layers), "ls").split()) == 16
    assert helper.refused(layers=[*layers, layers[0]]) == errno.EINVAL
    assert helper.refused(layers=[layers[0]] * 2) == errno.ENOENT
