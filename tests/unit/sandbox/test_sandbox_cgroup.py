import errno
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup import Controllers, find_controllers, move_members, owner_name, sweep
from burnish.sandbox.cgroup_files import OVERHEAD_PIDS, BoxGroup, ControlFiles, Counters, disks
from burnish.sandbox.cgroup_v1 import GroupV1
from burnish.sandbox.cgroup_v2 import GroupV2
from burnish.sandbox.native.groups import Groups

LIMITS = Limits(memory_bytes=100 * 2**20, num_pids=20)


def mount_line(point: Path, kind: str, options: str) -> str:
    return f"30 25 0:26 / {point} rw,relatime - {kind} cgroup rw,{options}\n"


def fill(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def v1(tmp_path: Path) -> dict[str, Path]:
    return {
        "memory": fill(
            tmp_path / "memory",
            {
                "memory.limit_in_bytes": "",
                "memory.max_usage_in_bytes": "5000",
                "memory.swappiness": "60",
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            },
        ),
        "pids": fill(tmp_path / "pids", {"pids.max": "", "pids.events": "max 3\n"}),
        "cpuacct": fill(tmp_path / "cpuacct", {"cpuacct.usage": "2500000000\n"}),
    }


def test_version_1_limits_and_counters(v1: dict[str, Path]) -> None:
    group = GroupV1(v1)
    assert group.counters() == Counters(cpu_s=2.5, oom_kills=2, pids_refused=3)
    assert group.peak_memory_bytes() == 5000
    group.set_limits(LIMITS)
    assert (v1["memory"] / "memory.limit_in_bytes").read_text() == str(LIMITS.memory_bytes)
    assert (v1["memory"] / "memory.swappiness").read_text().startswith("0")
    assert (v1["pids"] / "pids.max").read_text() == str(20 + OVERHEAD_PIDS)


def test_version_1_without_some_controllers_says_so(v1: dict[str, Path]) -> None:
    group = GroupV1({"pids": v1["pids"]})
    assert group.counters() == Counters(cpu_s=None, oom_kills=0, pids_refused=3)
    assert group.peak_memory_bytes() is None
    group.set_limits(LIMITS)


def test_version_2_limits_and_counters(tmp_path: Path) -> None:
    files = {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.oom.group": "0",
        "pids.max": "max",
        "memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 4\noom_group_kill 1\n",
        "pids.events": "max 5\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
    }
    folder = fill(tmp_path / "box", files)
    group = GroupV2(folder, ("memory", "pids"))
    assert group.counters() == Counters(cpu_s=1.5, oom_kills=4, pids_refused=5)
    assert group.peak_memory_bytes() is None
    group.set_limits(LIMITS)
    assert (folder / "memory.max").read_text() == str(LIMITS.memory_bytes)
    assert (folder / "memory.oom.group").read_text() == "1"
    assert (folder / "memory.swap.max").read_text().startswith("0")


def test_version_1_is_found_below_our_own_group(tmp_path: Path) -> None:
    points = {name: tmp_path / name for name in ("memory", "pids", "cpuacct")}
    for point in points.values():
        (point / "me").mkdir(parents=True)
    mounts = "".join(mount_line(point, "cgroup", name) for name, point in points.items())
    own = "".join(f"{i}:{name}:/me\n" for i, name in enumerate(points))
    found = find_controllers(own, mounts, "burnish-1-2-3")
    assert found is not None
    assert found.version == 1
    assert found.bases == {name: point / "me" / "burnish-1-2-3" for name, point in points.items()}
    found.close()
    assert not (points["memory"] / "me" / "burnish-1-2-3").exists()


def test_version_2_without_controllers_for_us_is_not_used(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "me"):
        fill(folder, {"cgroup.subtree_control": "hugetlb"})
    found = find_controllers("0::/a/me\n", mount_line(tmp_path, "cgroup2", ""), "burnish-1-2-3")
    assert found is None
    assert not list(tmp_path.rglob("burnish-*"))


def test_no_hierarchy_is_no_group(tmp_path: Path) -> None:
    assert find_controllers("", "", "burnish-1-2-3") is None


def test_a_hierarchy_that_cannot_be_written_is_no_group(tmp_path: Path) -> None:
    point = tmp_path / "gone"
    assert find_controllers("1:memory:/\n", mount_line(point, "cgroup", "memory"), "b") is None


def test_a_container_whose_group_lies_outside_its_mount_uses_the_mount(tmp_path: Path) -> None:
    line = f"30 25 0:26 /docker/abc {tmp_path} rw - cgroup cgroup rw,memory\n"
    found = find_controllers("1:memory:/other\n", line, "burnish-1-2-3")
    assert found is not None
    assert found.bases["memory"].parent == tmp_path


def test_an_owner_that_nobody_has_reaped_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    (tmp_path / owner_name(child.pid)).mkdir()
    assert sweep(tmp_path) == 0
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert sweep(tmp_path) == 1
    child.wait()


def test_sweep_removes_dead_owners_only(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    dead = owner_name(child.pid)
    child.kill()
    child.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    reused = f"burnish-{namespace}-{os.getpid()}-1"
    foreign = f"burnish-{namespace + 1}-{child.pid}-1"
    for name in (dead, reused, foreign, owner_name(), "burnish-x", "other"):
        (tmp_path / name / "box-0").mkdir(parents=True)
    assert sweep(tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        foreign,
        owner_name(),
        "burnish-x",
        "other",
    }


@pytest.fixture
def late(tmp_path: Path) -> dict[str, Path]:
    return {"cpu": tmp_path / "cpu" / "box", "blkio": tmp_path / "blkio" / "box"}


def with_late(v1: dict[str, Path], late: dict[str, Path]) -> GroupV1:
    for path in v1.values():
        (path / "cgroup.procs").write_text("41\n42\n")
    (late["cpu"].parent).mkdir()
    (late["blkio"].parent).mkdir()
    for path, name in ((late["cpu"], "cpu.cfs_quota_us"), (late["blkio"], "x")):
        fill(path, {name: "", "cgroup.procs": ""})
    return GroupV1(v1, late)


def test_trees_for_rare_limits_are_joined_when_one_is_asked_for(
    v1: dict[str, Path], late: dict[str, Path]
) -> None:
    group = with_late(v1, late)
    quota = late["cpu"] / "cpu.cfs_quota_us"
    assert not group.must_join(LIMITS)
    half = msgspec.structs.replace(LIMITS, cpus=0.5)
    assert group.must_join(half)
    # Files do not act as control groups: the last member that was written is all that shows.
    group.join(41)
    assert (late["cpu"] / "cgroup.procs").read_text() in ("41", "42")
    assert not group.must_join(half)
    group.set_limits(half)
    assert quota.read_text() == "50000"
    group.set_limits(LIMITS)
    assert quota.read_text().startswith("-1")
    group.left()
    assert group.must_join(half)


def test_swap_is_on_top_of_memory(v1: dict[str, Path]) -> None:
    both = v1["memory"] / "memory.memsw.limit_in_bytes"
    both.write_text("")
    GroupV1(v1).set_limits(msgspec.structs.replace(LIMITS, swap_bytes=5))
    assert both.read_text() == str(LIMITS.memory_bytes + 5)


def test_version_2_shares_processors_and_disks(tmp_path: Path) -> None:
    folder = fill(tmp_path / "box", {"cpu.max": "", "io.max": "", "memory.swap.max": ""})
    (folder / "memory.max").write_text("")
    group = GroupV2(folder, ("memory", "cpu", "io"))
    group.set_limits(msgspec.structs.replace(LIMITS, cpus=1.5, swap_bytes=7, read_bytes_per_s=9))
    assert (folder / "cpu.max").read_text() == "150000 100000"
    assert (folder / "memory.swap.max").read_text() == "7"
    assert not disks() or (folder / "io.max").read_text().endswith(" rbps=9 wbps=max")


def test_rates_follow_a_box_to_its_next_disk(
    tmp_path: Path, v1: dict[str, Path], late: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = msgspec.structs.replace(LIMITS, write_bytes_per_s=9)
    first = with_late(v1, late)
    throttle = late["blkio"] / "blkio.throttle.write_bps_device"
    throttle.write_text("")
    folder = fill(tmp_path / "box", {"io.max": ""})
    second = GroupV2(folder, ("io",))
    for group, file, rule, none in (
        (first, throttle, "{} 9", "{} 0"),
        (second, folder / "io.max", "{} rbps=max wbps=9", "{} rbps=max wbps=max"),
    ):
        for disk in ("7:1", "7:2"):
            monkeypatch.setattr("burnish.sandbox.cgroup_v1.disks", lambda disk=disk: (disk,))
            monkeypatch.setattr("burnish.sandbox.cgroup_v2.disks", lambda disk=disk: (disk,))
            group.join(41)
            group.set_limits(slow)
            assert file.read_text().startswith(rule.format(disk))
            group.left()
        group.join(41)
        group.set_limits(LIMITS)
        assert file.read_text().startswith(none.format("7:2"))


def test_only_disks_that_hold_something_are_limited(tmp_path: Path) -> None:
    fill(tmp_path / "vda", {"size": "2048\n", "dev": "254:0\n"})
    fill(tmp_path / "loop0", {"size": "0\n", "dev": "7:0\n"})
    fill(tmp_path / "odd", {})
    assert disks(tmp_path) == ("254:0",)
    assert disks(tmp_path / "absent") == ()


def test_files_that_are_kept_open_show_new_values_and_are_freed(v1: dict[str, Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    group = GroupV1(v1, keep_open=True)
    assert group.counters().oom_kills == 2
    (v1["memory"] / "memory.oom_control").write_text("oom_kill 3\n")
    assert group.counters().oom_kills == 3
    assert len(os.listdir("/proc/self/fd")) > before
    group.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_several_owners_in_one_process_are_swept_apart(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    names = [owner_name(child.pid, part) for part in ("", "a1", "b2")]
    for name in names:
        (tmp_path / name).mkdir()
    assert len(set(names)) == 3
    assert sweep(tmp_path) == 0
    child.kill()
    child.wait()
    assert sweep(tmp_path) == 3


def test_processes_of_another_pid_namespace_are_not_moved(tmp_path: Path) -> None:
    service = fill(
        tmp_path / "system.slice" / "me.service",
        {
            "cgroup.controllers": "cpu memory pids\n",
            "cgroup.subtree_control": "",
            "cgroup.procs": "0\n41\n",
        },
    )
    mounts = mount_line(tmp_path, "cgroup2", "")
    assert find_controllers("0::/system.slice/me.service\n", mounts, "burnish-1-2-3") is None
    assert not list(tmp_path.rglob("burnish-*"))
    assert (service / "cgroup.procs").read_text() == "0\n41\n"


def test_a_group_with_processes_does_not_become_a_threaded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 6.1 gives `pids` or `cpu` alone there; then nobody can use the group's children."""
    given: list[str] = []

    def kernel(files: ControlFiles, path: str, value: str) -> None:
        if "memory" in value or "io" in value:
            raise OSError(errno.EBUSY, "processes are in it", path)
        given.append(value)

    monkeypatch.setattr(ControlFiles, "write", kernel)
    fill(tmp_path / "a" / "me", {"cgroup.subtree_control": ""})
    mounts = mount_line(tmp_path, "cgroup2", "")
    assert find_controllers("0::/a/me\n", mounts, "burnish-1-2-3", rates=True) is None
    assert not given


def unified() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line and os.access(line.split()[4], os.W_OK):
            return Path(line.split()[4])
    return None


def test_processes_leave_a_group_whose_children_are_to_have_controllers() -> None:
    top = unified()
    if top is None:
        pytest.skip("needs a writable control group of version 2")
    group = top / owner_name(part="moved")
    group.mkdir()
    sleepers = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    try:
        for sleeper in sleepers:
            (group / "cgroup.procs").write_text(str(sleeper.pid))
        assert move_members(group, group / "members")
        assert not (group / "cgroup.procs").read_text()
        moved = {int(pid) for pid in (group / "members" / "cgroup.procs").read_text().split()}
        assert moved == {sleeper.pid for sleeper in sleepers}
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        (group / "members").rmdir()
        group.rmdir()


def box_of_version_2(folder: Path) -> None:
    """The files that the kernel makes with the directory."""
    fill(folder, {"memory.max": "", "memory.peak": "900", "memory.current": "0", "pids.max": ""})


@pytest.mark.parametrize("resets", [True, False])
def test_a_box_is_not_told_the_peak_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    """Linux 6.1 answers EINVAL to who writes memory.peak, 6.12 resets it for that descriptor."""
    if not resets:

        def refuse(descriptor: int, data: bytes, offset: int) -> int:
            raise OSError(errno.EINVAL, "not writable")

        monkeypatch.setattr(os, "pwrite", refuse)
    controllers = Controllers(2, {"memory": tmp_path, "pids": tmp_path})
    groups = Groups(controllers, keep_open=False)
    for name in ("box-0", "box-1"):
        box_of_version_2(tmp_path / name)
    first = groups.take()
    groups.give(first)
    assert (groups.take() is first) is resets


def test_a_group_that_is_made_while_all_are_closed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "owner"
    base.mkdir()
    groups = Groups(Controllers(2, {"memory": base, "pids": base}), keep_open=False)
    make = Controllers.make

    def make_late(controllers: Controllers, box: str, *, keep_open: bool) -> BoxGroup:
        made = make(controllers, box, keep_open=keep_open)
        groups.close()
        return made

    monkeypatch.setattr(Controllers, "make", make_late)
    with pytest.raises(OSError, match="closed"):
        groups.take()
    assert os.listdir(tmp_path) == []


def test_without_a_peak_there_is_nothing_to_tell(tmp_path: Path) -> None:
    folder = fill(tmp_path / "box", {"memory.max": "", "memory.current": "0"})
    group = GroupV2(folder, ("memory",))
    group.set_limits(LIMITS)
    assert group.reusable
    assert group.peak_memory_bytes() is None
