"""Finds stop strings in what is being sampled, wherever tokens cut them or their characters."""

from collections.abc import Callable, Sequence

from burnish.core.errors import boundary
from burnish.core.vocabulary import FailureKind

Decode = Callable[[Sequence[int]], str]
"""Tokens to text; bytes that are not yet a character become U+FFFD."""

# What a decoder writes for bytes that no character is made of, or not yet.
_UNFINISHED = "\ufffd"
# A character has at most four bytes: more unfinished tokens than this are rubbish, not a beginning.
_MOST_UNFINISHED = 4


class StopText:
    """The text of one request, as far as a stop string may still begin in it.

    Tokens are decoded in windows; the window before gives the decoder its context. A window is
    settled when its text does not end within a character, or has so many tokens that the character
    has begun in it. Whatever the context leaves unfinished is text of the next window, and no part
    of what was kept before.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        """Look for any of `stops`, none of them empty."""
        assert all(stops)
        self._stops, self._decode = tuple(stops), decode
        self._keep = max(map(len, stops)) - 1
        self._tail = ""
        self._num_searched = 0
        self._context: list[int] = []
        self._new: list[int] = []

    def feed(self, token: int) -> bool:
        """Take the next sampled token; whether a stop string is completed by it.

        Raises:
            ClassifiedFailure: if the decoder raises.
        """
        self._new.append(token)
        with boundary(FailureKind.INFRA, "rollout.engine: decoding for stop strings"):
            before = self._decode(self._context).rstrip(_UNFINISHED)
            text = self._decode([*self._context, *self._new])
        added = text[len(before) :]
        seen = self._tail + added
        # Only what ends behind the part that was searched before is new.
        found = any(
            seen.find(stop, max(0, self._num_searched - len(stop) + 1)) >= 0 for stop in self._stops
        )
        self._num_searched = len(seen.rstrip(_UNFINISHED))
        if not added.endswith(_UNFINISHED) or len(self._new) > _MOST_UNFINISHED:
            seen = seen.rstrip(_UNFINISHED)
            self._tail = seen[-self._keep :] if self._keep else ""
            self._num_searched = len(self._tail)
            self._context, self._new = self._new, []
        return found
