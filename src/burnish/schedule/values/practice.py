"""How pass rates rise with practice: logistic lines over the logarithm of what was practised.

    logit(pass rate of a band) = its own constant + speed * log(practice)

Practice counts rollouts by what they can teach, the square of their group's spread. Over its
logarithm, learning curves are nearly straight; over rollouts they are not, and a line through them
remembers a slope that is long gone. Bands of difficulty share a speed but not a level, so that
practising harder items than before does not look like getting worse. The speed is one step of
Fisher scoring from the mean rates, a ratio of two discounted sums:

    speed = sum_k S_uy / sum_k p (1 - p) S_uu,    variance = dispersion / sum_k p (1 - p) S_uu

Domains that do not move at all (coins, plateaus) and those that do are two populations: speeds are
shrunk towards a mixture of both, fitted to all domains (empirical Bayes). A pass rate that falls
far below its line means that the domain is another one now: its line is begun anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from burnish.schedule.values.columns import Columns, Floats

# Practice that a domain begins with: this part of the domains' mean, and a few groups. It keeps the
# logarithm of the first groups from swallowing everything after them.
_HEAD_START = 0.15
_HEAD_START_ROLLOUTS = 30.0
# A line forgets by a factor e whenever practice grows by e ** 0.8 = 2.2: rates bend on that scale,
# since a band nears its top while the next one starts.
_MEMORY = 0.8
# Before anything is known, log odds grow in proportion with log practice.
_PRIOR_SPEED = 1.0
# Standard deviation of the speeds of domains that move, and of those that do not, relative to the
# mean of the former.
_MOVING_SPREAD = 1.0
_STILL_SPREAD = 0.1
# Part of the domains that is expected to move, and how many domains this belief weighs as much as.
_MOVING_RATIO = 0.5
_MOVING_WEIGHT = 4.0
# Rounds of expectation and maximisation: the fit starts near its end, and only shapes a prior.
_FIT_ROUNDS = 3
# Observations that the binomial noise counts as before the noise of a domain itself is known.
_NOISE_WEIGHT = 4.0
# Steps are averaged over about ten, so that a slow fall adds up; at 4 standard deviations there is
# about one false alarm in 30,000 steps of a domain. What was known then counts a twentieth.
_FALL_MEMORY = 0.9
_FALL_ALARM = -4.0
_KEPT_AFTER_FALL = 0.05
# Rollouts that a band needs before its rate can be said to fall, and that what is known of a band
# never fades below: an easy band that is not drawn any more is still passed.
_MIN_ROLLOUTS = 8.0
# What a domain may gain that its bands do not show.
_HIDDEN_REACH = 0.1

_SUMS = ("rollouts", "mean_u", "mean_y", "suu", "suy", "syy", "points")
_FADING = ("rollouts", "suu", "suy", "syy", "points")


class Speeds(NamedTuple):
    """Growth of log odds per log practice, a row per domain."""

    mean_D: Floats
    """Posterior mean."""
    sd_D: Floats
    """Posterior standard deviation."""


class PracticeCurves:
    """Lines of all domains in constant memory, numerically centred (West 1979)."""

    def __init__(self, num_rows: int, num_bands: int) -> None:
        """Nobody has practised."""
        self._bands = Columns(num_rows, dict.fromkeys(_SUMS, 0.0), width=num_bands)
        self._rows = Columns(num_rows, {"practice": 0.0, "fall": 0.0, "noise": 1.0})
        self._rates_DK: Floats | None = None

    def depth(self) -> Floats:
        """Practice so far, head start included."""
        practice = self._rows["practice"]
        depth: Floats = practice + _HEAD_START * practice.mean() + _HEAD_START_ROLLOUTS
        return depth

    def rates(self) -> Floats:
        """Recent pass rates by band; one half where there is nothing."""
        if self._rates_DK is None:
            num_DK = self._bands["rollouts"]
            self._rates_DK = (self._bands["mean_y"] * num_DK + 0.5) / (num_DK + 1.0)
        return self._rates_DK

    def level(self) -> Floats:
        """Mean pass rate over the bands that were seen; one half where none was."""
        seen_DK = self._bands["rollouts"] >= 1.0
        total_D = np.where(seen_DK, self.rates(), 0.0).sum(axis=1)
        num_D = seen_DK.sum(axis=1)
        level: Floats = np.where(num_D > 0, total_D / np.maximum(num_D, 1), 0.5)
        return level

    def add(self, scored_DK: Floats, passed_DK: Floats, practice_D: Floats) -> None:
        """Take a step's rollouts, which were worth `practice_D`."""
        rows, before_D = self._rows, np.log(self.depth())
        rate_DK = passed_DK / np.maximum(scored_DK, 1.0)
        rows["practice"] = rows["practice"] + practice_D
        self._restart(self._fallen(scored_DK, rate_DK))
        now_D = np.log(self.depth())
        # A restart, or newcomers who lower the mean, move the axis back: that forgets nothing.
        keep_D = np.exp(-np.maximum(now_D - before_D, 0.0) / _MEMORY)
        self._take(scored_DK, rate_DK, now_D[:, None], keep_D[:, None])
        rows["noise"] = self._dispersion()

    def speeds(self) -> Speeds:
        """Posterior speeds under a prior fitted to all domains."""
        speed_D, information_D = self._raw()
        known = information_D > 1e-12
        variance_D = np.where(known, self._rows["noise"] / np.maximum(information_D, 1e-12), 1e12)
        return _shrunk(speed_D, variance_D)

    def reach(self) -> Floats:
        """What a domain's pass rate would gain per unit of log odds, by what its bands show.

        Harder bands become what the easiest is now, so the distance between the best band and the
        mean of all is what is left to gain. Bands that pass alike have nowhere to go, whether they
        are mastered, hopeless or coins. With a single band the rate itself must do.
        """
        seen_DK = self._bands["rollouts"] >= 1.0
        best_D = np.where(seen_DK, self.rates(), 0.0).max(axis=1)
        mean_D = self.level()
        among_D = 0.5 * (best_D - mean_D + _HIDDEN_REACH)
        reach: Floats = np.where(seen_DK.sum(axis=1) > 1, among_D, mean_D * (1.0 - mean_D))
        return reach

    def _fallen(self, scored_DK: Floats, rate_DK: Floats) -> Floats:
        """1 where a pass rate has fallen far below its line, else 0."""
        rows, bands = self._rows, self._bands
        usual_DK = self.rates()
        known_DK = (scored_DK > 0.0) & (bands["rollouts"] > _MIN_ROLLOUTS)
        num_D = known_DK.sum(axis=1)
        error_DK = 1.0 / np.maximum(scored_DK, 1.0) + 1.0 / np.maximum(bands["rollouts"], 1.0)
        sd_DK = np.sqrt(usual_DK * (1.0 - usual_DK) * error_DK * rows["noise"][:, None])
        z_D = np.where(known_DK, (rate_DK - usual_DK) / sd_DK, 0.0).sum(axis=1)
        z_D = z_D / np.sqrt(np.maximum(num_D, 1))
        # The scale keeps the variance of a steady domain at 1.
        fall = _FALL_MEMORY * rows["fall"] + np.sqrt(1.0 - _FALL_MEMORY**2) * z_D
        rows["fall"] = np.where(num_D > 0, np.minimum(fall, 0.0), rows["fall"])
        fallen: Floats = (rows["fall"] < _FALL_ALARM).astype(np.float64)
        return fallen

    def _restart(self, fallen_D: Floats) -> None:
        """Forget what fallen domains were."""
        if not fallen_D.any():
            return
        for name in ("practice", "fall"):
            self._rows[name] = self._rows[name] * (1.0 - fallen_D)
        keep_D = 1.0 - (1.0 - _KEPT_AFTER_FALL) * fallen_D
        for name in _FADING:
            self._bands[name] = self._bands[name] * keep_D[:, None]
        self._rates_DK = None

    def _take(self, scored_DK: Floats, rate_DK: Floats, u_D1: Floats, keep_D1: Floats) -> None:
        bands, before_DK = self._bands, self._bands["rollouts"]
        old_DK = np.maximum(before_DK * keep_D1, np.minimum(before_DK, _MIN_ROLLOUTS))
        total_DK = old_DK + scored_DK
        part_DK = scored_DK / np.maximum(total_DK, 1e-300)
        du, dy = u_D1 - bands["mean_u"], rate_DK - bands["mean_y"]
        kept_DK = scored_DK * (1.0 - part_DK)
        bands["suu"] = bands["suu"] * keep_D1 + kept_DK * du * du
        bands["suy"] = bands["suy"] * keep_D1 + kept_DK * du * dy
        bands["syy"] = bands["syy"] * keep_D1 + kept_DK * dy * dy
        bands["mean_u"] = bands["mean_u"] + part_DK * du
        bands["mean_y"] = bands["mean_y"] + part_DK * dy
        bands["rollouts"] = total_DK
        bands["points"] = bands["points"] * keep_D1 + (scored_DK > 0.0)
        self._rates_DK = None

    def _raw(self) -> tuple[Floats, Floats]:
        """Speeds by themselves, 0 while undefined, and the information behind them."""
        bands, rate_DK = self._bands, self.rates()
        information_D = (rate_DK * (1.0 - rate_DK) * bands["suu"]).sum(axis=1)
        score_D = bands["suy"].sum(axis=1)
        known = information_D > 1e-12
        speed_D = np.where(known, score_D / np.where(known, information_D, 1.0), 0.0)
        return speed_D, information_D

    def _dispersion(self) -> Floats:
        """Variance around the lines over that of a binomial, at least 1.

        Groups of one item pass or fail together more often than items drawn anew.
        """
        bands, rate_DK = self._bands, self.rates()
        speed_D, _ = self._raw()
        binomial_DK = rate_DK * (1.0 - rate_DK)
        slope_DK = speed_D[:, None] * binomial_DK
        residual_DK = bands["syy"] - 2.0 * slope_DK * bands["suy"] + slope_DK**2 * bands["suu"]
        relative_D = (np.maximum(residual_DK, 0.0) / binomial_DK).sum(axis=1)
        points_D = bands["points"].sum(axis=1)
        noise: Floats = np.maximum((relative_D + _NOISE_WEIGHT) / (points_D + _NOISE_WEIGHT), 1.0)
        return noise

    def add_row(self) -> None:
        """One more domain."""
        self._bands.add_row()
        self._rows.add_row()
        self._rates_DK = None

    def remove_row(self, row: int) -> None:
        """One less."""
        self._bands.remove_row(row)
        self._rows.remove_row(row)
        self._rates_DK = None

    def state(self) -> dict[str, Any]:
        """Both tables."""
        return {"bands": self._bands.state(), "rows": self._rows.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take both over."""
        self._bands.load(state["bands"])
        self._rows.load(state["rows"])
        self._rates_DK = None


def _shrunk(speed_D: Floats, variance_D: Floats) -> Speeds:
    """Posterior under "still, or moving about as fast as those that move"."""
    mean, ratio = _PRIOR_SPEED, _MOVING_RATIO
    for _ in range(_FIT_ROUNDS):
        moving, still = (_MOVING_SPREAD * mean) ** 2, (_STILL_SPREAD * mean) ** 2
        moving_D, still_D = variance_D + moving, variance_D + still
        odds_D = (speed_D**2 / still_D - (speed_D - mean) ** 2 / moving_D) / 2.0
        odds_D = odds_D + 0.5 * np.log(still_D / moving_D) + np.log(ratio / (1.0 - ratio))
        moves_D = 1.0 / (1.0 + np.exp(-np.clip(odds_D, -50.0, 50.0)))
        weight_D = moves_D / moving_D
        # The prior weighs as much as one domain that is known for sure.
        total = float((weight_D * speed_D).sum()) + _PRIOR_SPEED / moving
        mean = max(total / (float(weight_D.sum()) + 1.0 / moving), 0.1 * _PRIOR_SPEED)
        num = float(moves_D.sum()) + _MOVING_WEIGHT * _MOVING_RATIO
        ratio = num / (len(speed_D) + _MOVING_WEIGHT)
    moving_mean = (mean * variance_D + speed_D * moving) / (variance_D + moving)
    moving_var = variance_D * moving / (variance_D + moving)
    still_mean = speed_D * still / (variance_D + still)
    between = moves_D * (1.0 - moves_D) * (moving_mean - still_mean) ** 2
    posterior = moves_D * moving_mean + (1.0 - moves_D) * still_mean
    return Speeds(posterior, np.sqrt(moves_D * moving_var + between))
