"""A GGUF file with its weights in BF16: what llama.cpp is measured with."""

from pathlib import Path

import gguf
import numpy as np


def write_bf16(source: Path, target: Path) -> None:
    """Copy `source` with every matrix in BF16; vectors stay fp32. Its layout is already GGUF's."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        name = field.name
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        writer.add_key_value(name, value, kind, item)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
        values = values.reshape(shape)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType.BF16
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
