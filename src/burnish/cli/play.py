"""`burnish env play`: a person plays an episode, under the rules that hold for a model."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.vocabulary import FailureKind, Split

_MAX_INDEX = 2**31 - 1

if TYPE_CHECKING:
    from burnish.cli.player import Player
    from burnish.core.protocols import Environment
    from burnish.core.records import Task, Verdict


def play(
    domain: str,
    /,
    *,
    index: int = 0,
    split: Split = Split.TRAIN,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Play an episode in the terminal: see the prompt, answer, get the verdict.

    End an answer with a line that holds a single dot, or with Ctrl-D. Other lines:
    /call NAME {JSON} calls a tool, /reference plays the oracle's turn, /quit leaves without a
    verdict. With --json, leaving gives the outcome "abandoned" and exit status 2.

    Args:
        domain: environment, a name of `burnish env list` or module:Class.
        index: task in the pool.
        split: pool of tasks.
        as_json: the verdict as JSON, last line of stdout.
    """
    from burnish.cli.console import write_json
    from burnish.cli.main import EXIT_USER
    from burnish.cli.player import Player
    from burnish.envs import registry

    environment = registry.get(domain)
    task = _task(environment, split, index)
    player = Player(sys.stdin, sys.stderr if as_json else sys.stdout)
    verdict = asyncio.run(_play(environment, task, player))
    if as_json:
        write_json(verdict or {"outcome": "abandoned"})
        return EXIT_USER if verdict is None else 0
    if verdict is not None:
        player.show_verdict(verdict)
    return 0


def _task(environment: "Environment", split: Split, index: int) -> "Task":
    from burnish.core.errors import UserError, boundary

    if index < 0:
        raise UserError(f"--index {index} is below 0.", fix="use 0 or more.")
    if index > _MAX_INDEX:
        raise UserError(f"--index {index} is too large.", fix=f"use at most {_MAX_INDEX}.")
    with boundary(FailureKind.ENVIRONMENT, f"envs.{environment.name}.task"):
        return environment.task(split, index)


async def _play(environment: "Environment", task: "Task", player: "Player") -> "Verdict | None":
    from burnish.cli.boxes import boxes_if_possible
    from burnish.cli.player import play_episode
    from burnish.quality.isolation import MissingPool

    async with boxes_if_possible() as (pool, reason):
        if pool is None:
            player.problem(reason)
        return await play_episode(environment, task, player, pool or MissingPool())
