"""Saved states carry the version of their format; another one is refused, never guessed at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.core.errors import UserError


def require_version(state: Mapping[str, Any], expected: int, what: str) -> None:
    """Check `state["version"]`.

    Raises:
        UserError: if it is not `expected`.
    """
    if state.get("version") != expected:
        raise UserError(
            f"The checkpoint's {what} has version {state.get('version')!r}, "
            f"this program reads {expected}.",
            fix="resume with the version of burnish that wrote it.",
        )
