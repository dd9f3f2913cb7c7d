"""The environment under audit, and how probes play it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from burnish.core.boxes import SandboxPool
from burnish.core.config import Config
from burnish.core.errors import boundary
from burnish.core.protocols import Environment, EpisodeContext, Tiered
from burnish.core.records import Message, Task, Verdict
from burnish.core.vocabulary import FailureKind, Outcome, Split

TokenCounter = Callable[[Sequence[Message]], int]
"""Number of tokens that the policy would have to sample for these assistant messages."""


class AuditConfig(Config):
    """How thoroughly to look."""

    num_tasks: int = Field(default=8, ge=4, le=10**4)
    """Tasks that each probe plays; those that ask what passes by chance play as many as needed."""
    num_split_items: int = Field(default=200, ge=10, le=10**6)
    """Items of each split that are compared."""
    probe_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Bound on one probe: an environment that hangs fails by name."""


class Subject(NamedTuple):
    """What probes work on."""

    environment: Environment
    """Under audit."""
    sandboxes: SandboxPool
    """Where its code runs."""
    config: AuditConfig
    """How thoroughly."""
    target: str | None
    """What `registry.get` rebuilds it from in another process; None if nothing does."""
    count_tokens: TokenCounter | None
    """The model's tokenizer, where there is one."""

    def tasks(self, count: int | None = None) -> Iterator[Task]:
        """The first tasks of both splits in turn."""
        for number in range(count or self.config.num_tasks):
            yield self.task((Split.TRAIN, Split.HELD_OUT)[number % 2], number // 2)

    def task(self, split: Split, index: int) -> Task:
        """One task; what the environment raises becomes its failure."""
        with boundary(FailureKind.ENVIRONMENT, f"task({split}, {index})"):
            return self.environment.task(split, index)

    def tier(self, task: Task) -> tuple[int, int]:
        """The task's tier, and how many there are; (0, 1) without tiers."""
        if not isinstance(self.environment, Tiered):
            return 0, 1
        with boundary(FailureKind.ENVIRONMENT, f"tier({task.split}, {task.index})"):
            return self.environment.tier(task), self.environment.num_tiers

    def reference(self, task: Task) -> tuple[Message, ...]:
        """The oracle's messages."""
        with boundary(FailureKind.ENVIRONMENT, f"reference({task.split}, {task.index})"):
            return tuple(self.environment.reference(task))

    async def play(self, task: Task, messages: Sequence[Message]) -> Verdict:
        """Play the messages in a fresh episode until they or the episode end.

        Raises:
            ClassifiedFailure: whatever the environment raised, or a verdict that is none.
        """
        where = f"{task.split}, {task.index}"
        with boundary(FailureKind.ENVIRONMENT, f"start({where})"):
            episode = await self.environment.start(
                task, EpisodeContext(sandboxes=self.sandboxes, seed=task.index)
            )
        try:
            for message in messages[: task.max_turns]:
                with boundary(FailureKind.ENVIRONMENT, f"act({where})"):
                    replies = await episode.act(message)
                if replies is None:
                    break
            with boundary(FailureKind.VERIFIER, f"verdict({where})"):
                return checked(await episode.verdict())
        finally:
            with boundary(FailureKind.ENVIRONMENT, f"close({where})"):
                await episode.close()

    async def score(self, task: Task, text: str) -> Verdict:
        """Play one plain answer."""
        return await self.play(task, (Message(role="assistant", content=text),))


def checked(verdict: Verdict) -> Verdict:
    """A verdict that gives a score in [0, 1].

    Raises:
        ValueError: for any other, because probes only say things that deserve a score.
    """
    if not isinstance(verdict, Verdict):
        raise ValueError(f"verdict() returned {type(verdict).__name__}, not a Verdict")
    if verdict.outcome is not Outcome.SCORED or verdict.score is None or verdict.passed is None:
        raise ValueError(f"outcome {verdict.outcome} with score {verdict.score}")
    if not 0.0 <= verdict.score <= 1.0:
        raise ValueError(f"score {verdict.score} is outside [0, 1]")
    return verdict


def seen(task: Task, answer: object, verdict: Verdict | None = None) -> dict[str, Any]:
    """A witness: what was said to which task, and what it got."""
    witness: dict[str, Any] = {"split": str(task.split), "index": task.index}
    witness["answer"] = ascii(answer)[:300]
    if verdict is not None:
        witness |= {"score": verdict.score, "passed": verdict.passed}
    return witness
