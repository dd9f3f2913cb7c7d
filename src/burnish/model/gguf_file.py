"""The GGUF container: header, metadata and tensor table, checked before anything is believed.

Layout (little-endian): magic, version u32, tensor count u64, metadata count u64, metadata pairs,
tensor table, padding to `general.alignment`, tensor data. Every count and length is compared with
the bytes that are left before memory is taken for it, so a hostile header costs nothing. The file
is read, never mapped: a file cut short meanwhile is an error and not a SIGBUS.
"""

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.gguf_quants import dequantise

Type = GGMLQuantizationType

SUPPORTED_TYPES = (
    Type.F32,
    Type.F16,
    Type.BF16,
    Type.Q8_0,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q4_K,
    Type.Q6_K,
)

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1024
_VERSIONS = (2, 3)
_REFETCH = "download the file again and compare its checksum."


class TensorInfo(NamedTuple):
    """A row of the tensor table."""

    type: GGMLQuantizationType
    """How the numbers are stored."""
    shape: tuple[int, ...]
    """Slowest axis first, as torch writes it (GGUF stores the reverse)."""
    offset: int
    """First byte, from the start of the file."""
    num_bytes: int
    """Length in the file."""


class GgufFile:
    """An opened and validated GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read header and tables; tensor data stay on disk.

        Raises:
            UserError: if the file cannot be read, is not GGUF, is truncated or contradicts itself.
        """
        self.path = path
        try:
            self.size_bytes = path.stat().st_size
            with path.open("rb") as stream:
                cursor = _Cursor(path, stream, self.size_bytes)
                self.metadata, self.tensors = _parse(cursor)
        except OSError as error:
            raise _unreadable(path, error) from error

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor `name`, dequantised, in its shape.

        Raises:
            UserError: if the file cannot be read or has become shorter.
        """
        values = torch.empty(self.tensors[name].shape, dtype=torch.float32)
        self.read_into(name, values)
        return values.numpy()

    def read_into(self, name: str, out: Tensor) -> None:
        """Write the tensor `name`, dequantised, to `out`: contiguous, of its shape and any dtype.

        Raises:
            UserError: if the file cannot be read or has become shorter.
        """
        info = self.tensors[name]
        try:
            with self.path.open("rb") as stream:
                stream.seek(info.offset)
                raw = np.fromfile(stream, dtype=np.uint8, count=info.num_bytes)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if raw.size != info.num_bytes:
            raise _damaged(self.path, f"tensor {name!r} ends early", "the file shrank meanwhile")
        assert out.shape == info.shape, (out.shape, info)
        # Scales of a damaged file may be infinite: `assemble` reports that by name.
        with np.errstate(all="ignore"):
            dequantise(torch.from_numpy(raw), info.type, out)


class _Cursor:
    """Reads forward and refuses to read past the end."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path, self._stream, self.size, self.position = path, stream, size, 0

    def need(self, num_bytes: int, what: str) -> None:
        """Refuse if fewer than `num_bytes` are left."""
        if num_bytes > self.size - self.position:
            raise _damaged(
                self.path,
                f"{what} at byte {self.position} needs {num_bytes} bytes,"
                f" {self.size - self.position} are left",
                "truncated or damaged",
            )

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        data = self._stream.read(num_bytes)
        if len(data) != num_bytes:
            raise _damaged(self.path, f"{what} ends early", "the file shrank meanwhile")
        self.position += num_bytes
        return data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def texts(self, what: str, count: int) -> list[str]:
        """`count` strings: vocabularies have 100,000."""
        found, read = [], self._stream.read
        position, size = self.position, self.size
        try:
            for _ in range(count):
                length = int.from_bytes(read(8), "little")
                position += 8 + length
                if position > size:
                    raise _damaged(
                        self.path, f"{what} ends behind the file", "truncated or damaged"
                    )
                found.append(str(read(length), "utf-8"))
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"{what} is not UTF-8", "damaged") from error
        if self._stream.tell() != position:
            raise _damaged(self.path, f"{what} ends early", "the file shrank meanwhile")
        self.position = position
        return found

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise _damaged(self.path, f"{what} is {length} bytes long", "damaged")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"{what} is not UTF-8", "damaged") from error


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    magic = cursor.take(4, "the magic") if cursor.size >= 4 else b""
    if magic != b"GGUF":
        raise UserError(
            f"{cursor.path}: not a GGUF file (starts with {magic!r}, not b'GGUF').",
            fix="give a .gguf file, or a Hugging Face directory with config.json.",
        )
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        kind = "big-endian GGUF" if version > 0xFFFF else f"GGUF version {version}"
        raise UserError(
            f"{cursor.path}: {kind} is not supported (versions {_VERSIONS}, little-endian).",
            fix="convert the model again with a current llama.cpp.",
        )
    num_tensors, num_pairs = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    # The shortest pair is an empty key, a type and one byte; the shortest tensor row has no axes.
    cursor.need(num_pairs * 13, f"metadata of {num_pairs} pairs")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text("a metadata key", _MAX_NAME_BYTES)
        if key in metadata:
            raise _damaged(cursor.path, f"metadata key {key!r} occurs twice", "damaged")
        metadata[key] = _value(cursor, key)
    cursor.need(num_tensors * 24, f"a table of {num_tensors} tensors")
    rows = [_tensor_row(cursor) for _ in range(num_tensors)]
    return metadata, _place(cursor, rows, metadata.get("general.alignment", 32))


