"""Hostile use of files: what lies on the host, what others run, and what we read back."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.core.boxes import (
    ExecResult,
    ExecStatus,
    Feature,
    Isolation,
    Limits,
    Policy,
    Privileges,
    SandboxPool,
)
from burnish.sandbox.interpreter import python_argv

Attack = Callable[..., ExecResult]
Lines = Callable[[str], list[str]]
CLOSED = {"EPERM", "EACCES", "EROFS", "EXDEV", "ETXTBSY", "ENOENT", "ENOTSUP", "EBUSY", "EINVAL"}


def identity(path: Path) -> tuple[int, int, int, int, int, str]:
    status = path.stat()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return (*status[:5], digest)


# The host's files below the box


def test_the_hosts_programs_can_be_neither_written_nor_linked_nor_marked(
    lines: Lines, owns_root: bool
) -> None:
    if owns_root:
        pytest.skip("it has its own copies of an image, which is compared when its pool is closed")
    target = Path("/usr/bin/env").resolve()
    before = identity(target)
    code = f"""
    import mmap
    target = {str(target)!r}
    held = os.open(target, os.O_RDONLY)
    def shared():
        mmap.mmap(held, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)[0] = 0
    for what in (
        lambda: os.open(target, os.O_WRONLY), lambda: os.truncate(target, 0), shared,
        lambda: os.open(f"/proc/self/fd/{{held}}", os.O_WRONLY),
        lambda: os.chmod(target, 0o777), lambda: os.fchmod(held, 0o777),
        lambda: os.chown(target, os.getuid(), os.getgid()), lambda: os.utime(target, (0, 0)),
        lambda: os.setxattr(target, "user.mark", b"1"), lambda: os.unlink(target),
        lambda: os.rename(target, target + ".old"), lambda: os.rename("/work", "/usr/bin/env"),
        lambda: os.link(target, "/work/link"), lambda: os.link(target, "/usr/bin/new"),
        lambda: os.link(f"/proc/self/fd/{{held}}", "/work/link", follow_symlinks=True),
        lambda: os.symlink("/tmp", "/usr/bin/new"), lambda: os.removexattr(target, "user.mark"),
    ):
        print(attempt(what))
    """
    seen = lines(code)
    assert len(seen) == 17
    assert set(seen) <= CLOSED | {"ENOTDIR", "ENODATA"}, seen
    assert identity(target) == before


def test_no_lock_on_the_hosts_files_outlives_its_box(attack: Attack) -> None:
    """A living box can hold one on what it can read: a named exception."""
    fcntl = pytest.importorskip("fcntl")
    code = "import fcntl; fcntl.flock(os.open('/usr/bin/env', os.O_RDONLY), fcntl.LOCK_EX)"
    assert attack(code).status is ExecStatus.OK
    with open("/usr/bin/env", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_user_ids_of_programs_are_not_taken_from_their_files(lines: Lines) -> None:
    code = """
    import shutil, subprocess
    for place in ("/work", "/tmp", "/dev/shm"):
        copy = place + "/id"
        shutil.copy("/usr/bin/id", copy)
        for mode in (0o4755, 0o2755, 0o6777):
            attempt(lambda: os.chmod(copy, mode)); attempt(lambda: os.chown(copy, 0, 0))
            for kind in ("-u", "-ru", "-g", "-rg"):
                found = subprocess.run([copy, kind], capture_output=True, text=True).stdout
                print(found.strip() in ("", str(os.getuid())))
        print(attempt(lambda: os.setxattr(copy, "security.capability", bytes(20))) in
              ("EPERM", "EINVAL", "ENOTSUP"))
    """
    assert set(lines(code)) == {"True"}


def test_root_with_packages_gives_up_its_user_for_good(pool: SandboxPool) -> None:
    """Not even its own set-user-id programs bring it back: no_new_privs."""
    code = """
