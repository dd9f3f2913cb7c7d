"""Each GGUF number format, through our reader, against an independent implementation."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from burnish.model import gguf_quants
from burnish.model.gguf_file import SUPPORTED_TYPES, GgufFile

ROWS, COLUMNS = 6, 512
PYTHON_QUANTIZES = [t for t in SUPPORTED_TYPES if t not in (Type.Q4_K, Type.Q6_K)]


def read_back(path: Path, raw: np.ndarray, kind: Type) -> np.ndarray:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path).read("x")


@pytest.mark.parametrize("kind", PYTHON_QUANTIZES, ids=lambda kind: kind.name)
def test_a_quantised_tensor_reads_as_the_reference_says(kind: Type, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    raw = quantize(values, kind)
    got = read_back(tmp_path / "x.gguf", raw, kind)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, dequantize(raw, kind))
    # Half a step of a 4-bit grid over about 6.5 standard deviations, or float rounding.
    bits = {Type.Q4_0: 0.5, Type.Q4_1: 0.25, Type.Q8_0: 0.02}.get(kind, 0.02)
    assert np.abs(got - values).max() <= bits


@pytest.mark.parametrize(
    "kind", [Type.Q4_K, Type.Q6_K, Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name
)
def test_a_block_reads_as_the_format_is_defined(kind: Type, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    blocks = ROWS * COLUMNS // block
    raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    for row in raw:
        for offset in SCALE_OFFSETS[kind]:
            row[offset : offset + 2] = np.float16(rng.normal()).reshape(1).view(np.uint8)
    expected = [value for row in raw for value in SCALAR[kind](row.tobytes())]
    got = read_back(tmp_path / "x.gguf", raw.reshape(ROWS, -1), kind)
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("native", [True, False], ids=["native", "library"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_pieces_and_types_change_no_number(
    kind: Type, dtype: torch.dtype, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than a task of the kernel has, fewer at the end."""
    block, size = GGML_QUANT_SIZES[kind]
    rows = 70_000 // COLUMNS
    raw = np.random.default_rng(2).integers(0, 60, (rows, COLUMNS // block * size), np.uint8)
    whole = dequantize(raw, kind)
    read_back(tmp_path / "x.gguf", raw, kind)
    monkeypatch.setattr(gguf_quants, "_PIECE", 5 * 256)
    if not native:
        monkeypatch.setattr(gguf_quants, "can_unpack", lambda kind, dtype: False)
    got = torch.full((rows, COLUMNS), 7.0, dtype=dtype)
    GgufFile(tmp_path / "x.gguf").read_into("x", got)
    assert np.isfinite(whole).all()
    assert torch.equal(got, torch.from_numpy(whole).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_every_scale_is_read_as_the_library_reads_it(kind: Type, dtype: torch.dtype) -> None:
    """All 65,536 of them: subnormal, infinite and NaN ones too."""
    size = GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(3).integers(0, 256, (65_536, size), np.uint8)
    raw[:, :2] = np.arange(65_536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(raw, kind)).to(dtype)
    got = torch.empty(65_536, 32, dtype=dtype)
    gguf_quants.dequantise(torch.from_numpy(raw).view(-1), kind, got)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def half(data: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", data, offset)[0])


def scalar_q4_0(b: bytes) -> list[float]:
    d = half(b, 0)
    return [d * ((b[2 + i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def scalar_q4_1(b: bytes) -> list[float]:
    d, m = half(b, 0), half(b, 2)
    return [d * (b[4 + i % 16] >> 4 * (i // 16) & 15) + m for i in range(32)]


def scalar_q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * struct.unpack_from("<b", b, 2 + i)[0] for i in range(32)]


def scalar_q4_k(b: bytes) -> list[float]:
    """Super-block of 8 x 32: two halves, 12 bytes of 6-bit scales and minima, 128 of nibbles."""
    d, dmin, packed, nibbles = half(b, 0), half(b, 2), b[4:16], b[16:144]
    out = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for i in range(32):
            # 64 values share 32 bytes: the even group takes the low nibbles.
            byte = nibbles[32 * (group // 2) + i]
            nibble = byte >> 4 if group % 2 else byte & 15
            out.append(d * scale * nibble - dmin * minimum)
    return out


def scalar_q6_k(b: bytes) -> list[float]:
    """Super-block of 256: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, a half."""
    low, high, scales, d = b[:128], b[128:192], struct.unpack_from("<16b", b, 192), half(b, 208)
    out = [0.0] * 256
    for part in range(2):
        for i in range(32):
            for quarter in range(4):
                byte = low[64 * part + 32 * (quarter % 2) + i]
                nibble = byte >> 4 if quarter >= 2 else byte & 15
                pair = high[32 * part + i] >> 2 * quarter & 3
                scale = scales[8 * part + 2 * quarter + i // 16]
                out[128 * part + 32 * quarter + i] = d * scale * ((nibble | pair << 4) - 32)
    return out


SCALAR = {
    Type.Q4_0: scalar_q4_0,
    Type.Q4_1: scalar_q4_1,
    Type.Q8_0: scalar_q8_0,
    Type.Q4_K: scalar_q4_k,
    Type.Q6_K: scalar_q6_k,
}
SCALE_OFFSETS = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q6_K: (208,),
}
