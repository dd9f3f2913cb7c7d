"""Reading a log back, and finding what was done to it. Of several, see `directory.py`.

What is found, and how:

    edited line       its hash is not the `prev` of the next line; the last line: only by a head
    removed lines     the numbers jump
    reordered lines   a number comes that is not next
    cut end           only by a head: a log without `destroy` may be of a living or killed box
    put-in log        only by heads: a log of two lines or more has sent one
    torn tail         bytes after the last newline: what a crash leaves, no sign of tampering
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.archive.compression import open_regular
from burnish.sandbox.audit.events import (
    GENESIS,
    MAX_LINE_BYTES,
    Created,
    Destroyed,
    Gap,
    Line,
    decode,
    digest,
)
from burnish.sandbox.audit.heads import Head


class Problem(StrEnum):
    """What is wrong with a log."""

    EDITED = "edited"
    """A line is not what was written."""
    REMOVED = "removed"
    """Lines are missing between others, or at the beginning."""
    REORDERED = "reordered"
    """A line is where another belongs: moved, repeated or put in."""
    CUT = "cut"
    """Lines are missing at the end."""
    MISSING = "missing"
    """The whole log is gone."""
    ORPHAN = "orphan"
    """A fork whose parent's log has no such line."""
    FOREIGN = "foreign"
    """Heads were kept, none of them of this log, which sends one with its first line."""
    COPY = "copy"
    """Another log has the same first line, which no two boxes share."""
    UNREADABLE = "unreadable"
    """What has the name of a log cannot be read as a file."""
    HEADS = "heads"
    """Lines of the file of heads are none: what they said of a log is lost."""


class Finding(Record, frozen=True, kw_only=True):
    """The first thing that is wrong with a log: what comes after proves nothing."""

    problem: Problem
    """What."""
    line: int
    """Where: from 1, as editors count. 0: the log as a whole."""
    detail: str
    """One line."""


class Report(Record, frozen=True, kw_only=True):
    """What verification found in one log."""

    path: str
    """The file."""
    ok: bool
    """Nothing is wrong, as far as can be seen."""
    finding: Finding | None
    """What is wrong."""
    box: str | None
    """Id of the box; None if no line could be read."""
    num_lines: int
    """Good lines before the finding."""
    head: str
    """Hash of the last good line."""
    ended: bool
    """The last line is `destroy`. If not: a living box, a killed owner, or an end that was cut."""
    torn_tail: bool
    """The file ends in a half-written line."""
    num_lost: int
    """Lines that could not be written (full disk), as `gap` lines say."""
    anchored: bool
    """A head confirms the last line: nothing can have been cut off."""


def read(path: Path) -> Iterator[Line]:
    """The lines of a log, without checking the chain; a torn tail is left out.

    Raises:
        UserError: the file is missing, or a line is not one of a log.
    """
    for number, data in enumerate(whole_lines(path), start=1):
        try:
            yield decode(data)
        except ValueError as error:
            raise UserError(
                f"{path}:{number}: not a line of an audit log: {error}.",
                fix="`burnish sandbox audit verify` says what happened to it",
            ) from error


def verify(path: Path, heads: list[Head] | None = None) -> Report:
    """Check one log, against its own chain and the heads that were kept of it.

    Args:
        path: the log.
        heads: those of this log; None if there is no file of heads.

    Raises:
        UserError: the file cannot be read.
    """
    check = _Check()
    for data in whole_lines(path):
        if not check.take(data):
            break
    finding = check.finding or _against_heads(check.hashes, heads)
    if finding is None and not check.hashes:
        finding = Finding(problem=Problem.CUT, line=0, detail="no line is left")
    num_good = len(check.hashes) if finding is None else max(0, finding.line - 1)
    last = len(check.hashes) - 1
    confirmed = any(head.number == last and head.hash == check.hashes[last] for head in heads or [])
    return Report(
        path=str(path),
        ok=finding is None,
        finding=finding,
        box=check.box,
        num_lines=num_good,
        head=check.hashes[num_good - 1] if num_good else GENESIS,
        ended=finding is None and check.ended,
        torn_tail=_has_torn_tail(path),
        num_lost=check.num_lost,
        anchored=finding is None and confirmed,
    )


