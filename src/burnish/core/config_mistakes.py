"""From pydantic's list of errors to one line: the key, what it got, what it needs, and where."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.core.config_keys import section_name
from burnish.core.toml_text import KeyPath, dotted, toml_value

_NEEDS = {
    "missing": "more items",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "list_type": "an array",
    "tuple_type": "an array",
    "set_type": "an array",
    "frozen_set_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "enum": "{expected}",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
}
_SHOWN_CHARACTERS = 60


def explain_validation(
    problems: Sequence[Any], tree: Mapping[str, Any], origin_of: Callable[[KeyPath], str]
) -> tuple[str, str]:
    """What is wrong with the first bad key, and the fix. Other keys are only counted.

    Args:
        problems: `ValidationError.errors()`.
        tree: the data that was validated.
        origin_of: where a key was written.
    """
    paths = [_real_path(problem, tree) for problem in problems]
    path = paths[0]
    same = [problem for problem, p in zip(problems, paths, strict=True) if p == path]
    more = len(set(paths)) - 1
    suffix = f" (and {more} more wrong values)" if more else ""
    key, first = dotted(path), same[0]
    if first["type"] == "missing" and not isinstance(first["loc"][-1], int):
        what = f'the key "{dotted(path[-1:])}" is missing from {section_name(path[:-1])}{suffix}.'
        return what, f"set {key}."
    needs = " or ".join(dict.fromkeys(_needed(problem) for problem in same))
    where = origin_of(path) if path else "config"
    if first["type"] in ("value_error", "assertion_error"):
        subject = f"{key}: " if path else ""
        return f"{where}: {subject}{needs}{suffix}.", f"change {key or 'the values named'}."
    what = f"{where}: {key} got {_got(first['input'])}, needs {needs}{suffix}."
    return what, f"set {key} to {needs}."


def _real_path(problem: Any, tree: Mapping[str, Any]) -> KeyPath:
    """The location without the tags that pydantic adds for members of a union."""
    path: list[str] = []
    here: Any = tree
    last = len(problem["loc"]) - 1
    for position, part in enumerate(problem["loc"]):
        in_table = isinstance(here, Mapping) and part in here
        in_array = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_table or in_array:
            here = here[part]
        elif isinstance(part, int) or problem["type"] != "missing" or position < last:
            continue
        path.append(str(part))
    return tuple(path)


def _needed(problem: Any) -> str:
    template = _NEEDS.get(problem["type"])
    if template is not None:
        return template.format(**problem.get("ctx", {}))
    message: str = problem["msg"]
    for prefix in ("Value error, ", "Assertion failed, ", "Input should be "):
        message = message.removeprefix(prefix)
    return " ".join(message.split()).rstrip(".")


def _got(value: Any) -> str:
    if value is None:
        return "nothing"
    text = toml_value(value)
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{shown} ({_kind(value)})"


def _kind(value: Any) -> str:
    # bool before int: a bool is an int.
    for kinds, name in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a float"),
        (str, "a string"),
        (list, "an array"),
        (dict, "a table"),
    ):
        if isinstance(value, kinds):
            return name
    return type(value).__name__
