"""The probes: each asks one question of an environment and shows what it saw.

A probe returns None when it found nothing, or raises `Defect` with a witness, or `Unmeasured`. What
an environment itself raises reaches the audit as a ClassifiedFailure and is a defect too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from burnish.core.records import Message, Task
from burnish.core.vocabulary import Split
from burnish.quality.hostile import HOSTILE_MESSAGES
from burnish.quality.pass_share import LOOKS, surely_above, surely_below
from burnish.quality.subject import Subject, seen

# Tasks whose answers are tried on others.
_NUM_DONORS = 16
# Part of a probe's time after which plays are no longer added to decide a close case.
_LOOKING_SHARE = 0.3

_NON_ANSWERS = (":", "Thought process:", "I don't know.", '<tool_call>{"name": "", "argum', "....")
_CONSTANTS = ("0", "1", "A", "yes", "True", "[]", "{}")


class Defect(Exception):
    """A probe's finding."""

    def __init__(self, reason: str, witness: dict[str, Any]) -> None:
        """One line for people, and what shows it again."""
        self.reason, self.witness = reason, witness
        super().__init__(reason)


class Unmeasured(Exception):
    """A probe could not look."""


class Probe(NamedTuple):
    """One question."""

    name: str
    """Stable id."""
    ask: Callable[[Subject], Awaitable[None]]
    """Raises Defect or Unmeasured."""
    required: bool = True
    """Whether a pass needs it to have been measured."""


async def tasks_well_formed(subject: Subject) -> None:
    """Tasks name their environment, split and index, leave room for an answer, have a tier."""
    for task in subject.tasks():
        right = task.domain == subject.environment.name and task.index >= 0
        if not right or not task.prompt or task.max_tokens < 1 or task.max_turns < 1:
            raise Defect("a task is malformed", seen(task, task))
        if not any(message.content.strip() for message in task.prompt):
            raise Defect("a prompt is empty", seen(task, task.prompt))
        tier, num_tiers = subject.tier(task)
        if not 0 <= tier < num_tiers:
            raise Defect(f"tier {tier} of {num_tiers} tiers", seen(task, tier))


async def task_deterministic(subject: Subject) -> None:
    """task(split, index) is the same twice."""
    for task in subject.tasks():
        if subject.task(task.split, task.index) != task:
            raise Defect("task() gives two different tasks for one index", seen(task, task))


_PRINT_TASKS = """
import sys, msgspec
from burnish.core.vocabulary import Split
from burnish.envs.registry import get
environment = get(sys.argv[1])
tasks = [environment.task(split, i) for i in range(int(sys.argv[2])) for split in Split]
sys.stdout.buffer.write(msgspec.json.encode([environment.digest, tasks]))
"""


