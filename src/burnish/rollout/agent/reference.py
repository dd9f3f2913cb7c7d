"""Plays an environment's own reference solution, to make supervised examples and oracle checks."""

from __future__ import annotations

from typing import NamedTuple

from burnish.core.errors import boundary
from burnish.core.protocols import Environment, EpisodeContext, Renderer
from burnish.core.records import Task
from burnish.core.vocabulary import FailureKind


class ReferenceExample(NamedTuple):
    """One supervised example."""

    token_ids: tuple[int, ...]
    """Prompt, reference turns and environment replies, length L."""
    loss_mask: tuple[bool, ...]
    """True on the tokens of the reference turns, length L."""


async def play_reference(
    environment: Environment, task: Task, renderer: Renderer, context: EpisodeContext
) -> ReferenceExample:
    """Tokens of the reference solution; replies between turns come from a real episode.

    Raises:
        ClassifiedFailure: if the environment fails; a reference that ends the episode early is
            cut there.
    """
    token_ids = list(renderer.prompt(task.prompt, environment.tools))
    mask = [False] * len(token_ids)
    turns = environment.reference(task)
    if len(turns) == 1:
        answer = renderer.assistant(turns[0])
        return ReferenceExample((*token_ids, *answer), (*mask, *(True for _ in answer)))
    where = f"envs.{environment.name}.reference"
    with boundary(FailureKind.ENVIRONMENT, where):
        episode = await environment.start(task, context)
    try:
        for message in turns:
            answer = renderer.assistant(message)
            token_ids += answer
            mask += [True] * len(answer)
            with boundary(FailureKind.ENVIRONMENT, where):
                replies = await episode.act(message)
            if replies is None:
                break
            reply_ids = renderer.extend(replies, True)
            token_ids += reply_ids
            mask += [False] * len(reply_ids)
    finally:
        await episode.close()
    return ReferenceExample(tuple(token_ids), tuple(mask))
