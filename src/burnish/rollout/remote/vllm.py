"""vLLM's own HTTP interface, as of 0.32: tokens in, tokens out, and who sampled each.

`/inference/v1/generate` needs `--enable-scale-out`; pausing, reloading and labels need
VLLM_SERVER_DEV_MODE=1. The engine itself labels every output step with the weights' label, which
changes only while it stands still: the spans at the end of an answer are exact.
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
    Span,
    adapter_names,
    checked_chunk,
    field,
    lost_adapter,
    model_names,
    stop_reason,
)
from burnish.rollout.remote.exposition import counts_on
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.wire import Wire

_GENERATE = "/inference/v1/generate"
_LOAD_ADAPTER = "/v1/load_lora_adapter"
_FLOOR = -9998.0
_HELD = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}
_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode "
    "processed_logprobs (docs/engine.md)."
)
_BASE = frozenset(
    {
        EngineFeature.STREAM,
        EngineFeature.STOP_STRINGS,
        EngineFeature.TOP_K,
        EngineFeature.MIN_P,
        EngineFeature.MIN_TOKENS,
        EngineFeature.TOP_LOGPROBS,
        EngineFeature.PROMPT_LOGPROBS,
        EngineFeature.SCORE,
        EngineFeature.SEEDS,
        EngineFeature.UPDATE_WEIGHTS,
        EngineFeature.TOKEN_VERSIONS,
        EngineFeature.INFLIGHT_KEEP,
        EngineFeature.INFLIGHT_RECOMPUTE,
        EngineFeature.INFLIGHT_ABORT,
        EngineFeature.PAUSE,
    }
)
# Seen in 0.32 on a CPU that was started with --enable-lora: new weights reach the embedding and the
# norms but not the packed matrices; prompt log-probs in a batch with an adapter end the server; and
# there rows of no adapter go through the last one.
_NOT_BESIDE_ADAPTERS = frozenset(
    {
        EngineFeature.UPDATE_WEIGHTS,
        EngineFeature.INFLIGHT_KEEP,
        EngineFeature.INFLIGHT_RECOMPUTE,
        EngineFeature.INFLIGHT_ABORT,
        EngineFeature.SCORE,
        EngineFeature.PROMPT_LOGPROBS,
    }
)
_SCOPES = {
    "raw_logprobs": LogprobScope.RAW,
    "processed_logprobs": LogprobScope.SAMPLED,
}


class VllmDialect:
    """Speaks to `vllm serve`."""

    name = "vllm"

    async def inspect(self, wire: Wire, model: str | None) -> ServerFacts:
        """See `Dialect`."""
        served = await wire.get("/v1/models")
        names = model_names(wire.url, served)
        if not names or (model is not None and model not in names):
            raise UserError(
                f"{wire.url} serves {', '.join(names) or 'no model'}, not {model}.",
                fix="set engine.remote.model to one of these, or leave it out.",
            )
        try:
            info = await wire.get("/server_info?config_format=json")
            label = await self.label(wire, 30.0)
        except UserError as error:
            raise UserError(f"{wire.url} does not let itself be updated.", fix=_START) from error
        config = field(wire.url, info, "vllm_config", kind=dict)
        description = field(wire.url, config, "model_config", kind=dict)
        await self._refuse_text_only(wire)
        mode = description.get("logprobs_mode")
        if mode not in _SCOPES:
            raise UserError(f"{wire.url} reports {mode}, which are no log-probs.", fix=_START)
        features = _features(config)
        mixes_up = _setting(config, "device_config", "device") == "cpu"
        if EngineFeature.ADAPTERS in features and await _loads_adapters(wire):
            features |= {EngineFeature.LOAD_ADAPTERS}
        elif mixes_up:
            features -= {EngineFeature.ADAPTERS}
        return ServerFacts(
            model=model or names[0],
            features=features,
            scope=_SCOPES[mode],
            max_context_tokens=description.get("max_model_len"),
            max_top_logprobs=max(0, int(description.get("max_logprobs") or 0)),
            dtype=str(description.get("dtype", "")).removeprefix("torch.") or None,
            label=label,
            adapters=adapter_names(wire.url, served),
            needs_plain_adapter=mixes_up and EngineFeature.ADAPTERS in features,
            max_adapter_rank=_setting(config, "lora_config", "max_lora_rank"),
            grammars=_grammars(config),
        )

    async def is_healthy(self, wire: Wire, timeout_s: float) -> bool:
        """See `Dialect`."""
        await wire.get("/health", timeout_s=timeout_s)
        return True

    async def counts(self, wire: Wire, timeout_s: float) -> ServerCounts:
        """See `Dialect`: from its Prometheus page."""
        # A page that is not there is no reason to leave the server alone.
        with suppress(UserError, RemoteFailure):
            return counts_on(await wire.text("/metrics", timeout_s=timeout_s))
        return ServerCounts()

    async def label(self, wire: Wire, timeout_s: float) -> str | None:
        """See `Dialect`."""
        answer = await wire.get("/weight_info", timeout_s=timeout_s)
        return str(field(wire.url, answer, "weight_version", kind=str))

    async def generate(self, wire: Wire, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """See `Dialect`."""
        request = ask.request
        body = {
            "model": ask.adapter or ask.model,
            "token_ids": list(request.prompt_ids),
            "sampling_params": _sampling(request.params),
            "cache_salt": ask.salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.priority:
            # There, lower goes first.
            body["priority"] = -request.priority
        last: Chunk | None = None
        cached: int | None = None
        try:
            async with aclosing(wire.events(_GENERATE, body)) as events:
                async for event in events:
                    cached = _cached(event) or cached
                    for choice in field(wire.url, event, "choices", kind=list):
                        chunk = _chunk(wire.url, choice, request.params.num_top_logprobs)
                        if chunk.end is not None:
                            last = chunk
                        else:
                            yield chunk
        except UserError as error:
            raise lost_adapter(wire.url, ask, error, "HTTP 404") from error
        if last is None or last.end is None:
            raise RemoteFailure(RemoteProblem.LOST, wire.url, "the stream had no end")
        yield last._replace(end=last.end._replace(cached_tokens=cached))

    async def score(
        self, wire: Wire, token_ids: Sequence[int], model: str, salt: str
    ) -> tuple[float, ...]:
        """See `Dialect`."""
        body = {
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True},
            "cache_salt": salt,
        }
        answer = await wire.post(_GENERATE, body)
        rows = field(wire.url, answer, "prompt_logprobs", kind=list)
        scores = [0.0]
        for token, row in zip(token_ids[1:], rows[1:], strict=False):
            value = field(wire.url, row, str(token), "logprob", kind=(int, float))
            scores.append(float(value))
        if len(scores) != len(token_ids) or len(rows) != len(token_ids):
            what = f"{len(token_ids)} tokens were scored with {len(rows)} values"
            raise RemoteFailure(RemoteProblem.MALFORMED, wire.url, what)
        return tuple(scores)

    async def update(self, wire: Wire, delivery: Delivery, timeout_s: float) -> None:
        """See `Dialect`."""
        mode = "abort" if delivery.inflight is InFlight.ABORT else "keep"
        await wire.post("/pause", query={"mode": mode}, timeout_s=timeout_s)
        try:
            reload = {"weights_path": str(delivery.folder)}
            body = {"method": "reload_weights", "kwargs": reload, "timeout": timeout_s}
            await wire.post("/collective_rpc", body, timeout_s=timeout_s)
            # What was computed before stays with the running requests (`keep`); new requests
            # come with another salt and never meet it.
            recompute = delivery.inflight is InFlight.RECOMPUTE
            query = {"reset_running_requests": "true" if recompute else "false"}
            answer = await wire.post("/reset_prefix_cache", query=query, timeout_s=timeout_s)
            if recompute and not field(wire.url, answer, "success", kind=bool):
                what = "the cache could not be emptied: running requests keep old keys and values"
                raise RemoteFailure(RemoteProblem.NOT_DELIVERED, wire.url, what)
            label = {"new_version": delivery.label}
            await wire.post("/update_weight_version", label, timeout_s=timeout_s)
        except (UserError, RemoteFailure):
            # What is loaded now is unknown: nothing sampled from it may pass for the old weights.
            with suppress(UserError, RemoteFailure):
                await wire.post("/update_weight_version", {"new_version": UNKNOWN_LABEL})
            raise
        finally:
            await wire.post("/resume", timeout_s=timeout_s)

    async def check_delivery(self, wire: Wire, delivery: Delivery, dtype: str | None) -> None:
        """See `Dialect`. Norms are replicated, never packed: their bytes can be compared."""
        if await self.label(wire, 60.0) != delivery.label:
            what = "the label of the weights is not the one that was set"
            raise RemoteFailure(RemoteProblem.NOT_DELIVERED, wire.url, what)
        if dtype != "bfloat16" and dtype != "float32":
            return
        answer = await wire.post("/weight_checker", {"action": "checksum"}, timeout_s=300.0)
        found = field(wire.url, answer, "checksums", kind=dict)
        served = {str(name).rpartition(":")[2]: digest for name, digest in found.items()}
        for name, digest in delivery.tensor_digests.items():
            if served.get(name, digest) != digest:
                what = f"tensor {name} there has other bytes than were sent"
                raise RemoteFailure(RemoteProblem.NOT_DELIVERED, wire.url, what)

    async def adapters(self, wire: Wire, timeout_s: float) -> frozenset[str]:
        """See `Dialect`."""
        models = await wire.get("/v1/models", timeout_s=timeout_s)
        return frozenset(adapter_names(wire.url, models))

    async def load_adapter(self, wire: Wire, name: str, folder: Path, timeout_s: float) -> None:
        """See `Dialect`."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        await wire.post(_LOAD_ADAPTER, body, timeout_s=timeout_s, is_text=True)

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        """See `Dialect`."""
        await wire.post("/v1/unload_lora_adapter", {"lora_name": name}, is_text=True)

    async def pause(self, wire: Wire) -> None:
        """See `Dialect`."""
        await wire.post("/pause", query={"mode": "keep"})

    async def resume(self, wire: Wire) -> None:
        """See `Dialect`."""
        await wire.post("/resume")

    async def sleep(self, wire: Wire, level: SleepLevel) -> None:
        """See `Dialect`."""
        depth = "1" if level is SleepLevel.CACHE else "2"
        await wire.post("/sleep", query={"level": depth, "mode": "wait"})

    async def wake(self, wire: Wire, level: SleepLevel) -> None:
        """See `Dialect`."""
        await wire.post("/wake_up")

    async def _refuse_text_only(self, wire: Wire) -> None:
        """Without the scale-out endpoints there are no labels per token."""
        try:
            await wire.post(_GENERATE, {"token_ids": [], "sampling_params": {}})
        except UserError as error:
            if "HTTP 400" in error.what or "HTTP 422" in error.what:
                return
            raise UserError(f"{wire.url} takes no token ids.", fix=_START) from error


