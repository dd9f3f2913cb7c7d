"""Eight toy domains for `benchmarks/twin.py`: answers of fixed lengths, verdicts that take time."""

import asyncio
import math
import zlib

import numpy as np

from burnish.core.protocols import Episode, EpisodeContext
from burnish.core.records import Message, Task, ToolSpec, Verdict
from burnish.core.vocabulary import Split
from burnish.envs.rewards import grade
from burnish.quality.isolation import BridgedPool

# Tokens of an answer, and median seconds of a verdict.
KINDS = ((16, 0.05), (24, 1.5), (32, 0.3), (48, 0.1), (64, 0.8), (96, 0.05), (128, 0.4), (192, 0.1))

LETTERS = "etaoinshrdlu"


class Timed:
    """One letter and nothing else; a random model never ends its answer by itself."""

    description = "Repeat a letter."
    tools: tuple[ToolSpec, ...] = ()

    def __init__(self, number: int) -> None:
        self.name = f"timed{number}"
        self.digest = f"sha256:{number:064x}"
        self.num_tokens, self.verdict_s = KINDS[number]

    def task(self, split: Split, index: int) -> Task:
        letter = LETTERS[index % len(LETTERS)]
        text = f"Write the letter {letter}. Item {index} of the {split} pool of {self.name}."
        return Task(domain=self.name, split=split, index=index, payload={"letter": letter},
                    prompt=(Message(role="user", content=text),),
                    max_tokens=self.num_tokens)  # fmt: skip

    async def start(self, task: Task, context: EpisodeContext) -> Episode:
        # The quality gate tries hundreds of answers; its boxes are wrapped, those of a run are not.
        waits = not isinstance(context.sandboxes, BridgedPool)
        return TimedEpisode(self, task.payload["letter"], waits=waits)

    def reference(self, task: Task) -> tuple[Message, ...]:
        return (Message(role="assistant", content=4 * task.payload["letter"]),)


class TimedEpisode:
    def __init__(self, environment: Timed, letter: str, *, waits: bool) -> None:
        self._environment, self._letter, self._waits = environment, letter, waits
        self._answer = ""

    async def act(self, message: Message) -> tuple[Message, ...] | None:
        self._answer = message.content.strip()
        return None

    async def verdict(self) -> Verdict:
        answer = self._answer
        if self._waits:
            # The simulator's law: lognormal with sigma 0.6; the answer decides, so runs repeat.
            drawn = np.random.default_rng(checksum(answer)).normal()
            await asyncio.sleep(self._environment.verdict_s * math.exp(0.6 * drawn))
        share = answer.count(self._letter) / max(len(answer), 1)
        # A little for chance, so that every group has a gradient and none is sampled again.
        chance = checksum(answer) % 1000 / 20_000 if answer else 0.0
        solved = share > 0.9
        return grade(solved=solved, progress=1.0 if solved else chance, in_form=solved,
                     expected=self._letter, got=answer)  # fmt: skip

    async def close(self) -> None:
        pass


def checksum(answer: str) -> int:
    return zlib.crc32(answer.encode("utf-8", "replace"))


def _named(number: int) -> type:
    return type(f"Timed{number}", (Timed,), {"__init__": lambda self: Timed.__init__(self, number)})


Timed0, Timed1, Timed2, Timed3, Timed4, Timed5, Timed6, Timed7 = map(_named, range(8))
