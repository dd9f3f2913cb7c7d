"""Checking all logs of a directory, or one of them, with the heads that were kept.

Found here, on top of what `verify.py` finds in each log:

    removed log       heads were kept of it
    copied log        another one has the same first line
    fork, no parent   no log has the line that it was forked at
    torn heads        lines in the middle of the file of heads are none
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from burnish.core.errors import UserError
from burnish.sandbox.audit.events import GENESIS, Created, digest
from burnish.sandbox.audit.heads import HEADS, Head, Heads, KeptHeads
from burnish.sandbox.audit.verify import Finding, Problem, Report, read, verify, whole_lines


def verify_all(directory: Path, heads: Path | None = None) -> tuple[Report, ...]:
    """Check all logs below a directory, that none is missing, and that forks have parents.

    What has the name of a log and cannot be read is a finding, like all that is wrong with one.

    Args:
        directory: what `AuditedPool` was given.
        heads: the file of heads; by default the one in the directory, if it is there.

    Raises:
        UserError: there is no such directory, or no such file of heads.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory.", fix="give the directory of the logs")
    place = heads or directory / HEADS
    file = Heads(place, directory) if heads or place.exists() else None
    # Logs first: a box that starts meanwhile has no log here, and its head comes with its log.
    names = _names(directory)
    kept = file.read() if file else None
    known = kept.by_log if kept else {}
    names |= known.keys() & _names(directory)
    reports = []
    for name in sorted(names):
        report = _readable(directory / name, known.get(name, []) if file else None)
        if file and report.finding and report.finding.problem is Problem.FOREIGN:
            # Its second line comes after its first head, which a look from now on does not miss.
            report = _readable(directory / name, file.read().by_log.get(name, []))
        reports.append(report)
    reports += [_missing(directory / name) for name in sorted(known.keys() - names)]
    with_heads = {str(directory / name) for name in known}
    return (*_with_parents(_without_copies(reports, with_heads)), *_torn(place, kept))


def verify_one(path: Path, heads: Path) -> tuple[Report, ...]:
    """Check one log of a directory with its heads.

    Args:
        path: the log, below a directory with any name: what counts is its path in the heads.
        heads: the file of heads.

    Raises:
        UserError: one of the two cannot be read.
    """
    kept = Heads(heads, path.parent).read()
    parts = path.resolve().parts
    tails = ("/".join(parts[first:]) for first in range(1, len(parts)))
    name = next((tail for tail in tails if tail in kept.by_log), "")
    return (verify(path, kept.by_log.get(name, [])), *_torn(heads, kept))


def _names(directory: Path) -> set[str]:
    """Of all that is called like a log, relative to the directory."""
    paths = (path for path in directory.rglob("*.jsonl") if path.name != HEADS)
    return {path.relative_to(directory).as_posix() for path in paths}


def _readable(path: Path, heads: list[Head] | None) -> Report:
    try:
        return verify(path, heads)
    except UserError as error:
        return _bad(path, Problem.UNREADABLE, error.what)


def _missing(path: Path) -> Report:
    return _bad(path, Problem.MISSING, "heads were kept, the log is gone")


def _torn(path: Path, kept: KeptHeads | None) -> Iterator[Report]:
    if kept is not None and kept.num_torn:
        detail = f"lines that are no heads, from here on: {kept.num_torn}"
        yield _bad(path, Problem.HEADS, detail, line=kept.first_torn)


def _bad(path: Path, problem: Problem, detail: str, line: int = 0) -> Report:
    """Of what is no log."""
    return Report(
        path=str(path),
        ok=False,
        finding=Finding(problem=problem, line=line, detail=detail),
        box=None,
        num_lines=0,
        head=GENESIS,
        ended=False,
        torn_tail=False,
        num_lost=0,
        anchored=False,
    )


def _without_copies(reports: list[Report], with_heads: set[str]) -> list[Report]:
    """Mark logs that begin with the same line, but for one that alone has heads."""
    twins: dict[str, list[str]] = {}
    for report in reports:
        if report.num_lines:
            first = digest(next(whole_lines(Path(report.path))))
            twins.setdefault(first, []).append(report.path)
    others: dict[str, str] = {}
    for paths in twins.values():
        genuine = [path for path in paths if path in with_heads]
        for path in paths if len(paths) > 1 else ():
            if genuine != [path]:
                others[path] = next(twin for twin in paths if twin != path)
    return [
        _replaced(report, Problem.COPY, 1, f"{others[report.path]} begins with the same line")
        if report.ok and report.path in others
        else report
        for report in reports
    ]


class _Parent(NamedTuple):
    box: str
    hash: str


def _with_parents(reports: list[Report]) -> Iterator[Report]:
    """Mark forks whose parent has no line with the hash that they begin with."""
    wanted: dict[str, _Parent] = {}
    known: set[_Parent] = set()
    for report in reports:
        if report.num_lines == 0:
            continue
        first = next(read(Path(report.path)))
        if isinstance(first.event, Created) and first.event.parent is not None:
            wanted[report.path] = _Parent(first.event.parent, first.prev)
    parents = {parent.box for parent in wanted.values()}
    for report in reports:
        if report.box in parents:
            lines = list(whole_lines(Path(report.path)))[: report.num_lines]
            known.update(_Parent(report.box, digest(data)) for data in lines)
    for report in reports:
        parent = wanted.get(report.path)
        if report.ok and parent is not None and parent not in known:
            detail = f"no log of box {parent.box} has the line that it was forked at"
            yield _replaced(report, Problem.ORPHAN, 1, detail)
        else:
            yield report


def _replaced(report: Report, problem: Problem, line: int, detail: str) -> Report:
    finding = Finding(problem=problem, line=line, detail=detail)
    return msgspec.structs.replace(report, ok=False, finding=finding)
