"""`report.html` of a run: read the store, write one file."""

from pathlib import Path

from burnish.core.disk import write_atomically
from burnish.observe.gather import gather
from burnish.observe.page import render
from burnish.store.reader import RunReader


def render_run(run: Path) -> str:
    """The report of a run directory as HTML.

    Raises:
        UserError: if `run` is no run directory, or one of another version.
    """
    return render(gather(RunReader(run)))


def write_report(run: Path) -> Path:
    """Write `report.html` into a run directory, whole or not at all; returns its path.

    Raises:
        UserError: if `run` is no run directory, or one of another version.
        DiskFullError: an older report is untouched.
    """
    path = run / "report.html"
    write_atomically(path, render_run(run).encode())
    return path
