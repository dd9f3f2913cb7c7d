"""How credits become a score: 0.6 outcome + 0.3 process + 0.1 compliance.

Process credit measures real progress, so an answer without any progress earns no compliance credit:
form counts only beside substance. An empty answer therefore scores exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.core.records import Credit, Verdict
from burnish.core.vocabulary import CreditSource, Outcome

WEIGHTS: Mapping[CreditSource, float] = {
    CreditSource.OUTCOME: 0.6,
    CreditSource.PROCESS: 0.3,
    CreditSource.COMPLIANCE: 0.1,
}
"""Share of each source in the score; `CreditSpan.weight` comes from here."""

SHOWN_CHARS = 400
"""Evidence is for people: longer text is cut, so a 1 MB answer does not end up in every record."""


def compose(credits: tuple[Credit, ...], evidence: dict[str, Any]) -> Verdict:
    """Weigh credits into a scored verdict.

    Several credits of one source are averaged. A source without credit counts as 0.

    Args:
        credits: values in [0, 1].
        evidence: what a person needs to agree or disagree.
    """
    total = 0.0
    for source, weight in WEIGHTS.items():
        values = [credit.value for credit in credits if credit.source is source]
        assert all(0.0 <= value <= 1.0 for value in values), "credits lie in [0, 1]"
        total += weight * (sum(values) / len(values) if values else 0.0)
    outcomes = [credit.value for credit in credits if credit.source is CreditSource.OUTCOME]
    return Verdict(
        outcome=Outcome.SCORED,
        # Rounded so that a full set of credits is exactly 1.0: 0.6 + 0.3 + 0.1 is not.
        score=round(total, 9),
        passed=bool(outcomes) and min(outcomes) == 1.0,
        credits=credits,
        evidence=evidence,
    )


def grade(
    *,
    solved: bool,
    progress: float,
    in_form: bool,
    expected: object,
    got: str,
    progress_turn: int | None = None,
    note: str = "",
    **evidence: object,
) -> Verdict:
    """The usual verdict of one outcome, one process and one compliance credit.

    Args:
        solved: whether the final result is right.
        progress: share of the way toward it, in [0, 1].
        in_form: whether the demanded form was kept; counts only if there is progress.
        expected: the right result, for evidence.
        got: the policy's text, for evidence.
        progress_turn: assistant turn that earned the progress; None for the whole episode.
        note: one line beside the process credit.
        **evidence: more for people.
    """
    credits = (
        Credit(source=CreditSource.OUTCOME, value=float(solved)),
        Credit(source=CreditSource.PROCESS, value=progress, turn=progress_turn, note=note),
        Credit(source=CreditSource.COMPLIANCE, value=float(in_form and progress > 0.0)),
    )
    return compose(credits, {"expected": expected, "got": shown(got), **evidence})


def shown(text: str) -> str:
    """Text as evidence: cut, and without lone surrogates, which no store can encode."""
    cut = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
    return cut.encode("utf-8", "replace").decode("utf-8")
