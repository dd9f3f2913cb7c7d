import asyncio
import math
from pathlib import Path

import pytest

from burnish.envs import registry
from burnish.quality.pass_share import LOOKS, surely_above, surely_below
from burnish.quality.probes import (
    Defect,
    degenerate_not_paid,
    other_answers_not_paid,
    prompt_does_not_answer,
)
from burnish.quality.subject import AuditConfig, Subject


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def subject(name: str, **config) -> Subject:
    environment = registry.get(f"planted_environments:{name}")
    return Subject(environment, None, AuditConfig(**config), None, None)


@pytest.mark.parametrize("num_tasks", [4, 8])
def test_small_answer_ranges_pass_whatever_the_wording(num_tasks):
    found = subject("SmallRange", num_tasks=num_tasks)
    for number in range(30):
        found.environment.wording = f" Wording {number}, digits only please."
        for probe in (other_answers_not_paid, degenerate_not_paid, prompt_does_not_answer):
            asyncio.run(probe(found))


@pytest.mark.parametrize("salt", range(5))
def test_an_answer_right_for_two_tasks_in_three_always_fails(salt, monkeypatch):
    found = subject("MostlyTwelve")
    monkeypatch.setattr(type(found.environment), "name", f"mostly_twelve_{salt}")
    with pytest.raises(Defect, match="another task's answer passes") as caught:
        asyncio.run(other_answers_not_paid(found))
    assert caught.value.witness["passed"]


def test_a_common_answer_is_found_though_the_first_task_has_another(monkeypatch):
    found = subject("MostlyTwelve")
    for salt in range(50):
        monkeypatch.setattr(type(found.environment), "name", f"mostly_{salt}")
        if next(found.tasks(1)).payload["value"] != "12":
            break
    with pytest.raises(Defect, match="another task's answer"):
        asyncio.run(other_answers_not_paid(found))


def test_a_slow_environment_is_judged_on_few_plays_and_still_caught():
    plays = []

    class Counting(Subject):
        async def score(self, task, text):
            plays.append(task)
            return await super().score(task, text)

    slow = Counting(*subject("SmallRange", probe_timeout_s=1e-9))
    asyncio.run(other_answers_not_paid(slow))
    assert len(plays) <= 2 * LOOKS[0]
    with pytest.raises(Defect):
        asyncio.run(other_answers_not_paid(subject("OneAnswer", probe_timeout_s=1e-9)))


@pytest.mark.parametrize("plays", LOOKS)
def test_a_fair_coin_is_refused_less_than_once_in_a_thousand_looks(plays):
    refused = [wins for wins in range(plays + 1) if surely_above(wins, plays)]
    assert refused
    assert sum(math.comb(plays, wins) for wins in refused) / 2**plays < 1e-3
    assert [plays - wins for wins in reversed(refused)] == [
        wins for wins in range(plays + 1) if surely_below(wins, plays)
    ]


def test_the_last_look_separates_half_from_two_thirds():
    plays = LOOKS[-1]
    assert surely_above(round(0.6 * plays), plays)
    assert not surely_above(round(0.58 * plays), plays)
