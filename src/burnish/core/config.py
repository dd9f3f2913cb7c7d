"""Configuration: TOML layers over typed defaults, and where every value came from.

    defaults of the classes  <  first file  <  later files  <  --set a.b=VALUE

Each component declares its own `Config` beside it; a run's root class nests them. Everything that a
user can get wrong here is a `UserError` of one line that names the file, the line and the key.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_json

from burnish.core.config_keys import declared_below, field_at, find_mistakes, section_name, suggest
from burnish.core.config_mistakes import explain_validation
from burnish.core.errors import UserError
from burnish.core.toml_text import KeyPath, dotted, key_lines, toml_value

DEFAULT_ORIGIN = "default"
SET_ORIGIN = "--set"
_MAX_FILE_BYTES = 2**24


class Config(BaseModel):
    """Base of all configuration sections: frozen, unknown keys refused, documented fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    renamed: ClassVar[dict[str, str]] = {}
    """Old key -> new key, both dotted and relative to this section. An old key fails by name."""


C = TypeVar("C", bound=Config)


class Layer(NamedTuple):
    """One place that set a value."""

    origin: str
    """`recipes/q.toml:12` or `--set`."""
    value: Any
    """As written."""


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[C]):
    """A configuration together with its history."""

    value: C
    """The validated configuration."""
    origins: dict[str, str]
    """Dotted key of every value -> `default`, `file:line` or `--set`."""
    layers: dict[str, tuple[Layer, ...]]
    """Dotted key -> what was written, first to last; the last one won."""

    def explain(self, key: str) -> str:
        """Value, origin, default and meaning of a key, or of all keys of a section.

        Raises:
            UserError: if there is no such key.
        """
        path = parse_key(key)
        values = dict(flatten(self.value))
        matching = [p for p in values if p[: len(path)] == path]
        if not matching:
            unset = declared_below(type(self.value), path)
            if unset:
                return "\n".join(_explain_unset(p, field) for p, field in unset)
            data = self.value.model_dump()
            fix = suggest(type(self.value), path, data)
            raise UserError(f'there is no key "{dotted(path)}".', fix=fix)
        return "\n".join(self._explain_one(p, values[p]) for p in matching)

    def _explain_one(self, path: KeyPath, value: Any) -> str:
        key = dotted(path)
        lines = [f"{key} = {_shown(value)}", f"  from     {self.origins[key]}"]
        for layer in reversed(self.layers.get(key, ())[:-1]):
            lines.append(f"  over     {_shown(layer.value)} from {layer.origin}")
        lines.append(f"  default  {_shown(_default_at(type(self.value), path))}")
        field = field_at(type(self.value), path)
        if field is not None and field.description:
            lines.append(f"  meaning  {' '.join(field.description.split())}")
        return "\n".join(lines)

    def to_toml(self) -> str:
        """The whole configuration as TOML, with the origin of each value as a comment.

        Loading it again gives an equal value.
        """
        sections: dict[KeyPath, list[str]] = {(): []}
        for path, value in flatten(self.value):
            key, origin = dotted(path[-1:]), self.origins[dotted(path)]
            line = f"# {key} is not set" if value is None else f"{key} = {toml_value(value)}"
            sections.setdefault(path[:-1], []).append(f"{line}  # {_comment(origin)}")
        blocks = ["\n".join(([f"[{dotted(p)}]"] if p else []) + ls) for p, ls in sections.items()]
        return "\n\n".join(b for b in blocks if b) + "\n"


