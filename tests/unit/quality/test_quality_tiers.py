import asyncio

import pytest

from burnish.core.records import Message, Task
from burnish.quality.probes import Defect, tasks_well_formed
from burnish.quality.subject import AuditConfig, Subject


class Tiered:
    name = "tiered"
    num_tiers = 3

    def __init__(self, highest):
        self._highest = highest

    def task(self, split, index):
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(Message(role="user", content="?"),),
            payload={},
            max_tokens=1,
        )

    def tier(self, task):
        return task.index % (self._highest + 1)


@pytest.mark.parametrize(("highest", "fine"), [(2, True), (3, False)])
def test_an_audit_finds_a_tier_that_is_not_there(highest, fine):
    # The probe asks nothing else of an environment than tasks and tiers.
    subject = Subject(Tiered(highest), None, AuditConfig(num_tasks=20), None, None)
    if fine:
        asyncio.run(tasks_well_formed(subject))
    else:
        with pytest.raises(Defect, match="tier 3 of 3"):
            asyncio.run(tasks_well_formed(subject))
