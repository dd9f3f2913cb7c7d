"""Checkpoints: whole or absent, versioned, and checked before they are believed.

    checkpoints/step-00000040/
        tensors.safetensors     masters and moments
        state.json              counters, and whatever the caller wants to go with them
        manifest.json           format version, sizes and SHA-256 of both: written last

A checkpoint is written into a hidden directory, flushed to the disk and then renamed, so a name
that can be seen is a checkpoint that was finished. Digests find what happens to it afterwards.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.core.disk import ensure_free_space, full_disk_is_one_line, sync_directory
from burnish.core.errors import UserError
from burnish.core.records import Record

FORMAT_VERSION = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_SLACK_BYTES = 1 << 20


class Checkpoint(NamedTuple):
    """What was saved."""

    step: int
    """Optimizer steps taken."""
    tensors: dict[str, Tensor]
    """By name."""
    scalars: dict[str, Any]
    """The trainer's counters."""
    payload: dict[str, Any]
    """The caller's own state, JSON."""


class _Entry(Record, frozen=True, kw_only=True):
    """What a file must be."""

    num_bytes: int
    """Size."""
    sha256: str
    """Digest, hexadecimal."""


class _Manifest(Record, frozen=True, kw_only=True):
    """Written last."""

    format_version: int
    """Of the checkpoint."""
    files: dict[str, _Entry]
    """By name."""


class CheckpointDamagedError(UserError):
    """A checkpoint that is not what was written."""


def save(
    directory: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    payload: Mapping[str, Any],
    keep: int | None = None,
) -> Path:
    """Write `step-NNNNNNNN` under `directory`; durable on return. Replaces one of the same step.

    Args:
        directory: made if absent.
        step: its number.
        tensors: contiguous or not, not aliasing.
        scalars: JSON-ready.
        payload: JSON-ready state of the caller.
        keep: afterwards, delete all but this many newest.

    Raises:
        DiskFullError: older checkpoints are untouched and nothing half-written stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    final = directory / f"step-{step:08d}"
    temporary = directory / f".{final.name}.{os.getpid()}.tmp"
    state = json.dumps({"step": step, "scalars": dict(scalars), "payload": dict(payload)})
    size = sum(t.numel() * t.element_size() for t in tensors.values()) + len(state)
    ensure_free_space(directory, size + _SLACK_BYTES)
    with full_disk_is_one_line(directory):
        try:
            temporary.mkdir()
            _write(temporary, tensors, state)
            _swap_in(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if keep is not None:
        prune(directory, keep)
    return final


def load(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every byte of it.

    Raises:
        CheckpointDamagedError: if anything is missing or differs; names the newest good one
            before it.
        UserError: if it is of another format version.
    """
    manifest = _manifest(path)
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != entry.num_bytes:
            size = file.stat().st_size
            raise _damaged(path, f"{name} has {size:,} bytes instead of {entry.num_bytes:,}")
        if _digest(file) != entry.sha256:
            raise _damaged(path, f"the digest of {name} differs")
    state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    try:
        tensors = load_file(path / _TENSORS)
    except SafetensorError as error:
        raise _damaged(path, f"{_TENSORS} cannot be read ({error})") from error
    return Checkpoint(state["step"], tensors, state["scalars"], state["payload"])


def latest(directory: Path) -> Path | None:
    """The newest checkpoint by step number, or None. It is not checked: `load` does that."""
    found = checkpoints(directory)
    return found[-1] if found else None


def checkpoints(directory: Path) -> list[Path]:
    """All finished checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if _NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """Step number from the name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def prune(directory: Path, keep: int) -> None:
    """Delete all but the `keep` >= 1 newest checkpoints, and leftovers of killed writers."""
    assert keep >= 1
    _remove_leftovers(directory)
    for path in checkpoints(directory)[:-keep]:
        # Renamed first: a kill in the middle must not leave a checkpoint with files missing.
        doomed = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _write(target: Path, tensors: Mapping[str, Tensor], state: str) -> None:
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, target / _TENSORS)
    except SafetensorError as error:
        # safetensors folds the system's errno into a text.
        if f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    (target / _STATE).write_text(state, encoding="utf-8")
    files = {
        name: _Entry(num_bytes=(target / name).stat().st_size, sha256=_digest(target / name))
        for name in (_TENSORS, _STATE)
    }
    manifest = _Manifest(format_version=FORMAT_VERSION, files=files)
    (target / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for name in (_TENSORS, _STATE, _MANIFEST):
        _flush(target / name)
    sync_directory(target)


def _swap_in(temporary: Path, final: Path) -> None:
    """Rename into place; an old checkpoint of the same step steps aside first."""
    if final.exists():
        aside = final.with_name(f".{final.name}.{os.getpid()}.old.tmp")
        os.replace(final, aside)
        os.replace(temporary, final)
        shutil.rmtree(aside)
    else:
        os.replace(temporary, final)
    sync_directory(final.parent)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(path: Path) -> _Manifest:
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint.", fix="give the directory of one.")
    try:
        text = (path / _MANIFEST).read_bytes()
        version = json.loads(text)["format_version"]
    except FileNotFoundError as error:
        raise _damaged(path, f"{_MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{_MANIFEST} cannot be read") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: checkpoint format {version!r}, this version reads {FORMAT_VERSION}.",
            fix="resume with the version of burnish that wrote it.",
        )
    try:
        manifest = msgspec.json.decode(text, type=_Manifest)
    except (msgspec.DecodeError, ValueError) as error:
        raise _damaged(path, f"{_MANIFEST} cannot be read") from error
    if set(manifest.files) != {_TENSORS, _STATE}:
        raise _damaged(path, f"{_MANIFEST} does not list {_TENSORS} and {_STATE}")
    return manifest


def _damaged(path: Path, why: str) -> CheckpointDamagedError:
    good = next((p for p in _before(path) if _is_whole(p)), None)
    fix = (
        "no older checkpoint is whole: start the run again."
        if good is None
        else f"move {path.name} away; {good} is whole and will be used."
    )
    return CheckpointDamagedError(f"{path}: damaged checkpoint: {why}.", fix=fix)


def _before(path: Path) -> Iterator[Path]:
    """Older checkpoints, newest first."""
    if _NAME.fullmatch(path.name):
        for other in reversed(checkpoints(path.parent)):
            if step_of(other) < step_of(path):
                yield other


def _is_whole(path: Path) -> bool:
    """Whether it would load."""
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=_Manifest)
        files = manifest.files
        return manifest.format_version == FORMAT_VERSION and all(
            _digest(path / name) == entry.sha256 for name, entry in files.items()
        )
    except (OSError, ValueError, msgspec.MsgspecError):
        return False


def _remove_leftovers(directory: Path) -> None:
    """Directories that a killed writer left."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path)
