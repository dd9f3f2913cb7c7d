"""Policy losses: small pure functions over per-token streams.

Each takes the log-prob of every target token under the policy being trained, the log-prob it was
sampled with (the behaviour), and its advantage; it returns one loss per token. Nothing is averaged
here: the trainer divides the sum by the number of target tokens of the *whole* step, so splitting a
step into micro-batches changes nothing.

Shapes: N target tokens.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from burnish.train.config import Algorithm, LossConfig

# exp() of a log-ratio beyond this is useless as a weight and overflows fp32 at 88.
MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """What a loss says about each token."""

    loss_N: Tensor
    """Loss, differentiable in the policy's log-probs."""
    clipped_N: Tensor
    """True where a clip or cap changed the gradient."""


def importance_ratio(logp_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Ratio pi / mu per token, differentiable, kept finite by bounding its logarithm."""
    return (logp_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def cispo(
    logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, *, eps_high: float = 4.0
) -> TokenLoss:
    """-sg[min(r, 1 + eps_high)] A log pi (MiniMax-M1, 2506.13585, eq. 4-5, no lower bound)."""
    ratio_N = importance_ratio(logp_N.detach(), behaviour_N)
    capped_N = ratio_N.clamp(max=1 + eps_high)
    return TokenLoss(-capped_N * advantage_N * logp_N, ratio_N > 1 + eps_high)


def ppo(
    logp_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
    proximal_N: Tensor | None = None,
    tis_cap: float = 2.0,
) -> TokenLoss:
    """-min(r A, clip(r) A), and at most dual_clip |A| where A < 0 (Ye et al. 2020, eq. 5).

    With `proximal_N` the ratio is taken to that policy and the loss is weighted by
    min(pi_proximal / mu, tis_cap) (decoupled PPO, Hilton et al. 2022, eq. 2, truncated).
    """
    centre_N = behaviour_N if proximal_N is None else proximal_N
    ratio_N = importance_ratio(logp_N, centre_N)
    plain_N = -advantage_N * ratio_N
    clipped_N = -advantage_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(plain_N, clipped_N)
    cut_N = clipped_N.detach() > plain_N.detach()
    ceiling_N = -advantage_N * dual_clip
    over_N = (advantage_N < 0) & (loss_N.detach() > ceiling_N)
    loss_N = torch.where(over_N, ceiling_N, loss_N)
    if proximal_N is not None:
        weight_N = importance_ratio(proximal_N, behaviour_N).clamp(max=tis_cap)
        loss_N = weight_N.detach() * loss_N
    return TokenLoss(loss_N, cut_N | over_N)


def policy_loss(
    config: LossConfig, logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor
) -> TokenLoss:
    """The configured loss."""
    if config.algorithm is Algorithm.CISPO:
        return cispo(logp_N, behaviour_N, advantage_N, eps_high=config.cispo_eps_high)
    return ppo(
        logp_N,
        behaviour_N,
        advantage_N,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        proximal_N=logp_N.detach() if config.decoupled else None,
        tis_cap=config.tis_cap,
    )


def kl_loss(
    logp_N: Tensor,
    reference_N: Tensor,
    behaviour_N: Tensor,
    *,
    estimator: Literal["ratio_k3", "k2"] = "ratio_k3",
) -> Tensor:
    """KL(policy || reference) per token, with its exact gradient in expectation.

    `ratio_k3` is r (exp(d) - d - 1) with d = log ref - log pi and the ratio r differentiable
    (DeepSeek-V3.2); `k2` is sg[r] d^2 / 2. Plain k3 in the loss would have the gradient of the
    other direction, KL(reference || policy). The ratio corrects for tokens that another policy
    sampled; on-policy it is 1 and only its gradient matters.
    """
    delta_N = reference_N - logp_N
    ratio_N = importance_ratio(logp_N, behaviour_N)
    if estimator == "k2":
        return ratio_N.detach() * 0.5 * delta_N.square()
    bounded_N = delta_N.clamp(max=MAX_LOG_RATIO)
    return ratio_N * (bounded_N.exp() - delta_N - 1)
