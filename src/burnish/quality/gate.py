"""The gate: an environment teaches only with a passing audit of exactly its digest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from burnish.core.protocols import Environment
from burnish.quality.report import ProbeVerdict, QualityReport


class Admission(NamedTuple):
    """Who may teach."""

    admitted: tuple[str, ...]
    """Names, in the order of the reports."""
    quarantined: Mapping[str, str]
    """Name to reason, for all others."""


class Gate:
    """Remembers which digests passed."""

    def __init__(self) -> None:
        """Nothing has passed yet."""
        self._verified: set[tuple[str, str]] = set()

    def admit(self, reports: Iterable[QualityReport]) -> Admission:
        """Let in what passed; quarantine what failed or could not be measured."""
        admitted: list[str] = []
        quarantined: dict[str, str] = {}
        for report in reports:
            if report.verdict is ProbeVerdict.PASS:
                self._verified.add((report.environment, report.digest))
                admitted.append(report.environment)
            else:
                self._verified.discard((report.environment, report.digest))
                quarantined[report.environment] = f"{report.verdict}: {report.reason}"
        return Admission(tuple(admitted), quarantined)

    def allows(self, environment: Environment) -> bool:
        """Whether this digest of this environment has passed."""
        return (environment.name, environment.digest) in self._verified