import os, subprocess
os.system("cp /usr/bin/id /tmp/id; chown 0:0 /tmp/id; chmod 6755 /tmp/id")
print(oct(os.stat("/tmp/id").st_mode), os.stat("/tmp/id").st_uid)
os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
print(subprocess.run(["/tmp/id", "-u"], capture_output=True, text=True).stdout)
"""
    if Feature.PRIVILEGES not in pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox has no privileges to misuse")

    async def main() -> ExecResult:
        async with pool.acquire(policy=Policy(privileges=Privileges.PACKAGES)) as box:
            return await box.exec(python_argv("-c", code))

    assert asyncio.run(main()).stdout.split() == [b"0o106755", b"0", b"1000"]


ROOT = """
for what in (
    lambda: os.mknod("/tmp/disk", 0o060666, os.makedev(8, 0)),
    lambda: os.mknod("/tmp/mem", 0o020666, os.makedev(1, 1)),
    lambda: os.mknod("/tmp/whiteout", 0o020666, 0),
    lambda: os.chroot("/tmp"), lambda: os.sethostname if 0 else socket.sethostname("x"),
    lambda: open("/proc/sys/kernel/core_pattern", "w"), lambda: open("/proc/sysrq-trigger", "w"),
    lambda: open("/proc/1/mem", "rb"),
    # Their numbers alone show in a warm Python box: a named exception.
    lambda: [os.readlink(f"/proc/1/fd/{n}") for n in os.listdir("/proc/1/fd")],
    lambda: os.readlink("/proc/1/exe"), lambda: os.chmod("/usr", 0o777),
    lambda: os.chown("/usr/bin/env", 0, 0), lambda: os.unlink("/usr/bin/env"),
    lambda: os.rename("/usr", "/tmp/usr"), lambda: os.rename("/dev", "/tmp/dev"),
    lambda: os.rename("/proc", "/tmp/proc"), lambda: os.chmod("/dev/null", 0o600),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255), lambda: os.nice(-5),
    lambda: os.setxattr("/tmp", "trusted.overlay.opaque", b"y"),
):
    print(attempt(what))
os.setresuid(65535, 65535, 65535)
for what in (lambda: open("/proc/1/mem", "rb"), lambda: os.listdir("/proc/1/fd"),
             lambda: os.kill(1, 9) or os.kill(1, 19), lambda: os.setpriority(0, 1, 19)):
    print(attempt(what))
"""


def test_root_with_packages_is_root_of_nothing_else(
    pool: SandboxPool, prelude: str, owns_root: bool
) -> None:
    """Not of devices, mounts, the kernel or process 1, whose user it may become."""
    if Feature.PRIVILEGES not in pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox has no privileges to misuse")

    async def main() -> tuple[ExecResult, ExecResult]:
        async with pool.acquire(policy=Policy(privileges=Privileges.PACKAGES)) as box:
            attacked = await box.exec(python_argv("-c", prelude + ROOT))
            return attacked, await box.exec(("echo", "well"))

    attacked, after = asyncio.run(main())
    seen = attacked.stdout.decode().split("\n")[:-1]
    assert attacked.status is ExecStatus.OK, attacked
    # Process 1 takes no signal from its box.
    assert seen.pop(22) == "None"
    assert len(seen) == 23
    if owns_root:
        # Mode and owner of files of its own copy of the image.
        assert seen[10:13] == ["None"] * 3
        seen[10:13] = []
    assert set(seen) <= CLOSED | {"EPROTONOSUPPORT"}, seen
    assert after.stdout == b"well\n"


# What runs on the host and shows in /proc

RACER = """
import os
seen = set()
open("/work/ready", "w").close()
while True:
    for name in os.listdir("/proc"):
        if not name.isdigit() or name in ("1", str(os.getpid())): continue
        try:
            status = os.stat(f"/proc/{name}/exe")
            if status.st_ino in seen: continue
            held = os.open(f"/proc/{name}/exe", os.O_RDONLY)
        except OSError: continue
        seen.add(status.st_ino)
        link = os.readlink(f"/proc/self/fd/{held}")
        for what in (lambda: os.fchmod(held, 0o777), lambda: os.utime(held, (0, 0)),
                     lambda: os.setxattr(held, "user.x", b"1"),
                     lambda: os.open(f"/proc/self/fd/{held}", os.O_WRONLY)):
            try:
                what(); print("changed", link, file=open("/work/out", "a"), flush=True)
            except OSError: pass
        print("tried", link, file=open("/work/out", "a"), flush=True)
        os.close(held)
