"""Facts hidden in a text, and questions that a small trained model can answer."""

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from burnish.core.records import GenerateRequest, Generation, SamplingParams
from burnish.model.tokenizer import Tokenizer
from burnish.rollout.engine.engine import EngineCore

_CITIES = (
    "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Dakar",
    "Sofia", "Hanoi", "Accra", "Seoul", "Minsk", "Tunis", "Havana", "Berlin",
)  # fmt: skip


class Needles(NamedTuple):
    """A text with facts in it."""

    body: tuple[int, ...]
    """The text."""
    questions: list[tuple[tuple[int, ...], tuple[int, ...]]]
    """What is asked after it, and the answer."""


def hide(tokenizer: Tokenizer, text: Sequence[int], num_tokens: int, count: int) -> Needles:
    """Facts at equal distances from 2 % to 90 % of the first `num_tokens` tokens of a text.

    A question is the beginning of its fact, so that going on with the text answers it.
    """
    rng, source = random.Random(0), iter(text)
    body: list[int] = []
    questions = []
    for i, city in enumerate(_CITIES[:count]):
        place = int((0.02 + 0.88 * i / max(1, count - 1)) * num_tokens)
        body += islice(source, max(0, place - len(body)))
        question = tuple(tokenizer.encode(f"\n\nThe secret number of {city} is"))
        answer = tuple(tokenizer.encode(f" {rng.randrange(1000, 10_000)}"))
        body += [*question, *answer, *tokenizer.encode(".\n")]
        questions.append((question, answer))
    body += islice(source, max(0, num_tokens - len(body)))
    return Needles(tuple(body), questions)


def recall(core: EngineCore, needles: Needles) -> set[int]:
    """Questions that greedy decoding answers to the last digit, by number."""
    wanted = {}
    for number, (question, answer) in enumerate(needles.questions):
        params = SamplingParams(max_tokens=len(answer), temperature=0.0)
        prompt = (*needles.body, *question)
        core.add(GenerateRequest(request_id=str(number), prompt_ids=prompt, params=params))
        wanted[str(number)] = answer
    found = set()
    for request_id, outcome in run(core):
        assert isinstance(outcome, Generation), outcome
        if outcome.token_ids == wanted[request_id]:
            found.add(int(request_id))
    return found


def run(core: EngineCore) -> list[tuple[str, Any]]:
    """Everything to its end: names of requests and what became of them."""
    ended: list[tuple[str, Any]] = []
    while core.has_work:
        ended += [(sequence.request.request_id, outcome) for sequence, outcome in core.step()]
    return ended
