"""Is training length-unbiased? Compares what was trained with all that could have been.

Asynchronous systems like short answers: they come back first, and if the rest is dropped as stale
the policy is taught brevity by the plumbing. The audit compares, domain by domain, the lengths of
trained rollouts with those that were judged and trainable but left out (stale, surplus, or still
waiting). Content-based exclusions (zero variance, invalid) are taken out of both sides: they may
depend on length for good reasons.

Test: Mann-Whitney U with tie correction, summed over domains, on lengths binned to
1/8 octave so that memory is constant. Reported as biased only if it is both significant and large:
a backlog of a few groups always differs a little from the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from pydantic import Field

from burnish.core.config import Config
from burnish.core.records import Record
from burnish.schedule.state_version import require_version

STATE_VERSION = 1
_BINS_PER_OCTAVE = 8


class LengthAuditConfig(Config):
    """When a difference counts as a bias."""

    alpha: float = Field(default=0.001, gt=0.0, lt=1.0, allow_inf_nan=False)
    """Significance: looked at after every step, so well below the usual 0.05."""
    tolerance_ratio: float = Field(default=0.02, gt=0.0, allow_inf_nan=False)
    """Mean length of trained over trainable rollouts may differ from 1 by this much."""


class LengthBias(Record, frozen=True, kw_only=True):
    """Comparison for one domain, or for all together (`domain` is then empty)."""

    domain: str
    """Environment name."""
    num_trained: int
    """Rollouts trained."""
    num_trainable: int
    """Rollouts that were judged and not excluded for their content."""
    mean_trained_tokens: float
    """Mean sampled tokens of the trained ones."""
    mean_trainable_tokens: float
    """Mean sampled tokens of all trainable ones."""
    mean_ratio: float
    """The former over the latter; 1.0 when nothing was trained. Over all domains: weighted by the
    trained rollouts of each, so that the mix of domains does not matter."""
    z: float
    """Mann-Whitney statistic; negative when the trained ones are shorter."""
    p_value: float
    """Two-sided."""
    biased: bool
    """Significant and beyond the tolerance."""


class _Lengths:
    """Binned counts and exact totals of one side."""

    def __init__(self) -> None:
        self.num = 0
        self.tokens = 0
        self.bins: dict[int, int] = {}

    def add(self, num_tokens: int, sign: int = 1) -> None:
        self.num += sign
        self.tokens += sign * num_tokens
        bin_ = round(_BINS_PER_OCTAVE * math.log2(num_tokens + 1))
        self.bins[bin_] = self.bins.get(bin_, 0) + sign
        assert self.bins[bin_] >= 0, "a length left that never came"


class LengthAudit:
    """Counts lengths as rollouts are judged, trained and excluded."""

    def __init__(self, config: LengthAuditConfig) -> None:
        """Nothing seen."""
        self._config = config
        self._trainable: dict[str, _Lengths] = {}
        self._trained: dict[str, _Lengths] = {}

    def completed(self, domain: str, num_tokens: int) -> None:
        """A rollout was judged; every one is reported, whatever becomes of it."""
        self._trainable.setdefault(domain, _Lengths()).add(num_tokens)

    def excluded(self, domain: str, num_tokens: int) -> None:
        """A judged rollout was dropped for its content (`zero_variance`, `invalid`, ...)."""
        self._trainable[domain].add(num_tokens, sign=-1)

    def trained(self, domain: str, num_tokens: int) -> None:
        """A judged rollout went into a batch."""
        self._trained.setdefault(domain, _Lengths()).add(num_tokens)

    def report(self) -> tuple[LengthBias, ...]:
        """One row for all domains together, then one for each."""
        rows, u_sum, variance_sum, expected_tokens = [], 0.0, 0.0, 0.0
        for domain, trainable in self._trainable.items():
            trained = self._trained.get(domain, _Lengths())
            u, variance = _mann_whitney(trained.bins, trainable.bins)
            u_sum, variance_sum = u_sum + u, variance_sum + variance
            mean = trainable.tokens / trainable.num if trainable.num else 0.0
            expected_tokens += trained.num * mean
            rows.append(self._row(domain, trained, trainable, u, variance, trained.num * mean))
        all_trained, all_trainable = _Lengths(), _Lengths()
        for total, parts in (
            (all_trained, self._trained.values()),
            (all_trainable, self._trainable.values()),
        ):
            total.num = sum(p.num for p in parts)
            total.tokens = sum(p.tokens for p in parts)
        overall = self._row("", all_trained, all_trainable, u_sum, variance_sum, expected_tokens)
        return (overall, *rows)

    def _row(
        self,
        domain: str,
        trained: _Lengths,
        trainable: _Lengths,
        u: float,
        variance: float,
        expected_tokens: float,
    ) -> LengthBias:
        z = u / math.sqrt(variance) if variance > 0.0 else 0.0
        p_value = 2.0 * NormalDist().cdf(-abs(z))
        ratio = trained.tokens / expected_tokens if expected_tokens > 0.0 else 1.0
        return LengthBias(
            domain=domain,
            num_trained=trained.num,
            num_trainable=trainable.num,
            mean_trained_tokens=trained.tokens / trained.num if trained.num else 0.0,
            mean_trainable_tokens=trainable.tokens / trainable.num if trainable.num else 0.0,
            mean_ratio=ratio,
            z=z,
            p_value=p_value,
            biased=p_value < self._config.alpha and abs(ratio - 1.0) > self._config.tolerance_ratio,
        )

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values."""
        return {
            "version": STATE_VERSION,
            "trainable": {d: _dump(v) for d, v in self._trainable.items()},
            "trained": {d: _dump(v) for d, v in self._trained.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: LengthAuditConfig) -> LengthAudit:
        """Continue exactly where `state` was taken.

        Raises:
            UserError: if another version of the program wrote it.
        """
        require_version(state, STATE_VERSION, "length audit")
        audit = cls(config)
        audit._trainable = {d: _load(v) for d, v in state["trainable"].items()}
        audit._trained = {d: _load(v) for d, v in state["trained"].items()}
        return audit


def _dump(lengths: _Lengths) -> list[Any]:
    return [lengths.num, lengths.tokens, [[b, n] for b, n in lengths.bins.items()]]


def _load(state: list[Any]) -> _Lengths:
    lengths = _Lengths()
    lengths.num, lengths.tokens = state[0], state[1]
    lengths.bins = dict(state[2])
    return lengths


def _mann_whitney(trained: Mapping[int, int], trainable: Mapping[int, int]) -> tuple[float, float]:
    """U of the trained against the left-out, centred, and its null variance with ties."""
    below = u = ties = 0.0
    num_trained = float(sum(trained.values()))
    num = float(sum(trainable.values()))
    num_left = num - num_trained
    for bin_ in sorted(trainable):
        inside, all_inside = trained.get(bin_, 0), trainable[bin_]
        left = all_inside - inside
        assert left >= 0, "trained without having been completed"
        u += inside * (below + 0.5 * left)
        below += left
        ties += float(all_inside) ** 3 - all_inside
    if num_trained == 0.0 or num_left == 0.0 or num < 2.0:
        return 0.0, 0.0
    variance = num_trained * num_left / 12.0 * (num + 1.0 - ties / (num * (num - 1.0)))
    return u - 0.5 * num_trained * num_left, max(variance, 0.0)