async def process_deterministic(subject: Subject) -> None:
    """Digest and tasks are the same in a fresh process with another hash seed."""
    if subject.target is None:
        raise Unmeasured("cannot be rebuilt by name; define its class at the top of a module")
    count = subject.config.num_tasks // 2
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _PRINT_TASKS, subject.target, str(count)),
        env=os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise Defect("it cannot be built in a fresh process", {"stderr": "".join(last)[:300]})
    digest, tasks = json.loads(out)
    if digest != subject.environment.digest:
        raise Defect("the digest differs in a fresh process", {"digest": digest})
    for number, there in enumerate(tasks):
        here = subject.task(list(Split)[number % 2], number // 2)
        if json.loads(msgspec.json.encode(here)) != there:
            raise Defect("a task differs in a fresh process", seen(here, there))


async def splits_disjoint(subject: Subject) -> None:
    """No item of the held-out pool occurs in the training pool."""
    count = subject.config.num_split_items
    pools = {split: [subject.task(split, index) for index in range(count)] for split in Split}
    prompts = [_text(task) for pool in pools.values() for task in pool]
    # Where prompts hardly differ, the items differ in what the prompt does not show.
    by_prompt = len(set(prompts)) > len(prompts) // 2

    def content(task: Task) -> str:
        return _text(task) if by_prompt else _text(task) + repr(task.payload)

    train = {content(task): task for task in pools[Split.TRAIN]}
    for task in pools[Split.HELD_OUT]:
        twin = train.get(content(task))
        if twin is not None:
            witness = seen(task, _text(task)) | {"train_index": twin.index}
            raise Defect("the splits share an item", witness)


async def oracle_full_score(subject: Subject) -> None:
    """The reference reaches score 1.0 and passes."""
    for task in subject.tasks():
        reference = subject.reference(task)
        if not 0 < len(reference) <= task.max_turns:
            raise Defect(f"{len(reference)} turns for max_turns {task.max_turns}", seen(task, ""))
        verdict = await subject.play(task, reference)
        if verdict.score != 1.0 or not verdict.passed:
            raise Defect(f"the reference scores {verdict.score}", seen(task, reference, verdict))


async def oracle_within_budget(subject: Subject) -> None:
    """The reference fits max_tokens."""
    if subject.count_tokens is None:
        raise Unmeasured("no tokenizer was given")
    for task in subject.tasks():
        reference = subject.reference(task)
        needed = subject.count_tokens(reference)
        if needed > task.max_tokens:
            raise Defect(
                f"the reference needs {needed} tokens of {task.max_tokens}", seen(task, reference)
            )


async def empty_scores_nothing(subject: Subject) -> None:
    """Saying nothing, or nothing but space, earns nothing at all."""
    for task in subject.tasks():
        for messages in ((), (_say(""),), (_say(" \n\t"),)):
            verdict = await subject.play(task, messages)
            if verdict.score != 0.0 or verdict.passed:
                raise Defect(
                    f"an empty answer scores {verdict.score}", seen(task, messages, verdict)
                )


async def degenerate_not_paid(subject: Subject) -> None:
    """No non-answer ever passes, and no constant passes often."""
    for task in subject.tasks(4):
        for text in (*_NON_ANSWERS, _text(task)):
            verdict = await subject.score(task, text)
            if verdict.passed:
                raise Defect("a non-answer passes", seen(task, text, verdict))
    deadline_s = _deadline_s(subject)
    for text in _CONSTANTS:
        pairs = ((task, text) for task in subject.tasks(LOOKS[-1]))
        await _refuse_common(subject, f"the constant {text!r}", pairs, deadline_s)


async def other_answers_not_paid(subject: Subject) -> None:
    """The right answer to one task, or the most common one, is not right for most others."""
    deadline_s = _deadline_s(subject)
    donors = list(subject.tasks(_NUM_DONORS))
    answers = [subject.reference(donor)[-1].content for donor in donors]
    common = Counter(answers).most_common(1)[0][0]
    for gold in dict.fromkeys((answers[0], common)):
        # Tasks that chose the answer do not judge it: that would flatter the most common one.
        prompts = {_text(d) for d, answer in zip(donors, answers, strict=True) if answer == gold}
        others = islice(subject.tasks(_NUM_DONORS + LOOKS[-1]), _NUM_DONORS, None)
        pairs = ((task, gold) for task in others if _text(task) not in prompts)
        await _refuse_common(subject, "another task's answer", pairs, deadline_s)


async def prompt_does_not_answer(subject: Subject) -> None:
    """No fixed piece of the prompt is the answer."""
    pieces: dict[str, Callable[[str], str]] = {
        "the prompt's first line": lambda prompt: prompt.splitlines()[0],
        "the prompt's last line": lambda prompt: prompt.splitlines()[-1],
        "the prompt's first word": lambda prompt: prompt.split()[0],
        "the prompt's last word": lambda prompt: prompt.split()[-1],
    }
    deadline_s = _deadline_s(subject)
    for what, piece in pieces.items():
        pairs = ((task, piece(_text(task))) for task in subject.tasks(LOOKS[-1]))
        await _refuse_common(subject, what, pairs, deadline_s)


async def verdict_deterministic(subject: Subject) -> None:
    """The same transcript gets the same verdict in fresh episodes."""
    for task in subject.tasks(4):
        for messages in (subject.reference(task), (_say("banana 17"),)):
            first, *others = [await subject.play(task, messages) for _ in range(3)]
            if any(other != first for other in others):
                scores = [first.score, *(other.score for other in others)]
                witness = seen(task, messages, first) | {"scores": scores}
                raise Defect("one transcript gets two verdicts", witness)


async def hostile_survived(subject: Subject) -> None:
    """Whatever the policy writes, the verdict is valid and not a pass."""
    task = next(subject.tasks(1))
    for messages in HOSTILE_MESSAGES:
        verdict = await subject.play(task, messages)
        if verdict.passed:
            raise Defect("garbage passes", seen(task, messages, verdict))
        msgspec.json.encode(verdict)


PROBES: tuple[Probe, ...] = (
    Probe("tasks_well_formed", tasks_well_formed),
    Probe("task_deterministic", task_deterministic),
    Probe("process_deterministic", process_deterministic),
    Probe("splits_disjoint", splits_disjoint),
    Probe("oracle_full_score", oracle_full_score),
    Probe("oracle_within_budget", oracle_within_budget, required=False),
    Probe("empty_scores_nothing", empty_scores_nothing),
    Probe("degenerate_not_paid", degenerate_not_paid),
    Probe("other_answers_not_paid", other_answers_not_paid),
    Probe("prompt_does_not_answer", prompt_does_not_answer),
    Probe("verdict_deterministic", verdict_deterministic),
    Probe("hostile_survived", hostile_survived),
)
"""All probes, cheap and basic ones first."""


async def _refuse_common(
    subject: Subject, what: str, pairs: Iterable[tuple[Task, str]], deadline_s: float
) -> None:
    """Defect if a policy that does not think surely passes on more than MAX_SHARE of the tasks.

    Past the deadline the next look is the last: a slow environment is judged on fewer plays.
    """
    plays = wins = 0
    witness: dict[str, Any] = {}
    for plays, (task, text) in enumerate(pairs, start=1):
        verdict = await subject.score(task, text)
        if verdict.passed:
            wins += 1
            witness = witness or seen(task, text, verdict)
        if plays in LOOKS:
            if surely_above(wins, plays):
                raise Defect(f"{what} passes {wins} of {plays} tasks", witness)
            if surely_below(wins, plays) or time.monotonic() > deadline_s:
                return
    if surely_above(wins, plays):
        raise Defect(f"{what} passes {wins} of {plays} tasks", witness)


def _deadline_s(subject: Subject) -> float:
    """When to stop looking closer, well before the probe counts as hanging."""
    return time.monotonic() + _LOOKING_SHARE * subject.config.probe_timeout_s


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


def _text(task: Task) -> str:
    return "\n".join(message.content.strip() for message in task.prompt)
