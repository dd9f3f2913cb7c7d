"""Structured extraction: named fields of a short note with distractors, as exact JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from burnish.core.protocols import EpisodeContext
from burnish.core.records import Message, Task, Verdict
from burnish.envs.base import Item, OneTurnEnvironment, answer_message
from burnish.envs.rewards import grade
from burnish.envs.words import COMPANIES, MONTHS, PEOPLE, ROOMS


def _invoice(rng: Random) -> tuple[str, dict[str, str]]:
    company, other = rng.sample(COMPANIES, 2)
    net, tax = rng.randint(100, 899), rng.randint(10, 99)
    fields = {
        "seller": company,
        "buyer": other,
        "invoice": f"{rng.choice('ABCDEFGH')}{rng.randint(100, 999)}",
        "total": str(net + tax),
    }
    note = (
        f"Invoice {fields['invoice']}: {company} billed {other} a net amount of {net} euros and "
        f"{tax} euros of tax, {fields['total']} in total."
    )
    return note, fields


def _event(rng: Random) -> tuple[str, dict[str, str]]:
    host, guest = rng.sample(PEOPLE, 2)
    month, old_month = rng.sample(MONTHS, 2)
    fields = {
        "host": host,
        "guest": guest,
        "date": f"{month} {rng.randint(1, 28)}",
        "room": f"{rng.choice(ROOMS)} {rng.randint(2, 9)}",
    }
    note = (
        f"The talk by {guest} moved from {old_month} {rng.randint(1, 28)} to {fields['date']}. "
        f"{host} will host it in {fields['room']}."
    )
    return note, fields


def _contact(rng: Random) -> tuple[str, dict[str, str]]:
    person, colleague = rng.sample(PEOPLE, 2)
    company, former = rng.sample(COMPANIES, 2)
    fields = {
        "name": person,
        "manager": colleague,
        "company": company,
        "phone": str(rng.randint(1000, 9999)),
    }
    note = (
        f"{person} left {former} and works for {colleague} at {company} now. "
        f"Call {fields['phone']}, no longer {rng.randint(1000, 9999)}."
    )
    return note, fields


_NOTES: tuple[Callable[[Random], tuple[str, dict[str, str]]], ...] = (_invoice, _event, _contact)


class Extraction(OneTurnEnvironment):
    """Fields of a note as a JSON object."""

    name = "extraction"
    description = (
        "Copy named fields out of a short note into a JSON object with exactly these keys."
    )
    max_tokens = 40
    sources = (*OneTurnEnvironment.sources, "burnish.envs.words")

    def draw(self, position: int) -> Item:
        """A note of some kind, and two or three of its fields in random order."""
        rng = self.random(position)
        note, fields = rng.choice(_NOTES)(rng)
        keys = rng.sample(sorted(fields), rng.randint(2, 3))
        asked = ", ".join(keys)
        prompt = f"{note}\nReply with only a JSON object of strings with the keys: {asked}."
        return Item(prompt, {"fields": {key: fields[key] for key in keys}})

    def reference(self, task: Task) -> tuple[Message, ...]:
        """The fields, in the order asked."""
        return answer_message(json.dumps(task.payload["fields"]))

    async def judge(self, task: Task, answer: str, context: EpisodeContext) -> Verdict:
        """All fields exact; progress is the share of exact fields; form is the bare object."""
        fields: dict[str, str] = task.payload["fields"]
        found = read_object(answer)
        right = [key for key, value in fields.items() if found and found.get(key) == value]
        exact_keys = found is not None and set(found) == set(fields)
        return grade(
            solved=exact_keys and len(right) == len(fields),
            progress=len(right) / len(fields),
            in_form=exact_keys and answer.startswith("{") and answer.endswith("}"),
            expected=fields,
            got=answer,
            wrong=[key for key in fields if key not in right],
        )


def read_object(text: str) -> dict[str, Any] | None:
    """The one JSON object in a text, without repeated keys; None if there is no such thing."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        found = json.loads(text[start : end + 1], object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("repeated key")
    return found
