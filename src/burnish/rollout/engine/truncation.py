"""The part of a distribution that top-k, min-p and top-p leave.

Candidates are sorted by probability. min-p (Nguyen et al. 2024) keeps those with at least a share
of the likeliest one's, top-k the first k; of what both leave, renormalised, top-p (Holtzman et al.
2020) keeps the smallest set with at least that mass.

Shapes: V vocabulary, K kept candidates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_CANDIDATES = 512


class Kept(NamedTuple):
    """What can be drawn, likeliest first."""

    ids_K: Tensor
    """Token ids."""
    weights_K: Tensor
    """Their unnormalised probabilities, fp64."""
    mass: Tensor
    """What the weights are shares of."""

    def pick(self, uniform: float) -> int:
        """Index of the candidate at `uniform` in [0, 1) of the weights, never one of weight 0."""
        cumulative_K = self.weights_K.cumsum(0)
        end = cumulative_K[-1]
        # Rounding must not reach the end, behind which there is nothing.
        target = torch.minimum(end * uniform, torch.nextafter(end, torch.zeros_like(end)))
        return int(torch.searchsorted(cumulative_K, target, right=True))

    def logprobs(self) -> Tensor:
        """Log-probs of the candidates, fp64."""
        return (self.weights_K / self.mass).log()


def truncate(weight_V: Tensor, total: Tensor, *, top_k: int, min_p: float, top_p: float) -> Kept:
    """Keep what may be drawn.

    Args:
        weight_V: unnormalised probabilities, the largest being 1.
        total: their sum.
        top_k: most candidates, 0 for all.
        min_p: least share of the likeliest one's probability, 0 for none.
        top_p: nucleus mass, 1 for all.
    """
    wanted = total * top_p
    values_K, ids_K = weight_V.topk(min(top_k or _CANDIDATES, weight_V.shape[0]))
    if not top_k and min_p <= float(values_K[-1]) and values_K.double().sum() < wanted:
        values_K, ids_K = weight_V.sort(descending=True, stable=True)
    allowed = int((values_K >= min_p).sum()) if min_p > 0.0 else len(values_K)
    cumulative_K = values_K[:allowed].double().cumsum(0)
    if top_k or min_p > 0.0:
        wanted = cumulative_K[-1] * top_p
    kept = min(int((cumulative_K < wanted).sum()) + 1, allowed) if top_p < 1.0 else allowed
    return Kept(ids_K[:kept], values_K[:kept].double(), cumulative_K[kept - 1])
