"""SGLang's native HTTP interface: `/generate` with token ids, pause, update from disk, continue.

Written to its documentation of 0.5 (no build of it runs on a CPU from PyPI): the tests run against
a small server of our own that speaks the same. Chunks carry the label of the weights.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from burnish.core.errors import UserError
from burnish.core.records import SamplingParams
from burnish.core.vocabulary import EngineFeature, GrammarKind, InFlight, SleepLevel
from burnish.rollout.remote.dialect import (
    UNKNOWN_LABEL,
    Ask,
    Chunk,
    Delivery,
    End,
    LogprobScope,
    ServerCounts,
    ServerFacts,
    adapter_names,
    checked_chunk,
    field,
    lost_adapter,
    stop_reason,
)
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.wire import Wire

_FEATURES = frozenset(
    {
        EngineFeature.STREAM,
        EngineFeature.STOP_STRINGS,
        EngineFeature.TOP_K,
        EngineFeature.MIN_P,
        EngineFeature.MIN_TOKENS,
        EngineFeature.TOP_LOGPROBS,
        EngineFeature.PROMPT_LOGPROBS,
        EngineFeature.SCORE,
        EngineFeature.UPDATE_WEIGHTS,
        EngineFeature.TOKEN_VERSIONS,
        EngineFeature.INFLIGHT_KEEP,
        EngineFeature.INFLIGHT_RECOMPUTE,
        EngineFeature.INFLIGHT_ABORT,
        EngineFeature.PAUSE,
    }
)
_PAUSE = {
    InFlight.KEEP: "in_place",
    InFlight.RECOMPUTE: "retract",
    InFlight.ABORT: "abort",
}
_MAX_TOP_LOGPROBS = 64
# Its third language, EBNF, is none of ours.
_HELD = {GrammarKind.JSON_SCHEMA: "json_schema", GrammarKind.REGEX: "regex"}


class SglangDialect:
    """Speaks to `python -m sglang.launch_server`."""

    name = "sglang"

    async def inspect(self, wire: Wire, model: str | None) -> ServerFacts:
        """See `Dialect`. The scope of its log-probs depends on its environment: measure it."""
        about = await _either(wire, "/model_info", "/get_model_info")
        path = field(wire.url, about, "model_path", kind=str)
        info = await _either(wire, "/server_info", "/get_server_info")
        if not isinstance(info, dict):
            info = {}
        served = str(info.get("served_model_name") or path)
        if model is not None and model not in (served, path):
            raise UserError(
                f"{wire.url} serves {served}, not {model}.",
                fix="set engine.remote.model to that, or leave it out.",
            )
        found = set(_FEATURES)
        if not info.get("disable_radix_cache"):
            found.add(EngineFeature.PREFIX_REUSE)
        if info.get("enable_deterministic_inference"):
            found.add(EngineFeature.SEEDS)
        if info.get("enable_priority_scheduling"):
            found.add(EngineFeature.PRIORITIES)
        if info.get("enable_memory_saver"):
            found.add(EngineFeature.SLEEP)
        if info.get("speculative_algorithm"):
            found.add(EngineFeature.SPECULATION)
        adapters: tuple[str, ...] = ()
        if info.get("enable_lora"):
            found |= {EngineFeature.ADAPTERS, EngineFeature.LOAD_ADAPTERS}
            adapters = tuple(await self.adapters(wire, 30.0))
        grammars = _grammars(info)
        if grammars:
            found.add(EngineFeature.GRAMMAR)
        context, rank = info.get("context_length"), info.get("max_lora_rank")
        dtype = info.get("dtype")
        return ServerFacts(
            model=served,
            features=frozenset(found),
            scope=LogprobScope.RAW,
            max_context_tokens=context if isinstance(context, int) else None,
            max_top_logprobs=_MAX_TOP_LOGPROBS,
            dtype=dtype if dtype in ("bfloat16", "float32") else None,
            label=_label(about),
            adapters=adapters,
            max_adapter_rank=rank if isinstance(rank, int) else None,
            grammars=grammars,
        )

    async def is_healthy(self, wire: Wire, timeout_s: float) -> bool:
        """See `Dialect`."""
        await wire.get("/health", timeout_s=timeout_s)
        return True

    async def counts(self, wire: Wire, timeout_s: float) -> ServerCounts:
        """See `Dialect`."""
        return ServerCounts()

    async def label(self, wire: Wire, timeout_s: float) -> str | None:
        """See `Dialect`."""
        return _label(await _either(wire, "/model_info", "/get_model_info", timeout_s))

    async def generate(self, wire: Wire, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """See `Dialect`."""
        request, num_top = ask.request, ask.request.params.num_top_logprobs
        body = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": _sampling(request.params),
            "return_logprob": True,
            "top_logprobs_num": num_top,
            "stream": True,
            "extra_key": ask.salt,
        }
        if request.priority:
            body["priority"] = request.priority
        if ask.adapter is not None:
            body["lora_path"] = ask.adapter
        seen = 0
        ended = False
        try:
            async with aclosing(wire.events("/generate", body)) as events:
                async for event in events:
                    chunk = _chunk(wire.url, event, seen, num_top)
                    seen += len(chunk.token_ids)
                    ended = ended or chunk.end is not None
                    yield chunk
        except UserError as error:
            raise lost_adapter(wire.url, ask, error, "not loaded") from error
        if not ended:
            raise RemoteFailure(RemoteProblem.LOST, wire.url, "the stream had no end")

    async def score(
        self, wire: Wire, token_ids: Sequence[int], model: str, salt: str
    ) -> tuple[float, ...]:
        """See `Dialect`."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": salt,
        }
        answer = await wire.post("/generate", body)
        rows = field(wire.url, answer, "meta_info", "input_token_logprobs", kind=list)
        if [field(wire.url, row, 1, kind=int) for row in rows] != list(token_ids):
            what = "the scored tokens are not the ones that were sent"
            raise RemoteFailure(RemoteProblem.MALFORMED, wire.url, what)
        # The first one has nothing before it.
        return (0.0, *(float(field(wire.url, row, 0, kind=(int, float))) for row in rows[1:]))

    async def update(self, wire: Wire, delivery: Delivery, timeout_s: float) -> None:
        """See `Dialect`."""
        mode = {"mode": _PAUSE[delivery.inflight]}
        await wire.post("/pause_generation", mode, timeout_s=timeout_s)
        try:
            body = {
                "model_path": str(delivery.folder),
                "weight_version": delivery.label,
                # Requests paused in place hold their cache, and an update that tried to empty it
                # would be refused; new requests come with another key and never meet it.
                "flush_cache": delivery.inflight is not InFlight.KEEP,
            }
            answer = await wire.post("/update_weights_from_disk", body, timeout_s=timeout_s)
            if not field(wire.url, answer, "success", kind=bool):
                what = f"the update was refused: {answer.get('message')!r:.200}"
                raise RemoteFailure(RemoteProblem.NOT_DELIVERED, wire.url, what)
        except (UserError, RemoteFailure):
            # What is loaded now is unknown: nothing sampled from it may pass for the old weights.
            with suppress(UserError, RemoteFailure):
                await wire.post("/update_weight_version", {"new_version": UNKNOWN_LABEL})
            raise
        finally:
            await wire.post("/continue_generation", {}, timeout_s=timeout_s)

    async def check_delivery(self, wire: Wire, delivery: Delivery, dtype: str | None) -> None:
        """See `Dialect`: only the label can be compared."""
        if await self.label(wire, 60.0) != delivery.label:
            what = "the label of the weights is not the one that was set"
            raise RemoteFailure(RemoteProblem.NOT_DELIVERED, wire.url, what)

    async def adapters(self, wire: Wire, timeout_s: float) -> frozenset[str]:
        """See `Dialect`."""
        models = await wire.get("/v1/models", timeout_s=timeout_s)
        return frozenset(adapter_names(wire.url, models))

    async def load_adapter(self, wire: Wire, name: str, folder: Path, timeout_s: float) -> None:
        """See `Dialect`: what is loaded already must go first."""
        if name in await self.adapters(wire, timeout_s):
            await self.unload_adapter(wire, name)
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await wire.post("/load_lora_adapter", body, timeout_s=timeout_s)
        if not field(wire.url, answer, "success", kind=bool):
            what = f"the adapter was refused: {answer.get('error_message')!r:.200}"
            raise RemoteFailure(RemoteProblem.NOT_DELIVERED, wire.url, what)

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        """See `Dialect`. The server waits for the requests that run with it."""
        await wire.post("/unload_lora_adapter", {"lora_name": name})

    async def pause(self, wire: Wire) -> None:
        """See `Dialect`."""
        await wire.post("/pause_generation", {"mode": "in_place"})

    async def resume(self, wire: Wire) -> None:
        """See `Dialect`."""
        await wire.post("/continue_generation", {})

    async def sleep(self, wire: Wire, level: SleepLevel) -> None:
        """See `Dialect`."""
        await wire.post("/release_memory_occupation", {"tags": _tags(level)})

    async def wake(self, wire: Wire, level: SleepLevel) -> None:
        """See `Dialect`."""
        await wire.post("/resume_memory_occupation", {"tags": _tags(level)})


