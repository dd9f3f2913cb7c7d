"""Servers that speak vLLM's, SGLang's and OpenAI's HTTP, honestly, over an engine of this package.

Each runs in a thread with a loop of its own, as another program would. `Faults` makes one fail in
the ways in which real ones do.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from engine_tokenizer import END, tiny_tokenizer_json
from safetensors.torch import load_file

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.loop_thread import LoopThread
from burnish.core.records import (
    Failure,
    GenerateRequest,
    GenerationDelta,
    Grammar,
    SamplingParams,
)
from burnish.core.vocabulary import FailureKind, GrammarKind, InFlight
from burnish.model.config import ModelConfig
from burnish.model.names import parts
from burnish.rollout.engine.grammar import GrammarCompiler
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.worker import EngineWorker

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faults:
    """What goes wrong; all off."""

    def __init__(self) -> None:
        self.drop_after: int | None = None
        """Break the connection after so many tokens, once."""
        self.silent_after: int | None = None
        """Say nothing more after so many tokens, once."""
        self.status: int | None = None
        """Answer every generation with this HTTP status."""
        self.garbage = False
        """Send bytes that are no JSON."""
        self.ignores_updates = False
        """Accept new weights and adapters, and go on as before."""
        self.refuses_updates = False
        """Fail while loading them."""
        self.token: str | None = None
        """Bearer token that is demanded."""
        self.raw_logprobs = False
        """Report log-probs at temperature 1, whatever was asked."""


class EngineServer:
    """A server of one kind on a free port of this machine."""

    def __init__(
        self,
        kind: str,
        config: ModelConfig,
        state: Mapping[str, Any],
        tls: ssl.SSLContext | None = None,
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        self._tls = tls
        self._started_with = adapters or {}
        self.config, self.faults = config, Faults()
        self.kind, self._initial = kind, state
        self.label = "default"
        self.device = "cuda"
        self.running = self.most_running = 0
        self.num_pauses = 0
        self.is_paused = False
        self.may_load = threading.Event()
        self.may_load.set()
        self.seen: list[dict[str, Any]] = []
        self.port = 0
        self.restart()

    @property
    def url(self) -> str:
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self.port}"

    def restart(self) -> None:
        """As a process that is started anew: the first weights, no label, the same port."""
        self.label, self.number = "default", 0
        self.engine = EngineWorker(
            self.config,
            self._initial,
            dtype=torch.float32,
            limits=CoreLimits(num_pages=256, page_size=8),
            num_threads=1,
            grammars=GrammarCompiler(
                tiny_tokenizer_json(self.config.vocab_size), self.config.vocab_size
            ),
        )
        self.ineffective: set[str] = set()
        self._unloaded: set[str] = set()
        self._thread = LoopThread("engine-server")
        self._thread.run_blocking(self._start)

    def stop(self) -> None:
        """As a process that is killed: connections break in the middle."""
        self._thread.run_blocking(self._stop)
        self._thread.close()

    async def _start(self) -> None:
        for name, folder in self._started_with.items():
            await self.engine.load_adapter(name, folder)
        app = web.Application(middlewares=[self._guard], client_max_size=2**24)
        app.add_routes(DIALECTS[self.kind](self))
        # Handlers end when their client hangs up: that is what aborts a request.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self._tls
        )
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        await self.engine.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = self.faults.token
        if wanted is not None and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except UserError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except ClassifiedFailure as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)

    async def deltas(
        self, prompt: list[int], params: SamplingParams, adapter: str | None = None
    ) -> AsyncIterator[Any]:
        """Sample in the engine."""
        self.number += 1
        request = GenerateRequest(
            request_id=f"server/{self.number}",
            prompt_ids=tuple(prompt),
            params=params,
            adapter=None if adapter in self.ineffective else adapter,
        )
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with aclosing(self.engine.stream(request)) as stream:
                async for delta in stream:
                    yield delta
        finally:
            self.running -= 1

    async def stream(
        self,
        http: web.Request,
        prompt: list[int],
        params: SamplingParams,
        event: Callable[[GenerationDelta, int], Any],
        *,
        last: Callable[[GenerationDelta], Any] | None = None,
        adapter: str | None = None,
    ) -> web.StreamResponse:
        """Server-sent events, one per delta, and the end mark."""
        self._refuse()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        count = 0
        async with aclosing(self.deltas(prompt, params, adapter)) as deltas:
            async for delta in deltas:
                if not response.prepared:
                    await response.prepare(http)
                await self._misbehave(http, response, count)
                count += len(delta.token_ids)
                await response.write(b"data: " + json.dumps(event(delta, count)).encode() + b"\n\n")
                if delta.generation is not None and last is not None:
                    await response.write(b"data: " + json.dumps(last(delta)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def whole(
        self, prompt: list[int], params: SamplingParams, adapter: str | None = None
    ) -> GenerationDelta:
        """The last delta."""
        self._refuse()
        *_, last = [delta async for delta in self.deltas(prompt, params, adapter)]
        return last

    def cards(self) -> list[dict[str, Any]]:
        """Of `/v1/models`."""
        served = sorted({*self.engine.adapters, *self.ineffective} - self._unloaded)
        adapters = [{"id": name, "parent": "m"} for name in served]
        return [{"id": "m", "max_model_len": self.config.max_position_embeddings}, *adapters]

    async def load_adapter(self, name: str, folder: str) -> None:
        if self.faults.refuses_updates:
            raise ClassifiedFailure(_broken("the loader gave up"))
        if self.faults.ignores_updates:
            self.ineffective.add(name)
        elif name in self._unloaded:
            self._unloaded.remove(name)
        else:
            await self.engine.load_adapter(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        """Requests that run with it go on."""
        if name not in {card["id"] for card in self.cards()}:
            raise UserError(f"adapter {name} cannot be found.", fix="load it.")
        self._unloaded.add(name)

    def _refuse(self) -> None:
        status = self.faults.status
        if status is not None:
            kind = {429: web.HTTPTooManyRequests, 503: web.HTTPServiceUnavailable}
            raise kind.get(status, web.HTTPInternalServerError)(text="as told")

    async def _misbehave(self, http: web.Request, response: web.StreamResponse, count: int) -> None:
        faults = self.faults
        if faults.garbage:
            await response.write(b"data: {not json\n\n")
        if faults.drop_after is not None and count >= faults.drop_after:
            faults.drop_after = None
            assert http.transport is not None
            http.transport.abort()
            raise ConnectionResetError("as told")
        if faults.silent_after is not None and count >= faults.silent_after:
            faults.silent_after = None
            await asyncio.Event().wait()

    async def pause(self) -> None:
        self.num_pauses += 1
        self.is_paused = True
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()
        self.is_paused = False

    async def load(self, folder: str, inflight: InFlight) -> None:
        """Take weights from files, as `safetensors` wrote them."""
        await asyncio.to_thread(self.may_load.wait)
        if self.faults.refuses_updates:
            raise ClassifiedFailure(_broken("the loader gave up"))
        if self.faults.ignores_updates:
            return
        stored = load_file(Path(folder) / "model.safetensors")
        state: dict[str, Any] = {}
        for part in parts(self.config):
            pieces = state.setdefault(part.own, [])
            pieces.append(stored[part.hf])
        joined = {name: torch.cat(pieces) for name, pieces in state.items()}
        await self.engine.update_weights(joined, self.engine.weight_version + 1, inflight)


def _broken(message: str) -> Failure:
    return Failure(kind=FailureKind.INFRA, where="engine_server", message=message)


def _grammar(values: dict[str, Any], **keys: GrammarKind) -> Grammar | None:
    for key, kind in keys.items():
        if key in values:
            return Grammar(kind=kind, text=values[key])
    return None


def _stops(values: dict[str, Any]) -> tuple[int, ...]:
    """Without `ignore_eos` the model's own end token is one."""
    own = () if values.get("ignore_eos") else (END,)
    return (*values.get("stop_token_ids", ()), *own)


