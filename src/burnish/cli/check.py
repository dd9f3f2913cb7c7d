"""`burnish check`: audit environments before they may teach."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from burnish.quality.report import QualityReport


def check(*envs: str, as_json: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """Audit environments: does the reference score full, does an empty answer not, and so on.

    Exits with status 1 unless every environment passed. Unmeasured is not a pass.

    Args:
        envs: names of `burnish env list` or module:Class; all shipped ones if none is given.
        as_json: one JSON array of reports with witnesses.
    """
    from rich.text import Text

    from burnish.cli.console import people, table, write_json
    from burnish.observe.printable import printable

    reports, without_boxes = asyncio.run(_audit(envs))
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


async def _audit(names: tuple[str, ...]) -> "tuple[list[QualityReport], str]":
    from burnish.cli.boxes import boxes_if_possible
    from burnish.envs import registry
    from burnish.quality.audit import audit

    environments = [registry.get(name) for name in names or registry.names()]
    async with boxes_if_possible() as (pool, reason):
        return [await audit(environment, pool) for environment in environments], reason
