import json

import pytest

from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure
from burnish.core.group_id import group_id, parse_group_id
from burnish.core.records import Failure, Task
from burnish.core.vocabulary import FailureKind
from burnish.run.flow import FlowControl, FlowSettings
from burnish.run.intake import Intake
from burnish.schedule.breakers.base import BreakerConfig
from burnish.schedule.breakers.retries import RetryConfig
from burnish.schedule.curriculum.config import CurriculumConfig
from burnish.schedule.curriculum.curriculum import Curriculum
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.flow.load import LoadConfig
from burnish.schedule.flow.resources import GroupCosts
from burnish.schedule.flow.rounds import LongTail
from burnish.schedule.picks import DomainScheduleConfig


class Plain:
    """Every third item wants the image `sick`."""

    def __init__(self, name):
        self.name = name

    def task(self, split, index):
        image = "sick" if index % 3 == 0 else "well"
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(),
            payload={"image": image},
            max_tokens=100,
        )


def flow_control():
    settings = FlowSettings(LoadConfig(), BreakerConfig(), RetryConfig())
    return FlowControl(
        settings, ManualClock(), None, lambda domain: "sha256:0", lambda group_id: 0.0
    )


def intake(flow=None, rounds=None, names=("a", "b"), **config):
    environments = {name: Plain(name) for name in names}
    scheduler = DomainScheduler(names, DomainScheduleConfig(warmup_picks=0))
    curriculum = Curriculum(
        CurriculumConfig(**config), group_size=4, window=4, seed=0, first_item=0
    )
    costs = GroupCosts(num_slots=8, num_boxes=2)
    return Intake(environments, scheduler, curriculum, flow, rounds, costs), scheduler


@pytest.mark.parametrize("visit", [0, 3])
def test_a_group_is_found_by_its_name_again(visit):
    name = group_id("a/b", 17, visit)
    assert parse_group_id(name) == ("a/b", 17, visit)
    assert parse_group_id("d/4") == ("d", 4, 0)


def test_a_group_that_was_given_up_leaves_its_domain_as_it_was():
    taken, scheduler = intake()
    before = scheduler.state()["dealer"]["rows"]
    start = taken.next(0)
    taken.cancelled(start.group_id)
    after = scheduler.state()["dealer"]["rows"]
    for account in ("credit", "charged", "in_flight"):
        assert after[account] == pytest.approx(before[account])
    with pytest.raises(KeyError):
        taken.choice(start.group_id)


def test_items_of_a_paused_image_are_passed_over():
    flow = flow_control()
    taken, _ = intake(flow, names=("a",))
    task = Plain("a").task(None, 0)
    flow.attempt(Plain("a").task(None, 1), "a/1", None, 1)
    failure = Failure(kind=FailureKind.SANDBOX, where="x", message="no box")
    for n in range(20):
        flow.attempt(task, f"a/{300 + 3 * n}", failure, 1)
    assert flow.refuses("a", task)
    items = [taken.next(0).choice.item for _ in range(6)]
    assert items == [1, 2, 4, 5, 7, 8]


def lengths(flow, long_domain):
    for domain, tokens in (("a", 10.0), ("b", 10.0), ("c", 10.0), (long_domain, 90.0)):
        for n in range(20):
            flow._lengths.finished(domain, f"{domain}/{1000 + n}", tokens)


def test_long_groups_wait_for_each_other_and_start_as_one_round():
    flow = flow_control()
    lengths(flow, "d")
    taken, _ = intake(flow, LongTail(3, max_wait=50), names=("a", "b", "c", "d"))
    told = []
    taken.on_round = told.append
    order = [taken.next(step).domain for step in range(24)]
    first = order.index("d")
    assert order[first : first + 3] == ["d"] * 3
    assert told[0] == 3
    assert first >= 6


def test_a_long_group_waits_no_longer_than_it_may():
    flow = flow_control()
    lengths(flow, "d")
    taken, _ = intake(flow, LongTail(30, max_wait=2), names=("a", "b", "c", "d"))
    order = [taken.next(step // 4).domain for step in range(24)]
    gaps = [n for n, domain in enumerate(order) if domain == "d"]
    assert gaps
    assert gaps[0] <= 4 * 4


def test_what_is_in_flight_or_waits_survives_a_checkpoint():
    flow = flow_control()
    lengths(flow, "d")
    taken, _ = intake(
        flow, LongTail(3, max_wait=50), names=("a", "b", "c", "d"), size_ratio=2.0, easy_share=0.0
    )
    started = [taken.next(step) for step in range(12)]
    state = json.loads(json.dumps(taken.state()))
    again, _ = intake(
        flow_control(), LongTail(3, max_wait=50), names=("a", "b", "c", "d"), size_ratio=2.0
    )
    again.load(state)
    assert [again.choice(s.group_id) for s in started] == [s.choice for s in started]
    without, _ = intake(flow_control(), None, names=("a", "b", "c", "d"))
    without.load(state)
    waiting = [name for name, _ in state["rounds"]] + state["ready"]
    assert sorted(without.next(99).group_id for _ in waiting) == sorted(waiting)


def test_a_tier_that_is_not_there_is_the_environments_failure():
    class Wrong(Plain):
        num_tiers = 2

        def tier(self, task):
            return 2

    curriculum = Curriculum(CurriculumConfig(), group_size=4, window=4, seed=0, first_item=0)
    scheduler = DomainScheduler(("a",), DomainScheduleConfig())
    taken = Intake({"a": Wrong("a")}, scheduler, curriculum, None, None, GroupCosts(8, 2))
    with pytest.raises(ClassifiedFailure, match="tier 2 of 2"):
        taken.next(0)
