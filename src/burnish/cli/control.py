"""`burnish control`: look at a live run, and change it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.run.control.messages import Verb

Json = Annotated[bool, Parameter(name="--json")]


def status(run: Path, /, *, as_json: Json = False) -> None:
    """How a live run is doing.

    Args:
        run: its directory.
        as_json: everything, as JSON.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.run.control.messages import Verb

    result = _ask(run, Verb.STATUS)
    if as_json:
        write_json(result)
        return
    state = "paused" if result["paused"] else "training"
    people().print(f"{state}, step {result['step']} of {result['num_steps']}")
    rows = [
        (d["domain"], f"{d['share']:.1%}", f"{d['cost_ratio']:.1%}", d["quarantined"] or "")
        for d in result["domains"]
    ]
    people().print(table(("domain", "share", "cost", "quarantined"), rows))


def pause(run: Path, /, *, as_json: Json = False) -> None:
    """Start nothing new and train nothing, until told to resume.

    Args:
        run: its directory.
        as_json: the answer as JSON.
    """
    from burnish.run.control.messages import Verb

    _do(run, Verb.PAUSE, as_json=as_json)


def resume(run: Path, /, *, as_json: Json = False) -> None:
    """Go on after a pause.

    Args:
        run: its directory.
        as_json: the answer as JSON.
    """
    from burnish.run.control.messages import Verb

    _do(run, Verb.RESUME, as_json=as_json)


def stop(run: Path, /, *, as_json: Json = False) -> None:
    """End after the step in progress, with a checkpoint.

    Args:
        run: its directory.
        as_json: the answer as JSON.
    """
    from burnish.run.control.messages import Verb

    _do(run, Verb.STOP, as_json=as_json)


def add(
    run: Path,
    domain: str,
    /,
    *,
    environment: str | None = None,
    weight: float | None = None,
    min_share: float | None = None,
    max_share: float | None = None,
    as_json: Json = False,
) -> None:
    """Train a further domain, once it has passed the quality gate.

    Args:
        run: directory of the live run.
        domain: what it is called.
        environment: registered name or module:Class, if it is not the domain's own name.
        weight: priority; 1 is that of the others.
        min_share: least share of the budget.
        max_share: greatest share of the budget.
        as_json: the answer as JSON.
    """
    from burnish.run.control.messages import Verb

    shares = {"weight": weight, "min_share": min_share, "max_share": max_share}
    _do(run, Verb.ADD, domain, as_json=as_json, environment=environment, **shares)


def remove(run: Path, domain: str, /, *, as_json: Json = False) -> None:
    """Stop training a domain.

    Args:
        run: directory of the live run.
        domain: which.
        as_json: the answer as JSON.
    """
    from burnish.run.control.messages import Verb

    _do(run, Verb.REMOVE, domain, as_json=as_json)


def share(
    run: Path,
    domain: str,
    /,
    *,
    weight: float | None = None,
    min_share: float | None = None,
    max_share: float | None = None,
    false_pass: float | None = None,
    as_json: Json = False,
) -> None:
    """Change a domain's priority or bounds.

    Args:
        run: directory of the live run.
        domain: which.
        weight: priority; 1 is the default.
        min_share: least share of the budget.
        max_share: greatest share of the budget.
        false_pass: part of its passes that an audit found to be undeserved; its value falls by it.
        as_json: the answer as JSON.
    """
    from burnish.run.control.messages import Verb

    shares = {"weight": weight, "min_share": min_share, "max_share": max_share}
    shares["false_pass"] = false_pass
    if all(value is None for value in shares.values()):
        raise UserError("there is nothing to change.", fix="burnish control share --help")
    _do(run, Verb.SHARE, domain, as_json=as_json, **shares)


def _do(run: Path, verb: "Verb", domain: str | None = None, *, as_json: bool, **more: Any) -> None:
    from burnish.cli.console import people, write_json

    result = _ask(run, verb, domain=domain, **more)
    if as_json:
        write_json(result)
    else:
        people().print(f"{verb.value}: done", markup=False)


def _ask(run: Path, verb: "Verb", **more: Any) -> dict[str, Any]:

    from burnish.run.control.client import ask_for
    from burnish.run.control.messages import Request, socket_path

    return ask_for(
        socket_path(run),
        Request,
        {"verb": verb.value, **{k: v for k, v in more.items() if v is not None}},
        usage=f"burnish control {verb.value} --help",
        fix="burnish control status RUN shows the run's state",
    )
