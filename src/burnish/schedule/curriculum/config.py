"""What can be configured about the choice of items."""

from __future__ import annotations

from pydantic import Field

from burnish.core.config import Config


class CurriculumConfig(Config):
    """Which items of a domain, and how many samples of each."""

    tiers: bool = True
    """Choose tiers of difficulty, in domains whose environment declares them."""
    easy_share: float = Field(default=0.05, ge=0.0, le=0.5, allow_inf_nan=False)
    """Part of a domain's groups that rehearses items it has mastered; 0 turns rehearsal off. The
    protected floor goes to mastered domains as well, so half of what others keep is enough."""
    size_ratio: float = Field(default=1.0, ge=1.0, le=8.0, allow_inf_nan=False)
    """How many times `rollout.group_size` a group may be, or a part of it: samples go where they
    are most likely to differ, and their mean number stays. 1 makes all groups alike."""
