"""`burnish top`: what a run is doing, domain by domain, and why."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from burnish.cli.top_layout import Fit
from burnish.cli.top_rows import DOMAIN_HEADERS, JOB_HEADERS, domain_cells, headlines, job_rows

if TYPE_CHECKING:
    from rich.console import Console, Group

    from burnish.observe.standing import Standing

_REFRESH_S = 2.0


def top(
    run: Path,
    /,
    *,
    once: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """What a run is doing, domain by domain, and why; refreshed until it ends or Ctrl-C.

    Works on a live run, and on the records of one that is over.

    Args:
        run: its directory.
        once: print it once; so it is off a terminal, too.
        as_json: once, as JSON.
    """
    from burnish.cli.console import people, write_json

    standing = look(run)
    if as_json:
        write_json({**msgspec.to_builtins(standing), "jobs": jobs_beside(run)})
        return
    console = people()
    is_terminal = sys.stdout.isatty()
    if once or not standing.is_live or not is_terminal:
        with console.capture() as shown:
            # A log has room for all that there is to say.
            fit = Fit(console, all_rows=True) if is_terminal else None
            console.print(picture(standing, jobs_beside(run), fit))
        # Columns are padded, which only a terminal needs.
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in shown.get().splitlines())
        return
    _follow(run, standing, console)


def look(run: Path) -> Standing:
    """Ask the run if it lives, else read what it wrote.

    Raises:
        UserError: this is no run directory.
    """
    from burnish.core.errors import UserError
    from burnish.observe.standing import live_standing, recorded_standing
    from burnish.run.control.client import ask
    from burnish.run.control.messages import Request, Verb, socket_path
    from burnish.store.reader import RunReader

    reader, socket = RunReader(run), socket_path(run)
    if socket.exists():
        try:
            answer = ask(socket, Request(verb=Verb.STATUS))
        except UserError:
            # It was killed, or ended between the two lines.
            return recorded_standing(reader)
        if answer.ok:
            return live_standing(answer.result)
    return recorded_standing(reader)


def jobs_beside(run: Path) -> list[dict[str, Any]]:
    """Jobs of the daemon that started this run, or that serves beside it; empty if none does."""
    from burnish.core.errors import UserError
    from burnish.run.control.client import ask
    from burnish.run.jobs.messages import JobRequest, JobVerb, jobs_socket

    home = run.absolute()
    for directory in (home.parent.parent, home.parent / "jobs"):
        if not jobs_socket(directory).exists():
            continue
        try:
            answer = ask(jobs_socket(directory), JobRequest(verb=JobVerb.LIST))
        except UserError:
            continue
        if answer.ok:
            return list(answer.result["jobs"])
    return []


def picture(standing: Standing, jobs: list[dict[str, Any]], fit: Fit | None = None) -> Group:
    """Everything on one screen, or, without one to fit, everything at its full length."""
    from rich.console import Group
    from rich.text import Text

    from burnish.cli.console import table
    from burnish.observe.printable import printable

    head = [Text(printable(line, keep="")) for line in headlines(standing)]
    if fit is not None:
        return Group(*fit.lay_out(head, standing, job_rows(jobs)))
    rows = [
        tuple(printable(cell, keep="") for cell in domain_cells(domain))
        for domain in standing.domains
    ]
    parts: list[Any] = list(head)
    if rows:
        parts += [Text(), table(DOMAIN_HEADERS, rows)]
    if jobs:
        parts += [Text(), table(JOB_HEADERS, job_rows(jobs))]
    return Group(*parts)


def _follow(run: Path, standing: Standing, console: Console) -> None:
    """Draw it in place until the run ends, or somebody has seen enough."""
    from rich.live import Live

    try:
        shown = picture(standing, jobs_beside(run), Fit(console))
        with Live(shown, console=console, screen=False) as view:
            while standing.is_live:
                time.sleep(_REFRESH_S)
                standing = look(run)
                view.update(picture(standing, jobs_beside(run), Fit(console)), refresh=True)
    except KeyboardInterrupt:
        # The way out of a view, not an interruption of anything.
        return
