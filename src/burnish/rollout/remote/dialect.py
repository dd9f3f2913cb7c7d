"""What each kind of server must be able to say, in records that all of them share."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest
from burnish.core.vocabulary import (
    EngineFeature,
    GrammarKind,
    InFlight,
    SleepLevel,
    StopReason,
)
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.wire import Wire

UNKNOWN_LABEL = "burnish-unknown"
"""Of weights whose loading failed halfway."""
TopLogprobs = tuple[tuple[int, float], ...]


class LogprobScope(StrEnum):
    """Which distribution a server's log-probs belong to."""

    RAW = "raw"
    """The model's own, temperature 1, before any truncation."""
    TEMPERED = "tempered"
    """After the temperature, before top-p, top-k and min-p."""
    SAMPLED = "sampled"
    """The one that was drawn from."""


class Span(NamedTuple):
    """Tokens `[start, end)` of an answer were sampled by the weights labelled `label`."""

    label: str
    start: int
    end: int


class End(NamedTuple):
    """What comes with the last tokens of an answer."""

    reason: StopReason
    """Why it ended."""
    spans: tuple[Span, ...] = ()
    """Who sampled what, if the server keeps account; over all tokens of this answer."""
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values were reused; None if the server does not say."""


class Chunk(NamedTuple):
    """Some more tokens of an answer."""

    token_ids: tuple[int, ...]
    """New ones."""
    logprobs: tuple[float, ...]
    """One for each."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One for each, if asked for."""
    end: End | None = None
    """Set on the last chunk."""
    label: str | None = None
    """Of the weights that sampled these, where the server says so at once."""


class ServerFacts(NamedTuple):
    """What a server says of itself when a client connects."""

    model: str
    """Name under which it serves the model."""
    features: frozenset[EngineFeature]
    """What it can do through its dialect."""
    scope: LogprobScope
    """Which log-probs it reports; measured where the server does not say."""
    max_context_tokens: int | None
    """Prompt and sampled tokens together, if it says."""
    max_top_logprobs: int
    """Most alternatives per token."""
    dtype: str | None
    """Of its weights, if it says: `bfloat16`, `float32`."""
    label: str | None
    """Of the weights that it serves, if it keeps one."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves."""
    max_adapter_rank: int | None = None
    """Largest rank of an adapter, if it says."""
    needs_plain_adapter: bool = False
    """Whether requests without an adapter are only right through one that adds nothing."""
    grammars: frozenset[GrammarKind] = frozenset()
    """Languages of grammars that it reads."""


class Drafts(NamedTuple):
    """What a server guessed since it started."""

    drafted_tokens: int
    """Guesses that were checked."""
    accepted_tokens: int
    """Of these, those that were right."""


class ServerCounts(NamedTuple):
    """What a server says about itself; None what it does not say."""

    drafts: Drafts | None = None
    """What it guessed."""
    num_running: int | None = None
    """Requests in its batch."""
    num_waiting: int | None = None
    """Requests that wait for a place in it."""
    num_preemptions: int | None = None
    """Requests that had to give keys and values back, since it started."""
    used_page_ratio: float | None = None
    """Share of its cache that is in use, in [0, 1]."""


class Ask(NamedTuple):
    """One request, as it goes out."""

    request: GenerateRequest
    """Prompt and parameters."""
    model: str
    """Name of the model there."""
    salt: str
    """Prefixes are shared within one salt only: it names the weights."""
    adapter: str | None = None
    """Name of a LoRA adapter there."""


