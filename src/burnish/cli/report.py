"""`burnish report`: render a run's report again."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def report(run: Path, /, *, as_json: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """Render a run's report.html again from what the run directory holds.

    Works on a finished, an interrupted and a running run.

    Args:
        run: run directory.
        as_json: the path as JSON.
    """
    from burnish.cli.console import people, write_json
    from burnish.observe.report import write_report

    path = write_report(run)
    if as_json:
        write_json({"report": str(path)})
    else:
        people().print(str(path), markup=False)
