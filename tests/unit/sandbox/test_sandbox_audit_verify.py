from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.boxes import Policy
from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.sandbox.audit import verify, verify_all
from burnish.sandbox.audit.events import (
    GENESIS,
    AnyEvent,
    Created,
    Destroyed,
    Forked,
    Line,
    Put,
    decode,
    digest,
    encode,
)
from burnish.sandbox.audit.heads import Head, Heads
from burnish.sandbox.audit.log import BoxLog
from burnish.sandbox.audit.verify import Problem

NUM_LINES = 6


def created(parent: str | None = None) -> Created:
    return Created(
        backend="fake",
        isolation="none",
        kernel="6",
        image="i",
        image_digest="d",
        policy=Policy(),
        policy_digest="p",
        parent=parent,
    )


def write_log(path: Path, box: str = "b", heads: Heads | None = None, end: bool = True) -> BoxLog:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    on_head = heads.append if heads else None
    log = BoxLog(path, box, GENESIS, ManualClock(), on_head=on_head)
    log.append(created())
    for index in range(NUM_LINES - 2):
        log.append(Put(path=f"f{index}", num_bytes=1, digest=digest(b"x")))
    if end:
        log.append(Destroyed(), last=True)
    return log


def rechained(lines: list[bytes]) -> list[bytes]:
    """The same events with hashes and numbers that fit: what a careful forger writes."""
    prev, made = GENESIS, []
    for number, data in enumerate(lines):
        line = msgspec.structs.replace(decode(data), number=number, prev=prev)
        made.append(encode(line))
        prev = digest(made[-1])
    return made


def edited(lines: list[bytes], index: int) -> list[bytes]:
    line = decode(lines[index])
    changed = encode(msgspec.structs.replace(line, time_s=line.time_s + 1))
    return [*lines[:index], changed, *lines[index + 1 :]]


def test_an_untouched_log_is_good_and_ended(tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl")
    report = verify(tmp_path / "log.jsonl")
    assert report.ok
    assert report.ended
    assert report.box == "b"
    assert report.num_lines == NUM_LINES
    assert not report.anchored


@pytest.mark.parametrize("index", range(NUM_LINES - 1))
def test_an_edited_line_is_found_and_named(tmp_path: Path, index: int) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(edited(lines, index)) + b"\n")
    finding = verify(path).finding
    assert finding is not None
    assert (finding.problem, finding.line) == (Problem.EDITED, index + 1)


@settings(deadline=None)
@given(data=st.data())
def test_any_changed_byte_but_in_the_last_line_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("audit") / "log.jsonl"
    write_log(path)
    content = bytearray(path.read_bytes())
    last = content[:-1].rindex(b"\n")
    position = data.draw(st.integers(0, last))
    content[position] = data.draw(st.integers(0, 255).filter(lambda b: b != content[position]))
    path.write_bytes(content)
    report = verify(path)
    assert not report.ok
    assert report.finding is not None
    line = content[:position].count(b"\n") + 1
    assert line - 1 <= report.finding.line <= line + 1


@settings(deadline=None)
@given(data=st.data())
def test_any_moved_repeated_or_removed_line_but_a_cut_end_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("audit") / "log.jsonl"
    write_log(path)
    lines = path.read_bytes().splitlines()
    picked = data.draw(st.lists(st.sampled_from(range(NUM_LINES)), max_size=NUM_LINES + 2))
    path.write_bytes(b"".join(lines[index] + b"\n" for index in picked))
    report = verify(path)
    whole = picked == list(range(len(picked))) and bool(picked)
    assert report.ok == whole
    if not whole and picked:
        first_bad = next(
            (place for place, index in enumerate(picked) if place != index), len(picked)
        )
        assert report.finding is not None
        assert report.finding.line == first_bad + 1
        jumps = picked[first_bad] > first_bad
        assert report.finding.problem == (Problem.REMOVED if jumps else Problem.REORDERED)


def test_a_line_of_another_box_is_found_even_if_the_chain_fits(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path)
    lines = path.read_bytes().splitlines()
    lines[3] = encode(msgspec.structs.replace(decode(lines[3]), box="other"))
    path.write_bytes(b"\n".join(rechained(lines)) + b"\n")
    finding = verify(path).finding
    assert finding is not None
    assert (finding.problem, finding.line) == (Problem.REORDERED, 4)


def test_a_log_that_does_not_begin_with_create_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path)
    path.write_bytes(b"\n".join(rechained(path.read_bytes().splitlines()[1:])) + b"\n")
    finding = verify(path).finding
    assert finding is not None
    assert (finding.problem, finding.line) == (Problem.EDITED, 1)


@pytest.mark.parametrize("tail", [b'{"box"', b"\0" * 100, b"\xff", b"x" * 5000])
def test_a_torn_tail_is_no_sign_of_tampering(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, end=False)
    path.write_bytes(path.read_bytes() + tail)
    report = verify(path)
    assert report.ok
    assert report.torn_tail
    assert not report.ended
    assert report.num_lines == NUM_LINES - 1


