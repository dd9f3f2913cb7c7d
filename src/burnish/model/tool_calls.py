"""The Hermes form of tool calls: how they are offered, written and read back."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from burnish.core.records import ToolCall, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH = 32
_CALL = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


class ParsedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the text of an assistant turn."""

    content: str
    """The text without well-formed calls."""
    calls: tuple[ToolCall, ...]
    """In order."""
    malformed: bool
    """Whether some call was opened that could not be read."""


def describe(tools: Sequence[ToolSpec]) -> str:
    """Tools for a system message, one line each: every token is paid for in each prompt."""
    lines = [f"{tool.name}({_signature(tool.parameters)}): {tool.description}" for tool in tools]
    form = f'{_OPEN}{{"name": "...", "arguments": {{...}}}}{_CLOSE}'
    return "\n".join(["Tools:", *lines, f"To call one, write {form}"])


def write(calls: Sequence[ToolCall], *, spread: bool) -> str:
    """Markup of `calls`, one per line; `spread` puts the tags on lines of their own."""
    gap = "\n" if spread else ""
    return "\n".join(f"{_OPEN}{gap}{_body(call)}{gap}{_CLOSE}" for call in calls)


def parse(text: str) -> ParsedCalls:
    """Find the calls in `text`. Never raises: what cannot be read makes it `malformed`.

    A malformed call stays in the content, so that a person can see it.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    end = 0
    for match in _CALL.finditer(text):
        call = _read(match.group(1))
        if call is not None:
            calls.append(call)
            kept.append(text[end : match.start()])
            end = match.end()
    kept.append(text[end:])
    content = "".join(kept)
    return ParsedCalls(
        content=content.strip() if calls else content,
        calls=tuple(calls),
        malformed=_OPEN in content or _CLOSE in content,
    )


def _body(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    # "\/" is JSON for "/": an argument that holds the closing tag must not end the call.
    return body.replace(_CLOSE, _CLOSE.replace("/", r"\/"))


def _read(body: str) -> ToolCall | None:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.keys() != {"name", "arguments"}:
        return None
    name, arguments = raw["name"], raw["arguments"]
    # Whoever writes the call again recurses: a nested bomb must end here.
    if not isinstance(name, str) or not isinstance(arguments, dict) or _deep(arguments, _MAX_DEPTH):
        return None
    return ToolCall(name=name, arguments=arguments)


def _deep(value: Any, limit: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_deep(item, limit - 1) for item in items)


def _signature(parameters: dict[str, Any]) -> str:
    properties = parameters.get("properties", {})
    required = parameters.get("required", properties)
    return ", ".join(
        f"{name}{'' if name in required else '?'}: {_type(schema)}"
        for name, schema in properties.items()
    )


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    kind = schema.get("type", "any")
    return "|".join(kind) if isinstance(kind, list) else str(kind)
