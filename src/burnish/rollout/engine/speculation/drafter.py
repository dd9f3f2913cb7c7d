"""The interface of whoever guesses."""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from torch import Tensor

from burnish.core.vocabulary import NoDraft
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.pages import PagePool
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.weights import ServedModel


class Target(NamedTuple):
    """What checks the guesses."""

    model: ServedModel
    """Its weights."""
    cache: KvCache
    """Its keys and values."""
    pool: PagePool
    """Who holds which page."""


class Ask(NamedTuple):
    """A wish."""

    sequence: Sequence
    """All but its last token are in the target's cache; holds pages for `num_tokens` more."""
    num_tokens: int
    """Guesses wanted, at least 1."""


class Draft(NamedTuple):
    """Guesses for one sequence."""

    tokens: tuple[int, ...]
    """In order; may be fewer than asked for."""
    chances: Seq[Tensor] | None = None
    """The distribution [V] that each was drawn from, fp64; None if the draft is certain: a token is
    then accepted where the target draws the same."""

    def cut(self, num_tokens: int) -> "Draft":
        """The first tokens only."""
        return Draft(self.tokens[:num_tokens], self.chances and self.chances[:num_tokens])


class Drafter(Protocol):
    """Guesses tokens. What it guesses changes how fast tokens come, never which.

    It keeps what it knows of a sequence by itself, and finds out when pages have changed hands.
    """

    @property
    def relative_cost(self) -> float:
        """Of one forward, as a share of the target's."""
        ...

    def unable(self, version: int) -> NoDraft | None:
        """Why it cannot guess at all for weights of this version; None if it can."""
        ...

    def limit(self, sequence: Sequence, most: int) -> int:
        """How many tokens it could guess now, up to `most`."""
        ...

    @property
    def no_limit(self) -> NoDraft:
        """Why, where `limit` is 0."""
        ...

    def draft(self, asks: Seq[Ask], target: Target) -> list[Draft]:
        """Guess for all at once."""
        ...

    def checked(self, sequence: Sequence, num_accepted: int) -> None:
        """So many of the tokens last drafted for it have been accepted."""
        ...

    def release(self) -> None:
        """Give memory back; it is taken again when needed."""
        ...
