import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.hf_directory import save
from burnish.model.loading import load_model

HERE = Path(__file__).parent
TINY = """
[run]
name = "t"
steps = 4
checkpoint_every_steps = 2
train_threads = 1
deterministic = {deterministic}
directory = "{runs}"
[model]
source = "{model}"
{domains}
[rollout]
group_size = 4
groups_per_step = 3
[sandbox]
max_boxes = 2
[engine]
num_threads = 1
num_pages = 512
[train]
lr = 1e-3
[quality]
num_tasks = 4
num_split_items = 10
[evaluate]
tasks_per_domain = 3
{more}
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with the tokenizer of SmolLM2, as a Hugging Face directory."""
    loaded = load_model("smollm2-135m-instruct")
    torch.manual_seed(0)
    config = ModelConfig(
        family="llama",
        vocab_size=loaded.config.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save(decoder, loaded.tokenizer, loaded.renderer, directory, dtype="float32")
    return directory


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the configuration of a tiny run."""

    def write(*domains: str, deterministic: bool = False, more: str = "") -> Path:
        chosen = domains or ("letters", "other_letters")
        sections = "\n".join(
            f'[domains.{name}]\nenvironment = "run_environments:{CLASSES[name]}"' for name in chosen
        )
        path = tmp_path / "run.toml"
        text = TINY.format(
            runs=tmp_path / "runs",
            model=tiny_model,
            domains=sections,
            more=more,
            deterministic=str(deterministic).lower(),
        )
        path.write_text(text)
        return path

    return write


CLASSES = {
    "letters": "Letters",
    "other_letters": "OtherLetters",
    "pays_nothing": "PaysNothing",
    "breaks_later": "BreaksLater",
    "slow_letters": "SlowVerdict",
}


class Runner:
    """`burnish run` as a user types it, in processes of its own."""

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Begin; the environments of the tests can be imported by every process."""
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-m", "burnish.cli.main", "run", *map(str, arguments), "--json"],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
        """Wait for the end."""
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def __call__(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run to the end, however it ends."""
        return self.finish(self.start(*arguments))

    def result(self, *arguments: str | Path) -> dict[str, Any]:
        """Run to a good end; the last line of stdout."""
        done = self(*arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return parsed

    @staticmethod
    def weights_digest(run_dir: str | Path) -> str:
        """Digest of the exported model."""
        weights = Path(run_dir) / "model" / "model.safetensors"
        return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.fixture
def burnish_run() -> Runner:
    """Runs the command."""
    return Runner()
