"""Things that policies write by accident or design; verifiers must survive all of them."""

from __future__ import annotations

from burnish.core.records import Message, ToolCall


def _text(text: str) -> tuple[Message, ...]:
    return (Message(role="assistant", content=text),)


def _calls(*calls: ToolCall) -> tuple[Message, ...]:
    turn = Message(role="assistant", content="", tool_calls=calls)
    return (turn, turn, turn)


def _deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE_MESSAGES: tuple[tuple[Message, ...], ...] = (
    _text("\x00\x01\x1b[2J"),
    _text("\ud800 lone surrogate \udfff"),
    _text("\u202e\u200b\ufeff" + "\u0301" * 500),
    _text("9" * 5000),
    _text("x" * 2**20),
    _text("[" * 100_000),
    _text('{"a":' * 5000 + "1" + "}" * 5000),
    _text("NaN"),
    _text('{"a": NaN, "b": Infinity, "a": -1e999}'),
    _text("```python\n" + "(" * 5000 + "\n```"),
    _text("```python\nimport os, sys\nos._exit(0)\n```"),
    _text("```python\nwhile True: print('x' * 65536)\n```"),
    _text("__import__('os').abort()"),
    _text("%s %n {0} {answer} ${x} `id`"),
    _calls(ToolCall(name="", arguments={})),
    _calls(ToolCall(name="no_such_tool", arguments={"a": _deep(200)})),
    _calls(*(ToolCall(name="x", arguments={"expression": "1"}) for _ in range(100))),
    (Message(role="assistant", content="", malformed_tool_call=True),),
)
"""One episode each."""
