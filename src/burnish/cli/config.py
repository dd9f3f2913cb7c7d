"""`burnish config explain`: where a value came from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from burnish.core.config import Loaded
    from burnish.run.config import RunConfig


def explain(
    key: str,
    config: Path | None = None,
    /,
    *,
    overlay: Annotated[list[Path] | None, Parameter(name=["-c", "--config"])] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Value, origin, default and meaning of a key, or of all keys of a section.

    Args:
        key: dotted key or section, such as train.lr or train.
        config: TOML file of the run; without one, the defaults.
        overlay: another TOML file whose values win over those before it; may be repeated.
        set_: one value, as KEY=VALUE; may be repeated.
        as_json: keys, values and origins as JSON.
    """
    from burnish.cli.console import people, write_json
    from burnish.core.config import load_config
    from burnish.run.config import RunConfig

    files = [file for file in (config, *(overlay or ())) if file is not None]
    loaded = load_config(RunConfig, files, set_ or [])
    text = loaded.explain(key)
    if not as_json:
        people().print(text, markup=False, soft_wrap=True)
        return
    write_json(_values(loaded, key))


def _values(loaded: "Loaded[RunConfig]", key: str) -> dict[str, dict[str, Any]]:
    from burnish.core.config import flatten, parse_key
    from burnish.core.config_keys import declared_below
    from burnish.core.toml_text import dotted

    path = parse_key(key)
    found = {
        dotted(p): {"value": v, "origin": loaded.origins[dotted(p)]}
        for p, v in flatten(loaded.value)
        if p[: len(path)] == path
    }
    unset = {
        dotted(p): {"value": field.get_default(call_default_factory=True), "origin": "default"}
        for p, field in declared_below(type(loaded.value), path)
    }
    return found or unset
