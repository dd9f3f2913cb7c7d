"""What a training step reports.

Sums are collected per micro-batch and divided once, by counts over the whole step, so the figures
do not depend on how the step was cut.
"""

import math
from typing import NamedTuple

from torch import Tensor

from burnish.core.records import Record
from burnish.train.losses import MAX_LOG_RATIO


class StepMetrics(Record, frozen=True, kw_only=True):
    """One optimizer step."""

    step: int
    """Number of this step, from 1."""
    loss: float
    """Policy loss plus weighted KL, per target token."""
    policy_loss: float
    """Policy loss per target token."""
    kl_reference: float | None
    """Estimated KL(policy || reference) per target token; None without a reference."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate used."""
    ratio_mean: float
    """Mean of policy / behaviour."""
    ratio_max: float
    """Largest ratio."""
    kl_behaviour_k1: float
    """Mean of log behaviour - log policy: KL(behaviour || policy), unbiased, may be negative."""
    kl_behaviour_k3: float
    """The same quantity by the estimator that is never negative."""
    entropy: float
    """Mean entropy of the policy, nats."""
    clip_ratio: float
    """Share of target tokens whose gradient a clip or cap changed."""
    ess_ratio: float
    """Effective sample size of the ratios over the number of tokens: (sum r)^2 / (N sum r^2)."""
    num_sequences: int
    """Sequences trained."""
    num_target_tokens: int
    """Tokens in the loss."""
    num_tokens: int
    """Tokens of all sequences, shared prompts counted in each."""
    num_stored_tokens: int
    """Tokens that were computed, shared prompts counted once per micro-batch."""
    num_micro_batches: int
    """Forward passes."""
    seconds: float
    """Wall time."""
    optimizer_s: float
    """Part of it in clipping and the optimizer."""


class SftMetrics(Record, frozen=True, kw_only=True):
    """One supervised step."""

    step: int
    """Number of this step, from 1."""
    loss: float
    """Negative log-likelihood per target token, nats."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate used."""
    entropy: float
    """Mean entropy of the policy, nats."""
    num_sequences: int
    """Sequences trained."""
    num_target_tokens: int
    """Tokens in the loss."""
    num_tokens: int
    """Tokens of all sequences."""
    seconds: float
    """Wall time."""


class Tally:
    """Running sums over the target tokens of a step, in float64."""

    def __init__(self) -> None:
        """All zero."""
        self.loss = self.policy = self.kl = self.entropy = 0.0
        self.ratio = self.ratio_square = self.ratio_max = 0.0
        self.k1 = self.k3 = self.clipped = 0.0

    def add(self, piece: "Piece") -> None:
        """Take in some target tokens."""
        log_ratio = (piece.logp_N - piece.behaviour_N).double()
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        self.policy += piece.policy_N.double().sum().item()
        self.kl += 0.0 if piece.kl_N is None else piece.kl_N.double().sum().item()
        self.entropy += piece.entropy_N.double().sum().item()
        self.ratio += ratio.sum().item()
        self.ratio_square += ratio.square().sum().item()
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        self.k1 -= log_ratio.sum().item()
        self.k3 += (ratio - 1 - log_ratio).sum().item()
        self.clipped += piece.clipped_N.sum().item()

    @property
    def is_finite(self) -> bool:
        """Whether everything summed so far is a number."""
        return math.isfinite(self.policy) and math.isfinite(self.kl) and math.isfinite(self.k1)


class Piece(NamedTuple):
    """Target tokens of one chunk, detached."""

    logp_N: Tensor
    """Under the policy."""
    behaviour_N: Tensor
    """As sampled."""
    entropy_N: Tensor
    """Of the policy."""
    policy_N: Tensor
    """Policy loss."""
    clipped_N: Tensor
    """Whether a clip or cap changed the gradient."""
    kl_N: Tensor | None
    """KL to the reference, if there is one."""
