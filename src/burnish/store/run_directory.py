"""A run directory: the plain files in which a run lives, owned by one process at a time.

config.toml           what the user wrote            config.resolved.toml  every value, its origin
manifest.json         what made this                 result.json           how it ended
ledger.sqlite         what became of each group      events.jsonl          what happened
metrics/              one row per step and metric    failures.jsonl        classified failures
rollouts/             groups and their advantages    evals/                before, warmed, after
checkpoints/          weights and optimizer          logs/                 logging
report.html           for people                     lock                  pid of the owner
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from burnish.core.clock import Clock, SystemClock
from burnish.core.disk import full_disk_is_one_line, is_leftover, sync_directory, write_atomically
from burnish.core.errors import UserError
from burnish.core.records import Failure, Record, Rollout
from burnish.store.ledger import Ledger
from burnish.store.manifest import Manifest, read_manifest
from burnish.store.metrics import MetricStore
from burnish.store.rollouts import RolloutStore, write_evaluation
from burnish.telemetry.events import EventWriter
from burnish.telemetry.jsonl import JsonLinesFile, encode_line

_DIRECTORIES: Final = ("metrics", "rollouts", "evals", "logs", "checkpoints")


_REFUSALS: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENAMETOOLONG,
    }
)


class EvalName(StrEnum):
    """Which evaluation."""

    BEFORE = "before"
    """The base model."""
    WARMED = "warmed"
    """After the supervised warm-up."""
    AFTER = "after"
    """After reinforcement learning."""


class FailureRecord(Record, frozen=True, kw_only=True):
    """One line of `failures.jsonl`."""

    format_version: int = 1
    """Version of this format."""
    t: float
    """Unix time, seconds."""
    step: int
    """Optimizer step during which it happened."""
    subject: str
    """What failed: an id of a rollout or a group, or a domain."""
    failure: Failure
    """The classified failure."""


class RunDirectory:
    """The owner's view of a run directory; `close` it, or use it as a context."""

    def __init__(self, path: Path, manifest: Manifest, lock: int, clock: Clock) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._clock = clock
        for leftover in [p for p in path.iterdir() if is_leftover(p)]:
            leftover.unlink()
        self.ledger = Ledger(path / "ledger.sqlite", must_exist=True)
        self.events = EventWriter(path / "events.jsonl", clock)
        self.metrics = MetricStore(path / "metrics")
        self.rollouts = RolloutStore(path / "rollouts")
        self._failures = JsonLinesFile(path / "failures.jsonl")

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        config_text: str,
        resolved_text: str,
        clock: Clock | None = None,
    ) -> Self:
        """Make a run directory; it appears complete or not at all.

        Raises:
            UserError: if `path` holds something, or cannot be made.
            DiskFullError: nothing is left behind.
        """
        _refuse_taken(path)
        draft = path.with_name(f".{path.name}.creating")
        with _refusals_told(path), full_disk_is_one_line(path):
            draft.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(draft, path)
            made = draft
            try:
                _note_owner(lock)
                _fill(draft, manifest, config_text, resolved_text)
                os.rename(draft, path)
                made = path
                sync_directory(path.parent)
                return cls(path, manifest, lock, clock or SystemClock())
            except BaseException:
                os.close(lock)
                shutil.rmtree(made, ignore_errors=True)
                raise

    @classmethod
    def open(cls, path: Path, clock: Clock | None = None) -> Self:
        """Open an existing run, to go on with it.

        Raises:
            UserError: if it is not a run directory, is of another version, or is in use.
        """
        manifest = read_manifest(path)
        with _refusals_told(path), full_disk_is_one_line(path):
            lock = _take_lock(path, path)
            try:
                _note_owner(lock)
                return cls(path, manifest, lock, clock or SystemClock())
            except BaseException:
                os.close(lock)
                raise

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where logs go."""
        return self.path / "logs"

    @property
    def config_text(self) -> str:
        """What the user wrote."""
        return (self.path / "config.toml").read_text()

    @property
    def resolved_text(self) -> str:
        """Every value, loadable by `load_config`: compare with it before going on."""
        return (self.path / "config.resolved.toml").read_text()

    def append_failure(self, step: int, subject: str, failure: Failure) -> None:
        """Note a classified failure."""
        record = FailureRecord(t=self._clock.wall_s(), step=step, subject=subject, failure=failure)
        self._failures.append(encode_line(record))

    def write_evaluation(self, name: EvalName, rollouts: Sequence[Rollout]) -> None:
        """Write the rollouts of an evaluation, replacing an older one of this name."""
        write_evaluation(self.path / "evals" / f"{name}.parquet", rollouts)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`. Numbers that are not finite become null."""
        text = msgspec.json.format(msgspec.json.encode(result), indent=2)
        write_atomically(self.path / "result.json", text + b"\n")

    def write_report(self, html: str) -> None:
        """Write `report.html`."""
        write_atomically(self.path / "report.html", html.encode())

    def rollback_to(self, step: int) -> None:
        """Undo what belongs to later steps in ledger, metrics and advantages.

        Doing it twice is doing it once, so a crash in between is repaired by the next resume.
        """
        self.rollouts.rollback_to(step)
        self.metrics.rollback_to(step)
        self.ledger.rollback_to(step, self.rollouts.group_ids())

    def close(self) -> None:
        """Make everything durable and let go of the lock. May be called twice."""
        if self._lock < 0:
            return
        try:
            self.rollouts.close()
            self.metrics.close()
            self.events.close()
            self._failures.close()
            self.ledger.close()
        finally:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _refuse_taken(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        kind = "holds a run already" if (path / "manifest.json").exists() else "is not empty"
        fix = f"choose another directory, or go on with --resume {path}."
        raise UserError(f"{path}: {kind}.", fix=fix)


def _fill(draft: Path, manifest: Manifest, config_text: str, resolved_text: str) -> None:
    for old in [p for p in draft.iterdir() if p.name != "lock"]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name in _DIRECTORIES:
        (draft / name).mkdir()
    Ledger(draft / "ledger.sqlite").close()
    write_atomically(draft / "config.toml", config_text.encode())
    write_atomically(draft / "config.resolved.toml", resolved_text.encode())
    write_atomically(draft / "manifest.json", msgspec.json.encode(manifest) + b"\n")


def _take_lock(directory: Path, shown: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        what = f"{shown}: in use by process {pid}."
        raise UserError(what, fix=f"wait for it, or stop it with: kill -INT {pid}") from None
    return descriptor


def is_in_use(path: Path) -> bool:
    """Whether a process works in this run directory."""
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _note_owner(lock: int) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


@contextmanager
def _refusals_told(path: Path) -> Iterator[None]:
    """Turn what a file system refuses into one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        what = f"{path}: cannot be used as a run directory ({error.strerror})."
        raise UserError(what, fix="choose a new directory where you may write.") from error
