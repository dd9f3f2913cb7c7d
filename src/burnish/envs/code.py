"""Code: write or repair a small Python function; hidden tests run in the sandbox.

The box gets the code and the inputs, never the expected values. It sends back what the function
returned, as JSON, and the comparison happens here: to forge a result one has to know it, which is
the task. Output before, beside or instead of that JSON is no result at all.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, NamedTuple

from burnish.core.boxes import ExecStatus, Limits
from burnish.core.errors import ClassifiedFailure
from burnish.core.protocols import EpisodeContext
from burnish.core.records import Failure, Message, Task, Verdict
from burnish.core.vocabulary import FailureKind
from burnish.envs import box_runner
from burnish.envs.base import Item, OneTurnEnvironment, answer_message
from burnish.envs.code_families import FAMILIES, Problem, outputs
from burnish.envs.rewards import grade

_RUNNER = inspect.getsource(box_runner)
_LIMITS = Limits(wall_s=10.0, cpu_s=2.0, stdout_bytes=16 * 1024)
_FENCE = "```"
COMPILED_CREDIT = 0.2
"""Part of the process credit for code that defines the function; the rest is tests passed."""


class Code(OneTurnEnvironment):
    """Tiny functions from families with endless parameters."""

    name = "code"
    description = "Write or repair a small Python function; hidden tests run in a sandbox."
    max_tokens = 48
    sources = (
        *OneTurnEnvironment.sources,
        "burnish.envs.code_families",
        "burnish.envs.box_runner",
    )

    def draw(self, position: int) -> Item:
        """A problem whose hidden tests no constant and not the bug itself can pass."""
        rng = self.random(position)
        while True:
            problem = rng.choice(FAMILIES)(rng)
            solution = problem.source(problem.body)
            expected = outputs(solution, problem.inputs)
            broken = outputs(problem.source(problem.bug), problem.inputs)
            if len({json.dumps(value) for value in expected}) > 2 and broken != expected:
                break
        payload = {"inputs": problem.inputs, "expected": expected, "solution": solution}
        return Item(_question(problem, repair=rng.random() < 0.5), payload)

    def reference(self, task: Task) -> tuple[Message, ...]:
        """The function in a code block."""
        return answer_message(f"{_FENCE}python\n{task.payload['solution']}\n{_FENCE}")

    async def judge(self, task: Task, answer: str, context: EpisodeContext) -> Verdict:
        """All tests; progress is definition and share of tests; form is one bare code block."""
        block = code_block(answer)
        run = await _run(block.code, task.payload["inputs"], context)
        expected: list[Any] = task.payload["expected"]
        num_passed = sum(same(got, want) for got, want in zip(run.results, expected, strict=False))
        solved = num_passed == len(expected) == len(run.results)
        share = num_passed / len(expected)
        return grade(
            solved=solved,
            progress=(COMPILED_CREDIT + (1 - COMPILED_CREDIT) * share) if run.defined else 0.0,
            in_form=block.alone and run.only_function and num_passed > 0,
            expected=task.payload["solution"],
            got=answer,
            tests=f"{num_passed}/{len(expected)}",
            status=run.status,
        )


class Block(NamedTuple):
    """Code found in an answer."""

    code: str
    """The program text."""
    alone: bool
    """True if the answer is one fenced block and nothing else."""


class Run(NamedTuple):
    """What came back from the box."""

    status: str
    """Exec status, or why the output is not a result."""
    defined: bool = False
    """The code compiled and defined a function f."""
    only_function: bool = False
    """It held nothing else."""
    results: list[Any] = []  # noqa: RUF012 (a tuple's default, never mutated)
    """Return values in order."""


def code_block(answer: str) -> Block:
    """The first fenced block, or the whole answer if there is no fence."""
    start = answer.find(_FENCE)
    if start < 0:
        return Block(answer, alone=False)
    body = answer[start + len(_FENCE) :]
    end = body.find(_FENCE)
    code = body if end < 0 else body[:end]
    first_line, _, rest = code.partition("\n")
    alone = start == 0 and end >= 0 and not body[end + len(_FENCE) :].strip()
    return Block(rest if first_line.strip() in ("python", "py", "") else code, alone)


def same(got: object, want: object) -> bool:
    """Equality of JSON values with equal types: True is not 1, and 1.0 is not 1.

    Never looks deeper into what came from the box than the expected value goes.
    """
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    return type(got) is type(want) and got == want


def _question(problem: Problem, *, repair: bool) -> str:
    form = f"Reply with only the function in a {_FENCE}python code block."
    if not repair:
        return f"Write a Python function {problem.signature} that {problem.spec}. {form}"
    return (
        f"This Python function has a bug:\n{problem.source(problem.bug)}\n"
        f"It should be a function that {problem.spec}. Fix it. {form}"
    )


async def _run(code: str, inputs: list[list[Any]], context: EpisodeContext) -> Run:
    """Call the function on all inputs in one fresh box."""
    if "def f" not in code and "lambda" not in code:
        return Run("no function f")
    request = json.dumps({"code": code, "inputs": inputs}).encode("ascii")
    async with context.sandboxes.acquire() as box:
        done = await box.exec(("python3", "-I", "-S", "-c", _RUNNER), stdin=request, limits=_LIMITS)
    if done.status is ExecStatus.INFRA_ERROR:
        raise ClassifiedFailure(
            Failure(kind=FailureKind.SANDBOX, where="envs.code.exec", message=done.message)
        )
    if done.status is not ExecStatus.OK:
        return Run(str(done.status))
    try:
        report = json.loads(done.stdout)
        defined, alone, results = report["defined"], report["only_function"], report["results"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Run("output is not a report")
    if not isinstance(results, list) or len(results) > len(inputs):
        return Run("output is not a report")
    return Run(str(done.status), defined is True, alone is True, results)
