"""What every helper of the native sandbox does with commands, in C or in Python."""

import errno
import re
import select
import signal

import pytest
from raw_helper import (
    COUNT,
    PATH,
    PYTHON,
    RawBox,
    RawHelper,
    content,
    memory_file,
    shell,
)

from burnish.sandbox.native import protocol
from burnish.sandbox.native.binary import SOURCES
from burnish.sandbox.native.protocol import Ending, Flag, Op


def test_the_c_sources_and_the_python_constants_agree() -> None:
    source = (SOURCES / "wire.h").read_text(encoding="ascii")
    values: dict[str, int] = {}
    for body in re.findall(r"enum[^{;]*\{([^}]*)\}", source):
        following = 0
        for name, value in re.findall(r"(\w+)(?:\s*=\s*([\w+* ]+))?", body):
            if not name[0].isalpha():
                continue
            following = eval(value, {}, values) if value else following
            values[name] = following
            following += 1
    for name in ("VERSION", "MAX_MESSAGE_BYTES", "MAX_LAYERS", "MAX_CREATE_FDS"):
        assert values[name] == getattr(protocol, name)
    assert values["HEADER_BYTES"] == protocol.HEADER.size
    assert {op.name: values[op.name] for op in Op if op.name in values} == {
        op.name: op for op in Op
    }
    for flag in Flag.__members__:
        assert values[flag] == Flag[flag]
    for ending in Ending:
        assert values[f"ENDING_{ending.name}"] == ending


def test_a_box_lives_until_it_is_destroyed(helper: RawHelper) -> None:
    box = helper.create()
    assert shell(box, "echo hello; echo $$") == "hello\n2\n"
    assert not select.select([box.pidfd], [], [], 0)[0]
    assert helper.tell(Op.DESTROY, box.number).op is Op.DONE
    assert select.select([box.pidfd], [], [], 0)[0]
    assert helper.tell(Op.DESTROY, box.number).error == errno.ENOENT


def test_creations_may_overlap(helper: RawHelper) -> None:
    sent = [helper.send_create() for _ in range(40)]
    boxes = [helper.created() for _ in sent]
    assert len({box.number for box in boxes}) == 40
    for box in boxes:
        box.ready()
    assert {shell(box, "echo $$") for box in boxes} == {"2\n"}


def test_commands_may_be_sent_before_the_init_is_there(helper: RawHelper) -> None:
    for _ in range(5):
        helper.send_create()
        box = helper.created()
        box.start("true")
        box.ready()
        assert box.exited()[:2] == (Ending.EXITED, 0)


def test_a_box_that_starts_can_be_destroyed(helper: RawHelper) -> None:
    for _ in range(5):
        helper.send_create()
        box = helper.created()
        assert helper.tell(Op.DESTROY, box.number).op is Op.DONE
        assert select.select([box.pidfd], [], [], 0)[0]
    helper.create()


def test_descriptors_do_not_pile_up(helper: RawHelper) -> None:
    helper.tell(Op.DESTROY, helper.create().number)
    before = helper.num_fds()
    for _ in range(20):
        box = helper.create()
        helper.refused(disk_bytes=0)
        helper.refused(layers=[99])
        helper.refused(layers=[box.number])
        helper.tell(Op.DESTROY, box.number)
    assert helper.num_fds() <= before + 3  # a child made ahead may be there or not


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"disk_bytes": 0}, errno.EINVAL),
        ({"num_inodes": 0}, errno.EINVAL),
        ({"layers": [5]}, errno.EINVAL),
        ({"layers": list(range(17))}, errno.EINVAL),
    ],
)
def test_a_box_that_cannot_be_is_refused(
    helper: RawHelper, options: dict[str, object], number: int
) -> None:
    assert helper.refused(**options) in (number, errno.ENOENT)
    helper.create()


@pytest.mark.parametrize("shm_bytes", [0, 1 << 20])
def test_every_box_has_the_room_that_it_was_made_with(helper: RawHelper, shm_bytes: int) -> None:
    """Also the one that was made ahead, for what the last box had."""
    free = "df -B1 --output=size / /dev/shm | tail -n +2"
    for disk_bytes in (4 << 20, 4 << 20, 16 << 20, 8 << 20, 8 << 20):
        box = helper.create(disk_bytes=disk_bytes, shm_bytes=shm_bytes)
        assert shell(box, free).split() == [str(disk_bytes), str(shm_bytes or disk_bytes)]
        helper.tell(Op.DESTROY, box.number)
        other = helper.create(shm_bytes=2 << 20, disk_bytes=1 << 20)
        assert shell(other, free).split() == [str(1 << 20), str(2 << 20)]
        helper.tell(Op.DESTROY, other.number)


