"""The plain forms in which short answers are demanded, and how near a wrong one came."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum


class Form(StrEnum):
    """A plain form."""

    NUMBER = "number"
    """An integer, digits only, with a minus sign if negative."""
    WORD = "word"
    """One word."""
    LIST = "list"
    """Items separated by a comma and a space."""


_PATTERNS: Mapping[Form, re.Pattern[str]] = {
    Form.NUMBER: re.compile(r"-?[0-9]{1,40}"),
    Form.WORD: re.compile(r"\S{1,40}"),
    Form.LIST: re.compile(r"[^,\n]{1,40}(, [^,\n]{1,40}){0,40}"),
}


def kept(form: Form, answer: str) -> bool:
    """Whether the answer has the form."""
    return _PATTERNS[form].fullmatch(answer) is not None


def share_right(form: Form, gold: str, answer: str) -> float:
    """Share of leading digits, characters or items that are right; 1.0 exactly for the gold.

    A number of another length is no near miss: "0" is as far from "80" as "12345".
    """
    if form is Form.LIST:
        return _prefix(gold.split(", "), answer.split(", "))
    if form is Form.NUMBER and len(gold) != len(answer):
        return 0.0
    return _prefix(gold, answer)


def _prefix(gold: Sequence[str], answer: Sequence[str]) -> float:
    """Length of the common prefix over the longer length."""
    common = 0
    for one, other in zip(gold, answer, strict=False):
        if one != other:
            break
        common += 1
    return common / max(len(gold), len(answer))
