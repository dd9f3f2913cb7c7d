"""How `burnish top` spends the lines of a terminal: one for each domain, as far as they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burnish.cli.top_rows import DOMAIN_HEADERS, JOB_HEADERS, OK, domain_cells

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from burnish.observe.standing import Standing

# Below it the narrow columns of figures alone would fill a line.
_WIDE = 120
_CELL_WIDTH = 24
# Part of the screen that jobs may take.
_JOBS_SHARE = 4
_FEWEST = 1


class Fit:
    """A terminal of so many columns and lines."""

    def __init__(self, console: Console, *, all_rows: bool = False) -> None:
        """As it is now.

        Args:
            console: the terminal.
            all_rows: lines scroll by, so that all of them may be written.
        """
        self._console = console
        self._is_wide = console.width >= _WIDE
        self._num_lines = None if all_rows else console.height

    def lay_out(
        self, head: Sequence[Text], standing: Standing, jobs: Sequence[tuple[str, ...]]
    ) -> list[RenderableType]:
        """Head, domains and jobs, with what is left out counted."""
        from rich.text import Text

        lines = self._num_lines
        most = len(jobs) if lines is None else max(_FEWEST, lines // _JOBS_SHARE)
        tail: list[RenderableType] = []
        if jobs:
            tail = [_one_line_each(JOB_HEADERS, jobs[:most], self._console.width)]
        if len(jobs) > most:
            tail.append(Text(f"+{len(jobs) - most} more jobs (burnish jobs list)", style="dim"))
        rows = [self._cells(domain_cells(domain)) for domain in standing.domains]
        room = len(rows)
        if lines is not None:
            used = sum(map(self._height, (*head, *tail)))
            # One line is for the headers, and the last one of the screen for the cursor.
            room = max(_FEWEST, lines - used - 2)
            if len(rows) > room:
                room = max(_FEWEST, room - 1)
        parts: list[RenderableType] = [*head]
        if rows:
            parts.append(_one_line_each(self._headers(), rows[:room], self._console.width))
        if len(rows) > room:
            parts.append(Text(_left_out(standing, room), style="dim", no_wrap=True))
        return [*parts, *tail]

    def _height(self, part: Any) -> int:
        return len(self._console.render_lines(part, pad=False))

    def _headers(self) -> tuple[str, ...]:
        return self._cells(DOMAIN_HEADERS)

    def _cells(self, cells: tuple[str, ...]) -> tuple[str, ...]:
        """On a narrow screen without the gain, and what is wrong takes the place of why."""
        if self._is_wide:
            return cells
        *figures, _, waits, state, why = cells
        return (*figures, waits, why if state in (OK, "state") else state)


def _left_out(standing: Standing, room: int) -> str:
    hidden = standing.domains[room:]
    ill = sum(domain.quarantined is not None or bool(domain.breaker) for domain in hidden)
    also = f", {ill} of them not {OK}" if ill else ""
    return f"+{len(hidden)} more{also} (--once shows all)"


def _one_line_each(headers: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """The last column takes what is left of the width, and is cut there."""
    from burnish.cli.console import table
    from burnish.observe.printable import printable

    clean = [tuple(printable(cell, keep="") for cell in row) for row in rows]
    grid = table(headers, clean)
    grid.width = width
    for column in grid.columns:
        column.no_wrap, column.overflow, column.max_width = True, "ellipsis", _CELL_WIDTH
    grid.columns[-1].max_width = None
    grid.columns[-1].ratio = 1
    return grid
