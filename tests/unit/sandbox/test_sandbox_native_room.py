"""How many boxes fit: each limit of a made-up host, and what is said when there are too many."""

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.core.errors import UserError
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native import box_process
from burnish.sandbox.native.box_process import BoxProcess, found_again
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.room import Host, bounds, make_room, memory_bound
from burnish.sandbox.start import open_pool

MANY = 2**60


def host(
    folder: Path, *, files: int = MANY, processes: int = MANY, tasks: int = 0, **numbers: int
) -> Host:
    """`numbers` are of /proc/sys, with two underscores for each slash."""
    proc = folder / "proc"
    for name, value in {"kernel__pid_max": MANY, **numbers}.items():
        file = proc / "sys" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    (proc / "loadavg").write_text(f"0.29 0.73 1.68 2/{tasks} 123\n")
    (proc / "cgroups").write_text("#subsys_name\thierarchy\nmemory\t4\t671\t1\n")
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 5242880 kB\n")
    return Host(files, processes, proc)


def test_a_host_without_limits_bounds_nothing(tmp_path: Path) -> None:
    assert bounds(None, host(tmp_path)) == []


@pytest.mark.parametrize(
    ("numbers", "least", "most", "what"),
    [
        ({"files": 20_000}, 4500, 4872, "open files"),
        ({"processes": 10_064}, 5000, 5000, "ulimit -u"),
        ({"kernel__pid_max": 32_768, "tasks": 704}, 16_000, 16_000, "kernel.pid_max"),
        ({"user__max_net_namespaces": 1064}, 1000, 1000, "user.max_net_namespaces"),
    ],
)
def test_each_limit_bounds_the_boxes(
    tmp_path: Path, numbers: dict[str, int], least: int, most: int, what: str
) -> None:
    if "files" in numbers and not found_again():
        pytest.skip("pidfds are kept open before Linux 6.9")
    (found,) = bounds(None, host(tmp_path, **numbers))
    assert least <= found.most <= most
    assert what in found.what
    assert found.fix


def test_control_groups_bound_the_boxes(tmp_path: Path) -> None:
    top = tmp_path / "groups"
    base = top / "slice" / "burnish"
    base.mkdir(parents=True)
    (top / "slice" / "pids.max").write_text("2064\n")
    (top / "slice" / "pids.current").write_text("1000\n")
    (top / "cgroup.max.descendants").write_text("max\n")
    found = bounds(Controllers(2, {"memory": base, "pids": base}), host(tmp_path))
    assert [bound.most for bound in found] == [500, 65_535 - 671 - 64]
    assert f"{top}/slice/pids.max" in found[0].fix
    (top / "cgroup.max.descendants").write_text("164\n")
    assert bounds(Controllers(2, {"memory": base}), host(tmp_path))[0].most == 100


def test_version_2_counts_the_descriptor_of_a_peak(tmp_path: Path) -> None:
    made_up = host(tmp_path, files=20_000)
    two = Controllers(2, {"memory": tmp_path, "pids": tmp_path})
    assert bounds(two, made_up)[0].most < bounds(None, made_up)[0].most


def test_idle_boxes_that_fit_into_memory_are_told(tmp_path: Path) -> None:
    found = memory_bound(host(tmp_path))
    assert 4000 <= found.most <= 5120
    assert "5.0 GiB" in found.what


def test_too_many_boxes_are_refused_in_one_line_with_both_ways_out(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        make_room(5000, None, host(tmp_path, user__max_user_namespaces=1064))
    assert "5000 boxes are too many" in refused.value.what
    assert "1064 name spaces (user.max_user_namespaces)" in refused.value.what
    assert "sudo sysctl -w user.max_user_namespaces=" in refused.value.fix
    assert "sandbox.max_boxes + sandbox.warm_boxes <= 1000" in refused.value.fix


def test_a_pool_asks_before_it_starts_anything(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(limits[1] - 512, 0) // 4
    if not 0 < most < 60_000:
        pytest.skip("open files are as good as unlimited here")
    with pytest.raises(UserError, match=r"open files of this process"):
        NativePool(SandboxConfig(max_boxes=most + 1, warm_boxes=0))
    # Another backend would start, and fail later.
    with pytest.raises(UserError, match=r"^\d+ boxes are too many: .* leave room for"):
        open_pool(SandboxConfig(max_boxes=most + 1, warm_boxes=0))
    assert set(os.listdir("/proc/self/fd")) == before


def test_there_is_room_for_what_is_used_by_default() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        make_room(16, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen(["sleep", "1000"])
    yield child
    child.kill()
    child.wait()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kept", [False, True])
def test_a_box_process_is_killed_with_a_pidfd_or_without(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    if kept:
        monkeypatch.setattr(box_process, "found_again", lambda: False)
    pidfd = os.pidfd_open(sleeper.pid)
    process = BoxProcess(sleeper.pid, pidfd)
    assert is_open(pidfd) is (kept or not found_again())
    assert process.kill()
    assert sleeper.wait() == -signal.SIGKILL
    assert process.kill()
    process.close()
    process.close()
    assert not is_open(pidfd)


def test_a_pid_that_means_another_process_by_now_is_left_alone(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    if not found_again():
        pytest.skip("pidfds are kept open before Linux 6.9")
    other = subprocess.Popen(["sleep", "1000"])
    try:
        # What a reused pid looks like: the number of one process, the pid of another.
        mistaken = BoxProcess(other.pid, os.pidfd_open(sleeper.pid))
        assert mistaken.kill()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_kill_without_a_free_descriptor_says_so(sleeper: "subprocess.Popen[bytes]") -> None:
    if not found_again():
        pytest.skip("pidfds are kept open before Linux 6.9")
    process = BoxProcess(sleeper.pid, os.pidfd_open(sleeper.pid))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open("/dev/null", os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
        assert not process.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)
