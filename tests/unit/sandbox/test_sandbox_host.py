import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from burnish.core.boxes import ExecStatus, Limits
from burnish.core.checks import Importance
from burnish.core.errors import UserError
from burnish.sandbox import probe as probing
from burnish.sandbox.bubblewrap.inspection import INSTALL_FIX, find_bwrap
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.host_view import HostPath, hidden_paths, namespace_fix
from burnish.sandbox.interpreter import find_python, python_argv
from burnish.sandbox.keeper.namespace import Identity, box_identity
from burnish.sandbox.limits import check_limits, ulimits
from burnish.sandbox.native.run import beyond_memory
from burnish.sandbox.probe import probe
from burnish.sandbox.proctree import Process, open_process, parse_stat, read_process, tree_usage

MIB = 2**20


def fake_bwrap(folder: Path, text: str) -> Path:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


def test_a_missing_bubblewrap_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_bwrap(str(tmp_path))
    assert caught.value.what == "bubblewrap is not installed."
    assert caught.value.fix == INSTALL_FIX


def test_an_old_bubblewrap_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    fake_bwrap(tmp_path, "echo '    --uid UID  x'")
    with pytest.raises(UserError, match="lacks --args"):
        find_bwrap(str(tmp_path))


def test_the_doctor_reports_a_missing_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UserError("bubblewrap is not installed.", fix=INSTALL_FIX)

    monkeypatch.setattr(probing, "find_bwrap", missing)
    capabilities, checks = probe()
    found = {check.name: check for check in checks}["sandbox bubblewrap"]
    assert (found.ok, found.fix) == (False, INSTALL_FIX)
    # It is missed only where the native sandbox does not run either.
    expected = Importance.NEEDED if capabilities is None else Importance.OPTIONAL
    assert found.importance is expected


def test_a_bubblewrap_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("bwrap")
    if real is None:
        pytest.skip("bubblewrap is not installed")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.owner() != "root" or parent == Path("/tmp"):
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    text = (
        f'case $1 in --help|--version) exec {real} "$@";; esac; echo "bwrap: No luck" >&2; exit 1'
    )
    fake_bwrap(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"No luck|Permission denied"):
        BubblewrapPool()


ALONE = (
    "unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child",
)  # fmt: skip


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_forbidden_user_namespaces_are_named_with_the_switch_and_nobody_is_killed() -> None:
    """In a pid namespace: a helper that killed process -1 would reach the canary only."""
    code = "from burnish.sandbox.probe import probe; print(*probe().checks, sep=chr(10))"
    script = f"""
    sleep 1000 & canary=$!
    echo 0 > /proc/sys/user/max_user_namespaces || exit 77
    {sys.executable} -c '{code}'
    kill -0 $canary && echo canary alive
    """
    result = subprocess.run(
        [*ALONE, "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in result.stderr or result.returncode == 77:
        pytest.skip(f"no namespace to try it in: {result.stderr}")
    assert "canary alive" in result.stdout, result
    native = next(line for line in result.stdout.splitlines() if "sandbox native" in line)
    assert "ok=False" in native
    assert "sudo sysctl -w user.max_user_namespaces" in native


def test_the_doctor_runs_a_box_and_python_in_it() -> None:
    capabilities, checks = probe()
    if capabilities is None:
        pytest.skip(checks[-1].detail)
    names = [check.name for check in checks if check.importance is Importance.NEEDED]
    assert names[:2] == ["sandbox", "sandbox python"]
    assert {"sandbox native", "sandbox helper", "sandbox gvisor", "criu"} <= {
        check.name for check in checks
    }
    assert all(check.fix == "" for check in checks if check.ok)
    assert "kernel" in " ".join(capabilities.notes)


def test_the_interpreter_is_the_systems_own() -> None:
    path = find_python()
    if path is None:
        pytest.skip("no python3 below /usr")
    assert python_argv("f.py") == (path, "-I", "-S", "-B", "f.py")
    assert os.path.realpath(path).startswith("/usr/")


def test_boxes_of_root_get_users_of_their_own() -> None:
    whole = "0 0 4294967295\n"
    assert box_identity(False, 1, whole) is None
    first, second = box_identity(True, 1, whole), box_identity(True, 2, whole)
    assert first is not None
    assert second is not None
    assert len({first.uid, second.uid, 0, 65534}) == 4
    assert box_identity(True, 1, "0 100000 65536\n") == Identity(65534, 65534)
    assert box_identity(True, 1, "0 1000 1\n") is None


def test_there_is_always_a_fix_to_name() -> None:
    assert namespace_fix()


@pytest.mark.parametrize(
    "limits",
    [
        Limits(wall_s=0),
        Limits(wall_s=float("nan")),
        Limits(cpu_s=float("inf")),
        Limits(memory_bytes=-1),
        Limits(num_pids=0),
        Limits(disk_bytes=0),
        Limits(stdout_bytes=-1),
    ],
)
def test_impossible_limits_are_refused(limits: Limits) -> None:
    with pytest.raises(ValueError, match=r"limits\.\w+ is .*: it must be at least"):
        check_limits(limits)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(wall_s=1e30),
        Limits(memory_bytes=2**64),
        Limits(num_pids=2**22),
        Limits(disk_bytes=64 * 2**40),
        Limits(num_inodes=2**64),
        Limits(cpus=1e9),
        Limits(read_bytes_per_s=2**64),
    ],
)
def test_limits_that_no_kernel_takes_are_refused(limits: Limits) -> None:
    with pytest.raises(ValueError, match=r"limits\.\w+ is .*: it may be at most"):
        check_limits(limits)