class _Check:
    """The chain, line by line."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.finding: Finding | None = None
        self.box: str | None = None
        self.ended = False
        self.num_lost = 0

    def take(self, data: bytes) -> bool:
        """False if this line shows that something is wrong."""
        number = len(self.hashes)
        try:
            line = decode(data)
        except ValueError as error:
            return self._bad(Problem.EDITED, number, str(error))
        problem = self._sequence(line, number) or self._content(line, number)
        if problem is not None:
            self.finding = problem
            return False
        if number == 0:
            self.box = line.box
        self.ended = isinstance(line.event, Destroyed)
        if isinstance(line.event, Gap):
            self.num_lost += line.event.num_lost
        self.hashes.append(digest(data))
        return True

    def _bad(self, problem: Problem, number: int, detail: str) -> bool:
        self.finding = Finding(problem=problem, line=number + 1, detail=detail)
        return False

    def _sequence(self, line: Line, number: int) -> Finding | None:
        where = number + 1
        if line.number > number:
            detail = f"line number {line.number} comes where {number} belongs"
            return Finding(problem=Problem.REMOVED, line=where, detail=detail)
        if line.number < number:
            detail = f"line number {line.number} comes where {number} belongs"
            return Finding(problem=Problem.REORDERED, line=where, detail=detail)
        if self.ended:
            detail = "it follows the line that ended the log"
            return Finding(problem=Problem.REORDERED, line=where, detail=detail)
        if number and line.prev != self.hashes[-1]:
            # Either of the two was changed. If this one was, the next one would not fit either, but
            # its words are those of whoever changed it: name the first line that may be bad.
            detail = f"line {where} was written after another line {number}, or was changed itself"
            return Finding(problem=Problem.EDITED, line=number, detail=detail)
        return None

    def _content(self, line: Line, number: int) -> Finding | None:
        if (number == 0) != isinstance(line.event, Created):
            detail = "a log begins with `create` and has no other"
            return Finding(problem=Problem.EDITED, line=number + 1, detail=detail)
        if self.box is not None and line.box != self.box:
            detail = "it belongs to another box"
            return Finding(problem=Problem.REORDERED, line=number + 1, detail=detail)
        if isinstance(line.event, Created) and line.event.parent is None and line.prev != GENESIS:
            detail = "it continues another log but names no parent"
            return Finding(problem=Problem.EDITED, line=1, detail=detail)
        return None


def _against_heads(hashes: list[str], heads: list[Head] | None) -> Finding | None:
    """The earliest line that a head contradicts.

    A chain that fits together but not a head was written anew from some line after the last head
    that it fits.
    """
    if heads is None:
        return None
    if not heads and len(hashes) > 1:
        # With one line its owner may have been killed before the head was sent.
        detail = "no head was kept of it: renamed, copied or put here by somebody"
        return Finding(problem=Problem.FOREIGN, line=0, detail=detail)
    num_confirmed = 0
    for head in sorted(heads, key=lambda head: head.number):
        if head.number >= len(hashes):
            detail = f"a head was kept of line {head.number + 1}, the log ends at {len(hashes)}"
            return Finding(problem=Problem.CUT, line=len(hashes) + 1, detail=detail)
        if hashes[head.number] != head.hash:
            detail = f"written anew from here or later: line {head.number + 1} has another head"
            return Finding(problem=Problem.EDITED, line=num_confirmed + 1, detail=detail)
        num_confirmed = head.number + 1
    return None


def whole_lines(path: Path) -> Iterator[bytes]:
    """Lines that end in a newline. One that is longer than any of ours is cut, so it is not one.

    Raises:
        UserError: the file cannot be read.
    """
    with open_regular(path) as file:
        while data := file.readline(MAX_LINE_BYTES):
            if data.endswith(b"\n"):
                yield data[:-1]
            elif len(data) == MAX_LINE_BYTES:
                yield data
            else:
                return


def _has_torn_tail(path: Path) -> bool:
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
