"""A decoder whose weights are written down, not trained: it answers a key with what followed it.

Two of its heads work; the others are there for their keys and values.

    layer 0   each token attends the one before it (constant queries and keys, one turn apart, on
              the fast frequencies) and notes which key that was
    layer 1   a key attends the place that noted it (by content, on frequencies so slow that a
              million positions turn them by 0.1 rad, hence the huge rope_theta) and copies the
              token there to the output

Fillers note nothing, as the keys of most tokens are small for a retrieval head of a trained model;
so a page with a planted pair stands out by its bounds. That is the case that block-sparse selection
is made for: recall here proves the machinery, not the quality of the selection on a trained model.

Residual stream: T what the token is, K the same if it is a key, P the key before it, O the answer.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.config import ModelConfig

CODE = 64
WIDTH = 4 * CODE
HEAD = 128
VOCABULARY = 256
NUM_KEYS = 32
NUM_VALUES = 32
T, K, P, O = (slice(i * CODE, (i + 1) * CODE) for i in range(4))  # noqa: E741
# Scores of the head before and of the retrieving head are about 20 and 40 above all others.
_BEFORE, _FOUND = 17.5, 1.75
_FAST = 24


class Haystack(NamedTuple):
    """A long prompt with pairs of key and value in it."""

    body: list[int]
    """Everything but the question."""
    pairs: list[tuple[int, int]]
    """Keys, each of which alone is the question, and their answers."""


def config_of(context: int, num_layers: int = 2, num_heads: int = 1) -> ModelConfig:
    """Shape of a retriever."""
    return ModelConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=HEAD,
        max_position_embeddings=context,
        rms_norm_eps=1e-6,
        rope_theta=1e14,
        tie_word_embeddings=False,
        qkv_bias=True,
    )


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Weights as `Decoder.state_dict()` names them."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (VOCABULARY, CODE), generator=generator).float() * 2 - 1
    embedding = torch.zeros(VOCABULARY, WIDTH)
    embedding[:, T] = codes
    embedding[:NUM_KEYS, K] = codes[:NUM_KEYS]
    head = torch.zeros(VOCABULARY, WIDTH)
    head[:, O] = codes
    state = {
        "embedding.weight": embedding,
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": head,
    }
    rows = config.num_heads * HEAD
    for layer in range(config.num_layers):
        block = f"blocks.{layer}."
        state |= {
            f"{block}attention_norm.weight": torch.ones(WIDTH),
            f"{block}mlp_norm.weight": torch.ones(WIDTH),
            f"{block}qkv.weight": torch.zeros(3 * rows, WIDTH),
            f"{block}qkv.bias": torch.zeros(3 * rows),
            f"{block}output.weight": torch.zeros(WIDTH, rows),
            f"{block}gate_up.weight": torch.zeros(2 * config.intermediate_size, WIDTH),
            f"{block}down.weight": torch.zeros(WIDTH, config.intermediate_size),
        }
    _look_back(state, config, rows)
    _retrieve(state, rows)
    return state


def haystack(length: int, num_pairs: int, seed: int = 0) -> Haystack:
    """Fillers with pairs at equal distances, from the very beginning to the very end.

    Args:
        length: tokens of the body.
        num_pairs: pairs, at depths 0 to 1.
        seed: of fillers, keys and values.
    """
    assert 2 <= num_pairs <= min(NUM_KEYS, NUM_VALUES)
    rng = random.Random(seed)
    body = [rng.randrange(NUM_KEYS + NUM_VALUES, VOCABULARY) for _ in range(length)]
    keys = rng.sample(range(NUM_KEYS), num_pairs)
    values = rng.sample(range(NUM_KEYS, NUM_KEYS + NUM_VALUES), num_pairs)
    pairs = list(zip(keys, values, strict=True))
    for i, pair in enumerate(pairs):
        place = round(i * (length - 3) / (num_pairs - 1))
        body[place : place + 2] = pair
    return Haystack(body, pairs)


def _look_back(state: dict[str, Tensor], config: ModelConfig, rows: int) -> None:
    half = HEAD // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = frequencies[:_FAST].float()
    bias = state["blocks.0.qkv.bias"]
    bias[:_FAST] = _BEFORE
    bias[rows : rows + _FAST] = _BEFORE * turns.cos()
    bias[rows + half : rows + half + _FAST] = _BEFORE * turns.sin()
    state["blocks.0.qkv.weight"][2 * rows : 2 * rows + CODE, K] = torch.eye(CODE)
    state["blocks.0.output.weight"][P, :CODE] = torch.eye(CODE)


def _retrieve(state: dict[str, Tensor], rows: int) -> None:
    quarter = HEAD // 4
    # Slow halves of both columns of the rotation.
    slow = [*range(quarter, 2 * quarter), *range(3 * quarter, HEAD)]
    weight = state["blocks.1.qkv.weight"]
    weight[slow, K] = _FOUND * torch.eye(CODE)
    weight[[rows + i for i in slow], P] = _FOUND * torch.eye(CODE)
    weight[2 * rows : 2 * rows + CODE, T] = torch.eye(CODE)
    state["blocks.1.output.weight"][O, :CODE] = torch.eye(CODE)
