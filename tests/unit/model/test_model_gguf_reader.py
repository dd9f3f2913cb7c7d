"""A GGUF file of each family, written as llama.cpp would, and then damaged in many ways."""

import contextlib
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.model.attention import forward_dense
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.gguf_file import GgufFile
from burnish.model.gguf_reader import load_decoder, read_config
from burnish.model.loading import load_model
from burnish.model.names import parts
from burnish.model.rope import inverse_frequencies
from burnish.model.rope_scaling import LinearRope, Llama3Rope, YarnRope

IDS = list(range(3, 60))
BASE: dict[str, Any] = {
    "vocab_size": 312, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}  # fmt: skip
LLAMA31 = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
CONFIGS = {
    "llama_tied": ModelConfig(family="llama", tie_word_embeddings=True, **BASE),
    "llama_untied_biased": ModelConfig(
        family="llama", qkv_bias=True, o_bias=True, mlp_bias=True, **BASE
    ),
    "llama31": ModelConfig(
        family="llama", rope_scaling=LLAMA31, **BASE | {"rope_theta": 500_000.0}
    ),
    "mistral": ModelConfig(family="mistral", sliding_window=8, **BASE),
    "qwen2": ModelConfig(family="qwen2", qkv_bias=True, **BASE),
    "qwen3": ModelConfig(
        family="qwen3", qk_norm=True, tie_word_embeddings=True, **BASE | {"head_dim": 16}
    ),
}


