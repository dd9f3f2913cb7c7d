"""The decoder's forward by the native kernels: two calls per layer around its attention.

    embedding -> x -> [layer_begin -> attend -> layer_end] * layers -> norm -> hidden -> head

Rounds to bf16 where `model.decoder.Decoder` does. A token's result depends on its own row and on
what attention returns for it alone.

Shapes: T tokens, E hidden width, H query heads, K key/value heads, D head width, N selected tokens,
V vocabulary.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.config import ModelConfig
from burnish.model.decoder import Attend
from burnish.model.kernels.library import function, kernels
from burnish.model.kernels.matrix import MOST_INPUTS, MatrixView, PackedMatrix
from burnish.model.kernels.memory import lazy_zeros
from burnish.model.kernels.native_adapted import AdaptedLayer, LayerParts, Region, regions
from burnish.model.kernels.norm import rms_norm
from burnish.model.lora import AdaptedRows
from burnish.model.rope import cosines_and_sines, inverse_frequencies

_P, _I, _C = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_MATRICES = ("qkv", "output", "gate_up", "down")
# Room for logits grows by so many rows at a time.
_LOGIT_ROWS = 64
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")


class _LayerView(ctypes.Structure):
    """`struct layer` of kernels.h."""

    _fields_ = (
        *((name, MatrixView) for name in _MATRICES),
        *((name, ctypes.c_void_p) for name in _NORMS),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_width", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class _Scratch(NamedTuple):
    """What a layer writes for itself, reused by the next."""

    normed_TE: Tensor
    qkv_T: Tensor
    inner_T: Tensor


class _Flat(NamedTuple):
    """A step's rows on their way through the layers."""

    x_TE: Tensor
    cos_TD: Tensor
    sin_TD: Tensor
    scratch: _Scratch
    regions: list[Region]

    def rows(self, region: Region) -> tuple[Tensor, Tensor, Tensor, _Scratch]:
        """What belongs to a region; nothing is copied."""
        if len(self.regions) == 1:
            return self.x_TE, self.cos_TD, self.sin_TD, self.scratch
        rows = slice(region.start, region.stop)
        scratch = _Scratch(*(buffer[rows] for buffer in self.scratch))
        return self.x_TE[rows], self.cos_TD[rows], self.sin_TD[rows], scratch


