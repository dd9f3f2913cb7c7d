"""What one step computes: which tokens of which sequences, over which pages."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The tokens of one sequence in this step."""

    pages: Seq[int]
    """Pages of the sequence, enough for `end` tokens; -1 where one was given up: nothing there
    is attended, and nothing may be written there."""
    start: int
    """Position of the first token computed now."""
    end: int
    """One past the position of the last."""
    chosen: Seq[int] | None = None
    """Indices into `pages` that are attended, ascending; None for all. The pages from `start` on
    are always among them."""


class Visibility(NamedTuple):
    """Which earlier tokens a token sees."""

    window: int | None = None
    """Tokens back, itself included; None for all."""
    sinks: int = 0
    """First tokens that stay visible beyond the window."""


class View(NamedTuple):
    """The pages that a span attends, put side by side."""

    pages: list[int]
    """Pages, -1 for none."""
    start: int
    """Place of the first token computed now among the keys of `pages`."""


class Choice(NamedTuple):
    """The pages that each key/value head attends for one span, in the order of their keys."""

    pages_KN: Tensor
    """Pages, int32; the span's own last."""
    start: int
    """Place of the first token computed now among the keys of those pages."""


class Step:
    """Spans in the order of their tokens in the flat batch."""

    def __init__(self, spans: Seq[Span], page_size: int, visibility: Visibility) -> None:
        """Lay out a step; spans of one token each come first."""
        self.spans, self.page_size, self.visibility = spans, page_size, visibility
        self.planned: object = None
        """What the cache has worked out for all layers."""
        self.groups: object = None
        """As `planned`, for the tier around it."""
        self.counts = [span.end - span.start for span in spans]
        self.num_singles = next((i for i, n in enumerate(self.counts) if n > 1), len(spans))
        self.views = [_view(span, page_size) for span in spans]
        self.slots_T = torch.tensor(
            [
                s.pages[p // page_size] * page_size + p % page_size
                for s in spans
                for p in range(s.start, s.end)
            ]
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the flat batch."""
        return len(self.slots_T)

    def pages_of_views(self) -> tuple[Tensor, Tensor]:
        """Pages of all views one after the other, int32, and where each starts, int64 [N + 1]."""
        pages = torch.tensor([page for view in self.views for page in view.pages])
        starts = torch.tensor([0, *(len(view.pages) for view in self.views)]).cumsum(0)
        return pages.int(), starts


def _view(span: Span, page_size: int) -> View:
    first, last = span.start // page_size, (span.end - 1) // page_size
    assert all(page >= 0 for page in span.pages[first : last + 1]), "a page to write was given up"
    if span.chosen is None:
        return View(list(span.pages[: last + 1]), span.start)
    past = [i for i in span.chosen if i < first]
    assert past == sorted(set(past)), "chosen pages ascend"
    pages = [span.pages[i] for i in past] + list(span.pages[first : last + 1])
    return View(pages, len(past) * page_size + span.start % page_size)
