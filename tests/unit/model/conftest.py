"""Small models of every family, made by transformers, and the tokenizer of SmolLM2."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from burnish.model.chat import ChatRenderer
from burnish.model.gguf_file import GgufFile
from burnish.model.gguf_tokenizer import read_tokenizer
from burnish.model.loading import resolve

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 320
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_scaled_biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        # Short enough that the test's 200 positions fall on all three branches of the scaling.
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
    },
    # Contexts stretched to the length that the tests read: dynamic scaling is compared at its end.
    "llama_linear": {"model_type": "llama", "rope_parameters": ROPE | {"rope_type": "linear"}},
    "llama_dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 100,
        "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0},
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "rope_parameters": ROPE
        | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "qwen3_yarn_tuned": {
        "model_type": "qwen3",
        "rope_parameters": ROPE
        | {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "qwen2": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "mistral_full": {"model_type": "mistral", "sliding_window": None},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_document() -> dict[str, Any]:
    """A `tokenizer.json` with a handful of merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the user and the assistant of the system"] * 4, trainer)
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def hf_model(name: str) -> transformers.PreTrainedModel:
    """A random model, biases and norms included: zeros would hide a mistake."""
    fields = dict(FAMILIES[name])
    torch.manual_seed(sum(map(ord, name)))
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **TINY | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def make_hf(tiny_document: dict[str, Any]) -> Callable[[str, Path], transformers.PreTrainedModel]:
    """Write a random model of the family with tokenizer files; return transformers' model."""

    def make(name: str, directory: Path) -> transformers.PreTrainedModel:
        model = hf_model(name)
        model.save_pretrained(directory)
        (directory / "tokenizer.json").write_text(json.dumps(tiny_document), encoding="utf-8")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": CHATML,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return model

    return make


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def smollm_file() -> GgufFile:
    return GgufFile(resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def smollm(smollm_file: GgufFile) -> ChatRenderer:
    """SmolLM2's renderer, without the weights."""
    template = smollm_file.metadata["tokenizer.chat_template"]
    return ChatRenderer(read_tokenizer(smollm_file), template, source="smollm2")


@pytest.fixture
def tiny_renderer_of(
    tiny_document: dict[str, Any],
) -> Callable[[str | None], ChatRenderer]:
    """A renderer over the tiny tokenizer with the given template."""
    from burnish.model.tokenizer import Tokenizer

    named = {"eos_token": "<|im_end|>"}
    tokenizer = Tokenizer(tiny_document, source="tiny", named=named)
    return lambda template: ChatRenderer(tokenizer, template, source="tiny")