def _grammars(info: dict[str, Any]) -> frozenset[GrammarKind]:
    """It masks by its tokenizer."""
    is_off = info.get("grammar_backend") in (None, "none") or info.get("skip_tokenizer_init")
    return frozenset() if is_off else frozenset(_HELD)


def _tags(level: SleepLevel) -> list[str]:
    return ["kv_cache"] if level is SleepLevel.CACHE else ["kv_cache", "weights"]


async def _either(wire: Wire, path: str, older: str, timeout_s: float | None = None) -> Any:
    """Recent servers renamed these; both names work for a while."""
    try:
        return await wire.get(path, timeout_s=timeout_s)
    except UserError as error:
        if "does not know" not in error.what:
            raise
        return await wire.get(older, timeout_s=timeout_s)


def _label(about: Any) -> str | None:
    label = about.get("weight_version") if isinstance(about, dict) else None
    return label if isinstance(label, str) else None


def _sampling(params: SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        # A text held to a grammar has no other end than the model's own end token.
        "ignore_eos": params.grammar is None,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": params.seed & (2**31 - 1),
    }
    if params.stop:
        values["stop"] = list(params.stop)
    if params.grammar is not None:
        values[_HELD[params.grammar.kind]] = params.grammar.text
    return values


def _chunk(url: str, event: Any, seen: int, num_top: int) -> Chunk:
    """The tokens after the first `seen`: events repeat everything, or bring only what is new."""
    meta = field(url, event, "meta_info", kind=dict)
    total = field(url, meta, "completion_tokens", kind=int)
    rows = field(url, meta, "output_token_logprobs", kind=list) if total else []
    new = total - seen
    if not 0 <= new <= len(rows):
        what = f"{total} tokens after {seen} came with {len(rows)} log-probs"
        raise RemoteFailure(RemoteProblem.MALFORMED, url, what)
    rows = rows[len(rows) - new :]
    ids, logprobs = checked_chunk(
        url,
        [field(url, row, 1, kind=int) for row in rows],
        [field(url, row, 0, kind=(int, float)) for row in rows],
    )
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if num_top and new:
        tops = field(url, meta, "output_top_logprobs", kind=list)
        top = tuple(_top(url, row, num_top) for row in tops[len(tops) - new :])
    end = None
    if meta.get("finish_reason") is not None:
        reason = stop_reason(url, field(url, meta, "finish_reason", "type", kind=str))
        cached = meta.get("cached_tokens")
        end = End(reason, cached_tokens=cached if isinstance(cached, int) else None)
    return Chunk(ids, logprobs, top, end, _label(meta))


def _top(url: str, row: Any, number: int) -> tuple[tuple[int, float], ...]:
    pairs = [
        (field(url, entry, 1, kind=int), float(field(url, entry, 0, kind=(int, float))))
        for entry in row or ()
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:number])