class NativeDecoder:
    """Packed bf16 weights of a decoder, and its forward; for one thread at a time."""

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
        """Pack copies of `state`, bf16 or fp32, named as `Decoder.state_dict()`."""
        assert kernels().library is not None
        self.config, self._isa = config, kernels().isa
        self._inv_freq = inverse_frequencies(config)
        self._layers = [_Layer(config, state, i) for i in range(config.num_layers)]
        self._embedding_VE = state["embedding.weight"].detach().to(torch.bfloat16, copy=True)
        self._norm_E = state["norm.weight"].detach().to(torch.bfloat16, copy=True)
        self._head = PackedMatrix(_head_of(state))
        self._scratch = self._room(1)
        self._logits_V = torch.empty(0)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all weights in place."""
        for layer in self._layers:
            layer.load(state)
        self._embedding_VE.copy_(state["embedding.weight"].detach())
        self._norm_E.copy_(state["norm.weight"].detach())
        self._head.fill(_head_of(state))

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        *,
        adapters: Sequence[AdaptedRows] = (),
        num_layers: int | None = None,
    ) -> Tensor:
        """Final hidden states [T, E], normed. What `attend` gets is valid during its call only.

        Args:
            ids_T: tokens.
            positions_T: 0-based within each sequence.
            attend: attention of each layer.
            adapters: rows that go through adapters; the others keep their bits.
            num_layers: only the first so many, then the norm; None for all.
        """
        c, rows = self.config, len(ids_T)
        if rows > len(self._scratch.qkv_T):
            self._scratch = self._room(rows)
        scratch = _Scratch(*(buffer[:rows] for buffer in self._scratch))
        x_TE = self._embedding_VE.index_select(0, ids_T)
        cos_TD, sin_TD = cosines_and_sines(c, self._inv_freq, positions_T, torch.bfloat16)
        flat = _Flat(x_TE, cos_TD, sin_TD, scratch, regions(rows, adapters))
        heads = scratch.qkv_T.view(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), dim=1)
        for i, layer in enumerate(self._layers[:num_layers]):
            self._begin(layer, i, flat)
            attended = attend(i, q, k, v)
            if not attended.is_contiguous():
                attended = attended.contiguous()
            self._end(layer, i, flat, attended.view(rows, -1))
        return rms_norm(x_TE, self._norm_E, c.rms_norm_eps)

    def _begin(self, layer: "_Layer", number: int, flat: "_Flat") -> None:
        call = function("layer_begin", self._isa, _P, _P, _I, _P, _P, _P, _P, _C)
        for region in flat.regions:
            x_TE, cos_TD, sin_TD, scratch = flat.rows(region)
            if region.adapted:
                adapted = AdaptedLayer(self.config, layer.parts, number, region)
                adapted.begin(x_TE, cos_TD, sin_TD, scratch.qkv_T)
                continue
            call(
                layer.address,
                x_TE.data_ptr(),
                len(x_TE),
                cos_TD.data_ptr(),
                sin_TD.data_ptr(),
                scratch.normed_TE.data_ptr(),
                scratch.qkv_T.data_ptr(),
                torch.get_num_threads(),
            )

    def _end(self, layer: "_Layer", number: int, flat: "_Flat", attended_T: Tensor) -> None:
        call = function("layer_end", self._isa, _P, _P, _I, _P, _P, _P, _C)
        for region in flat.regions:
            x_TE, _, _, scratch = flat.rows(region)
            part_T = attended_T[region.start : region.stop]
            if region.adapted:
                AdaptedLayer(self.config, layer.parts, number, region).end(x_TE, part_T)
                continue
            call(
                layer.address,
                x_TE.data_ptr(),
                len(x_TE),
                part_T.data_ptr(),
                scratch.normed_TE.data_ptr(),
                scratch.inner_T.data_ptr(),
                torch.get_num_threads(),
            )

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits [N, V] in fp32; the next call writes over them.

        Memory of its own for each step would come from the system and go back to it: 256 rows of
        50 MB cost 30 to 90 ms of a step of 420 in page faults (Zen 4, one thread).
        """
        rows, width = len(hidden_NE), self._head.outputs
        if rows * width > len(self._logits_V):
            most = -(-rows // _LOGIT_ROWS) * _LOGIT_ROWS
            self._logits_V = lazy_zeros(most * width, dtype=torch.float32)
        out_NV = self._logits_V[: rows * width].view(rows, width)
        return self._head.linear_fp32(hidden_NE, out_NV)

    def _room(self, rows: int) -> _Scratch:
        c = self.config
        widths = (
            c.hidden_size,
            (c.num_heads + 2 * c.num_kv_heads) * c.head_dim,
            c.intermediate_size,
        )
        return _Scratch(*(torch.empty(rows, width, dtype=torch.bfloat16) for width in widths))


class _Layer:
    """Weights of one layer, and the structure that points to them."""

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor], index: int) -> None:
        self._prefix = f"blocks.{index}."
        self._matrices = {
            name: PackedMatrix(*self._find(state, name), gated=name == "gate_up")
            for name in _MATRICES
        }
        self._norms = {
            name: state[f"{self._prefix}{name}.weight"].detach().to(torch.bfloat16, copy=True)
            for name in _NORMS
            if f"{self._prefix}{name}.weight" in state
        }
        self._view = _LayerView(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_width=config.head_dim,
            eps=config.rms_norm_eps,
            **{name: matrix.view for name, matrix in self._matrices.items()},
            **{name: norm.data_ptr() for name, norm in self._norms.items()},
        )
        self.address = ctypes.addressof(self._view)
        self.parts = LayerParts(self._matrices, self._norms)

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, matrix in self._matrices.items():
            matrix.fill(*self._find(state, name))
        for name, norm in self._norms.items():
            norm.copy_(state[f"{self._prefix}{name}.weight"].detach())

    def _find(self, state: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor | None]:
        key = f"{self._prefix}{name}"
        return state[f"{key}.weight"], state.get(f"{key}.bias")


def native_problem(config: ModelConfig) -> str | None:
    """Why the native forward cannot serve such a model; None if it can."""
    found = kernels()
    if found.library is None:
        return found.problem or "BURNISH_KERNELS=torch"
    # Rows of the activations follow each other without the pad that an odd width would need.
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    if any(width % 2 for width in (*widths, config.head_dim)):
        return f"a width of the model is odd: {widths}"
    if max(widths) > MOST_INPUTS:
        return f"a width of the model is over {MOST_INPUTS:,}: {widths}"
    return None


def _head_of(state: Mapping[str, Tensor]) -> Tensor:
    return state["lm_head.weight" if "lm_head.weight" in state else "embedding.weight"]
