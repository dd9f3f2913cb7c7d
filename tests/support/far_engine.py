"""Every case of `CASES` on the CPU and on a second device; prints what differs, as JSON.

python far_engine.py FOLDER DEVICE     FOLDER holds the conftest.py with the tiny decoder
"""

import json
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import far_device
import torch

from burnish.core.records import GenerateRequest, Generation, SamplingParams
from burnish.core.vocabulary import InFlight, KvDtype, SleepLevel, Speculation
from burnish.model.kernels import library
from burnish.model.kernels.library import Isa
from burnish.model.lora import Lora, LowRank
from burnish.rollout.engine.cache.flashinfer import FlashInferCache
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.speculation.lengths import Prices
from burnish.rollout.engine.speculation.opening import DraftSource
from burnish.rollout.engine.tier import opening

LOOP = [3, 5, 7, 11] * 6


def ask(name: str, prompt: list[int] = LOOP, adapter: str | None = None, **params: Any) -> Any:
    values = {"max_tokens": 12, "seed": 7} | params
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        adapter=adapter,
        params=SamplingParams(**values),
        prompt_logprobs=name == "prompt",
    )


def core_on(device: str, build: Any, *, draft: bool = False, **limits: Any) -> EngineCore:
    decoder = build()
    sizes = {"num_pages": 120, "page_size": 4, "device": device} | limits
    core = EngineCore(
        decoder.config,
        decoder.state_dict(),
        dtype=torch.float32,
        limits=CoreLimits(**sizes),
        draft=DraftSource(decoder.config, build(3).state_dict()) if draft else None,
    )
    if core._speculator is not None:
        core._speculator._prices = lambda *_: Prices(1.0, 1e-9)
    return core


def finish(core: EngineCore, *requests: GenerateRequest) -> list[Any]:
    ended: dict[str, Any] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        ended |= {s.request.request_id: outcome for s, outcome in core.step()}
        core.check()
    assert all(isinstance(each, Generation) for each in ended.values()), ended
    return [plain(ended[name]) for name in sorted(ended)]


def plain(outcome: Generation) -> Any:
    tops = [pair for row in outcome.top_logprobs for pair in row]
    return [
        [*outcome.token_ids, *(token for token, _ in tops)],
        [*outcome.logprobs, *(x for _, x in tops), *outcome.prompt_logprobs],
    ]


def sampling(device: str, build: Any) -> Any:
    return finish(
        core_on(device, build),
        ask("greedy", temperature=0.0),
        ask("hot", temperature=1.7),
        ask("kept", top_k=5, top_p=0.8, num_top_logprobs=3),
        ask("least", min_p=0.05, stop_token_ids=(5, 7), min_tokens=6),
        ask("prompt", [9, 8, 7, 6, 5]),
        ask("again", temperature=0.5),
    )


def windowed(device: str, build: Any) -> Any:
    core = core_on(device, lambda *a: build(*a, sliding_window=9))
    return finish(core, ask("a"), ask("b", [1, 2, 3]))


def coded(device: str, build: Any) -> Any:
    return [
        finish(core_on(device, build, kv_dtype=kind), ask("a"), ask("b", [1, 2, 3]))
        for kind in (KvDtype.INT8, KvDtype.FP8)
    ]


def preempted(device: str, build: Any) -> Any:
    core = core_on(device, build, num_pages=16)
    found = finish(core, *(ask(str(i), [i, 2, 3, 4] * 5, max_tokens=20) for i in range(3)))
    assert core.counters.num_swaps, "nothing was swapped"
    return found


def guessed(device: str, build: Any) -> Any:
    found = []
    for kind in (Speculation.LOOKUP, Speculation.DRAFT, Speculation.SELF):
        core = core_on(
            device,
            build,
            draft=kind is Speculation.DRAFT,
            speculation=SpeculationLimits(kind=kind, max_tokens=4),
        )
        found.append(finish(core, ask("a", temperature=0.0, max_tokens=24), ask("b")))
        assert core.counters.drafted_tokens, f"{kind} guessed nothing"
    return found


