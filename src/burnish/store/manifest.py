"""The manifest: what a run directory is, which format it has and what made it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Record

RUN_FORMAT_VERSION: Final = 1

UPGRADES: Final[dict[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}
"""Version -> pure function to the next version. Empty: version 1 is the first."""


class Manifest(Record, frozen=True, kw_only=True):
    """`manifest.json`."""

    format_version: int = RUN_FORMAT_VERSION
    """Version of the run directory's layout."""
    burnish_version: str
    """Program that made it."""
    created_at: str
    """ISO 8601, UTC."""
    seed: int
    """Root of all randomness."""
    versions: dict[str, str]
    """Of python, torch and others that shape the numbers."""
    hardware: dict[str, Any]
    """What the machine is."""
    model_digest: str
    """`sha256:...` of the weights that training started from."""
    environments: dict[str, str]
    """Name -> digest."""


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a run directory.

    Raises:
        UserError: if this is no run directory, or one of an unknown version, or damaged.
    """
    path = directory / "manifest.json"
    if not directory.exists():
        raise UserError(f"{directory}: no such run directory.", fix="check the path.")
    if not path.is_file():
        what = f"{directory}: not a run directory (it has no manifest.json)."
        raise UserError(what, fix="give a directory that `burnish run` made.")
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, OSError) as error:
        raise _damaged(path, error) from None
    version = raw.get("format_version")
    while version in UPGRADES:
        raw = UPGRADES[version](raw)
        version = raw.get("format_version")
    if version != RUN_FORMAT_VERSION:
        maker = raw.get("burnish_version", "an unknown version")
        raise UserError(
            f"{directory}: run format {version} (made by burnish {maker}),"
            f" this program reads {RUN_FORMAT_VERSION}.",
            fix=f"use burnish {maker} for this run, or start a new one.",
        )
    try:
        return msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: damaged ({error}).", fix="restore it from a copy of the run.")