def _vllm_params(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=values.get("temperature", 1.0),
        top_p=values.get("top_p", 1.0),
        top_k=values.get("top_k", 0),
        min_p=values.get("min_p", 0.0),
        max_tokens=values.get("max_tokens", 16),
        min_tokens=values.get("min_tokens", 0),
        stop_token_ids=_stops(values),
        seed=values.get("seed") or 0,
        num_top_logprobs=values.get("logprobs") or 0,
        grammar=_grammar(
            values.get("structured_outputs", {}),
            json=GrammarKind.JSON_SCHEMA,
            regex=GrammarKind.REGEX,
            grammar=GrammarKind.LARK,
        ),
    )


def vllm_routes(server: EngineServer) -> list[web.RouteDef]:
    paused_for: list[InFlight] = []

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": server.cards()})

    async def info(http: web.Request) -> web.Response:
        mode = "raw_logprobs" if server.faults.raw_logprobs else "processed_logprobs"
        model = {
            "logprobs_mode": mode,
            "max_model_len": server.config.max_position_embeddings,
            "max_logprobs": 20,
            "dtype": "torch.float32",
        }
        config = {
            "model_config": model,
            "cache_config": {"enable_prefix_caching": True},
            "lora_config": {"max_lora_rank": 8},
            "device_config": {"device": server.device},
            "structured_outputs_config": {"backend": "guidance"},
        }
        return web.json_response({"vllm_config": config})

    async def generate(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        server.seen.append(body)
        if not body["token_ids"]:
            return web.json_response({"error": {"message": "too short"}}, status=400)
        asked = body["sampling_params"]
        params = _vllm_params(asked)
        adapter = None if body["model"] == "m" else body["model"]
        if adapter is not None and adapter not in {c["id"] for c in server.cards()}:
            missing = f"The model `{adapter}` does not exist."
            return web.json_response({"error": {"message": missing}}, status=404)
        labels: list[str] = []

        def choice(delta: GenerationDelta) -> dict[str, Any]:
            labels.extend([server.label] * len(delta.token_ids))
            content = [
                {
                    "token_id": token,
                    "logprob": logprob,
                    "top_logprobs": [
                        {"token_id": t, "logprob": v} for t, v in [(token, logprob), *top]
                    ],
                }
                for token, logprob, top in zip(
                    delta.token_ids,
                    delta.logprobs,
                    delta.top_logprobs or ((),) * len(delta.token_ids),
                    strict=True,
                )
            ]
            ended = delta.generation
            reasons = {"stop": "stop", "length": "length", "aborted": "abort"}
            spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(labels)]
            return {
                "index": 0,
                "token_ids": list(delta.token_ids),
                "finish_reason": None if ended is None else reasons[ended.stop_reason],
                "weight_versions": None if ended is None else spans,
                "logprobs": {"content": content},
            }

        if body.get("stream"):

            def usage(delta: GenerationDelta) -> Any:
                assert delta.generation is not None
                cached = {"cached_tokens": delta.generation.cached_tokens}
                return {"choices": [], "usage": {"prompt_tokens_details": cached}}

            return await server.stream(
                *(http, body["token_ids"], params),
                lambda delta, _: {"choices": [choice(delta)], "usage": None},
                last=usage,
                adapter=adapter,
            )
        delta = await server.whole(body["token_ids"], params, adapter)
        answer: dict[str, Any] = {"choices": [choice(delta)]}
        if asked.get("prompt_logprobs") is not None:
            scores = await server.engine.score(body["token_ids"])
            rows = zip(body["token_ids"][1:], scores[1:], strict=True)
            answer["prompt_logprobs"] = [None, *({str(t): {"logprob": v}} for t, v in rows)]
        return web.json_response(answer)

    async def pause(http: web.Request) -> web.Response:
        abort = http.query["mode"] == "abort"
        paused_for[:] = [InFlight.ABORT if abort else InFlight.KEEP]
        await server.pause()
        return web.json_response({"status": "paused"})

    async def rpc(http: web.Request) -> web.Response:
        body = await http.json()
        assert body["method"] == "reload_weights"
        await server.load(body["kwargs"]["weights_path"], paused_for[0])
        return web.json_response({"results": [None]})

    async def reset(http: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def relabel(http: web.Request) -> web.Response:
        server.label = (await http.json())["new_version"]
        return web.json_response({"success": True})

    async def resume(http: web.Request) -> web.Response:
        await server.resume()
        return web.json_response({"status": "resumed"})

    async def label(http: web.Request) -> web.Response:
        return web.json_response({"weight_version": server.label})

    async def check(http: web.Request) -> web.Response:
        return web.json_response({"checksums": {}})

    async def load_adapter(http: web.Request) -> web.Response:
        body = await http.json()
        if not body["lora_name"] or not body["lora_path"]:
            return web.json_response({"error": {"message": "must be provided"}}, status=400)
        await server.load_adapter(body["lora_name"], body["lora_path"])
        return web.Response(text="Success: LoRA adapter added successfully.")

    async def unload_adapter(http: web.Request) -> web.Response:
        server.unload_adapter((await http.json())["lora_name"])
        return web.Response(text="Success: LoRA adapter removed successfully.")

    return [
        web.get("/v1/models", models),
        web.get("/server_info", info),
        web.get("/health", check),
        web.get("/weight_info", label),
        web.post("/inference/v1/generate", generate),
        web.post("/pause", pause),
        web.post("/collective_rpc", rpc),
        web.post("/reset_prefix_cache", reset),
        web.post("/update_weight_version", relabel),
        web.post("/resume", resume),
        web.post("/weight_checker", check),
        web.post("/v1/load_lora_adapter", load_adapter),
        web.post("/v1/unload_lora_adapter", unload_adapter),
    ]


def sglang_routes(server: EngineServer) -> list[web.RouteDef]:
    mode: list[InFlight] = [InFlight.ABORT]
    modes = {
        "in_place": InFlight.KEEP,
        "retract": InFlight.RECOMPUTE,
        "abort": InFlight.ABORT,
    }

    async def about(http: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": server.label})

    async def info(http: web.Request) -> web.Response:
        context = server.config.max_position_embeddings
        about = {"context_length": context, "dtype": "float32", "grammar_backend": "xgrammar"}
        return web.json_response(about | {"enable_lora": True, "max_lora_rank": 8})

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": server.cards()})

    async def health(http: web.Request) -> web.Response:
        return web.Response()

    async def generate(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        server.seen.append(body)
        asked = body["sampling_params"]
        num_top = body.get("top_logprobs_num", 0)
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in {c["id"] for c in server.cards()}:
            missing = f"The following requested LoRA adapters are not loaded: {adapter}"
            return web.json_response({"error": {"message": missing}}, status=400)
        params = SamplingParams(
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=max(0, asked.get("top_k", -1)),
            min_p=asked.get("min_p", 0.0),
            max_tokens=asked["max_new_tokens"],
            min_tokens=asked.get("min_new_tokens", 0),
            stop_token_ids=_stops(asked),
            seed=asked.get("sampling_seed", 0),
            num_top_logprobs=num_top,
            grammar=_grammar(asked, json_schema=GrammarKind.JSON_SCHEMA, regex=GrammarKind.REGEX),
        )
        rows: list[Any] = []
        tops: list[Any] = []

        def event(delta: GenerationDelta, count: int) -> Any:
            """Cumulative, as that server's default is."""
            rows.extend([v, t, None] for t, v in zip(delta.token_ids, delta.logprobs, strict=True))
            tops.extend([[v, t, None] for t, v in top] for top in delta.top_logprobs)
            meta: dict[str, Any] = {
                "completion_tokens": count,
                "output_token_logprobs": list(rows),
                "weight_version": server.label,
                "finish_reason": None,
            }
            if num_top:
                meta["output_top_logprobs"] = list(tops)
            if delta.generation is not None:
                reason = delta.generation.stop_reason
                kind = "abort" if reason == "aborted" else str(reason)
                meta["finish_reason"] = {"type": kind}
                meta["cached_tokens"] = delta.generation.cached_tokens
            return {"text": "", "output_ids": [r[1] for r in rows], "meta_info": meta}

        if body.get("stream"):
            return await server.stream(http, body["input_ids"], params, event, adapter=adapter)
        delta = await server.whole(body["input_ids"], params, adapter)
        answer = event(delta, len(delta.token_ids))
        if body.get("logprob_start_len") == 0:
            scores = await server.engine.score(body["input_ids"])
            pairs = zip(body["input_ids"], (None, *scores[1:]), strict=True)
            answer["meta_info"]["input_token_logprobs"] = [[v, t, None] for t, v in pairs]
        return web.json_response(answer)

    async def pause(http: web.Request) -> web.Response:
        mode[0] = modes[(await http.json())["mode"]]
        await server.pause()
        return web.json_response({"status": "ok"})

    async def update(http: web.Request) -> web.Response:
        body = await http.json()
        if mode[0] is InFlight.KEEP and body["flush_cache"] and server.running:
            answer = {"success": False, "message": "the cache is in use"}
            return web.json_response(answer, status=400)
        await server.load(body["model_path"], mode[0])
        server.label = body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    async def relabel(http: web.Request) -> web.Response:
        server.label = (await http.json())["new_version"]
        return web.json_response({"success": True})

    async def load_adapter(http: web.Request) -> web.Response:
        body = await http.json()
        if body["lora_name"] in server.engine.adapters:
            answer = {"success": False, "error_message": "it is already loaded"}
            return web.json_response(answer, status=400)
        await server.load_adapter(body["lora_name"], body["lora_path"])
        return web.json_response({"success": True, "error_message": ""})

    async def unload_adapter(http: web.Request) -> web.Response:
        server.unload_adapter((await http.json())["lora_name"])
        return web.json_response({"success": True, "error_message": ""})

    async def proceed(http: web.Request) -> web.Response:
        await server.resume()
        return web.json_response({"status": "ok"})

    return [
        web.get("/get_model_info", about),
        web.get("/get_server_info", info),
        web.get("/health", health),
        web.post("/generate", generate),
        web.post("/pause_generation", pause),
        web.post("/update_weights_from_disk", update),
        web.post("/continue_generation", proceed),
        web.get("/v1/models", models),
        web.post("/load_lora_adapter", load_adapter),
        web.post("/unload_lora_adapter", unload_adapter),
        web.post("/update_weight_version", relabel),
    ]


def openai_routes(server: EngineServer) -> list[web.RouteDef]:
    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": server.cards()})

    async def completions(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        server.seen.append(body)
        params = SamplingParams(
            temperature=body["temperature"],
            top_p=body["top_p"],
            max_tokens=body["max_tokens"],
            seed=body["seed"],
        )
        adapter = None if body["model"] == "m" else body["model"]

        def choice(delta: GenerationDelta, count: int = 0) -> Any:
            tokens = [f"token_id:{t}" for t in delta.token_ids]
            logprobs: dict[str, Any] = {
                "tokens": tokens,
                "token_logprobs": list(delta.logprobs),
            }
            reason = None if delta.generation is None else str(delta.generation.stop_reason)
            return {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason}

        if body.get("stream"):
            return await server.stream(
                *(http, body["prompt"], params),
                lambda d, n: {"choices": [choice(d, n)]},
                adapter=adapter,
            )
        delta = await server.whole(body["prompt"], params, adapter)
        answer = choice(delta)
        if body.get("echo"):
            scores = await server.engine.score(body["prompt"])
            echoed = [None, *scores[1:], *delta.logprobs]
            answer["logprobs"]["token_logprobs"] = echoed
        return web.json_response({"choices": [answer]})

    return [web.get("/v1/models", models), web.post("/v1/completions", completions)]


DIALECTS = {"vllm": vllm_routes, "sglang": sglang_routes, "openai": openai_routes}
