"""Adapters as files for another program: the folder that PEFT's `save_pretrained` would write.

    adapter_config.json          rank, scale, which projections
    adapter_model.safetensors    base_model.model.<projection>.lora_A.weight [r, I], .lora_B [O, r]

`lora.load_lora` reads it again, number by number. The scale is part of B: `lora_alpha` equals `r`.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.lora import Lora, projections
from burnish.model.safetensors_io import save_tensors
from burnish.model.whole_folder import whole_folder


def save_lora(lora: Lora, folder: Path, config: ModelConfig) -> None:
    """Write an adapter of a model of `config`; the folder appears complete or not at all.

    Raises:
        UserError: it is not of this model, or the disk is full.
        OSError: the disk refuses otherwise.
    """
    tensors = peft_tensors(lora, config)
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    with whole_folder(folder, num_bytes) as partial:
        save_tensors(tensors, partial / "adapter_model.safetensors")
        document = json.dumps(_settings(lora, tensors), indent=2) + "\n"
        (partial / "adapter_config.json").write_text(document)


def peft_tensors(lora: Lora, config: ModelConfig) -> dict[str, Tensor]:
    """The two matrices of every adapted projection, under PEFT's names.

    Raises:
        UserError: the adapter is empty, of another model, or its ranks differ.
    """
    by_place = {(p.layer, p.own, p.start): (name, p) for name, p in projections(config).items()}
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(lora.layers):
        for own, fused in layer.items():
            if fused.rank != lora.rank:
                raise _unfit(f"ranks {fused.rank} and {lora.rank} are both in it")
            found = 0
            for i, start in enumerate(fused.starts):
                name, place = by_place.get((number, own, start), (None, None))
                if name is None or place is None:
                    raise _unfit(f"the model has no layer {number} with {own} from row {start}")
                part = slice(i * fused.rank, (i + 1) * fused.rank)
                down_RI = fused.down_RI[part]
                up_OR = fused.up_OR[start : start + place.outputs, part]
                if down_RI.shape[1] != place.inputs or len(up_OR) != place.outputs:
                    raise _unfit(f"{name} of the model is {place.outputs} x {place.inputs}")
                tensors[f"base_model.model.{name}.lora_A.weight"] = down_RI.contiguous()
                tensors[f"base_model.model.{name}.lora_B.weight"] = up_OR.contiguous()
                found += int(up_OR.count_nonzero())
            if found != int(fused.up_OR.count_nonzero()):
                raise _unfit(f"{own} of layer {number} mixes projections that were fused")
    if not tensors:
        raise _unfit("it adapts nothing")
    return tensors


def _settings(lora: Lora, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }


def _unfit(why: str) -> UserError:
    return UserError(
        f"the adapter cannot be written: {why}.", fix="write the adapter with its own model."
    )
