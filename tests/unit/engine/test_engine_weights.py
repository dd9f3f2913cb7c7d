"""Weights: all or nothing, and the canary sees a single wrong tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.core.errors import UserError
from burnish.model.decoder import Decoder
from burnish.rollout.engine import linear
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.linear import PackedLinear, can_pack
from burnish.rollout.engine.score import reference_score

PROBE = tuple(range(3, 43))
LIMITS = CoreLimits(num_pages=20, page_size=16)


def serve(decoder: Decoder, dtype: torch.dtype = torch.bfloat16) -> EngineCore:
    return EngineCore(decoder.config, decoder.state_dict(), dtype=dtype, limits=LIMITS)


def state_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in decoder.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("overrides", [{}, {"family": "qwen3", "qk_norm": True}, {"num_heads": 2}])
def test_identical_weights_score_with_identical_bits(
    make_decoder: Any, dtype: torch.dtype, overrides: dict[str, Any]
) -> None:
    decoder = make_decoder(**overrides)
    engine = serve(decoder, dtype)
    assert engine.score(PROBE) == reference_score(decoder, PROBE, dtype)
    other = make_decoder(seed=1, **overrides)
    engine.update_weights(other.state_dict(), 1)
    assert engine.score(PROBE) == reference_score(other, PROBE, dtype)


def test_scores_are_the_dense_logprobs(decoder: Decoder, dense_logprobs: Any) -> None:
    scores = serve(decoder, torch.float32).score(PROBE)
    reference = dense_logprobs(decoder, list(PROBE))
    assert scores[0] == 0.0
    for i in range(1, len(PROBE)):
        assert scores[i] == pytest.approx(float(reference[i - 1, PROBE[i]]), abs=1e-4)


def test_a_single_stale_tensor_changes_the_canary(make_decoder: Any) -> None:
    shape = {"family": "qwen3", "qk_norm": True, "tie_word_embeddings": False, "num_layers": 2}
    old, new = make_decoder(seed=0, **shape), make_decoder(seed=1, **shape)
    engine = serve(old)
    wanted = reference_score(new, PROBE, torch.bfloat16)
    for version, name in enumerate(new.state_dict(), start=1):
        state = state_of(new)
        state[name] = old.state_dict()[name]
        engine.update_weights(state, version)
        assert engine.score(PROBE) != wanted, f"a stale {name} went unseen"
    engine.update_weights(new.state_dict(), 1000)
    assert engine.score(PROBE) == wanted


def spoil_shape(state: dict[str, Tensor]) -> None:
    state["norm.weight"] = state["norm.weight"][:-1]


def spoil_type(state: dict[str, Tensor]) -> None:
    state["norm.weight"] = state["norm.weight"].int()


def spoil_nan(state: dict[str, Tensor]) -> None:
    state["blocks.2.down.weight"][3, 4] = torch.nan


def spoil_inf(state: dict[str, Tensor]) -> None:
    state["blocks.2.down.weight"][3, 4] = -torch.inf


def spoil_missing(state: dict[str, Tensor]) -> None:
    del state["blocks.1.qkv.weight"]


def spoil_unknown(state: dict[str, Tensor]) -> None:
    state["blocks.9.qkv.weight"] = torch.ones(1)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (spoil_shape, "shape"),
        (spoil_type, "int32"),
        (spoil_nan, "finite"),
        (spoil_inf, "finite"),
        (spoil_missing, "missing"),
        (spoil_unknown, "unknown"),
    ],
)
def test_a_bad_update_changes_nothing(
    decoder: Decoder, make_decoder: Any, spoil: Any, word: str
) -> None:
    engine = serve(decoder)
    before = engine.score(PROBE)
    state = state_of(make_decoder(seed=1))
    spoil(state)
    with pytest.raises(UserError, match=word):
        engine.update_weights(state, 1)
    assert engine.weight_version == 0
    assert engine.score(PROBE) == before


def test_an_older_version_is_refused(decoder: Decoder) -> None:
    engine = serve(decoder)
    with pytest.raises(UserError, match="not newer"):
        engine.update_weights(decoder.state_dict(), 0)


def test_the_engine_owns_its_weights(make_decoder: Any) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        decoder = make_decoder()
        engine = serve(decoder, dtype)
        before = engine.score(PROBE)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()
        assert engine.score(PROBE) == before


def test_scoring_refuses_what_does_not_fit(decoder: Decoder) -> None:
    engine = serve(decoder)
    assert engine.score(()) == ()
    assert engine.score((5,)) == (0.0,)
    for ids in ((300,), (-1, 2), (1,) * 257):
        with pytest.raises(UserError, match="do not fit"):
            engine.score(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_packing_changes_the_layout_and_nothing_else(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype) if with_bias else None
    packed = PackedLinear(weight, bias)
    for rows in (1, 3, 70):
        x = torch.randn(rows, 48, generator=generator).to(dtype)
        tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            packed(x), F.linear(x, weight, bias), atol=tolerance, rtol=tolerance
        )


def test_without_the_private_operators_the_plain_product_answers(
    decoder: Decoder, dense_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(weight: Tensor) -> Tensor:
        raise AttributeError("no such operator")

    can_pack.cache_clear()
    monkeypatch.setattr(linear, "_pack", gone)
    assert not can_pack(torch.float32)
    scores = serve(decoder, torch.float32).score(PROBE)
    assert scores[1] == pytest.approx(
        float(dense_logprobs(decoder, list(PROBE))[0, PROBE[1]]), abs=1e-4
    )
    can_pack.cache_clear()
