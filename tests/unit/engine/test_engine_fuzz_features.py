"""Random traffic over every feature at once, against a reference that recomputes everything."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from engine_traffic import (
    ADAPTERS,
    Reference,
    Weights,
    byte_compiler,
    lora_for,
    random_request,
    text_of,
)

from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import InFlight, KvDtype, SleepLevel, Speculation, StopReason
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import kernels
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.speculation.lengths import Prices
from burnish.rollout.engine.speculation.opening import DraftSource
from burnish.rollout.engine.tier.limits import TierLimits

needs_kernels = pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))
Dense = Callable[[Decoder, list[int]], torch.Tensor]
ROOMY: dict[str, Any] = {"num_pages": 300, "page_size": 4, "budget_tokens": 40}
TIGHT: dict[str, Any] = {"num_pages": 16, "page_size": 4, "budget_tokens": 16}
NARROW: dict[str, Any] = {"num_pages": 60, "page_size": 2, "budget_tokens": 5, "max_running": 3}
# Pages of one layer must be whole pages of the system.
DISK: dict[str, Any] = {
    "num_pages": 200,
    "page_size": 64,
    "budget_tokens": 24,
    "tier": TierLimits(ram_bytes=1_060_000, disk_bytes=10_000_000),
}


class Case(NamedTuple):
    """What one run does."""

    seed: int
    kind: Speculation
    sizes: dict[str, Any]
    changes: bool = False
    model: dict[str, Any] = {}  # noqa: RUF012 - a tuple's default, never written
    dtype: torch.dtype = torch.float32


CASES = {
    "lookup, roomy": Case(1, Speculation.LOOKUP, ROOMY),
    "lookup, tight, swapped": Case(2, Speculation.LOOKUP, TIGHT),
    "self, tight, recomputed": Case(3, Speculation.SELF, TIGHT | {"swap_bytes": 0}, changes=True),
    "draft, tight, swapped": Case(4, Speculation.DRAFT, TIGHT, changes=True),
    "draft, narrow": Case(5, Speculation.DRAFT, NARROW),
    "none, tight, changes": Case(6, Speculation.OFF, TIGHT, changes=True),
    "lookup, narrow": Case(7, Speculation.LOOKUP, NARROW | {"ageing_steps": 8}, changes=True),
    # Many texts end where the context does.
    "self, window": Case(
        10,
        Speculation.SELF,
        TIGHT | {"page_size": 3},
        changes=True,
        model={"sliding_window": 9, "max_position_embeddings": 44},
    ),
    "self, disk": Case(8, Speculation.SELF, DISK),
}


# What the native kernels take.
PAGE = 16
NATIVE: dict[str, Any] = {"num_pages": 9, "page_size": PAGE, "budget_tokens": 24}
EXACT = NATIVE | {"exact": True}
NATIVE_CASES = {
    "exact, lookup, swapped": Case(22, Speculation.LOOKUP, EXACT, dtype=torch.bfloat16),
    "exact, self, recomputed": Case(
        22, Speculation.SELF, EXACT | {"swap_bytes": 0}, dtype=torch.bfloat16
    ),
    "exact, draft, swapped": Case(21, Speculation.DRAFT, EXACT, dtype=torch.bfloat16),
    "int8, lookup, swapped": Case(
        23, Speculation.LOOKUP, NATIVE | {"kv_dtype": KvDtype.INT8}, dtype=torch.bfloat16
    ),
    "fp8, self, recomputed": Case(
        22,
        Speculation.SELF,
        NATIVE | {"kv_dtype": KvDtype.FP8, "swap_bytes": 0},
        dtype=torch.bfloat16,
    ),
}


def stretched(request: GenerateRequest) -> GenerateRequest:
    """With answers of several pages, so that pages run out while they grow."""
    params = request.params
    params = msgspec.structs.replace(params, max_tokens=4 * params.max_tokens)
    return msgspec.structs.replace(request, params=params)


class Run:
    """One engine under random traffic, and what must hold of it."""

    def __init__(self, case: Case, make_decoder: Any, dense: Dense) -> None:
        self.rng, self.case = random.Random(case.seed), case
        self.make_decoder = partial(make_decoder, **case.model)
        first = self.make_decoder(seed=0)
        compiler = byte_compiler()
        guesses = SpeculationLimits(kind=case.kind, max_tokens=4, num_layers=1)
        draft = DraftSource(first.config, first.state_dict())
        self.core = EngineCore(
            first.config,
            first.state_dict(),
            dtype=case.dtype,
            limits=CoreLimits(speculation=guesses, **case.sizes),
            decode=text_of,
            grammars=compiler,
            draft=draft if case.kind is Speculation.DRAFT else None,
        )
        if self.core._speculator is not None:
            # Guess always: whether it pays is tested apart.
            self.core._speculator._prices = lambda *_: Prices(1.0, 1e-9)  # type: ignore[method-assign]
        self.reference = Reference(first.config, dense, compiler)
        self.version, self.served = 0, Weights(first.state_dict(), {})
        self.reference.served[0] = self.served
        self.handles: dict[str, Any] = {}
        self.done: dict[str, Any] = {}
        self.pins: list[int] = []
        for name in ADAPTERS:
            self.adapt(name, InFlight.KEEP)

    def adapt(self, name: str, inflight: InFlight) -> None:
        self.version += 1
        lora = lora_for(self.core.config, self.version)
        self.note(self.core.adapters.add(name, self.core.adapt(lora), self.version, inflight))
        self.serve(self.served._replace(adapters={**self.served.adapters, name: lora}))

    def update(self, inflight: InFlight) -> None:
        self.version += 1
        state = self.make_decoder(seed=self.version).state_dict()
        self.note(self.core.update_weights(state, self.version, inflight))
        self.serve(self.served._replace(base=state))
        if self.case.kind is Speculation.DRAFT and self.rng.random() < 0.7:
            self.core.update_draft(state)

    def serve(self, served: Weights) -> None:
        self.served = self.reference.served[self.version] = served

    def note(self, ended: Any) -> None:
        self.done |= {sequence.request.request_id: outcome for sequence, outcome in ended}

    def sleep(self) -> None:
        level = self.rng.choice(list(SleepLevel))
        self.core.sleep(level)
        self.core.wake(self.served.base if level is SleepLevel.WEIGHTS else None)

    def disturb(self) -> None:
        """One random event beside the traffic."""
        rng, event = self.rng, self.rng.random()
        running = sorted(name for name in self.handles if name not in self.done)
        if event < 0.05 and running:
            name = rng.choice(running)
            aborted = self.core.abort(self.handles[name])
            assert aborted is not None
            self.done[name] = aborted
        elif event < 0.1:
            stem = tuple(rng.choice(self.stems))
            self.pins.append(self.core.pin(stem, rng.choice([None, *ADAPTERS])))
        elif event < 0.15 and self.pins:
            self.core.unpin(self.pins.pop())
        elif event < 0.17:
            self.sleep()
        elif self.case.changes and event < 0.19:
            self.update(rng.choice([InFlight.RECOMPUTE, InFlight.ABORT]))
        elif self.case.changes and event < 0.22:
            self.adapt(rng.choice(ADAPTERS), rng.choice([InFlight.RECOMPUTE, InFlight.ABORT]))

    def play(self, num_requests: int) -> None:
        rng = self.rng
        self.stems = [
            [rng.choice([3, 5, 97, 98]) for _ in range(rng.randrange(8, 30))],
            [rng.randrange(300) for _ in range(rng.randrange(8, 34))],
            list(b"abababcdcdab,ab,cd"),
        ]
        if "tier" in self.case.sizes:
            # Long enough that memory cannot hold them all.
            self.stems = [[rng.randrange(300) for _ in range(40)] + 5 * stem for stem in self.stems]
        self.requests = [
            random_request(rng, number, self.stems, ADAPTERS) for number in range(num_requests)
        ]
        if self.core.limits.page_size == PAGE:
            self.requests = [stretched(request) for request in self.requests]
        coming = list(reversed(self.requests))
        for _ in range(200 * num_requests):
            if not coming and not self.core.has_work:
                break
            for _ in range(rng.choice([0, 1, 5])):
                if coming:
                    request = coming.pop()
                    self.handles[request.request_id] = self.core.add(request)
            self.disturb()
            self.note(self.core.step())
            self.core.check()

    def check(self, holds: Callable[[GenerateRequest, Generation], None]) -> None:
        assert len(self.done) == len(self.requests), "a request was lost or starved"
        for request in self.requests:
            got = self.done[request.request_id]
            assert isinstance(got, Generation), got
            holds(request, got)
        for number in self.pins:
            self.core.unpin(number)
        assert self.core.free_pages == self.core.limits.num_pages
        assert self.core.saved_bytes == 0


@pytest.mark.parametrize("name", CASES)
def test_traffic_over_all_features_equals_a_reference_that_recomputes_everything(
    name: str, make_decoder: Any, dense_logprobs: Dense
) -> None:
    case = CASES[name]
    run = Run(case, make_decoder, dense_logprobs)
    run.play(20 if "tier" in case.sizes else 30)
    run.check(run.reference.check)
    counters = run.core.counters
    if case.kind is not Speculation.OFF:
        assert counters.drafted_tokens > counters.accepted_tokens > 0
    if "disk" in name:
        assert run.core.tier.spilled > 0
    if "tight" in name:
        assert counters.num_preemptions > 0
    if "swapped" in name:
        assert counters.num_swaps > 0


def alone(run: Run, request: GenerateRequest) -> Generation:
    """By an engine that has nothing else to do, guesses nothing and knows no prefix."""
    limits = CoreLimits(**(run.case.sizes | {"num_pages": 300}))
    core = EngineCore(
        run.core.config, run.served.base, dtype=run.case.dtype, limits=limits,
        decode=text_of, grammars=byte_compiler(),
    )  # fmt: skip
    for version, name in enumerate(ADAPTERS, 1):
        core.adapters.add(name, core.adapt(run.served.adapters[name]), version, InFlight.KEEP)
    core.add(request)
    ended = []
    while core.has_work:
        ended += core.step()
    (outcome,) = (outcome for _, outcome in ended)
    assert isinstance(outcome, Generation)
    return outcome


@needs_kernels
@pytest.mark.parametrize("name", NATIVE_CASES)
def test_traffic_over_native_kernels_equals_each_request_alone(
    name: str, make_decoder: Any, dense_logprobs: Dense
) -> None:
    run = Run(NATIVE_CASES[name], make_decoder, dense_logprobs)
    run.play(30)

    # Where oneDNN is faster, products of one row and of many differ in the last bits.
    has_bits = run.core.limits.exact or not kernels().prefers_onednn

    def equal(request: GenerateRequest, got: Generation) -> None:
        assert all(math.isfinite(x) and x <= 0.0 for x in got.logprobs)
        assert len(got.logprobs) == len(got.token_ids) <= request.params.max_tokens
        if not has_bits:
            return
        wanted, number = alone(run, request), len(got.token_ids)
        if got.stop_reason is not StopReason.ABORTED:
            assert got.stop_reason is wanted.stop_reason
            assert number == len(wanted.token_ids)
            assert got.prompt_logprobs == wanted.prompt_logprobs
        assert got.token_ids == wanted.token_ids[:number]
        assert got.logprobs == wanted.logprobs[:number]
        assert got.unmasked_logprobs == wanted.unmasked_logprobs[:number]
        assert got.top_logprobs == wanted.top_logprobs[:number]

    run.check(equal)
    counters = run.core.counters
    assert counters.drafted_tokens > counters.accepted_tokens > 0
    assert counters.num_preemptions > 0
    assert (counters.num_swaps > 0) == ("swapped" in name)
