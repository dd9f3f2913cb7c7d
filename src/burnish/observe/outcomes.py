"""The rows of `result.json` that have a result, and those that lost it on the way."""

from collections.abc import Mapping
from typing import Any

import msgspec

from burnish.observe.data import DomainResult, LostDomain

_NEEDED = ("n", "before", "after", "diff", "ci_low", "ci_high")


def domain_results(result: Mapping[str, Any]) -> tuple[DomainResult, ...]:
    """Domains that were measured before and after."""
    names = {field.name for field in msgspec.structs.fields(DomainResult)} - {"name"}
    return tuple(
        DomainResult(name=name, **{key: value for key, value in row.items() if key in names})
        for name, row in _rows(result)
        if _is_whole(row)
    )


def lost_domains(result: Mapping[str, Any]) -> tuple[LostDomain, ...]:
    """Domains that were shut out in the run, so that nothing was measured after it."""
    return tuple(
        LostDomain(name=name, before=row.get("before"), warmed=row.get("warmed"))
        for name, row in _rows(result)
        if not _is_whole(row)
    )


def _rows(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    table = result.get("domains")
    return list(table.items()) if isinstance(table, dict) else []


def _is_whole(row: Mapping[str, Any]) -> bool:
    return all(row.get(key) is not None for key in _NEEDED)