def _features(config: dict[str, Any]) -> frozenset[EngineFeature]:
    found = set(_BASE)
    if _setting(config, "scheduler_config", "policy") == "priority":
        found.add(EngineFeature.PRIORITIES)
    if _setting(config, "cache_config", "enable_prefix_caching"):
        found.add(EngineFeature.PREFIX_REUSE)
    if _setting(config, "model_config", "enable_sleep_mode"):
        found.add(EngineFeature.SLEEP)
    if config.get("speculative_config"):
        found.add(EngineFeature.SPECULATION)
    if config.get("lora_config"):
        found.add(EngineFeature.ADAPTERS)
        if _setting(config, "device_config", "device") == "cpu":
            found -= _NOT_BESIDE_ADAPTERS
    if _grammars(config):
        found.add(EngineFeature.GRAMMAR)
    return frozenset(found)


def _grammars(config: dict[str, Any]) -> frozenset[GrammarKind]:
    """It masks by its tokenizer. Only one of its libraries reads Lark as we do: llguidance."""
    backend = _setting(config, "structured_outputs_config", "backend")
    if backend is None or _setting(config, "model_config", "skip_tokenizer_init"):
        return frozenset()
    found = {GrammarKind.JSON_SCHEMA, GrammarKind.REGEX}
    if backend == "guidance":
        found.add(GrammarKind.LARK)
    return frozenset(found)


