"""What a run is: one TOML file read into these models.

Each component's own config sits beside the component.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from burnish.core.config import Config
from burnish.core.vocabulary import DraftSampling, InFlight, KvDtype, Speculation
from burnish.model.rope_scaling import RopeKind
from burnish.quality.subject import AuditConfig
from burnish.rollout.engine.long.config import KvConfig
from burnish.rollout.remote.config import RemoteConfig
from burnish.sandbox.config import SandboxConfig
from burnish.schedule.breakers.base import BreakerConfig
from burnish.schedule.flow.load import LoadConfig
from burnish.schedule.picks import DomainScheduleConfig
from burnish.train.config import TrainConfig

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class RunSection(Config):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$")] = "run"
    """Prefix of the run directory's name."""
    directory: Path = Path("runs")
    """Where run directories are made."""
    seed: Count = 0
    """Root of all randomness."""
    steps: Annotated[int, Field(gt=0, le=10**7)] = 40
    """Training steps of reinforcement learning."""
    deterministic: bool = False
    """Fixed lag, and an order of groups that does not depend on the wall clock: equal runs give
    equal bits."""
    checkpoint_every_steps: Positive = 10
    """A crash loses at most this many steps of training, and no finished rollout."""
    train_threads: Positive = 2
    """CPU threads of the trainer."""
    keep_checkpoints: Positive = 2
    """Older checkpoints are deleted."""


class ModelSection(Config):
    """The policy to start from."""

    source: str = "smollm2-135m-instruct"
    """A known name, a GGUF file, or a Hugging Face directory with safetensors."""
    context: Annotated[int, Field(ge=2)] | None = None
    """Tokens to stretch the model's context to; no more than it has already changes nothing."""
    rope: RopeKind = "yarn"
    """How positions are stretched: yarn, linear interpolation, or dynamic NTK scaling."""


class DomainSection(Config):
    """One domain of the mix."""

    environment: str | None = None
    """Registered name or `module:Class`; the section's own name if absent."""


class WarmupSection(Config):
    """Supervised steps on reference solutions before reinforcement learning."""

    examples_per_domain: Count = 0
    """0 turns the warm-up off."""
    batch_examples: Positive = 32
    """Examples per optimizer step."""
    epochs: Positive = 1
    """Passes over the examples."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-5
    """Peak learning rate of the warm-up."""


class RolloutSection(Config):
    """How experience is collected."""

    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Samples of one task: the leave-one-out baseline needs at least 2."""
    groups_per_step: Annotated[int, Field(gt=0, le=10**4)] = 8
    """Groups in one training batch."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature; log-probs are reported under it."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Nucleus mass."""
    max_lag: Count = 1
    """No token older than this many weight versions trains; 0 is on-policy."""
    max_refills: Count = 1
    """Batches' worth of replacements per step for groups that carry no gradient."""
    max_attempts: Positive = 3
    """Tries for one episode when the machine or the sandbox fails."""
    step_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Bound on each call into an environment."""
    failures_to_quarantine: Positive = 8
    """Failures of environment or verifier in one domain after which it is quarantined."""


class FlowSection(Config):
    """How much is started at once, and what becomes of failures; not in deterministic runs."""

    load: LoadConfig = LoadConfig()
    """How full the engine is kept."""
    breakers: BreakerConfig = BreakerConfig()
    """When a domain whose machinery fails is paused."""
    retry_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    """Second tries per first try, over the whole run: an outage must not multiply the load."""
    hedge_boxes: bool = True
    """With several hosts of boxes: ask a second time for a box that takes longer than 95 in 100 do,
    for at most one box in twenty, and use whichever comes first."""
    round_max_wait: Count = 0
    """Steps that a group of a domain whose answers are long (three times the usual) may wait for
    others like it, so that few batches wait for long answers instead of all; 0 starts it at once.
    Pays where a minority of domains is long and the trainer waits."""


class EngineBackend(StrEnum):
    """Which program samples."""

    LOCAL = "local"
    """The engine of this package, in the run's own process."""
    OPENAI = "openai"
    """Any server with OpenAI's completions and token ids; cannot be trained with."""
    VLLM = "vllm"
    """`vllm serve`, one process or several."""
    SGLANG = "sglang"
    """`sglang.launch_server`, one process or several."""