"""


def test_what_process_1_runs_cannot_be_changed(pool: SandboxPool, owns_root: bool) -> None:
    """`#!/proc/self/exe` leads there, of the kind of CVE-2019-5736."""
    if Feature.BACKGROUND not in pool.capabilities.features:
        pytest.skip("no process can wait for it: none outlives a command")
    start = "python3 -I -S racer.py & while ! [ -e ready ]; do sleep 0.01; done"
    start += "; printf '#!/proc/self/exe\\n' > script; chmod +x script"

    async def main() -> str:
        async with pool.acquire() as box:
            await box.write_file("racer.py", RACER.encode())
            started = await box.exec(("sh", "-c", start), keep=True)
            assert started.status is ExecStatus.OK, started
            for _ in range(40):
                await box.exec(("./script",), keep=True)
            return (await box.exec(("cat", "out"))).stdout.decode()

    seen = asyncio.run(main())
    assert "tried" in seen
    changed = {line.split()[1] for line in seen.splitlines() if line.startswith("changed")}
    if owns_root:
        changed = {path for path in changed if not path.startswith("/usr/bin/")}  # its own copies
    # In memory, of this helper alone, and sealed.
    assert changed <= {"/memfd:init"}, seen


def test_programs_in_use_cannot_be_overwritten_through_proc(lines: Lines, owns_root: bool) -> None:
    own = "" if owns_root else "/proc/self/exe"
    code = f"""
    for path in filter(None, ({own!r}, "/proc/1/exe", f"/proc/{{os.getppid()}}/exe")):
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            print(attempt(lambda: os.open(path, flags)))
        print(attempt(lambda: os.chmod(path, 0o777)), attempt(lambda: os.unlink(path)))
    """
    assert set(" ".join(lines(code)).split()) <= CLOSED


@pytest.mark.parametrize("start", ["/proc/self/fd/{}", "/proc/1/fd/{}", "/proc/self/fd/{}/../.."])
def test_no_working_directory_leads_out_by_a_descriptor(pool: SandboxPool, start: str) -> None:
    """CVE-2024-21626: a descriptor of the host that is open while the directory is entered."""

    async def main() -> list[ExecResult]:
        async with pool.acquire() as box:
            tried = [
                await box.exec(("ls", "-a", "/proc/self/cwd/"), cwd=start.format(fd))
                for fd in range(12)
            ]
            tried.append(await box.exec(("ls", "-a", "/"), cwd="/"))
            return tried

    *tried, root = asyncio.run(main())
    for result in tried:
        assert result.status is not ExecStatus.INFRA_ERROR, result
        entered = set(result.stdout.split())
        assert (
            not entered
            or entered <= set(root.stdout.split()) | {b".", b".."}
            or (
                # The directory of the box's own process.
                b"cmdline" in entered and b"environ" in entered
            )
        ), result


def test_a_covered_file_cannot_be_uncovered(pool: SandboxPool, lines: Lines) -> None:
    """Masks are mounts: they can be neither moved nor walked around by another name."""
    code = """
    masked = ("kcore", "keys", "kallsyms", "timer_list", "sysrq-trigger", "interrupts", "kmsg",
              "sched_debug", "latency_stats")
    for name in masked:
        for base in ("/proc", "/proc/self/root/proc", f"/proc/{os.getpid()}/root/proc",
                     "/proc/self/task/../../../proc", "/work/p"):
            path = f"{base}/{name}"
            if base == "/work/p" and not os.path.islink(base): os.symlink("/proc", base)
            print(len(attempt(lambda: open(path, "rb").read(64))) if os.path.exists(path) and
                  os.stat(path).st_rdev != os.makedev(1, 3) and name not in ("interrupts",
                  "kallsyms", "keys", "kmsg") else 3)
        for what in (lambda: os.rename(f"/proc/{name}", "/work/x"),
                     lambda: os.unlink(f"/proc/{name}"),
                     lambda: os.symlink("/work", f"/proc/{name}")):
            print(len(attempt(what)) if attempt(what) == "None" else 3)
    """
    assert {int(line) for line in lines(code)} <= {3, *range(4, 8)}


# What we read back


def test_a_result_that_changes_under_us_is_never_anything_else(pool: SandboxPool) -> None:
    """A file, a link to another, a FIFO and a directory in turn, while we read."""
    if Feature.BACKGROUND not in pool.capabilities.features:
        pytest.skip("nothing runs in a box while a file is read")
    code = """