def test_a_program_that_is_not_there_says_so_by_name(box: RawBox) -> None:
    exited = box.exec("no-such-program")
    assert (exited.ending, exited.code) == (Ending.NOT_STARTED, errno.ENOENT)
    exited = box.exec("/work")
    assert (exited.ending, exited.code) == (Ending.NOT_STARTED, errno.EACCES)
    exited = box.exec("true", cwd="/nowhere")
    assert (exited.ending, exited.code) == (Ending.NOT_STARTED, errno.ENOENT)


def test_the_program_is_looked_up_in_the_path_of_the_job(box: RawBox) -> None:
    box.put("bin/tool", b"#!/bin/sh\necho mine\n", mode=0o755)
    assert box.output("tool", env=["PATH=/nowhere:/work/bin"]) == "mine\n"
    assert box.exec("tool").code == errno.ENOENT


def test_status_and_signal_are_told_apart(box: RawBox) -> None:
    assert box.exec("sh", "-c", "exit 130")[:2] == (Ending.EXITED, 130)
    assert box.exec("sh", "-c", "kill -2 $$")[:2] == (Ending.SIGNALED, signal.SIGINT)


def test_a_command_gets_its_words_variables_and_streams(box: RawBox) -> None:
    out, err, given = memory_file(), memory_file(), memory_file(b"input")
    script = 'cat; echo "$0" "$1" "$V"; pwd; echo problem >&2'
    box.start("sh", "-c", script, "a b", "", fds=[given, out, err], cwd="/tmp", env=[PATH, "V=v=w"])
    assert box.exited().code == 0
    assert content(out) == b"inputa b  v=w\n/tmp\n"
    assert content(err) == b"problem\n"


def test_long_commands_travel_in_a_file(box: RawBox) -> None:
    words = ["x" * 1000] * 500
    printed = shell(box, 'echo "$#"; env | wc -c', in_file=True)
    assert printed.startswith("0\n")
    box.start("sh", "-c", 'test "$#" = 500', "sh", *words, in_file=True)
    assert box.exited()[:2] == (Ending.EXITED, 0)


def test_one_command_at_a_time(box: RawBox) -> None:
    box.start("sleep", "60")
    assert box.put("x", b"") == errno.EBUSY
    assert box.get("x") == errno.EBUSY
    box.start("true")
    busy = box.receive()
    assert busy is not None
    assert busy.error == errno.EBUSY
    box.send(Op.KILL)
    assert box.exited().ending is Ending.KILLED
    assert box.exec("true").code == 0


def test_a_kill_that_comes_too_late_does_nothing(box: RawBox) -> None:
    box.send(Op.KILL)
    assert shell(box, "echo alive") == "alive\n"


def test_nothing_outlives_its_command(box: RawBox) -> None:
    script = "sleep 1000 & (setsid sleep 1000 &) ; trap '' TERM HUP; sleep 1000 & exit 4"
    assert box.exec("sh", "-c", script).code == 4
    assert shell(box, COUNT) == "2\n"


def test_what_is_kept_lives_until_the_next_command_that_keeps_nothing(box: RawBox) -> None:
    box.exec("sh", "-c", "sleep 1000 &", flags=Flag.EXEC_KEEP)
    assert shell(box, COUNT, flags=Flag.EXEC_KEEP) == "3\n"
    assert shell(box, COUNT) == "3\n"
    assert shell(box, COUNT) == "2\n"


@pytest.mark.parametrize(
    "script",
    [
        "sleep 1000",
        "trap '' TERM INT HUP; while :; do :; done",
        "kill -STOP $$",
        "(setsid sleep 1000 &); sleep 1000",
        "f() { f | f & }; f; sleep 1000",
        "kill -STOP -1; kill -STOP $$",
    ],
)
def test_every_job_ends_with_its_time(box: RawBox, script: str) -> None:
    limits = [(6, 200, 200)]  # RLIMIT_NPROC, of this box's own users
    exited = box.exec("sh", "-c", script, wall_us=300_000, limits=limits)
    assert exited.ending is Ending.TIMEOUT or "f()" in script
    assert exited.wall_us >= 300_000 or "f()" in script
    assert shell(box, COUNT) == "2\n"


def test_usage_counts_all_processes(box: RawBox) -> None:
    burn = "x = 0\nwhile __import__('time').process_time() < 0.2: x += 1"
    script = f"""
import subprocess, sys
for _ in range(2): subprocess.run([sys.executable, "-c", {burn!r}])
"""
    exited = box.exec(PYTHON, "-I", "-S", "-c", script)
    assert exited.user_us + exited.system_us >= 400_000
    assert exited.max_rss_bytes > 4 << 20
    assert exited.wall_us > 0
