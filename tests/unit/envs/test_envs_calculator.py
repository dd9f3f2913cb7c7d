import ast
import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.protocols import EpisodeContext
from burnish.core.records import Message, ToolCall
from burnish.core.vocabulary import CreditSource, Split
from burnish.envs.box_calculator import value
from burnish.envs.calculator import Calculator

ENVIRONMENT = Calculator()
TASK = ENVIRONMENT.task(Split.TRAIN, 0)
GOLD = TASK.payload["value"]
EXPRESSION = TASK.payload["expression"]


def call(name: str = "calculator", **arguments: object) -> Message:
    tool_call = ToolCall(name=name, arguments=arguments)
    return Message(role="assistant", content="", tool_calls=(tool_call,))


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def play(pool, *messages: Message):
    async def episode():
        live = await ENVIRONMENT.start(TASK, EpisodeContext(pool, 0))
        replies = []
        for message in messages:
            answer = await live.act(message)
            if answer is None:
                break
            replies.append(answer[0].content)
        return replies, await live.verdict()

    return asyncio.run(episode())


def test_the_box_computes_what_the_policy_asks(plain_pool):
    replies, verdict = play(plain_pool, call(expression=EXPRESSION), say(GOLD))
    assert replies == [GOLD]
    assert verdict.score == 1.0
    process = next(c for c in verdict.credits if c.source is CreditSource.PROCESS)
    assert (process.turn, process.value) == (0, 1.0)


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (call(name="calc", expression="1"), "unknown tool"),
        (call(), "expression"),
        (call(expression=12), "expression"),
        (call(expression="1" * 500), "short"),
        (call(expression="1 +"), "Error"),
        (call(expression="1 / 0"), "Error"),
        (call(expression="__import__('os')"), "only numbers"),
        (call(expression="9**9**9"), "only numbers"),
        (call(expression="True"), "only numbers"),
        (call(expression="\ud800"), "Error"),
        (call(expression="(" * 190), "Error"),
        (Message(role="assistant", content="", malformed_tool_call=True), "not valid"),
    ],
)
def test_tool_mistakes_come_back_as_messages_and_can_be_repaired(plain_pool, message, part):
    replies, verdict = play(plain_pool, message, call(expression=EXPRESSION), say(GOLD))
    assert part in replies[0]
    assert verdict.passed
    # The first turn was wasted, so it earns none of the process credit.
    assert verdict.score == pytest.approx(0.6)


def test_an_irrelevant_call_earns_nothing(plain_pool):
    assert play(plain_pool, call(expression="1 + 1"), say("2"))[1].score == 0.0


def test_a_call_with_some_of_the_numbers_earns_a_part(plain_pool):
    first = EXPRESSION.split()[0]
    _, verdict = play(plain_pool, call(expression=f"{first} + 0"), say("7"))
    assert 0.0 < verdict.score < 0.2
    assert not verdict.passed


def test_calling_without_answering_is_no_pass(plain_pool):
    turns = [call(expression=EXPRESSION)] * 3
    _, verdict = play(plain_pool, *turns)
    assert not verdict.passed
    assert verdict.score == pytest.approx(0.3)


def test_a_flood_of_calls_takes_one_box(plain_pool):
    calls = tuple(ToolCall(name="calculator", arguments={"expression": "1"}) for _ in range(50))
    play(plain_pool, Message(role="assistant", content="", tool_calls=calls))
    assert plain_pool.num_acquired == 1


def test_values_are_too_large_to_guess():
    values = [ENVIRONMENT.task(Split.HELD_OUT, i).payload["value"] for i in range(300)]
    assert len(set(values)) > 290


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 10**6))
def test_arithmetic_is_exact(a, b, c):
    tree = ast.parse(f"-({a}) * {b} + {c} // {b} - {c} % {b}", mode="eval")
    assert value(tree.body) == -a * b + c // b - c % b
