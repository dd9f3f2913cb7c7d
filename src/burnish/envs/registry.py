"""Which environments there are: shipped ones by name, others as `module:Class`.

Entries are data. Nothing is imported until an environment is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from burnish.core.errors import UserError, one_line
from burnish.core.protocols import Environment

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Entry(NamedTuple):
    """How to build one shipped environment."""

    target: str
    """`module:Class`."""
    config: Mapping[str, Any] | None = None
    """Keys of the class's configuration; None for classes without one."""


def _generator(
    name: str, description: str, form: str, max_tokens: int, prompt: str, **parameters: Any
) -> Entry:
    """A reasoning-gym generator as an entry."""
    return Entry(
        "burnish.envs.reasoning_gym:ReasoningGym",
        {
            "name": name,
            "description": description,
            "generator": name,
            "parameters": parameters,
            "form": form,
            "max_tokens": max_tokens,
            "prompt": prompt,
        },
    )


def _tiered(tier_by: str, easiest: int, num_tiers: int, entry: Entry, *, name: str) -> Entry:
    """The same with tiers by a figure of its items."""
    more = {"name": name, "tier_by": tier_by, "easiest": easiest, "num_tiers": num_tiers}
    target = "burnish.envs.reasoning_gym_tiers:TieredReasoningGym"
    return Entry(target, {**(entry.config or {}), **more})


SHIPPED: Mapping[str, Entry] = {
    "chain_sum": _generator(
        "chain_sum",
        "Add and subtract three digits.",
        "number",
        12,
        "What is {expression}? Answer with the number only.",
        min_terms=3,
        max_terms=3,
        min_digits=1,
        max_digits=1,
    ),
    "sum_ladder": _tiered(
        "num_terms",
        2,
        4,
        _generator(
            "chain_sum",
            "Add and subtract two to five digits: four tiers.",
            "number",
            12,
            "What is {expression}? Answer with the number only.",
            min_terms=2,
            max_terms=5,
            min_digits=1,
            max_digits=1,
        ),
        name="sum_ladder",
    ),
    "number_sorting": _generator(
        "number_sorting",
        "Sort a few numbers, up or down.",
        "list",
        24,
        "Sort these numbers in {direction} order: {original_numbers}. "
        "Answer with the sorted numbers only, separated by commas.",
        min_numbers=3,
        max_numbers=3,
        min_decimals=0,
        max_decimals=0,
        min_value=1,
        max_value=99,
    ),
    "word_sorting": _generator(
        "word_sorting",
        "Sort a few words, up or down.",
        "list",
        28,
        "Sort these words in {direction} order, capitals first: {original_words}. "
        "Answer with the sorted words only, separated by commas.",
        min_words=3,
        max_words=3,
        min_word_length=3,
        max_word_length=8,
    ),
    "word_sequence_reversal": _generator(
        "word_sequence_reversal",
        "Write a list of words in reverse order.",
        "list",
        28,
        "Reverse the order of these words: {words}. "
        "Answer with the words only, separated by commas.",
        min_words=3,
        max_words=3,
    ),
    "needle_haystack": _generator(
        "needle_haystack",
        "Find who holds an opinion among a few statements.",
        "word",
        16,
        "{question}",
        min_num_statements=4,
        max_num_statements=6,
    ),
    "code": Entry("burnish.envs.code:Code"),
    "calculator": Entry("burnish.envs.calculator:Calculator"),
    "extraction": Entry("burnish.envs.extraction:Extraction"),
    "formatting": Entry("burnish.envs.formatting:Formatting"),
}
"""All shipped domains."""


def names() -> tuple[str, ...]:
    """Names of the shipped environments, sorted."""
    return tuple(sorted(SHIPPED))


def get(name: str) -> Environment:
    """Build an environment from a shipped name or `module:Class` (called without arguments).

    Raises:
        UserError: if there is no such thing, or it is not an environment.
    """
    if ":" in name:
        return _checked(name, _build(name, None))
    entry = SHIPPED.get(name)
    if entry is None:
        begun = [shipped for shipped in SHIPPED if name and shipped.startswith(name)]
        near = begun or difflib.get_close_matches(name, SHIPPED, n=1, cutoff=0.7)
        raise UserError(
            f"unknown environment {name!r}.",
            fix=f"use {near[0]!r}."
            if near
            else f"use one of {', '.join(names())}, or module:Class.",
        )
    return _checked(name, _build(entry.target, entry.config))


def _build(target: str, config: Mapping[str, Any] | None) -> object:
    kind = _load(target)
    if config is not None:
        (parameter,) = inspect.signature(kind, eval_str=True).parameters.values()
        return kind(parameter.annotation(**config))
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{target} cannot be called without arguments: {error}.",
            fix="give every argument of its constructor a default.",
        ) from error
    try:
        return kind()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{target} cannot be built: {one_line(error)}.",
            fix=f"make `{kind.__name__}()` work in Python.",
        ) from error


def _load(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"cannot import {module_name!r} of environment {target!r}: {one_line(error)}.",
            fix="install the package or put its folder on PYTHONPATH, and try `import` in Python.",
        ) from error
    kind = getattr(module, attribute, None)
    if not callable(kind):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        near = difflib.get_close_matches(attribute, classes, n=1)
        raise UserError(
            f"module {module_name!r} has no class {attribute!r}.",
            fix=f"use {module_name}:{near[0]}."
            if near
            else f"use {module_name}:Class with a class of that module, or one of "
            f"{', '.join(names())}.",
        )
    return kind


def _checked(target: str, built: object) -> Environment:
    """Refuse what is not an environment now, rather than in the middle of a run."""
    parts = ("name", "digest", "tools", "description", "task", "start", "reference")
    try:
        missing = [part for part in parts if not hasattr(built, part)]
    except Exception as error:
        raise UserError(
            f"{target} cannot say what it is: {one_line(error)}.",
            fix="make its attributes readable without a failure.",
        ) from error
    if missing:
        raise UserError(
            f"{target} is not an environment: it lacks {', '.join(missing)}.",
            fix="implement burnish.core.protocols.Environment.",
        )
    environment: Environment = built  # type: ignore[assignment]
    if not isinstance(environment.name, str) or not _NAME.fullmatch(environment.name):
        raise UserError(
            f"{target} calls itself {environment.name!r}.",
            fix="use a name of lower case letters, digits and underscores.",
        )
    return environment
