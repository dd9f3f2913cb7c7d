import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.boxes import ExecStatus, Limits, Policy, Usage
from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.sandbox.audit import read, verify
from burnish.sandbox.audit.events import (
    GENESIS,
    MAX_LINE_BYTES,
    AnyEvent,
    Created,
    Destroyed,
    Ended,
    Line,
    Put,
    Started,
    cut_argv,
    cut_text,
    decode,
    digest,
    digest_of_env,
    digest_of_record,
    digest_of_text,
    encode,
)
from burnish.sandbox.audit.log import AuditFailure, BoxLog

POLICY = Policy()
CREATED = Created(
    backend="fake",
    isolation="none",
    kernel="6",
    image=None,
    image_digest=None,
    policy=POLICY,
    policy_digest=digest_of_record(POLICY),
)
# Lone surrogates too: that is what names which are not UTF-8 look like in Python.
HOSTILE = st.text(st.characters(exclude_categories=()), max_size=60)


def line(event: AnyEvent, number: int = 0, prev: str = GENESIS, box: str = "b") -> Line:
    return Line(version=1, number=number, time_s=1.5, box=box, prev=prev, event=event)


def new_log(path: Path, box: str = "b") -> BoxLog:
    path.touch()
    return BoxLog(path, box, GENESIS, ManualClock())


def put(name: str) -> Put:
    return Put(path=name, num_bytes=1, digest=digest(b"x"))


@settings(deadline=None)
@given(
    argv=st.lists(HOSTILE, max_size=5),
    cwd=HOSTILE,
    box=HOSTILE,
    limits=st.builds(Limits, wall_s=st.floats(0, 1e9), num_pids=st.integers(0, 2**40)),
)
def test_nothing_that_a_job_says_can_break_a_line(
    argv: list[str], cwd: str, box: str, limits: Limits
) -> None:
    started = Started(
        argv=tuple(argv),
        argv_digest=digest_of_text(tuple(argv)),
        env_digest=digest_of_env({}),
        cwd=cwd,
        stdin_digest=digest(b""),
        keep=False,
        limits=limits,
        layers=(),
    )
    data = encode(line(started, box=box))
    assert data.isascii()
    assert not set(data) & set(range(32))
    assert encode(decode(data)) == data
    assert decode(data).box == box


@settings(deadline=None)
@given(
    message=HOSTILE,
    status=st.sampled_from(ExecStatus),
    wall_s=st.floats(allow_nan=False),
    code=st.one_of(st.none(), st.integers(-(2**40), 2**40)),
)
def test_results_come_back_as_written(
    message: str, status: ExecStatus, wall_s: float, code: int | None
) -> None:
    ended = Ended(
        of=1,
        status=status,
        exit_code=code,
        signal=None,
        truncated=True,
        usage=Usage(wall_s=wall_s),
        limit_hit=None,
        stdout_digest=digest(b""),
        stderr_digest=digest(b""),
        message=message,
        layers=("1",),
    )
    assert decode(encode(line(ended))) == line(ended)


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_with_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is not"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"version":' + b"9" * 5000 + b"}",
        '{"\xe9":1}'.encode(),
        b"null",
        b'{"version":true}',
    ],
)
def test_hostile_json_is_refused_with_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not|its format"):
        decode(data)


def test_the_same_content_written_otherwise_is_refused() -> None:
    data = encode(line(CREATED))
    for other in (
        json.dumps(json.loads(data)).encode(),
        data.replace(b'"b"', b'"\\u0062"'),
        data.replace(b"1.5", b"1.50"),
    ):
        assert other != data
        with pytest.raises(ValueError, match="it is not written as"):
            decode(other)


def test_a_version_that_is_not_known_is_refused() -> None:
    data = encode(line(CREATED)).replace(b'"version":1', b'"version":2')
    with pytest.raises(ValueError, match="version 2, this program knows 1"):
        decode(data)


@settings(deadline=None)
@given(argv=st.lists(st.text(max_size=3000), max_size=30).map(tuple))
def test_cut_commands_keep_short_ones_and_bound_long_ones(argv: tuple[str, ...]) -> None:
    kept = cut_argv(argv)
    assert sum(map(len, kept)) <= 16 * 2**10 + 60
    if sum(map(len, argv)) <= 16 * 2**10:
        assert kept == argv
    else:
        assert kept[-1] == f"[{len(argv)} arguments in all]"


def test_the_longest_line_is_below_the_bound() -> None:
    worst = "\U0001f600"
    started = Started(
        argv=cut_argv((worst * 100_000, *[worst] * 100_000)),
        argv_digest=digest(b""),
        env_digest=digest(b""),
        cwd=cut_text(worst * 100_000),
        stdin_digest=digest(b""),
        keep=False,
        limits=Limits(),
        layers=("x" * 64,) * 20,
    )
    assert len(encode(line(started))) < MAX_LINE_BYTES // 2