def llama_cpp_permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(path: Path, decoder: Decoder, document: dict[str, Any], **extra: Any) -> None:
    c = decoder.config
    arch = "llama" if c.family == "mistral" else c.family
    writer = GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    if c.sliding_window:
        writer.add_sliding_window(c.sliding_window)
    vocab = document["model"]["vocab"]
    special = {token["content"] for token in document["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if t in special else 1 for t in sorted(vocab, key=vocab.get)])
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_chat_template(extra.get("template", CHATML))
    for name, value in extra.get("metadata", {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)
    state = decoder.state_dict()
    for part in parts(c):
        rows = state[part.own][part.start : part.start + part.shape[0]].numpy()
        if arch == "llama" and part.rotary_heads:
            rows = llama_cpp_permute(rows, part.rotary_heads)
        writer.add_tensor(part.gguf, np.ascontiguousarray(rows))
    if c.rope_scaling:
        plain = ModelConfig(family="llama", **{field: getattr(c, field) for field in BASE})
        factors = inverse_frequencies(plain) / inverse_frequencies(c)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, tensor in extra.get("tensors", {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_decoder(config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config).eval()


@pytest.fixture
def llama(tmp_path: Path, tiny_document: dict[str, Any]) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_decoder(CONFIGS["llama_tied"]), tiny_document)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_each_family_reads_back_whole(
    name: str, tmp_path: Path, tiny_document: dict[str, Any]
) -> None:
    decoder, path = random_decoder(CONFIGS[name]), tmp_path / "tiny.gguf"
    write_gguf(path, decoder, tiny_document)
    loaded = load_model(str(path))
    assert loaded.config == CONFIGS[name]
    for key, weight in decoder.state_dict().items():
        assert torch.equal(weight, loaded.decoder.state_dict()[key]), key
    with torch.inference_mode():
        assert torch.equal(forward_dense(loaded.decoder, IDS), forward_dense(decoder, IDS))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the user")) == "the user"


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_weights_are_the_rounded_ones(
    name: str, tmp_path: Path, tiny_document: dict[str, Any]
) -> None:
    decoder = random_decoder(CONFIGS[name])
    write_gguf(tmp_path / "tiny.gguf", decoder, tiny_document)
    got = load_model(str(tmp_path / "tiny.gguf"), dtype="bfloat16").decoder
    for key, weight in decoder.state_dict().items():
        assert torch.equal(weight.bfloat16(), got.state_dict()[key]), key
    assert torch.equal(got.inv_freq, decoder.inv_freq), "frequencies stay in fp32"


def test_a_file_cut_anywhere_is_refused_by_name(llama: Path) -> None:
    whole = llama.read_bytes()
    for length in [0, 1, 3, 4, 7, 8, 23, 24, *range(25, len(whole), 2999), len(whole) - 33]:
        llama.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"tiny\.gguf.*Fix: ") as caught:
            load_model(str(llama))
        assert "\n" not in str(caught.value)


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    for name, data in {"zip": b"PK\3\4" + bytes(99), "text": b"hello world", "empty": b""}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UserError, match="not a GGUF file"):
            load_model(str(path))


def test_other_versions_are_refused(llama: Path) -> None:
    whole = llama.read_bytes()
    for version, complaint in ((1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")):
        llama.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        with pytest.raises(UserError, match=complaint):
            GgufFile(llama)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bits_never_do_worse_than_a_clear_error(data: st.DataObject, llama: Path) -> None:
    whole = bytearray(llama.with_suffix(".gguf").read_bytes())
    end = GgufFile(llama).tensors["token_embd.weight"].offset
    where = data.draw(st.lists(st.integers(0, 8 * end - 1), min_size=1, max_size=3, unique=True))
    for bit in where:
        whole[bit // 8] ^= 1 << bit % 8
    damaged = llama.with_name("damaged.gguf")
    damaged.write_bytes(whole)
    with contextlib.suppress(UserError):
        load_model(str(damaged))


def test_nan_weights_are_named(llama: Path) -> None:
    offset = GgufFile(llama).tensors["blk.1.ffn_down.weight"].offset
    whole = bytearray(llama.read_bytes())
    whole[offset + 40 : offset + 44] = struct.pack("<f", float("nan"))
    llama.write_bytes(whole)
    with pytest.raises(UserError, match=r"blocks\.1\.down\.weight holds NaN"):
        load_model(str(llama))


def hostile(tensors: int, pairs: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


NAME = struct.pack("<Q", 1)
TEXT = NAME + b"k"
HOSTILE = {
    "pairs": hostile(0, 2**63, b""),
    "tensors": hostile(2**60, 0, b""),
    "key": hostile(0, 1, struct.pack("<Q", 2**62) + bytes(64)),
    "string": hostile(0, 1, TEXT + struct.pack("<IQ", 8, 2**50) + bytes(64)),
    "numbers": hostile(0, 1, TEXT + struct.pack("<IIQ", 9, 10, 2**50) + bytes(64)),
    "strings": hostile(0, 1, TEXT + struct.pack("<IIQ", 9, 8, 2**50) + bytes(64)),
    "nested": hostile(0, 1, TEXT + struct.pack("<IIQ", 9, 9, 4) + bytes(64)),
    "axes": hostile(1, 0, TEXT + struct.pack("<I", 2**31) + bytes(64)),
    "shape": hostile(1, 0, TEXT + struct.pack("<I4QIQ", 4, *[2**62] * 4, 0, 0) + bytes(64)),
    "offset": hostile(1, 0, TEXT + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(64)),
    "type": hostile(1, 0, TEXT + struct.pack("<IQIQ", 1, 4, 999, 0) + bytes(64)),
    "shared": hostile(
        2, 0, b"".join(NAME + n + struct.pack("<IQIQ", 1, 4, 0, 0) for n in (b"a", b"b"))
        + bytes(64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_takes_no_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(UserError, match=r"hostile\.gguf"):
        GgufFile(path)


def test_hostile_headers_stay_under_a_memory_limit(tmp_path: Path) -> None:
    for name, data in HOSTILE.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
    program = """
import resource, sys
from pathlib import Path
from burnish.core.errors import UserError
from burnish.model.gguf_file import GgufFile
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    try:
        GgufFile(path)
    except UserError:
        print(path.stem)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == sorted(HOSTILE)


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"tensors": {"adapter.weight": np.zeros((2, 2), np.float32)}}, "adapter.weight"),
        ({"tensors": {"output.weight": np.zeros((9, 32), np.float32)}}, "output.weight"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "4 of 8 dimensions"),
        ({"template": ""}, "no chat template"),
        ({"template": "{% for"}, "not valid Jinja"),
        ({"tensors": {"rope_freqs.weight": np.ones(4, np.float32) * 3}}, "rope_freqs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    extra: dict[str, Any], complaint: str, tmp_path: Path, tiny_document: dict[str, Any]
) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, random_decoder(CONFIGS["llama_tied"]), tiny_document, **extra)
    with pytest.raises(UserError, match=complaint) as caught:
        load_model(str(path))
    assert "odd.gguf" in str(caught.value)


def test_unsupported_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q2.gguf"
    row = TEXT + struct.pack("<IQIQ", 1, 256, 10, 0)
    path.write_bytes(hostile(1, 0, row + bytes(4096)))
    with pytest.raises(UserError, match=r"Q2_K.*Q4_K"):
        GgufFile(path)


def test_a_missing_layer_is_named(llama: Path) -> None:
    file = GgufFile(llama)
    config = read_config(file)
    del file.tensors["blk.1.attn_k.weight"]
    with pytest.raises(UserError, match=r"blk\.1\.attn_k\.weight' is missing"):
        load_decoder(file, config)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(llama: Path) -> None:
    file = GgufFile(llama)
    config = read_config(file)
    with llama.open("r+b") as stream:
        stream.truncate(llama.stat().st_size // 2)
    with pytest.raises(UserError, match="ends early"):
        load_decoder(file, config)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, LinearRope(factor=4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            YarnRope(factor=4.0, original_max_position_embeddings=64),
        ),
        (
            {"type": "yarn", "factor": 2.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            YarnRope(
                factor=2.5, original_max_position_embeddings=256, beta_fast=16.0, beta_slow=2.0
            ),
        ),
    ],
)
def test_a_stretched_file_says_how(
    metadata: dict[str, Any],
    scaling: object,
    tmp_path: Path,
    tiny_document: dict[str, Any],
) -> None:
    path, decoder = tmp_path / "tiny.gguf", random_decoder(CONFIGS["qwen2"])
    keys = {f"qwen2.rope.scaling.{key}": value for key, value in metadata.items()}
    write_gguf(path, decoder, tiny_document, metadata=keys)
    assert read_config(GgufFile(path)).rope_scaling == scaling


@pytest.mark.parametrize(
    "metadata",
    [
        {"type": "longrope"},
        {"type": "yarn"},
        {"type": "linear", "factor": 0.0},
        {"type": "yarn", "factor": 4.0, "attn_factor": 0.5},
    ],
)
def test_a_scaling_that_would_be_read_wrong_is_refused(
    metadata: dict[str, Any], tmp_path: Path, tiny_document: dict[str, Any]
) -> None:
    path, decoder = tmp_path / "tiny.gguf", random_decoder(CONFIGS["qwen2"])
    keys = {f"qwen2.rope.scaling.{key}": value for key, value in metadata.items()}
    write_gguf(path, decoder, tiny_document, metadata=keys)
    with pytest.raises(UserError, match="scaling"):
        read_config(GgufFile(path))
