"""What shipped environments share: generated items, content-hashed splits, one-turn episodes.

A subclass draws items, judges answers and knows a reference answer; see `formatting.py` for the
smallest example. Nothing requires this class: any object that satisfies
`core.protocols.Environment` is an environment.
"""

from __future__ import annotations

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from burnish.core.errors import UserError
from burnish.core.protocols import Episode, EpisodeContext
from burnish.core.records import Message, Task, ToolSpec, Verdict
from burnish.core.vocabulary import Split
from burnish.envs.rewards import grade
from burnish.envs.splits import pick

ANSWER_CHARS = 8192
"""Longer answers are not looked at: no task here needs a tenth of it, and graders stay fast."""


class EnvironmentConfig(BaseModel):
    """Base of an environment's own configuration; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Item(NamedTuple):
    """What a generator draws."""

    prompt: str
    """The user message; also decides the split, so it must tell items apart."""
    payload: dict[str, Any]
    """What the verifier needs."""


class GeneratedEnvironment(ABC):
    """A domain with unlimited items, drawn from a seeded stream."""

    name: str
    description: str
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int = 32
    max_turns: int = 1
    sources: ClassVar[tuple[str, ...]] = ("burnish.envs.rewards", "burnish.envs.splits")
    """Modules beside those of the class and its bases that decide tasks or verdicts."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        """Compute the digest; everything else is drawn on demand."""
        self.config = config or EnvironmentConfig()
        self.digest = digest(type(self), self.sources, self.identity())

    def identity(self) -> dict[str, Any]:
        """What the digest covers beside code: name, configuration, versions of libraries."""
        return {"name": self.name, "config": self.config.model_dump(mode="json")}

    def random(self, position: int) -> Random:
        """Randomness of one item, the same in every process."""
        return Random(f"{self.name}/{position}")

    @abstractmethod
    def draw(self, position: int) -> Item:
        """The item at a position of the stream. Pure."""

    @abstractmethod
    def reference(self, task: Task) -> tuple[Message, ...]:
        """An oracle's assistant messages."""

    def task(self, split: Split, index: int) -> Task:
        """The item at `index` of `split`."""
        item = pick(split, index, self.draw, lambda drawn: drawn.prompt)
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(Message(role="user", content=item.prompt),),
            payload=item.payload,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
        )

    @abstractmethod
    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        """Begin an episode of a task."""


class OneTurnEnvironment(GeneratedEnvironment):
    """A generated domain whose episodes are one prompt and one answer."""

    @abstractmethod
    async def judge(self, task: Task, answer: str, context: EpisodeContext) -> Verdict:
        """Judge one answer of at most ANSWER_CHARS characters. Never raises for its content."""

    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        """Begin a one-turn episode."""
        return OneTurn(self, task, context)


class OneTurn:
    """An episode that is over after one answer."""

    def __init__(
        self, environment: OneTurnEnvironment, task: Task, context: EpisodeContext
    ) -> None:
        """Wait for the answer."""
        self._environment, self._task, self._context = environment, task, context
        self._answer = ""

    async def act(self, message: Message) -> tuple[Message, ...] | None:
        """Take the answer; there is no next turn."""
        self._answer = message.content
        return None

    async def verdict(self) -> Verdict:
        """Judge the answer, or what there was of it when the budget ran out."""
        answer = self._answer.strip()
        if not answer or len(answer) > ANSWER_CHARS:
            expected = "an answer" if not answer else f"at most {ANSWER_CHARS} characters"
            return grade(solved=False, progress=0.0, in_form=False, expected=expected, got=answer)
        return await self._environment.judge(self._task, answer, self._context)

    async def close(self) -> None:
        """Nothing to free."""


def answer_message(text: str) -> tuple[Message, ...]:
    """A reference of one turn."""
    return (Message(role="assistant", content=text),)


def digest(kind: type, modules: Sequence[str], identity: dict[str, Any]) -> str:
    """`sha256:...` over the sources of a class, its bases and `modules`, and its configuration."""
    names = {base.__module__ for base in kind.__mro__ if base not in (object, ABC)} | set(modules)
    state = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            raise UserError(
                f"{kind.__qualname__} lives in {name!r}, which is no file, so it has no digest.",
                fix="put the environment into a module of its own.",
            )
        state.update(name.encode() + b"\0" + hashlib.sha256(Path(file).read_bytes()).digest())
    return f"sha256:{state.hexdigest()}"
