"""Tool use over several turns: a calculator that runs in the sandbox.

The numbers are too large to guess or to compute in one's head, so the policy must call the tool,
read its answer and report it.
"""

from __future__ import annotations

import inspect
import re

from burnish.core.boxes import ExecStatus, Limits
from burnish.core.errors import ClassifiedFailure
from burnish.core.protocols import EpisodeContext
from burnish.core.records import Failure, Message, Task, ToolCall, ToolSpec, Verdict
from burnish.core.vocabulary import FailureKind
from burnish.envs import box_calculator
from burnish.envs.base import ANSWER_CHARS, GeneratedEnvironment, Item
from burnish.envs.rewards import grade

_TOOL = ToolSpec(
    name="calculator",
    description="Evaluates arithmetic.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}},
)
_PROGRAM = inspect.getsource(box_calculator)
_LIMITS = Limits(wall_s=10.0, cpu_s=2.0, stdout_bytes=4096)
_EXPRESSION_CHARS = 200
_NUMBER = re.compile(r"[0-9]+")


class Calculator(GeneratedEnvironment):
    """Arithmetic by tool."""

    name = "calculator"
    description = (
        "Work out an arithmetic expression by calling a calculator, then report the result."
    )
    tools = (_TOOL,)
    max_tokens = 80
    max_turns = 3
    sources = (*GeneratedEnvironment.sources, "burnish.envs.box_calculator")

    def draw(self, position: int) -> Item:
        """A product plus or minus a number."""
        rng = self.random(position)
        a, b, c = rng.randint(101, 999), rng.randint(11, 99), rng.randint(101, 999)
        sign = rng.choice("+-")
        expression = f"{a} * {b} {sign} {c}"
        value = a * b + c if sign == "+" else a * b - c
        prompt = f"What is {expression}? Use the calculator, then answer with the number only."
        return Item(prompt, {"expression": expression, "value": str(value)})

    def reference(self, task: Task) -> tuple[Message, ...]:
        """Call, then report."""
        call = ToolCall(name=_TOOL.name, arguments={"expression": task.payload["expression"]})
        return (
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="assistant", content=task.payload["value"]),
        )

    async def start(self, task: Task, context: EpisodeContext) -> CalculatorEpisode:
        """Begin; a box is taken only when the tool is called."""
        return CalculatorEpisode(task, context)


class CalculatorEpisode:
    """Up to three turns; the first reply without a call is the answer."""

    def __init__(self, task: Task, context: EpisodeContext) -> None:
        """Nothing is called yet."""
        self._task, self._context = task, context
        self._turn = 0
        self._answer = ""
        self._first_call = 0.0
        self._log: list[str] = []

    async def act(self, message: Message) -> tuple[Message, ...] | None:
        """Run the calls of a turn, or take the answer."""
        turn, self._turn = self._turn, self._turn + 1
        if message.malformed_tool_call:
            return self._reply("Error: the tool call is not valid JSON.")
        if not message.tool_calls:
            self._answer = message.content.strip()
            return None
        # One call per turn is enough here, and a flood of calls must not become a flood of boxes.
        call = message.tool_calls[0]
        expression = call.arguments.get("expression")
        if call.name != _TOOL.name:
            return self._reply("Error: unknown tool. Use calculator.")
        if not isinstance(expression, str) or len(expression) > _EXPRESSION_CHARS:
            return self._reply("Error: calculator needs a short string 'expression'.")
        result = await self._evaluate(expression)
        if turn == 0 and not result.startswith("Error"):
            self._first_call = self._relevance(expression, result)
        return self._reply(result)

    async def verdict(self) -> Verdict:
        """The number, exactly; process credit goes to the first turn for a call that finds it."""
        value: str = self._task.payload["value"]
        answer = self._answer[:ANSWER_CHARS]
        return grade(
            solved=answer == value,
            progress=self._first_call,
            progress_turn=0,
            in_form=answer.removeprefix("-").isdecimal() and answer.isascii(),
            expected=value,
            got=answer,
            tool_replies=self._log,
        )

    async def close(self) -> None:
        """Nothing to free: boxes live no longer than a call."""

    def _relevance(self, expression: str, result: str) -> float:
        """1.0 for the call that was needed; up to 0.5 for the right numbers in a wrong one."""
        if result == self._task.payload["value"]:
            return 1.0
        needed = set(_NUMBER.findall(self._task.payload["expression"]))
        return 0.5 * len(needed & set(_NUMBER.findall(expression))) / len(needed)

    def _reply(self, text: str) -> tuple[Message, ...]:
        self._log.append(text)
        return (Message(role="tool", content=text),)

    async def _evaluate(self, expression: str) -> str:
        """The expression's value, computed in a box."""
        async with self._context.sandboxes.acquire() as box:
            done = await box.exec(
                ("python3", "-I", "-S", "-c", _PROGRAM),
                stdin=expression.encode("utf-8", "replace"),
                limits=_LIMITS,
            )
        if done.status is ExecStatus.INFRA_ERROR:
            raise ClassifiedFailure(
                Failure(
                    kind=FailureKind.SANDBOX, where="envs.calculator.exec", message=done.message
                )
            )
        text = done.stdout.decode("utf-8", "replace").strip()
        return text if done.status is ExecStatus.OK and text else "Error: too much to compute."
