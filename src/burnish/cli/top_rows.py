"""What `burnish top` says of a run, of each domain and of each job, as texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.observe.standing import DomainStanding, Standing

DOMAIN_HEADERS = ("domain", "share", "cost", "pass", "gain/cost", "waits", "state", "why")
JOB_HEADERS = ("job", "tenant", "state", "units", "lent")
OK = "ok"
"""State of a domain with which all is well."""
_NONE = "-"


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
    state = domain.breaker or OK
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
