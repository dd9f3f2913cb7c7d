"""The engine's own copy of the weights: checked completely, then swapped, never half-way."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.decoder import Attend, Decoder
from burnish.model.kernels.exact import refuse_inexact
from burnish.model.kernels.library import kernels
from burnish.model.kernels.matrix import all_finite
from burnish.model.kernels.native_adapted import PackedDelta
from burnish.model.kernels.native_decoder import NativeDecoder, native_problem
from burnish.model.lora import AdaptedRows, LayerDeltas, Lora, refuse_unfit
from burnish.model.rope import inverse_frequencies
from burnish.rollout.engine.argument_types import check_one
from burnish.rollout.engine.linear import AdaptedLinear, AdapterScope, PackedLinear, PlainDelta
from burnish.rollout.engine.placement import CPU

_PACKED = ("qkv", "output", "gate_up", "down")


class Prepared(NamedTuple):
    """Weights ready to be served."""

    model: "ServedModel"
    """Checked and packed."""
    digest: str
    """Of what it was made from."""
    draft: "ServedModel | None" = None
    """The same for a draft model that follows."""


class ServedModel:
    """A decoder for inference in `dtype`, with packed matrices and logits in fp32.

    bf16 on a CPU with kernels of ours runs on those; else PyTorch's operators do the work.

    Shapes: T tokens, E hidden width, N selected tokens, V vocabulary.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        dtype: torch.dtype,
        *,
        exact: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """Copy `state`, named as `Decoder.state_dict()`.

        Args:
            config: shape of the model.
            state: weights, in any floating-point type.
            dtype: to compute in.
            exact: a token's bits may depend on nothing but the tokens before it.
            device: where they lie.

        Raises:
            UserError: if the state does not fit the configuration or is not finite, or this machine
                cannot be exact.
        """
        if exact:
            refuse_inexact(config, dtype)
        self.config, self.dtype, self.device = config, dtype, device
        self._shapes = _expected_shapes(config)
        self._decoder: Decoder | None = None
        self._head: PackedLinear | None = None
        self._scope = AdapterScope()
        self._native: NativeDecoder | None = None
        self._use_native = dtype is torch.bfloat16 and native_problem(config) is None
        if device.type != "cpu" or (kernels().prefers_onednn and not exact):
            self._use_native = False
        self.load(state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all weights by copies of `state`; on a UserError nothing has changed."""
        self.check(state)
        with torch.inference_mode():
            if self._native is not None:
                self._native.load(state)
            elif self._use_native:
                self._native = NativeDecoder(self.config, state)
            if self._native is not None:
                return
            decoder = self._decoder = self._decoder or _empty_decoder(self.config)
            decoder.inv_freq = decoder.inv_freq.to(self.device)
            plain = {
                name: state[name].detach().to(self.device, self.dtype) for name in self._shapes
            }
            for i, block in enumerate(decoder.blocks):
                _fill_block(block, i, plain, self._scope)
            decoder.embedding.weight = _frozen(plain["embedding.weight"].clone())
            decoder.norm.weight = _frozen(plain["norm.weight"].clone())
            head = plain["lm_head.weight" if "lm_head.weight" in plain else "embedding.weight"]
            decoder.lm_head = None
            # The head multiplies in fp32: bf16 logits near 20 would be off by 0.06 nats.
            self._head = PackedLinear(head.float(), None)

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state whose names, shapes, types or values cannot be served.

        Raises:
            UserError: naming the first offending tensor.
        """
        check_one("the state of the weights", state, (Mapping,))
        _check_names(state.keys(), self._shapes.keys())
        for name, shape in self._shapes.items():
            tensor = state[name]
            check_one(f"weight {name}", tensor, (Tensor,))
            if tuple(tensor.shape) != shape:
                raise UserError(
                    f"weight {name} has shape {tuple(tensor.shape)}, the engine serves {shape}.",
                    fix="publish weights of the model that the engine was started with.",
                )
            if not tensor.dtype.is_floating_point:
                raise UserError(
                    f"weight {name} has type {tensor.dtype}.", fix="publish floating-point weights."
                )
            if not is_finite(tensor):
                raise UserError(
                    f"weight {name} is not finite: refused, the old weights stay.",
                    fix="start a new run with a lower train.lr.",
                )

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        *,
        adapters: Sequence[AdaptedRows] = (),
        num_layers: int | None = None,
    ) -> Tensor:
        """Final hidden states [T, E].

        Args:
            ids_T: tokens.
            positions_T: 0-based within each sequence.
            attend: attention of each layer.
            adapters: rows that go through adapters.
            num_layers: only the first so many, then the norm; None for all.
        """
        if self._native is not None:
            return self._native.hidden(
                ids_T, positions_T, attend, adapters=adapters, num_layers=num_layers
            )
        decoder, self._scope.rows = self._decoder, adapters
        assert decoder is not None
        x_TE = decoder.embedding(ids_T)
        cos_TD, sin_TD = decoder.rope(positions_T, x_TE.dtype)
        for block in decoder.blocks[:num_layers]:
            x_TE = block(x_TE, cos_TD, sin_TD, attend)
        hidden: Tensor = decoder.norm(x_TE)
        return hidden

    def adapt(self, lora: Lora) -> list[LayerDeltas]:
        """An adapter in the form that `hidden` takes; it fits all weights of this model.

        Raises:
            UserError: if it was made for another model, or is not finite.
        """
        refuse_unfit(lora, self.config)
        if self._native is not None:
            return [{name: PackedDelta(low) for name, low in x.items()} for x in lora.layers]
        device = self.device
        return [{name: PlainDelta(low, device) for name, low in x.items()} for x in lora.layers]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits [N, V] in fp32."""
        if self._native is not None:
            return self._native.logits(hidden_NE)
        assert self._head is not None
        logits: Tensor = self._head(hidden_NE.float())
        return logits


def _empty_decoder(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.requires_grad_(requires_grad=False)
    decoder.inv_freq = inverse_frequencies(config)
    return decoder


@cache
def _expected_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Of `Decoder.state_dict()`; building one takes 0.2 s, which every update would wait for."""
    state = _empty_decoder(config).state_dict()
    return MappingProxyType({name: tuple(tensor.shape) for name, tensor in state.items()})


def is_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    has_kernel = tensor.dtype in (torch.bfloat16, torch.float32) and tensor.device.type == "cpu"
    if has_kernel and kernels().library is not None:
        return all_finite(tensor)
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def _check_names(given: Iterable[str], wanted: Iterable[str]) -> None:
    missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or unknown:
        parts = [
            f"{len(names)} {word} (first: {names[0]})"
            for names, word in ((missing, "missing"), (unknown, "unknown"))
            if names
        ]
        raise UserError(
            f"the published weights do not fit the served model: {', '.join(parts)}.",
            fix="publish the complete Decoder.state_dict() of the served model.",
        )


def _fill_block(
    block: nn.Module, number: int, plain: Mapping[str, Tensor], scope: AdapterScope
) -> None:
    prefix = f"blocks.{number}."
    for name in _PACKED:
        weight = plain[f"{prefix}{name}.weight"]
        linear = PackedLinear(weight, plain.get(f"{prefix}{name}.bias"))
        setattr(block, name, AdaptedLinear(linear, number, name, scope))
    for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        norm = getattr(block, name)
        if norm is not None:
            norm.weight = _frozen(plain[f"{prefix}{name}.weight"].clone())


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
