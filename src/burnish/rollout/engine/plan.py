"""What the next step does, decided from counts alone. Pure: returns decisions, touches nothing.

Order of service is age. Decodes come before prompt chunks (they are cheap and free pages sooner);
when pages run out the newest running sequence gives its pages back and starts over later.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple


class Load(NamedTuple):
    """What a running sequence needs."""

    num_pending: int
    """Tokens not computed yet, at least 1."""
    num_computed: int
    """Tokens in the cache."""
    num_pages: int
    """Pages held."""


class Chunk(NamedTuple):
    """Work for one sequence in one step."""

    position: int
    """Index into the list of running sequences."""
    num_tokens: int
    """Tokens to compute: 1 is a decode or the end of a prompt."""
    num_new_pages: int
    """Pages to take first."""


class StepPlan(NamedTuple):
    """One step."""

    chunks: tuple[Chunk, ...]
    """Single tokens first, then longer chunks; oldest first within both."""
    is_short: bool
    """Pages ran out for some sequence: preempt the newest and plan again."""


def may_admit(
    *, new_pages: int, locked_pages: int, room: int, num_running: int, max_running: int
) -> bool:
    """Whether a waiting sequence can start now.

    Args:
        new_pages: pages that it must take for all its known tokens.
        locked_pages: idle pages that it would hold, and so remove from the room.
        room: free and idle pages.
        num_running: sequences already running. One page is left for each, so that a newcomer does
            not force a preemption in the very next steps.
        max_running: limit on running sequences.
    """
    return num_running < max_running and new_pages + locked_pages + num_running <= room


def plan_step(running: Seq[Load], *, room: int, budget_tokens: int, page_size: int) -> StepPlan:
    """Decide one step.

    Args:
        running: all running sequences, oldest first.
        room: free and idle pages.
        budget_tokens: most tokens in one step.
        page_size: tokens per page.
    """
    singles: list[Chunk] = []
    longer: list[Chunk] = []
    for i in sorted(range(len(running)), key=lambda i: running[i].num_pending > 1):
        load = running[i]
        num_tokens = min(load.num_pending, budget_tokens)
        if num_tokens == 0:
            break
        new = max(0, -(-(load.num_computed + num_tokens) // page_size) - load.num_pages)
        if new > room:
            return StepPlan((*singles, *longer), is_short=True)
        room -= new
        budget_tokens -= num_tokens
        (singles if num_tokens == 1 else longer).append(Chunk(i, num_tokens, new))
    return StepPlan((*singles, *longer), is_short=False)
