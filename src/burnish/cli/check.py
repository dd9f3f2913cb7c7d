"""`burnish check`: audit environments before they may teach."""

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.core.protocols import Environment
    from burnish.quality.report import QualityReport
    from burnish.quality.subject import AuditConfig


def check(
    *envs: str,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Audit environments: does the reference score full, does an empty answer not, and so on.

    Exits with status 1 unless every environment passed. Unmeasured is not a pass.

    Args:
        envs: names of `burnish env list` or module:Class; all shipped ones if none is given.
        set_: one value of [quality], as quality.KEY=VALUE; may be repeated.
        as_json: one JSON array of reports with witnesses.
    """
    from rich.text import Text

    from burnish.cli.console import people, table, write_json
    from burnish.observe.printable import printable

    reports, without_boxes = asyncio.run(_audit(envs, _quality(set_ or [])))
    failed = any(report.verdict != "pass" for report in reports)
    if as_json:
        write_json(reports)
        return int(failed)
    styles = {"pass": "green", "fail": "bold red", "unmeasured": "yellow"}
    rows = [
        (r.environment, Text(r.verdict, styles[r.verdict]), printable(r.reason, keep=""))
        for r in reports
    ]
    people().print(table(("environment", "verdict", "reason"), rows))
    if without_boxes:
        people(sys.stderr).print(Text(without_boxes, style="yellow"))
    return int(failed)


def _quality(overrides: Sequence[str]) -> "AuditConfig":
    from burnish.core.config import load_config
    from burnish.run.config import RunConfig

    loaded = load_config(RunConfig, (), overrides)
    strangers = [key for key in loaded.layers if not key.startswith("quality.")]
    if strangers:
        what = f"--set {strangers[0]}: an audit has only the keys of [quality]."
        raise UserError(what, fix="burnish config explain quality lists them.")
    return loaded.value.quality


async def _audit(names: Sequence[str], config: "AuditConfig") -> "tuple[list[QualityReport], str]":
    from burnish.cli.boxes import boxes_if_possible
    from burnish.envs import registry
    from burnish.quality.audit import audit

    subjects = [(name, _build(name)) for name in names or registry.names()]
    reports = []
    async with boxes_if_possible() as (pool, reason):
        for position, (name, subject) in enumerate(subjects, 1):
            _progress(f"{position}/{len(subjects)} {name}")
            if isinstance(subject, UserError):
                reports.append(_unbuildable(name, subject))
            else:
                reports.append(await audit(subject, pool, config))
    return reports, reason


def _build(name: str) -> "Environment | UserError":
    """The environment, or why there is none; a name that nothing has is a typo, and stops all."""
    from burnish.envs import registry

    try:
        return registry.get(name)
    except UserError as error:
        if ":" in name or name in registry.names():
            return error
        raise


def _unbuildable(name: str, error: UserError) -> "QualityReport":
    from burnish.quality.report import Finding, ProbeVerdict, QualityReport

    finding = Finding(
        probe="build", verdict=ProbeVerdict.FAIL, reason=str(error), witness={"target": name}
    )
    return QualityReport(
        environment=name, digest="", verdict=ProbeVerdict.FAIL, findings=(finding,)
    )


def _progress(text: str) -> None:
    """An audit of everything takes a while; on stderr, so that stdout holds the result only."""
    sys.stderr.write(f"checking {text}\n")
    sys.stderr.flush()
