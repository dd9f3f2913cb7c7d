"""Everything a run is built of, made from its configuration: the wiring, and nothing else."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import torch

from burnish.core.boxes import SandboxPool
from burnish.core.clock import Clock
from burnish.core.errors import UserError
from burnish.core.observer import RunObserver
from burnish.core.protocols import Environment, EpisodeContext
from burnish.core.records import Failure, Message
from burnish.envs import registry
from burnish.model.decoder import Decoder
from burnish.model.loading import LoadedModel
from burnish.rollout.collect.collector import Collector, Presence
from burnish.rollout.engine.barrier import Barrier
from burnish.run.config import RunConfig
from burnish.run.dtypes import DTYPES
from burnish.run.engines import RunEngine, core_limits, open_engine
from burnish.run.publish import Publisher, WeightSource
from burnish.run.trainer_thread import TrainerThread
from burnish.run.training import PolicyTrainer, ServedAs
from burnish.sandbox.measured import MeasuredPool
from burnish.sandbox.start import open_pool
from burnish.store.run_directory import RunDirectory
from burnish.train.trainer import Trainer


class Session(NamedTuple):
    """The live parts of a run."""

    config: RunConfig
    loaded: LoadedModel
    environments: Mapping[str, Environment]
    pool: MeasuredPool
    engine: RunEngine
    trainer: PolicyTrainer
    publisher: Publisher
    collector: Collector
    context: Callable[[int], EpisodeContext]
    directory: RunDirectory
    observer: RunObserver
    clock: Clock


def build_environments(config: RunConfig) -> dict[str, Environment]:
    """The domains of the mix, by the name of their section.

    Raises:
        UserError: for an unknown environment, one under another name, or none at all.
    """
    if not config.domains:
        raise UserError(
            "The run has no domains.", fix="add a section such as [domains.chain_sum] to its file."
        )
    environments = {}
    for name, section in sorted(config.domains.items()):
        environment = registry.get(section.environment or name)
        if environment.name != name:
            raise UserError(
                f"domains.{name} builds an environment that calls itself {environment.name!r}.",
                fix=f"name the section [domains.{environment.name}].",
            )
        environments[name] = environment
    return environments


@asynccontextmanager
async def open_session(
    config: RunConfig,
    loaded: LoadedModel,
    environments: Mapping[str, Environment],
    directory: RunDirectory,
    observer: RunObserver,
    clock: Clock,
    on_failure: Callable[[Failure], None],
) -> AsyncIterator[Session]:
    """Start engine, sandboxes and trainer; stop them on the way out, whatever happened.

    Raises:
        UserError: if boxes cannot run on this machine.
    """
    async with AsyncExitStack() as stack:
        pool = MeasuredPool(await asyncio.to_thread(open_pool, config.sandbox))
        stack.push_async_callback(pool.close)
        barrier = Barrier() if config.run.deterministic else None
        engine = await open_engine(config, loaded, barrier)
        stack.push_async_callback(engine.close)
        thread = TrainerThread(config.run.train_threads)
        stack.callback(thread.close)
        trainer = await _trainer(config, loaded, thread)
        context = _context(pool)
        collector = Collector(
            engine=engine,
            renderer=loaded.renderer,
            context=context,
            clock=clock,
            presence=None if barrier is None else _presence(barrier),
            max_attempts=config.rollout.max_attempts,
            step_timeout_s=config.rollout.step_timeout_s,
            on_failure=on_failure,
        )
        yield Session(
            config=config,
            loaded=loaded,
            environments=environments,
            pool=pool,
            engine=engine,
            trainer=trainer,
            publisher=_publisher(config, loaded, engine, trainer, clock),
            collector=collector,
            context=context,
            directory=directory,
            observer=observer,
            clock=clock,
        )


def _publisher(
    config: RunConfig,
    loaded: LoadedModel,
    engine: RunEngine,
    trainer: PolicyTrainer,
    clock: Clock,
) -> Publisher:
    return Publisher(
        engine,
        WeightSource(trainer.snapshot, trainer.score),
        probe_ids=probe(loaded),
        tolerance=config.engine.canary_tolerance,
        clock=clock,
        inflight=config.engine.inflight,
    )


def probe(loaded: LoadedModel) -> tuple[int, ...]:
    """The canary's fixed question: a short chat in the model's own template."""
    question = Message(role="user", content="Name the colours of the rainbow and count to twelve.")
    answer = Message(role="assistant", content="Red, orange, yellow, green, blue, indigo, violet.")
    return (*loaded.renderer.prompt((question,)), *loaded.renderer.assistant(answer))


async def _trainer(config: RunConfig, loaded: LoadedModel, thread: TrainerThread) -> PolicyTrainer:
    reference = None
    if config.train.loss.kl_coefficient > 0:
        reference = await thread.call(_frozen_copy, loaded, DTYPES[config.train.dtype])
    trainer = await thread.call(
        Trainer, config.train, loaded.decoder, temperature=config.rollout.temperature
    )
    return PolicyTrainer(
        trainer,
        thread,
        served_as=ServedAs(
            DTYPES[config.engine.dtype],
            core_limits(config).page_size,
            config.engine.num_threads,
            config.engine.exact,
        ),
        keep_checkpoints=config.run.keep_checkpoints,
        kl_reference=reference,
    )


def _frozen_copy(loaded: LoadedModel, dtype: torch.dtype) -> Decoder:
    return copy.deepcopy(loaded.decoder).to(dtype).requires_grad_(requires_grad=False)


def _context(pool: SandboxPool) -> Callable[[int], EpisodeContext]:
    return lambda seed: EpisodeContext(sandboxes=pool, seed=seed)


def _presence(barrier: Barrier) -> Presence:
    def enter(count: int) -> None:
        for _ in range(count):
            barrier.enter()

    return Presence(enter, barrier.leave)
