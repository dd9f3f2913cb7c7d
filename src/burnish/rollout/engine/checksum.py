"""A fingerprint of weights: equal state, equal digest, at the speed of memory.

Guards against mistakes (a stale file, a tensor of another step), not against malice: each tensor is
summed as integers along its rows and along its columns, and the sums are hashed. Moving a value
within a tensor changes at least one of them.
"""

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

# Words of 8 bytes in a row: wide enough to read memory at its speed.
_WIDTH = 1024


def digest(state: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Fingerprint of a state as it is served in `dtype`."""
    total = sha256()
    for name in sorted(state):
        tensor = state[name].detach().to(dtype).cpu()
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        rest = len(raw) % (8 * _WIDTH)
        total.update(raw[len(raw) - rest :].numpy().tobytes())
        table = raw[: len(raw) - rest].view(torch.int64).view(-1, _WIDTH)
        # The sums wrap; a difference in one word still shows in them.
        for axis in (0, 1):
            total.update(table.sum(axis).numpy().tobytes())
    return f"sum:{total.hexdigest()}"
