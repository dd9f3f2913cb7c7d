"""The optional supervised warm-up: reference solutions of training items, mixed over domains.

It teaches the form of an answer, which a small model cannot find by sampling; its gain is reported
apart from that of reinforcement learning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random

from burnish.core.protocols import Environment, EpisodeContext, Renderer
from burnish.core.seeds import derive_seed
from burnish.core.vocabulary import Split
from burnish.rollout.agent.reference import ReferenceExample, play_reference

# Reference episodes that need a box run side by side, but not more than a pool would grant anyway.
_CONCURRENT = 8


async def reference_examples(
    environments: Mapping[str, Environment],
    *,
    num_per_domain: int,
    renderer: Renderer,
    context: Callable[[int], EpisodeContext],
    root_seed: int,
) -> tuple[ReferenceExample, ...]:
    """The first `num_per_domain` training items of every domain, solved by their reference."""
    gate = asyncio.Semaphore(_CONCURRENT)

    async def one(environment: Environment, index: int) -> ReferenceExample:
        async with gate:
            task = environment.task(Split.TRAIN, index)
            seed = derive_seed(root_seed, "reference", environment.name, index)
            return await play_reference(environment, task, renderer, context(seed))

    wanted = [(e, i) for e in environments.values() for i in range(num_per_domain)]
    return tuple(await asyncio.gather(*(one(environment, index) for environment, index in wanted)))


def shuffled_batches(
    examples: Sequence[ReferenceExample], *, batch_examples: int, epochs: int, seed: int
) -> list[list[ReferenceExample]]:
    """Batches over `epochs` passes, each pass in its own order; a short last batch is kept."""
    batches = []
    for epoch in range(epochs):
        order = list(examples)
        Random(derive_seed(seed, "warmup", epoch)).shuffle(order)
        starts = range(0, len(order), batch_examples)
        batches += [order[start : start + batch_examples] for start in starts]
    return batches
