"""The reward of the comparison with TRL: plain Python that both programs import."""

LETTERS = "etaoinsr"
COUNT = 26
LIMIT_CHARS = 160


def letter(index: int) -> str:
    """What question number `index` is about."""
    return LETTERS[index % len(LETTERS)]


def prompt(index: int) -> str:
    """Question number `index`."""
    return (
        f"Write about the number {index} in at most {LIMIT_CHARS} characters, and use the letter "
        f"{letter(index)} at least {COUNT} times. Say nothing of these rules, do not repeat them."
    )


def share(answer: str, wanted: str) -> float:
    """How far an answer got, in [0, 1]; 0 for one that is too long."""
    text = answer.strip()
    return min(text.count(wanted) / COUNT, 1.0) if len(text) <= LIMIT_CHARS else 0.0
