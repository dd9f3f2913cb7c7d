"""The task of the comparison as an environment of Burnish."""

import reward

from burnish.core.protocols import Episode, EpisodeContext
from burnish.core.records import Message, Task, ToolSpec, Verdict
from burnish.core.vocabulary import Split
from burnish.envs.rewards import grade

MAX_TOKENS = 32


class Letters:
    """Partial credit for nearly any answer, so that every group has something to compare."""

    name = "letters"
    description = "Use a letter often."
    digest = "sha256:" + "0" * 64
    tools: tuple[ToolSpec, ...] = ()

    def task(self, split: Split, index: int) -> Task:
        number = index * 2 + (split is Split.HELD_OUT)
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(Message(role="user", content=reward.prompt(number)),),
            payload={"letter": reward.letter(number)},
            max_tokens=MAX_TOKENS,
        )

    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        return LettersEpisode(task.payload["letter"])

    def reference(self, task: Task) -> tuple[Message, ...]:
        return (Message(role="assistant", content=task.payload["letter"] * reward.COUNT),)


class LettersEpisode:
    def __init__(self, wanted: str) -> None:
        self._wanted, self.answer = wanted, ""

    async def act(self, message: Message) -> tuple[Message, ...] | None:
        self.answer = message.content
        return None

    async def verdict(self) -> Verdict:
        share = reward.share(self.answer, self._wanted)
        return grade(
            solved=share == 1.0,
            progress=share,
            in_form=share > 0,
            expected=f"{reward.COUNT} times {self._wanted}",
            got=self.answer,
        )

    async def close(self) -> None:
        pass
