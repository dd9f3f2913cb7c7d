"""The decoder against transformers on a random model of each family."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from burnish.core.errors import UserError
from burnish.model.attention import DenseAttention, forward_dense
from burnish.model.config import from_hf, to_hf
from burnish.model.loading import export, load_model
from burnish.model.rope_scaling import RopeKind

MakeHf = Callable[[str, Path], transformers.PreTrainedModel]
IDS = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()


def logits_of(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_logits_equal_transformers(family: str, make_hf: MakeHf, tmp_path: Path) -> None:
    theirs = make_hf(family, tmp_path)
    ours = load_model(str(tmp_path))
    with torch.inference_mode():
        difference = forward_dense(ours.decoder, IDS) - logits_of(theirs, IDS)
    assert logits_of(theirs, IDS).std() > 0.3, "a flat model would hide mistakes"
    assert difference.abs().max() <= 1e-4


def test_export_loads_in_transformers_with_the_same_logits(
    family: str, make_hf: MakeHf, tmp_path: Path
) -> None:
    make_hf(family, tmp_path / "in")
    ours = load_model(str(tmp_path / "in"))
    export(ours.decoder, ours, tmp_path / "out", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    with torch.inference_mode():
        difference = forward_dense(ours.decoder, IDS) - logits_of(theirs, IDS)
    assert difference.abs().max() <= 1e-4
    again = load_model(str(tmp_path / "out"))
    assert again.config == ours.config
    for name, weight in ours.decoder.state_dict().items():
        assert torch.equal(weight, again.decoder.state_dict()[name]), name


def test_bf16_loading_rounds_the_stored_weights(
    family: str, make_hf: MakeHf, tmp_path: Path
) -> None:
    make_hf(family, tmp_path)
    wide = load_model(str(tmp_path)).decoder
    got = load_model(str(tmp_path), dtype="bfloat16").decoder
    for name, weight in wide.state_dict().items():
        assert torch.equal(weight.bfloat16(), got.state_dict()[name]), name
    assert torch.equal(got.inv_freq, wide.inv_freq), "frequencies stay in fp32"


def test_bf16_export_holds_the_rounded_weights(make_hf: MakeHf, tmp_path: Path) -> None:
    make_hf("qwen2", tmp_path / "in")
    ours = load_model(str(tmp_path / "in"))
    export(ours.decoder, ours, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    again = load_model(str(tmp_path / "out"))
    for name, weight in ours.decoder.state_dict().items():
        assert torch.equal(weight.bfloat16().float(), again.decoder.state_dict()[name]), name


def test_sequences_laid_end_to_end_do_not_see_each_other(make_hf: MakeHf, tmp_path: Path) -> None:
    make_hf("mistral", tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    lengths = (40, 1, 23)
    positions = torch.cat([torch.arange(n) for n in lengths])
    attend = DenseAttention(lengths, decoder.config.sliding_window)
    with torch.inference_mode():
        packed = decoder.logits(decoder(torch.tensor(IDS[:64]), positions, attend))
        alone = torch.cat(
            [forward_dense(decoder, list(ids)) for ids in torch.tensor(IDS[:64]).split(lengths)]
        )
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def test_frequencies_stay_fp32_when_the_weights_do_not(make_hf: MakeHf, tmp_path: Path) -> None:
    make_hf("llama_scaled_biased", tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    before = decoder.rope(torch.tensor([500]), torch.float32)
    after = decoder.to(torch.bfloat16).rope(torch.tensor([500]), torch.float32)
    assert torch.equal(before[0], after[0])
    assert decoder.embedding.weight.dtype == torch.bfloat16


def test_config_survives_the_way_to_hugging_face_and_back(
    family: str, make_hf: MakeHf, tmp_path: Path
) -> None:
    make_hf(family, tmp_path)
    config = from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert from_hf(to_hf(config)) == config
    old_style = to_hf(config)
    del old_style["rope_parameters"]
    assert from_hf(old_style) == config


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"hidden_size": "64"}, "hidden_size missing or not a count"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 15}, "odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "qkv_bias"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "yarn"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "not at least 1"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": "2"}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}},
            "beta_slow <= beta_fast",
        ),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "2 of 3 layers",
        ),
    ],
)
def test_a_config_that_cannot_be_built_is_one_clear_line(
    change: dict[str, object], complaint: str
) -> None:
    good = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    from_hf(good)
    with pytest.raises(UserError, match=complaint) as caught:
        from_hf(good | change, source="some/config.json")
    assert "some/config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_a_stretched_model_is_what_transformers_makes_of_its_export(
    kind: RopeKind, make_hf: MakeHf, tmp_path: Path
) -> None:
    make_hf("llama", tmp_path / "in")
    ours = load_model(str(tmp_path / "in"), context=2048, rope=kind)
    export(ours.decoder, ours, tmp_path / "out", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    ids = (IDS * 11)[:2048]
    with torch.inference_mode():
        difference = forward_dense(ours.decoder, ids) - logits_of(theirs, ids)
    assert difference.abs().max() <= 2e-4
    assert ours.config.max_position_embeddings == 2048
    assert load_model(str(tmp_path / "out")).config == ours.config


def test_a_context_that_the_model_has_changes_nothing(make_hf: MakeHf, tmp_path: Path) -> None:
    make_hf("llama", tmp_path)
    assert load_model(str(tmp_path), context=512).config == load_model(str(tmp_path)).config


def test_a_stretched_model_is_not_stretched_again(make_hf: MakeHf, tmp_path: Path) -> None:
    make_hf("llama_linear", tmp_path)
    with pytest.raises(UserError, match="already stretched to 512") as caught:
        load_model(str(tmp_path), context=513)
    assert caught.value.fix
