"""Which drafter an engine gets."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.clock import Clock
from burnish.core.errors import UserError
from burnish.core.vocabulary import Speculation
from burnish.model.config import ModelConfig
from burnish.rollout.engine.limits import SpeculationLimits
from burnish.rollout.engine.speculation.bodies import DraftModel, DraftShape, FirstLayers
from burnish.rollout.engine.speculation.lookup import LookupDrafter
from burnish.rollout.engine.speculation.model_drafter import ModelDrafter
from burnish.rollout.engine.speculation.speculator import Speculator


class DraftSource(NamedTuple):
    """A draft model to be loaded."""

    config: ModelConfig
    """Its architecture."""
    state: Mapping[str, Tensor]
    """Its weights, named as `Decoder.state_dict()`."""


class Served(NamedTuple):
    """The engine that it is for."""

    config: ModelConfig
    """Architecture of the target."""
    dtype: torch.dtype
    """Of its weights."""
    version: int
    """Of its weights."""
    device: torch.device
    """Where it computes."""
    state: Mapping[str, Tensor]
    """Its weights."""


def open_speculator(
    limits: SpeculationLimits, served: Served, source: DraftSource | None, clock: Clock | None
) -> tuple[Speculator | None, DraftModel | None]:
    """What `limits.kind` names, and the draft model if there is one; None if it is off.

    Raises:
        UserError: if the settings do not go together or the draft model does not fit.
    """
    if limits.kind is Speculation.OFF:
        return None, None
    if limits.kind is Speculation.LOOKUP:
        return Speculator(LookupDrafter(), limits.max_tokens, clock), None
    if limits.kind is Speculation.SELF:
        body = FirstLayers(
            served.config, limits.num_layers or max(1, served.config.num_layers // 4)
        )
        return Speculator(ModelDrafter(body, limits.sampling), limits.max_tokens, clock), None
    if source is None:
        raise UserError(
            "speculation by a draft model needs one.", fix="set engine.draft_model, or use lookup."
        )
    shape = DraftShape(served.dtype, served.version, limits.max_lag, served.device)
    draft = DraftModel(source.config, source.state, served.config, shape, served.state)
    return Speculator(ModelDrafter(draft, limits.sampling), limits.max_tokens, clock), draft
