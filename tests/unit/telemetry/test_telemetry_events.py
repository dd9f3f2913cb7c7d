import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.telemetry.events import EventKind, EventWriter, read_events
from burnish.telemetry.jsonl import JsonLinesFile, read_lines
from burnish.telemetry.logs import logging_to


def test_events_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "events.jsonl", ManualClock(5.0)
    writer = EventWriter(path, clock)
    writer.emit(EventKind.RUN_STARTED, 0, name="x\ny")
    clock.advance(1.0)
    writer.emit(EventKind.STEP_FINISHED, 1)
    found = [(e.t, e.kind, e.step, e.data) for e in read_events(path)]
    assert found == [(5.0, "run_started", 0, {"name": "x\ny"}), (6.0, "step_finished", 1, {})]
    writer.close()
    writer.close()


def test_text_that_is_not_unicode_is_escaped_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, ManualClock())
    writer.emit(EventKind.FAILURE, 0, text="a\udcffb", nested=[{"\ud800": 1}])
    with logging_to(tmp_path / "main.jsonl"):
        logging.getLogger("burnish").info("a\udcffb")
    assert next(read_events(path)).data == {"text": "a\\udcffb", "nested": [{"\\ud800": 1}]}
    assert b"udcff" in next(read_lines(tmp_path / "main.jsonl"))


def test_a_run_that_has_no_events_yet_has_none(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "events.jsonl")) == []


@settings(deadline=None)
@given(lines=st.lists(st.binary(max_size=9).map(bytes.hex), max_size=5), cut=st.integers(0, 60))
def test_a_file_cut_anywhere_keeps_its_complete_lines_and_takes_new_ones(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    with JsonLinesFile(path) as file:
        for line in lines:
            file.append(line.encode())
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    complete = whole[:cut].split(b"\n")[:-1]
    assert list(read_lines(path)) == complete
    with JsonLinesFile(path) as file:
        file.append(b"next")
    assert list(read_lines(path)) == [*complete, b"next"]


def test_a_torn_line_longer_than_the_tail_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n" + b"x" * 300_000)
    JsonLinesFile(path).close()
    assert path.read_bytes() == b"1\n"


WRITER = """
import sys
from pathlib import Path
from burnish.core.clock import ManualClock
from burnish.telemetry.events import EventKind, EventWriter
writer = EventWriter(Path(sys.argv[1]), ManualClock())
n = int(sys.argv[2])
while True:
    writer.emit(EventKind.STEP_FINISHED, n, text="x" * 3000)
    sys.stdout.write(f"{n}\\n"); sys.stdout.flush()
    n += 1
"""


def test_a_killed_writer_loses_no_acknowledged_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    expected = 0
    for round_ in range(4):
        command = [sys.executable, "-c", WRITER, str(path), str(expected)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = [int(process.stdout.readline()) for _ in range(50 + round_)]
            os.kill(process.pid, signal.SIGKILL)
            acknowledged += [int(line) for line in process.stdout]
        steps = [event.step for event in read_events(path)]
        assert steps == list(range(len(steps)))
        assert len(steps) > acknowledged[-1]
        expected = len(steps)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"format_version": 2, "kind": "new"}', "event format 2, this program reads 1"),
        ('{"kind": "run_started"}', "not an event"),
        ("garbage", "not an event"),
        ('{"format_version": 1, "t": 1, "kind": "nonsense", "step": 1}', "not an event"),
    ],
)
def test_unknown_versions_and_damage_are_refused_with_the_line(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLinesFile(path) as file:
        file.append(line.encode())
    with pytest.raises(UserError, match=f"events.jsonl:1: {reason}"):
        list(read_events(path))


def test_logging_goes_to_the_file_inside_the_context_only(tmp_path: Path) -> None:
    logger = logging.getLogger("burnish.some.part")
    root = logging.getLogger("burnish")
    before = (list(root.handlers), root.level, root.propagate)
    with logging_to(tmp_path / "main.jsonl") as handler:
        logger.info("hello %s", "world")
        logger.debug("too fine")
        try:
            raise RuntimeError("oops")
        except RuntimeError:
            logger.exception("failed")
        assert handler.num_lost == 0
    logger.info("outside")
    assert (list(root.handlers), root.level, root.propagate) == before
    lines = [json.loads(line) for line in read_lines(tmp_path / "main.jsonl")]
    assert [line["message"] for line in lines] == ["hello world", "failed"]
    assert "RuntimeError: oops" in lines[1]["traceback"]