import os
open("ready", "w").close()
os.mkdir("d"); open("d/result", "w").write("REAL"); os.symlink("/etc", "e")
while True:
    open("new", "w").write("REAL"); os.replace("new", "result")
    os.symlink("/etc/passwd", "new"); os.replace("new", "result")
    os.mkfifo("new"); os.replace("new", "result")
    os.rename("d", "f"); os.rename("e", "d"); os.rename("d", "e"); os.rename("f", "d")
"""

    async def main() -> set[bytes]:
        async with pool.acquire() as box:
            await box.write_file("swap.py", code.encode())
            start = "python3 -I -S swap.py & while ! [ -e ready ]; do sleep 0.01; done"
            await box.exec(("sh", "-c", start), keep=True)
            seen = set()
            for _ in range(150):
                for name in ("result", "d/result", "d/passwd"):
                    try:
                        seen.add(await box.read_file(name))
                    except FileNotFoundError:
                        seen.add(b"absent")
            # Writing goes to the name, never to what a link there points to.
            for _ in range(50):
                await box.write_file("result", b"REAL")
            return seen

    assert asyncio.run(main()) <= {b"REAL", b"", b"absent"}


def test_a_verdict_is_a_plain_file_or_none(pool: SandboxPool) -> None:
    """Whatever else the box puts in its place, and whatever it prints."""
    forged = {
        "link": "ln -s /etc/passwd v",
        "loop": "ln -s v v",
        "up": "ln -s ../../../../etc/passwd v",
        "through": "ln -s /etc d; ln -s d/passwd v",
        "fifo": "mkfifo v",
        "socket": "python3 -c 'import socket; socket.socket(1).bind(\"v\")'",
        "folder": "mkdir v",
        "closed": "echo PASSED > v; chmod 0 v",
        "process": "ln -s /proc/self/environ v",
        "descriptor": "ln -s /proc/self/fd/0 v",
    }

    async def main() -> dict[str, bytes]:
        seen = {}
        async with pool.acquire() as box:
            for name, command in forged.items():
                line = f"rm -rf v d; {command}; echo PASSED; echo '1 passed in 0.01s'"
                result = await box.exec(("sh", "-c", line), limits=Limits(wall_s=10))
                assert result.status is ExecStatus.OK, result
                try:
                    seen[name] = await box.read_file("v")
                except FileNotFoundError:
                    continue
        return seen

    seen = asyncio.run(main())
    # Its own file, and who reads for us may be its user.
    assert set(seen) <= {"closed"}
    assert seen.get("closed", b"PASSED\n") == b"PASSED\n"


@pytest.mark.skipif(os.environ.get("HOME") is None, reason="set HOME")
def test_nothing_says_where_on_the_host_the_box_lies(pool: SandboxPool, lines: Lines) -> None:
    """Paths of the host that a box may learn are those of the system's programs."""
    if pool.capabilities.isolation is Isolation.USER_KERNEL:
        return  # its mounts are that kernel's own
    files = ["mountinfo", "mounts", "environ", "cmdline", "maps"]
    if pool.capabilities.backend == "native":
        files.append("cgroup")  # others show the names of ours: a named exception
    code = f"""
    for path in {files}:
        for process in ("self", "1"):
            print(attempt(lambda: open(f"/proc/{{process}}/{{path}}").read()))
    print(dict(os.environ))
    """
    told = "\n".join(lines(code))
    assert str(Path.home()) + "/" not in told or str(Path.home()) == "/"
    if pool.capabilities.backend != "docker":  # of which mounts tell: a named exception
        assert "/burnish" not in told
    for name, value in os.environ.items():
        if len(value) > 12 and name not in ("PATH", "HOME", "PWD", "OLDPWD"):
            assert value not in told, name
