"""A packed forward and backward through the decoder.

The head runs in chunks, each with its loss and its backward, so at most one chunk of logits exists.
The gradient of the embedding's rows is summed in fp32: a bf16 sum over the hundreds of copies of a
frequent token would swallow most of them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burnish.model.decoder import Attend, Block, Decoder
from burnish.train.attention import PackedAttention
from burnish.train.exact.attention import ExactAttention
from burnish.train.exact.forward import ExactForward
from burnish.train.head import CHUNK_ROWS, HeadOutput, target_logprobs
from burnish.train.layout import Layout

ChunkLoss = Callable[[slice, HeadOutput], Tensor]
"""Maps a chunk of targets to the sum of its loss."""


class PackedForward(NamedTuple):
    """How to run a decoder over packs."""

    decoder: Decoder
    """The model, in its compute dtype."""
    temperature: float
    """Of the distribution that was sampled from."""
    checkpoint_activations: bool
    """Compute blocks again in the backward pass."""
    exact: ExactForward | None = None
    """Compute forwards by the engine's kernels, of the decoder that it was made for."""

    def of(self, decoder: Decoder) -> "PackedForward":
        """The same way through another decoder, by PyTorch's operators if that one is not bf16."""
        exact = None
        if self.exact is not None and decoder.embedding.weight.dtype is torch.bfloat16:
            exact = self.exact.of(decoder)
        return self._replace(decoder=decoder, exact=exact)

    def backward(self, layout: Layout, loss: ChunkLoss, embedding_grad: Tensor) -> None:
        """Accumulate gradients of all parameters for the sum of `loss` over chunks.

        Args:
            layout: the pack.
            loss: called once per chunk of targets.
            embedding_grad: fp32 [V, E]; receives the gradient of the looked-up rows.
        """
        embedded_TE = self.decoder.embedding(layout.ids_T).detach().requires_grad_()
        hidden_TE = self._hidden(layout, embedded_TE)
        leaf_TE = hidden_TE.detach()
        dhidden_TE = torch.zeros(leaf_TE.shape, dtype=torch.float32, device=leaf_TE.device)
        weight = self.decoder.head_weight()
        weight32 = None if self.exact else weight.detach().float()
        for chunk in _chunks(layout):
            rows = layout.target_rows_N[chunk]
            hidden_NE = leaf_TE.index_select(0, rows).requires_grad_()
            output = target_logprobs(
                hidden_NE,
                weight,
                layout.target_ids_N[chunk],
                temperature=self.temperature,
                weight32_VE=weight32,
                exact_logits=None if self.exact is None else self.exact.logits,
            )
            loss(chunk, output).backward()  # type: ignore[no-untyped-call]
            assert hidden_NE.grad is not None
            dhidden_TE.index_add_(0, rows, hidden_NE.grad.float())
        hidden_TE.backward(dhidden_TE.to(hidden_TE.dtype))  # type: ignore[no-untyped-call]
        assert embedded_TE.grad is not None
        embedding_grad.index_add_(0, layout.ids_T, embedded_TE.grad.float())

    @torch.no_grad()
    def logprobs(self, layout: Layout) -> Tensor:
        """Log-prob of each target, fp32 [N], without gradient."""
        hidden_TE = self._hidden(layout, self.decoder.embedding(layout.ids_T))
        weight = self.decoder.head_weight()
        weight32 = None if self.exact else weight.float()
        parts = [
            target_logprobs(
                hidden_TE.index_select(0, layout.target_rows_N[chunk]),
                weight,
                layout.target_ids_N[chunk],
                temperature=self.temperature,
                weight32_VE=weight32,
                exact_logits=None if self.exact is None else self.exact.logits,
            ).logp_N
            for chunk in _chunks(layout)
        ]
        return torch.cat(parts)

    def _hidden(self, layout: Layout, x_TE: Tensor) -> Tensor:
        decoder, exact = self.decoder, self.exact
        attend: Attend = PackedAttention(layout, decoder.config.sliding_window)
        if exact is not None:
            attend = ExactAttention(layout, decoder.config)
        cos_TD, sin_TD = decoder.rope(layout.positions_T, x_TE.dtype)
        for block in decoder.blocks:
            assert isinstance(block, Block)
            run = block if exact is None else partial(exact.block, block)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x_TE = checkpoint(run, x_TE, cos_TD, sin_TD, attend, use_reentrant=False)
            else:
                x_TE = run(x_TE, cos_TD, sin_TD, attend)
        hidden_TE: Tensor = decoder.norm(x_TE) if exact is None else exact.norm(x_TE)
        return hidden_TE


def _chunks(layout: Layout) -> Iterator[slice]:
    total = layout.target_ids_N.numel()
    for start in range(0, total, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, total))
