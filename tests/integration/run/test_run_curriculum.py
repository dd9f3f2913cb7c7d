"""Tiers, rehearsals and groups of several sizes in whole runs."""

from pathlib import Path

import pytest

from burnish.core.group_id import parse_group_id
from burnish.core.vocabulary import Split
from burnish.envs import registry
from burnish.store.reader import RunReader
from burnish.telemetry.events import EventKind

MORE = """
[schedule.curriculum]
easy_share = 0.5
size_ratio = 2.0
"""


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_chooses_tiers_rehearses_and_sizes_its_groups(recipe, burnish_run, deterministic):
    path = recipe("letters", deterministic=deterministic, more=MORE)
    clocked = ("--set", "schedule.cost_unit=dominant", "--set", "flow.round_max_wait=2")
    result = burnish_run.result(
        path,
        *(() if deterministic else clocked),
        *("--set", "run.steps=8", "--set", "train.lr=1e-9", "--set", "rollout.groups_per_step=6"),
        *("--set", "evaluate.tasks_per_domain=0"),
    )
    ledger = result["ledger"]
    assert ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["dropped"].values())
    reader = RunReader(Path(result["run_dir"]))
    sizes: dict[str, int] = {}
    for stored in reader.rollouts():
        sizes[stored.rollout.group_id] = sizes.get(stored.rollout.group_id, 0) + 1
    assert len(set(sizes.values())) > 1
    assert all(2 <= size <= 8 for size in sizes.values())
    names = [parse_group_id(name) for name in sizes]
    first = {name.item for name in names if not name.visit}
    rehearsed = [name for name in names if name.visit]
    assert {name.item for name in rehearsed} <= first
    told = [
        e.data["items"]["letters"] for e in reader.events() if e.kind is EventKind.SHARES_DECIDED
    ]
    assert "of 3 tiers open" in told[-1]
    assert rehearsed
    assert f"{len(rehearsed)} rehearsals" in told[-1], told[-1]


@pytest.mark.slow
def test_the_shipped_ladder_is_climbed_by_a_run(recipe, burnish_run):
    result = burnish_run.result(
        recipe("letters"),
        *("--set", "domains.sum_ladder.environment=sum_ladder"),
        *("--set", "run.steps=4", "--set", "evaluate.tasks_per_domain=0"),
    )
    ledger = result["ledger"]
    assert ledger["in_flight"] == 0
    reader = RunReader(Path(result["run_dir"]))
    told = [e for e in reader.events() if e.kind is EventKind.SHARES_DECIDED]
    assert "of 4 tiers open" in told[-1].data["items"]["sum_ladder"]
    # A random model adds no numbers: it stays with the shortest sums.
    sampled = {s.rollout.group_id for s in reader.rollouts("sum_ladder")}
    ladder = registry.get("sum_ladder")
    items = [parse_group_id(name).item for name in sampled]
    assert items
    assert {ladder.tier(ladder.task(Split.TRAIN, item)) for item in items} == {0}
