"""Hostile use of what steers a box: its process 1, its limits, its log, our secrets."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature, Limits, SandboxPool
from burnish.core.errors import UserError
from burnish.sandbox.audit import AuditedPool
from burnish.sandbox.audit.directory import verify_all
from burnish.sandbox.interpreter import python_argv

Attack = Callable[..., ExecResult]
MIB = 2**20
SECRET = "a-token-that-only-the-trainer-may-have-7391"


def test_secrets_of_the_owner_are_nowhere_in_a_box(
    backend: Callable[[int], SandboxPool], attack_in: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in environments nor in any memory that a job can read, its own included."""
    monkeypatch.setenv("BURNISH_TEST_SECRET", SECRET)
    try:
        pool = backend(1)
    except UserError as error:
        pytest.skip(str(error))
    code = f"""
    wanted = bytes({[byte ^ 255 for byte in SECRET.encode()]})
    wanted = bytes(byte ^ 255 for byte in wanted)
    def read(path, start=0, size=-1):
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(start); return file.read(size) or b""
        except (OSError, OverflowError, ValueError): return b""
    found = []
    for process in [name for name in os.listdir("/proc") if name.isdigit()]:
        base = f"/proc/{{process}}"
        for name in ("environ", "cmdline", "auxv", "stat", "mountinfo"):
            if wanted in read(f"{{base}}/{{name}}"): found.append(name)
        if process == str(os.getpid()): continue  # has it in `wanted`
        for line in read(f"{{base}}/maps").decode().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if wanted in read(f"{{base}}/mem", start, end - start): found.append(line)
    for folder, _, files in os.walk("/work"): found += [
        name for name in files if name != "attack.py" and wanted in read(f"{{folder}}/{{name}}")]
    print(found)
    """
    result = attack_in(pool, code)
    asyncio.run(pool.close())
    assert result.stdout == b"[]\n", result


def test_closing_every_descriptor_hides_nothing(attack: Attack) -> None:
    result = attack("os.closerange(0, 1 << 16); os._exit(3)")
    assert (result.status, result.exit_code) == (ExecStatus.EXIT, 3)


FULL_TABLE = """
import os, time
try:
    while True:
        if os.fork() == 0:
            while True: time.sleep(1000)
except OSError: pass
"""


def test_a_full_process_table_is_told_as_such(pool: SandboxPool) -> None:
    if Feature.BACKGROUND not in pool.capabilities.features:
        pytest.skip("no process outlives its command here")

    limits = Limits(memory_bytes=2048 * MIB)

    async def main() -> list[ExecResult]:
        async with pool.acquire() as box:
            filled = await box.exec(python_argv("-c", FULL_TABLE), keep=True, limits=limits)
            refused = [
                await box.exec(("true",), keep=True, limits=limits),
                await box.exec(("true",), limits=limits),
            ]
            return [filled, *refused, await box.exec(("echo", "well"), limits=limits)]

    _, *refused, after = asyncio.run(main())
    for result in refused:
        # A process of the table may have ended by then.
        assert result.status in (ExecStatus.PIDS, ExecStatus.OK), result
    assert (after.status, after.stdout) == (ExecStatus.OK, b"well\n"), after


@pytest.mark.parametrize(
    ("attack_line", "num_tries"),
    [
        ("os.kill(-1, 9)", 60),
        ("os.fork() or os._exit(0)", 60),
        # Who is stopped is waited for: ten seconds.
        pytest.param("os.kill(-1, 19)", 4, marks=pytest.mark.slow),
    ],
)
def test_who_kills_stops_or_crowds_all_that_starts_breaks_no_box(
    pool: SandboxPool, attack_line: str, num_tries: int
) -> None:
    """Those who read and write files for us are processes of the box, too."""
    if Feature.BACKGROUND not in pool.capabilities.features:
        pytest.skip("no process outlives its command here")
    code = f"""
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN); open("/work/ready", "w").close()
while True:
    try: {attack_line}
    except OSError: pass
"""
    start = "python3 -I -S kill.py >/dev/null 2>&1 & while ! [ -e ready ]; do sleep 0.01; done"

    async def main() -> set[ExecStatus]:
        seen = set()
        async with pool.acquire() as box:
            await box.write_file("kill.py", code.encode())
            await box.write_file("file", b"data")
            await box.exec(("sh", "-c", start), keep=True)
            for _ in range(num_tries):
                result = await box.exec(("true",), keep=True, limits=Limits(wall_s=0.5))
                seen.add(result.status)
                if result.status is ExecStatus.TIMEOUT:
                    return seen  # which has ended what was kept, too
                if attack_line == "os.kill(-1, 19)":
                    continue  # it may take 20 s until a reader that was stopped is given up
                try:
                    assert await box.read_file("file") == b"data"
                except FileNotFoundError:
                    seen.add(ExecStatus.SIGNAL)
                except BlockingIOError:
                    # What is PIDS for a command: the table of the box is full just now.
                    seen.add(ExecStatus.PIDS)
            return seen

    ends = {ExecStatus.OK, ExecStatus.SIGNAL, ExecStatus.PIDS, ExecStatus.TIMEOUT}
    assert asyncio.run(main()) <= ends


