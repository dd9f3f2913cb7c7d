"""What a report shows, as plain records: the seam between the store and the page.

Rates and scores are ratios in [0, 1]; differences are ratios too and are shown as points.
"""

from typing import Literal

import msgspec

from burnish.core.records import Record


class DomainResult(Record, frozen=True, kw_only=True):
    """Held-out pass rates of one domain, with paired 95 % intervals of the differences."""

    name: str
    """Domain."""
    n: int
    """Held-out tasks."""
    before: float
    """Pass rate of the base model."""
    warmed: float | None = None
    """Pass rate after the supervised warm-up, if there was one."""
    after: float
    """Pass rate at the end."""
    diff: float
    """after - before."""
    ci_low: float
    """Lower end of its interval."""
    ci_high: float
    """Upper end."""
    rl_diff: float | None = None
    """after - warmed: what reinforcement learning added, if there was a warm-up."""
    rl_ci_low: float | None = None
    """Lower end of its interval."""
    rl_ci_high: float | None = None
    """Upper end."""

    @property
    def direction(self) -> Literal["up", "down", "flat"]:
        """Which side of zero the whole interval lies on."""
        if self.ci_low > 0:
            return "up"
        return "down" if self.ci_high < 0 else "flat"


class LostDomain(Record, frozen=True, kw_only=True):
    """A domain without a held-out result: it was shut out on the way."""

    name: str
    """Domain."""
    before: float | None = None
    """Pass rate of the base model, if it was measured."""
    warmed: float | None = None
    """Pass rate after the warm-up, if it was measured."""


class Interval(Record, frozen=True, kw_only=True):
    """A difference and its paired 95 % interval, if it has one."""

    diff: float
    """The difference, as a ratio."""
    low: float | None = None
    """Lower end."""
    high: float | None = None
    """Upper end."""


class Curve(Record, frozen=True, kw_only=True):
    """Training rewards of one domain over the steps in which it was trained."""

    domain: str
    """Domain."""
    steps: tuple[int, ...]
    """Step numbers, rising."""
    reward: tuple[float, ...]
    """Mean score per step."""
    pass_rate: tuple[float, ...]
    """Pass rate per step."""


class LedgerView(Record, frozen=True, kw_only=True):
    """Where every dispatched rollout went."""

    dispatched: int
    """Rollouts started."""
    trained: int
    """Rollouts that a gradient saw."""
    in_flight: int
    """Rollouts not yet decided."""
    dropped: dict[str, int]
    """Rollouts dropped, by reason."""

    @property
    def num_dropped(self) -> int:
        """All drops."""
        return sum(self.dropped.values())

    @property
    def missing(self) -> int:
        """Dispatched - trained - in flight - dropped: anything but 0 is a bug."""
        return self.dispatched - self.trained - self.in_flight - self.num_dropped


class FailureCount(Record, frozen=True, kw_only=True):
    """Failures of one kind at one place."""

    kind: str
    """Who is to blame."""
    where: str
    """Component and operation."""
    message: str
    """The first message."""
    count: int
    """How often."""


class Panel(Record, frozen=True, kw_only=True):
    """One metric over the steps."""

    title: str
    """What it is called on the page."""
    unit: str
    """Unit of the values, may be empty."""
    meaning: str
    """One sentence for people."""
    steps: tuple[int, ...]
    """Step numbers, rising."""
    values: tuple[float, ...]
    """One value per step."""


class LengthRow(Record, frozen=True, kw_only=True):
    """Sampled tokens per rollout: do trained ones look like finished ones?"""

    domain: str
    """Domain."""
    num_all: int
    """Scored rollouts."""
    mean_all: float
    """Their mean length in tokens."""
    tail_all: float
    """Their 90th percentile."""
    num_trained: int
    """Trained ones among them."""
    mean_trained: float
    """Their mean length."""
    tail_trained: float
    """Their 90th percentile."""


class Shares(Record, frozen=True, kw_only=True):
    """How the scheduler split the work between domains, step by step."""

    steps: tuple[int, ...]
    """Step numbers, rising."""
    by_domain: dict[str, tuple[float, ...]]
    """Share per step; the shares of a step sum to 1."""


