"""A reasoning-gym generator whose items come in tiers, by one of their own figures."""

from __future__ import annotations

from pydantic import Field

from burnish.core.records import Task
from burnish.envs.base import Item
from burnish.envs.reasoning_gym import ReasoningGym, ReasoningGymConfig


class TieredReasoningGymConfig(ReasoningGymConfig):
    """Which figure of an item says how hard it is."""

    tier_by: str
    """Key of the item's metadata, such as `num_terms`."""
    easiest: int
    """Its value in the easiest tier."""
    num_tiers: int = Field(ge=1)
    """Values from there on, one tier each."""


class TieredReasoningGym(ReasoningGym):
    """One generator as a domain that the curriculum climbs."""

    def __init__(self, config: TieredReasoningGymConfig) -> None:
        """Build the generator's stream.

        Raises:
            UserError: for generators that are refused or unknown, and bad parameters.
        """
        self._tier_by, self._easiest = config.tier_by, config.easiest
        self.num_tiers = config.num_tiers
        super().__init__(config)

    def draw(self, position: int) -> Item:
        """Item `position` of the stream; its tier is for the curriculum, not for the model."""
        item = super().draw(position)
        value = int(self._stream[position]["metadata"][self._tier_by])
        return Item(item.prompt, item.payload | {"tier": value - self._easiest})

    def tier(self, task: Task) -> int:
        """How much longer it is than the shortest."""
        tier: int = task.payload["tier"]
        return tier
