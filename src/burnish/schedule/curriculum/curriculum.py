r"""Which item a domain's next group trains, and with how many samples.

    choose(domain) --> rehearse a mastered item, if one is due      (easy_pool.py)
                   \-> else a new one of the tier that teaches most (tiers.py, items.py)
                       both sized by how likely samples differ      (group_size.py)
    judged(...)    --> posteriors of the tier, pool of mastered items

Randomness comes from the seed and the number of the choice, never from a stream: a resumed run
chooses as the one that was not killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from burnish.core.seeds import derive_seed
from burnish.schedule.curriculum.config import CurriculumConfig
from burnish.schedule.curriculum.easy_pool import MASTERED_RATE, EasyPool
from burnish.schedule.curriculum.group_size import GroupSizes
from burnish.schedule.curriculum.items import Items
from burnish.schedule.curriculum.tiers import Tiers
from burnish.schedule.values.base import band_of


class Choice(NamedTuple):
    """One group to sample."""

    item: int
    """Of the training pool."""
    visit: int
    """0 for a new item, else the number of the rehearsal."""
    tier: int
    """Its difficulty; 0 where there are no tiers."""
    size: int
    """Samples."""


class Curriculum:
    """Of all domains of a run; knows them by name."""

    def __init__(
        self, config: CurriculumConfig, *, group_size: int, window: int, seed: int, first_item: int
    ) -> None:
        """No domain yet.

        Args:
            config: what is wanted.
            group_size: mean number of samples.
            window: groups that compete for samples: those of a batch.
            seed: of the run.
            first_item: items below it are spoken for.
        """
        self._config, self._seed, self._first_item = config, seed, first_item
        self._sizes = GroupSizes(group_size, config.size_ratio, window)
        self._domains: dict[str, _Domain] = {}

    def add(self, domain: str, num_tiers: int, tier_of: Callable[[int], int]) -> None:
        """Choose for `domain` too; `tier_of` an item is asked for only if there are several."""
        if not self._config.tiers:
            num_tiers = 1
        items = Items(self._first_item, num_tiers, tier_of)
        self._domains[domain] = _Domain(num_tiers, items, EasyPool(share=self._config.easy_share))

    def remove(self, domain: str) -> None:
        """Forget it."""
        self._domains.pop(domain, None)

    def choose(self, domain: str) -> Choice:
        """What the next group of `domain` trains."""
        d = self._domains[domain]
        d.num_choices += 1
        item = d.pool.next()
        if item is not None:
            d.num_rehearsals += 1
            size = self._sizes.next(MASTERED_RATE)
            return Choice(item, d.num_rehearsals, 0, size)
        tier = 0
        if d.num_tiers > 1:
            seed = derive_seed(self._seed, "tier", domain, d.num_choices)
            tier = int(d.tiers.choose(np.random.default_rng(seed))[0])
        item, tier = d.items.take(tier)
        return Choice(item, 0, tier, self._sizes.next(float(d.tiers.mean_DK()[0, tier])))

    def judged(self, domain: str, choice: Choice, num_scored: int, num_passed: int) -> None:
        """The group came back; without scored samples it says nothing."""
        d = self._domains.get(domain)
        if d is None:
            return
        if not num_scored:
            self.cancelled(domain, choice)
            return
        if not choice.visit:
            scored, passed = np.zeros((2, 1, d.num_tiers))
            scored[0, choice.tier], passed[0, choice.tier] = num_scored, num_passed
            d.tiers.observe(scored, passed)
        if self._config.easy_share > 0.0:
            rate = num_passed / num_scored
            d.pool.judged(choice.item, rate, rehearsed=choice.visit > 0)

    def cancelled(self, domain: str, choice: Choice) -> None:
        """The group will not be judged: a rehearsal is still due."""
        d = self._domains.get(domain)
        if d is not None and choice.visit:
            d.pool.judged(choice.item, 1.0, rehearsed=True)

    def band(self, domain: str, choice: Choice) -> int:
        """How difficult a choice was, for the value of its domain.

        Tiers are chosen by how they go, so the pass rate of what was chosen says little about
        progress: a domain that reaches a harder tier would seem to get worse.
        """
        d = self._domains.get(domain)
        return band_of(choice.tier, d.num_tiers) if d is not None else 0

    def text(self, domain: str) -> str:
        """What is chosen and why, in one line."""
        d = self._domains[domain]
        parts = []
        if d.num_tiers > 1:
            told = zip(d.tiers.mean_DK()[0], d.tiers.tried_DK()[0], strict=True)
            rates = ", ".join(f"{rate:.0%}" if tried else "-" for rate, tried in told)
            parts.append(f"{int(d.tiers.level_D[0]) + 1} of {d.num_tiers} tiers open, pass {rates}")
        if self._config.easy_share > 0.0:
            parts.append(f"{len(d.pool)} items mastered, {d.num_rehearsals} rehearsals")
        return "; ".join(parts) or "items as they come"

    def state(self) -> dict[str, Any]:
        """All that `load` needs, as JSON values."""
        return {
            "sizes": self._sizes.state(),
            "domains": {name: d.state() for name, d in self._domains.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned, once all domains are added."""
        self._sizes.load(state["sizes"])
        for name, saved in state["domains"].items():
            if name in self._domains:
                self._domains[name].load(saved)


class _Domain:
    """What is known about one domain's items."""

    def __init__(self, num_tiers: int, items: Items, pool: EasyPool) -> None:
        self.num_tiers, self.items, self.pool = num_tiers, items, pool
        self.tiers = Tiers(1, num_tiers)
        self.num_choices = self.num_rehearsals = 0

    def state(self) -> dict[str, Any]:
        return {
            "choices": self.num_choices,
            "rehearsals": self.num_rehearsals,
            "items": self.items.state(),
            "pool": self.pool.state(),
            "tiers": self.tiers.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.num_choices, self.num_rehearsals = int(state["choices"]), int(state["rehearsals"])
        self.items.load(state["items"])
        self.pool.load(state["pool"])
        self.tiers.load(state["tiers"])
