"""What the next step does, decided from counts alone. Pure: returns decisions, touches nothing.

Order of service is that of the queue. Decodes come before prompt chunks (they are cheap and free
pages sooner); a long prompt leaves half of the budget to those behind it. When pages run out the
last running sequence gives its pages back, to host memory if that is cheaper than computing them
again.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

# What a CPU core computes while it moves one byte to memory and back: about 150 GFLOP/s of bf16
# products over 8 GB/s. The choice it makes differs by a factor of hundreds, so this may be rough.
_FLOPS_PER_BYTE = 20.0


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
    """Single tokens first, then longer chunks; in order of service within both."""
    is_short: bool
    """Pages ran out for some sequence: preempt the last one and plan again."""


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
        running: all running sequences, in order of service.
        room: free and idle pages.
        budget_tokens: most tokens in one step.
        page_size: tokens per page.
    """
    singles: list[Chunk] = []
    longer: list[Chunk] = []
    decodes = [i for i, load in enumerate(running) if load.num_pending == 1]
    prompts = [i for i, load in enumerate(running) if load.num_pending > 1]
    left = budget_tokens - len(decodes)
    # The first prompt leaves half of the budget to those behind it, as far as they can use it.
    reserved = min(max(left, 0) // 2, sum(running[i].num_pending for i in prompts[1:]))
    for i in (*decodes, *prompts):
        load = running[i]
        kept = reserved if prompts and i == prompts[0] else 0
        num_tokens = min(load.num_pending, budget_tokens - kept)
        if num_tokens == 0:
            break
        new = max(0, -(-(load.num_computed + num_tokens) // page_size) - load.num_pages)
        if new > room:
            return StepPlan((*singles, *longer), is_short=True)
        room -= new
        budget_tokens -= num_tokens
        (singles if num_tokens == 1 else longer).append(Chunk(i, num_tokens, new))
    return StepPlan((*singles, *longer), is_short=False)


def may_swap(*, num_tokens: int, num_bytes: int, flops_per_token: float, room_bytes: int) -> bool:
    """Whether pages of a preempted sequence should go to host memory, not be computed again.

    Args:
        num_tokens: tokens that would have to be computed again.
        num_bytes: of the pages that would be moved, once out and once back.
        flops_per_token: of a forward.
        room_bytes: host memory left for such pages.
    """
    is_cheaper = 2.0 * num_bytes * _FLOPS_PER_BYTE < num_tokens * flops_per_token
    return num_bytes <= room_bytes and is_cheaper
