"""Memory for a cache."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.model.kernels.memory import lazy_zeros


def zeros(size: Seq[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [size]; this machine's memory is taken only as it is touched."""
    if device.type != "cpu":
        return torch.zeros(tuple(size), dtype=dtype, device=device)
    return lazy_zeros(*size, dtype=dtype)
