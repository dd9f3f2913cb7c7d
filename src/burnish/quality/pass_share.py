"""Whether a policy that does not think passes often: an exact test on as few plays as it takes."""

from __future__ import annotations

import math

MAX_SHARE = 0.5
"""A policy that never reads the question may be right by chance on this share of the tasks."""

# A sound environment at MAX_SHARE itself is refused at one look in a thousand. Domains with ten
# likely answers are far below it: for them refusal by chance is out of reach.
_ERROR = 1e-3

LOOKS = (10, 20, 40, 80, 160, 320)
"""Numbers of plays after which the test may end. Ten equal outcomes are the fewest that decide;
at the last look a share of 0.6 is refused four times in five, one of 0.65 as good as always."""


def surely_above(wins: int, plays: int) -> bool:
    """The exact (Clopper-Pearson) lower bound of the pass share exceeds MAX_SHARE."""
    return _tail(wins, plays) < _ERROR


def surely_below(wins: int, plays: int) -> bool:
    """The exact upper bound of the pass share is less than MAX_SHARE."""
    # P(at most `wins`) at a share s is P(at least `plays - wins`) at 1 - s, which is s here.
    return _tail(plays - wins, plays) < _ERROR


def _tail(wins: int, plays: int) -> float:
    """Probability of at least `wins` in `plays` fair coin flips: MAX_SHARE is one half."""
    assert MAX_SHARE == 0.5
    return sum(math.comb(plays, k) for k in range(wins, plays + 1)) / (1 << plays)
