"""A request on its way through the engine: three numbers tell its state.

num_computed <= len(tokens)      keys and values up to here are in the cache
num_prompt                       where sampling began
len(tokens) - num_computed       1 when it only decodes; more while a prompt is being read
"""

from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import StopReason


class Sequence:
    """Mutable state of one request; owned by the engine's thread."""

    __slots__ = (
        "cached_tokens",
        "indexable",
        "logprobs",
        "max_length",
        "node",
        "num_computed",
        "num_indexed_pages",
        "num_prompt",
        "pages",
        "request",
        "seed_key",
        "stops",
        "tokens",
        "weight_versions",
    )

    def __init__(self, request: GenerateRequest, max_length: int, seed_key: int) -> None:
        """Nothing computed, no pages. `max_length` bounds prompt plus sampled tokens."""
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.max_length = max_length
        self.seed_key = seed_key
        self.stops = frozenset(request.params.stop_token_ids)
        self.logprobs: list[float] = []
        self.weight_versions: list[int] = []
        self.pages: list[int] = []
        self.num_computed = 0
        self.num_indexed_pages = 0
        self.node = 0
        self.indexable = True
        self.cached_tokens = 0

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.tokens) - self.num_computed

    def append(self, token: int, logprob: float, version: int) -> StopReason | None:
        """Take a sampled token; returns why the request ended, or None."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.weight_versions.append(version)
        if token in self.stops:
            return StopReason.STOP
        return StopReason.LENGTH if len(self.tokens) >= self.max_length else None

    def rewind(self) -> None:
        """Forget the cache (its pages were taken away), keep every token and log-prob."""
        self.pages, self.num_computed, self.num_indexed_pages, self.node = [], 0, 0, 0
        self.indexable = True

    def result(self, reason: StopReason) -> Generation:
        """What the caller gets."""
        return Generation(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.weight_versions),
            stop_reason=reason,
            cached_tokens=self.cached_tokens,
        )
