import asyncio

import msgspec
import pytest

from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure
from burnish.core.protocols import EpisodeContext
from burnish.core.records import Credit, Generation, Message, Task, ToolCall, Turn, Verdict
from burnish.core.vocabulary import CreditSource, FailureKind, Outcome, Split, StopReason
from burnish.envs.rewards import compose
from burnish.rollout.agent.episode import EpisodePlan, credit_spans, run_episode
from burnish.rollout.collect.collector import Collector, Sampling

END = 2


class Renderer:
    """Words of one letter: token = code point. Enough to follow every token."""

    stop_token_ids = (END,)

    def prompt(self, messages, tools=()):
        return tuple(ord(c) for m in messages for c in m.content)

    def extend(self, replies, stopped):
        return ((END,) if not stopped else ()) + self.prompt(replies)

    def parse(self, token_ids):
        text = "".join(chr(t) for t in token_ids if t != END)
        calls = (ToolCall(name="look", arguments={}),) if text.startswith("?") else ()
        return Message(role="assistant", content=text, tool_calls=calls)

    def assistant(self, message):
        return (*self.prompt((message,)), END)


class Script:
    """An engine that answers from a list: the faults and turns of these tests cannot be sampled."""

    weight_version = 3

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    async def generate(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = tuple(ord(c) for c in answer)
        stopped = len(ids) < request.params.max_tokens
        ids = (*ids, END) if stopped else ids[: request.params.max_tokens]
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=tuple(-0.5 - i for i in range(len(ids))),
            weight_versions=(self.weight_version,) * len(ids),
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
        )


