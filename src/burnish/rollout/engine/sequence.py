"""A request on its way through the engine: three numbers tell its state.

num_computed <= len(tokens)      keys and values up to here are in the cache
num_prompt                       where sampling began
len(tokens) - num_computed       1 when it only decodes; more while a prompt is being read
"""

from typing import Any, NamedTuple

from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import StopReason
from burnish.rollout.engine.radix import Node
from burnish.rollout.engine.stops import StopText


class Saved(NamedTuple):
    """Keys and values of a preempted sequence in host memory."""

    content: Any
    """What the cache's `save_pages` gave: every page after those still held."""
    num_pages: int
    """How many."""


class Sequence:
    """Mutable state of one request; owned by the engine's thread."""

    __slots__ = (
        "cached_tokens",
        "dense_logprobs",
        "key",
        "logprobs",
        "match_from",
        "max_length",
        "node",
        "num_computed",
        "num_indexed_pages",
        "num_prompt",
        "order",
        "page_mass",
        "pages",
        "prompt_logprobs",
        "request",
        "saved",
        "seed_key",
        "stop_text",
        "stops",
        "tokens",
        "top_logprobs",
        "weight_versions",
    )

    def __init__(
        self,
        request: GenerateRequest,
        max_length: int,
        seed_key: int,
        stop_text: StopText | None = None,
    ) -> None:
        """Nothing computed, no pages.

        Args:
            request: what is asked.
            max_length: bound of prompt plus sampled tokens.
            seed_key: of its random numbers.
            stop_text: finds the request's stop strings, if it has any.
        """
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.max_length = max_length
        self.seed_key = seed_key
        self.stops = frozenset(request.params.stop_token_ids)
        self.stop_text = stop_text
        # Place in the order of service (lower first), and arrival number to break ties.
        self.key, self.order = 0, 0
        self.logprobs: list[float] = []
        self.weight_versions: list[int] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.prompt_logprobs: list[float] = []
        self.cached_tokens = 0
        self.dense_logprobs: list[float] = []
        # By index; -1 where one was given back while the request runs on.
        self.pages: list[int] = []
        # Attention that has fallen on each page, for policies that weigh them.
        self.page_mass: list[float] = []
        self.saved: Saved | None = None
        self.num_computed = self.num_indexed_pages = 0
        self.node: Node | None = None
        self.match_from: Node | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Place in the order of service, lower first; no two are equal."""
        return self.key, self.order

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.tokens) - self.num_computed

    @property
    def held_pages(self) -> list[int]:
        """Pages that it holds, in order."""
        return [page for page in self.pages if page >= 0]

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.logprobs)

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probs of the prompt are still to be computed."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt

    @property
    def may_stop(self) -> bool:
        """Whether the next token may end the request by itself."""
        return self.num_sampled >= self.request.params.min_tokens

    def append(
        self, token: int, logprob: float, version: int, top: tuple[tuple[int, float], ...] = ()
    ) -> StopReason | None:
        """Take a sampled token; returns why the request ended, or None.

        Raises:
            ClassifiedFailure: if the tokens cannot be decoded to look for a stop string.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.weight_versions.append(version)
        if self.request.params.num_top_logprobs:
            self.top_logprobs.append(top)
        found = self.stop_text is not None and self.stop_text.feed(token)
        if token in self.stops or (found and self.may_stop):
            return StopReason.STOP
        return StopReason.LENGTH if len(self.tokens) >= self.max_length else None

    def rewind(self) -> None:
        """Forget the cache (its pages were taken away), keep every token and log-prob."""
        self.pages, self.saved, self.page_mass = [], None, []
        self.num_computed = self.num_indexed_pages = 0
        self.node = self.match_from = None

    def result(self, reason: StopReason) -> Generation:
        """What the caller gets."""
        return Generation(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.weight_versions),
            stop_reason=reason,
            cached_tokens=self.cached_tokens,
            top_logprobs=tuple(self.top_logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            dense_logprobs=tuple(self.dense_logprobs),
        )
