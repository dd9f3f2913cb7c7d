"""How verbs speak: JSON lines for programs, tables for people, plain text off a terminal."""

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Off a terminal there is no width to fit, unless COLUMNS says so; 80 columns would cut digests and
# paths in logs.
_PLAIN_WIDTH = 200
_MOST_WIDTH = 10_000


def write_json(value: Any) -> None:
    """One line of JSON on stdout; paths and the like as strings."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def people(stream: TextIO | None = None) -> Console:
    """A console for people; no colour under NO_COLOR or off a terminal."""
    stream = stream or sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _plain_width(),
        highlight=False,
        soft_wrap=False,
    )


def _plain_width() -> int:
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and 0 < int(asked) <= _MOST_WIDTH else _PLAIN_WIDTH


def table(headers: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A quiet table. Cells are text, never markup: they may hold what a model wrote."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        grid.add_column(header, overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return grid