def adapted(device: str, build: Any) -> Any:
    core, config = core_on(device, build), build().config
    generator = torch.Generator().manual_seed(1)
    wide = config.num_heads * config.head_dim
    pair = LowRank(
        0.2 * torch.randn(3, wide, generator=generator),
        0.2 * torch.randn(config.hidden_size, 3, generator=generator),
    )
    layers = core.adapt(Lora(tuple({"output": pair} for _ in range(config.num_layers))))
    core.adapters.add("tuned", layers, 0, InFlight.KEEP)
    return finish(core, ask("a", adapter="tuned"), ask("b"))


def updated(device: str, build: Any) -> Any:
    core = core_on(device, build)
    core.pin(tuple(LOOP))
    first = finish(core, ask("a"))
    core.update_weights(build(5).state_dict(), 1)
    second = finish(core, ask("a"))
    core.sleep(SleepLevel.WEIGHTS)
    core.wake(build(5).state_dict())
    third = finish(core, ask("a"))
    assert second == third
    return [first, second, [[[], list(core.score(tuple(LOOP)))]]]


def flashinfer(device: str, build: Any) -> Any:
    """The cache for FlashInfer, over a stand-in that does what its documentation says."""
    before = opening.open_cache
    sys.modules["flashinfer"] = stand_in()
    opening.open_cache = FlashInferCache if device != "cpu" else before
    try:
        return [sampling(device, build), windowed(device, build), guessed(device, build)]
    finally:
        opening.open_cache = before


def stand_in() -> ModuleType:
    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str) -> None:
            assert (workspace.dtype, layout) == (torch.uint8, "HND")

        def plan(
            self, *args: Any, causal: bool, sm_scale: float, window_left: int, **_: Any
        ) -> None:
            starts, page_starts, pages, last = (x.tolist() for x in args[:4])
            assert causal
            assert all(x.dtype is torch.int32 for x in args[:4])
            self.size, self.scale, self.window = args[7], sm_scale, window_left
            self.spans = [
                (starts[i], starts[i + 1], pages[page_starts[i] : page_starts[i + 1]], last[i])
                for i in range(len(last))
            ]

        def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            out = torch.zeros_like(q)
            for start, stop, pages, last in self.spans:
                index = torch.tensor(pages, device=q.device)
                num_keys = (len(pages) - 1) * self.size + last
                k, v = (
                    x.index_select(0, index).transpose(0, 1).flatten(1, 2)[:, :num_keys] for x in kv
                )
                keys = torch.arange(num_keys, device=q.device)
                places = torch.arange(num_keys - (stop - start), num_keys, device=q.device)[:, None]
                mask = keys <= places
                if self.window >= 0:
                    mask = mask & (keys >= places - self.window)
                out[start:stop] = torch.nn.functional.scaled_dot_product_attention(
                    q[start:stop].transpose(0, 1)[None],
                    k[None],
                    v[None],
                    attn_mask=mask,
                    scale=self.scale,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            return out

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    return module


CASES: dict[str, Callable[[str, Any], Any]] = {
    case.__name__: case
    for case in (*(sampling, windowed, coded, preempted, guessed, adapted, updated, flashinfer),)
}


def difference(here: Any, there: Any) -> float | None:
    """Greatest between two log-probs; None where tokens or shapes differ."""
    if isinstance(here, list):
        if not isinstance(there, list) or len(here) != len(there):
            return None
        parts = [difference(a, b) for a, b in zip(here, there, strict=True)]
        return None if None in parts else max([0.0, *(x for x in parts if x is not None)])
    if isinstance(here, int):
        return 0.0 if here == there else None
    return abs(here - there)


def main(folder: str, device: str) -> None:
    sys.path.insert(0, folder)
    import conftest

    if device == far_device.NAME:
        far_device.register()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with library.restricted(Isa.TORCH):
            try:
                found[name] = difference(case("cpu", conftest.build), case(device, conftest.build))
            except (RuntimeError, AssertionError, TypeError, AttributeError) as error:
                traceback.print_exc()
                found[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
