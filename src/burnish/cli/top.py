"""`burnish top`: what a run is doing, domain by domain, and why."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Group

    from burnish.observe.standing import DomainStanding, Standing

_REFRESH_S = 2.0
_NONE = "-"


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
    if once or not standing.is_live or not sys.stdout.isatty():
        with console.capture() as shown:
            console.print(picture(standing, jobs_beside(run)))
        # Columns are padded, which only a terminal needs.
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in shown.get().splitlines())
        return
    from rich.live import Live

    try:
        with Live(picture(standing, jobs_beside(run)), console=console, screen=False) as view:
            while standing.is_live:
                time.sleep(_REFRESH_S)
                standing = look(run)
                view.update(picture(standing, jobs_beside(run)), refresh=True)
    except KeyboardInterrupt:
        # The way out of a view, not an interruption of anything.
        return


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


def picture(standing: Standing, jobs: list[dict[str, Any]]) -> Group:
    """Everything on one screen."""
    from rich.console import Group
    from rich.text import Text

    from burnish.cli.console import table
    from burnish.observe.printable import printable

    headers = ("domain", "share", "cost", "pass", "gain/cost", "waits", "state", "why")
    rows = [
        tuple(printable(cell, keep="") for cell in domain_cells(domain))
        for domain in standing.domains
    ]
    parts: list[Any] = [Text(printable(line, keep="")) for line in headlines(standing)]
    if rows:
        parts += [Text(), table(headers, rows)]
    if jobs:
        parts += [Text(), table(("job", "tenant", "state", "units", "lent"), job_rows(jobs))]
    return Group(*parts)


def headlines(standing: Standing) -> list[str]:
    """Steps, speed, idle time and load, in two lines."""
    of = f" of {standing.num_steps}" if standing.num_steps is not None else ""
    first = f"{standing.state}, step {standing.step}{of}"
    # Whoever stands still has no speed; that of the last step would be taken for one.
    is_training = standing.state == "training"
    speeds = [
        f"{name} {value:,.0f} tok/s{when}" + (f", idle {idle:.0%}" if idle is not None else "")
        for name, value, when, idle in (
            ("engine", standing.engine_tokens_per_s, "", standing.engine_idle),
            ("trainer", standing.trainer_tokens_per_s, " while it computes", standing.trainer_idle),
        )
        if value is not None and is_training
    ]
    load = []
    if standing.running is not None:
        load.append(f"{standing.running} requests decoding, {standing.waiting or 0} waiting")
    if standing.load_target is not None:
        load.append(f"target {standing.load_target:.2f} per slot")
    if standing.groups:
        groups = standing.groups
        load.append(f"groups: {groups['running']} sampled, {groups['waiting']} to be trained")
    lines = ["  ".join([first, *speeds]), *filter(None, [standing.note])]
    return lines + (["load: " + "; ".join(load)] if load else [])


def domain_cells(domain: DomainStanding) -> tuple[str, ...]:
    """One row of the table."""
    bound = _NONE if domain.bound is None else str(domain.bound)
    state = domain.breaker or "ok"
    if domain.quarantined is not None:
        state = f"quarantined: {domain.quarantined}"
    why = domain.why.partition(": ")[2] or domain.why
    return (
        domain.domain,
        f"{domain.share:.1%}",
        _percent(domain.cost_ratio),
        _percent(domain.pass_rate),
        _NONE if domain.gain_per_cost is None else f"{domain.gain_per_cost:+.1e}",
        f"{_NONE if domain.wait is None else domain.wait} of {bound}",
        state,
        "; ".join(filter(None, (why, domain.items))),
    )


def job_rows(jobs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the jobs' table."""
    return [
        (
            job["spec"]["job_id"],
            job["spec"]["tenant"],
            job["state"] + (", guest" if job["is_guest"] else ""),
            str(job["spec"]["units"]),
            str(job["lent"]),
        )
        for job in jobs
    ]


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"
