"""Boxes and layers on file systems that the owner has made."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_helper import COMMANDS, PYTHON, RawHelper, ended, shell

from burnish.sandbox.native.fallback import kernel
from burnish.sandbox.native.protocol import Flag, Op

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make file systems")

DISK_BYTES = 8 << 20
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4


def in_memory() -> int:
    return kernel.new_tree("tmpfs", 0, size=DISK_BYTES, nr_inodes=1024, mode="0755")


def on_loop(folder: Path) -> int:
    """An ext4 in a file that nobody but its loop device knows."""
    if shutil.which("mkfs.ext4") is None or not os.path.exists("/dev/loop-control"):
        pytest.skip("needs mkfs.ext4 and loop devices")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    os.close(control)
    device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
    file_fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    image.unlink()
    config = bytearray(struct.pack("<II52xI", file_fd, 0, _LO_FLAGS_AUTOCLEAR).ljust(304, b"\0"))
    fcntl.ioctl(device, _LOOP_CONFIGURE, config)
    os.close(file_fd)
    try:
        return kernel.new_tree("ext4", 0, source=f"/dev/loop{number}")
    finally:
        os.close(device)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    made = in_memory() if request.param == "tmpfs" else on_loop(tmp_path)
    yield made
    os.close(made)


def test_a_box_writes_to_the_disk_of_its_owner(helper: RawHelper, disk: int) -> None:
    box = helper.create(fds=[disk], flags=Flag.CREATE_UPPER, disk_bytes=0, num_inodes=0)
    assert box.put("big", bytes(2 * DISK_BYTES)) == errno.ENOSPC
    shell(box, "echo one > a; echo two > /dev/shm/b")
    assert helper.resize(box.number, 1 << 30).error == errno.EOPNOTSUPP
    assert helper.tell(Op.DESTROY, box.number).op is Op.DONE
    upper = os.open("u/work/a", os.O_RDONLY, dir_fd=disk)
    assert os.read(upper, 10) == b"one\n"
    os.close(upper)


def test_a_disk_becomes_a_layer(helper: RawHelper, disk: int) -> None:
    box = helper.create(fds=[disk], flags=Flag.CREATE_UPPER, shm_bytes=0)
    shell(box, "echo one > a")
    layer = helper.freeze(box)
    assert ended(box.pidfd)
    assert shell(helper.create(layers=[layer]), "cat a; echo two > a; cat a") == "one\ntwo\n"
    assert shell(helper.create(layers=[layer]), "cat a") == "one\n"


def test_a_layer_can_be_on_a_disk(helper: RawHelper, disk: int) -> None:
    reply = helper.new_layer(0, [disk], Flag.NEWLAYER_UPPER)
    assert reply.op is Op.DONE, reply.stage
    (layer,) = struct.unpack("<I", reply.body)
    os.close(os.open("made", os.O_CREAT | os.O_WRONLY, dir_fd=reply.fds[0]))
    os.close(reply.fds[0])
    assert shell(helper.create(layers=[layer]), "ls /made") == "/made\n"
    assert helper.tell(Op.DESTROY, layer).op is Op.DONE


def test_what_is_no_disk_is_refused_and_leaves_no_descriptor(
    helper: RawHelper, tmp_path: Path
) -> None:
    helper.create()
    helper.tell(Op.DESTROY, 0)
    before = helper.num_fds()
    folder = os.open(tmp_path, os.O_RDONLY)
    used = in_memory()
    os.mkdir("u", dir_fd=used)
    for given in (folder, used):
        for _ in range(5):
            assert helper.refused(fds=[given], flags=Flag.CREATE_UPPER) in (
                errno.EINVAL,
                errno.EEXIST,
            )
            assert helper.new_layer(0, [given], Flag.NEWLAYER_UPPER).op is Op.ERROR
        os.close(given)
    assert list(tmp_path.iterdir()) == []
    assert helper.num_fds() <= before + 2  # a child made ahead may be there or not


@pytest.mark.parametrize("name", ["c", "python"])
def test_an_ordinary_users_helper_refuses_a_disk_of_root(name: str) -> None:
    # Our own interpreter may be in a directory that only root enters.
    helper = RawHelper((PYTHON, *COMMANDS[name][1:]), num_ids=1, user=65534)
    if helper.ready.op is Op.ERROR:
        helper.end()
        pytest.skip("ordinary users make no namespaces here")
    disk = in_memory()
    assert helper.refused(fds=[disk], flags=Flag.CREATE_UPPER) == errno.EPERM
    os.close(disk)
    helper.end()


@pytest.mark.parametrize("num_fds", [0, 10])
def test_a_create_without_its_disk_is_malformed(helper: RawHelper, num_fds: int) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    helper.send_create(fds=[null] * num_fds, flags=Flag.CREATE_UPPER)
    os.close(null)
    assert helper.receive() is None
    status, said = helper.end()
    assert status == 1
    assert len(said.splitlines()) == 1
