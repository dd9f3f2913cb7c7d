"""A text's own tokens under an option: logits, bytes kept and time of every step."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype, KvPolicyKind
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape, KvCache
from burnish.rollout.engine.long.eviction import drops
from burnish.rollout.engine.long.layout import attention_of
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.weights import ServedModel

PAGE = 16
CHUNK = 512
Layers = Sequence[tuple[Tensor, Tensor]]


class Forced(NamedTuple):
    """What came of one text."""

    logprobs_NV: Tensor
    """Before each token after the prompt, and after the last."""
    step_s: list[float]
    kept_bytes: int
    """Keys and values at the end."""


class _Text:
    """What the attention of a policy needs of a sequence."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.page_mass: list[float] = []


def force(
    model: ServedModel,
    tokens: list[int],
    num_prompt: int,
    kv: KvPolicy,
    kv_dtype: KvDtype = KvDtype.MODEL,
    prefix: Layers = (),
) -> Forced:
    """Read a prompt in chunks, then one given token at a time.

    Args:
        model: who reads.
        tokens: prompt and given tokens.
        num_prompt: tokens of the prompt.
        kv: which keys are attended and kept.
        kv_dtype: numbers of the cache.
        prefix: keys and values of the prompt that others computed; the last page is read here.
    """
    num_pages = -(-len(tokens) // PAGE)
    needs_bounds = kv.kind is KvPolicyKind.QUEST
    shape = CacheShape(
        *(model.config, num_pages, PAGE, model.dtype), kv_dtype=kv_dtype, with_bounds=needs_bounds
    )
    cache = open_cache(shape)
    pages, text = list(range(num_pages)), _Text(num_prompt)
    rows, times, start = [], [], _write(cache, pages, prefix) if prefix else 0
    while start < len(tokens):
        end = min(start + CHUNK, num_prompt) if start < num_prompt else start + 1
        began = time.perf_counter()
        held = pages[: -(-end // PAGE)]
        kept = [i for i, page in enumerate(held) if page >= 0]
        span = Span(held, start, end, None if len(kept) == len(held) else kept)
        ids_T = torch.tensor(tokens[start:end])
        with torch.inference_mode():
            attend = attention_of(cache, [text], [span], kv)
            hidden_TE = model.hidden(ids_T, torch.arange(start, end), attend)
            if end >= num_prompt:
                rows.append(model.logits(hidden_TE[-1:]).log_softmax(-1))
        for i in drops(
            kv, PAGE, kept,
            num_computed=end, num_prompt=num_prompt, before=start, mass=text.page_mass,
        ):  # fmt: skip
            pages[i] = -1
        if start >= num_prompt:
            times.append(time.perf_counter() - began)
        start = end
    kept_bytes = sum(page >= 0 for page in pages) * cache.num_bytes_per_page
    return Forced(torch.cat(rows), times, kept_bytes)


def _write(cache: KvCache, pages: list[int], prefix: Layers) -> int:
    """Put keys and values of a prompt into the cache, but for the last tokens; how many."""
    num_tokens = (len(prefix[0][0]) - 1) // PAGE * PAGE
    step = cache.step([Span(pages, 0, num_tokens)])
    for layer, (k_TKD, v_TKD) in enumerate(prefix):
        cache.write(layer, step, k_TKD[:num_tokens], v_TKD[:num_tokens])
    return num_tokens
