"""Hostile code against every backend: each probe prints what it reached, and must reach nothing."""

import asyncio
import os
import platform
import socket
from collections.abc import Callable
from typing import Any

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Isolation, Limits, SandboxPool
from burnish.core.errors import UserError
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.syscalls import ARCHITECTURES, DENIED, FIRST_UNKNOWN, SPECIAL

Attack = Callable[..., ExecResult]
Lines = Callable[[str], list[str]]
ENGINES = {"podman", "docker"}
"""Which put files of their own into a container."""
COLUMN = ARCHITECTURES[platform.machine()].column


# System calls


def test_every_denied_call_is_refused(lines: Lines) -> None:
    numbers = {name: pair[COLUMN] for name, pair in DENIED.items() if pair[COLUMN] is not None}
    code = f"for name, number in {numbers}.items(): print(name, call(number))"
    seen = dict(line.split() for line in lines(code))
    assert list(seen) == list(numbers)
    # A filter by name does not know the newest: there they do not exist.
    assert set(seen.values()) <= {"EPERM", "ENOSYS"}


def test_unknown_calls_do_not_exist(lines: Lines) -> None:
    code = f"for n in ({FIRST_UNKNOWN}, {FIRST_UNKNOWN} + 1, 1000, 100000): print(call(n))"
    assert lines(code) == ["ENOSYS"] * 4


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x40000000])
def test_no_new_namespace_by_clone(lines: Lines, flag: int) -> None:
    code = f"r = call({SPECIAL['clone'][COLUMN]}, {flag} | 17); print(r, flush=True)"
    assert lines(code) == ["EPERM"]


def test_clone3_does_not_exist_so_that_libraries_fall_back(lines: Lines) -> None:
    assert lines(f"print(call({SPECIAL['clone3'][COLUMN]}, 0, 0))") == ["ENOSYS"]


def test_threads_and_subprocesses_still_work(lines: Lines) -> None:
    code = """
    import subprocess, threading
    thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
    print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
    """
    assert lines(code) == ["thread", "child"]


