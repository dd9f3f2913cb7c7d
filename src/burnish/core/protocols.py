"""The seams between parts. Implementations live in their own layers; each has a contract suite."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from burnish.core.engines import EngineCapabilities
from burnish.core.records import (
    GenerateRequest,
    Generation,
    GenerationDelta,
    Message,
    Task,
    ToolSpec,
    Verdict,
)
from burnish.core.vocabulary import InFlight, SleepLevel, Split

if TYPE_CHECKING:
    from burnish.core.boxes import SandboxPool


class EpisodeContext(NamedTuple):
    """What an environment may use while it runs an episode."""

    sandboxes: SandboxPool
    """Where model-written code runs."""
    seed: int
    """For any randomness of the environment."""


class Episode(Protocol):
    """One task being worked on."""

    async def act(self, message: Message) -> tuple[Message, ...] | None:
        """Take the policy's turn; return messages for the next one, or None when it is over.

        Raises plain Python exceptions; the caller classifies them as `environment` failures.
        """
        ...

    async def verdict(self) -> Verdict:
        """Judge the episode. Called once, after the last `act`, also when a budget ran out."""
        ...

    async def close(self) -> None:
        """Free boxes and files. Called exactly once, whatever happened."""
        ...


class Environment(Protocol):
    """A domain: turns an index into a task, a task into an episode, an episode into a verdict."""

    @property
    def name(self) -> str:
        """Domain name, `[a-z][a-z0-9_]*`."""
        ...

    @property
    def digest(self) -> str:
        """`sha256:...` over code and configuration: verdicts and quarantines bind to it."""
        ...

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Tools on offer; empty for single-turn domains."""
        ...

    @property
    def description(self) -> str:
        """One sentence for people."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """The item at `index` >= 0 of `split`. Pure: same arguments, same task, everywhere."""
        ...

    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        """Begin an episode."""
        ...

    def reference(self, task: Task) -> tuple[Message, ...]:
        """An oracle's assistant messages, one per turn, that reach the full score in order."""
        ...


class Renderer(Protocol):
    """Messages to tokens and back, through the model's own chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[int, ...]:
        """Tokens of the opening, up to and including the assistant's header."""
        ...

    def extend(self, replies: Sequence[Message], stopped: bool) -> tuple[int, ...]:
        """Tokens between one assistant turn and the next; `stopped` if a stop token was sampled."""
        ...

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant message that tokens stand for. Never raises for what was sampled."""
        ...

    def assistant(self, message: Message) -> tuple[int, ...]:
        """Tokens of a given assistant turn, its end included: references and oracle runs."""
        ...


class Engine(Protocol):
    """Turns prompts into tokens. Methods may be called from any thread and event loop.

    A method that the engine does not list in `capabilities` raises UserError.
    """

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation. Cancelling the caller aborts the request.

        Raises:
            UserError: if the request could never run.
            ClassifiedFailure: if it failed, or the engine is overloaded, broken or closed.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationDelta, None]:
        """Sample one continuation, token by token. Closing the iterator aborts the request.

        The last delta carries the whole `Generation`. Raises what `generate` raises.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """The canary's question: log-prob of each token given those before it, temperature 1.

        The first entry is 0.0.
        """
        ...

    async def update_weights(
        self, state: Mapping[str, Any], version: int, inflight: InFlight = InFlight.KEEP
    ) -> None:
        """Swap weights between two steps. Returns when the next token will come from `version`.

        `inflight` says what becomes of running requests. Also allowed while paused or asleep.
        """
        ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may use, sorted."""
        ...

    async def load_adapter(self, name: str, directory: Path, version: int | None = None) -> None:
        """Let requests name the LoRA adapter that PEFT saved in `directory`.

        A name that is known gets new weights, which answer every request made after this returns.
        Requests that run go on; each token carries the version of the adapter that sampled it, or
        the model's if that is newer. Without `version` it is the model's present one.

        Raises:
            UserError: it is not plain LoRA of this model, or the version not newer than its last.
        """
        ...

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that run go on to their end, or end as aborted.

        Raises:
            UserError: it is not known, or was not loaded here.
        """
        ...

    async def pause(self) -> None:
        """Stand still after the present step; requests are still accepted. Idempotent."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        ...

    async def sleep(self, level: SleepLevel = SleepLevel.CACHE) -> None:
        """Pause and give memory back. Running requests go on after `wake`, no token lost."""
        ...

    async def wake(self, state: Mapping[str, Any] | None = None) -> None:
        """Take memory again and go on; after SleepLevel.WEIGHTS `state` must be as served before.

        Raises:
            UserError: if weights are missing or are not those that were served; it sleeps on.
        """
        ...

    async def close(self) -> None:
        """Abort what is running and stop."""
        ...
