"""What a simulated run is judged by."""

from __future__ import annotations

import numpy as np

from burnish.plan.learning.world import TRAPS, Kind, World
from burnish.plan.scenario import Curve, Trial
from burnish.schedule.step_scheduler import StepResult
from burnish.schedule.values.columns import Bools, Floats
from burnish.schedule.values.dealer import DEADLINE_STEPS

_NUM_POINTS = 60
_RATIO_STEPS = 20
_HACKED_WINDOW = 5


class Measures:
    """Watches a world."""

    def __init__(self, world: World) -> None:
        """Begin before its first step."""
        self._world = world
        self._first = world.true_pass().mean(axis=1)
        self._scores = [world.score()]
        self._spent = np.zeros(world.num)
        self._wait, self._gap = np.zeros(world.num), np.zeros(world.num)
        self._violations = 0
        self._tokens: list[Floats] = []
        self._hacked: list[float] = []

    def planned(self, eligible_D: Bools, rollouts_DK: Floats) -> None:
        """A step was planned: who waits?"""
        served = rollouts_DK.sum(axis=1) > 0
        self._wait = np.where(served, 0.0, self._wait + eligible_D)
        self._gap = np.maximum(self._gap, self._wait)
        self._violations += int((self._wait > DEADLINE_STEPS).sum())

    def stepped(self, result: StepResult) -> None:
        """A step was trained."""
        self._spent += result.cost_D
        self._tokens = [*self._tokens[-(_RATIO_STEPS - 1) :], result.trained_tokens_D]
        hacked = self._world.kind == Kind.HACKED
        self._hacked.append(float(result.cost_D[hacked].sum() / max(result.cost_D.sum(), 1e-9)))
        self._scores.append(self._world.score())

    def trial(self) -> Trial:
        """All figures."""
        world, spent = self._world, self._spent
        gain = world.true_pass().mean(axis=1) - self._first
        room = np.maximum(world.top - self._first, 1e-3)
        honest = np.isin(world.kind, (Kind.LEARNABLE, Kind.HARD, Kind.FLAKY))
        norm = (gain / room)[honest]
        tokens = np.sum(self._tokens, axis=0)
        target = world.active() / world.active().sum()
        metrics = {
            "auc": float(np.mean(self._scores)),
            "final": self._scores[-1],
            "gain_p5": float(np.percentile(norm, 5)),
            "trap_share": float(spent[np.isin(world.kind, TRAPS)].sum() / spent.sum()),
            "gap_p99": float(np.percentile(self._gap, 99)),
            "gap_max": float(self._gap.max()),
            "late": float(self._violations),
            "jain": float(spent.sum() ** 2 / (len(spent) * (spent**2).sum())),
            "ratio_error": float(np.abs(tokens / max(tokens.sum(), 1e-9) - target).sum()),
            "regressed": float((gain < -0.01).mean()),
            "throttle_steps": self._throttle_steps(),
        }
        return Trial(metrics, (self._curve(),))

    def _throttle_steps(self) -> float:
        """Steps from the audit until hacked domains get half of what they got; nan without any."""
        audit = self._world.audit_step
        before = np.mean(self._hacked[audit - _HACKED_WINDOW : audit])
        if not (self._world.kind == Kind.HACKED).any() or before == 0.0:
            return float("nan")
        for step in range(audit, len(self._hacked) - _HACKED_WINDOW):
            if np.mean(self._hacked[step : step + _HACKED_WINDOW]) <= 0.5 * before:
                return float(step - audit)
        return float(len(self._hacked) - audit)

    def _curve(self) -> Curve:
        size = self._world.size
        steps = np.unique(np.linspace(0, size.num_steps, _NUM_POINTS).astype(np.int64))
        points = tuple((float(s), self._scores[s]) for s in steps)
        return Curve("mean true pass rate", "training steps", points)