class Looking:
    """Asks back until an answer does not begin with a question mark."""

    name, digest, tools, description = "looking", "sha256:0", (), ""

    def __init__(self, verdict=None, act_raises=None, closed=None):
        self.result, self.act_raises, self.closed = verdict, act_raises, closed

    def task(self, split, index):
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(Message(role="user", content="abc"),),
            payload={},
            max_tokens=12,
            max_turns=3,
        )

    async def start(self, task, context):
        return self

    async def act(self, message):
        if self.act_raises is not None:
            raise self.act_raises
        return (Message(role="tool", content="xyz"),) if message.tool_calls else None

    async def verdict(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result or compose((Credit(source=CreditSource.OUTCOME, value=1.0),), {})

    async def close(self):
        if self.closed is not None:
            self.closed.append(True)


def plan(environment):
    return EpisodePlan(
        rollout_id="looking/0/0",
        group_id="looking/0",
        task=environment.task(Split.TRAIN, 0),
        seed=1,
        temperature=1.0,
        top_p=1.0,
        step_timeout_s=5.0,
    )


def play(engine, environment):
    context = EpisodeContext(sandboxes=None, seed=0)
    return asyncio.run(
        run_episode(
            plan(environment),
            engine=engine,
            renderer=Renderer(),
            environment=environment,
            context=context,
        )
    )


def test_each_prompt_is_the_previous_tokens_plus_what_was_added():
    engine = Script("?q", "done")
    rollout = play(engine, Looking())
    first, second = engine.requests
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert rollout.token_ids == (*map(ord, "abc?q"), END, *map(ord, "xyzdone"), END)
    sampled = [t for t, m in zip(rollout.token_ids, rollout.sampled_mask, strict=True) if m]
    assert sampled == [*map(ord, "?q"), END, *map(ord, "done"), END]


def test_only_sampled_tokens_carry_a_version_and_a_logprob():
    rollout = play(Script("?q", "done"), Looking())
    for mask, version, logprob in zip(
        rollout.sampled_mask, rollout.weight_versions, rollout.logprobs, strict=True
    ):
        assert (version, logprob < 0) == ((3, True) if mask else (-1, False))


def test_the_token_budget_is_for_the_whole_episode():
    engine = Script("?12345", "overlong answer")
    rollout = play(engine, Looking())
    assert [r.params.max_tokens for r in engine.requests] == [12, 5]
    assert rollout.num_sampled_tokens == 12
    assert rollout.turns[-1].stop_reason is StopReason.LENGTH


def test_the_turn_budget_ends_an_episode_that_never_answers():
    engine = Script("?", "?", "?", "?")
    assert len(play(engine, Looking()).turns) == 3


def test_every_request_of_an_episode_has_a_seed_of_its_own():
    engine = Script("?", "?", "a")
    play(engine, Looking())
    assert len({r.params.seed for r in engine.requests}) == 3


@pytest.mark.parametrize(
    ("engine", "environment", "kind"),
    [
        (Script(RuntimeError("engine died")), Looking(), FailureKind.INFRA),
        (Script("a"), Looking(act_raises=KeyError("bug")), FailureKind.ENVIRONMENT),
        (Script("a"), Looking(verdict=ValueError("bug")), FailureKind.VERIFIER),
        (Script("a"), Looking(act_raises=OSError(28, "full")), FailureKind.INFRA),
        (Script("a"), Looking(act_raises=MemoryError()), FailureKind.INFRA),
    ],
)
def test_a_failure_is_blamed_on_who_raised_it_and_the_episode_is_closed(engine, environment, kind):
    environment.closed = []
    with pytest.raises(ClassifiedFailure) as caught:
        play(engine, environment)
    assert caught.value.failure.kind is kind
    assert environment.closed == [True]


BAD_VERDICTS = {
    "score without outcome": Verdict(outcome=Outcome.INVALID_INFRA, score=0.0, passed=False),
    "outcome without score": Verdict(outcome=Outcome.SCORED, score=None, passed=None),
    "score above one": Verdict(outcome=Outcome.SCORED, score=1.5, passed=True),
    "not a number": Verdict(outcome=Outcome.SCORED, score=float("nan"), passed=True),
}


@pytest.mark.parametrize("name", BAD_VERDICTS)
def test_a_verdict_that_contradicts_itself_is_a_verifier_failure(name):
    with pytest.raises(ClassifiedFailure) as caught:
        play(Script("a"), Looking(verdict=BAD_VERDICTS[name]))
    assert caught.value.failure.kind is FailureKind.VERIFIER


def test_a_turns_credit_lands_on_its_tokens_and_the_weights_of_a_source_are_shared():
    turns = [Turn(start=3, end=5, stop_reason=StopReason.STOP)]
    turns.append(Turn(start=8, end=9, stop_reason=StopReason.STOP))
    credits = (
        Credit(source=CreditSource.OUTCOME, value=1.0),
        Credit(source=CreditSource.PROCESS, value=0.5, turn=0),
        Credit(source=CreditSource.PROCESS, value=0.0, turn=1),
    )
    spans = credit_spans(compose(credits, {}), turns)
    assert [(s.start, s.end, s.weight) for s in spans] == [(3, 9, 0.6), (3, 5, 0.15), (8, 9, 0.15)]


def collector(engine, failures, **more):
    return Collector(
        engine=engine,
        renderer=Renderer(),
        context=lambda seed: EpisodeContext(sandboxes=None, seed=seed),
        clock=ManualClock(),
        on_failure=failures.append,
        **more,
    )


def collect(engine, environment, failures):
    return asyncio.run(
        collector(engine, failures).group(
            environment, 0, num_samples=1, root_seed=0, sampling=Sampling(1.0), version=3
        )
    )


def test_a_failure_of_the_machine_is_retried_with_the_same_seed():
    failures = []
    engine = Script(RuntimeError("gone"), "done")
    (rollout,) = collect(engine, Looking(), failures).rollouts
    assert rollout.verdict.passed
    assert [f.kind for f in failures] == [FailureKind.INFRA]
    assert engine.requests[0] == engine.requests[1]


def test_retries_are_bounded_and_the_rollout_then_has_no_score():
    failures = []
    engine = Script(*(RuntimeError("gone") for _ in range(9)))
    (rollout,) = collect(engine, Looking(), failures).rollouts
    assert len(failures) == 3
    assert rollout.verdict.outcome is Outcome.INVALID_INFRA
    assert rollout.verdict.score is None
    assert rollout.spans == ()


def test_a_broken_environment_is_not_retried_and_never_a_reward():
    failures = []
    (rollout,) = collect(Script("a"), Looking(verdict=KeyError("x")), failures).rollouts
    assert len(failures) == 1
    assert rollout.verdict.score is None


def test_a_rollout_survives_the_wire_bit_for_bit():
    rollout = play(Script("?q", "done"), Looking())
    copy = msgspec.json.decode(msgspec.json.encode(rollout), type=type(rollout))
    assert copy == rollout
