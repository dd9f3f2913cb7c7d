"""Weights as files for other programs."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from engine_backends import CONFIG, state
from safetensors.torch import load_file

from burnish.core.errors import UserError
from burnish.model.hf_directory import read_config
from burnish.model.published import publish
from burnish.model.safetensors_io import load_decoder, weight_files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_a_loader_reads(tmp_path: Path, dtype: str) -> None:
    weights = state(0)
    published = publish(CONFIG, weights, tmp_path / "v1", dtype)  # type: ignore[arg-type]
    config = read_config(published.folder)
    assert config == CONFIG
    decoder = load_decoder(published.folder, weight_files(published.folder), config)
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, weights[name].to(getattr(torch, dtype)).float())
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_digests_are_of_the_bytes_in_the_file(tmp_path: Path) -> None:
    published = publish(CONFIG, state(0), tmp_path / "v1", "bfloat16")
    stored = load_file(published.folder / "model.safetensors")
    vectors = {name for name, tensor in stored.items() if tensor.dim() == 1}
    assert set(published.vector_digests) == vectors
    for name in vectors:
        raw = stored[name].view(torch.uint8).numpy().tobytes()
        assert published.vector_digests[name] == hashlib.sha256(raw).hexdigest()
    assert json.loads((published.folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_equal_weights_have_equal_digests_and_others_have_not(tmp_path: Path) -> None:
    first, again, other = (
        publish(CONFIG, state(seed), tmp_path / name, "bfloat16").digest
        for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    )
    assert first == again != other


def test_a_state_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    weights = dict(state(0))
    del weights["norm.weight"]
    with pytest.raises(UserError, match=r"norm\.weight is missing"):
        publish(CONFIG, weights, tmp_path / "v1", "bfloat16")
    assert not list(tmp_path.iterdir())


def test_a_version_that_is_there_already_is_replaced(tmp_path: Path) -> None:
    publish(CONFIG, state(0), tmp_path / "v1", "bfloat16")
    newer = publish(CONFIG, state(1), tmp_path / "v1", "float32")
    stored = load_file(newer.folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