@pytest.mark.parametrize("request_number", [0x5412, 0x541C, 0x5412 | 1 << 32])
def test_no_input_is_pushed_into_a_terminal(lines: Lines, request_number: int) -> None:
    code = f"print(call({SPECIAL['ioctl'][COLUMN]}, 0, {request_number}, 0))"
    assert lines(code) == ["EPERM"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this ABI exists on x86_64 only")
def test_the_x32_abi_kills(attack: Attack) -> None:
    result = attack("print(call(0x40000000 | 39))")
    assert (result.status, result.stdout) in (
        (ExecStatus.POLICY, b""),
        (ExecStatus.OK, b"ENOSYS\n"),  # a kernel without the ABI
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this ABI exists on x86_64 only")
def test_the_i386_abi_kills(attack: Attack) -> None:
    code = """
    import mmap
    # mov eax, 20 (getpid); int 0x80; ret
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("b814000000cd80c3"))
    got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    print("reached" if got == os.getpid() else "failed")
    """
    result = attack(code)
    assert (result.status, result.stdout) in (
        (ExecStatus.POLICY, b""),
        (ExecStatus.SIGNAL, b""),  # a kernel without the ABI
        (ExecStatus.OK, b"failed\n"),  # gVisor takes it for a call of its one ABI
    )


def test_no_privilege_at_all(pool: SandboxPool, lines: Lines) -> None:
    code = """
    for line in open("/proc/self/status"):
        if line.startswith(("Cap", "NoNewPrivs", "Seccomp:")): print(*line.split())
    other = 1 if os.getuid() == 0 else 0
    for how in (lambda: os.nice(-5), lambda: os.setuid(other), lambda: os.setgid(other),
                lambda: os.setgroups([0]), lambda: os.mknod("/work/n", 0o020666, os.makedev(1, 1)),
                lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))):
        print(attempt(how) in ("EPERM", "EINVAL", "EACCES"))
    """
    seen = lines(code)
    # gVisor takes any niceness, and asks this machine for none.
    assert seen[-6] == "True" or pool.capabilities.isolation is Isolation.USER_KERNEL
    assert seen[-5:] == ["True"] * 5
    status = dict(line.split() for line in seen[:-6])
    assert status.pop("Seccomp:") == "2"
    # gVisor names neither this nor the ambient set.
    assert status.pop("NoNewPrivs:", "1") == "1"
    assert {"CapInh:", "CapPrm:", "CapEff:", "CapBnd:"} <= set(status)
    assert set(status.values()) == {"0" * 16}


def test_setuid_programs_give_nothing(lines: Lines) -> None:
    code = """
    import subprocess
    for path in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/newgrp", "/usr/bin/passwd"):
        if os.path.exists(path):
            subprocess.run([path, "--version"], capture_output=True, stdin=subprocess.DEVNULL)
    print(len({*os.getresuid(), *os.getresgid()}), *os.getresuid())
    print(attempt(lambda: os.setgroups([])))
    """
    # An ordinary user has one id only, and some runtimes call it 0 inside.
    assert lines(code) in (["1 65534 65534 65534", "EPERM"], ["1 0 0 0", "EPERM"])


def test_limits_cannot_be_raised(lines: Lines) -> None:
    code = """
    import resource
    for which in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE,
                  resource.RLIMIT_CPU):
        try:
            resource.setrlimit(which, (1 << 40, 1 << 40)); print("raised")
        except ValueError:
            print("refused")
    """
    assert lines(code) == ["refused"] * 4


# Network


@pytest.mark.parametrize("family", [16, 17, 29, 30, 31, 38, 40, 44])
def test_exotic_sockets_do_not_exist(lines: Lines, family: int) -> None:
    code = f"print(attempt(lambda: socket.socket({family}, socket.SOCK_DGRAM)))"
    assert lines(code) in (["EAFNOSUPPORT"], ["EPERM"])


def test_raw_sockets_are_refused(lines: Lines) -> None:
    code = """
    for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58)):
        print(attempt(lambda: socket.socket(family, socket.SOCK_RAW, protocol)))
    """
    assert set(lines(code)) <= {"EPERM", "EAFNOSUPPORT"}


def test_nothing_is_reachable(lines: Lines) -> None:
    code = """
    for address in ("169.254.169.254", "8.8.8.8", "10.0.0.1", "::ffff:8.8.8.8", "2001:4860::8888"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            s = socket.socket(family, kind); s.settimeout(2)
            print(attempt(lambda: s.connect((address, 53))))
    """
    assert set(lines(code)) <= {"ENETUNREACH", "EADDRNOTAVAIL", "EHOSTUNREACH"}


def test_loopback_is_the_boxs_own(lines: Lines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"print(attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 2)))"
        assert lines(code) == ["ECONNREFUSED"]


def test_abstract_sockets_of_the_host_are_out_of_reach(lines: Lines) -> None:
    name = f"\0burnish-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"print(attempt(lambda: socket.socket(socket.AF_UNIX).connect({name!r})))"
        assert lines(code) == ["ECONNREFUSED"]


# Files


def test_only_what_programs_need_is_visible(pool: SandboxPool, lines: Lines) -> None:
    code = "print(sorted(os.listdir('/'))); print(sorted(os.listdir('/etc')))"
    root, etc = lines(code)
    allowed = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp"}
    # /run/box holds the command and its input where no descriptor can be passed.
    allowed |= {"usr", "work", "run"}
    if pool.capabilities.isolation is Isolation.USER_KERNEL:
        allowed.add("sys")  # about that kernel
    known = {"passwd", "group", "ld.so.cache", "alternatives"}
    if pool.capabilities.backend in ENGINES:
        allowed |= {"sys", ".dockerenv", "box"}
        known |= {"hostname", "hosts", "resolv.conf", "mtab"}  # the container's own
        files = "print([names for top in ('/sys', '/box') for *_, names in os.walk(top) if names])"
        assert lines(files) == ["[]"]
    assert set(eval(root)) <= allowed
    assert set(eval(etc)) <= known


def test_packages_that_hold_environments_cannot_be_read(
    backend: Callable[[int], SandboxPool], attack_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = "/usr/lib/python3/dist-packages"
    if not os.path.isdir(packages) or not os.listdir(packages):
        pytest.skip("no packages are installed system-wide")
    # As if we were installed there: then the answers of every task lie there too.
    monkeypatch.syspath_prepend(packages)
    try:
        other = backend(1)
    except UserError as error:
        pytest.skip(str(error))
    code = f"print(attempt(lambda: os.listdir({packages!r})), "
    code += f"attempt(lambda: os.mkdir({packages + '/x'!r})))"
    result = attack_in(other, code)
    asyncio.run(other.close())
    # An image has none of them.
    assert result.stdout in (b"[] EROFS\n", b"ENOENT ENOENT\n")


def test_only_three_places_can_be_written(pool: SandboxPool, lines: Lines, owns_root: bool) -> None:
    """A user with one id is root of its own copies of `/` and `/etc`: `docs/sandbox.md`."""
    ours = ("/", "/etc", "/usr", "/usr/bin", "/usr/lib", "/lib") if owns_root else ("/", "/etc")
    may_be_native = pool.capabilities.backend.startswith(("native", "remote"))
    owns_dev = any("the program owns `/dev`" in note for note in pool.capabilities.notes)
    code = f"""
    own = {ours!r} if os.getuid() == 0 and {may_be_native} else ()
    for place in ("/", "/usr", "/usr/bin", "/etc", "{"/" if owns_dev else "/dev"}", "/proc",
                  "/proc/sys/kernel", "/lib", "/dev/pts", "/usr/lib"):
        writing = lambda: os.open(place + "/probe", os.O_CREAT | os.O_WRONLY)
        print("EROFS" if place in own else attempt(writing))
    for place in ("/work", "/tmp", "/dev/shm"):
        print(attempt(lambda: os.close(os.open(place + "/probe", os.O_CREAT | os.O_WRONLY))))
    """
    seen = lines(code)
    assert set(seen[:10]) <= {"EROFS", "EACCES", "EPERM", "ENOENT"}
    assert seen[10:] == ["None"] * 3


def test_the_kernels_switches_are_read_only(lines: Lines) -> None:
    code = """
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory",
                 "/proc/sysrq-trigger", "/proc/sys/kernel/hostname", "/proc/self/uid_map",
                 "/proc/sys/user/max_user_namespaces", "/proc/kcore", "/proc/kmsg",
                 "/proc/self/attr/current", "/sys/kernel/uevent_helper", "/dev/mem", "/dev/kmsg",
                 "/sys/fs/cgroup/memory/release_agent"):
        if os.path.exists(path) and os.stat(path).st_rdev == os.makedev(1, 3):
            continue  # /dev/null in its place
        print(attempt(lambda: os.write(os.open(path, os.O_WRONLY), b"1")))
    """
    assert set(lines(code)) <= {"EROFS", "EACCES", "EPERM", "ENOENT", "EINVAL"}


def test_no_descriptor_leaks_in(lines: Lines) -> None:
    code = """
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            print(name, os.readlink("/proc/self/fd/" + name).split(":")[0])
        except FileNotFoundError:
            pass
    """
    seen = [line for line in lines(code) if not line.endswith("attack.py")]
    assert seen[0] in ("0 /memfd", "0 /dev/null", "0 /run/box/stdin")
    assert seen[1:] in (["1 pipe", "2 pipe"], ["1 host", "2 host"])


def test_no_descriptor_of_process_1_leads_out(lines: Lines) -> None:
    code = """
    try:
        names = os.listdir("/proc/1/fd")
    except PermissionError:
        names = []  # it is not dumpable
    for name in names:
        try:
            target = os.readlink("/proc/1/fd/" + name)
        except PermissionError:
            continue  # its number shows (docs/sandbox.md), not where it leads
        if not target.startswith(("/dev/null", "pipe:", "anon_inode:[eventfd]", "/memfd:",
                                  "/run/box/", "host:[")):
            print(target)
    print(attempt(lambda: os.readlink("/proc/1/root")), attempt(lambda: os.readlink("/proc/1/cwd")))
    print(attempt(lambda: sorted(os.listdir("/proc/1/root")) == sorted(os.listdir("/"))))
    """
    seen = lines(code)
    assert seen[0] in ("'/' '/'", "'/' '/work'", "EACCES EACCES")
    assert seen[1:] in (["True"], ["EACCES"])


def test_nothing_about_the_host_shows_in_process_1(lines: Lines) -> None:
    code = """
    print(open("/proc/1/cmdline").read().replace(chr(0), " "))
    environ = attempt(lambda: len(open("/proc/1/environ").read()))
    print(0 if environ == "EACCES" else environ)
    """
    command_line, environ = lines(code)[0], lines(code)[-1]
    assert "/media" not in command_line
    assert "--bind" not in command_line
    assert int(environ) < 100


def test_input_cannot_be_changed_under_us(pool: SandboxPool) -> None:
    async def main() -> ExecResult:
        code = "import os\ntry: os.open('/proc/self/fd/0', os.O_RDWR); os.write(3, b'x')\n"
        code += "except OSError as error: print('refused')"
        async with pool.acquire() as box:
            return await box.exec(python_argv("-c", code), stdin=b"input")

    assert asyncio.run(main()).stdout == b"refused\n"


def test_device_files_are_the_harmless_ones(pool: SandboxPool, lines: Lines) -> None:
    code = "print(sorted(os.listdir('/dev')))"
    harmless = {"core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin"}
    harmless |= {"stdout", "tty", "urandom", "zero", "console"}
    if pool.capabilities.isolation is Isolation.USER_KERNEL:
        harmless |= {"fuse", "net"}  # devices of that kernel, not of this machine
    if pool.capabilities.backend in ENGINES:
        harmless |= {"mqueue"}  # empty and read-only
    assert set(eval(lines(code)[0])) <= harmless


# Processes


def test_no_process_of_the_host_is_visible(lines: Lines) -> None:
    code = "print(len([n for n in os.listdir('/proc') if n.isdigit()])); print(os.getpid() < 10)"
    count, small = lines(code)
    assert int(count) <= 3
    assert small == "True"


def test_signals_do_not_reach_the_host(lines: Lines) -> None:
    code = f"print(attempt(lambda: os.kill({os.getpid()}, 0)))"
    assert lines(code) == ["ESRCH"]


def test_overwriting_process_1_forges_nothing_but_its_own_end(attack: Attack) -> None:
    code = """
    import struct
    for name in os.listdir("/proc/1/fd"):
        try:
            descriptor = os.open("/proc/1/fd/" + name, os.O_WRONLY)
            os.write(descriptor, struct.pack("Q", 1))
        except OSError:
            pass
    try:
        memory = open("/proc/1/mem", "r+b", buffering=0)
        for line in open("/proc/1/maps"):
            if " rw-p " in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(start); memory.write(bytes(end - start))
    except (OSError, ValueError):
        pass
    sys.exit(7)
    """
    result = attack(code)
    assert result.status not in (ExecStatus.OK, ExecStatus.INFRA_ERROR)


# Neighbours


def test_boxes_cannot_see_or_signal_each_other(pool: SandboxPool, prelude: str) -> None:
    async def main() -> tuple[ExecResult, ExecResult]:
        code = (
            prelude
            + "import time\nos.kill(-1, 0) if 0 else None\nprint(len(os.listdir('/proc')) and "
        )
        code += "[n for n in os.listdir('/proc') if n.isdigit() and int(n) > 10])"
        async with pool.acquire() as one, pool.acquire() as other:
            sleeping = asyncio.create_task(one.exec(("sleep", "0.5")))
            seen = await other.exec(python_argv("-c", code))
            return seen, await sleeping

    seen, slept = asyncio.run(main())
    assert seen.stdout == b"[]\n"
    assert slept.status is ExecStatus.OK


def test_a_hostile_box_leaves_its_neighbour_alone(pool: SandboxPool) -> None:
    async def main() -> tuple[ExecResult, ExecResult]:
        bomb = (
            "import os\nwhile True:\n  try: os.fork(); bytearray(1 << 24)\n  except Exception: pass"
        )
        async with pool.acquire() as one, pool.acquire() as other:
            bombing = asyncio.create_task(
                one.exec(python_argv("-c", bomb), limits=Limits(wall_s=1, cpu_s=1))
            )
            innocent = await other.exec(python_argv("-c", "print(sum(range(1000)))"))
            return innocent, await bombing

    innocent, bombed = asyncio.run(main())
    assert innocent.status is ExecStatus.OK
    assert bombed.status in (ExecStatus.TIMEOUT, ExecStatus.OOM, ExecStatus.PIDS)


# The host


def test_the_hosts_core_dumps_and_mounts_are_untouched(attack: Attack) -> None:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        before = file.read()
    result = attack("ctypes.string_at(0)")
    assert result.status is ExecStatus.SIGNAL
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        assert file.read() == before
