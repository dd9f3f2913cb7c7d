"""Families of tiny Python functions: a specification, a reference, a plausible bug and inputs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

NUM_TESTS = 8
"""Hidden calls per task."""


class Problem(NamedTuple):
    """One function to write or repair."""

    spec: str
    """Completes "a Python function f(...) that ..."."""
    signature: str
    """Such as `f(x)`."""
    body: str
    """Right-hand side of `return` in the reference."""
    bug: str
    """The same with one mistake."""
    inputs: list[list[Any]]
    """Arguments of the hidden calls."""

    def source(self, body: str) -> str:
        """A whole function with this body."""
        return f"def {self.signature}:\n    return {body}"


def _integers(rng: Random) -> list[list[Any]]:
    return [[value] for value in rng.sample(range(-40, 60), NUM_TESTS)]


def _lists(rng: Random) -> list[list[Any]]:
    return [[[rng.randint(-20, 30) for _ in range(rng.randint(4, 7))]] for _ in range(NUM_TESTS)]


def _texts(rng: Random) -> list[list[Any]]:
    return [["".join(rng.choices("abcde", k=rng.randint(6, 12)))] for _ in range(NUM_TESTS)]


def _linear(rng: Random) -> Problem:
    a, b = rng.randint(2, 30), rng.randint(1, 60)
    return Problem(
        f"returns x times {a} plus {b}", "f(x)", f"x * {a} + {b}", f"x * {a} - {b}", _integers(rng)
    )


def _difference(rng: Random) -> Problem:
    a, b = rng.randint(2, 60), rng.randint(2, 20)
    return Problem(
        f"subtracts {a} from x and multiplies the result by {b}",
        "f(x)",
        f"(x - {a}) * {b}",
        f"x - {a} * {b}",
        _integers(rng),
    )


def _remainder(rng: Random) -> Problem:
    a, b = rng.randint(3, 19), rng.randint(1, 60)
    return Problem(
        f"returns the remainder of x divided by {a}, plus {b}",
        "f(x)",
        f"x % {a} + {b}",
        f"x // {a} + {b}",
        _integers(rng),
    )


def _scaled(rng: Random) -> Problem:
    a, b = rng.randint(2, 60), rng.randint(1, 60)
    return Problem(
        f"returns a list with every number of xs times {a} plus {b}",
        "f(xs)",
        f"[x * {a} + {b} for x in xs]",
        f"[x + {a} + {b} for x in xs]",
        _lists(rng),
    )


def _sum_above(rng: Random) -> Problem:
    a, b = rng.randint(-5, 15), rng.randint(1, 60)
    return Problem(
        f"returns the sum of the numbers in xs that are greater than {a}, plus {b}",
        "f(xs)",
        f"sum(x for x in xs if x > {a}) + {b}",
        f"sum(x for x in xs if x < {a}) + {b}",
        _lists(rng),
    )


def _largest_plus(rng: Random) -> Problem:
    a, b = rng.randint(2, 20), rng.randint(1, 60)
    return Problem(
        f"returns the largest number in xs times {a} plus {b}",
        "f(xs)",
        f"max(xs) * {a} + {b}",
        f"min(xs) * {a} + {b}",
        _lists(rng),
    )


def _first_characters(rng: Random) -> Problem:
    a, suffix = rng.randint(2, 5), "".join(rng.choices("uvwxyz", k=3))
    return Problem(
        f"returns the first {a} characters of s followed by '{suffix}'",
        "f(s)",
        f"s[:{a}] + '{suffix}'",
        f"s[{a}:] + '{suffix}'",
        _texts(rng),
    )


def _repeated_text(rng: Random) -> Problem:
    a, prefix = rng.randint(2, 5), "".join(rng.choices("uvwxyz", k=3))
    return Problem(
        f"returns '{prefix}' followed by s repeated {a} times",
        "f(s)",
        f"'{prefix}' + s * {a}",
        f"'{prefix}' + s + '{a}'",
        _texts(rng),
    )


FAMILIES: tuple[Callable[[Random], Problem], ...] = (
    _linear,
    _difference,
    _remainder,
    _scaled,
    _sum_above,
    _largest_plus,
    _first_characters,
    _repeated_text,
)
"""All of them; each has hundreds of parameters times endless inputs."""


def outputs(source: str, inputs: list[list[Any]]) -> list[Any]:
    """What one of OUR functions returns: never call this with a policy's text."""
    scope: dict[str, Any] = {}
    exec(compile(source, "<reference>", "exec"), scope)
    return [scope["f"](*arguments) for arguments in inputs]
