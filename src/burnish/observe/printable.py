"""Text that is safe to write to a terminal."""


def printable(text: str, *, keep: str = "\n\t") -> str:
    """Replace control characters: what a model wrote must not move a cursor or set a title."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)