class Piece(Record, frozen=True, kw_only=True):
    """A stretch of text with the credit it got."""

    text: str
    """The text; whatever a model wrote, so never markup."""
    advantage: float | None = None
    """What the loss was weighted with, None where nothing was trained."""


class Speech(Record, frozen=True, kw_only=True):
    """One message of a transcript."""

    role: str
    """Who speaks."""
    pieces: tuple[Piece, ...]
    """What was said."""


class Attempt(Record, frozen=True, kw_only=True):
    """One judged episode."""

    speeches: tuple[Speech, ...]
    """What followed the prompt."""
    outcome: str
    """`scored` or why not."""
    score: float | None
    """Score, if scored."""
    passed: bool | None
    """Whether it counts as passed."""
    credits: tuple[tuple[str, float, str], ...] = ()
    """Source, value and note of each part of the score."""


class Sample(Record, frozen=True, kw_only=True):
    """The same held-out task before and after."""

    domain: str
    """Domain."""
    index: int
    """Position in the held-out pool."""
    why: str
    """Why this task is shown: chosen before looking, or because the result changed."""
    prompt: str
    """What the model was asked."""
    before: Attempt | None
    """The base model's attempt."""
    after: Attempt | None
    """The trained model's attempt."""


class TokenView(Record, frozen=True, kw_only=True):
    """One trained rollout as the trainer saw it."""

    domain: str
    """Domain."""
    why: str
    """Why this one of its group: best or worst."""
    rollout_id: str
    """Its id in the ledger."""
    score: float | None
    """Its score."""
    pieces: tuple[Piece, ...]
    """Tokens after the prompt."""


class Origin(Record, frozen=True, kw_only=True):
    """A configuration value and where it came from."""

    key: str
    """Dotted key."""
    value: str
    """As it would be written in the file."""
    origin: str
    """default, file and line, or flag."""


class Gate(Record, frozen=True, kw_only=True):
    """What the audit said about one environment."""

    name: str
    """Environment."""
    passed: bool
    """False means quarantined."""
    detail: str
    """What failed, or what was checked."""


class CanaryFact(Record, frozen=True, kw_only=True):
    """One finding of the served-weights canary."""

    name: str
    """What was found out, in words."""
    value: str
    """The value with its unit."""
    meaning: str
    """What it tells."""


class ReportData(Record, frozen=True, kw_only=True):
    """Everything on the page. Empty parts are left out of it."""

    title: str
    """Name of the run."""
    model: str
    """Name of the model."""
    status: str
    """`complete`, or what a reader should know instead."""
    wall_s: float | None
    """Wall time of the run in seconds."""
    peak_rss_bytes: int | None
    """Highest resident memory."""
    num_steps: int
    """Training steps done."""
    domains: tuple[DomainResult, ...]
    """The headline table."""
    lost: tuple[LostDomain, ...] = ()
    """Domains without a result."""
    mean_gain: Interval | None = None
    """Mean over domains of after - before."""
    mean_rl_gain: Interval | None = None
    """Mean over domains of after - warmed, if there was a warm-up."""
    steps_with_gradient: int | None = None
    """Training steps that had a gradient; None if unknown."""
    quarantined: dict[str, str] = msgspec.field(default_factory=dict)
    """Domains that were shut out, before or during training, and why."""
    problems: tuple[str, ...] = ()
    """Parts of the run directory that are missing or cannot be read."""
    curves: tuple[Curve, ...]
    """Reward curves."""
    ledger: LedgerView
    """Conservation."""
    failures: tuple[FailureCount, ...]
    """Failures, most frequent first."""
    panels: tuple[Panel, ...]
    """Throughput, lag and the like."""
    bottleneck: str
    """Who waited for whom, in one sentence; empty if unknown."""
    lengths: tuple[LengthRow, ...]
    """Length audit."""
    shares: Shares | None
    """Scheduler shares."""
    samples: tuple[Sample, ...]
    """Before and after."""
    token_views: tuple[TokenView, ...]
    """Inside trained rollouts."""
    gates: tuple[Gate, ...]
    """Audit of the environments."""
    canary: tuple[CanaryFact, ...]
    """The served-weights canary."""
    facts: tuple[tuple[str, str], ...]
    """Versions, hardware, seed, paths."""
    config: tuple[Origin, ...]
    """Resolved configuration."""
