"""The engine that a run's configuration names: in this process, or servers behind HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from burnish.core.errors import UserError
from burnish.core.protocols import Engine
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import EngineFeature, Speculation
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.stats import EngineStats
from burnish.run.config import EngineBackend, RunConfig

if TYPE_CHECKING:
    from burnish.model.loading import LoadedModel
    from burnish.rollout.engine.barrier import Barrier
    from burnish.rollout.engine.grammar import GrammarCompiler
    from burnish.rollout.engine.speculation.opening import DraftSource
    from burnish.rollout.remote.dialect import Dialect

_TRAINING = (EngineFeature.UPDATE_WEIGHTS, EngineFeature.TOKEN_VERSIONS, EngineFeature.SCORE)


class RunEngine(Engine, Protocol):
    """An engine that also tells how it is doing."""

    def stats(self) -> EngineStats:
        """A snapshot."""
        ...


def check_engine(config: RunConfig) -> None:
    """What can be told before anything is loaded.

    Raises:
        UserError: the keys of [engine] do not go together.
    """
    engine = config.engine
    if (engine.speculation is Speculation.DRAFT) != bool(engine.draft_model):
        raise UserError(
            f'engine.speculation is "{engine.speculation}" and engine.draft_model '
            f"{engine.draft_model!r}.",
            fix='set both, or neither: "draft" guesses with that model.',
        )
    if engine.backend is EngineBackend.LOCAL:
        _check_local(config)
    else:
        _check_remote(config)


def _check_local(config: RunConfig) -> None:
    engine = config.engine
    if engine.remote.urls:
        raise UserError(
            'engine.remote.urls is set, but engine.backend is "local".',
            fix="set engine.backend to vllm or sglang, or remove the URLs.",
        )
    if engine.device != "cpu":
        # First of all: who mistyped it would be sent after what such a device cannot do.
        from burnish.rollout.engine.placement import find_device

        find_device(engine.device)
    if engine.device != "cpu" and engine.canary_tolerance == 0.0:
        raise UserError(
            f"engine.canary_tolerance = 0 demands equal bits, which {engine.device} and the "
            "trainer's processors do not give.",
            fix="set engine.canary_tolerance, 0.05 for instance.",
        )
    if engine.exact and engine.dtype != "bfloat16":
        raise UserError(
            f'engine.exact computes in bfloat16, and engine.dtype is "{engine.dtype}".',
            fix='set engine.dtype = "bfloat16", or engine.exact = false.',
        )
    if config.train.exact and config.train.dtype != "bfloat16":
        raise UserError(
            f'train.exact computes in bfloat16, and train.dtype is "{config.train.dtype}".',
            fix='set train.dtype = "bfloat16", or train.exact = false.',
        )
    limits = core_limits(config)
    limits.check()
    limits.kv.check(limits.page_size, None)
    _check_draft(config)


def _check_draft(config: RunConfig) -> None:
    """What is known of models before their weights are read: a mistake is told within a second."""
    engine, source = config.engine, config.model.source
    if engine.speculation is Speculation.SELF and engine.draft_layers:
        from burnish.model.loading import read_config
        from burnish.rollout.engine.speculation.bodies import refuse_layers

        refuse_layers(engine.draft_layers, read_config(source))
    if engine.speculation is Speculation.DRAFT:
        from burnish.model.loading import read_config
        from burnish.rollout.engine.speculation.bodies import refuse_other_vocabulary

        refuse_other_vocabulary(read_config(engine.draft_model), read_config(source))


def _check_remote(config: RunConfig) -> None:
    engine = config.engine
    if engine.device != "cpu":
        raise UserError(
            f'engine.device is for the engine of this process, not "{engine.backend}".',
            fix='set engine.device = "cpu"; servers choose theirs when they are started.',
        )
    if engine.speculation is not Speculation.OFF:
        raise UserError(
            f'engine.speculation is for the engine of this process, not "{engine.backend}".',
            fix='set engine.speculation = "off" and turn it on where the servers are started.',
        )
    if not engine.remote.urls:
        raise UserError(
            f'engine.backend = "{engine.backend}" needs servers.',
            fix='set engine.remote.urls, as in ["http://127.0.0.1:8000"].',
        )
    if config.run.deterministic:
        raise UserError(
            f'run.deterministic needs the engine of this process, not "{engine.backend}": servers '
            "batch by the wall clock.",
            fix='set engine.backend = "local", or run.deterministic = false.',
        )
    if engine.exact:
        raise UserError(
            f'engine.exact needs the engine of this process, not "{engine.backend}": other kernels '
            "give other bits.",
            fix='set engine.backend = "local", or engine.exact = false.',
        )
    if engine.canary_tolerance == 0.0:
        raise UserError(
            "engine.canary_tolerance = 0 demands equal bits, which other programs' kernels cannot "
            "give.",
            fix="set it to 1.0 for bf16 servers, to 0.01 for fp32 servers.",
        )


async def open_engine(
    config: RunConfig, loaded: LoadedModel, barrier: Barrier | None, *, for_training: bool = True
) -> RunEngine:
    """Start or connect to the engine; it serves the loaded weights as version 0.

    Unless it is `for_training`, servers keep the weights that they have.

    Raises:
        UserError: a server is of another kind, or cannot do what training needs.
        ClassifiedFailure: of kind `infra`, if a server cannot be reached or fails.
    """
    if config.engine.backend is EngineBackend.LOCAL:
        from burnish.rollout.engine.worker import EngineWorker
        from burnish.run.dtypes import DTYPES

        return EngineWorker(
            loaded.config,
            loaded.decoder.state_dict(),
            dtype=DTYPES[config.engine.dtype],
            limits=core_limits(config),
            num_threads=config.engine.num_threads,
            barrier=barrier,
            max_outstanding=config.engine.max_outstanding,
            decode=loaded.tokenizer.decode,
            grammars=_grammars(loaded),
            draft=_draft(config, loaded),
        )
    return await _remote(config, loaded, for_training)


def _grammars(loaded: LoadedModel) -> GrammarCompiler | None:
    """None without the library, or where it cannot read this tokenizer: grammars are refused."""
    from burnish.rollout.engine.grammar import GrammarCompiler

    try:
        return GrammarCompiler(loaded.tokenizer.to_json(), loaded.config.vocab_size)
    except UserError:
        return None


def _draft(config: RunConfig, loaded: LoadedModel) -> DraftSource | None:
    """The smaller model that guesses, if there is one."""
    from burnish.model.loading import load_model
    from burnish.rollout.engine.speculation.opening import DraftSource

    if config.engine.speculation is not Speculation.DRAFT:
        return None
    draft = load_model(config.engine.draft_model, dtype=config.engine.dtype)
    if draft.tokenizer.to_json() != loaded.tokenizer.to_json():
        raise UserError(
            f"engine.draft_model {config.engine.draft_model!r} has another tokenizer.",
            fix='name one with the same tokenizer, or set engine.speculation = "lookup".',
        )
    return DraftSource(draft.config, draft.decoder.state_dict())


def core_limits(config: RunConfig) -> CoreLimits:
    """Sizes of the engine in this process."""
    section = config.engine
    return CoreLimits(
        num_pages=section.num_pages,
        max_running=section.max_running,
        budget_tokens=section.budget_tokens,
        ageing_steps=section.ageing_steps,
        swap_bytes=section.swap_mb << 20,
        kv_dtype=section.kv_dtype,
        exact=section.exact,
        device=section.device,
        flex=section.flex_attention,
        speculation=SpeculationLimits(
            kind=section.speculation,
            max_tokens=section.draft_tokens,
            num_layers=section.draft_layers,
            max_lag=section.draft_max_lag,
            sampling=section.draft_sampling,
        ),
        kv=config.engine.kv.build_policy(),
        tier=config.engine.kv.build_tier(),
    )


async def _remote(config: RunConfig, loaded: LoadedModel, for_training: bool) -> RunEngine:
    from burnish.rollout.remote.engine import RemoteEngine

    dialect = _dialect(config.engine.backend)
    engine = await asyncio.to_thread(RemoteEngine, config.engine.remote, dialect, loaded.config)
    if not for_training:
        return engine
    try:
        inflight = EngineFeature(f"inflight_{config.engine.inflight}")
        engine.capabilities.require(*_TRAINING, inflight)
        rollout = config.rollout
        params = SamplingParams(temperature=rollout.temperature, top_p=rollout.top_p)
        engine.check(GenerateRequest(request_id="rollout", prompt_ids=(0,), params=params))
        # Whatever the servers were started with, or were left with by an earlier run.
        await engine.synchronize(loaded.decoder.state_dict())
    except BaseException:
        await engine.close()
        raise
    return engine


def _dialect(backend: EngineBackend) -> Dialect:
    from burnish.rollout.remote.openai import OpenAiDialect
    from burnish.rollout.remote.sglang import SglangDialect
    from burnish.rollout.remote.vllm import VllmDialect

    kinds: dict[EngineBackend, type[Dialect]] = {
        EngineBackend.OPENAI: OpenAiDialect,
        EngineBackend.VLLM: VllmDialect,
        EngineBackend.SGLANG: SglangDialect,
    }
    return kinds[backend]()
