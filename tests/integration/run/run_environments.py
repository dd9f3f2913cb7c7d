"""Environments that a random model passes half of the time, and ones that are broken on purpose."""

from __future__ import annotations

import asyncio

from burnish.core.protocols import Episode, EpisodeContext
from burnish.core.records import Message, Task, ToolSpec, Verdict
from burnish.core.vocabulary import Split
from burnish.envs.rewards import grade
from burnish.quality.isolation import BridgedPool

TEXT = (
    "Write at most ninety characters in which the letter {letter} occurs at least {count} times. "
    "Item {index} of the {split} pool, nothing else."
)


class Letters:
    """Passes if a letter occurs often enough in a short answer: chance decides for random text."""

    name = "letters"
    description = "Use a letter."
    digest = "sha256:" + "1" * 64
    tools: tuple[ToolSpec, ...] = ()
    letter = "e"
    num_tiers = 3

    def tier(self, task: Task) -> int:
        tier: int = task.payload["count"] - 3
        return tier

    def task(self, split: Split, index: int) -> Task:
        count = 3 + index % 3
        text = TEXT.format(letter=self.letter, count=count, index=index, split=split)
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(Message(role="user", content=text),),
            payload={"count": count},
            max_tokens=10,
        )

    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        return LettersEpisode(self, task)

    def reference(self, task: Task) -> tuple[Message, ...]:
        return (Message(role="assistant", content=self.letter * task.payload["count"]),)

    async def judge(self, task: Task, answer: str) -> Verdict:
        short = 0 < len(answer) <= 90
        found = answer.count(self.letter)
        solved = short and found >= task.payload["count"]
        share = min(found / task.payload["count"], 1.0) if short else 0.0
        return grade(solved=solved, progress=share, in_form=short, expected="letters", got=answer)


class LettersEpisode:
    def __init__(self, environment: Letters, task: Task) -> None:
        self._environment, self._task, self._answer = environment, task, ""

    async def act(self, message: Message) -> tuple[Message, ...] | None:
        self._answer = message.content.strip()
        return None

    async def verdict(self) -> Verdict:
        return await self._environment.judge(self._task, self._answer)

    async def close(self) -> None:
        pass


class BrokenEpisode(LettersEpisode):
    async def verdict(self) -> Verdict:
        raise RuntimeError("the database of answers is gone")


class OtherLetters(Letters):
    """A second domain."""

    name = "other_letters"
    digest = "sha256:" + "2" * 64
    letter = "i"


class PaysNothing(Letters):
    """Broken: its own reference does not score."""

    name = "pays_nothing"
    digest = "sha256:" + "3" * 64

    async def judge(self, task: Task, answer: str) -> Verdict:
        return grade(solved=False, progress=0.0, in_form=False, expected="?", got=answer)


class BreaksLater(Letters):
    """Passes its audit, then its verifier raises on every training item."""

    name = "breaks_later"
    digest = "sha256:" + "4" * 64

    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        # Only a run hands out boxes of its own; an audit wraps them.
        if task.split is Split.TRAIN and not isinstance(context.sandboxes, BridgedPool):
            return BrokenEpisode(self, task)
        return await super().start(task, context)


class SlowVerdict(Letters):
    """Answers out of order: how long a verdict takes depends on the answer."""

    name = "slow_letters"
    digest = "sha256:" + "5" * 64
    letter = "n"

    async def judge(self, task: Task, answer: str) -> Verdict:
        await asyncio.sleep((hash(answer) % 7) / 100)
        return await super().judge(task, answer)
