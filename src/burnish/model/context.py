"""Contexts longer than a model was trained on."""

import msgspec

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.model.rope_scaling import DynamicRope, LinearRope, RopeKind, RopeScaling, YarnRope


def stretch(config: ModelConfig, context: int | None, kind: RopeKind) -> ModelConfig:
    """The configuration of the same weights for contexts of `context` tokens.

    A context that the model has already changes nothing, so short prompts keep their logits.

    Raises:
        UserError: if the model is stretched already.
    """
    trained = config.max_position_embeddings
    if context is None or context <= trained:
        return config
    if config.rope_scaling is not None:
        raise UserError(
            f"model.context is {context}, but the model's positions are already stretched to"
            f" {trained}.",
            fix=f"lower model.context to {trained} or leave it out.",
        )
    factor = context / trained
    scaling: RopeScaling
    if kind == "linear":
        scaling = LinearRope(factor=factor)
    elif kind == "dynamic":
        scaling = DynamicRope(factor=factor, original_max_position_embeddings=trained)
    else:
        scaling = YarnRope(factor=factor, original_max_position_embeddings=trained)
    return msgspec.structs.replace(config, max_position_embeddings=context, rope_scaling=scaling)