def test_digests_tell_apart_what_joins_alike() -> None:
    assert digest_of_text(("a", "b")) != digest_of_text(("ab",))
    assert digest_of_env({"A": "1", "B": "2"}) == digest_of_env({"B": "2", "A": "1"})
    assert digest_of_env({"A": "1"}) != digest_of_env({"A": "2"})


def test_lines_are_chained_and_numbered(tmp_path: Path) -> None:
    log = new_log(tmp_path / "log.jsonl")
    places = [log.append(event) for event in (CREATED, put("a"), put("b"), Destroyed())]
    lines = list(read(log.path))
    assert [found.number for found in lines] == [place.number for place in places] == [0, 1, 2, 3]
    assert [found.prev for found in lines] == [GENESIS, *[place.hash for place in places[:-1]]]
    assert verify(log.path).head == places[-1].hash


def test_threads_that_write_at_once_leave_one_chain(tmp_path: Path) -> None:
    log = new_log(tmp_path / "log.jsonl")
    log.append(CREATED)
    threads = [
        threading.Thread(target=lambda n=n: [log.append(put(f"{n}-{i}")) for i in range(50)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = verify(log.path)
    assert report.ok
    assert report.num_lines == 401


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: os.truncate(path, 10),
        lambda path: (path.unlink(), path.symlink_to("/dev/null")),
    ],
)
def test_a_log_that_somebody_else_changed_takes_no_more_lines(tmp_path: Path, harm: object) -> None:
    log = new_log(tmp_path / "log.jsonl")
    log.append(CREATED)
    harm(log.path)  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(AuditFailure, match="cannot be written"):
            log.append(put("a"))


def test_read_names_the_line_that_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode(line(CREATED)) + b"\nrubbish\n")
    with pytest.raises(UserError, match=r"log\.jsonl:2: not a line of an audit log"):
        list(read(path))
    with pytest.raises(UserError, match="No such file"):
        list(read(tmp_path / "absent"))


def in_private_tmpfs(tmp_path: Path, code: str) -> str:
    """Run Python code as `CODE(folder)` with a tmpfs of 64 KiB that only that process sees."""
    script = f'mount -t tmpfs -o size=64k none "{tmp_path}" && exec "{sys.executable}" -c "$CODE"'
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    done = subprocess.run(
        ["unshare", flags, "sh", "-c", script],
        env={**os.environ, "CODE": textwrap.dedent(code), "FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this host lets nobody make a mount namespace: allow user namespaces")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_told_and_afterwards_a_gap_says_how_much_is_missing(tmp_path: Path) -> None:
    out = in_private_tmpfs(
        tmp_path,
        """
        import os
        from pathlib import Path
        from burnish.core.boxes import Policy
        from burnish.core.clock import ManualClock
        from burnish.sandbox.audit import read, verify
        from burnish.sandbox.audit.events import GENESIS, Created, Put
        from burnish.sandbox.audit.log import AuditFailure, BoxLog

        folder = Path(os.environ["FOLDER"])
        path = folder / "log.jsonl"
        path.touch()
        log = BoxLog(path, "b", GENESIS, ManualClock())
        log.append(Created(backend="f", isolation="none", kernel="6", image=None,
                           image_digest=None, policy=Policy(), policy_digest="0"))
        ballast = folder / "ballast"
        try:
            with open(ballast, "wb") as file:
                while True:
                    file.write(bytes(1024))
                    file.flush()
        except OSError:
            pass
        def put(name):
            log.append(Put(path=name, num_bytes=1, digest="0" * 3000))
        lost = 0
        for index in range(30):
            try:
                put(f"{index}")
            except AuditFailure as error:
                assert "No space left" in str(error), error
                lost += 1
        assert lost > 5
        report = verify(path)
        assert report.ok and not report.torn_tail, report
        ballast.unlink()
        put("after")
        report = verify(path)
        assert report.ok and report.num_lost == lost, report
        print([line.event for line in read(path)][-2].error)
        """,
    )
    assert "No space left" in out


def test_a_killed_writer_leaves_whole_lines_and_at_most_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = """
    import sys
    from pathlib import Path
    from burnish.core.boxes import Policy
    from burnish.core.clock import ManualClock
    from burnish.sandbox.audit.events import GENESIS, Created, Put
    from burnish.sandbox.audit.log import BoxLog
    path = Path(sys.argv[1])
    path.touch()
    log = BoxLog(path, "b", GENESIS, ManualClock())
    log.append(Created(backend="f", isolation="none", kernel="6", image=None,
                       image_digest=None, policy=Policy(), policy_digest="0"))
    print("ready", flush=True)
    while True:
        log.append(Put(path="x" * 3000, num_bytes=1, digest="0"))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        while path.stat().st_size < 200_000:
            pass
        writer.kill()
    report = verify(path)
    assert report.ok
    assert not report.ended
    assert report.num_lines > 50