async def _loads_adapters(wire: Wire) -> bool:
    """Only with VLLM_ALLOW_RUNTIME_LORA_UPDATING the endpoint is there."""
    try:
        await wire.post(_LOAD_ADAPTER, {"lora_name": "", "lora_path": ""}, is_text=True)
    except UserError as error:
        return "HTTP 400" in error.what or "HTTP 422" in error.what
    return True


def _setting(document: dict[str, Any], section: str, key: str) -> Any:
    inner = document.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


def _sampling(params: SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        # Only what the request names ends it: the model's own end token is among its stops. A text
        # held to a grammar has no other end than that token.
        "ignore_eos": params.grammar is None,
        "seed": params.seed & (2**63 - 1),
        "logprobs": params.num_top_logprobs,
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
    }
    if params.top_k:
        values["top_k"] = params.top_k
    if params.min_p:
        values["min_p"] = params.min_p
    if params.stop:
        values["stop"] = list(params.stop)
    if params.grammar is not None:
        values["structured_outputs"] = {_HELD[params.grammar.kind]: params.grammar.text}
    return values


def _chunk(url: str, choice: Any, num_top: int) -> Chunk:
    raw_ids = choice.get("token_ids") if isinstance(choice, dict) else None
    token_ids = raw_ids if isinstance(raw_ids, list) else []
    rows: list[Any] = []
    if token_ids:
        rows = field(url, choice, "logprobs", "content", kind=list)
    for row, token in zip(rows, token_ids, strict=False):
        if field(url, row, "token_id", kind=int) != token:
            raise RemoteFailure(RemoteProblem.MALFORMED, url, "log-probs are of other tokens")
    values = [field(url, row, "logprob", kind=(int, float)) for row in rows]
    ids, logprobs = checked_chunk(url, token_ids, values)
    top = tuple(_top(url, row, num_top) for row in rows) if num_top else ()
    return Chunk(ids, logprobs, top, _end(url, choice))


def _top(url: str, row: Any, number: int) -> tuple[tuple[int, float], ...]:
    """The likeliest: the sampled token comes first there, and again only if it is one of them."""
    entries = field(url, row, "top_logprobs", kind=list)
    found = {
        field(url, e, "token_id", kind=int): float(field(url, e, "logprob", kind=(int, float)))
        for e in entries
    }
    # What truncation took away is not minus infinity there, but this number.
    kept = [(token, value) for token, value in found.items() if value > _FLOOR]
    best = sorted(kept, key=lambda item: (-item[1], item[0]))
    return tuple(best[:number])


def _end(url: str, choice: Any) -> End | None:
    if choice.get("finish_reason") is None:
        return None
    spans = tuple(
        Span(
            field(url, span, "version", kind=str),
            field(url, span, "start", kind=int),
            field(url, span, "end", kind=int),
        )
        for span in choice.get("weight_versions") or ()
    )
    return End(stop_reason(url, choice["finish_reason"]), spans)


def _cached(event: Any) -> int | None:
    usage = event.get("usage") if isinstance(event, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
