"""Rejection sampling of drafted tokens (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

A token drawn from q is kept with probability min(1, p / q), else one is drawn from the normalised
max(0, p - q). What comes out is distributed as p, whatever q is.

Shapes: V vocabulary. Distributions are fp64.
"""

import torch
from torch import Tensor


def acceptance(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """Probability of keeping `token`, which was drawn from q."""
    drafted, wanted = float(q_V[token]), float(p_V[token])
    assert drafted > 0.0, "a token was drafted that its distribution does not contain"
    return min(1.0, wanted / drafted)


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """What is drawn from after a rejection, normalised."""
    rest_V = (p_V - q_V).clamp_min(0.0)
    total = rest_V.sum()
    # Equal distributions reject nothing, but for rounding: then any draw from p will do.
    return rest_V / total if float(total) > 0.0 else p_V / p_V.sum()


def outcomes(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Distribution of what comes out, summed over all drafts and both branches."""
    kept_V = torch.minimum(p_V, q_V)
    return kept_V + (q_V.sum() - kept_V.sum()) * residual(p_V, q_V)


def invert(p_V: Tensor, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of a distribution, never one of probability 0."""
    cumulative_V = p_V.cumsum(0)
    end = cumulative_V[-1]
    target = torch.minimum(end * uniform, torch.nextafter(end, torch.zeros_like(end)))
    return int(torch.searchsorted(cumulative_V, target, right=True))
