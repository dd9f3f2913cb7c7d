"""Log-probs of given tokens at temperature 1: the question that the canary asks.

One function serves both sides. The engine calls it on the weights that it samples from; the
trainer's side calls `reference_score`, which loads the trainer's weights into a fresh served model
and takes the same path through the same operators, so identical weights give identical bits.

Shapes: T tokens, N rows, E hidden width, V vocabulary.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.kernels.draw import can_draw, given_logprobs
from burnish.model.lora import AdaptedRows
from burnish.rollout.engine.argument_types import INTEGER, check_each
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape, StepAttend
from burnish.rollout.engine.placement import placed
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.weights import ServedModel

# The head's output for this many tokens at a time: 64 x 49152 fp32 are 12 MB.
_HEAD_ROWS = 64


def check(config: ModelConfig, token_ids: Seq[int]) -> None:
    """Refuse what cannot be scored.

    Raises:
        UserError: if the tokens do not fit the model.
    """
    context, vocabulary = config.max_position_embeddings, config.vocab_size
    check_each("the tokens to score", token_ids, INTEGER)
    if len(token_ids) > context or not all(0 <= t < vocabulary for t in token_ids):
        raise UserError(
            f"{len(token_ids)} tokens to score do not fit context {context}, "
            f"vocabulary {vocabulary}.",
            fix="score a shorter text, encoded with the model's own tokenizer.",
        )


def score(model: ServedModel, token_ids: Seq[int], page_size: int) -> tuple[float, ...]:
    """Log-prob of each token given those before it; the first entry is 0.0.

    Runs the prefill forward over a cache of its own, so nothing that is being sampled is touched.
    """
    if not token_ids:
        return ()
    hidden_TE = _hidden(model, token_ids, page_size)
    with torch.inference_mode(), placed(model.device):
        logprobs = logprobs_of(model, hidden_TE[:-1], torch.tensor(token_ids[1:]))
    return (0.0, *logprobs)


def score_sampled(model: ServedModel, sequence: Sequence, page_size: int) -> list[float]:
    """Log-prob of each sampled token with attention over every key, by the newest weights.

    At the request's temperature, 1 for greedy requests, before any truncation.
    """
    temperature = sequence.request.params.temperature or 1.0
    first, tokens = sequence.num_prompt, sequence.tokens
    adapters = []
    if sequence.adapter is not None:
        adapters = [AdaptedRows(0, len(tokens), sequence.adapter.layers)]
    hidden_TE = _hidden(model, tokens, page_size, adapters)
    with torch.inference_mode(), placed(model.device):
        targets_N = torch.tensor(tokens[first:])
        return logprobs_of(model, hidden_TE[first - 1 : -1], targets_N, temperature)


def _hidden(
    model: ServedModel, token_ids: Seq[int], page_size: int, adapters: Seq[AdaptedRows] = ()
) -> Tensor:
    num_pages = -(-len(token_ids) // page_size)
    cache = open_cache(
        CacheShape(model.config, num_pages, page_size, model.dtype, device=model.device)
    )
    with torch.inference_mode(), placed(model.device):
        step = cache.step([Span(range(num_pages), 0, len(token_ids))])
        ids_T = torch.tensor(token_ids)
        attend, places_T = StepAttend(cache, step), torch.arange(len(token_ids))
        return model.hidden(ids_T, places_T, attend, adapters=adapters)


def logprobs_of(
    model: ServedModel, hidden_NE: Tensor, targets_N: Tensor, temperature: float = 1.0
) -> list[float]:
    """Log-prob of a given next token for each hidden state."""
    logprobs: list[float] = []
    for start in range(0, len(targets_N), _HEAD_ROWS):
        logits_NV = model.logits(hidden_NE[start : start + _HEAD_ROWS])
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        logprobs += _given(logits_NV, targets_N[start : start + _HEAD_ROWS]).tolist()
    return logprobs


def _given(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Log-prob of one token per row at temperature 1, fp64: the bits of drawing it."""
    if can_draw(logits_NV):
        return given_logprobs(logits_NV, ids_N, torch.ones(len(ids_N)))
    chosen = logits_NV.gather(1, ids_N[:, None])[:, 0]
    return chosen.double() - logits_NV.double().logsumexp(-1)


def reference_score(
    decoder: Decoder,
    token_ids: Seq[int],
    dtype: torch.dtype,
    page_size: int = 16,
    *,
    exact: bool = False,
) -> tuple[float, ...]:
    """What an engine in `dtype` must answer if it serves exactly the weights of `decoder`."""
    served = ServedModel(decoder.config, decoder.state_dict(), dtype, exact=exact)
    return score(served, token_ids, page_size)
