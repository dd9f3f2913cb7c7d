"""Everything about optimisation that a run can set."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from burnish.core.config import Config

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Algorithm(StrEnum):
    """Which policy loss."""

    CISPO = "cispo"
    """Capped importance weight as a constant: no token ever loses its gradient."""
    PPO = "ppo"
    """Clipped surrogate with dual clip."""
    GRPO = "grpo"
    """PPO's surrogate on advantages divided by the standard deviation of their group."""


class LossConfig(Config):
    """Choice and constants of the policy loss and of the KL component."""

    algorithm: Algorithm = Algorithm.CISPO
    """Policy loss."""
    cispo_eps_high: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """CISPO caps the ratio at 1 + this; there is no lower bound (MiniMax-M1; cap 5 in ScaleRL)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1, allow_inf_nan=False)
    """PPO and GRPO: lower clip."""
    clip_high: float = Field(default=0.28, gt=0, allow_inf_nan=False)
    """PPO and GRPO: upper clip (DAPO's clip-higher)."""
    dual_clip: float = Field(default=3.0, gt=1, allow_inf_nan=False)
    """PPO and GRPO: cap of the loss at this times |advantage| where the advantage is negative."""
    decoupled: bool = False
    """PPO and GRPO: clip around the policy at the start of the step, not around the behaviour."""
    tis_cap: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Decoupled only: truncation of the weight from the behaviour to that policy."""
    kl_coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL component; needs a reference model when above 0."""
    kl_estimator: Literal["ratio_k3", "k2"] = "ratio_k3"
    """Estimator of the KL component; both have the gradient of KL(policy || reference)."""


class TrainConfig(Config):
    """Optimisation."""

    lr: Rate = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: stay, or fall linearly to 0 at `schedule_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    """Steps over which the rate rises linearly to its peak."""
    schedule_steps: Positive = 1000
    """Where a linear schedule ends."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.95
    """Decay of the second moment."""
    adam_eps: Rate = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled decay of matrices; never of norms, biases or the embedding."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 2048
    """Stored tokens per forward pass, shared prompts counted once."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the forward and backward pass; masters, moments and summed gradients are fp32."""
    checkpoint_activations: bool = False
    """Compute each block again in the backward pass: less memory, a third more work."""
    exact: bool = False
    """Compute the forward by the engine's kernels: with `engine.exact`, the log-prob of a sampled
    token has the bits of the engine's, so the ratio is exactly 1 on policy. Needs bfloat16."""
    loss: LossConfig = LossConfig()
    """Policy loss and KL."""
