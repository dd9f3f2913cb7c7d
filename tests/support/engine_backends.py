"""Every engine that the contract is checked against, over the same tiny weights."""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_server import EngineServer
from engine_tokenizer import END, tiny_tokenizer, tiny_tokenizer_json

from burnish.core.protocols import Engine
from burnish.core.records import GenerateRequest
from burnish.core.vocabulary import EngineFeature, KvDtype, Speculation
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import kernels
from burnish.model.lora import Lora, lora_from, projections
from burnish.model.lora_directory import save_lora
from burnish.model.published import publish
from burnish.rollout.engine.barrier import Barrier
from burnish.rollout.engine.grammar import GrammarCompiler
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.speculation.opening import DraftSource
from burnish.rollout.engine.worker import EngineWorker
from burnish.rollout.remote.config import RemoteConfig
from burnish.rollout.remote.engine import RemoteEngine
from burnish.rollout.remote.openai import OpenAiDialect
from burnish.rollout.remote.sglang import SglangDialect
from burnish.rollout.remote.vllm import VllmDialect

# Heads of 32: vLLM's attention on a CPU has none smaller.
CONFIG = ModelConfig(
    family="llama",
    vocab_size=120,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
)
DIALECTS = {"openai": OpenAiDialect, "vllm": VllmDialect, "sglang": SglangDialect}
VERSION = 4
VLLM = os.environ.get("BURNISH_VLLM_PYTHON") or None
_VLLM_START_S = 240


def state(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2, generator=generator)
    return decoder.state_dict()


def first_layers(num_layers: int) -> Any:
    """Those of `state(0)`, as a model of its own."""
    later = tuple(f"blocks.{layer}." for layer in range(num_layers, CONFIG.num_layers))
    return {name: tensor for name, tensor in state(0).items() if not name.startswith(later)}


def random_lora(seed: int, rank: int = 4) -> Lora:
    """An adapter that changes what `state` answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in projections(CONFIG).items():
        for half, shape in (("A", (rank, place.inputs)), ("B", (place.outputs, rank))):
            value = 0.3 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = value
    return lora_from(tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}, CONFIG)


class Backend:
    """An engine, and how an episode announces itself to it."""

    def __init__(self, engine: Engine, barrier: Barrier | None = None) -> None:
        self.engine, self.barrier = engine, barrier

    async def prepare(self) -> None:
        """Serve `state(0)` as version 4, whatever an earlier test has left there."""

    async def ask(self, *requests: GenerateRequest) -> list[Any]:
        for _ in range(len(requests) if self.barrier else 0):
            self.barrier.enter()
        tasks = [asyncio.ensure_future(self.engine.generate(r)) for r in requests]
        if self.barrier:
            for task in tasks:
                # Also right for a task that is cancelled before it has begun.
                task.add_done_callback(lambda _: self.barrier.leave())
        return await asyncio.gather(*tasks)

    async def close(self) -> None:
        await self.engine.close()


class LocalBackend(Backend):
    """This package's own engine."""

    def __init__(
        self,
        barrier: Barrier | None = None,
        # By PyTorch's operators in bf16, another batch gives other roundings.
        dtype: torch.dtype = torch.float32,
        draft_layers: int = 0,
        **limits: Any,
    ) -> None:
        draft = None
        if draft_layers:
            config = msgspec.structs.replace(CONFIG, num_layers=draft_layers)
            draft = DraftSource(config, first_layers(draft_layers))
        worker = EngineWorker(
            CONFIG,
            state(0),
            version=VERSION,
            dtype=dtype,
            limits=CoreLimits(**({"num_pages": 64, "page_size": 8} | limits)),
            num_threads=1,
            barrier=barrier,
            grammars=GrammarCompiler(tiny_tokenizer_json(CONFIG.vocab_size), CONFIG.vocab_size),
            draft=draft,
        )
        super().__init__(worker, barrier)


class ServedBackend(Backend):
    """A server of ours that speaks another's language, and a client."""

    def __init__(self, kind: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        # A server that cannot load adapters may have been started with one.
        started_with = {}
        if kind == "openai":
            started_with["tutor"] = Path(self.folder.name, "tutor")
            save_lora(random_lora(1), started_with["tutor"], CONFIG)
        self.server = EngineServer(kind, CONFIG, state(0), adapters=started_with)
        super().__init__(connect(kind, self.server.url))

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.server.stop)
        self.folder.cleanup()


