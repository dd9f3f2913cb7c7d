"""TOML as text: where each key was written, and how a value is written back.

`tomllib` keeps no positions, so a small scanner finds them. It only ever sees text that `tomllib`
has already accepted, which is what keeps it small.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from os import PathLike
from typing import Any, NamedTuple

import tomli_w

KeyPath = tuple[str, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""(?:"{0,2})'
    r"|'''[\s\S]*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|\n"
    r"|[\[\]{}=,.]"
    r"|[^\s\[\]{}=,.#\"']+"
)


class _Statement(NamedTuple):
    """A table header or an assignment, which may run over several lines."""

    line: int
    """1-based line of the first token."""
    tokens: list[str]
    """Without comments and line breaks."""


def dotted(path: Sequence[str]) -> str:
    """`a.b."c d"`: the path as one TOML key."""
    return ".".join(p if _BARE_KEY.fullmatch(p) else _quoted(p) for p in path)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line of every table header and key of valid TOML; elements of arrays of tables by index.

    Keys inside inline tables are not listed: look up the longest prefix instead.
    """
    lines: dict[KeyPath, int] = {}
    lengths: dict[KeyPath, int] = {}
    section: KeyPath = ()
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            is_array = tokens[1] == "["
            section = _resolve(_key(tokens), lengths, enter_last=not is_array)
            if is_array:
                index = lengths.get(section, 0)
                lengths[section] = index + 1
                section = (*section, str(index))
            lines.setdefault(section, line)
        else:
            path = (*section, *_key(tokens[: tokens.index("=")]))
            for length in range(len(section) + 1, len(path) + 1):
                lines.setdefault(path[:length], line)
    return lines


def toml_value(value: Any) -> str:
    """The value on one line, as TOML reads it. Enums and paths become strings."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, PathLike):
        value = str(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{dotted((str(k),))} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return "[" + ", ".join(toml_value(item) for item in items) + "]"
    if isinstance(value, bool | int | float | str | datetime | date | time):
        return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
    assert value is not None, "TOML has no null; leave the key out"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    return tomli_w.dumps({"v": text}).removeprefix("v = ").rstrip("\n")


def _statements(text: str) -> Iterator[_Statement]:
    tokens: list[str] = []
    depth, line, first_line, position = 0, 1, 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        token = match.group()
        if token == "\n":
            if tokens and depth == 0:
                yield _Statement(first_line, tokens)
                tokens = []
        elif not token.startswith("#"):
            if not tokens:
                first_line = line
            tokens.append(token)
            depth += (token in "[{") - (token in "]}")
    if tokens:
        yield _Statement(first_line, tokens)


def _key(tokens: Sequence[str]) -> KeyPath:
    parts = [t for t in tokens if t not in ("[", "]", ".")]
    return tuple(next(iter(tomllib.loads(f"{p} = 0"))) if p[0] in "\"'" else p for p in parts)


def _resolve(path: KeyPath, lengths: Mapping[KeyPath, int], *, enter_last: bool) -> KeyPath:
    """Insert the index of the last element wherever `path` passes through an array of tables."""
    out: KeyPath = ()
    for position, part in enumerate(path):
        out = (*out, part)
        if out in lengths and (enter_last or position + 1 < len(path)):
            out = (*out, str(lengths[out] - 1))
    return out
