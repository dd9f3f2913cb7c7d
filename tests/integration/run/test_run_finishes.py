from pathlib import Path

import pytest

from burnish.store.reader import RunReader
from burnish.telemetry.events import EventKind


def test_a_run_accounts_for_every_rollout_and_exports_a_model_that_transformers_loads(
    recipe, burnish_run
):
    result = burnish_run.result(recipe())
    ledger = result["ledger"]
    assert ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["trained"] > 0
    assert set(result["domains"]) == {"letters", "other_letters"}
    for row in result["domains"].values():
        assert row["n"] == 3
        assert row["ci_low"] <= row["diff"] <= row["ci_high"]
    assert result["canary"]["num_checks"] == 5, "one for the first weights, one for each step"
    assert result["canary"]["max_abs_diff"] == 0.0
    directory = Path(result["run_dir"])
    assert (directory / "report.html").stat().st_size > 10_000
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(result["model"])
    assert model.config.num_hidden_layers == 2


def test_every_trained_token_carries_the_version_that_sampled_it_and_none_is_too_old(
    recipe, burnish_run
):
    result = burnish_run.result(recipe())
    reader = RunReader(Path(result["run_dir"]))
    steps = {
        group: event.data["version"]
        for event in reader.events()
        if event.kind is EventKind.STEP_FINISHED
        for group in event.data["groups"]
    }
    trained = [s.rollout for s in reader.rollouts() if s.rollout.group_id in steps]
    assert trained
    for rollout in trained:
        trainer_version = steps[rollout.group_id] - 1
        pairs = zip(rollout.weight_versions, rollout.sampled_mask, strict=True)
        versions = [v for v, m in pairs if m]
        assert all(0 <= trainer_version - v <= 1 for v in versions)


def test_a_broken_environment_is_quarantined_by_name_and_the_run_goes_on_without_it(
    recipe, burnish_run
):
    more = "[schedule.domains.pays_nothing]\nweight = 2.0\n"
    result = burnish_run.result(recipe("letters", "pays_nothing", more=more))
    assert list(result["quarantined"]) == ["pays_nothing"]
    assert set(result["domains"]) == {"letters"}
    reader = RunReader(Path(result["run_dir"]))
    assert {s.rollout.domain for s in reader.rollouts()} == {"letters"}


def test_a_verifier_that_breaks_during_training_never_becomes_a_reward(recipe, burnish_run):
    more = "[schedule]\nfloor = 1.0\n"
    result = burnish_run.result(
        recipe("letters", "breaks_later", more=more), "--set", "run.steps=8"
    )
    assert result["ledger"]["dropped"].get("invalid", 0) > 0
    reader = RunReader(Path(result["run_dir"]))
    broken = [s for s in reader.rollouts() if s.rollout.verdict.failure is not None]
    assert broken
    for stored in broken:
        assert stored.rollout.verdict.score is None
        assert stored.advantages is None
    kinds = {record.failure.kind for record in reader.failures()}
    assert kinds == {"verifier"}
    assert "database of answers" in result["quarantined"]["breaks_later"]


def test_nothing_can_be_learned_where_no_environment_passes_the_gate(recipe, burnish_run):
    done = burnish_run(recipe("pays_nothing"))
    assert done.returncode == 2
    assert "no environment passed the quality gate" in done.stderr
    assert "burnish check run_environments:PaysNothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_only_the_user_can_mend_ends_the_run_at_once(recipe, burnish_run):
    done = burnish_run(recipe(), "--set", "engine.num_pages=1")
    assert done.returncode == 2
    assert "num_pages" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["cispo", "grpo", "ppo"])
def test_every_loss_runs_with_the_kl_component_beside_it(algorithm, recipe, burnish_run):
    result = burnish_run.result(
        recipe(),
        *("--set", f"train.loss.algorithm={algorithm}"),
        *("--set", "train.loss.kl_coefficient=0.01"),
    )
    metrics = RunReader(Path(result["run_dir"])).metrics()
    kl = [value for _, value in metrics["kl_loss"][""]]
    assert kl[0] == pytest.approx(0.0, abs=1e-3), "at the first step the policy is the reference"
    assert max(kl) > 0


def test_a_warm_up_is_reported_apart_and_its_items_are_not_sampled_again(recipe, burnish_run):
    more = "[warmup]\nexamples_per_domain = 5\nbatch_examples = 4\nlr = 1e-3\n"
    result = burnish_run.result(recipe(more=more))
    for row in result["domains"].values():
        assert row["warmed"] is not None
    reader = RunReader(Path(result["run_dir"]))
    assert all(int(s.rollout.group_id.rpartition("/")[2]) >= 5 for s in reader.rollouts())
    assert reader.evaluation("warmed") is not None
