"""What a job is, and what it can do to the process 1 of its box."""

import errno
import socket
import struct

import pytest
from raw_helper import (
    NOBODY,
    NUM_IDS,
    PYTHON,
    ROOT,
    RawBox,
    RawHelper,
    job_body,
    open_helper,
    python,
    shell,
)

from burnish.sandbox.native.protocol import Ending, Flag, Op


def test_a_job_has_no_privilege(box: RawBox) -> None:
    status = shell(box, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    # The C library's own signals, 32 and 33: its posix_spawn ignores them in every child.
    ignored = int(fields["SigIgn"], 16) & ~(0b11 << 31)
    assert int(fields["SigBlk"], 16) == ignored == 0
    assert set(fields["Uid"].split()) == set(fields["Gid"].split()) == {str(box.job_id)}
    assert fields["Groups"].split() in ([], [str(NOBODY)] if not ROOT else [])


def test_a_job_has_its_three_streams_and_no_other_descriptor(box: RawBox) -> None:
    assert shell(box, "ls /proc/$$/fd").split() == ["0", "1", "2"]


def test_a_job_gets_its_limits(box: RawBox) -> None:
    assert shell(box, "ulimit -n", limits=[(7, 33, 34)]) == "33\n"
    assert shell(box, "ulimit -Hn", limits=[(7, 33, 34)]) == "34\n"


def test_process_1_shows_nothing_and_survives_everything(box: RawBox) -> None:
    script = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for path in ("environ", "mem", "maps", "fd", "root/etc", "cwd", "exe"):
    try: open("/proc/1/" + path, "rb").read(1); print("read", path)
    except OSError: pass
    try: os.listdir("/proc/1/" + path); print("listed", path)
    except OSError: pass
libc.ptrace(16, 1, 0, 0)
try: os.sched_setaffinity(1, {0}); print("affinity")
except OSError: pass
try: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)); print("limits")
except OSError: pass
print(open("/proc/1/cmdline").read().rstrip(chr(0)))
"""
    seen = python(box, script).splitlines()
    if not ROOT:  # of one id: the named exception
        seen = [line for line in seen if line not in ("affinity", "limits")]
    assert seen == ["init"]
    assert shell(box, "echo alive") == "alive\n"


def test_the_inits_user_is_for_nobody_else(box: RawBox) -> None:
    if not ROOT:
        pytest.skip("an ordinary user without subordinate ids has one id only")
    last = NUM_IDS - 1
    box.send(Op.EXEC, job_body(last, ["true"]), [0, 1, 2])
    assert box.exited()[:2] == (Ending.NOT_STARTED, errno.EINVAL)
    assert box.put("x", b"", uid=last) == errno.EINVAL


def test_a_full_process_table_is_an_answer(box: RawBox) -> None:
    limits = [(6, 3, 3)]
    script = "import os\nfor _ in range(9):\n try: os.fork() or os._exit(0)\n except OSError: pass"
    box.exec(PYTHON, "-I", "-S", "-c", script, limits=limits)
    assert shell(box, "echo alive") == "alive\n"


def test_only_three_places_can_be_written(box: RawBox) -> None:
    if not ROOT:
        pytest.skip("with one id the job is root of the box, whose root directory it may change")
    places = "/ /usr /etc /dev /proc /proc/sys /work /tmp /dev/shm"
    script = f"for d in {places}; do touch $d/x 2>&- && echo $d; done; :"
    assert shell(box, script).split() == ["/work", "/tmp", "/dev/shm"]


def test_dangerous_files_of_proc_are_covered(box: RawBox) -> None:
    files = "kcore keys kallsyms timer_list sysrq-trigger"
    script = f"for f in {files}; do cat /proc/$f 2>&-; done; ls /proc/acpi 2>&-; :"
    assert shell(box, script) == ""
    assert shell(box, "echo 1 > /proc/sys/kernel/printk 2>&- || echo refused") == "refused\n"


def test_a_box_is_alone(box: RawBox) -> None:
    assert shell(box, "hostname") == "box\n"
    assert shell(box, "cat /proc/net/dev | tail -n +3 | cut -d: -f1").split() == ["lo"]
    assert "/dev/vda / " not in shell(box, "cat /proc/mounts")
    groups = shell(box, "cat /proc/self/cgroup").split()
    assert [group for group in groups if not group.endswith(":/")] == []


def test_the_loopback_works_and_can_be_listened_on(box: RawBox) -> None:
    reply = box.ask(Op.LISTEN, struct.pack("<H", 8080))
    assert reply.op is Op.DONE
    with socket.socket(fileno=reply.fds[0]) as server:
        script = "import socket; socket.create_connection(('127.0.0.1', 8080)).sendall(b'hi')"
        box.start(PYTHON, "-I", "-S", "-c", script)
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(10) == b"hi"
        assert box.exited().code == 0
        assert box.ask(Op.LISTEN, struct.pack("<H", 8080)).error == errno.EADDRINUSE


def test_terminals_work(box: RawBox) -> None:
    script = "import os, pty; a, b = pty.openpty(); os.write(b, b'x'); print(os.read(a, 1))"
    assert box.output(PYTHON, "-I", "-c", script) == "b'x'\n"


def test_deterministic_boxes_repeat_addresses_on_one_processor(helper: RawHelper) -> None:
    box = helper.create(flags=Flag.CREATE_DETERMINISTIC)
    script = "import os; print(id(object()), len(os.sched_getaffinity(0)))"
    seen = {box.output(PYTHON, "-I", "-S", "-c", script, env=["PYTHONHASHSEED=0"]) for _ in "abc"}
    assert len(seen) == 1
    assert seen.pop().endswith(" 1\n")


@pytest.mark.skipif(not ROOT, reason="needs more than one user id: run as root")
def test_package_boxes_can_change_owners_and_others_cannot(helper: RawHelper) -> None:
    box = helper.create(flags=Flag.CREATE_PACKAGES)
    script = "touch a && chown 33:33 a && stat -c %u a"
    assert shell(box, script, uid=0, flags=Flag.EXEC_PACKAGES, cwd="/tmp") == "33\n"
    become = f"{PYTHON} -c 'import os; os.setresuid(33, 33, 33); print(os.getuid())'"
    assert shell(box, become, uid=0, flags=Flag.EXEC_PACKAGES) == "33\n"
    assert box.exec("sh", "-c", script, uid=0, cwd="/tmp").code != 0
    assert "CapPrm:\t0000000000000000" in shell(box, "cat /proc/self/status", uid=0)
    plain = helper.create()
    assert plain.exec("chown", "33", "/tmp", uid=0).code != 0
    plain.send(Op.EXEC, job_body(0, ["true"]), [0, 1, 2], Flag.EXEC_PACKAGES)
    assert plain.exited()[:2] == (Ending.NOT_STARTED, errno.EINVAL)


def test_hidden_directories_look_empty(helper_name: str) -> None:
    helper = open_helper(helper_name, hidden=["/usr/share", "/usr/no-such-directory"])
    seen = shell(helper.create(), "ls -A /usr/share; touch /usr/share/x 2>&- || echo refused")
    assert seen == "refused\n"
    helper.end()
