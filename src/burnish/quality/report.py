"""What an audit of an environment says, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from burnish.core.records import Record


class ProbeVerdict(StrEnum):
    """Result of one probe, or of a whole audit."""

    PASS = "pass"
    """Measured, and nothing was found."""
    FAIL = "fail"
    """A defect was found; the witness shows it."""
    UNMEASURED = "unmeasured"
    """Could not be measured here. Never counts as a pass."""


class Finding(Record, frozen=True, kw_only=True):
    """What one probe found."""

    probe: str
    """Name of the probe."""
    verdict: ProbeVerdict
    """Its result."""
    reason: str = ""
    """One line for people; empty on a pass."""
    witness: dict[str, Any] = msgspec.field(default_factory=dict)
    """What shows the defect again: split, index, answer, score, or the exception."""


class QualityReport(Record, frozen=True, kw_only=True):
    """The audit of one environment, bound to its digest."""

    environment: str
    """Name."""
    digest: str
    """Digest that was audited: another digest has no verdict."""
    verdict: ProbeVerdict
    """Fail if any probe failed; pass if all required ones passed; else unmeasured."""
    findings: tuple[Finding, ...]
    """One per probe, in order."""

    @property
    def reason(self) -> str:
        """Why it may not teach, in one line; empty on a pass."""
        if self.verdict is ProbeVerdict.PASS:
            return ""
        found = next(f for f in self.findings if f.verdict is self.verdict and f.reason)
        return f"{found.probe}: {found.reason}"