class VllmBackend(Backend):
    """A real vLLM that outlives the test."""

    def __init__(self, url: str) -> None:
        super().__init__(connect("vllm", url))

    async def prepare(self) -> None:
        assert isinstance(self.engine, RemoteEngine)
        # With adapters a server on a CPU keeps the weights that it was started with.
        if EngineFeature.UPDATE_WEIGHTS in self.engine.capabilities.features:
            await self.engine.synchronize(state(0))


def connect(kind: str, *urls: str, **more: Any) -> RemoteEngine:
    values = {"urls": urls, "health_interval_s": 0.05, "silence_timeout_s": 20.0} | more
    return RemoteEngine(RemoteConfig(**values), DIALECTS[kind](), CONFIG, version=VERSION)


class VllmProcess:
    """`vllm serve` over a tiny model, in the environment that BURNISH_VLLM_PYTHON names."""

    def __init__(self, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        published = publish(CONFIG, state(0), root / "model", "float32")
        tiny_tokenizer(CONFIG.vocab_size).save(str(published.folder / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
        (published.folder / "tokenizer_config.json").write_text(json.dumps(about))
        described = published.folder / "config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | {"eos_token_id": END}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = root / "log"
        command = [
            *(str(VLLM), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(published.folder)),
            *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
            *("--max-model-len", str(CONFIG.max_position_embeddings), "--max-num-seqs", "16"),
            *("--enable-prompt-tokens-details", "--dtype", "float32"),
            *options,
        ]
        env = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self._wait()

    def _wait(self) -> None:
        for _ in range(_VLLM_START_S):
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass
            else:
                raise AssertionError(self.log.read_text()[-3000:])
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                continue
        self.close()
        raise AssertionError(self.log.read_text()[-3000:])

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


# Started so, as two servers: with adapters it cannot do all that it can without.
REAL = {
    "real_vllm": (),
    "real_vllm_adapters": ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"),
}
# This package's own engine in its other modes. Pages of 16 are what the native kernels read.
NATIVE = {"dtype": torch.bfloat16, "page_size": 16}
ROUNDED: dict[str, dict[str, Any]] = {
    "worker_exact": NATIVE | {"exact": True},
    "worker_exact_lookup": NATIVE
    | {"exact": True, "speculation": SpeculationLimits(kind=Speculation.LOOKUP)},
    "worker_bf16": NATIVE,
    "worker_int8": NATIVE | {"kv_dtype": KvDtype.INT8},
}
GUESSING: dict[str, dict[str, Any]] = {
    "worker_self": {"speculation": SpeculationLimits(kind=Speculation.SELF, num_layers=1)},
    "worker_draft": {
        "draft_layers": 1,
        "speculation": SpeculationLimits(kind=Speculation.DRAFT),
    },
}
MODES = ROUNDED | GUESSING
# What the quick suite has of them in other combinations already.
SLOW_MODES = ("worker_exact", "worker_bf16")
IN_FP32 = [
    "worker",
    "worker_with_barrier",
    *GUESSING,
    "openai",
    "vllm",
    "sglang",
    *(
        pytest.param(
            name,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    VLLM is None,
                    reason="BURNISH_VLLM_PYTHON names no interpreter with vllm-cpu "
                    "(docs/engine.md)",
                ),
            ],
        )
        for name in REAL
    ),
]
"""Backends whose numbers a reference in fp32 foretells."""
BACKENDS = [
    *IN_FP32,
    *(
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(
                    kernels().library is None,
                    reason=f"equal bits in bf16 need the native kernels: {kernels().problem}",
                ),
                *([pytest.mark.slow] if name in SLOW_MODES else []),
            ],
        )
        for name in ROUNDED
    ),
]


def open_backend(name: str, real: "VllmProcess | None") -> Backend:
    match name:
        case "worker":
            return LocalBackend()
        case "worker_with_barrier":
            return LocalBackend(Barrier())
        case name if name in MODES:
            return LocalBackend(**MODES[name])
        case name if name in REAL:
            assert real is not None
            return VllmBackend(real.url)
        case _:
            return ServedBackend(name)
