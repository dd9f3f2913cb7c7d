"""An episode played by a person: the same calls in the same order as for a model."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.text import Text

from burnish.cli.console import people, table
from burnish.core.boxes import SandboxPool
from burnish.core.errors import boundary
from burnish.core.protocols import Environment, EpisodeContext
from burnish.core.records import Message, Task, ToolCall, ToolSpec, Verdict
from burnish.core.vocabulary import FailureKind
from burnish.observe.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HINT = (
    "Your turn. End with a line that holds a single dot. /reference plays the oracle, /quit leaves."
)
_HINT_TOOLS = (
    'Your turn. End with a single dot, or: /call NAME {"argument": "value"}. '
    "/reference plays the oracle, /quit leaves."
)


async def play_episode(
    environment: Environment, task: Task, player: Player, sandboxes: SandboxPool
) -> Verdict | None:
    """Play one episode; None if the player left."""
    context = EpisodeContext(sandboxes=sandboxes, seed=0)
    player.show_task(task, environment.tools)
    where = f"envs.{environment.name}"
    with boundary(FailureKind.ENVIRONMENT, f"{where}.start"):
        reference = environment.reference(task)
        episode = await environment.start(task, context)
    try:
        for turn in range(task.max_turns):
            oracle = reference[turn] if turn < len(reference) else None
            message = player.ask(environment.tools, oracle)
            if message is None:
                return None
            with boundary(FailureKind.ENVIRONMENT, f"{where}.act"):
                replies = await episode.act(message)
            if replies is None:
                break
            player.show(replies)
        with boundary(FailureKind.VERIFIER, f"{where}.verdict"):
            return await episode.verdict()
    finally:
        await episode.close()


class Player:
    """A person at a terminal, or a script at the other end of a pipe."""

    def __init__(self, source: TextIO, stream: TextIO) -> None:
        """Read turns from `source`, show the world on `stream`."""
        self._source = source
        self._console = people(stream)

    def show_task(self, task: Task, tools: Sequence[ToolSpec]) -> None:
        """The prompt and the tools on offer."""
        # As the flag spells it.
        split = task.split.replace("_", "-")
        where = f"{task.domain}, {split} task {task.index}"
        self._console.print(Text(f"{where}, {task.max_turns} turn(s)", style="bold"))
        self.show(task.prompt)
        if tools:
            rows = [
                (tool.name, _signature(tool), printable(tool.description, keep=""))
                for tool in tools
            ]
            self._console.print(table(("tool", "arguments", "what it does"), rows))

    def show(self, messages: Sequence[Message]) -> None:
        """Messages of the environment."""
        for message in messages:
            self._console.print(Text(f"\n{message.role}", style="dim"))
            self._console.print(Text(printable(message.content)))

    def ask(self, tools: Sequence[ToolSpec], oracle: Message | None) -> Message | None:
        """One turn; None when the player leaves."""
        # From before the player is told to answer: an interrupt between the two would be lost.
        with _interrupts_at_once():
            return self._ask(tools, oracle)

    def _ask(self, tools: Sequence[ToolSpec], oracle: Message | None) -> Message | None:
        self._console.print(Text(f"\n{_HINT_TOOLS if tools else _HINT}", style="dim"))
        while True:
            text = self._read()
            if text is None or text == "/quit":
                return None
            if text == "/reference":
                if oracle is None:
                    self.problem("The reference has no further turn.")
                    continue
                self.show((oracle,))
                for made in oracle.tool_calls:
                    self._console.print(Text(f"/call {made.name} {json.dumps(made.arguments)}"))
                return oracle
            if text.startswith("/call"):
                call = self._parse_call(text)
                if call is not None:
                    return Message(role="assistant", content="", tool_calls=(call,))
                continue
            return Message(role="assistant", content=text)

    def show_verdict(self, verdict: Verdict) -> None:
        """Score, its parts, and the evidence."""
        if verdict.failure is not None:
            failure = verdict.failure
            self._console.print(Text(f"\n{verdict.outcome}: [{failure.kind}] {failure.message}"))
        if verdict.score is not None:
            result = "passed" if verdict.passed else "not passed"
            style = "bold green" if verdict.passed else "bold red"
            self._console.print(Text(f"\n{result}, score {verdict.score:.2f}", style=style))
        rows = [
            (credit.source, f"{credit.value:.2f}", printable(credit.note, keep=""))
            for credit in verdict.credits
        ]
        if rows:
            self._console.print(table(("credit", "value", "note"), rows))
        for key, value in verdict.evidence.items():
            self._console.print(Text(f"\n{key}", style="dim"))
            self._console.print(Text(printable(_shown(value))))

    def _read(self) -> str | None:
        """Lines up to a dot, a command or the end; None if there is nothing left to read."""
        lines: list[str] = []
        while True:
            line = self._source.readline()
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\r\n")
            if line == ".":
                return "\n".join(lines)
            if not lines and line.startswith("/") and line.split()[0] in _COMMANDS:
                return line
            lines.append(line)

    def _parse_call(self, text: str) -> ToolCall | None:
        _, _, rest = text.partition(" ")
        name, _, arguments = rest.strip().partition(" ")
        try:
            decoded = json.loads(arguments or "{}")
        except ValueError as error:
            self.problem(f"The arguments are not JSON: {error}.")
            return None
        if not name or not isinstance(decoded, dict):
            self.problem('Write: /call NAME {"argument": "value"}')
            return None
        return ToolCall(name=name, arguments=decoded)

    def problem(self, text: str) -> None:
        """Something that the player should know."""
        self._console.print(Text(printable(text), style="yellow"))


@contextmanager
def _interrupts_at_once() -> Iterator[None]:
    """The loop makes the first Ctrl-C a cancellation, which a blocking read never sees."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_COMMANDS = frozenset({"/call", "/reference", "/quit"})


def _signature(tool: ToolSpec) -> str:
    properties: dict[str, Any] = tool.parameters.get("properties", {})
    return ", ".join(f"{name}: {spec.get('type', 'any')}" for name, spec in properties.items())


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, default=str)
