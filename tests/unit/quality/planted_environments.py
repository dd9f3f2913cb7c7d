"""Environments with one planted defect each; `Sound` is their healthy twin."""

import random
import sys
import time

from burnish.core.boxes import ExecStatus
from burnish.core.records import Message, Task
from burnish.core.vocabulary import Split
from burnish.envs.base import Item, OneTurn, OneTurnEnvironment, answer_message
from burnish.envs.rewards import grade


class Sound(OneTurnEnvironment):
    """Add two numbers."""

    name = "sound"
    description = "Add."

    def draw(self, position):
        rng = self.random(position)
        a, b = rng.randint(1000, 9999), rng.randint(1000, 9999)
        return Item(f"What is {a} + {b}? Number only.", {"value": str(a + b)})

    def reference(self, task):
        return answer_message(task.payload["value"])

    def solved(self, task, answer):
        return answer == task.payload["value"]

    async def judge(self, task, answer, context):
        solved = self.solved(task, answer)
        return grade(
            solved=solved,
            progress=float(solved),
            in_form=True,
            expected=task.payload["value"],
            got=answer,
        )


class RemembersCalls(Sound):
    """Scores by what it saw before: every second odd answer is right."""

    name = "remembers_calls"
    num_calls = 0

    def solved(self, task, answer):
        self.num_calls += "banana" in answer
        return super().solved(task, answer) or ("banana" in answer and self.num_calls % 2 == 0)


class PaysEmpty(Sound):
    name = "pays_empty"

    async def start(self, task, context):
        return PaysEmptyEpisode(self, task, context)


class PaysEmptyEpisode(OneTurn):
    async def verdict(self):
        if not self._answer.strip():
            return grade(solved=False, progress=0.5, in_form=True, expected="", got="")
        return await super().verdict()


class OracleFails(Sound):
    name = "oracle_fails"

    def reference(self, task):
        return answer_message(task.payload["value"] + "0")


class TwoTurnOracle(Sound):
    name = "two_turn_oracle"

    def reference(self, task):
        return super().reference(task) * 2


class JudgeRaises(Sound):
    name = "judge_raises"

    async def judge(self, task, answer, context):
        raise KeyError("column 'gold'")


class RaisesOnOddText(Sound):
    name = "raises_on_odd_text"

    def solved(self, task, answer):
        answer.encode("utf-8")
        return super().solved(task, answer)


class Exits(Sound):
    name = "exits"

    def draw(self, position):
        sys.exit(3)


class HangsInPython(Sound):
    name = "hangs_in_python"

    def draw(self, position):
        while True:
            pass


class HangsAsleep(Sound):
    name = "hangs_asleep"

    async def judge(self, task, answer, context):
        time.sleep(30)  # noqa: ASYNC251 (the planted defect)


class SharesSplits(Sound):
    name = "shares_splits"

    def task(self, split, index):
        train = super().task(Split.TRAIN, index)
        return Task(**{f: getattr(train, f) for f in train.__struct_fields__} | {"split": split})


class ShiftedSplits(Sound):
    name = "shifted_splits"

    def task(self, split, index):
        shift = 7 if split is Split.HELD_OUT else 0
        train = super().task(Split.TRAIN, index + shift)
        changes = {"split": split, "index": index}
        return Task(**{f: getattr(train, f) for f in train.__struct_fields__} | changes)


class ChangesItsMind(Sound):
    name = "changes_its_mind"

    def random(self, position):
        return random.Random()


class HashSeeded(Sound):
    name = "hash_seeded"

    def random(self, position):
        return random.Random(hash(f"{self.name}/{position}"))


class PaysContaining(Sound):
    name = "pays_containing"

    def draw(self, position):
        item = super().draw(position)
        return Item(item.prompt + " It is " + item.payload["value"], item.payload)

    def solved(self, task, answer):
        return task.payload["value"] in answer


class LeaksLastWord(Sound):
    name = "leaks_last_word"

    def draw(self, position):
        item = super().draw(position)
        return Item(item.prompt + " Hint: " + item.payload["value"], item.payload)


class OneAnswer(Sound):
    name = "one_answer"

    def draw(self, position):
        return Item(super().draw(position).prompt, {"value": "12"})


class PaysNonAnswers(Sound):
    name = "pays_non_answers"

    def solved(self, task, answer):
        return super().solved(task, answer) or not answer[0].isalnum()


class ScoreOutOfRange(Sound):
    name = "score_out_of_range"

    async def judge(self, task, answer, context):
        verdict = await super().judge(task, answer, context)
        fields = {f: getattr(verdict, f) for f in verdict.__struct_fields__}
        return type(verdict)(**fields | {"score": verdict.score * 7})


class NotAVerdict(Sound):
    name = "not_a_verdict"

    async def judge(self, task, answer, context):
        return 1.0


class EmptyPrompt(Sound):
    name = "empty_prompt"

    def task(self, split, index):
        task = super().task(split, index)
        fields = {f: getattr(task, f) for f in task.__struct_fields__}
        return Task(**fields | {"prompt": (Message(role="user", content=" "),)})


class NeedsBox(Sound):
    """Healthy, and runs one command per judgement."""

    name = "needs_box"

    async def judge(self, task, answer, context):
        async with context.sandboxes.acquire() as box:
            await box.write_file("answer", answer.encode("utf-8", "replace"))
            done = await box.exec(("cat", "answer"))
            assert await box.read_file("answer") == done.stdout or done.truncated
        assert done.status in (ExecStatus.OK, ExecStatus.OUTPUT)
        return await super().judge(task, done.stdout.decode("utf-8", "replace"), context)


class SmallRange(OneTurnEnvironment):
    """Sound, with so few answers that one is right for many tasks; the prompt ends in `wording`."""

    name = "small_range"
    description = "Count."
    wording = ""

    def draw(self, position):
        rng = self.random(position)
        digits = " ".join(str(rng.randint(0, 9)) for _ in range(6))
        count = sum(int(digit) < 3 for digit in digits.split())
        return Item(f"How many below 3 are in {digits}?{self.wording}", {"count": count})

    def reference(self, task):
        return answer_message(str(task.payload["count"]))

    async def judge(self, task, answer, context):
        solved = answer == str(task.payload["count"])
        return grade(
            solved=solved, progress=float(solved), in_form=True, expected=task.payload, got=answer
        )


class MostlyTwelve(Sound):
    """Says 12 to two tasks in three."""

    name = "mostly_twelve"

    def draw(self, position):
        item = super().draw(position)
        common = self.random(position + 10**6).random() < 0.67
        return Item(item.prompt, {"value": "12"} if common else item.payload)
