import math
from statistics import fmean
from types import SimpleNamespace

import pytest

from burnish.core.errors import UserError
from burnish.core.records import Message, Rollout, Turn, Verdict
from burnish.core.vocabulary import Outcome, StopReason
from burnish.plan.pipeline.fitted import (
    StepFigures,
    fit_domain,
    fit_engine,
    fit_twin,
    step_figures,
)
from burnish.plan.pipeline.flow_system import Flow
from burnish.plan.pipeline.simulator import Simulator
from burnish.store.reader import StoredRollout
from burnish.telemetry import catalogue as metric


def figures(alone, slope, sequences):
    gap = alone + slope * sequences
    return StepFigures(
        inter_token_s=gap, tokens_per_busy_s=sequences / gap, trainer_s=2.0, trained_tokens=4000.0,
        publish_s=0.1, step_s=5.0,
    )  # fmt: skip


def rollout(domain, tokens, duration_s, turns=1):
    ends = [tokens * (i + 1) for i in range(turns)]
    length = ends[-1]
    return Rollout(
        rollout_id=f"{domain}/0/0", group_id=f"{domain}/0", domain=domain,
        environment_digest="sha256:0", token_ids=(1,) * length, num_prompt_tokens=0,
        sampled_mask=(True,) * length, logprobs=(0.0,) * length, weight_versions=(1,) * length,
        turns=tuple(
            Turn(start=end - tokens, end=end, stop_reason=StopReason.LENGTH) for end in ends
        ),
        messages=(Message(role="user", content="x"),),
        verdict=Verdict(outcome=Outcome.SCORED, score=0.5, passed=False, credits=(), evidence={}),
        spans=(), seed=0, duration_s=duration_s,
    )  # fmt: skip


def test_the_line_of_an_engines_step_is_found_again():
    engine = fit_engine([figures(0.01, 0.002, b) for b in (2.0, 6.0, 10.0)], num_slots=16)
    assert engine.speed == pytest.approx(100.0)
    assert engine.half == pytest.approx(5.0)
    assert 1.0 / engine.rate(8) == pytest.approx(0.01 + 0.002 * 8)


@pytest.mark.parametrize("loads", [(4.0, 4.0), (2.0, 8.0)])
def test_a_step_never_gets_cheaper_with_more_sequences(loads):
    engine = fit_engine([figures(0.05, -0.002, b) for b in loads], num_slots=16)
    assert engine.half == math.inf
    assert engine.rate(16) == pytest.approx(engine.rate(1)) == pytest.approx(engine.speed)
    assert engine.speed == pytest.approx(1.0 / fmean(0.05 - 0.002 * b for b in loads))


def test_an_engine_whose_cost_is_all_per_sequence_has_a_line_through_the_origin():
    engine = fit_engine([figures(-0.004, 0.002, b) for b in (4.0, 8.0)], num_slots=16)
    assert 0.0 < engine.half < 0.01
    assert engine.speed > 0.0


def test_what_an_episode_took_beside_decoding_is_its_verdict_or_its_tools():
    single = fit_domain("d0", [rollout("a", 50, 50 * 0.01 + 2.0)] * 3, 0.01)
    assert not single.is_agent
    assert single.segment_tokens == pytest.approx(50)
    assert single.segment_sigma == pytest.approx(0.0)
    assert single.reward_s * math.exp(0.6**2 / 2) == pytest.approx(2.0)
    agent = fit_domain("d1", [rollout("b", 20, 60 * 0.01 + 3.0, turns=3)], 0.01)
    assert agent.is_agent
    assert agent.mean_turns == 3.0
    assert 2.0 * agent.tool_s * math.exp(1.1**2 / 2) == pytest.approx(3.0)


def series(steps=6, gap=0.02):
    def points(value):
        return {"": [(s, value) for s in range(1, steps + 1)]}

    return {
        metric.ENGINE_INTER_TOKEN_MEAN.name: points(gap),
        metric.ENGINE_TOKENS_PER_S.name: points(200.0),
        metric.ENGINE_BUSY_RATIO.name: points(0.5),
        metric.TRAINER_BUSY_RATIO.name: points(0.25),
        metric.STEP_SECONDS.name: points(4.0),
        metric.PUBLICATION_SECONDS.name: points(0.1),
        metric.TRAINED_TOKENS.name: {"a": [(s, 500.0) for s in range(1, steps)]},
    }


def test_steps_without_all_figures_and_those_of_the_warm_up_are_left_out():
    found = step_figures(series(), first_step=3)
    assert len(found) == 3
    assert found[0].tokens_per_busy_s == 400.0
    assert found[0].trainer_s == 1.0


def reader(steps=6):
    rollouts = [
        StoredRollout(rollout("a", 40, 1.3), None),
        StoredRollout(rollout("b", 8, 4.0), None),
    ]
    return SimpleNamespace(path="run", metrics=lambda: series(steps), rollouts=lambda: rollouts)


def test_a_twin_runs_and_a_run_too_short_to_measure_is_refused():
    twin = fit_twin([reader()], num_slots=8)
    assert [d.name for d in twin.workload.domains] == ["d0", "d1"]
    assert twin.cluster.train_tokens_per_s == pytest.approx(500.0)
    sim = Simulator(twin.workload, twin.cluster, Flow(2, 1), seed=0, group_size=2)
    assert sim.run(3, 1).step_s > 0.0
    with pytest.raises(UserError, match="fewer than two measured steps"):
        fit_twin([reader(steps=2)], num_slots=8)