def test_lines_after_the_end_are_found(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(rechained([*lines, lines[2]])) + b"\n")
    finding = verify(path).finding
    assert finding is not None
    assert (finding.problem, finding.line) == (Problem.REORDERED, NUM_LINES + 1)


@pytest.mark.parametrize("content", [b"", b"\n", b"\n" * 1000, b"x" * (3 << 20) + b"\n"])
def test_what_is_no_log_is_bad(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    assert not verify(path).ok


def test_a_missing_log_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        verify(tmp_path / "log.jsonl")
    with pytest.raises(UserError, match="no such directory"):
        verify_all(tmp_path / "absent")
    with pytest.raises(UserError, match="nothing shows whether"):
        verify_all(tmp_path, tmp_path / "absent")


def anchored_log(tmp_path: Path) -> tuple[Path, Path]:
    heads = Heads(tmp_path / "elsewhere.jsonl", tmp_path / "logs")
    path = tmp_path / "logs" / "log.jsonl"
    write_log(path, heads=heads)
    return path, heads.path


def test_heads_confirm_an_untouched_log(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    (report,) = verify_all(path.parent, heads)
    assert report.ok
    assert report.anchored
    assert report.ended


def last_edited(lines: list[bytes]) -> list[bytes]:
    return edited(lines, NUM_LINES - 1)


def all_rewritten(lines: list[bytes]) -> list[bytes]:
    return rechained(edited(lines, 2))


def removed_and_rewritten(lines: list[bytes]) -> list[bytes]:
    return rechained([*lines[:3], *lines[4:]])


@pytest.mark.parametrize(
    ("forge", "problem", "line"),
    [
        (lambda lines: lines[:-1], Problem.CUT, NUM_LINES),
        (lambda lines: lines[:1], Problem.CUT, 2),
        (last_edited, Problem.EDITED, 2),
        (all_rewritten, Problem.EDITED, 2),
        (removed_and_rewritten, Problem.CUT, NUM_LINES),
    ],
)
def test_heads_show_what_the_chain_alone_cannot(
    tmp_path: Path, forge: Callable[[list[bytes]], list[bytes]], problem: Problem, line: int
) -> None:
    path, heads = anchored_log(tmp_path)
    path.write_bytes(b"\n".join(forge(path.read_bytes().splitlines())) + b"\n")
    assert verify(path).ok
    (report,) = verify_all(path.parent, heads)
    assert report.finding is not None
    assert (report.finding.problem, report.finding.line) == (problem, line)
    assert not report.anchored


def test_heads_show_that_a_log_is_gone(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    path.unlink()
    (report,) = verify_all(path.parent, heads)
    assert report.finding is not None
    assert report.finding.problem is Problem.MISSING


@pytest.mark.parametrize("garbage", [b"hello\n", b"\0\xff\n{}\n[1]\n"])
def test_a_file_without_a_head_confirms_nothing_and_is_refused(
    tmp_path: Path, garbage: bytes
) -> None:
    path, heads = anchored_log(tmp_path)
    heads.write_bytes(garbage)
    with pytest.raises(UserError, match="is no file of heads"):
        verify_all(path.parent, heads)
    heads.write_bytes(b'{"version": 1, "lo')
    assert verify_all(path.parent, heads)[0].ok


def test_torn_heads_are_left_out_and_other_versions_refused(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    with open(heads, "ab") as file:
        file.write(b'{"version":1,"lo\n\xff\xfe\n')
    assert verify_all(path.parent, heads)[0].ok
    with open(heads, "ab") as file:
        head = Head(version=7, log="a", box="b", number=0, hash="h")
        file.write(msgspec.json.encode(head) + b"\n")
    with pytest.raises(UserError, match="version 7, not 1"):
        verify_all(path.parent, heads)


def fork_of(parent: Path, event: AnyEvent, path: Path) -> None:
    prev = digest(parent.read_bytes().splitlines()[-1])
    assert isinstance(event, Created)
    line = Line(version=1, number=0, time_s=0.0, box="child", prev=prev, event=event)
    path.write_bytes(encode(line) + b"\n")


def test_a_fork_needs_the_line_of_its_parent(tmp_path: Path) -> None:
    parent = tmp_path / "parent.jsonl"
    log = write_log(parent, end=False)
    log.append(Forked(count=1, snapshot=None))
    fork_of(parent, created(parent="b"), tmp_path / "child.jsonl")
    assert all(report.ok for report in verify_all(tmp_path))
    lines = parent.read_bytes().splitlines()
    parent.write_bytes(b"\n".join(lines[:-1]) + b"\n")
    bad = [report for report in verify_all(tmp_path) if not report.ok]
    assert [Path(report.path).name for report in bad] == ["child.jsonl"]
    assert bad[0].finding is not None
    assert bad[0].finding.problem is Problem.ORPHAN


def test_a_chain_that_continues_another_must_name_its_parent(tmp_path: Path) -> None:
    parent = tmp_path / "parent.jsonl"
    write_log(parent)
    fork_of(parent, created(), tmp_path / "child.jsonl")
    assert not verify(tmp_path / "child.jsonl").ok
