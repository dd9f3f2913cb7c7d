"""Everything about optimisation that a run can set."""

from typing import Annotated, Literal

from pydantic import Field

from burnish.core.config import Config
from burnish.train.losses import LossConfig

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]


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
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    adam_eps: Rate = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of matrices; never of norms, biases or the embedding."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: Positive = 2048
    """Stored tokens per forward pass, shared prompts counted once."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the forward and backward pass; masters, moments and summed gradients are fp32."""
    checkpoint_activations: bool = False
    """Compute each block again in the backward pass: less memory, a third more work."""
    loss: LossConfig = LossConfig()
    """Policy loss and KL."""
