"""What every shipped environment promises; each domain runs the whole suite."""

import asyncio
import json
import re

import msgspec
import pytest

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.protocols import EpisodeContext
from burnish.core.records import Message, Task, Verdict
from burnish.core.vocabulary import CreditSource, Outcome, Split
from burnish.envs import registry
from burnish.quality.audit import audit
from burnish.quality.hostile import HOSTILE_MESSAGES
from burnish.quality.report import ProbeVerdict
from burnish.sandbox.start import open_pool

DOMAINS = registry.names()


def play(environment, task, messages, pool) -> Verdict:
    async def episode():
        live = await environment.start(task, EpisodeContext(pool, 0))
        try:
            for message in messages:
                if await live.act(message) is None:
                    break
            return await live.verdict()
        finally:
            await live.close()

    return asyncio.run(episode())


def say(text: str) -> tuple[Message, ...]:
    return (Message(role="assistant", content=text),)


@pytest.fixture(scope="module")
def real_pool():
    try:
        pool = open_pool()
    except (UserError, ClassifiedFailure) as error:
        pytest.skip(f"no bubblewrap sandbox here: {error}")
    yield pool
    asyncio.run(pool.close())


@pytest.fixture(params=DOMAINS)
def environment(request):
    return registry.get(request.param)


def test_there_are_domains_of_every_kind():
    assert len(DOMAINS) >= 8
    assert {"code", "calculator", "extraction", "formatting"} < set(DOMAINS)


def test_describes_itself(environment):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", environment.name)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", environment.digest)
    assert environment.description.endswith(".")


def test_two_instances_agree_on_digest_and_tasks(environment):
    twin = registry.get(environment.name)
    assert twin.digest == environment.digest
    for split in Split:
        for index in (0, 1, 17, 4096, 2**30):
            assert twin.task(split, index) == environment.task(split, index)


def test_digests_of_domains_differ():
    assert len({registry.get(name).digest for name in DOMAINS}) == len(DOMAINS)


def test_tasks_are_data_that_survives_json(environment):
    for index in range(20):
        task = environment.task(Split.TRAIN, index)
        back = msgspec.json.decode(msgspec.json.encode(task), type=Task)
        assert msgspec.json.encode(back) == msgspec.json.encode(task)
        # The store hands payloads back as JSON gives them: judging must not depend on tuples.
        assert environment.reference(back) == environment.reference(task)


def test_negative_index_is_refused(environment):
    with pytest.raises(ValueError, match="index"):
        environment.task(Split.TRAIN, -1)


def test_splits_share_no_question_over_thousands(environment):
    def questions(split: Split, count: int) -> set[str]:
        return {environment.task(split, index).prompt[-1].content for index in range(count)}

    train, held_out = questions(Split.TRAIN, 3000), questions(Split.HELD_OUT, 1000)
    assert not train & held_out
    # An evaluation that counts one question many times would be too sure of itself; it asks a
    # hundred or so.
    first = questions(Split.HELD_OUT, 100)
    assert len(first) >= 93
    assert len(held_out) > 600
    assert len(train) > 1500


def test_reference_reaches_the_full_score(environment, plain_pool):
    for split in Split:
        for index in range(8):
            task = environment.task(split, index)
            reference = environment.reference(task)
            assert 1 <= len(reference) <= task.max_turns
            verdict = play(environment, task, reference, plain_pool)
            assert (verdict.score, verdict.passed) == (1.0, True), verdict
            assert {credit.source for credit in verdict.credits} == set(CreditSource)
    assert plain_pool.num_live == 0


def test_reference_survives_a_round_trip_of_its_task(environment, plain_pool):
    task = environment.task(Split.TRAIN, 3)
    back = msgspec.json.decode(msgspec.json.encode(task), type=Task)
    verdict = play(environment, back, environment.reference(back), plain_pool)
    assert verdict.score == 1.0


@pytest.mark.parametrize("messages", [(), say(""), say("  \n "), say("\t" * 100)])
def test_empty_answers_score_zero(environment, plain_pool, messages):
    task = environment.task(Split.HELD_OUT, 0)
    verdict = play(environment, task, messages, plain_pool)
    assert (verdict.score, verdict.passed) == (0.0, False)


@pytest.mark.parametrize(
    "text", [":", "Thought process:", "I don't know.", "0", "A", "<tool_call>"]
)
def test_degenerate_answers_earn_next_to_nothing(environment, plain_pool, text):
    for index in range(4):
        task = environment.task(Split.HELD_OUT, index)
        verdict = play(environment, task, say(text), plain_pool)
        assert not verdict.passed
        assert verdict.score == 0.0


def test_echo_of_the_prompt_does_not_pass(environment, plain_pool):
    for index in range(4):
        task = environment.task(Split.HELD_OUT, index)
        verdict = play(environment, task, say(task.prompt[-1].content), plain_pool)
        assert not verdict.passed
        assert verdict.score < 0.35


def test_nothing_the_policy_writes_raises(environment, plain_pool):
    task = environment.task(Split.TRAIN, 0)
    for messages in HOSTILE_MESSAGES:
        verdict = play(environment, task, messages, plain_pool)
        assert verdict.outcome is Outcome.SCORED
        assert not verdict.passed
        assert 0.0 <= verdict.score <= 1.0
        # Evidence goes to the store: small, and always encodable.
        assert len(json.dumps(msgspec.to_builtins(verdict))) < 20_000
        msgspec.json.encode(verdict)


def test_the_same_transcript_gets_the_same_verdict(environment, plain_pool):
    task = environment.task(Split.TRAIN, 5)
    for messages in (environment.reference(task), say("maybe 12, 13"), say("{}")):
        first, second = (play(environment, task, messages, plain_pool) for _ in range(2))
        assert first == second


def test_payload_is_not_in_the_opening_messages_as_json(environment):
    for index in range(20):
        task = environment.task(Split.TRAIN, index)
        text = "\n".join(message.content for message in task.prompt)
        assert environment.reference(task)[-1].content not in text.splitlines()


@pytest.mark.slow
def test_every_shipped_domain_passes_its_audit_in_the_real_sandbox(environment, real_pool):
    report = asyncio.run(audit(environment, real_pool))
    assert report.verdict is ProbeVerdict.PASS, report.reason


@pytest.mark.parametrize("name", ["code", "calculator"])
def test_references_reach_the_full_score_in_the_real_sandbox(name, real_pool):
    environment = registry.get(name)
    for index in range(3):
        task = environment.task(Split.HELD_OUT, index)
        verdict = play(environment, task, environment.reference(task), real_pool)
        assert verdict.score == 1.0, verdict
