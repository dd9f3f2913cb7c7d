"""Completions as OpenAI defined them, and two extensions without which nothing can be learned.

Prompts go out as token ids, and the ids of sampled tokens must come back (`return_token_ids`, or
tokens written as `token_id:N`). Text is never turned back into tokens.

Such a server can be sampled from and, if it echoes log-probs, scored with. It cannot be updated.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from burnish.core.errors import UserError
from burnish.core.records import SamplingParams
from burnish.core.vocabulary import EngineFeature, SleepLevel, StopReason
from burnish.rollout.remote.dialect import (
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
    model_names,
    stop_reason,
)
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.wire import Wire

_PATH = "/v1/completions"
_PREFIX = "token_id:"
_MAX_TOP_LOGPROBS = 5
_PROBE_IDS = (5, 6, 7)


class OpenAiDialect:
    """Speaks to any server with OpenAI's `/v1/completions` and token ids."""

    name = "openai"

    async def inspect(self, wire: Wire, model: str | None) -> ServerFacts:
        """See `Dialect`. Nothing says what such a server can do: try it."""
        served = await wire.get("/v1/models")
        names, adapters = model_names(wire.url, served), adapter_names(wire.url, served)
        if not names or (model is not None and model not in names):
            raise UserError(
                f"{wire.url} serves {', '.join(names) or 'no model'}, not {model}.",
                fix="set engine.remote.model to one of these, or leave it out.",
            )
        name = model or names[0]
        features = {EngineFeature.STREAM}
        await self._refuse_text(wire, name)
        if await self._echoes(wire, name):
            features.add(EngineFeature.SCORE)
            features.add(EngineFeature.PROMPT_LOGPROBS)
        if adapters:
            features.add(EngineFeature.ADAPTERS)
        cards = [e for e in served["data"] if isinstance(e, dict)]
        context = next((e.get("max_model_len") for e in cards if e.get("id") == name), None)
        return ServerFacts(
            model=name,
            features=frozenset(features),
            scope=LogprobScope.RAW,
            max_context_tokens=context if isinstance(context, int) else None,
            max_top_logprobs=0,
            dtype=None,
            label=None,
            adapters=adapters,
        )

    async def is_healthy(self, wire: Wire, timeout_s: float) -> bool:
        """See `Dialect`."""
        await wire.get("/v1/models", timeout_s=timeout_s)
        return True

    async def counts(self, wire: Wire, timeout_s: float) -> ServerCounts:
        """See `Dialect`."""
        return ServerCounts()

    async def label(self, wire: Wire, timeout_s: float) -> str | None:
        """See `Dialect`."""
        return None

    async def generate(self, wire: Wire, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """See `Dialect`. Stops are looked for here as well: the standard knows none by id."""
        params = ask.request.params
        body = _body(ask.adapter or ask.model, ask.request.prompt_ids, params) | {"stream": True}
        stops = frozenset(params.stop_token_ids)
        ended = False
        async with aclosing(wire.events(_PATH, body)) as events:
            async for event in events:
                for choice in field(wire.url, event, "choices", kind=list):
                    chunk = _cut(_chunk(wire.url, choice), stops)
                    ended = chunk.end is not None
                    yield chunk
                    if ended:
                        return
        if not ended:
            raise RemoteFailure(RemoteProblem.LOST, wire.url, "the stream had no end")

    async def score(
        self, wire: Wire, token_ids: Sequence[int], model: str, salt: str
    ) -> tuple[float, ...]:
        """See `Dialect`: the prompt, echoed with log-probs, and one token that is not used."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        answer = await wire.post(_PATH, _body(model, token_ids, params) | {"echo": True})
        values = field(wire.url, answer, "choices", 0, "logprobs", "token_logprobs", kind=list)
        if len(values) < len(token_ids):
            what = f"{len(token_ids)} tokens were scored with {len(values)} values"
            raise RemoteFailure(RemoteProblem.MALFORMED, wire.url, what)
        rest = values[1 : len(token_ids)]
        return (0.0, *(float(field(wire.url, [v], 0, kind=(int, float))) for v in rest))

    async def update(self, wire: Wire, delivery: Delivery, timeout_s: float) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "take new weights")

    async def check_delivery(self, wire: Wire, delivery: Delivery, dtype: str | None) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "take new weights")

    async def adapters(self, wire: Wire, timeout_s: float) -> frozenset[str]:
        """See `Dialect`."""
        models = await wire.get("/v1/models", timeout_s=timeout_s)
        return frozenset(adapter_names(wire.url, models))

    async def load_adapter(self, wire: Wire, name: str, folder: Path, timeout_s: float) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "load adapters")

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "load adapters")

    async def pause(self, wire: Wire) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "be paused")

    async def resume(self, wire: Wire) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "be paused")

    async def sleep(self, wire: Wire, level: SleepLevel) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "sleep")

    async def wake(self, wire: Wire, level: SleepLevel) -> None:
        """See `Dialect`."""
        raise _cannot(wire, "sleep")

    async def _refuse_text(self, wire: Wire, model: str) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        answer = await wire.post(_PATH, _body(model, _PROBE_IDS, params))
        choice = field(wire.url, answer, "choices", 0, kind=dict)
        if _token_ids(choice) is None:
            raise UserError(
                f"{wire.url} answers in text, without token ids.",
                fix="use a server that knows return_token_ids: tokens cannot be told from text.",
            )
        _chunk(wire.url, choice)

    async def _echoes(self, wire: Wire, model: str) -> bool:
        try:
            await self.score(wire, _PROBE_IDS, model, "")
        except (UserError, RemoteFailure):
            return False
        return True


def _cannot(wire: Wire, what: str) -> UserError:
    return UserError(
        f"{wire.url} is only known as an OpenAI-compatible server: it cannot {what}.",
        fix="use engine.backend = vllm or sglang.",
    )


def _body(model: str, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed & (2**31 - 1),
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        # Ends are ours to find: the model's own end token is among the stops of the request.
        "ignore_eos": True,
    }


def _token_ids(choice: Any) -> list[Any] | None:
    """The ids of the sampled tokens, however they are given."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return ids
    logprobs = choice.get("logprobs")
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if not isinstance(tokens, list) or not tokens:
        return None
    numbers = [str(t).removeprefix(_PREFIX) for t in tokens if str(t).startswith(_PREFIX)]
    if len(numbers) != len(tokens) or not all(n.isdecimal() for n in numbers):
        return None
    return [int(n) for n in numbers]


def _chunk(url: str, choice: Any) -> Chunk:
    if not isinstance(choice, dict):
        raise RemoteFailure(RemoteProblem.MALFORMED, url, "a choice is no object")
    ids = _token_ids(choice) or []
    values: list[Any] = []
    if ids:
        values = field(url, choice, "logprobs", "token_logprobs", kind=list)
    token_ids, logprobs = checked_chunk(url, ids, values)
    said = choice.get("finish_reason")
    return Chunk(token_ids, logprobs, (), End(stop_reason(url, said)) if said else None)


def _cut(chunk: Chunk, stops: frozenset[int]) -> Chunk:
    """End at the first stop token; it is kept."""
    for position, token in enumerate(chunk.token_ids):
        if token in stops:
            kept = position + 1
            return Chunk(chunk.token_ids[:kept], chunk.logprobs[:kept], (), End(StopReason.STOP))
    return chunk