def test_every_limit_has_both_bounds() -> None:
    for name in Limits.__struct_fields__:
        for value in (-1, 2**70):
            with pytest.raises(ValueError, match=rf"limits\.{name} is "):
                check_limits(msgspec.structs.replace(Limits(), **{name: value}))


def test_only_what_a_box_holds_already_is_out_of_memory() -> None:
    assert beyond_memory(OSError(errno.EBUSY, "busy")).status is ExecStatus.OOM
    with pytest.raises(UserError, match=r"refuses these limits: Invalid argument.* Fix: "):
        beyond_memory(OSError(errno.EINVAL, "Invalid argument"))
    with pytest.raises(FileNotFoundError):
        beyond_memory(FileNotFoundError(errno.ENOENT, "gone"))


@pytest.mark.parametrize("shell", [s for s in ("dash", "bash", "busybox") if shutil.which(s)])
def test_limits_are_set_in_every_shell(shell: str) -> None:
    limits = Limits(cpu_s=2.5, disk_bytes=MIB, memory_bytes=64 * MIB)
    words = ulimits(limits, num_processes=4000, memory_is_sampled=True)
    script = " && ".join([*words, "cat /proc/self/limits"])
    command = [shell, "sh"] if shell == "busybox" else [shell]
    posix = ["--posix"] if shell == "bash" else []
    result = subprocess.run(
        [*command, *posix, "-c", script], capture_output=True, text=True, check=True
    )
    seen = {line[:26].strip(): line[26:].split()[:2] for line in result.stdout.splitlines()}
    assert seen["Max cpu time"] == ["3", "4"]
    assert seen["Max file size"] == [str(MIB)] * 2
    assert seen["Max processes"] == ["4000", "4000"]
    assert int(seen["Max address space"][1]) > 64 * MIB


def test_a_lower_limit_of_the_host_is_kept() -> None:
    words = ulimits(Limits(cpu_s=100), num_processes=None, memory_is_sampled=False)
    script = " && ".join(["ulimit -t 5", "ulimit -n 50", *words, "ulimit -t", "ulimit -n"])
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["5", "50"]


def test_a_process_name_cannot_forge_its_numbers() -> None:
    line = "42 (a) R 1 (x) S 7 1 1 0 -1 0 0 0 0 0 10 20 30 40 20 0 3 0 999 5000 12 0"
    process = parse_stat(line)
    assert (process.pid, process.parent, process.num_threads) == (42, 7, 3)
    assert process.start_ticks == 999
    assert process.rss_bytes == 12 * os.sysconf("SC_PAGE_SIZE")


def test_we_see_ourselves() -> None:
    process = read_process(os.getpid())
    assert process is not None
    assert process.parent == os.getppid()
    assert process.rss_bytes > 0


def test_a_tree_is_summed_without_its_root() -> None:
    def process(pid: int, parent: int) -> Process:
        return Process(pid, parent, 1, 1.0, 0, 10)

    tree = [process(1, 0), process(2, 1), process(3, 2), process(4, 2), process(5, 0)]
    assert tree_usage(tree, 1) == (3, 3.0, 30)
    assert tree_usage(tree, 2, with_root=True) == (3, 3.0, 30)
    assert tree_usage(tree, 99, with_root=True) == (0, 0.0, 0)


def test_a_pool_can_be_closed_without_use() -> None:
    try:
        pool = BubblewrapPool()
    except UserError as error:
        pytest.skip(str(error))
    asyncio.run(pool.close())
    asyncio.run(pool.close())


def test_installed_packages_below_a_system_directory_are_hidden(tmp_path: Path) -> None:
    system = [HostPath(str(tmp_path / "usr"), None), HostPath(str(tmp_path / "lib"), "usr/lib")]
    paths = [
        "usr/lib/python3/dist-packages",
        "usr/lib/python3/dist-packages/inner/site-packages",
        "usr/local/venv/lib/python3.11/site-packages",
        "usr/lib/python3.11",
        "usr/bin",
        "home/venv/site-packages",
    ]
    for path in paths:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    search = [str(tmp_path / path) for path in (*paths, "lib/python3/dist-packages", "usr/absent")]
    assert hidden_paths([*search, ""], system) == (
        str(tmp_path / paths[0]),
        str(tmp_path / paths[2]),
    )


def test_this_package_itself_is_hidden_where_a_box_would_see_it() -> None:
    own = Path(probing.__file__).parents[1]
    assert hidden_paths([str(own)], [HostPath(str(own.parent), None)]) == (str(own),)
    assert hidden_paths([str(own)], [HostPath("/usr/lib", None)]) == ()


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EINVAL])
def test_a_process_that_is_gone_is_no_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(number, "gone")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert open_process(12345) is None
