"""Reading what a policy wrote as tool calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.records import ToolCall, ToolSpec
from burnish.model import tool_calls

GOOD = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": []}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_call>" + "[" * 200_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
    ],
    ids=lambda text: text[:40],
)
def test_what_cannot_be_read_is_malformed_and_stays_visible(text: str) -> None:
    parsed = tool_calls.parse(text)
    assert parsed.malformed
    assert parsed.calls == ()
    assert parsed.content == text


def test_good_calls_beside_a_bad_one_are_kept() -> None:
    parsed = tool_calls.parse(f"a {GOOD} b <tool_call>oops")
    assert parsed.calls == (ToolCall(name="f", arguments={"x": 1}),)
    assert parsed.malformed
    assert parsed.content == "a  b <tool_call>oops"


def test_text_without_calls_is_left_alone() -> None:
    assert tool_calls.parse(" 42 \n").content == " 42 \n"


def test_an_argument_may_hold_the_closing_tag() -> None:
    call = ToolCall(name="f", arguments={"x": "</tool_call><tool_call>"})
    parsed = tool_calls.parse(tool_calls.write([call], spread=False))
    assert parsed.calls == (call,)


@given(st.text(alphabet='<>/tool_cal{}[]":,\\ \n1', max_size=60))
def test_any_text_parses(text: str) -> None:
    tool_calls.parse(text)


def test_a_signature_says_what_is_optional_and_allowed() -> None:
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["r", "w"]},
            "line": {"type": ["integer", "null"]},
        },
        "required": ["path"],
    }
    spec = ToolSpec(name="open", description="Opens.", parameters=schema)
    line = tool_calls.describe([spec]).splitlines()[1]
    assert line == 'open(path: string, mode?: "r"|"w", line?: integer|null): Opens.'
    assert json.loads(GOOD[11:-12])["name"] == "f"
