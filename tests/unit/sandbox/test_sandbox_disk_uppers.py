"""Disks of boxes: exact sizes, nothing left behind, and a reason wherever they cannot be."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.core.boxes import Limits
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native import disk_storage
from burnish.sandbox.native.box_room import Room, cannot_change, room_for
from burnish.sandbox.native.disk_storage import open_uppers
from burnish.sandbox.native.disk_uppers import DiskUppers, is_broken
from burnish.sandbox.native.filesystems import NO_DEVICES, flush, new_filesystem
from burnish.sandbox.start import open_pool

MIB = 2**20


@pytest.fixture
def uppers(tmp_path: Path) -> Iterator[DiskUppers]:
    try:
        made = open_uppers(tmp_path)
    except UserError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def top_of(mount: int) -> int:
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)


def loops_over(folder: Path) -> list[str]:
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = path.read_text()
        except OSError:
            continue
        found += [name] if name.startswith(str(folder)) else []
    return found


@pytest.mark.parametrize(
    ("disk_bytes", "num_inodes"),
    [(64 * 2**10, 62), (64 * MIB, 16382), (700 * MIB, 1000), (MIB + 4096, 64)],
)
def test_a_disk_has_exactly_the_room_that_was_asked_for(
    uppers: DiskUppers, disk_bytes: int, num_inodes: int
) -> None:
    mount = uppers.make(disk_bytes, num_inodes, (0, 0))
    room = os.fstatvfs(mount)
    # Five directories of a block each, and as many inodes, are for the helper and the overlay.
    assert room.f_bavail * room.f_frsize == disk_bytes + 5 * 4096
    assert num_inodes + 5 <= room.f_favail <= num_inodes + 8
    os.close(mount)


def test_a_disk_is_empty_gives_no_rights_and_belongs_to_whom_it_is_for(uppers: DiskUppers) -> None:
    mount = uppers.make(MIB, 64, (1234, 5678))
    top = top_of(mount)
    status, room = os.fstat(top), os.fstatvfs(top)
    assert (status.st_uid, status.st_gid) == (1234, 5678)
    assert room.f_flag & os.ST_NOSUID
    assert room.f_flag & os.ST_NODEV
    assert [name for name in os.listdir(top) if not name.startswith(".")] == []
    os.close(top)
    os.close(mount)


def test_a_disk_vanishes_with_its_last_descriptor(uppers: DiskUppers, tmp_path: Path) -> None:
    mounts = [uppers.make(MIB, 64, (0, 0)) for _ in range(3)]
    assert len(loops_over(tmp_path)) == 3
    assert list(tmp_path.iterdir()) == []
    uppers.drop(mounts.pop(), unwanted=True)
    uppers.drop(mounts.pop(), unwanted=False)
    os.close(mounts.pop())
    while uppers.is_busy:
        continue
    assert loops_over(tmp_path) == []


def test_what_is_dropped_unread_is_not_written_out_first(uppers: DiskUppers) -> None:
    mount = uppers.make(64 * MIB, 64, (0, 0))
    with os.fdopen(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=mount), "wb") as file:
        file.write(bytes(32 * MIB))
    keep = top_of(mount)
    device = os.fstat(keep).st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    before = int(stat.read_text().split()[6])
    uppers.drop(mount, unwanted=True)
    while uppers.is_busy:
        continue
    with pytest.raises(OSError, match="Input/output error"):
        flush(keep)
    assert (int(stat.read_text().split()[6]) - before) * 512 < 32 * MIB
    os.close(keep)


OWNER = """
import sys, time
from pathlib import Path
from burnish.sandbox.native.disk_storage import open_uppers
uppers = open_uppers(Path(sys.argv[1]))
kept = [uppers.make(2**20, 64, (0, 0)) for _ in range(3)]
print("made", flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_no_device_and_no_file(uppers: DiskUppers, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "made\n"
        assert len(loops_over(tmp_path)) == 3
        owner.send_signal(signal.SIGKILL)
    # The kernel unmounts while the process ends; hangs, and so fails by the time limit, if not.
    while loops_over(tmp_path):
        continue
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_host(uppers: DiskUppers) -> Iterator[Path]:
    """A disk of a host with 300 MiB."""
    mount = uppers.make(300 * MIB, 1000, (0, 0))
    yield Path(f"/proc/self/fd/{mount}")
    os.close(mount)


def test_blocks_are_set_aside_when_a_disk_is_made_and_come_back(small_host: Path) -> None:
    host = open_uppers(small_host)
    free = os.statvfs(small_host).f_bavail
    first = host.make(200 * MIB, 64, (0, 0))
    assert (free - os.statvfs(small_host).f_bavail) * 4096 >= 200 * MIB
    with pytest.raises(OSError, match="bytes left and a box may store 209715200") as caught:
        host.make(200 * MIB, 64, (0, 0))
    assert caught.value.errno == errno.ENOSPC
    host.drop(first, unwanted=True)
    # One that is about to be freed is waited for.
    host.drop(host.make(200 * MIB, 64, (0, 0)), unwanted=True)
    host.close()
    while os.statvfs(small_host).f_bavail < free:
        continue


def test_a_disk_that_the_kernel_found_broken_is_known(uppers: DiskUppers) -> None:
    mount = uppers.make(MIB, 64, (0, 0))
    top = top_of(mount)
    assert not is_broken(top)
    device = os.fstat(top).st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("by a test")
    assert is_broken(top)
    os.close(top)
    os.close(mount)


def reason(directory: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        open_uppers(directory)
    assert "storage" in caught.value.fix
    return caught.value.what


def test_a_directory_that_does_not_do_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in reason(tmp_path / "absent")
    (tmp_path / "file").touch()
    assert "Not a directory" in reason(tmp_path / "file")
    assert "O_TMPFILE" in reason(Path("/proc"))
    if os.geteuid() == 0:
        memory = new_filesystem("tmpfs", NO_DEVICES, size="1m")
        assert "in memory (tmpfs)" in reason(Path(f"/proc/self/fd/{memory}"))
        os.close(memory)


def test_a_disk_without_room_is_refused(uppers: DiskUppers) -> None:
    mount = uppers.make(100 * MIB, 1000, (0, 0))
    assert "100 MiB left" in reason(Path(f"/proc/self/fd/{mount}"))
    os.close(mount)


def test_a_machine_that_lacks_something_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_storage, "find_mkfs", lambda: None)
        patch.setattr("os.geteuid", lambda: 0)
        assert "mkfs.ext4" in reason(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 1000)
        assert "root" in reason(tmp_path)

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOENT, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(disk_storage, "find_mkfs", lambda: "/sbin/mkfs.ext4")
        patch.setattr(disk_storage, "DiskUppers", refuse)
        patch.setattr("os.geteuid", lambda: 0)
        with pytest.raises(UserError, match="loop devices") as caught:
            open_uppers(tmp_path)
        assert "modprobe loop" in caught.value.fix


@pytest.mark.parametrize("backend", ["bubblewrap", "gvisor", "remote"])
def test_only_the_native_backend_writes_to_disks(backend: str) -> None:
    config = SandboxConfig.model_validate({"backend": backend, "storage": "disk"})
    with pytest.raises(UserError, match=r"in memory|other hosts"):
        open_pool(config)


def test_a_room_that_cannot_change_is_named() -> None:
    default, more = room_for(Limits()), room_for(Limits(disk_bytes=2**30, num_inodes=2**14))
    assert "disk_bytes" in cannot_change(default, more).what
    assert "num_inodes" in cannot_change(default, Room(default.disk_bytes, 9, 0)).what
