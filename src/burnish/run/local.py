"""A run on this machine, from configuration to report: the composition root.

    load -> check -> eval before -> warm-up -> eval warmed -> loop -> eval after -> report

Every phase leaves its result in the run directory. A resumed run finds what is there and goes on
behind it; what a crash tore is undone by the ledger and done again.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish import __version__
from burnish.core.clock import Clock, SystemClock
from burnish.core.config import Loaded, diff_configs, load_config
from burnish.core.disk import ensure_free_space
from burnish.core.errors import UserError
from burnish.core.observer import RunObserver, RunPhase
from burnish.run.config import EngineBackend, RunConfig
from burnish.run.engines import check_engine
from burnish.run.facts import hardware, versions
from burnish.store.manifest import Manifest
from burnish.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from burnish.model.config import ModelConfig

# Tokens of one cache page; `CoreLimits` has the same default.
PAGE_TOKENS = 16
# Two checkpoints of fp32 masters and two moments, the exported model, rollouts and some slack, for
# each byte of fp32 weights.
_DISK_PER_WEIGHT_BYTE = 3 * 2 + 1


class RunResult(NamedTuple):
    """What `start` gives back."""

    run_dir: Path | None
    """Where everything lies; None after a dry run."""
    result: dict[str, Any]
    """Content of `result.json`; empty after a dry run."""
    resolved: str
    """The configuration with the origin of every value, as TOML."""


def start(
    config_files: Sequence[Path],
    overrides: Sequence[str],
    *,
    dry_run: bool = False,
    resume: Path | None = None,
    observer: RunObserver,
) -> RunResult:
    """Run what a configuration describes.

    Args:
        config_files: TOML files, later ones win.
        overrides: `a.b=VALUE`, which win over files.
        dry_run: check configuration, model and environments, and stop.
        resume: run directory to go on with; a configuration given beside it must not differ.
        observer: who watches.

    Raises:
        UserError: for what the user can fix.
        ClassifiedFailure: for what failed in the run.
        KeyboardInterrupt: after Ctrl-C; the message says how to go on.
    """
    loaded = _configuration(config_files, overrides, resume)
    if resume is not None:
        finished = _finished(resume)
        if finished is not None:
            observer.note(f"{resume}: this run is complete.")
            return RunResult(resume, finished, loaded.to_toml())
    else:
        _refuse_unwritable(loaded.value.run.directory)
    check_engine(loaded.value)
    # torch and all that hangs on it are imported only now: a mistake in the file is told at once.
    from burnish.model.loading import load_model
    from burnish.run.execute import execute
    from burnish.run.memory import share_one_heap
    from burnish.run.session import build_environments
    from burnish.schedule.wishes import check_live, check_schedule

    share_one_heap()
    environments = build_environments(loaded.value)
    check_schedule(tuple(environments), loaded.value.schedule)
    check_live(loaded.value.schedule, deterministic=loaded.value.run.deterministic)
    digests = {name: environment.digest for name, environment in environments.items()}
    observer.phase(RunPhase.LOAD, 0)
    settings = loaded.value.model
    model = load_model(settings.source, context=settings.context, rope=settings.rope)
    _refuse_huge_cache(loaded.value, model.config)
    if dry_run:
        return RunResult(None, {}, loaded.to_toml())
    clock = SystemClock()
    if resume is None:
        manifest = _manifest(loaded.value.run.seed, model.digest, digests)
        directory = _create(loaded, config_files, manifest, clock)
    else:
        directory = RunDirectory.open(resume, clock)
    with directory:
        if resume is not None:
            _same_inputs(directory, model.digest, digests)
        num_bytes = 4 * sum(p.numel() for p in model.decoder.parameters())
        ensure_free_space(directory.path, _DISK_PER_WEIGHT_BYTE * num_bytes)
        result = asyncio.run(execute(loaded.value, model, environments, directory, observer, clock))
    observer.result(directory.path)
    return RunResult(directory.path, result, loaded.to_toml())


def _configuration(
    files: Sequence[Path], overrides: Sequence[str], resume: Path | None
) -> Loaded[RunConfig]:
    if resume is None:
        if not files:
            raise UserError("There is no configuration.", fix="burnish run recipes/quickstart.toml")
        return load_config(RunConfig, files, overrides)
    from burnish.store.manifest import read_manifest

    read_manifest(resume)
    stored = load_config(RunConfig, [resume / "config.resolved.toml"])
    if files or overrides:
        bases = list(files) or [resume / "config.resolved.toml"]
        given = load_config(RunConfig, bases, overrides)
        changed = diff_configs(stored.value, given.value)
        if changed:
            raise UserError(
                f"{resume} was started with other values of {', '.join(changed)}.",
                fix=f"burnish run --resume {resume} (without them), or start a new run.",
            )
    return stored


def _refuse_unwritable(directory: Path) -> None:
    """Told before the model is loaded, not after."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"run.directory = {directory}: {existing} cannot be written to.",
            fix="choose a directory that you may write with --set run.directory=PATH.",
        )


def _refuse_huge_cache(config: RunConfig, model: ModelConfig) -> None:
    """A cache larger than the machine's memory can only end in a kill."""
    if config.engine.backend is not EngineBackend.LOCAL:
        return
    num_bytes = (
        2 * model.num_layers * model.num_kv_heads * model.head_dim
        * (2 if config.engine.dtype == "bfloat16" else 4)
        * PAGE_TOKENS * config.engine.num_pages
    )  # fmt: skip
    if config.engine.kv.disk_mb:
        num_bytes = min(num_bytes, config.engine.kv.ram_mb << 20)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory // 2:
        raise UserError(
            f"the engine's cache needs {num_bytes / 2**30:,.1f} GiB, "
            f"this machine has {memory / 2**30:,.1f} GiB.",
            fix="lower engine.num_pages, or engine.kv.ram_mb where engine.kv.disk_mb is set.",
        )


def _finished(run: Path) -> dict[str, Any] | None:
    from burnish.store.reader import RunReader

    return RunReader(run).result()


def _manifest(seed: int, model_digest: str, environments: dict[str, str]) -> Manifest:
    return Manifest(
        burnish_version=__version__,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seed=seed,
        versions=versions(),
        hardware=hardware(),
        model_digest=model_digest,
        environments=environments,
    )


def _create(
    loaded: Loaded[RunConfig], files: Sequence[Path], manifest: Manifest, clock: Clock
) -> RunDirectory:
    section = loaded.value.run
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = section.directory / f"{section.name}-{stamp}"
    attempt = 1
    while path.exists():
        attempt += 1
        path = section.directory / f"{section.name}-{stamp}-{attempt}"
    written = "\n".join(f"# {file}\n{file.read_text()}" for file in files)
    return RunDirectory.create(path, manifest, written, loaded.to_toml(), clock)


def _same_inputs(directory: RunDirectory, model_digest: str, environments: dict[str, str]) -> None:
    manifest = directory.manifest
    if manifest.model_digest != model_digest:
        raise UserError(
            f"{directory.path} started from other weights than model.source holds now.",
            fix="put the old weights back, or start a new run.",
        )
    changed = sorted(n for n, d in manifest.environments.items() if environments.get(n) != d)
    if changed:
        raise UserError(
            f"{directory.path}: the code or data of {', '.join(changed)} has changed since.",
            fix="go back to the version that started this run, or start a new run.",
        )
