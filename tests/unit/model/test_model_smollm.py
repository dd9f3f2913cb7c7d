"""SmolLM2-135M itself, from its GGUF through an export into transformers."""

from pathlib import Path

import pytest
import torch
import transformers

from burnish.core.records import Message
from burnish.model.attention import forward_dense
from burnish.model.loading import LoadedModel, export, load_model

PROMPTS = [
    "Hello",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "12345 + 67890 = " * 8,
    "\u4f60\u597d \U0001f600 na\u00efve",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2-135m-instruct")


def test_logits_equal_transformers(loaded: LoadedModel, tmp_path: Path) -> None:
    export(loaded.decoder, loaded, tmp_path / "smollm", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "smollm", dtype=torch.float32
    )
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = loaded.tokenizer.encode(prompt)
            difference = forward_dense(loaded.decoder, ids) - theirs(torch.tensor([ids])).logits[0]
            assert difference.abs().max() <= 1e-4, prompt


def test_it_answers(loaded: LoadedModel) -> None:
    """Interleaved q and k rows, a wrong norm or a wrong template would give babble."""
    question = Message(role="user", content="What is the capital of France?")
    ids = list(loaded.renderer.prompt([question]))
    start = len(ids)
    with torch.inference_mode():
        while len(ids) < start + 12 and ids[-1] not in loaded.renderer.stop_token_ids[:1]:
            ids.append(int(forward_dense(loaded.decoder, ids)[-1].argmax()))
    assert loaded.renderer.parse(ids[start:]).content == "The capital of France is Paris."
