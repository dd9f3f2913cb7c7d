"""Paired comparison of two evaluations of the same suite, domain by domain and over all.

Tasks are the unit: samples of one task are averaged first, and only tasks scored on both sides
count. One sample per task: Tango's paired score interval and the exact McNemar test. Several:
cluster bootstrap over tasks and the exact sign-flip test, which McNemar's is a case of. A domain is
called a gain or a loss only if its interval excludes 0 and its p-value survives Holm's correction;
otherwise "no difference" is claimed only by a sample large enough to have shown one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from fractions import Fraction

from pydantic import Field

from burnish.core.config import Config
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.evaluate.intervals import (
    Interval,
    cluster_bootstrap,
    mean_of_independent,
    tango_paired,
)
from burnish.evaluate.result import EvaluationResult, SampleResult
from burnish.evaluate.significance import (
    detectable_effect,
    holm,
    sign_flip_exact,
)


class DifferenceVerdict(StrEnum):
    """What the data say about one domain."""

    GAIN = "gain"
    """Significantly better."""
    LOSS = "loss"
    """Significantly worse."""
    NO_DIFFERENCE = "no_difference"
    """Not significant, although a difference of `min_effect` would very likely have shown."""
    UNDERPOWERED = "underpowered"
    """Not significant, and too few tasks to conclude anything from that."""


class ComparisonConfig(Config):
    """Levels of the comparison and of the gate."""

    alpha: float = Field(default=0.05, gt=0.0, lt=0.5)
    """Family-wise level of the verdicts, and one-sided level of the gate."""
    power: float = Field(default=0.8, gt=0.5, lt=1.0)
    """Chance to find `min_effect` that "no difference" requires."""
    min_effect: float = Field(default=0.05, gt=0.0, le=1.0)
    """Difference in pass rate that matters."""


class DomainComparison(Record, frozen=True, kw_only=True):
    """One domain."""

    domain: str
    """Environment name."""
    n: int
    """Tasks scored on both sides."""
    num_unpaired: int
    """Tasks left out because one side has no score for them."""
    before: float
    """Mean pass rate on the n tasks."""
    after: float
    """Mean pass rate on the n tasks."""
    diff: float
    """after - before."""
    ci_low: float
    """95 % interval of `diff`: lower end."""
    ci_high: float
    """Upper end."""
    one_sided_low: float
    """Lower bound of `diff` at one-sided level alpha: what the gate compares with its margin."""
    p_value: float
    """Two-sided, exact."""
    p_holm: float
    """The same, corrected for the number of domains."""
    detectable: float
    """Difference that this sample finds with the demanded power."""
    verdict: DifferenceVerdict
    """The conclusion."""
    diffs: tuple[float, ...]
    """Per paired task, in order of index."""


class Comparison(Record, frozen=True, kw_only=True):
    """Before against after."""

    before_label: str
    """What `before` was."""
    after_label: str
    """What `after` was."""
    domains: dict[str, DomainComparison]
    """By name, in the order of the suite."""
    mean_diff: float
    """Plain mean of `diff` over domains with at least one paired task."""
    mean_ci_low: float
    """95 % interval of `mean_diff`: lower end."""
    mean_ci_high: float
    """Upper end."""
    alpha: float
    """Level used."""


def compare(
    before: EvaluationResult, after: EvaluationResult, config: ComparisonConfig | None = None
) -> Comparison:
    """Compare two results task by task.

    Raises:
        UserError: if they are not of the same suite, or one is incomplete.
    """
    config = config or ComparisonConfig()
    _check_paired(before, after)
    multi = before.suite.plan.num_samples > 1
    pairs = {d: _paired_rates(before, after, d) for d in before.suite.indices}
    p_values = {d: sign_flip_exact([a - b for b, a in rates]) for d, (rates, _) in pairs.items()}
    adjusted = holm(p_values)
    domains = {
        d: _compare_domain(d, rates, unpaired, multi, (p_values[d], adjusted[d]), config)
        for d, (rates, unpaired) in pairs.items()
    }
    known = [c for c in domains.values() if c.n > 0]
    mean = sum(c.diff for c in known) / len(known) if known else 0.0
    interval = (
        mean_of_independent([c.diff for c in known], [Interval(c.ci_low, c.ci_high) for c in known])
        if known
        else Interval(-1.0, 1.0)
    )
    return Comparison(
        before_label=before.label,
        after_label=after.label,
        domains=domains,
        mean_diff=mean,
        mean_ci_low=interval.low,
        mean_ci_high=interval.high,
        alpha=config.alpha,
    )


def _compare_domain(
    domain: str,
    rates: Sequence[tuple[Fraction, Fraction]],
    num_unpaired: int,
    multi: bool,
    p_values: tuple[float, float],
    config: ComparisonConfig,
) -> DomainComparison:
    n = len(rates)
    diffs = [float(a - b) for b, a in rates]
    before = float(sum(b for b, _ in rates) / n) if n else 0.0
    after = float(sum(a for _, a in rates) / n) if n else 0.0
    interval = _interval(rates, multi, 0.95)
    one_sided = _interval(rates, multi, 1.0 - 2.0 * config.alpha)
    detectable = detectable_effect(diffs, config.alpha, config.power)
    significant = p_values[1] <= config.alpha
    if significant and interval.low > 0.0:
        verdict = DifferenceVerdict.GAIN
    elif significant and interval.high < 0.0:
        verdict = DifferenceVerdict.LOSS
    elif detectable <= config.min_effect:
        verdict = DifferenceVerdict.NO_DIFFERENCE
    else:
        verdict = DifferenceVerdict.UNDERPOWERED
    return DomainComparison(
        domain=domain,
        n=n,
        num_unpaired=num_unpaired,
        before=before,
        after=after,
        diff=after - before,
        ci_low=interval.low,
        ci_high=interval.high,
        one_sided_low=one_sided.low,
        p_value=p_values[0],
        p_holm=p_values[1],
        detectable=detectable,
        verdict=verdict,
        diffs=tuple(diffs),
    )


def _interval(
    rates: Sequence[tuple[Fraction, Fraction]], multi: bool, confidence: float
) -> Interval:
    if multi:
        return cluster_bootstrap([float(a - b) for b, a in rates], confidence)
    only_after = sum(a > b for b, a in rates)
    only_before = sum(a < b for b, a in rates)
    return tango_paired(only_after, only_before, len(rates), confidence)


def _paired_rates(
    before: EvaluationResult, after: EvaluationResult, domain: str
) -> tuple[list[tuple[Fraction, Fraction]], int]:
    old, new = before.by_task(domain), after.by_task(domain)
    paired = [i for i in before.suite.indices[domain] if old[i] and new[i]]
    rates = [(_rate(old[i]), _rate(new[i])) for i in paired]
    return rates, len(old) - len(paired)


def _rate(samples: Sequence[SampleResult]) -> Fraction:
    return Fraction(sum(bool(s.passed) for s in samples), len(samples))


def _check_paired(before: EvaluationResult, after: EvaluationResult) -> None:
    if before.suite.digest != after.suite.digest:
        raise UserError(
            f"{before.label!r} and {after.label!r} were evaluated on different suites "
            f"({before.suite.digest[:19]}... and {after.suite.digest[:19]}...).",
            fix="evaluate both with the same domains, tasks, sampling and environment versions.",
        )
    expected = [(r.domain, r.index, r.sample) for r in before.suite.samples()]
    for result in (before, after):
        if [(s.domain, s.index, s.sample) for s in result.samples] != expected:
            raise UserError(
                f"{result.label!r} has {len(result.samples)} samples that do not match the "
                f"{len(expected)} of its suite.",
                fix="finish that evaluation, or run it again.",
            )
