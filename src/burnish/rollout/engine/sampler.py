"""From logits to tokens and the exact log-probability of each.

Randomness is a counter-based function of (seed, position): a request draws the same numbers
whatever batch it is in, and after a preemption. One uniform per token, inverted through the
cumulative distribution, so no random field of vocabulary size is needed.

Shapes: N rows (one per request), V vocabulary, K candidates of a row.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels import draw as kernel
from burnish.model.kernels.draw import can_draw
from burnish.rollout.engine.truncation import Kept, truncate

# The cumulative sum goes over blocks first, then inside one block: two short scans instead of one
# over the whole vocabulary (49k entries).
_BLOCK = 256
# fp32 holds this and its inverse.
_LEAST = 1e-30
_MASK = (1 << 64) - 1


class Draw(NamedTuple):
    """How one row is sampled."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """Nucleus mass, 1 keeps everything."""
    uniform: float
    """In [0, 1)."""
    top_k: int = 0
    """Most candidates, 0 keeps all."""
    min_p: float = 0.0
    """Least share of the likeliest token's probability."""
    num_top: int = 0
    """How many alternatives to report."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be drawn at all."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class Sampled(NamedTuple):
    """One token per row."""

    tokens: list[int]
    """Token ids; 0 in broken rows."""
    logprobs: list[float]
    """Log-prob under the distribution that was sampled; at temperature 0 that of temperature 1."""
    tops: list[tuple[tuple[int, float], ...]]
    """The likeliest (id, log-prob) of the same distribution, as many as the row asked for."""
    broken: frozenset[int]
    """Rows whose logits are not numbers: nothing was drawn for them."""


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
    """Draw one token per row of fp32 logits. A row that is not finite harms no other."""
    if not can_draw(logits_NV):
        return _sample_in_torch(logits_NV, draws)
    # Row by row the same way whatever the others ask for: a batch must not change a row's bits.
    sampled = _draw_native(logits_NV, draws)
    special = [
        i for i, d in enumerate(draws) if i not in sampled.broken and (d.is_truncated or d.num_top)
    ]
    if special:
        part = _sample_in_torch(logits_NV[torch.tensor(special)], [draws[i] for i in special])
        for i, token, logprob, top in zip(special, *part[:3], strict=True):
            sampled.tops[i] = top
            if draws[i].is_truncated:
                sampled.tokens[i], sampled.logprobs[i] = token, logprob
    return sampled


def log_totals(logits_NV: Tensor, draws: Sequence[Draw]) -> list[float]:
    """Logarithm of the sum of exp(logit / temperature) of each row, nothing truncated."""
    divisor_N = torch.tensor([divisor(d.temperature) for d in draws])
    if not can_draw(logits_NV):
        scaled_NV = logits_NV.double() / divisor_N[:, None]
        totals: list[float] = scaled_NV.logsumexp(-1).tolist()
        return totals
    first_N = torch.zeros(len(draws), dtype=torch.int64)
    of_first_N = kernel.given_logprobs(logits_NV, first_N, divisor_N)
    return (logits_NV[:, 0].double() / divisor_N - of_first_N).tolist()


def probabilities(logits_V: Tensor, draw: Draw) -> Tensor:
    """The distribution [V] that `sample` draws from at a temperature above 0, fp64."""
    assert draw.temperature > 0.0
    logits_V = logits_V.float()
    weight_V = ((logits_V - logits_V.max()) / divisor(draw.temperature)).exp_()
    if not draw.is_truncated:
        return weight_V.double() / weight_V.double().sum()
    kept = _kept(weight_V, weight_V.double().sum(), draw)
    p_V = torch.zeros(len(weight_V), dtype=torch.float64)
    p_V[kept.ids_K] = kept.weights_K / kept.mass
    return p_V


def _draw_native(logits_NV: Tensor, draws: Sequence[Draw]) -> Sampled:
    uniforms = [-1.0 if d.temperature == 0.0 else d.uniform for d in draws]
    divisor_N = torch.tensor([divisor(d.temperature) for d in draws])
    drawn = kernel.draw(logits_NV, divisor_N, torch.tensor(uniforms, dtype=torch.float64))
    tokens, logprobs = drawn.tokens_N.tolist(), drawn.logprobs_N.tolist()
    broken = frozenset(i for i, logprob in enumerate(logprobs) if math.isnan(logprob))
    return Sampled(tokens, logprobs, [()] * len(draws), broken)


def _sample_in_torch(logits_NV: Tensor, draws: Sequence[Draw]) -> Sampled:
    max_N, argmax_N = logits_NV.max(dim=-1)
    finite_N = torch.isfinite(max_N)
    broken: frozenset[int] = frozenset()
    if not bool(finite_N.all()):
        broken = frozenset((~finite_N).nonzero()[:, 0].tolist())
        logits_NV = logits_NV.masked_fill(~finite_N[:, None], 0.0)
        max_N, argmax_N = logits_NV.max(dim=-1)
    divisor_N = torch.tensor([divisor(d.temperature) for d in draws])
    # Differences first: no temperature, tiny or huge, can overflow what has any weight.
    weight_NV = logits_NV - max_N[:, None]
    if any(d.temperature not in (0.0, 1.0) for d in draws):
        weight_NV /= divisor_N[:, None]
    weight_NV.exp_()
    cumulative_NB, blocks_NBK = _block_sums(weight_NV)
    total_N = cumulative_NB[:, -1]
    uniform_N = torch.tensor([d.uniform for d in draws], dtype=torch.float64)
    tokens_N = _invert(blocks_NBK, cumulative_NB, uniform_N * total_N)
    greedy = torch.tensor([d.temperature == 0.0 for d in draws])
    tokens_N = torch.where(greedy, argmax_N, tokens_N)
    chosen_N = logits_NV.gather(1, tokens_N[:, None])[:, 0]
    logprobs_N = (chosen_N.double() - max_N.double()) / divisor_N - total_N.log()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(draws)
    for row, draw in enumerate(draws):
        if row in broken or not (draw.is_truncated or draw.num_top):
            continue
        kept = _kept(weight_NV[row], total_N[row], draw)
        if draw.is_truncated:
            pick = kept.pick(draw.uniform)
            tokens_N[row], logprobs_N[row] = kept.ids_K[pick], kept.logprobs()[pick]
        tops[row] = _pairs(kept, draw.num_top)
    return Sampled(tokens_N.tolist(), logprobs_N.tolist(), tops, broken)


def divisor(temperature: float) -> float:
    """What logits are divided by, within what fp32 can hold."""
    return min(max(temperature, _LEAST), 1.0 / _LEAST) if temperature > 0.0 else 1.0


def _kept(weight_V: Tensor, total: Tensor, draw: Draw) -> Kept:
    if draw.is_truncated:
        return truncate(weight_V, total, top_k=draw.top_k, min_p=draw.min_p, top_p=draw.top_p)
    values_K, ids_K = weight_V.topk(min(draw.num_top, weight_V.shape[0]))
    return Kept(ids_K, values_K.double(), total)


def _pairs(kept: Kept, number: int) -> tuple[tuple[int, float], ...]:
    pairs = zip(kept.ids_K[:number].tolist(), kept.logprobs()[:number].tolist(), strict=True)
    return tuple((token, logprob) for token, logprob in pairs if logprob > -math.inf)


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
