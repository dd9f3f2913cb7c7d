"""The records that travel between parts: tasks, messages, turns, rollouts, groups, verdicts.

All are immutable, keyword-only msgspec structs: one definition for memory, JSON and the store.
Token ids are plain ints; log-probabilities are natural logarithms (nats).
"""

from typing import Any, Literal

import msgspec

from burnish.core.vocabulary import (
    CreditSource,
    FailureKind,
    GrammarKind,
    Outcome,
    Split,
    StopReason,
)

Role = Literal["system", "user", "assistant", "tool"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: frozen, keyword-only, unknown fields refused."""


class ToolCall(Record, frozen=True, kw_only=True):
    """One call that the policy asked for."""

    name: str
    """Name of the tool; may be unknown to the environment."""
    arguments: dict[str, Any]
    """Decoded arguments."""


class ToolSpec(Record, frozen=True, kw_only=True):
    """A tool that an environment offers."""

    name: str
    """Unique within the environment."""
    description: str
    """One sentence for the model."""
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""


class Message(Record, frozen=True, kw_only=True):
    """One chat message."""

    role: Role
    """Who speaks."""
    content: str
    """Text, without tool-call markup."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Parsed calls; only on assistant messages."""
    malformed_tool_call: bool = False
    """True when the policy opened a tool call that could not be parsed."""


class Task(Record, frozen=True, kw_only=True):
    """An item of an environment: pure data, fixed by (environment digest, split, index)."""

    domain: str
    """Name of the environment."""
    split: Split
    """Pool that the item belongs to."""
    index: int
    """Position in the pool; the cluster key for statistics is (domain, index)."""
    prompt: tuple[Message, ...]
    """Opening messages."""
    payload: dict[str, Any]
    """What the verifier needs; never shown to the policy."""
    max_tokens: int
    """Budget of sampled tokens for the whole episode."""
    max_turns: int = 1
    """Budget of assistant turns."""


class Credit(Record, frozen=True, kw_only=True):
    """A typed part of the reward, as an environment gives it: by turn, not by token."""

    source: CreditSource
    """What kind of evidence it is."""
    value: float
    """In [0, 1]."""
    turn: int | None = None
    """Assistant turn that earned it (0-based); None means the whole episode."""
    note: str = ""
    """Evidence in one line."""


class CreditSpan(Record, frozen=True, kw_only=True):
    """A Credit mapped to tokens of the rollout."""

    source: CreditSource
    """What kind of evidence it is."""
    value: float
    """In [0, 1]."""
    weight: float
    """Share of this source in the score."""
    start: int
    """First token of the span, an index into `Rollout.token_ids`."""
    end: int
    """One past the last token."""


class Failure(Record, frozen=True, kw_only=True):
    """A classified failure."""

    kind: FailureKind
    """Who is to blame."""
    where: str
    """Component and operation, such as `envs.code_repair.verify`."""
    message: str
    """One line."""


class Verdict(Record, frozen=True, kw_only=True):
    """The judgement of one episode, computed outside the agent's reach."""

    outcome: Outcome
    """Whether there is a score at all."""
    score: float | None
    """Weighted sum of the credits in [0, 1]; None unless outcome is `scored`."""
    passed: bool | None
    """Whether the outcome credit is full: what pass rates count. None unless `scored`."""
    credits: tuple[Credit, ...] = ()
    """The parts."""
    failure: Failure | None = None
    """Set exactly when the outcome is not `scored`."""
    evidence: dict[str, Any] = {}
    """What a person needs to agree or disagree: expected, got, test output."""


class Grammar(Record, frozen=True, kw_only=True):
    """A language that the sampled text must belong to."""

    kind: GrammarKind
    """How `text` is to be read."""
    text: str
    """The schema, expression or grammar itself."""


class SamplingParams(Record, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass; log-probs are reported under the distribution actually sampled from."""
    max_tokens: int = 64
    """Budget for this request; 0 with `GenerateRequest.prompt_logprobs` only."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after any of these (the token is kept)."""
    seed: int = 0
    """Same seed, prompt, weights and batch give the same tokens."""
    top_k: int = 0
    """Only the k likeliest tokens are drawn from; 0 keeps all."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability are drawn from."""
    min_tokens: int = 0
    """No stop token can be sampled, and no stop string ends the text, before this many tokens."""
    stop: tuple[str, ...] = ()
    """Sampling ends when the text contains any of these (its tokens are kept)."""
    num_top_logprobs: int = 0
    """How many of the likeliest tokens are reported beside each sampled one."""
    grammar: Grammar | None = None
    """What the text must conform to."""


class GenerateRequest(Record, frozen=True, kw_only=True):
    """One continuation asked of an engine."""

    request_id: str
    """Unique; deterministic mode orders by it."""
    prompt_ids: tuple[int, ...]
    """All tokens so far."""
    params: SamplingParams
    """How to draw."""
    priority: int = 0
    """Higher is served first; waiting raises everyone's in time."""
    session_id: str | None = None
    """Names an episode: its later turns are served before others start."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine knows."""
    prompt_logprobs: bool = False
    """Whether to report the log-probs of the prompt's own tokens."""


class Generation(Record, frozen=True, kw_only=True):
    """What an engine answers."""

    request_id: str
    """Echo."""
    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each under the distribution it was drawn from."""
    weight_versions: tuple[int, ...]
    """Weight version that produced each token."""
    stop_reason: StopReason
    """Why it ended."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest (id, log-prob) of the distribution it was drawn from, best
    first; empty unless asked for."""
    prompt_logprobs: tuple[float, ...] = ()
    """Log-prob of each prompt token given those before it, temperature 1, the first 0.0; empty
    unless asked for."""
    unmasked_logprobs: tuple[float, ...] = ()
    """Log-prob of each token before the grammar's mask; empty without a grammar."""
    dense_logprobs: tuple[float, ...] = ()
    """Log-prob of each token with attention over every key, at the request's temperature; empty
    unless the engine attends fewer and reports what that costs."""
    queued_s: float = 0.0
    """From arrival to the first forward; 0.0 in deterministic mode."""
    first_token_s: float = 0.0
    """From arrival to the first sampled token; 0.0 in deterministic mode."""


class GenerationDelta(Record, frozen=True, kw_only=True):
    """What a stream delivers: the tokens since the last delta, and at the end the whole answer."""

    request_id: str
    """Echo."""
    token_ids: tuple[int, ...]
    """New tokens, never taken back."""
    logprobs: tuple[float, ...]
    """As in `Generation`."""
    weight_versions: tuple[int, ...]
    """As in `Generation`."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """As in `Generation`."""
    generation: Generation | None = None
    """The complete answer, on the last delta only."""


class Turn(Record, frozen=True, kw_only=True):
    """One assistant turn inside a rollout."""

    start: int
    """First sampled token, an index into `Rollout.token_ids`."""
    end: int
    """One past the last sampled token."""
    stop_reason: StopReason
    """Why the generation ended."""


class Rollout(Record, frozen=True, kw_only=True):
    """One episode, as tokens. After `num_prompt_tokens` all is sampled or environment text."""

    rollout_id: str
    """`{domain}/{index}/{sample}` within a run; stable over resume."""
    group_id: str
    """`{domain}/{index}`."""
    domain: str
    """Environment name."""
    environment_digest: str
    """Digest of the environment that judged it."""
    token_ids: tuple[int, ...]
    """Prompt, sampled and environment tokens in order, length L."""
    num_prompt_tokens: int
    """Length of the opening prompt."""
    sampled_mask: tuple[bool, ...]
    """True for sampled tokens, length L."""
    logprobs: tuple[float, ...]
    """Log-prob of sampled tokens, 0.0 elsewhere, length L."""
    weight_versions: tuple[int, ...]
    """Weight version of sampled tokens, -1 elsewhere, length L."""
    turns: tuple[Turn, ...]
    """Assistant turns."""
    messages: tuple[Message, ...]
    """The transcript as text."""
    verdict: Verdict
    """The judgement."""
    spans: tuple[CreditSpan, ...]
    """Credits mapped to tokens; empty unless scored."""
    seed: int
    """Root seed of the episode."""
    duration_s: float
    """Wall time of the episode; 0.0 in deterministic mode."""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.sampled_mask)

    @property
    def oldest_version(self) -> int:
        """Lowest weight version among the sampled tokens, -1 if nothing was sampled."""
        return min(
            (v for v, m in zip(self.weight_versions, self.sampled_mask, strict=True) if m),
            default=-1,
        )


class Group(Record, frozen=True, kw_only=True):
    """All samples of one task, judged."""

    group_id: str
    """`{domain}/{index}`."""
    domain: str
    """Environment name."""
    index: int
    """Index of the task in the training pool."""
    dispatched_version: int
    """Weight version when it was dispatched."""
    rollouts: tuple[Rollout, ...]
    """In sample order."""


class TrainSequence(Record, frozen=True, kw_only=True):
    """One sequence as the trainer sees it: per-token streams, blind to how credit came about."""

    token_ids: tuple[int, ...]
    """Length L."""
    loss_mask: tuple[bool, ...]
    """True where the token is a target of the loss, length L; index 0 is never True."""
    logprobs: tuple[float, ...]
    """Behaviour log-probs, 0.0 where not masked, length L."""
    advantages: tuple[float, ...]
    """Length L."""
    prefix_group: str
    """Sequences with the same value share their first `num_prefix_tokens` tokens exactly."""
    num_prefix_tokens: int
    """Length of the shared prefix."""
    domain: str
    """For metrics only."""