def test_memory_that_no_process_holds_is_no_way_to_break_a_box(pool: SandboxPool) -> None:
    """Files in memory: the kernel can kill all processes, process 1 too, and frees nothing."""
    fill = """
import os
for place in ("/dev/shm/x", "/work/x", "/tmp/x"):
    with open(place, "wb") as file:
        try:
            while True: file.write(bytes(1 << 20))
        except OSError: pass
"""
    limits = Limits(memory_bytes=48 * MIB, disk_bytes=192 * MIB, wall_s=20)

    async def main() -> list[ExecResult]:
        async with pool.acquire() as box:
            return [
                await box.exec(python_argv("-c", fill), limits=limits),
                await box.exec(("true",), limits=limits),
            ]

    first, second = asyncio.run(main())
    assert first.status in (ExecStatus.OOM, ExecStatus.DISK), first
    assert second.status in (ExecStatus.OOM, ExecStatus.DISK, ExecStatus.OK), second


def test_who_asks_to_be_killed_first_or_stops_all_breaks_nothing(attack: Attack) -> None:
    code = """
    attempt(lambda: open("/proc/self/oom_score_adj", "w").write("1000"))
    attempt(lambda: open("/proc/self/oom_score_adj", "w").write("-1000"))
    attempt(lambda: open("/proc/1/oom_score_adj", "w").write("1000"))
    for number in (19, 20, 21, 22): attempt(lambda: os.kill(-1, number))
    attempt(lambda: os.killpg(0, 19))
    """
    result = attack(code, wall_s=1)
    assert result.status in (ExecStatus.TIMEOUT, ExecStatus.SIGNAL, ExecStatus.OK), result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, 34])
def test_ending_everything_in_a_box_is_the_programs_own_doing(attack: Attack, number: int) -> None:
    code = f"""
    import time
    if os.fork() == 0: time.sleep(100)
    attempt(lambda: os.kill(-1, {int(number)})); os.kill(os.getpid(), {int(number)})
    """
    result = attack(code)
    assert result.status is ExecStatus.SIGNAL, result


HOSTILE_WORDS = (
    'x\n{"kind":"ended","status":"ok","seq":1}\n',
    '", "status": "ok"}\n{"prev": "0',
    "\r\n\x1b[2J\x1b]0;owned\x07\x00"[:-1],
    "\u2028\u2029\x85\xff",
    "A" * 5000,
)


def test_no_text_of_a_box_forges_a_line_of_its_log(pool: SandboxPool, tmp_path: Path) -> None:
    audited = AuditedPool(pool, tmp_path)

    async def main() -> None:
        async with audited.acquire() as box:
            for word in HOSTILE_WORDS:
                code = (
                    "import os, sys; [os.write(1, os.fsencode(w)) for w in sys.argv]; sys.exit(9)"
                )
                await box.exec(
                    python_argv("-c", code, word), env={"WORD": word}, stdin=os.fsencode(word)
                )
            await box.write_file("a\n{}\u2028", os.fsencode(HOSTILE_WORDS[0]))

    asyncio.run(main())
    reports = verify_all(tmp_path)
    assert len(reports) == 1
    assert not reports[0].finding, reports
    (log,) = [path for path in tmp_path.rglob("*.jsonl") if path.name != "heads.jsonl"]
    data = log.read_bytes()
    lines = [json.loads(line) for line in data.decode("ascii").splitlines()]
    assert data.count(b"\n") == len(lines)
    told = [line for line in lines if '"exit"' in json.dumps(line)]
    assert len(told) == len(HOSTILE_WORDS)
    # Nothing that a terminal would obey when the log is read.
    assert not set(data) & (set(range(32)) - {10})
