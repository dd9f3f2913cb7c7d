"""Log-probs of target tokens through the language-model head, without keeping logits.

Shapes: N targets, E hidden width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.model.kernels.draw import given_logprobs

# Rows of fp32 logits that exist at once: 512 x 49152 is 96 MiB, and larger GEMMs gain nothing.
CHUNK_ROWS = 512


class HeadOutput(NamedTuple):
    """Of each target."""

    logp_N: Tensor
    """Log-prob under the softmax of logits / temperature; differentiable."""
    entropy_N: Tensor
    """Entropy of that softmax in nats; a statistic without gradient."""


def target_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    weight32_VE: Tensor | None = None,
    exact_logits: Callable[[Tensor], Tensor] | None = None,
) -> HeadOutput:
    """Log-probs in fp32; differentiable in hidden states and head.

    The forward product is fp32: rounding logits to bf16 would move log-probs by up to 0.06 nats.
    The gradient of the logits is rounded to the dtype of the model, after the difference between
    target and probability is taken, so that a nearly certain token keeps a precise gradient.

    Args:
        hidden_NE: final hidden states, at most about `CHUNK_ROWS` of them.
        weight_VE: the head.
        target_ids_N: tokens asked for.
        temperature: of the distribution that the tokens were sampled from.
        weight32_VE: `weight_VE` in fp32, for callers with several chunks (50 ms at 49152 x 576).
        exact_logits: the head's product by the engine's kernels, instead of the fp32 product; the
            log-probs then have the bits of the engine's.
    """
    if weight32_VE is None and exact_logits is None:
        weight32_VE = weight_VE.detach().float()
    logp_N, entropy_N = _TargetLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NE, weight_VE, weight32_VE, exact_logits, target_ids_N, temperature
    )
    return HeadOutput(logp_N, entropy_N)


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        weight32_VE: Tensor | None,
        exact_logits: Callable[[Tensor], Tensor] | None,
        target_ids_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        exact_N = None
        if exact_logits is not None:
            logits_NV = exact_logits(hidden_NE)
            temperature_N = torch.full((len(logits_NV),), temperature)
            exact_N = given_logprobs(logits_NV, target_ids_N, temperature_N).float()
        else:
            assert weight32_VE is not None
            logits_NV = F.linear(hidden_NE.float(), weight32_VE)
        if temperature != 1.0:
            logits_NV /= temperature
        index_N1 = target_ids_N[:, None]
        probs_NV = torch.softmax(logits_NV, dim=-1)
        # The most likely token has probability exp(max - lse): no second pass of exponentials.
        lse_N = logits_NV.amax(-1) - probs_NV.amax(-1).log()
        logp_N = logits_NV.gather(1, index_N1).squeeze(1) - lse_N
        mean_logit_N = torch.einsum("nv,nv->n", probs_NV, logits_NV)
        entropy_N = lse_N - mean_logit_N
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dlogits_NV = probs_NV.neg_()
            dlogits_NV.scatter_add_(1, index_N1, torch.ones_like(index_N1, dtype=torch.float32))
            ctx.save_for_backward(dlogits_NV.to(hidden_NE.dtype), hidden_NE, weight_VE)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_N)
        return logp_N if exact_N is None else exact_N, entropy_N

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dlogits_NV, hidden_NE, weight_VE = ctx.saved_tensors
        # Each row times its scalar, after the products where that is cheaper: N x E, not N x V.
        scale_N1 = (dlogp_N / ctx.temperature)[:, None]
        dhidden_NE = (dlogits_NV @ weight_VE).float() * scale_N1
        scaled_NE = (hidden_NE.float() * scale_N1).to(hidden_NE.dtype)
        return dhidden_NE.to(hidden_NE.dtype), dlogits_NV.mT @ scaled_NE, None, None, None, None
