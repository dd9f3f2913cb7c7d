"""Short replies under verifiable constraints, in the manner of IFEval.

The smallest complete environment here: copy it to start your own. A rule is a kind and an argument;
the first rule of a task says what the reply is about, and nothing counts unless it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from burnish.core.protocols import EpisodeContext
from burnish.core.records import Message, Task, Verdict
from burnish.envs.base import Item, OneTurnEnvironment, answer_message
from burnish.envs.rewards import grade
from burnish.envs.words import WORDS

Rule = tuple[str, str]

_RULES: Mapping[str, Callable[[str, str], bool]] = {
    "contains": lambda reply, words: all(w in reply.lower() for w in words.split()),
    "upper": lambda reply, _: reply == reply.upper(),
    "lower": lambda reply, _: reply == reply.lower(),
    "starts": lambda reply, start: reply.startswith(start),
    "ends": lambda reply, end: reply.endswith(end),
    "inside": lambda reply, text: reply[2:-2].strip() == text,
    "num_parts": lambda reply, spec: len(reply.split(spec[1:])) == int(spec[0]),
    "parts_are_words": lambda reply, sep: all(p.isalpha() for p in reply.split(sep)),
    "parts_equal": lambda reply, spec: set(reply.split(spec[0])) == {spec[1:]},
    "parts_differ": lambda reply, sep: len(set(reply.split(sep))) == len(reply.split(sep)),
    "equals": lambda reply, text: reply == text,
}
"""What each kind of rule checks; all are total functions of two strings."""

_BRACKETS = (("<<", ">>"), ("[[", "]]"), ("((", "))"), ("**", "**"))
_SEPARATORS = "-/+:"


def _bracketed(rng: Random) -> tuple[str, list[Rule], str]:
    words = " ".join(rng.sample(WORDS, 2))
    left, right = rng.choice(_BRACKETS)
    rules = [("contains", words), ("upper", ""), ("starts", left), ("ends", right)]
    return (
        f"Write the words {words} in upper case, in brackets like this: {left}TWO WORDS{right}",
        [*rules, ("inside", words.upper())],
        f"{left}{words.upper()}{right}",
    )


def _repeated(rng: Random) -> tuple[str, list[Rule], str]:
    word, count, sep = rng.choice(WORDS), rng.randint(2, 6), rng.choice(_SEPARATORS)
    rules = [("contains", word), ("num_parts", f"{count}{sep}"), ("parts_equal", f"{sep}{word}")]
    return (
        f"Write the word {word} {count} times, joined like this: {sep.join(['cat'] * count)}",
        rules,
        sep.join([word] * count),
    )


def _listed(rng: Random) -> tuple[str, list[Rule], str]:
    first, second, *others = rng.sample(WORDS, 4)
    count = rng.randint(3, 4)
    rules = [("contains", f"{first} {second}"), ("lower", ""), ("num_parts", f"{count}, ")]
    example = ", ".join(["one", "two", "three", "four"][:count])
    return (
        f"Write {count} different words, two of them {first} and {second}, like this: {example}",
        [*rules, ("parts_are_words", ", "), ("parts_differ", ", ")],
        ", ".join([first, second, *others][:count]),
    )


def _ordered(rng: Random) -> tuple[str, list[Rule], str]:
    words, sep = rng.sample(WORDS, 2), rng.choice(_SEPARATORS)
    joined = sep.join(sorted(words))
    rules = [("contains", " ".join(words)), ("num_parts", f"2{sep}"), ("equals", joined)]
    return (
        f"Write {words[0]} and {words[1]} in alphabetical order, joined like this: cat{sep}dog",
        rules,
        joined,
    )


_FAMILIES = (_bracketed, _repeated, _listed, _ordered)


class Formatting(OneTurnEnvironment):
    """Replies whose form is the task."""

    name = "formatting"
    description = "Short replies that must satisfy stated constraints on case, count and layout."
    max_tokens = 32
    sources = (*OneTurnEnvironment.sources, "burnish.envs.words")

    def draw(self, position: int) -> Item:
        """One family with random words."""
        rng = self.random(position)
        text, rules, example = rng.choice(_FAMILIES)(rng)
        return Item(f"{text}\nReply with nothing else.", {"rules": rules, "example": example})

    def reference(self, task: Task) -> tuple[Message, ...]:
        """One reply that keeps all rules."""
        return answer_message(task.payload["example"])

    async def judge(self, task: Task, answer: str, context: EpisodeContext) -> Verdict:
        """All rules kept; progress is the share of them beside the first."""
        (topic, words), *rules = task.payload["rules"]
        example: str = task.payload["example"]
        kept = [kind for kind, argument in rules if _RULES[kind](answer, argument)]
        # Three times the example is room for chatter, but not for echoing the question.
        relevant = _RULES[topic](answer, words) and len(answer) <= 3 * len(example)
        progress = len(kept) / len(rules) if relevant else 0.0
        return grade(
            solved=progress == 1.0,
            progress=progress,
            in_form="\n" not in answer,
            expected=example,
            got=answer,
            broken=[kind for kind, _ in rules if kind not in kept],
        )
