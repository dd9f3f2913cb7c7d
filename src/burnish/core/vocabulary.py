"""Closed vocabularies. One sentence per value; nothing outside this file invents another."""

from enum import StrEnum


class Split(StrEnum):
    """Which pool of items a task comes from. The pools of one environment never share an item."""

    TRAIN = "train"
    """Items that may be trained on."""
    HELD_OUT = "held_out"
    """Items that only evaluation may see."""


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was sampled or a stop string reached; its tokens are the last ones."""
    LENGTH = "length"
    """The token budget or the context ran out."""
    ABORTED = "aborted"
    """The request was cancelled from outside; its tokens must not be trained on."""


class InFlight(StrEnum):
    """What becomes of running requests when the weights change."""

    KEEP = "keep"
    """They go on over the keys and values that the old weights wrote."""
    RECOMPUTE = "recompute"
    """They keep their tokens; keys and values are computed again under the new weights."""
    ABORT = "abort"
    """They end at once as `aborted`, with the tokens sampled so far."""


class SleepLevel(StrEnum):
    """What a sleeping engine gives back to the machine."""

    CACHE = "cache"
    """Keys and values; the weights stay."""
    WEIGHTS = "weights"
    """Keys, values and weights: waking needs weights again, proven to be those served before."""


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema; the text is a JSON document that satisfies it."""
    REGEX = "regex"
    """A regular expression that the whole text matches."""
    LARK = "lark"
    """A context-free grammar in Lark's notation."""


class EngineFeature(StrEnum):
    """What an engine may or may not be able to do."""

    STREAM = "stream"
    """Tokens are delivered as they are sampled."""
    STOP_STRINGS = "stop_strings"
    """Sampling can end at a text."""
    TOP_K = "top_k"
    """Sampling from the k likeliest tokens."""
    MIN_P = "min_p"
    """Sampling above a share of the likeliest token's probability."""
    MIN_TOKENS = "min_tokens"
    """Stops are ignored before a number of tokens."""
    SAMPLED_LOGPROBS = "sampled_logprobs"
    """Log-probs are those of the distribution that was sampled, truncation included."""
    TOP_LOGPROBS = "top_logprobs"
    """The likeliest alternatives of every token are reported."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probs of the prompt are reported."""
    SCORE = "score"
    """Given tokens can be scored."""
    SEEDS = "seeds"
    """The same seed gives the same tokens."""
    PRIORITIES = "priorities"
    """More urgent requests are served first."""
    SESSIONS = "sessions"
    """Continuing turns are served before new episodes."""
    PREFIX_REUSE = "prefix_reuse"
    """Keys and values of known prefixes are reused."""
    UPDATE_WEIGHTS = "update_weights"
    """Weights change without a restart."""
    TOKEN_VERSIONS = "token_versions"
    """Every token carries the version of the weights that made it."""
    INFLIGHT_KEEP = "inflight_keep"
    """Running requests can survive an update over their old keys and values."""
    INFLIGHT_RECOMPUTE = "inflight_recompute"
    """Running requests can survive an update with keys and values computed again."""
    INFLIGHT_ABORT = "inflight_abort"
    """Running requests can be ended by an update."""
    PAUSE = "pause"
    """Sampling can stand still and go on."""
    SLEEP = "sleep"
    """Memory can be given back and taken again."""
    ADAPTERS = "adapters"
    """Requests can name a LoRA adapter."""
    LOAD_ADAPTERS = "load_adapters"
    """LoRA adapters can be loaded and removed without a restart."""
    GRAMMAR = "grammar"
    """Output can be held to a grammar, of the kinds that the engine lists."""
    UNMASKED_LOGPROBS = "unmasked_logprobs"
    """Under a grammar, log-probs before its mask are reported as well."""
    SPECULATION = "speculation"
    """Several tokens can come from one forward, with the same distribution."""
    EXACT = "exact"
    """Log-probs equal the trainer's bit by bit, whatever else is in the batch."""


