"""What keys a configuration class has, and which one the user meant."""

import difflib
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from burnish.core.toml_text import KeyPath, dotted

# Below this difflib ratio a suggestion is noise ("lr" for "seed") rather than help.
_LIKENESS = 0.6
# A key of the right section beats an equally similar one elsewhere, but not a perfect match there.
_SAME_SECTION_BONUS = 0.15
# Classes may refer to themselves; no configuration that a person writes is deeper.
_MAX_DEPTH = 8


class Shape(NamedTuple):
    """What may stand below an annotation."""

    models: tuple[type[BaseModel], ...]
    """Sections that the value may be."""
    values: tuple[Any, ...]
    """Annotations of the values, if it may be a table with free keys."""
    items: tuple[Any, ...]
    """Annotations of the items, if it may be an array."""


class Mistake(NamedTuple):
    """A key that should not be there."""

    path: KeyPath
    """Where it stands."""
    renamed_to: KeyPath | None
    """Its new name, if it once was right."""


def shape_of(annotation: Any) -> Shape:
    """Look through Annotated, Optional and unions."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return shape_of(arguments[0])
    if origin in (typing.Union, UnionType):
        shapes = [shape_of(a) for a in arguments]
        return Shape(
            tuple(m for s in shapes for m in s.models),
            tuple(v for s in shapes for v in s.values),
            tuple(i for s in shapes for i in s.items),
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Shape((), (arguments[1],), ())
    if origin in (list, tuple, set, frozenset):
        return Shape((), (), tuple(a for a in arguments if a is not Ellipsis))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape((annotation,), (), ())
    return Shape((), (), ())


def find_mistakes(annotation: Any, data: Any, path: KeyPath = ()) -> Iterator[Mistake]:
    """Renamed and unknown keys of `data`, in the order of the file."""
    models, values, items = shape_of(annotation)
    if isinstance(data, list):
        for index, item in enumerate(data):
            for inner in items:
                yield from find_mistakes(inner, item, (*path, str(index)))
    if not isinstance(data, Mapping):
        return
    for model in models:
        yield from _renamed(model, data, path)
    for key, value in data.items():
        known = [f for m in models if (f := m.model_fields.get(key)) is not None]
        if known:
            yield from find_mistakes(_union([f.annotation for f in known]), value, (*path, key))
        elif values:
            yield from find_mistakes(_union(values), value, (*path, key))
        elif models:
            yield Mistake((*path, key), None)


def field_at(annotation: Any, path: KeyPath) -> FieldInfo | None:
    """The declared field at `path`; None for free keys and unknown ones."""
    models, values, _ = shape_of(annotation)
    head, rest = path[0], path[1:]
    for model in models:
        field = model.model_fields.get(head)
        if field is not None:
            return field if not rest else field_at(field.annotation, rest)
    return next((f for v in values if rest and (f := field_at(v, rest)) is not None), None)


def declared_below(annotation: Any, path: KeyPath) -> list[tuple[KeyPath, FieldInfo]]:
    """The declared field at `path`, or those of the section there, whatever data says.

    Under a table with free keys any name leads on: `domains.NAME.environment`.
    """
    found = field_at(annotation, path)
    if found is not None:
        return [(path, found)]
    here: tuple[Any, ...] = (annotation,)
    for part in path:
        shapes = [shape_of(a) for a in here]
        fields = [m.model_fields.get(part) for s in shapes for m in s.models]
        known = tuple(f.annotation for f in fields if f is not None)
        here = known or tuple(v for s in shapes for v in s.values)
    models = [m for a in here for m in shape_of(a).models]
    return [((*path, name), f) for m in models for name, f in m.model_fields.items()]


def suggest(root: type[BaseModel], wrong: KeyPath, data: Mapping[str, Any]) -> str:
    """The sentence that puts an unknown key right: the nearest key and its section."""
    section, name = wrong[:-1], wrong[-1]
    best: tuple[float, KeyPath] = (0.0, ())
    siblings: list[str] = []
    free = (path for path, _ in declared_below(root, section)) if section else ()
    for path in dict.fromkeys([*_all_keys(root, data), *free]):
        score = difflib.SequenceMatcher(None, name.lower(), path[-1].lower()).ratio()
        if path[:-1] == section:
            siblings.append(path[-1])
            score += _SAME_SECTION_BONUS
        best = max(best, (score, path), key=lambda pair: pair[0])
    if best[0] >= _LIKENESS:
        return f'did you mean "{best[1][-1]}" in {section_name(best[1][:-1])}?'
    return f"{section_name(section)} has: {', '.join(siblings) or 'no keys'}."


def section_name(path: KeyPath) -> str:
    """`[a.b]`, or `the top level`."""
    return f"[{dotted(path)}]" if path else "the top level"


def _renamed(model: type[BaseModel], data: Mapping[str, Any], path: KeyPath) -> Iterator[Mistake]:
    renamed: dict[str, str] = getattr(model, "renamed", {})
    for old, new in renamed.items():
        here: Any = data
        for part in old.split("."):
            here = here.get(part, _ABSENT) if isinstance(here, Mapping) else _ABSENT
        if here is not _ABSENT:
            yield Mistake((*path, *old.split(".")), (*path, *new.split(".")))


def _all_keys(annotation: Any, data: Any, path: KeyPath = (), depth: int = 0) -> Iterator[KeyPath]:
    """Every declared key; below tables with free keys, under the names that `data` uses."""
    if depth > _MAX_DEPTH:
        return
    models, values, items = shape_of(annotation)
    for model in models:
        for name, field in model.model_fields.items():
            yield (*path, name)
            below = data.get(name) if isinstance(data, Mapping) else None
            yield from _all_keys(field.annotation, below, (*path, name), depth + 1)
    if isinstance(data, Mapping):
        for name in data if values else ():
            for value in values:
                yield from _all_keys(value, data[name], (*path, name), depth + 1)
    if isinstance(data, list):
        for index, item in enumerate(data):
            for inner in items:
                yield from _all_keys(inner, item, (*path, str(index)), depth + 1)


def _union(annotations: Any) -> Any:
    return typing.Union[tuple(annotations)]  # noqa: UP007 - built at run time


_ABSENT = object()
