"""What every sandbox backend must do; the backends are in `conftest.py`."""

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.boxes import (
    ExecResult,
    ExecStatus,
    Feature,
    Isolation,
    Limits,
    Policy,
    Privileges,
    Sandbox,
    SandboxPool,
)
from burnish.core.errors import ClassifiedFailure, FileTooLargeError, UserError
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.interpreter import python_argv

MIB = 2**20


def in_box(pool: SandboxPool, use: Callable[[Sandbox], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with pool.acquire() as box:
            return await use(box)

    return asyncio.run(main())


def run(pool: SandboxPool, *argv: str, stdin: bytes = b"", **limits: Any) -> ExecResult:
    return in_box(pool, lambda box: box.exec(argv, stdin=stdin, limits=Limits(**limits)))


def run_python(pool: SandboxPool, code: str, **limits: Any) -> ExecResult:
    return run(pool, *python_argv("-c", code), **limits)


# Results


def test_success_is_ok_with_both_outputs(pool: SandboxPool) -> None:
    result = run(pool, "sh", "-c", "echo out; echo err >&2")
    assert (result.status, result.exit_code, result.signal) == (ExecStatus.OK, 0, None)
    assert (result.stdout, result.stderr, result.truncated) == (b"out\n", b"err\n", False)
    assert result.usage.wall_s > 0
    assert result.usage.cpu_s is not None


@pytest.mark.parametrize("code", [1, 2, 42, 126, 255])
def test_exit_status_is_reported(pool: SandboxPool, code: int) -> None:
    result = run(pool, "sh", "-c", f"exit {code}")
    assert (result.status, result.exit_code) == (ExecStatus.EXIT, code)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_death_by_its_own_signal_is_signal(pool: SandboxPool, number: int) -> None:
    result = run_python(pool, f"import os; os.kill(os.getpid(), {int(number)})")
    assert (result.status, result.signal) == (ExecStatus.SIGNAL, number)


def test_a_missing_program_is_the_commands_fault(pool: SandboxPool) -> None:
    result = run(pool, "no-such-program")
    assert (result.status, result.exit_code) == (ExecStatus.EXIT, 127)


def test_a_file_that_cannot_run_is_the_commands_fault(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> ExecResult:
        await box.write_file("data", b"not a program")
        return await box.exec(("./data",))

    assert in_box(pool, use).status is ExecStatus.EXIT


def test_no_message_of_the_program_can_look_like_a_broken_box(pool: SandboxPool) -> None:
    code = "import sys; sys.stderr.write('bwrap: Creating new namespace failed'); sys.exit(1)"
    result = run_python(pool, code)
    assert (result.status, result.exit_code) == (ExecStatus.EXIT, 1)


def test_killing_process_1_is_not_a_broken_box(pool: SandboxPool) -> None:
    result = run_python(pool, "import os; os.kill(1, 9); os.kill(-1, 9)")
    assert result.status is not ExecStatus.INFRA_ERROR


def test_the_environment_is_only_what_is_named(pool: SandboxPool) -> None:
    code = "import os; print(sorted(os.environ))"
    result = in_box(pool, lambda box: box.exec(python_argv("-c", code), env={"EXTRA": "1"}))
    names = ["EXTRA", "HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"]
    assert result.stdout.decode().strip() == str(names)


@pytest.mark.parametrize("argv", [(), ("",), ("a\0b",)])
def test_a_command_that_no_machine_could_run_is_refused(
    pool: SandboxPool, argv: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="argv"):
        in_box(pool, lambda box: box.exec(argv))


def test_a_command_line_that_is_too_long_is_not_a_crash(pool: SandboxPool) -> None:
    result = run(pool, "echo", "x" * (4 * MIB))
    assert (result.status, result.exit_code) in ((ExecStatus.EXIT, 126), (ExecStatus.EXIT, 127))


@settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    stdin=st.binary(max_size=300_000),
    arguments=st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5
    ),
)
def test_arguments_and_bytes_pass_unchanged(
    pool: SandboxPool, stdin: bytes, arguments: list[str]
) -> None:
    code = (
        "import os, sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d);"
        "sys.stderr.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    )
    result = run(pool, *python_argv("-c", code, *arguments), stdin=stdin, stdout_bytes=MIB)
    assert result.status is ExecStatus.OK
    assert result.stdout == stdin
    assert result.stderr == b"\0".join(argument.encode() for argument in arguments)


def test_names_that_are_not_utf_8_pass_unchanged(pool: SandboxPool) -> None:
    odd = os.fsdecode(b"d\xe9\xff")
    code = (
        "import os, sys; write = sys.stdout.buffer.write;"
        "write(os.fsencode(sys.argv[1]) + os.environb[b'ODD'] + os.getcwdb() + b'\\n');"
        "write(open(sys.argv[1], 'rb').read())"
    )

    async def use(box: Sandbox) -> None:
        await box.write_file(f"{odd}/{odd}", b"content")
        assert await box.read_file(f"{odd}/{odd}") == b"content"
        command = python_argv("-c", code, odd)
        result = await box.exec(command, env={"ODD": odd}, cwd=f"/work/{odd}")
        raw = os.fsencode(odd)
        assert result.stdout == raw + raw + b"/work/" + raw + b"\ncontent", result

    in_box(pool, use)


def test_what_stands_for_no_byte_is_refused(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> None:
        for attempt in (
            lambda: box.exec(("echo", "\ud800")),
            lambda: box.exec(("true",), env={"A": "\ud800"}),
            lambda: box.exec(("true",), cwd="/\ud800"),
            lambda: box.read_file("\ud800"),
            lambda: box.write_file("\ud800", b""),
        ):
            with pytest.raises(ValueError, match="surrogate"):
                await attempt()

    in_box(pool, use)


# Limits


def test_every_limit_that_always_holds_is_declared(pool: SandboxPool) -> None:
    always = {n for n in Limits.__struct_fields__ if getattr(Limits(), n) not in (None, 0)}
    assert pool.capabilities.enforces >= always


def test_warm_python_is_declared_where_it_can_be_asked_for(pool: SandboxPool) -> None:
    declared = Feature.WARM_PYTHON in pool.capabilities.features
    assert declared <= hasattr(pool, "acquire_python")


def test_wall_clock_limit_is_timeout(pool: SandboxPool) -> None:
    result = run(pool, "sleep", "1000", wall_s=0.2)
    assert result.status is ExecStatus.TIMEOUT
    assert result.usage.wall_s >= 0.2


def test_ignoring_signals_does_not_outlive_the_wall_clock(pool: SandboxPool) -> None:
    code = (
        "import signal, os\n"
        "for n in range(1, 32):\n"
        "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while True: signal.pause()"
    )
    assert run_python(pool, code, wall_s=0.3).status is ExecStatus.TIMEOUT


def test_a_program_cannot_say_that_its_cpu_time_is_up(pool: SandboxPool) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)"
    result = run_python(pool, code)
    assert (result.status, result.signal, result.message) == (ExecStatus.SIGNAL, 24, ""), result


def test_cpu_limit_counts_all_processes(pool: SandboxPool) -> None:
    code = "import os\nos.fork(); os.fork()\nwhile True: pass"
    result = run_python(pool, code, cpu_s=0.3, wall_s=60)
    assert (result.status, result.message) == (ExecStatus.TIMEOUT, "CPU limit")
    assert result.usage.wall_s < 30


def test_memory_limit_is_oom(pool: SandboxPool) -> None:
    result = run_python(pool, "x = bytearray(1 << 30)", memory_bytes=64 * MIB)
    assert result.status is ExecStatus.OOM


def test_memory_limit_counts_all_processes(pool: SandboxPool) -> None:
    code = (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (16 << 20); time.sleep(100)\n"
        "time.sleep(100)"
    )
    assert run_python(pool, code, memory_bytes=64 * MIB).status is ExecStatus.OOM


def test_memory_limit_counts_shared_memory(pool: SandboxPool) -> None:
    code = (
        "import mmap, time\n"
        "m = mmap.mmap(-1, 128 << 20)\n"
        "for i in range(0, len(m), 4096): m[i] = 1\n"
        "time.sleep(100)"
    )
    assert run_python(pool, code, memory_bytes=64 * MIB).status is ExecStatus.OOM


def test_a_fork_bomb_ends(pool: SandboxPool) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = run_python(pool, code, num_pids=16, wall_s=1.0, cpu_s=1.0)
    assert result.status in (ExecStatus.TIMEOUT, ExecStatus.PIDS)
    assert run(pool, "true").status is ExecStatus.OK


def test_process_limit_is_exact(pool: SandboxPool) -> None:
    code = (
        "import os, sys, time\n"
        "n = 1\n"
        "try:\n"
        "    while os.fork(): n += 1\n"
        "except OSError:\n"
        "    print(n); time.sleep(0.1); sys.exit(3)\n"
        "time.sleep(100)"
    )
    result = run_python(pool, code, num_pids=10)
    assert result.stdout == b"10\n"
    # A kernel in user space counts by itself, and what it refused is not seen from outside.
    unseen = pool.capabilities.isolation is Isolation.USER_KERNEL
    assert result.status is ExecStatus.PIDS or (unseen and result.exit_code == 3)


def test_threads_count_as_processes(pool: SandboxPool) -> None:
    code = (
        "import threading, time\n"
        "for _ in range(50): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    )
    assert run_python(pool, code, num_pids=10).status is not ExecStatus.OK


@pytest.mark.parametrize("place", ["/work", "/tmp", "/dev/shm"])
def test_disk_limit_is_disk(pool: SandboxPool, place: str) -> None:
    code = f"open({place!r} + '/big', 'wb').write(bytes(8 << 20))"
    assert run_python(pool, code, disk_bytes=4 * MIB).status is ExecStatus.DISK


def test_disk_limit_holds_over_many_files(pool: SandboxPool) -> None:
    code = "for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
    assert run_python(pool, code, disk_bytes=8 * MIB).status is ExecStatus.DISK


def test_empty_files_are_limited_too(pool: SandboxPool) -> None:
    code = "for i in range(1_000_000): open(f'/work/{i}', 'wb').close()"
    assert run_python(pool, code, disk_bytes=4 * MIB, wall_s=60).status is ExecStatus.DISK


def test_disk_limit_holds_over_commands(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> ExecResult:
        limits = Limits(disk_bytes=8 * MIB)
        write = "open('f{}', 'wb').write(bytes(5 << 20))"
        first = await box.exec(python_argv("-c", write.format(1)), limits=limits)
        assert first.status is ExecStatus.OK
        return await box.exec(python_argv("-c", write.format(2)), limits=limits)

    assert in_box(pool, use).status is ExecStatus.DISK


@pytest.mark.parametrize("stream", [1, 2])
def test_a_flood_of_output_is_cut_to_a_prefix(pool: SandboxPool, stream: int) -> None:
    result = run(pool, "sh", "-c", f"yes >&{stream}", stdout_bytes=1000)
    assert (result.status, result.truncated) == (ExecStatus.OUTPUT, True)
    assert (result.stdout, result.stderr)[stream - 1] == b"y\n" * 500
    assert (result.stdout, result.stderr)[2 - stream] == b""


def test_output_of_exactly_the_limit_is_not_cut(pool: SandboxPool) -> None:
    result = run_python(pool, "print('x' * 99999)", stdout_bytes=100_000)
    assert (result.status, result.truncated, len(result.stdout)) == (ExecStatus.OK, False, 100_000)


def test_limits_below_what_can_run_are_refused(pool: SandboxPool) -> None:
    for limits in (Limits(wall_s=0), Limits(memory_bytes=1), Limits(num_pids=0)):
        with pytest.raises(ValueError, match=r"limits\."):
            in_box(pool, lambda box, limits=limits: box.exec(("true",), limits=limits))


# Nothing survives


def test_nothing_survives_a_command(pool: SandboxPool) -> None:
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        while True: open('/work/alive', 'a').write('x'); time.sleep(0.001)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('/work/alive'): pass"
    )

    async def use(box: Sandbox) -> None:
        started = await box.exec(python_argv("-c", daemon))
        assert started.status is ExecStatus.OK
        size = len(await box.read_file("alive"))
        listing = await box.exec(("sh", "-c", "echo /proc/[0-9]* | wc -w"))
        assert int(listing.stdout) <= 6
        assert len(await box.read_file("alive")) == size

    in_box(pool, use)


def test_a_daemon_that_holds_stdout_does_not_delay_the_result(pool: SandboxPool) -> None:
    result = run(pool, "sh", "-c", "setsid sleep 1000 & echo done", wall_s=100)
    assert (result.status, result.stdout) == (ExecStatus.OK, b"done\n")
    assert result.usage.wall_s < 50


def test_unread_input_does_not_hang(pool: SandboxPool) -> None:
    assert run(pool, "true", stdin=bytes(4 * MIB)).status is ExecStatus.OK


def test_cancelling_a_command_kills_it(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> None:
        code = "import time\nopen('/work/on', 'w').close()\ntime.sleep(1000)"
        task = asyncio.create_task(box.exec(python_argv("-c", code), limits=Limits(wall_s=1000)))
        # Commands of a box queue up, so this read is answered only once the other is dead.
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        listing = await box.exec(("sh", "-c", "echo /proc/[0-9]* | wc -w"))
        assert int(listing.stdout) <= 6

    in_box(pool, use)


# Files


def test_files_go_in_and_out_and_stay_between_commands(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> None:
        data = bytes(range(256)) * 100
        await box.write_file("a/b/in.bin", data)
        await box.exec(("sh", "-c", "cp a/b/in.bin out.bin; echo more >> a/b/in.bin"))
        assert await box.read_file("out.bin") == data
        assert await box.read_file("a/b/in.bin") == data + b"more\n"
        await box.write_file("out.bin", b"replaced")
        assert await box.read_file("out.bin", limit_bytes=8) == b"replaced"

    in_box(pool, use)


def test_boxes_are_fresh_and_apart(pool: SandboxPool) -> None:
    # Not with `ls`, which fails under the gVisor of some distributions.
    code = "import os; print(*map(os.listdir, ('/work', '/tmp', '/dev/shm')))"
    listing = python_argv("-c", code)

    async def main() -> None:
        async with pool.acquire() as one, pool.acquire() as other:
            await one.write_file("secret", b"1")
            await one.exec(("sh", "-c", "echo 1 > /tmp/secret; echo 1 > /dev/shm/secret"))
            assert (await other.exec(listing)).stdout == b"[] [] []\n"
        async with pool.acquire() as later:
            assert (await later.exec(listing)).stdout == b"[] [] []\n"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", ".", "x/" * 99])
def test_paths_that_leave_the_box_are_refused(pool: SandboxPool, path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        in_box(pool, lambda box: box.read_file(path))
    with pytest.raises(ValueError, match="path"):
        in_box(pool, lambda box: box.write_file(path, b""))


HOSTILE_FILES = {
    "link": "ln -s /etc/passwd f",
    "relative link": "ln -s ../tmp/x f; echo 1 > /tmp/x",
    "link in the way": "ln -s /etc d; ln -s d/passwd f",
    "dangling link": "ln -s nowhere f",
    "pipe": "mkfifo f",
    "folder": "mkdir f",
    "socket": "python3 -ISc \"import socket; socket.socket(socket.AF_UNIX).bind('f')\"",
    "absent": "true",
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_only_regular_files_are_read(pool: SandboxPool, name: str) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec(("sh", "-c", HOSTILE_FILES[name]))
        with pytest.raises(FileNotFoundError):
            await box.read_file("f")

    in_box(pool, use)


def test_no_link_is_followed_on_the_way(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec(("sh", "-c", "mkdir real; echo 1 > real/f; ln -s real way; ln -s /etc etc"))
        for path in ("way/f", "etc/passwd"):
            with pytest.raises(FileNotFoundError):
                await box.read_file(path)
        for path in ("way/new", "etc/new"):
            with pytest.raises(NotADirectoryError):
                await box.write_file(path, b"x")

    in_box(pool, use)


def test_writing_replaces_what_is_in_the_way(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec(("sh", "-c", "ln -s /tmp/target link; echo old > /tmp/target; mkfifo pipe"))
        for name in ("link", "pipe"):
            await box.write_file(name, b"new")
            assert await box.read_file(name) == b"new"
        assert (await box.exec(("cat", "/tmp/target"))).stdout == b"old\n"

    in_box(pool, use)


def test_a_file_beyond_the_limit_is_an_error_with_its_size_and_never_cut(
    pool: SandboxPool,
) -> None:
    async def use(box: Sandbox) -> None:
        await box.exec(("truncate", "-s", "60M", "f"))
        for limit, size in ((1000, 60 << 20), (1 << 20, 60 << 20), (7, 8), (0, 8)):
            if size == 8:
                await box.write_file("f", b"12345678")
            with pytest.raises(FileTooLargeError, match="limit_bytes") as refused:
                await box.read_file("f", limit_bytes=limit)
            assert refused.value.size_bytes == size
        assert await box.read_file("f", limit_bytes=2**40) == b"12345678"
        await box.write_file("f", b"")
        assert await box.read_file("f", limit_bytes=0) == b""
        for nonsense in (-1, 2**63):
            with pytest.raises(ValueError, match="limit_bytes"):
                await box.read_file("f", limit_bytes=nonsense)

    in_box(pool, use)


def test_writing_more_than_the_disk_is_an_error_and_leaves_nothing(pool: SandboxPool) -> None:
    async def use(box: Sandbox) -> None:
        with pytest.raises(OSError, match="space") as caught:
            await box.write_file("big", bytes(65 * MIB))
        assert caught.value.errno == errno.ENOSPC
        assert (await box.exec(("ls", "-A"))).stdout == b""

    in_box(pool, use)


# The pool


def test_at_most_so_many_boxes_live_at_once(pool: SandboxPool) -> None:
    async def main() -> None:
        alive, most = 0, 0
        full = asyncio.Event()

        async def one() -> None:
            nonlocal alive, most
            async with pool.acquire() as box:
                alive += 1
                most = max(most, alive)
                if alive == 4:
                    full.set()
                await asyncio.wait_for(full.wait(), 60)
                assert (await box.exec(("true",))).status is ExecStatus.OK
                alive -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(one())
        assert most == 4

    asyncio.run(main())


def test_a_cancelled_wait_for_a_box_takes_none(pool: SandboxPool) -> None:
    async def main() -> None:
        contexts = [pool.acquire() for _ in range(4)]
        for context in contexts:
            await context.__aenter__()
        waiting = asyncio.create_task(pool.acquire().__aenter__())
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait((waiting,))
        for context in contexts:
            await context.__aexit__(None, None, None)
        contexts = [pool.acquire() for _ in range(4)]
        for context in contexts:
            await asyncio.wait_for(context.__aenter__(), 30)
        for context in contexts:
            await context.__aexit__(None, None, None)

    asyncio.run(main())


def test_a_policy_that_cannot_be_enforced_is_an_error(pool: SandboxPool) -> None:
    features = pool.capabilities.features
    asked = {
        Feature.ALLOW_LIST: Policy(allow=("example.org",)),
        Feature.PRIVILEGES: Policy(privileges=Privileges.PACKAGES),
        Feature.DETERMINISTIC: Policy(deterministic=True),
    }
    for feature, policy in asked.items():
        if feature not in features:
            with pytest.raises(UserError, match=pool.capabilities.backend):
                pool.acquire(policy=policy)
    if Feature.IMAGES not in features:
        with pytest.raises(UserError, match="image"):
            pool.acquire("debian")


def test_deterministic_boxes_show_the_same_to_every_command(pool: SandboxPool) -> None:
    if Feature.DETERMINISTIC not in pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox offers no determinism")
    # Addresses first: what is allocated while a program waits for another depends on their timing.
    code = """
import os, subprocess, time
print(hex(id(object())), [line.split()[0] for line in open("/proc/self/maps")])
print(os.getpid(), os.getppid(), os.uname().nodename, os.getuid(), sorted(os.environ.items()))
print(subprocess.run(["sh", "-c", "echo $$"], capture_output=True).stdout)
print(time.tzname, time.timezone, hash("text"), {"a", "b", "c"}, len(os.sched_getaffinity(0)))
"""

    async def main() -> list[ExecResult]:
        seen = []
        for _ in range(2):
            async with pool.acquire(policy=Policy(deterministic=True)) as box:
                await box.write_file("show.py", code.encode())
                # Not isolated: that would ignore the hash seed.
                seen += [await box.exec((python_argv()[0], "-S", "show.py")) for _ in range(2)]
        return seen

    seen = asyncio.run(main())
    assert seen[0].status is ExecStatus.OK, seen[0]
    assert b"('UTC', 'UTC') 0" in seen[0].stdout
    shown = [result.stdout for result in seen]
    # The second command of a box has other process ids than the first, but in each box the same.
    assert shown[:2] == shown[2:]
    parts = [text.split(b"\n") for text in shown]
    assert len({(lines[0], *lines[3:]) for lines in parts}) == 1


def test_root_that_installs_packages_has_the_files_that_it_is_given(pool: SandboxPool) -> None:
    if Feature.PRIVILEGES not in pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox has no such root here")

    async def main() -> None:
        async with pool.acquire(policy=Policy(privileges=Privileges.PACKAGES)) as box:
            await box.write_file("d/f", b"written")
            shown = await box.exec(("sh", "-c", "stat -c '%u %n' d d/f; chown 7:7 d; chmod 0 d/f"))
            assert shown.stdout == b"0 d\n0 d/f\n"
            assert await box.read_file("d/f") == b"written"
            await box.write_file("d/f", b"again")
            assert await box.read_file("d/f") == b"again"

    asyncio.run(main())


def test_a_limit_that_cannot_be_enforced_is_an_error(pool: SandboxPool) -> None:
    values = {"num_inodes": 1000, "shm_bytes": 2**20, "cpus": 0.5, "read_bytes_per_s": 10**6}
    values["write_bytes_per_s"] = 10**6
    for name, value in values.items():
        if name not in pool.capabilities.enforces:
            with pytest.raises(UserError, match=name):
                run(pool, "true", **{name: value})


def test_a_closed_pool_gives_no_boxes(backend: Callable[[int], SandboxPool]) -> None:
    async def main() -> None:
        try:
            pool = backend(1)
        except UserError as error:
            pytest.skip(str(error))
        async with pool.acquire() as box:
            closing = asyncio.create_task(pool.close())
            await closing
            result = await box.exec(("true",))
            assert result.status is ExecStatus.INFRA_ERROR
        await pool.close()
        with pytest.raises(ClassifiedFailure) as caught:
            async with pool.acquire():
                pass
        assert caught.value.failure.kind is FailureKind.SANDBOX

    asyncio.run(main())


def test_pools_of_one_machine_do_not_meet(backend: Callable[[int], SandboxPool]) -> None:
    async def main() -> None:
        try:
            pools = [backend(2), backend(2)]
        except UserError as error:
            pytest.skip(str(error))

        async def use(pool: SandboxPool) -> None:
            # Boxes of both have the same numbers, and are alive at the same time.
            async with pool.acquire() as one, pool.acquire() as other:
                for box in (one, other):
                    result = await box.exec(("sh", "-c", "sleep 0.2; echo here"))
                    assert (result.status, result.stdout) == (ExecStatus.OK, b"here\n"), result

        async with asyncio.TaskGroup() as group:
            for pool in pools:
                group.create_task(use(pool))
        for pool in pools:
            await pool.close()

    asyncio.run(main())
