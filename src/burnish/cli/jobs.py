"""`burnish jobs`: several runs share this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from burnish.run.jobs.messages import JobVerb

Json = Annotated[bool, Parameter(name="--json")]
_DIRECTORY = Path("runs/jobs")
_MAX_UNITS = 10**6
# A sixth of it passes between two looks at what jobs demand: less would keep a core busy.
_LEAST_LEND_S = 1.0


def serve(
    *,
    directory: Path = _DIRECTORY,
    units: int | None = None,
    quota: Annotated[list[str] | None, Parameter(name="--quota")] = None,
    lend_after: float = 60.0,
    as_json: Json = False,
) -> None:
    """Run jobs, until stopped. What runs then saves a checkpoint and goes on next time.

    Args:
        directory: where jobs and their runs are kept.
        units: what there is to share; the cores of this machine if absent.
        quota: TENANT=UNITS that a tenant always gets back; may be repeated.
        lend_after: seconds after which a job lends units that it does not use; 0 never.
        as_json: nothing but errors on stdout.
    """
    import asyncio
    import math
    import os
    import signal

    from burnish.core.clock import SystemClock
    from burnish.core.errors import UserError
    from burnish.run.jobs.daemon import JobsDaemon, is_served
    from burnish.schedule.jobs.base import JobsConfig

    if is_served(directory):
        raise UserError(f"{directory} is served already.", fix="burnish jobs list")
    if lend_after and not _LEAST_LEND_S <= lend_after < math.inf:
        what = f"--lend-after {lend_after} is neither 0 (never) nor {_LEAST_LEND_S:.0f} or more."
        raise UserError(what, fix="--lend-after 60")
    if units is not None and not 1 <= units <= _MAX_UNITS:
        what = f"--units {units} is not 1 to {_MAX_UNITS}."
        raise UserError(what, fix=f"--units {os.cpu_count() or 1}")
    cores = units if units is not None else os.cpu_count() or 1
    shared = JobsConfig(units=cores, quotas=_quotas(quota or []), lend_after_s=lend_after)

    async def until_stopped() -> None:
        daemon = JobsDaemon(directory, shared, SystemClock())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, daemon.stop)
        await daemon.run()

    asyncio.run(until_stopped())


def submit(
    name: str,
    config: Path,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    units: int = 1,
    priority: int = 0,
    tenant: str = "default",
    directory: Path = _DIRECTORY,
    as_json: Json = False,
) -> None:
    """Queue a run.

    Args:
        name: of the job.
        config: TOML file of the run.
        set_: one value, as KEY=VALUE; may be repeated.
        units: cores that it needs, all at once.
        priority: higher goes first, and may take the place of lower.
        tenant: on whose account.
        directory: of the daemon.
        as_json: all jobs, as JSON.
    """
    from burnish.core.config import load_config
    from burnish.run.config import RunConfig
    from burnish.run.jobs.messages import JobVerb

    # Read here as well: who submits it sees at once what the run would end with.
    load_config(RunConfig, [config], set_ or [])
    more = {"job_id": name, "config": str(config.absolute()), "overrides": set_ or []}
    about = {"units": units, "priority": priority, "tenant": tenant}
    _show(_ask(directory, JobVerb.SUBMIT, **more, **about), as_json=as_json)


def list_jobs(*, directory: Path = _DIRECTORY, as_json: Json = False) -> None:
    """What runs and waits.

    Args:
        directory: of the daemon.
        as_json: all jobs, as JSON.
    """
    from burnish.run.jobs.messages import JobVerb

    _show(_ask(directory, JobVerb.LIST), as_json=as_json)


def cancel(name: str, /, *, directory: Path = _DIRECTORY, as_json: Json = False) -> None:
    """Give a job up.

    Args:
        name: of the job.
        directory: of the daemon.
        as_json: all jobs, as JSON.
    """
    from burnish.run.jobs.messages import JobVerb

    _show(_ask(directory, JobVerb.CANCEL, job_id=name), as_json=as_json)


def stop(*, directory: Path = _DIRECTORY, as_json: Json = False) -> None:
    """End the daemon; jobs go on when it is served again.

    Args:
        directory: of the daemon.
        as_json: all jobs, as JSON.
    """
    from burnish.run.jobs.messages import JobVerb

    _show(_ask(directory, JobVerb.STOP), as_json=as_json)


def _quotas(given: list[str]) -> dict[str, int]:
    from burnish.core.errors import UserError

    quotas = {}
    for text in given:
        tenant, _, units = text.partition("=")
        if not tenant or not units.isdecimal():
            raise UserError(f"--quota {text} is not TENANT=UNITS.", fix="--quota research=2")
        quotas[tenant] = int(units)
    return quotas


def _ask(directory: Path, verb: "JobVerb", **more: Any) -> dict[str, Any]:

    from burnish.run.control.client import ask_for
    from burnish.run.jobs.messages import JobRequest, jobs_socket

    return ask_for(
        jobs_socket(directory),
        JobRequest,
        {"verb": verb.value, **more},
        usage=f"burnish jobs {verb.value} --help",
        fix="burnish jobs list",
    )


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    from burnish.cli.console import people, table, write_json

    if as_json:
        write_json(result["jobs"])
        return
    rows = [
        (
            job["spec"]["job_id"],
            job["spec"]["tenant"],
            job["state"],
            str(job["spec"]["units"]),
            str(job["spec"]["priority"]),
            str(job["num_starts"]),
        )
        for job in result["jobs"]
    ]
    people().print(table(("job", "tenant", "state", "units", "priority", "starts"), rows))
