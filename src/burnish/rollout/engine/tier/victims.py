"""Which pages leave memory first. Pure.

LRU in which a page counts as used a little later the more its bound promises: the page that nearly
was selected is likelier to be wanted next than one that never was.
"""

import numpy as np
from numpy.typing import NDArray

# A page with the best bound that was not selected counts as used this many uses ago, one with the
# worst is left where it was.
_SCORE_USES = 8.0


def choose_victims(
    values: NDArray[np.float64], may_leave: NDArray[np.bool_], count: int
) -> NDArray[np.int64]:
    """Up to `count` indices with the least values among those that may leave."""
    candidates = np.flatnonzero(may_leave)
    if len(candidates) > count:
        order = np.argpartition(values[candidates], max(count - 1, 0))[:count]
        candidates = candidates[order]
    return candidates.astype(np.int64)


def promised(
    values: NDArray[np.float64], scores: NDArray[np.float64], now: float
) -> NDArray[np.float64]:
    """Values after the pages' bounds became known; none gets less.

    Args:
        values: when each was last used.
        scores: its bound, -inf for unknown.
        now: the present use.
    """
    finite = np.isfinite(scores)
    if not finite.any():
        return values
    low, high = scores[finite].min(), scores[finite].max()
    share = np.where(finite, (scores - low) / max(high - low, 1e-30), 0.0)
    return np.where(finite, np.maximum(values, now - _SCORE_USES / np.maximum(share, 1e-9)), values)
