"""The reward of the comparison with TRL: plain Python that both programs import."""

COUNT = 14
LIMIT_CHARS = 160


def prompt(index: int) -> str:
    """Question number `index`."""
    return (
        f"Write about the number {index} in at most {LIMIT_CHARS} characters, and use the letter "
        f"e at least {COUNT} times. Say nothing of these rules, and do not repeat them in words."
    )


def share(answer: str) -> float:
    """How far an answer got, in [0, 1]; 0 for one that is too long."""
    text = answer.strip()
    return min(text.count("e") / COUNT, 1.0) if len(text) <= LIMIT_CHARS else 0.0
