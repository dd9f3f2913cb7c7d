"""Which tier of difficulty a domain's next group comes from.

Pass rates per tier are Beta posteriors that forget (MoPPS, arXiv 2507.04632). Thompson sampling
takes
the open tier whose draw lies nearest to one half, where groups carry most gradient. The ladder
opens the next tier when the highest open one is mastered for sure, or the next one is known to be
in reach, and closes the highest one when it is hopeless for sure; between the two thresholds
nothing happens, so noise cannot make it flap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.schedule.values.columns import Bools, Floats, Ints

TARGET_RATE = 0.5
# Discount per visit, and the most rollouts that a posterior may stand for: a policy that learns
# makes old evidence wrong.
_DISCOUNT = 0.97
_MOST_ROLLOUTS = 400.0
# What a uniform prior counts for; a tier that was tried has more, however long ago.
_PRIOR_ROLLOUTS = 2.0
MASTERED_RATE = 0.7
HOPELESS_RATE = 0.2
# 90 % of a normal lies below this many standard deviations.
_SURE = 1.2816


class Tiers:
    """Posteriors and ladders of many domains."""

    def __init__(self, num_rows: int, num_tiers: int) -> None:
        """Uniform posteriors, only the easiest tier open."""
        self._num_tiers = num_tiers
        self._alpha_DK = np.ones((num_rows, num_tiers))
        self._beta_DK = np.ones((num_rows, num_tiers))
        self._level_D = np.zeros(num_rows, dtype=np.int64)

    @property
    def level_D(self) -> Floats:
        """Highest open tier of each domain."""
        return self._level_D.astype(np.float64)

    def mean_DK(self) -> Floats:
        """Posterior pass rates."""
        mean: Floats = self._alpha_DK / (self._alpha_DK + self._beta_DK)
        return mean

    def tried_DK(self) -> Bools:
        """Whether anything was observed; else the rate is that of the prior."""
        tried: Bools = self._alpha_DK + self._beta_DK > _PRIOR_ROLLOUTS
        return tried

    def observe(self, completed_DK: Floats, passed_DK: Floats) -> None:
        """Learn from scored rollouts, then move the ladders."""
        seen = completed_DK > 0
        for posterior, hits in (
            (self._alpha_DK, passed_DK),
            (self._beta_DK, completed_DK - passed_DK),
        ):
            posterior[seen] = (1.0 + (posterior - 1.0) * _DISCOUNT + hits)[seen]
        scale = np.minimum(1.0, _MOST_ROLLOUTS / (self._alpha_DK + self._beta_DK))
        self._alpha_DK *= scale
        self._beta_DK *= scale
        self._climb()

    def choose(self, rng: np.random.Generator) -> Ints:
        """The tier of each domain's next group."""
        draw = rng.beta(self._alpha_DK, self._beta_DK)
        distance = np.abs(draw - TARGET_RATE)
        closed = np.arange(self._num_tiers)[None, :] > self._level_D[:, None]
        chosen: Ints = np.where(closed, np.inf, distance).argmin(axis=1)
        return chosen

    def _climb(self) -> None:
        mean = self.mean_DK()
        sd = np.sqrt(mean * (1.0 - mean) / (self._alpha_DK + self._beta_DK + 1.0))
        rows, level = np.arange(len(self._level_D)), self._level_D
        above = np.minimum(level + 1, self._num_tiers - 1)
        mastered = self._surely(mean - MASTERED_RATE, sd)[rows, level]
        reachable = self._surely(mean - HOPELESS_RATE, sd)[rows, above]
        hopeless_DK = self._surely(HOPELESS_RATE - mean, sd)
        hopeless = hopeless_DK[rows, level]
        # Else a mastered tier below a hopeless one would open it again at once.
        up = ((mastered & ~hopeless_DK[rows, above]) | reachable) & (level < self._num_tiers - 1)
        down = hopeless & (level > 0) & ~up
        self._level_D = level + up - down

    @staticmethod
    def _surely(margin: Floats, sd: Floats) -> Bools:
        sure: Bools = margin > _SURE * sd
        return sure

    def add_row(self) -> None:
        """One more domain."""
        fresh = np.ones((1, self._num_tiers))
        self._alpha_DK = np.concatenate((self._alpha_DK, fresh))
        self._beta_DK = np.concatenate((self._beta_DK, fresh))
        self._level_D = np.append(self._level_D, 0)

    def remove_row(self, row: int) -> None:
        """One less."""
        self._alpha_DK = np.delete(self._alpha_DK, row, axis=0)
        self._beta_DK = np.delete(self._beta_DK, row, axis=0)
        self._level_D = np.delete(self._level_D, row)

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {
            "alpha": self._alpha_DK.tolist(),
            "beta": self._beta_DK.tolist(),
            "level": self._level_D.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._alpha_DK = np.array(state["alpha"], dtype=np.float64)
        self._beta_DK = np.array(state["beta"], dtype=np.float64)
        self._level_D = np.array(state["level"], dtype=np.int64)
