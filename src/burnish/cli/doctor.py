"""`burnish doctor`: what this machine can and cannot do, and the exact fix."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from burnish.cli.machine import Row

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "absent": "dim"}


def doctor(
    *,
    quiet: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Say what this machine can do and what it lacks, with the exact fix.

    Exits with status 1 if something that a run needs is missing.

    Args:
        quiet: show only what needs attention.
        as_json: one JSON array.
    """
    from rich.text import Text

    from burnish.cli.console import people, table, write_json
    from burnish.cli.machine import Status, inspect_machine

    rows = inspect_machine(Path("runs"))
    failed = any(row.status is Status.FAIL for row in rows)
    if as_json:
        write_json(rows)
        return int(failed)
    shown = [row for row in rows if not quiet or row.status in (Status.WARN, Status.FAIL)]
    if shown:
        cells = [(row.name, Text(row.status, _STYLES[row.status]), _detail(row)) for row in shown]
        people().print(table(("", "", ""), cells))
    for row in shown:
        if row.fix and row.status is not Status.ABSENT:
            people().print(Text(f"fix {row.name}: {row.fix}"))
    return int(failed)


def _detail(row: "Row") -> str:
    """With the way to get it, where that is not worth a line of its own."""
    return f"{row.detail} ({row.fix})" if row.status == "absent" and row.fix else row.detail
