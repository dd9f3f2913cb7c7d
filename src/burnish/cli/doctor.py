"""`burnish doctor`: what this machine can and cannot do, and the exact fix."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


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
    shown = [row for row in rows if not quiet or row.status is not Status.OK]
    if shown:
        cells = [(row.name, Text(row.status, _STYLES[row.status]), row.detail) for row in shown]
        people().print(table(("", "", ""), cells))
    for row in shown:
        if row.fix:
            people().print(Text(f"fix {row.name}: {row.fix}"))
    return int(failed)
