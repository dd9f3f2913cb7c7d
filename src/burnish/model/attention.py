"""Reference attention: dense and causal, one sequence after another. Slow, short and exact.

Shapes: T tokens of all sequences together, S tokens of one, H query heads, K key/value heads,
D head width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.model.decoder import Decoder


class DenseAttention:
    """An `Attend` over whole sequences laid end to end."""

    def __init__(self, lengths: Sequence[int], window: int | None = None) -> None:
        """Attend within each of `lengths`; a query sees `window` keys back, itself included."""
        self.lengths = list(lengths)
        self.window = window

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Outputs [T, H, D]; every layer attends alike."""
        assert sum(self.lengths) == q_THD.shape[0], (self.lengths, q_THD.shape)
        repeat = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = (x.repeat_interleave(repeat, dim=1) for x in (k_TKD, v_TKD))
        outputs, start = [], 0
        for length in self.lengths:
            # [H, S, D]: heads are the batch.
            q, k, v = (x.narrow(0, start, length).transpose(0, 1) for x in (q_THD, k_THD, v_THD))
            mask = causal_mask(length, self.window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            outputs.append(out.transpose(0, 1))
            start += length
        return torch.cat(outputs)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Booleans [S, S]: True where query i may see key j."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def forward_dense(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of one sequence, in fp32."""
    device = decoder.embedding.weight.device
    ids_T = torch.tensor(ids, dtype=torch.long, device=device)
    attend = DenseAttention([len(ids)], decoder.config.sliding_window)
    return decoder.logits(decoder(ids_T, torch.arange(len(ids), device=device), attend))
