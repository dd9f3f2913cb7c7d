"""From logits to tokens and the exact log-probability of each.

Randomness is a counter-based function of (seed, position): a request draws the same numbers
whatever batch it is in, and after a preemption. One uniform per token, inverted through the
cumulative distribution, so no random field of vocabulary size is needed.

Shapes: N rows (one per request), V vocabulary, K kept candidates of a nucleus.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels import draw as kernel
from burnish.model.kernels.draw import can_draw

# The cumulative sum goes over blocks first, then inside one block: two short scans instead of one
# over the whole vocabulary (49k entries).
_BLOCK = 256
_NUCLEUS_CANDIDATES = 512
_MASK = (1 << 64) - 1


class Draw(NamedTuple):
    """How one row is sampled."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """Nucleus mass, 1 keeps everything."""
    uniform: float
    """In [0, 1)."""


class Sampled(NamedTuple):
    """One token per row."""

    tokens: list[int]
    """Token ids."""
    logprobs: list[float]
    """Log-prob under the distribution that was sampled; at temperature 0 that of temperature 1."""


def seed_key(seed: int) -> int:
    """Spread any integer seed over 64 bits."""
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest(), "little")


def uniform(key: int, position: int) -> float:
    """The uniform in [0, 1) of a position (splitmix64 finaliser, Steele et al. 2014, 53 bits)."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) * 2.0**-53


def sample(logits_NV: Tensor, draws: Sequence[Draw]) -> Sampled:
    """Draw one token per row of fp32 logits.

    Raises:
        FloatingPointError: if a row has no finite maximum; the weights are broken.
    """
    if not can_draw(logits_NV):
        return _sample_in_torch(logits_NV, draws)
    # Row by row the same way whatever the others ask for: a batch must not change a row's bits.
    sampled = _draw_native(logits_NV, draws)
    cut = [i for i, d in enumerate(draws) if d.top_p < 1.0 and d.temperature > 0.0]
    if cut:
        part = _sample_in_torch(logits_NV[torch.tensor(cut)], [draws[i] for i in cut])
        for i, token, logprob in zip(cut, part.tokens, part.logprobs, strict=True):
            sampled.tokens[i], sampled.logprobs[i] = token, logprob
    return sampled


def _sample_in_torch(logits_NV: Tensor, draws: Sequence[Draw]) -> Sampled:
    temperature_N = torch.tensor([d.temperature or 1.0 for d in draws])
    scaled_NV = logits_NV
    if any(d.temperature not in (0.0, 1.0) for d in draws):
        scaled_NV = logits_NV / temperature_N[:, None]
    max_N, argmax_N = scaled_NV.max(dim=-1)
    if not bool(torch.isfinite(max_N).all()):
        raise FloatingPointError("logits are not finite: the served weights are broken")
    weight_NV = (scaled_NV - max_N[:, None]).exp_()
    cumulative_NB, blocks_NBK = _block_sums(weight_NV)
    total_N = cumulative_NB[:, -1]
    uniform_N = torch.tensor([d.uniform for d in draws], dtype=torch.float64)
    tokens_N = _invert(blocks_NBK, cumulative_NB, uniform_N * total_N)
    greedy = torch.tensor([d.temperature == 0.0 for d in draws])
    tokens_N = torch.where(greedy, argmax_N, tokens_N)
    chosen_N = scaled_NV.gather(1, tokens_N[:, None])[:, 0]
    logprobs_N = (chosen_N.double() - max_N.double()) - total_N.log()
    for row, draw in enumerate(draws):
        if draw.top_p < 1.0 and draw.temperature > 0.0:
            tokens_N[row], logprobs_N[row] = _nucleus(weight_NV[row], total_N[row], draw)
    return Sampled(tokens_N.tolist(), logprobs_N.tolist())


def _draw_native(logits_NV: Tensor, draws: Sequence[Draw]) -> Sampled:
    uniforms = [-1.0 if d.temperature == 0.0 else d.uniform for d in draws]
    temperature_N = torch.tensor([d.temperature or 1.0 for d in draws])
    drawn = kernel.draw(logits_NV, temperature_N, torch.tensor(uniforms, dtype=torch.float64))
    logprobs = drawn.logprobs_N.tolist()
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError("logits are not finite: the served weights are broken")
    return Sampled(drawn.tokens_N.tolist(), logprobs)


def _block_sums(weight_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative sums over blocks [N, B] in fp64, and the weights as blocks [N, B, K]."""
    padding = -weight_NV.shape[1] % _BLOCK
    if padding:
        weight_NV = torch.nn.functional.pad(weight_NV, (0, padding))
    blocks_NBK = weight_NV.view(weight_NV.shape[0], -1, _BLOCK)
    return blocks_NBK.sum(-1).double().cumsum(-1), blocks_NBK


def _invert(blocks_NBK: Tensor, cumulative_NB: Tensor, target_N: Tensor) -> Tensor:
    """Index whose cumulative weight first exceeds the target, never one of weight zero."""
    block_N = torch.searchsorted(cumulative_NB, target_N[:, None], right=True)[:, 0]
    block_N = block_N.clamp_max(cumulative_NB.shape[1] - 1)
    rows = torch.arange(len(block_N))
    inside_NK = blocks_NBK[rows, block_N].double()
    before_N = torch.where(
        block_N > 0, cumulative_NB[rows, (block_N - 1).clamp_min(0)], torch.zeros(())
    )
    return block_N * _BLOCK + _search(inside_NK, target_N - before_N)


def _search(weight_NK: Tensor, target_N: Tensor) -> Tensor:
    """Inverse of the cumulative sum of each row, kept off zero weights at both ends."""
    cumulative_NK = weight_NK.cumsum(-1)
    # The fp32 block sum and this fp64 one may differ in the last bits: stay below the end.
    below_N = torch.nextafter(cumulative_NK[:, -1], torch.zeros((), dtype=torch.float64))
    target_N = torch.minimum(target_N.clamp_min(0.0), below_N)
    return torch.searchsorted(cumulative_NK, target_N[:, None], right=True)[:, 0]


def _nucleus(weight_V: Tensor, total: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Sample from the smallest set of tokens with mass >= top_p (Holtzman et al. 2020)."""
    wanted = total * draw.top_p
    num_candidates = min(_NUCLEUS_CANDIDATES, weight_V.shape[0])
    values_K, ids_K = weight_V.topk(num_candidates)
    cumulative_K = values_K.double().cumsum(0)
    if bool(cumulative_K[-1] < wanted):
        values_K, ids_K = weight_V.sort(descending=True, stable=True)
        cumulative_K = values_K.double().cumsum(0)
    kept = int((cumulative_K < wanted).sum()) + 1
    kept = min(kept, len(values_K))
    values_K, mass = values_K[:kept].double(), cumulative_K[kept - 1]
    pick = _search(values_K[None], (mass * draw.uniform)[None])[0]
    return ids_K[pick], (values_K[pick] / mass).log()
