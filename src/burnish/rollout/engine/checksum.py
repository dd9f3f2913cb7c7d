"""A fingerprint of weights: equal state, equal digest, at the speed of memory.

Guards against mistakes (a stale file, a tensor of another step), not against malice: each tensor is
summed as integers along its rows and along its columns, and the sums are hashed. Moving a value
within a tensor changes at least one of them.
"""

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

_WIDTH = 4096
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(state: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Fingerprint of a state as it is served in `dtype`."""
    total = sha256()
    for name in sorted(state):
        tensor = state[name].detach().to(dtype)
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        words = tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])
        rest = len(words) % _WIDTH
        total.update(words[len(words) - rest :].numpy().tobytes())
        table = words[: len(words) - rest].view(-1, _WIDTH)
        # int64 sums of narrower words never wrap here; those of int64 words wrap, and still tell.
        for axis in (0, 1):
            total.update(table.sum(axis, dtype=torch.int64).numpy().tobytes())
    return f"sum:{total.hexdigest()}"
