"""Adapters written as PEFT writes them: what is read again is what was written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.lora import Lora, load_lora, lora_from, merged, projections
from burnish.model.lora_directory import save_lora

CONFIG = ModelConfig(
    family="llama",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
)


def adapter(rank: int = 3, only: tuple[str, ...] = ("",)) -> Lora:
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, place in projections(CONFIG).items():
        if name.endswith(only):
            for half, shape in (("A", (rank, place.inputs)), ("B", (place.outputs, rank))):
                value = torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = value
    return lora_from(tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 5}, CONFIG)


@pytest.mark.parametrize("only", [("",), ("k_proj", "up_proj"), ("q_proj", "v_proj", "down_proj")])
def test_what_is_read_again_is_what_was_written(only: tuple[str, ...], tmp_path: Path) -> None:
    lora = adapter(only=only)
    save_lora(lora, tmp_path / "x", CONFIG)
    again = load_lora(tmp_path / "x", CONFIG)
    assert (again.rank, again.is_zero) == (3, False)
    state = Decoder(CONFIG).state_dict()
    for name, tensor in merged(state, lora).items():
        assert torch.equal(tensor, merged(state, again)[name])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_files_say_what_peft_reads(tmp_path: Path) -> None:
    save_lora(adapter(only=("k_proj", "up_proj")), tmp_path / "x", CONFIG)
    settings = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["target_modules"] == ["k_proj", "up_proj"]
    assert settings["r"] == settings["lora_alpha"] == 3
    tensors = load_file(tmp_path / "x" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    assert tensors[name].shape == (3, CONFIG.hidden_size)
    assert len(tensors) == 4 * CONFIG.num_layers


def test_a_folder_of_an_earlier_adapter_is_replaced(tmp_path: Path) -> None:
    for rank in (2, 4):
        save_lora(adapter(rank), tmp_path / "x", CONFIG)
    assert load_lora(tmp_path / "x", CONFIG).rank == 4


def broken(lora: Lora, case: str) -> Lora:
    first: dict[str, Any] = dict(lora.layers[0])
    match case:
        case "nothing":
            return Lora(())
        case "another rank":
            output = first["output"]
            first["output"] = output._replace(down_RI=output.down_RI[:2], up_OR=output.up_OR[:, :2])
        case "another width":
            first["output"] = first["output"]._replace(down_RI=torch.zeros(3, 8))
        case "mixed projections":
            first["qkv"] = first["qkv"]._replace(up_OR=torch.ones_like(first["qkv"].up_OR))
        case "another matrix":
            first["router"] = first["output"]
    return Lora((first, *lora.layers[1:]))


@pytest.mark.parametrize(
    "case", ["nothing", "another rank", "another width", "mixed projections", "another matrix"]
)
def test_what_is_of_no_one_rank_or_another_model_leaves_no_folder(
    case: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        save_lora(broken(adapter(), case), tmp_path / "x", CONFIG)
    assert not list(tmp_path.iterdir())
