"""A text's own tokens under a policy: logits, bytes kept and time of every step."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.vocabulary import KvPolicyKind
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape
from burnish.rollout.engine.long.eviction import drops
from burnish.rollout.engine.long.layout import attention_of
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.weights import ServedModel

PAGE = 16
CHUNK = 512


class Forced(NamedTuple):
    """What came of one text."""

    logprobs_NV: Tensor
    """Of the tokens after the prompt."""
    step_s: list[float]
    kept_bytes: int
    """Keys and values at the end."""


class _Text:
    """What the attention of a policy needs of a sequence."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.page_mass: list[float] = []


def force(model: ServedModel, tokens: list[int], num_prompt: int, kv: KvPolicy) -> Forced:
    """Read a prompt in chunks, then one given token at a time."""
    num_pages = -(-len(tokens) // PAGE)
    needs_bounds = kv.kind is KvPolicyKind.QUEST
    cache = open_cache(
        CacheShape(model.config, num_pages, PAGE, model.dtype, with_bounds=needs_bounds)
    )
    pages, text = list(range(num_pages)), _Text(num_prompt)
    rows, times, start = [], [], 0
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
