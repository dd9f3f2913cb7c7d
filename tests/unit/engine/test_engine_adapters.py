"""LoRA adapters per request: the tokens of merged weights, and nothing for anybody else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest
from burnish.core.vocabulary import InFlight, Speculation, StopReason
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import kernels
from burnish.model.lora import Lora, load_lora, lora_from, merged
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits

Ask = Callable[..., GenerateRequest]
Build = Callable[..., Decoder]
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(21)]
SETTINGS = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes(c: ModelConfig) -> dict[str, tuple[str, int, int]]:
    q, kv, wide, e = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size, 0
    e = c.hidden_size
    return {
        "q_proj": ("self_attn", q, e),
        "k_proj": ("self_attn", kv, e),
        "v_proj": ("self_attn", kv, e),
        "o_proj": ("self_attn", e, q),
        "gate_proj": ("mlp", wide, e),
        "up_proj": ("mlp", wide, e),
        "down_proj": ("mlp", e, wide),
    }


def tensors_for(
    config: ModelConfig, seed: int, modules: tuple[str, ...] = ALL
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(config.num_layers):
        for module in modules:
            group, outputs, inputs = shapes(config)[module]
            name = f"base_model.model.model.layers.{layer}.{group}.{module}.lora_"
            for half, shape in (("A", (3, inputs)), ("B", (outputs, 3))):
                value = 0.1 * torch.randn(shape, generator=generator)
                found[f"{name}{half}.weight"] = value
    return found


def adapter(config: ModelConfig, seed: int, **values: Any) -> Lora:
    return lora_from(tensors_for(config, seed), SETTINGS | values, config)


def core_for(
    decoder: Decoder, dtype: torch.dtype = torch.float32, state: Any = None, **sizes: Any
) -> EngineCore:
    limits = CoreLimits(**({"num_pages": 200, "page_size": 4} | sizes))
    return EngineCore(decoder.config, state or decoder.state_dict(), dtype=dtype, limits=limits)


def add(core: EngineCore, name: str, lora: Lora, version: int = 0, *args: Any) -> Any:
    return core.adapters.add(name, core.adapt(lora), version, *args)


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, Any]:
    for request in requests:
        core.add(request)
    return finish(core)


def finish(core: EngineCore) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while core.has_work:
        ended |= {s.request.request_id: outcome for s, outcome in core.step()}
        core.check()
    return ended


def through(request: GenerateRequest, name: str) -> GenerateRequest:
    return msgspec.structs.replace(request, adapter=name)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [Speculation.OFF, Speculation.LOOKUP, Speculation.SELF])
def test_mixed_rows_give_what_merged_weights_give(
    family: str, kind: Speculation, make_decoder: Build, request_for: Ask
) -> None:
    decoder = make_decoder(**FAMILIES[family])
    guesses = SpeculationLimits(kind=kind)
    core = core_for(decoder, budget_tokens=16, speculation=guesses)
    loras = {name: adapter(decoder.config, seed) for name, seed in (("x", 1), ("y", 2))}
    for name, lora in loras.items():
        add(core, name, lora)
    requests = [request_for(f"r{i}", PROMPT[: 5 + 3 * i], max_tokens=14, seed=i) for i in range(6)]
    names = [None, "x", "y", "x", None, "y"]
    asked = [r if n is None else through(r, n) for r, n in zip(requests, names, strict=True)]
    found = run(core, *asked)
    for request, name in zip(requests, names, strict=True):
        state = decoder.state_dict()
        if name is not None:
            state = merged(state, loras[name])
        wanted = run(core_for(decoder, state=state), request)[request.request_id]
        got = found[request.request_id]
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))
def test_base_rows_keep_their_bits_and_adapted_rows_theirs_in_any_batch(
    make_decoder: Build, request_for: Ask
) -> None:
    decoder = make_decoder(intermediate_size=88, mlp_bias=True)
    lora = adapter(decoder.config, 1)
    requests = [request_for(f"r{i}", PROMPT[: 5 + i], max_tokens=12, seed=i) for i in range(5)]
    asked = [through(r, "x") if i % 2 else r for i, r in enumerate(requests)]
    sizes = {"page_size": 16, "exact": True}

    def core() -> EngineCore:
        made = core_for(decoder, torch.bfloat16, **sizes)
        add(made, "x", lora)
        return made

    together = run(core(), *asked)
    for request in asked:
        alone = run(core(), request)[request.request_id]
        assert together[request.request_id].token_ids == alone.token_ids
        assert together[request.request_id].logprobs == alone.logprobs
    for request in requests[::2]:
        plain = run(core_for(decoder, torch.bfloat16, **sizes), request)[request.request_id]
        assert together[request.request_id].logprobs == plain.logprobs


@pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))
@pytest.mark.parametrize("family", FAMILIES)
def test_native_rows_are_those_of_merged_weights_within_bf16(
    family: str, make_decoder: Build
) -> None:
    from burnish.rollout.engine.score import score
    from burnish.rollout.engine.weights import ServedModel

    decoder = make_decoder(**FAMILIES[family])
    lora = adapter(decoder.config, 4)
    state = merged(decoder.state_dict(), lora)
    # Exact, as others have oneDNN's products where the CPU has tiles.
    native = ServedModel(decoder.config, decoder.state_dict(), torch.bfloat16, exact=True)
    layers, real = native.adapt(lora), native.hidden
    from burnish.model.lora import AdaptedRows

    def hidden(ids: Tensor, positions: Tensor, attend: Any, **_: Any) -> Tensor:
        return real(ids, positions, attend, adapters=[AdaptedRows(0, len(ids), layers)])

    native.hidden = hidden  # type: ignore[method-assign]
    got = torch.tensor(score(native, PROMPT, 16))
    exact = torch.tensor(score(ServedModel(decoder.config, state, torch.float32), PROMPT, 16))
    in_bf16 = ServedModel(decoder.config, state, torch.bfloat16, exact=True)
    rounded = torch.tensor(score(in_bf16, PROMPT, 16))
    # As far from fp32 as merged bf16 weights are.
    assert float((got - exact).abs().mean()) < 2 * float((rounded - exact).abs().mean())


def test_prefixes_are_shared_within_an_adapter_only(decoder: Decoder, request_for: Ask) -> None:
    core = core_for(decoder)
    add(core, "x", adapter(decoder.config, 1))
    request = request_for("a", PROMPT, max_tokens=2)
    assert run(core, request)["a"].cached_tokens == 0
    assert run(core, through(request, "x"))["a"].cached_tokens == 0
    assert run(core, through(request, "x"))["a"].cached_tokens == 20
    add(core, "x", adapter(decoder.config, 2), 1)
    assert run(core, through(request, "x"))["a"].cached_tokens == 0
    assert run(core, request)["a"].cached_tokens == 20


@pytest.mark.parametrize("inflight", InFlight)
def test_new_weights_of_an_adapter_reach_its_running_requests_only(
    inflight: InFlight, decoder: Decoder, request_for: Ask
) -> None:
    core = core_for(decoder)
    new = adapter(decoder.config, 2)
    add(core, "x", adapter(decoder.config, 1))
    base = request_for("base", PROMPT, max_tokens=9)
    core.add(base)
    core.add(through(request_for("x", PROMPT, max_tokens=9, temperature=0.0), "x"))
    for _ in range(3):
        core.step()
    ended = dict(add(core, "x", new, 5, inflight))
    found = finish(core)
    assert found["base"].weight_versions == (0,) * 9
    if inflight is InFlight.ABORT:
        (generation,) = ended.values()
        assert generation.stop_reason is StopReason.ABORTED
        return
    generation = found["x"]
    assert generation.weight_versions == (0,) * 3 + (5,) * 6
    if inflight is InFlight.RECOMPUTE:
        state = merged(decoder.state_dict(), new)
        tokens = (*PROMPT, *generation.token_ids[:3])
        request = request_for("r", tokens, max_tokens=6, temperature=0.0)
        wanted = run(core_for(decoder, state=state), request)["r"]
        assert generation.token_ids[3:] == wanted.token_ids


def test_a_removed_adapter_ends_its_requests_and_is_unknown(
    decoder: Decoder, request_for: Ask
) -> None:
    core = core_for(decoder)
    add(core, "x", adapter(decoder.config, 1))
    request = through(request_for("a", PROMPT, max_tokens=9), "x")
    core.add(request)
    core.step()
    assert [g.stop_reason for _, g in core.adapters.remove("x")] == [StopReason.ABORTED]
    core.check()
    assert core.adapters.names == ()
    for act in (lambda: core.add(request), lambda: core.adapters.remove("x")):
        with pytest.raises(UserError, match="knows no adapter 'x'"):
            act()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_peft_directory_is_read_by_its_formula(
    use_rslora: bool, tmp_path: Path, decoder: Decoder
) -> None:
    tensors = tensors_for(decoder.config, 3, ("k_proj", "up_proj"))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = SETTINGS | {"use_rslora": use_rslora, "target_modules": ["k_proj", "up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    state = merged(decoder.state_dict(), load_lora(tmp_path, decoder.config))
    scale = 6 / 3**0.5 if use_rslora else 2.0
    for name, before in decoder.state_dict().items():
        change = torch.zeros_like(before)
        for fused, group, module, start in (
            ("qkv", "self_attn", "k_proj", 96),
            ("gate_up", "mlp", "up_proj", 96),
        ):
            if name.endswith(f"{fused}.weight"):
                layer = name.split(".")[1]
                key = f"base_model.model.model.layers.{layer}.{group}.{module}.lora_"
                down, up = tensors[f"{key}A.weight"], tensors[f"{key}B.weight"]
                change[start : start + len(up)] = scale * up @ down
        torch.testing.assert_close(state[name], before + change, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 0}, "r is 0"),
        ({"r": 4}, "where"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_what_is_not_plain_lora_is_refused(
    values: dict[str, Any], message: str, decoder: Decoder
) -> None:
    with pytest.raises(UserError, match=message):
        adapter(decoder.config, 1, **values)


def test_broken_files_are_refused(tmp_path: Path, decoder: Decoder) -> None:
    config = decoder.config
    good = tensors_for(config, 1)
    first = next(iter(good))
    for tensors, message in (
        ({**good, "base_model.model.lm_head.lora_A.weight": torch.zeros(3, 64)}, "lm_head"),
        ({name: t for name, t in good.items() if name != first}, "only one"),
        ({**good, first: good[first] * torch.nan}, "finite"),
        ({}, "no tensors"),
    ):
        with pytest.raises(UserError, match=message):
            lora_from(tensors, SETTINGS, config)
    with pytest.raises(UserError, match="cannot be read"):
        load_lora(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(UserError, match="cannot be read"):
        load_lora(tmp_path, config)
