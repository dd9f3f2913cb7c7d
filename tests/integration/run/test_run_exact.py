from pathlib import Path

import msgspec
import pytest
import torch

from burnish.model.decoder import Decoder
from burnish.model.hf_directory import save
from burnish.model.kernels.library import kernels
from burnish.model.loading import load_model
from burnish.store.reader import RunReader


@pytest.mark.slow
@pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))
def test_on_policy_the_ratio_of_an_exact_run_is_one_and_nothing_else(
    tiny_model: Path, recipe, burnish_run, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_model))
    torch.manual_seed(0)
    model = Decoder(msgspec.structs.replace(loaded.config, head_dim=16))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    directory = tmp_path / "wide"
    save(model, loaded.tokenizer, loaded.renderer, directory, dtype="float32")
    settings = {
        "model.source": directory,
        "engine.exact": "true",
        "train.exact": "true",
        "rollout.max_lag": 0,
        "run.steps": 3,
    }
    changes = [x for key, value in settings.items() for x in ("--set", f"{key}={value}")]
    result = burnish_run.result(recipe(deterministic=True), *changes)
    assert result["canary"]["max_abs_diff"] == 0.0
    metrics = RunReader(Path(result["run_dir"])).metrics()
    for name, value in (("kl_engine_k1", 0.0), ("kl_engine_k3", 0.0)):
        points = [v for series in metrics[name].values() for _, v in series]
        # A step whose groups all score alike trains nothing and reports nothing.
        assert points, name
        assert set(points) == {value}, name
