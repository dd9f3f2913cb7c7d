"""Which keys a token attends and which are kept: sizes of the choice, in tokens and pages."""

from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.core.vocabulary import KvPolicyKind

_EVICTING = (KvPolicyKind.WINDOW, KvPolicyKind.H2O, KvPolicyKind.SNAPKV)

OBSERVED_TOKENS = 32
"""Last tokens of a prompt that SnapKV watches, as in its paper; H2O watches as many per chunk."""
TAIL_TOKENS = 64
"""Last tokens of a prompt that select pages as decoded ones do: most questions fit."""


class KvPolicy(NamedTuple):
    """One choice for all requests of an engine.

    Keys keep the rotation of their own position, also where others between were given back.
    """

    kind: KvPolicyKind = KvPolicyKind.FULL
    """What is attended and kept."""
    budget_tokens: int = 4096
    """Keys that a token attends or that a request keeps, whole pages; no meaning for `full`."""
    sink_tokens: int = 16
    """First tokens that always stay."""
    recent_tokens: int = 256
    """Last tokens that always stay, for `quest`, `h2o` and `snapkv`."""
    prefill_window: int = 0
    """Under `quest`, tokens of a prompt see this many back and the sinks; 0 for all."""
    report_gap: bool = False
    """Compute the log-prob of every sampled token under full attention too, once per request."""

    @property
    def is_sparse(self) -> bool:
        """Whether log-probs may differ from those of full attention."""
        return self.kind is not KvPolicyKind.FULL

    @property
    def evicts(self) -> bool:
        """Whether pages of a running request are given back."""
        return self.kind in _EVICTING

    @property
    def weighs(self) -> bool:
        """Whether the attention that falls on each page is measured."""
        return self.kind in (KvPolicyKind.H2O, KvPolicyKind.SNAPKV)

    @property
    def window(self) -> int | None:
        """Tokens that are seen back, for `window`."""
        is_window = self.kind is KvPolicyKind.WINDOW
        return self.budget_tokens - self.sink_tokens if is_window else None

    def budget_pages(self, page_size: int) -> int:
        """Pages that are attended or kept."""
        return self.budget_tokens // page_size

    def sink_pages(self, page_size: int) -> int:
        """Pages that hold a sink."""
        return -(-self.sink_tokens // page_size)

    def recent_pages(self, page_size: int) -> int:
        """Last whole pages that always stay."""
        return -(-self.recent_tokens // page_size)

    def most_pages(self, num_prompt: int, num_tokens: int, chunk_tokens: int, size: int) -> int:
        """Most pages that a request ever holds at once.

        Args:
            num_prompt: tokens of its prompt.
            num_tokens: tokens of prompt and continuation.
            chunk_tokens: most tokens of one step.
            size: tokens of a page.
        """
        total = -(-num_tokens // size)
        kept = self.budget_pages(size) + self.sink_pages(size) + -(-chunk_tokens // size) + 2
        if self.kind is KvPolicyKind.SNAPKV:
            decoded = -(-max(0, num_tokens - num_prompt) // size) + 1
            kept = max(-(-num_prompt // size), self.budget_pages(size) + decoded) + 1
        return min(total, kept) if self.evicts else total

    def check(self, page_size: int, sliding_window: int | None) -> None:
        """Refuse what contradicts itself or the model.

        Raises:
            UserError: naming the values.
        """
        if not self.is_sparse:
            return
        if sliding_window is not None:
            raise UserError(
                f"engine.kv.policy is {self.kind}, but the model has a sliding window itself.",
                fix=f"set engine.kv.policy to {KvPolicyKind.FULL}.",
            )
        pages = self.sink_pages(page_size) + self.recent_pages(page_size)
        if self.kind is KvPolicyKind.WINDOW:
            pages = self.sink_pages(page_size)
        least = (pages + 1) * page_size
        if self.budget_tokens < least:
            raise UserError(
                f"engine.kv.budget_tokens is {self.budget_tokens}; with the tokens that always "
                f"stay, {self.kind} needs {least}.",
                fix=f"raise it to {least}, or lower engine.kv.recent_tokens.",
            )
        if self.prefill_window and self.kind is not KvPolicyKind.QUEST:
            raise UserError(
                f"engine.kv.prefill_window has no meaning for engine.kv.policy = {self.kind}.",
                fix="leave it at 0.",
            )
