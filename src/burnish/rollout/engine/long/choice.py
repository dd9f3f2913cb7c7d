"""Block-sparse selection: the pages whose keys may score highest for a query (Quest, Tang 2024).

Shapes: K key/value heads, W pages of a row, N pages chosen.
"""

import torch
from torch import Tensor


def choose_pages(bounds_KW: Tensor, num_chosen: int, *, sinks: int, recent: int) -> Tensor:
    """Indices [K, N] of chosen pages per head, ascending.

    Args:
        bounds_KW: upper bounds on the scores of each page's keys.
        num_chosen: N, at most W and at least `sinks` + `recent`.
        sinks: first pages that are always chosen.
        recent: last pages that are always chosen.
    """
    num_pages = bounds_KW.shape[1]
    assert sinks + recent <= num_chosen <= num_pages
    ranked = torch.nan_to_num(bounds_KW, nan=torch.inf).clamp_(max=torch.finfo(torch.float32).max)
    ranked[:, :sinks] = torch.inf
    ranked[:, num_pages - recent :] = torch.inf
    return ranked.topk(num_chosen, dim=1, sorted=False).indices.sort(dim=1).values
