"""What an evaluation found: one record per sample, three outcomes, both denominators."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Failure, Record
from burnish.core.vocabulary import Outcome, StopReason
from burnish.evaluate.intervals import Interval, cluster_bootstrap, wilson
from burnish.evaluate.significance import pass_at_k
from burnish.evaluate.suite import Suite

FORMAT_VERSION = 1


class SampleResult(Record, frozen=True, kw_only=True):
    """What became of one sample."""

    domain: str
    """Environment name."""
    index: int
    """Held-out task."""
    sample: int
    """Which of the task's samples."""
    outcome: Outcome
    """Scored, or invalid and whose fault that is."""
    passed: bool | None
    """Whether the outcome credit is full; None unless scored."""
    score: float | None
    """Weighted credits in [0, 1]; None unless scored."""
    num_sampled_tokens: int
    """Tokens that the model produced."""
    stop_reason: StopReason | None
    """How its last turn ended; None if there was none."""
    num_attempts: int
    """Tries, the last one included: more than 1 after failures of the infrastructure."""
    failure: Failure | None = None
    """Set unless scored."""


class DomainSummary(Record, frozen=True, kw_only=True):
    """One domain's numbers."""

    domain: str
    """Environment name."""
    num_tasks: int
    """Held-out tasks."""
    num_samples: int
    """Samples drawn."""
    num_scored: int
    """Samples with a score."""
    num_invalid_infra: int
    """Samples lost to infrastructure, sandbox or verifier."""
    num_invalid_environment: int
    """Samples lost to a broken environment or its data."""
    pass_rate: float
    """Mean over tasks of the pass rate of their scored samples; 0.0 if there are none."""
    pass_low: float
    """95 % interval of `pass_rate`: lower end."""
    pass_high: float
    """Upper end."""
    strict_pass_rate: float
    """Passed over all samples, invalid ones counted as failed."""
    mean_score: float
    """Mean over tasks of the mean score of their scored samples."""
    pass_at_k: float
    """Chance that one of all samples of a task passes, over tasks; equals `pass_rate` for k = 1."""
    mean_tokens: float
    """Mean sampled tokens per scored sample."""
    length_stop_ratio: float
    """Part of the scored samples whose last turn ran out of budget."""


class EvaluationResult(Record, frozen=True, kw_only=True):
    """A finished evaluation of one model on one suite."""

    format_version: int = FORMAT_VERSION
    """Of this record."""
    label: str
    """Name of what was evaluated, such as `before`."""
    suite: Suite
    """What was asked."""
    samples: tuple[SampleResult, ...]
    """Every sample in canonical order."""

    def by_task(self, domain: str) -> dict[int, tuple[SampleResult, ...]]:
        """Scored samples per task; a task without any is present and empty."""
        tasks: dict[int, list[SampleResult]] = defaultdict(list)
        for s in self.samples:
            if s.domain == domain:
                scored = tasks[s.index]
                if s.outcome is Outcome.SCORED:
                    scored.append(s)
        return {index: tuple(scored) for index, scored in tasks.items()}

    def summary(self, domain: str) -> DomainSummary:
        """The numbers of one domain."""
        drawn = [s for s in self.samples if s.domain == domain]
        scored = [s for s in drawn if s.outcome is Outcome.SCORED]
        tasks = [t for t in self.by_task(domain).values() if t]
        rates = [sum(bool(s.passed) for s in t) / len(t) for t in tasks]
        num_passed = sum(bool(s.passed) for s in scored)
        interval = self._interval(rates, num_passed)
        return DomainSummary(
            domain=domain,
            num_tasks=len(self.suite.indices[domain]),
            num_samples=len(drawn),
            num_scored=len(scored),
            num_invalid_infra=sum(s.outcome is Outcome.INVALID_INFRA for s in drawn),
            num_invalid_environment=sum(s.outcome is Outcome.INVALID_ENVIRONMENT for s in drawn),
            pass_rate=_mean(rates),
            pass_low=interval.low,
            pass_high=interval.high,
            strict_pass_rate=num_passed / len(drawn) if drawn else 0.0,
            mean_score=_mean([_mean([s.score or 0.0 for s in t]) for t in tasks]),
            pass_at_k=_mean(
                [pass_at_k(len(t), sum(bool(s.passed) for s in t), len(t)) for t in tasks]
            ),
            mean_tokens=_mean([float(s.num_sampled_tokens) for s in scored]),
            length_stop_ratio=_mean([float(s.stop_reason is StopReason.LENGTH) for s in scored]),
        )

    def summaries(self) -> tuple[DomainSummary, ...]:
        """All domains in the order of the suite."""
        return tuple(self.summary(domain) for domain in self.suite.indices)

    def to_json(self) -> bytes:
        """For the store; `result_from_json` reads it."""
        return msgspec.json.encode(self)

    def _interval(self, rates: list[float], num_passed: int) -> Interval:
        if self.suite.plan.num_samples == 1:
            return wilson(num_passed, len(rates))
        # Rates live in [0, 1]; the bootstrap's pseudo-clusters stand at the ends of [-1, 1].
        low, high = cluster_bootstrap([2.0 * r - 1.0 for r in rates])
        return Interval((low + 1.0) / 2.0, (high + 1.0) / 2.0)


def result_from_json(data: bytes, where: str) -> EvaluationResult:
    """Read what `to_json` wrote.

    Args:
        data: the bytes.
        where: file name for the message.

    Raises:
        UserError: if it is damaged or of another version.
    """
    fix = "run the evaluation again."
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
        if version != FORMAT_VERSION:
            raise UserError(
                f"{where} has format version {version}, this program reads {FORMAT_VERSION}.",
                fix=fix,
            )
        return msgspec.json.decode(data, type=EvaluationResult)
    except msgspec.DecodeError as error:
        raise UserError(f"{where} is not an evaluation result: {error}.", fix=fix) from error


class _Versioned(msgspec.Struct):
    format_version: int


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
