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
    shell,
)

from burnish.sandbox.native.protocol import Flag, Op


def test_files_go_in_and_out(box: RawBox) -> None:
    data = os.urandom(3 << 20)
    assert box.put("a/b/c", data, mode=0o640).op is Op.DONE
    assert shell(box, "stat -c '%a %u' a/b/c") == f"640 {box.job_id}\n"
    assert box.get("a/b/c", 1 << 30) == data
    assert box.get("a/b/c", 10) == data[:10]
    assert box.put("a/b/c", b"new").op is Op.DONE
    assert box.get("a/b/c") == b"new"
    assert shell(box, "ls -A a/b") == "c\n"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a/b/"])
def test_paths_that_leave_the_directory_are_refused(box: RawBox, path: str) -> None:
    assert box.put(path, b"x").op is Op.ERROR
    assert isinstance(box.get(path), int)


def test_links_and_specials_are_never_followed_or_read(box: RawBox) -> None:
    shell(box, "ln -s /etc/passwd link; ln -s /tmp away; mkfifo fifo; mkdir dir")
    for path in ("link", "fifo", "dir", "away/x", "absent"):
        assert box.get(path) == errno.ENOENT, path
    assert box.put("away/x", b"").op is Op.ERROR
    assert box.put("dir", b"").error in (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
    assert box.put("link", b"mine").op is Op.DONE
    assert box.get("link") == b"mine"
    assert shell(box, "cat /etc/passwd").startswith("root")


def test_a_full_disk_is_an_error_and_leaves_no_rest(helper: RawHelper) -> None:
    box = helper.create(1, disk_bytes=1 << 20)
    assert box.put("big", bytes(2 << 20)).error == errno.ENOSPC
    assert shell(box, "ls -A /work") == ""
    assert box.put("small", b"x").op is Op.DONE


def test_sizes_and_numbers_of_files_are_bounded(helper: RawHelper) -> None:
    box = helper.create(1, disk_bytes=1 << 20, num_inodes=32, shm_bytes=1 << 20)
    assert shell(box, "head -c 2000000 /dev/zero > f; stat -c %s f") == f"{1 << 20}\n"
    assert (
        shell(box, "head -c 2000000 /dev/zero > /dev/shm/f; stat -c %s /dev/shm/f")
        == f"{1 << 20}\n"
    )
    shell(box, "rm f; cd /tmp; touch $(seq 100) 2>/dev/null; :")
    assert 20 <= int(shell(box, "ls /tmp | wc -l")) <= 32
    assert helper.resize(1, 4 << 20).op is Op.DONE
    assert shell(box, "head -c 2000000 /dev/zero > f; stat -c %s f") == "2000000\n"
    assert helper.resize(1, 1 << 20).error == errno.EINVAL


def test_shared_memory_can_be_a_part_of_the_disk(helper: RawHelper) -> None:
    box = helper.create(1, disk_bytes=1 << 20, shm_bytes=0)
    shell(box, "head -c 900000 /dev/zero > /dev/shm/f")
    assert box.put("f", bytes(400_000)).error == errno.ENOSPC


def test_layers_stack_up_and_roll_back(helper: RawHelper) -> None:
    box = helper.create(1)
    shell(box, "echo one > a; echo keep > b")
    assert helper.tell(Op.FREEZE, 1, 10).op is Op.DONE
    assert ended(box.pidfd)
    box = helper.create(1, layers=[10])
    assert shell(box, "cat a b; rm b; echo two > a; cat a") == "one\nkeep\ntwo\n"
    assert helper.tell(Op.FREEZE, 1, 11).op is Op.DONE
    assert shell(helper.create(1, layers=[10, 11]), "cat a; ls") == "two\na\n"
    forks = [helper.create(number, layers=[10]) for number in range(2, 6)]
    assert [shell(fork, "cat a; echo $RANDOM > a") for fork in forks] == ["one\n"] * 4


def freeze_early(helper: RawHelper, box: int, layer: int) -> None:
    body = struct.pack("<II", box, layer)
    assert helper.ask(Op.FREEZE, body, flags=Flag.FREEZE_EARLY).op is Op.DONE


def wait_until_dead(helper: RawHelper, box: int) -> None:
    died = helper.receive()
    assert died is not None
    assert (died.op, died.id) == (Op.DIED, 0)
    assert struct.unpack_from("<I", died.body) == (box,)


def test_an_early_freeze_tells_later_when_the_processes_are_gone(helper: RawHelper) -> None:
    box = helper.create(1)
    shell(box, "echo one > a; echo two > /dev/shm/b")
    freeze_early(helper, 1, 10)
    wait_until_dead(helper, 1)
    assert ended(box.pidfd)
    assert shell(helper.create(1, layers=[10]), "cat a") == "one\n"


def test_nothing_changes_a_layer_after_an_early_freeze(helper: RawHelper) -> None:
    box = helper.create(1)
    writer = "exec 3> a; (while echo more >&3; do :; done) & echo"
    box.exec("sh", "-c", writer, flags=Flag.EXEC_KEEP)
    shell(box, "while [ ! -s a ]; do :; done", flags=Flag.EXEC_KEEP)
    freeze_early(helper, 1, 10)
    size = os.stat("work/a", dir_fd=box.upper).st_size
    assert size > 0
    wait_until_dead(helper, 1)
    assert os.stat("work/a", dir_fd=box.upper).st_size == size


def test_an_early_freeze_of_a_dead_box_is_only_answered(helper: RawHelper) -> None:
    box = helper.create(1)
    shell(box, "echo one > a")
    os.kill(box.pid, signal.SIGKILL)
    wait_until_dead(helper, 1)
    freeze_early(helper, 1, 10)
    assert shell(helper.create(1, layers=[10]), "cat a") == "one\n"


def test_an_unchanged_box_is_not_frozen(helper: RawHelper) -> None:
    box = helper.create(1)
    box.exec("sh", "-c", "sleep 1000 &", flags=Flag.EXEC_KEEP)
    assert helper.tell(Op.FREEZE, 1, 10).error == errno.ENODATA
    assert shell(box, COUNT) == "3\n"


def test_a_layer_that_is_dropped_stays_for_those_that_use_it(helper: RawHelper) -> None:
    shell(helper.create(1), "echo one > a")
    helper.tell(Op.FREEZE, 1, 10)
    box = helper.create(1, layers=[10])
    assert helper.tell(Op.DROP, 10).op is Op.DONE
    assert shell(box, "cat a") == "one\n"
    assert helper.tell(Op.DROP, 10).error == errno.ENOENT
    assert helper.refused(2, layers=[10]) in (errno.ENOENT, errno.EINVAL)


def test_the_owner_can_fill_a_layer(helper: RawHelper) -> None:
    reply = helper.new_layer(10)
    (directory,) = reply.fds
    file = os.open("note", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=directory)
    os.write(file, b"from outside")
    os.close(file)
    assert shell(helper.create(1, layers=[10]), "cat /note") == "from outside"
    (again,) = helper.tell(Op.LAYERFD, 10).fds
    assert os.listdir(again) == ["note"]
    os.close(again)
    os.close(directory)
    assert helper.new_layer(10).error == errno.EEXIST
    assert helper.tell(Op.LAYERFD, 11).error == errno.ENOENT


def test_sixteen_layers_are_enough_for_everybody(helper: RawHelper) -> None:
    for number in range(16):
        shell(helper.create(1, layers=range(number)), f"echo {number} > {number}")
        assert helper.tell(Op.FREEZE, 1, number).op is Op.DONE
    assert len(shell(helper.create(1, layers=range(16)), "ls").split()) == 16