class EngineSection(Config):
    """The inference engine."""

    backend: EngineBackend = EngineBackend.LOCAL
    """local, vllm, sglang, or openai (which cannot be trained with)."""
    remote: RemoteConfig = RemoteConfig()
    """Servers, for every backend but local."""
    device: str = "cpu"
    """Where weights and cache lie: `cpu`, or an accelerator as PyTorch names it (`cuda`, `cuda:1`).
    Beside the CPU's kernels its log-probs differ in the last bits: set `canary_tolerance`."""
    flex_attention: bool = False
    """On CUDA, attend by PyTorch's compiled flex attention, which reads pages where they lie. Not
    tried on a GPU yet."""
    num_threads: Positive = 2
    """CPU threads of a decode step."""
    num_pages: Annotated[int, Field(gt=0, le=10**7)] = 4096
    """Pages of the key/value cache; a page holds 16 tokens."""
    max_running: Positive = 96
    """Sequences decoded together."""
    budget_tokens: Positive = 1024
    """Tokens of one step: what a long prompt may delay those that decode."""
    max_outstanding: Positive = 4096
    """Requests in flight, running or waiting; more are refused."""
    ageing_steps: Positive = 512
    """Steps of waiting that outweigh one level of a request's priority."""
    swap_mb: Count = 1024
    """Host memory for pages of preempted sequences, MiB; 0 computes them again instead."""
    inflight: InFlight = InFlight.KEEP
    """What becomes of running generations when new weights are published: `keep` goes on over the
    old keys and values, `recompute` computes them again, `abort` ends them (they are retried)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights, and the cache unless `kv_dtype` says otherwise."""
    kv_dtype: KvDtype = KvDtype.MODEL
    """Numbers of the key/value cache: `model`, or one byte each as `int8` or `fp8`."""
    kv: KvConfig = KvConfig()
    """Long contexts: which keys are attended and kept, and what goes to disk."""
    exact: bool = False
    """Tokens and log-probs have the same bits in any batch, chunking and state of the cache; with
    `train.exact`, the trainer's log-probs have them too. Needs bfloat16 and the native kernels."""
    speculation: Speculation = Speculation.OFF
    """Who guesses tokens that one forward checks together: `off`, `lookup` (the text itself),
    `draft` (a smaller model) or `self` (the first layers). What is sampled stays the same; guesses
    are made only where they pay."""
    draft_tokens: Annotated[int, Field(gt=0, le=64)] = 8
    """Most guesses per sequence and step."""
    draft_model: str = ""
    """The smaller model, as in `model.source`; needs the same tokenizer."""
    draft_layers: Count = 0
    """Layers that `self` guesses with; 0 takes a quarter."""
    draft_max_lag: Count | None = None
    """Weight versions that the smaller model may be behind before it stands aside; unset: any, as
    guesses that are seldom right are not made. A model whose weights are all the policy's own, such
    as its first layers, gets each publication; others keep the weights they were loaded with."""
    draft_sampling: DraftSampling = DraftSampling.COUPLED
    """How a model guesses above temperature 0: `coupled` draws with the request's own random
    numbers (its tokens are those of no speculation), `rejection` with others (only the distribution
    is)."""
    canary_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Allowed difference between engine and trainer on the probe, nats; 0 demands equal bits."""


class EvaluateSection(Config):
    """The held-out evaluation before, between and after."""

    tasks_per_domain: Count = 64
    """Held-out tasks of each domain; 0 turns evaluation off."""
    first_task: Count = 0
    """Index of the first of them: look at results on some, then report others."""
    max_concurrent: Positive = 64
    """Episodes in flight at once."""


class RunConfig(Config):
    """A whole run."""

    run: RunSection = RunSection()
    """The run as a whole."""
    model: ModelSection = ModelSection()
    """The policy to start from."""
    domains: dict[str, DomainSection] = Field(default_factory=dict)
    """The mix: at least one."""
    warmup: WarmupSection = WarmupSection()
    """Supervised warm-up."""
    rollout: RolloutSection = RolloutSection()
    """Collection of experience."""
    flow: FlowSection = FlowSection()
    """Load, breakers and retries."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where model-written code runs."""
    engine: EngineSection = EngineSection()
    """Inference."""
    train: TrainConfig = TrainConfig()
    """Optimisation."""
    schedule: DomainScheduleConfig = DomainScheduleConfig()
    """Which domain next."""
    quality: AuditConfig = AuditConfig()
    """The gate before training."""
    evaluate: EvaluateSection = EvaluateSection()
    """Held-out evaluation."""

    renamed: ClassVar[dict[str, str]] = {"rollout.max_boxes": "sandbox.max_boxes"}
