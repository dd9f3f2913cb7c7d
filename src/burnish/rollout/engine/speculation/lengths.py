"""How many tokens to guess for each sequence: as many as make tokens cheaper. Pure.

A token at depth j of a draft is accepted with probability rate ** j. Depth by depth, those guesses
are taken that raise expected tokens over expected cost, the likeliest first.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple


class Prices(NamedTuple):
    """Costs in one unit, whichever."""

    step: float
    """The step without any draft."""
    token: float
    """One more token to check."""
    level: float = 0.0
    """One more forward of the drafting model."""
    level_token: float = 0.0
    """One more row in that forward."""


def choose_lengths(rates: Seq[float], most: Seq[int], prices: Prices) -> list[int]:
    """Tokens to draft for each sequence.

    Args:
        rates: probability that a drafted token is accepted if those before it were.
        most: tokens that could be drafted.
        prices: of the step and of what drafts add.
    """
    lengths = [0] * len(rates)
    tokens, cost = float(len(rates)), prices.step
    each = prices.token + prices.level_token
    for depth in range(1, max(most, default=0) + 1):
        # Only who has all the tokens before this one can have it.
        able = [i for i in range(len(rates)) if most[i] >= depth and lengths[i] == depth - 1]
        able.sort(key=lambda i: -rates[i])
        best, num_best = tokens / cost, 0
        gained, spent = tokens, cost + prices.level
        for count, i in enumerate(able, 1):
            gained += rates[i] ** depth
            spent += each
            if gained / spent > best:
                best, num_best = gained / spent, count
        if not num_best:
            break
        for i in able[:num_best]:
            lengths[i] = depth
            tokens += rates[i] ** depth
        cost += prices.level + num_best * each
    return lengths