class Dialect(Protocol):
    """The language of one kind of server. Holds no state; each call gets the wire to use."""

    @property
    def name(self) -> str:
        """As in `engine.backend`."""
        ...

    async def inspect(self, wire: Wire, model: str | None) -> ServerFacts:
        """Ask what the server is and can do.

        Raises:
            UserError: it is of another kind, or was started without something that is needed.
        """
        ...

    async def is_healthy(self, wire: Wire, timeout_s: float) -> bool:
        """Whether it would take a request now."""
        ...

    async def counts(self, wire: Wire, timeout_s: float) -> ServerCounts:
        """What it says about itself."""
        ...

    async def label(self, wire: Wire, timeout_s: float) -> str | None:
        """Of the weights that it serves; None if it keeps none."""
        ...

    def generate(self, wire: Wire, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """Sample; closing the iterator hangs up, and so aborts."""
        ...

    async def score(
        self, wire: Wire, token_ids: Sequence[int], model: str, salt: str
    ) -> tuple[float, ...]:
        """Log-prob of each token given those before it; the first is 0.0."""
        ...

    async def update(self, wire: Wire, delivery: "Delivery", timeout_s: float) -> None:
        """Load weights, label them, forget what the old ones computed, and go on."""
        ...

    async def check_delivery(self, wire: Wire, delivery: "Delivery", dtype: str | None) -> None:
        """Compare what is served with what was sent, as far as the server lets one see.

        Raises:
            RemoteFailure: `not_delivered`.
        """
        ...

    async def adapters(self, wire: Wire, timeout_s: float) -> frozenset[str]:
        """Names of the LoRA adapters that it serves."""
        ...

    async def load_adapter(self, wire: Wire, name: str, folder: Path, timeout_s: float) -> None:
        """Load an adapter in PEFT's format; one of that name is replaced."""
        ...

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        """Forget an adapter; requests that run with it go on."""
        ...

    async def pause(self, wire: Wire) -> None:
        """Stand still; running requests stay."""
        ...

    async def resume(self, wire: Wire) -> None:
        """Go on."""
        ...

    async def sleep(self, wire: Wire, level: SleepLevel) -> None:
        """Give memory back; nothing may be running."""
        ...

    async def wake(self, wire: Wire, level: SleepLevel) -> None:
        """Take it again."""
        ...


class Delivery(NamedTuple):
    """One version of the weights on its way to the servers."""

    folder: Path
    """Holds `model.safetensors` in Hugging Face's layout, and `config.json`."""
    digest: str
    """Over all bytes of the weights: equal digests are equal weights."""
    tensor_digests: Mapping[str, str]
    """SHA-256 of the bytes of small tensors that no server cuts or fuses, by their name."""
    label: str
    """What the servers are to call it."""
    inflight: InFlight
    """What becomes of running requests."""


def adapter_names(url: str, models: Any) -> tuple[str, ...]:
    """Of `/v1/models`: adapters name the model that they belong to as their parent.

    Raises:
        RemoteFailure: `malformed`.
    """
    cards = field(url, models, "data", kind=list)
    return tuple(
        card["id"]
        for card in cards
        if isinstance(card, dict) and isinstance(card.get("id"), str) and card.get("parent")
    )


def model_names(url: str, models: Any) -> tuple[str, ...]:
    """Of `/v1/models`, without adapters.

    Raises:
        RemoteFailure: `malformed`.
    """
    adapters = adapter_names(url, models)
    cards = [card for card in field(url, models, "data", kind=list) if isinstance(card, dict)]
    return tuple(str(card.get("id")) for card in cards if card.get("id") not in adapters)


def lost_adapter(url: str, ask: Ask, error: UserError, sign: str) -> Exception:
    """What a refusal means that has `sign` in it where the server no longer knows the adapter."""
    if ask.adapter is None or sign not in error.what:
        return error
    what = f"it has lost the adapter {ask.adapter}"
    return RemoteFailure(RemoteProblem.OUTDATED, url, what)


def field(url: str, document: Any, *path: str | int, kind: type | tuple[type, ...]) -> Any:
    """A value inside of what a server sent.

    Raises:
        RemoteFailure: `malformed`: it is not there, or of another type.
    """
    value = document
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = None
            break
    wanted = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        where = ".".join(map(str, path))
        names = " or ".join(k.__name__ for k in wanted)
        what = f"{where} is {type(value).__name__}, not {names}"
        raise RemoteFailure(RemoteProblem.MALFORMED, url, what)
    return value


def checked_chunk(
    url: str, token_ids: Sequence[Any], logprobs: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids with one finite log-prob <= 0 each.

    Raises:
        RemoteFailure: `malformed`.
    """
    if len(token_ids) != len(logprobs):
        what = f"{len(token_ids)} tokens came with {len(logprobs)} log-probs"
        raise RemoteFailure(RemoteProblem.MALFORMED, url, what)
    for token, logprob in zip(token_ids, logprobs, strict=True):
        if type(token) is not int or token < 0:
            raise RemoteFailure(RemoteProblem.MALFORMED, url, f"{token!r:.40} is no token id")
        # Rounding may leave a certain token slightly above zero.
        if not isinstance(logprob, int | float) or not -1e30 < logprob < 1e-3:
            raise RemoteFailure(RemoteProblem.MALFORMED, url, f"{logprob!r:.40} is no log-prob")
    return tuple(token_ids), tuple(min(float(v), 0.0) for v in logprobs)


_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


def stop_reason(url: str, said: object) -> StopReason:
    """What a server's finish reason means here.

    Raises:
        RemoteFailure: `broken`: the server gave up on the request.
    """
    if isinstance(said, str) and said in _REASONS:
        return _REASONS[said]
    raise RemoteFailure(RemoteProblem.BROKEN, url, f"the request ended with {said!r:.60}")
