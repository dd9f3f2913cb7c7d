"""Domains from reasoning-gym's generators, scored by our own exact match.

The library's scorers are not used: the default one pays for answers that merely contain the gold,
and nine of them run Python found in the answer inside the scorer's own process.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from burnish.core.errors import UserError
from burnish.core.protocols import EpisodeContext
from burnish.core.records import Message, Task, Verdict
from burnish.envs.answers import Form, kept, share_right
from burnish.envs.base import EnvironmentConfig, Item, OneTurnEnvironment, answer_message
from burnish.envs.rewards import grade

_SEED = 20_260_101
"""Seed of the one stream that both splits read; item p of it is Random(_SEED + p)."""

_RUNS_MODEL_CODE = "its scorer runs Python taken from the model's answer"
_GAMEABLE = "one constant answer is paid on (nearly) every item"
_NO_GOLD = "it has no single gold answer, so exact match cannot judge it"
_RUNNERS_OF_MODEL_CODE = """
binary_matrix string_insertion spiral_matrix n_queens countdown puzzle24 simple_integration
intermediate_integration polynomial_multiplication
"""
_GAMEABLE_GENERATORS = "game_of_life game_of_life_halting polynomial_equations"
_WITHOUT_GOLD = "boxnet graph_color propositional_logic rubiks_cube rush_hour"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_RUNNERS_OF_MODEL_CODE.split(), _RUNS_MODEL_CODE),
    **dict.fromkeys(_GAMEABLE_GENERATORS.split(), _GAMEABLE),
    **dict.fromkeys(_WITHOUT_GOLD.split(), _NO_GOLD),
}
"""Generators that may not teach, with the reason (audit of reasoning-gym 0.1.25)."""


class ReasoningGymConfig(EnvironmentConfig):
    """Which generator, how hard, and how the question is put."""

    generator: str
    """Name in reasoning-gym."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator, its difficulty."""
    form: Form
    """What answers look like."""
    prompt: str = "{question}"
    """Template over `question` and the item's metadata; must demand the form."""
    name: str
    """Domain name."""
    description: str
    """One sentence for people."""
    max_tokens: int = 32
    """Budget of an answer."""


class ReasoningGym(OneTurnEnvironment):
    """One generator as a domain."""

    sources = (*OneTurnEnvironment.sources, "burnish.envs.answers")

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Build the generator's stream.

        Raises:
            UserError: for generators that are refused or unknown, and bad parameters.
        """
        self.name, self.description, self._form = config.name, config.description, config.form
        self._prompt, self.max_tokens = config.prompt, config.max_tokens
        self._stream = _stream(config.generator, config.parameters)
        super().__init__(config)

    def identity(self) -> dict[str, Any]:
        """Also the library's version: it decides the items."""
        return super().identity() | {"version": importlib.metadata.version("reasoning-gym")}

    def draw(self, position: int) -> Item:
        """Item `position` of the stream, with the question in our words."""
        entry = self._stream[position]
        fields = {"question": entry["question"].strip()} | {
            key: _plain(value) for key, value in entry["metadata"].items() if key != "question"
        }
        return Item(self._prompt.format_map(fields), {"answer": _plain(entry["answer"])})

    def reference(self, task: Task) -> tuple[Message, ...]:
        """The gold answer."""
        return answer_message(task.payload["answer"])

    async def judge(self, task: Task, answer: str, context: EpisodeContext) -> Verdict:
        """Exact match; progress is the share of leading parts that are right."""
        gold: str = task.payload["answer"]
        in_form = kept(self._form, answer)
        progress = share_right(self._form, gold, answer) if in_form else 0.0
        return grade(
            solved=answer == gold, progress=progress, in_form=in_form, expected=gold, got=answer
        )


def _plain(value: object) -> str:
    """A list, or its printed form, as `a, b, c`; whole decimals as integers; the rest as it is."""
    if isinstance(value, str) and value.startswith("["):
        value = ast.literal_eval(value)  # The library's own text, never the model's.
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(part) for part in value)
    return str(value).strip().removesuffix(".0")


def _stream(generator: str, parameters: dict[str, Any]) -> Any:
    if generator in REFUSED:
        raise UserError(
            f"reasoning-gym generator {generator!r} is refused: {REFUSED[generator]}.",
            fix="choose another generator.",
        )
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise UserError(
            "reasoning-gym is not installed.", fix="pip install 'burnish[envs]'."
        ) from error
    try:
        return create_dataset(generator, seed=_SEED, size=2**50, **parameters)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            f"reasoning-gym generator {generator!r} with {parameters}: {error}.",
            fix="see the generator's configuration in reasoning-gym.",
        ) from error