def _value(cursor: _Cursor, key: str) -> Any:
    what = f"metadata {key!r}"
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY:
        return _numbers(cursor, kind, 1, what)[0].item()
    kind, count = cursor.u32(what), cursor.u64(what)
    if kind != _STRING:
        return _numbers(cursor, kind, count, what)
    cursor.need(count * 8, f"{what} of {count} strings")
    return cursor.texts(what, count)


def _numbers(cursor: _Cursor, kind: int, count: int, what: str) -> NDArray[Any]:
    if kind not in _SCALARS:
        raise _damaged(cursor.path, f"{what} has the unknown type {kind}", "damaged or too new")
    dtype = np.dtype(_SCALARS[kind])
    data = cursor.take(count * dtype.itemsize, what)
    if kind == _BOOL:
        data = bytes(byte != 0 for byte in data)
    return np.frombuffer(data, dtype)


class _Row(NamedTuple):
    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


def _tensor_row(cursor: _Cursor) -> _Row:
    name = cursor.text("a tensor name", _MAX_NAME_BYTES)
    num_axes = cursor.u32(f"tensor {name!r}")
    if num_axes > _MAX_DIMENSIONS:
        raise _damaged(cursor.path, f"tensor {name!r} has {num_axes} axes", "damaged")
    axes = struct.unpack(f"<{num_axes}Q", cursor.take(8 * num_axes, f"tensor {name!r}"))
    return _Row(name, cursor.u32(f"tensor {name!r}"), axes[::-1], cursor.u64(f"tensor {name!r}"))


def _place(cursor: _Cursor, rows: list[_Row], alignment: Any) -> dict[str, TensorInfo]:
    """Resolve sizes and offsets; refuse what lies outside the file, overlaps or is not readable."""
    path = cursor.path
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise _damaged(path, f"general.alignment is {alignment!r}", "damaged")
    data_start = -(-cursor.position // alignment) * alignment
    table: dict[str, TensorInfo] = {}
    for row in rows:
        if row.name in table:
            raise _damaged(path, f"tensor {row.name!r} occurs twice", "damaged")
        info = _info(path, row, data_start)
        if info.offset + info.num_bytes > cursor.size:
            raise _damaged(
                path,
                f"tensor {row.name!r} ends at byte {info.offset + info.num_bytes} of {cursor.size}",
                "truncated",
            )
        table[row.name] = info
    # Rows that share bytes would let a small file ask for any amount of memory.
    end = data_start
    for name, info in sorted(table.items(), key=lambda item: item[1].offset):
        if info.offset < end:
            raise _damaged(path, f"tensor {name!r} overlaps the one before", "damaged")
        end = info.offset + info.num_bytes
    return table


def _info(path: Path, row: _Row, data_start: int) -> TensorInfo:
    supported = ", ".join(kind.name for kind in SUPPORTED_TYPES)
    try:
        kind = Type(row.type)
    except ValueError as error:
        raise _damaged(
            path, f"tensor {row.name!r} has the unknown type {row.type}", "damaged or too new"
        ) from error
    if kind not in SUPPORTED_TYPES:
        raise UserError(
            f"{path}: tensor {row.name!r} has type {kind.name}, which is not supported.",
            fix=f"use a file quantised to one of {supported}.",
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = math.prod(row.shape)
    if count == 0 or not row.shape or row.shape[-1] % block:
        raise _damaged(
            path,
            f"tensor {row.name!r} of type {kind.name} has the shape {list(row.shape)}",
            f"rows must be multiples of {block}",
        )
    return TensorInfo(kind, row.shape, data_start + row.offset, count // block * block_bytes)


def _damaged(path: Path, what: str, why: str) -> UserError:
    return UserError(f"{path}: {what} ({why}).", fix=_REFETCH)


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: {error.strerror}.", fix="check the path and its permissions.")