class Speculation(StrEnum):
    """Who guesses tokens that one forward then checks together. None changes what is sampled."""

    OFF = "off"
    """Nobody."""
    LOOKUP = "lookup"
    """The text itself: what followed the same tokens earlier."""
    DRAFT = "draft"
    """A second, smaller model."""
    SELF = "self"
    """The first layers of the same model."""


class DraftSampling(StrEnum):
    """How a drafting model draws where the request is not greedy."""

    COUPLED = "coupled"
    """With the request's own random numbers: its tokens are those of no speculation."""
    REJECTION = "rejection"
    """With numbers of its own, by rejection sampling: the distribution is that of no speculation,
    a seed's tokens are others."""


class NoDraft(StrEnum):
    """Why nothing was guessed for a sequence in a step."""

    NO_MATCH = "no_match"
    """The text holds nothing to continue from."""
    COST = "cost"
    """The guesses that would be right cost more than they save."""
    ROOM = "room"
    """No pages or no budget are left in this step."""
    STALE = "stale"
    """The drafting model has older weights than allowed."""
    REFUSED = "refused"
    """The grammar takes nothing of the guess."""
    ENDING = "ending"
    """Only one token is left to sample."""
    READING = "reading"
    """The drafting model is still reading the prompt."""
    CONTEXT = "context"
    """The text is longer than the drafting model can read."""


class Outcome(StrEnum):
    """What became of an episode, beside its score."""

    SCORED = "scored"
    """The verifier gave a score; `score` is a number."""
    INVALID_INFRA = "invalid_infra"
    """Infrastructure, sandbox or verifier failed; `score` is None and nothing may be learned."""
    INVALID_ENVIRONMENT = "invalid_environment"
    """The environment or its data is broken; `score` is None and the environment is to blame."""


class FailureKind(StrEnum):
    """Who is to blame for a failure. One taxonomy from the sandbox to the reported number."""

    INFRA = "infra"
    """The machine or the framework: out of memory, a dead process, a full disk."""
    SANDBOX = "sandbox"
    """The isolation layer could not start, run or stop a box."""
    ENVIRONMENT = "environment"
    """Code of an environment raised."""
    VERIFIER = "verifier"
    """The scorer raised, timed out or returned something that is not a verdict."""
    DATA = "data"
    """A task's data is missing or malformed."""
    POLICY = "policy"
    """The model did it: over-long answer, malformed call, a limit hit. Never trips a breaker."""


class DropReason(StrEnum):
    """Why a dispatched rollout was not trained. Every drop has exactly one."""

    ZERO_VARIANCE = "zero_variance"
    """All scores in the group were equal: the advantage is zero everywhere."""
    STALE = "stale"
    """Older than the admitted lag when its turn came."""
    INVALID = "invalid"
    """Its outcome is not `scored`."""
    QUARANTINED = "quarantined"
    """Its environment was quarantined after dispatch."""
    SURPLUS = "surplus"
    """Finished or in flight when the run had already reached its last step."""


class CreditSource(StrEnum):
    """Where a part of the reward comes from."""

    OUTCOME = "outcome"
    """Is the final result right?"""
    PROCESS = "process"
    """Were the steps toward it right?"""
    COMPLIANCE = "compliance"
    """Was the demanded form kept?"""


class KvPolicyKind(StrEnum):
    """Which keys and values a token attends, and which are kept."""

    FULL = "full"
    """All."""
    WINDOW = "window"
    """The first tokens and the last ones; pages between are given back (StreamingLLM)."""
    QUEST = "quest"
    """All are kept; each decoded token attends the pages that may matter most to it (Quest)."""
    H2O = "h2o"
    """Pages with the least attention so far are given back, from the first token on (H2O)."""
    SNAPKV = "snapkv"
    """As `h2o`, once, at the end of the prompt, by what its last tokens attend (SnapKV)."""


class KvDtype(StrEnum):
    """Numbers of the key/value cache."""

    MODEL = "model"
    """Those of the model."""
    INT8 = "int8"
    """Eight bits with a scale per token and head: half the bytes of bfloat16."""
    FP8 = "fp8"
    """e4m3 with a scale per token and head: storage only, products are in the model's numbers."""
