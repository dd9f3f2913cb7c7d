import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.boxes import Policy
from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.sandbox.audit import Report, verify, verify_all, verify_one
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
from burnish.sandbox.audit.heads import Head, Heads, KeptHeads
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
    assert problems(verify_all(path.parent, heads)) == {"log.jsonl": Problem.FOREIGN}


def problems(reports: tuple[Report, ...]) -> dict[str, Problem]:
    return {Path(r.path).name: r.finding.problem for r in reports if r.finding is not None}


def test_torn_heads_are_counted_but_for_the_last_and_other_versions_refused(
    tmp_path: Path,
) -> None:
    path, heads = anchored_log(tmp_path)
    with open(heads, "ab") as file:
        file.write(b'{"version":1,"lo')
    assert problems(verify_all(path.parent, heads)) == {}
    with open(heads, "ab") as file:
        file.write(b"\n\xff\xfe\n")
    for reports in (verify_all(path.parent, heads), verify_one(path, heads)):
        assert problems(reports) == {heads.name: Problem.HEADS}
        finding = reports[-1].finding
        assert finding is not None
        assert (finding.line, finding.detail[-2:]) == (3, " 2")
    with open(heads, "ab") as file:
        head = Head(version=7, log="a", box="b", number=0, hash="h")
        file.write(msgspec.json.encode(head) + b"\n")
    with pytest.raises(UserError, match="version 7, not 1"):
        verify_all(path.parent, heads)


def test_the_head_after_a_torn_one_in_the_same_line_counts(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    heads.write_bytes(b'{"version":1,"lo' + heads.read_bytes())
    (report, torn) = verify_all(path.parent, heads)
    assert report.ok
    assert report.anchored
    assert torn.finding is not None
    assert (torn.finding.problem, torn.finding.line) == (Problem.HEADS, 1)


def test_a_removed_log_whose_heads_were_torn_does_not_go_unseen(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    gone = path.with_name("gone.jsonl")
    write_log(gone, "gone", Heads(heads, path.parent))
    gone.unlink()
    kept, torn = heads.read_bytes().splitlines()[:2], heads.read_bytes().splitlines()[2:]
    write_log(path.with_name("last.jsonl"), "last", Heads(heads, path.parent))
    last = heads.read_bytes().splitlines()[4:]
    heads.write_bytes(b"\n".join([*kept, *(line[:-9] for line in torn), *last]) + b"\n")
    assert problems(verify_all(path.parent, heads)) == {heads.name: Problem.HEADS}


@pytest.mark.parametrize("name", ["other.jsonl", "log.2.jsonl", "below/log.jsonl"])
def test_a_log_under_another_name_has_no_head(tmp_path: Path, name: str) -> None:
    path, heads = anchored_log(tmp_path)
    copy = path.parent / name
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(path.read_bytes())
    bad = [report for report in verify_all(path.parent, heads) if not report.ok]
    assert [report.path for report in bad] == [str(copy)]
    assert bad[0].finding is not None
    assert bad[0].finding.problem is Problem.FOREIGN
    if copy.name != path.name:
        assert problems(verify_one(copy, heads)) == {copy.name: Problem.FOREIGN}
    assert problems(verify_one(path, heads)) == {}


def test_two_logs_that_begin_alike_are_copies_but_for_the_one_with_heads(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    copy = path.with_name("copy.jsonl")
    copy.write_bytes(path.read_bytes())
    both = {path.name: Problem.COPY, copy.name: Problem.COPY}
    assert problems(verify_all(path.parent)) == both
    copy.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert problems(verify_all(path.parent, heads)) == {copy.name: Problem.COPY}
    lines = copy.read_bytes().splitlines()
    Heads(heads, path.parent).append(copy, "b", 0, digest(lines[0]))
    assert problems(verify_all(path.parent, heads)) == both


def test_a_box_that_has_just_begun_needs_no_head_yet(tmp_path: Path) -> None:
    path, heads = anchored_log(tmp_path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    other = Heads(heads, path.parent)
    heads.write_bytes(b"")
    other.append(path, "b", 0, digest(path.read_bytes()[:-1]))
    write_log(path.with_name("new.jsonl"), "new")
    new = path.with_name("new.jsonl")
    new.write_bytes(new.read_bytes().splitlines(keepends=True)[0])
    assert problems(verify_all(path.parent, heads)) == {}


def test_a_box_that_begins_while_logs_are_checked_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, heads = anchored_log(tmp_path)
    new = path.with_name("new.jsonl")
    new.touch()
    genuine, calls = Heads.read, []

    def read_and_go_on(self: Heads) -> KeptHeads:
        found = genuine(self)
        if not calls:
            write_log(new, "new", Heads(heads, path.parent), end=False)
        calls.append(found)
        return found

    monkeypatch.setattr(Heads, "read", read_and_go_on)
    assert problems(verify_all(path.parent, heads)) == {}
    assert [len(found.by_log) for found in calls] == [1, 2]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def dangle(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_pipe, dangle, Path.mkdir])
def test_what_is_only_called_like_a_log_is_a_finding(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path, heads = anchored_log(tmp_path)
    make(path.with_name("a.jsonl"))
    for kept in (None, heads):
        reports = verify_all(path.parent, kept)
        assert problems(reports) == {"a.jsonl": Problem.UNREADABLE}
        assert [report.ok for report in reports] == [False, True]
    with pytest.raises(UserError, match=r"a\.jsonl"):
        verify(path.with_name("a.jsonl"))


def test_a_pipe_is_no_file_of_heads(tmp_path: Path) -> None:
    path, _ = anchored_log(tmp_path)
    os.mkfifo(path.parent / "heads.jsonl")
    with pytest.raises(UserError, match="not a regular file"):
        verify_all(path.parent)


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
