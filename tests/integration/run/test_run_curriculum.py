"""Tiers, rehearsals and groups of several sizes in whole runs."""

from pathlib import Path

import pytest

from burnish.core.group_id import parse_group_id
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