def load_config(
    cls: type[C], files: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> Loaded[C]:
    """Merge defaults, files and `--set` values, and validate them.

    Args:
        cls: root class.
        files: TOML files, later ones win.
        overrides: `a.b=VALUE` each; VALUE is TOML, or else a string.

    Raises:
        UserError: for a missing or invalid file, an unknown or renamed key, or a wrong value.
    """
    tree: dict[str, Any] = {}
    history: dict[KeyPath, list[Layer]] = {}
    lines: dict[KeyPath, str] = {}
    for file in files:
        table, positions = _read_file(file)
        lines |= {path: f"{file}:{line}" for path, line in positions.items()}
        _merge(tree, table, _by_prefix(lines, str(file)), history)
    raw_texts: dict[KeyPath, str] = {}
    for override in overrides:
        path, text = _parse_override(override)
        raw_texts[path] = text
        nested: Any = _toml_or_string(text)
        for part in reversed(path):
            nested = {part: nested}
        lines |= {path[:n]: lines.get(path[:n], SET_ORIGIN) for n in range(1, len(path))}
        lines = {p: o for p, o in lines.items() if p[: len(path)] != path} | {path: SET_ORIGIN}
        _merge(tree, nested, _by_prefix(lines, SET_ORIGIN), history)
    origin_of = _by_prefix(lines, DEFAULT_ORIGIN)
    _refuse_wrong_keys(cls, tree, origin_of)
    value = _validate(cls, tree, raw_texts, origin_of)
    origins = {dotted(p): _last_origin(history, p) for p, _ in flatten(value)}
    layers = {dotted(p): tuple(found) for p, found in history.items()}
    return Loaded(value=value, origins=origins, layers=layers)


def diff_configs(old: Config, new: Config) -> list[str]:
    """Dotted keys whose values differ, those on one side only included, in the order of `new`."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [*after, *(p for p in before if p not in after)]
    missing = object()
    # repr tells nan from nothing, 1 from 1.0 and True from 1, and a nan equals itself.
    return [dotted(p) for p in keys if repr(before.get(p, missing)) != repr(after.get(p, missing))]


def config_schema(cls: type[Config]) -> dict[str, Any]:
    """JSON Schema of a configuration class, for editors that complete and check TOML."""
    return cls.model_json_schema()


def flatten(config: Config) -> Iterator[tuple[KeyPath, Any]]:
    """Every value with its path, as declared. Arrays and empty tables count as values."""

    def walk(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        if isinstance(value, dict) and (value or not path):
            # Plain values first: in TOML a key after a sub-table would belong to the sub-table.
            for key, inner in sorted(value.items(), key=lambda item: bool(_is_table(item[1]))):
                yield from walk(inner, (*path, str(key)))
        else:
            yield path, value

    yield from walk(config.model_dump(), ())


def parse_key(key: str) -> KeyPath:
    """Split a dotted key by the rules of TOML.

    Raises:
        UserError: if it is not a key.
    """
    try:
        if "\n" in key or "=" in key:
            raise tomllib.TOMLDecodeError("not a key")
        nested: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise UserError(f"{key!r} is not a key.", fix="write it as section.key.") from None
    path: list[str] = []
    while isinstance(nested, dict):
        part, nested = next(iter(nested.items()))
        path.append(part)
    return tuple(path)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and len(value) > 0


def _shown(value: Any) -> str:
    if value is PydanticUndefined:
        return "none: it must be set"
    return "not set" if value is None else toml_value(value)


def _explain_unset(path: KeyPath, field: FieldInfo) -> str:
    """A key under a name that the configuration does not use (yet)."""
    default = field.get_default(call_default_factory=True)
    lines = [f"{dotted(path)} is not set", f"  default  {_shown(default)}"]
    if field.description:
        lines.append(f"  meaning  {' '.join(field.description.split())}")
    return "\n".join(lines)


def _comment(origin: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in origin)


def _read_text(file: Path) -> str:
    fix = "give a TOML file that you may read."
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
        if len(data) <= _MAX_FILE_BYTES:
            return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file.", fix="check the path of the config.") from None
    except UnicodeDecodeError as error:
        what = f"{file}: not UTF-8 text (byte {error.start})."
        raise UserError(what, fix="save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}).", fix=fix) from None
    except ValueError as error:
        raise UserError(f"{str(file)!r}: no path ({error}).", fix=fix) from None
    raise UserError(f"{file}: more than {_MAX_FILE_BYTES} bytes: no configuration.", fix=fix)


def _read_file(file: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    text = _read_text(file)
    try:
        return tomllib.loads(text), key_lines(text.replace("\r\n", "\n"))
    except RecursionError:
        what = f"{file}: tables or arrays stand too deep in each other."
        raise UserError(what, fix="give a TOML file of a run.") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        message = str(error)[: place.start()] if place else str(error)
        where = f":{place[1]}:{place[2]}" if place and place[1] else f":{text.count(chr(10)) + 1}"
        fix = "correct this line; strings need quotes."
        if twice := re.fullmatch(r"Cannot declare \((.*)\) twice", message):
            table = dotted(tuple(re.findall(r"'([^']*)'", twice[1])))
            message = f"the table [{table}] stands here a second time"
            fix = f"move these keys to the first [{table}]."
        elif message == "Cannot overwrite a value":
            message, fix = "this key is set a second time", "keep one of the two lines."
        raise UserError(f"{file}{where}: invalid TOML: {message}.", fix=fix) from None


def _parse_override(override: str) -> tuple[KeyPath, str]:
    key, equals, text = override.partition("=")
    if not key.strip():
        what = f"--set {override!r}: names no key."
        raise UserError(what, fix="write --set KEY=VALUE, such as --set run.steps=10.")
    if not equals:
        what = f"--set {override}: has no value."
        raise UserError(what, fix=f"write --set {override}=VALUE.")
    return parse_key(key.strip()), text.strip()


def _toml_or_string(text: str) -> Any:
    try:
        table = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["v"] if len(table) == 1 else text


def _by_prefix(lines: Mapping[KeyPath, str], otherwise: str) -> Callable[[KeyPath], str]:
    def locate(path: KeyPath) -> str:
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        return next((lines[p] for p in prefixes if p in lines), otherwise)

    return locate


def _merge(
    tree: dict[str, Any],
    layer: Mapping[str, Any],
    locate: Callable[[KeyPath], str],
    history: dict[KeyPath, list[Layer]],
    path: KeyPath = (),
) -> None:
    for key, value in layer.items():
        here = (*path, key)
        if isinstance(value, dict):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            _merge(tree[key], value, locate, history, here)
        else:
            tree[key] = value
            history.setdefault(here, []).append(Layer(locate(here), value))


def _last_origin(history: Mapping[KeyPath, Sequence[Layer]], path: KeyPath) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in history:
            return history[path[:length]][-1].origin
    return DEFAULT_ORIGIN


def _refuse_wrong_keys(
    cls: type[Config], tree: Mapping[str, Any], origin_of: Callable[[KeyPath], str]
) -> None:
    # A renamed key is also unknown; what it is called now helps more.
    mistakes = sorted(find_mistakes(cls, tree), key=lambda m: m.renamed_to is None)
    if not mistakes:
        return
    path, renamed_to = mistakes[0]
    where = origin_of(path)
    if renamed_to is not None:
        what = f'{where}: the key "{dotted(path)}" was renamed.'
        raise UserError(what, fix=f'write "{dotted(renamed_to)}".')
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    what = f'{where}: unknown key "{dotted(path[-1:])}" in {section_name(path[:-1])}{more}.'
    raise UserError(what, fix=suggest(cls, path, tree))


def _validate(
    cls: type[C],
    tree: dict[str, Any],
    raw_texts: Mapping[KeyPath, str],
    origin_of: Callable[[KeyPath], str],
) -> C:
    # Strict, because TOML has types and "1" is not 1. Through JSON, because only there does strict
    # mode still take strings for enums and paths, and arrays for tuples.
    try:
        return cls.model_validate_json(to_json(tree, inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if not _restore_strings(tree, problems, raw_texts):
            what, fix = explain_validation(problems, tree, origin_of)
            raise UserError(what, fix=fix) from None
    return _validate(cls, tree, {}, origin_of)


def _restore_strings(
    tree: dict[str, Any], problems: Sequence[Any], raw_texts: Mapping[KeyPath, str]
) -> bool:
    """`--set name=123` means the string where a string is needed. True if anything changed."""
    changed = False
    for problem in problems:
        path = tuple(str(part) for part in problem["loc"])
        if problem["type"] == "string_type" and path in raw_texts:
            table: Any = tree
            for part in path[:-1]:
                table = table[part]
            table[path[-1]] = raw_texts[path]
            changed = True
    return changed


def _default_at(cls: type[Config], path: KeyPath) -> Any:
    try:
        value: Any = cls().model_dump()
        for part in path:
            value = value[part]
    except (ValidationError, KeyError, TypeError):
        field = field_at(cls, path)
        return field.get_default(call_default_factory=True) if field else PydanticUndefined
    return value
