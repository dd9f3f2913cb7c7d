"""Spans of time for people."""


def duration(seconds: float) -> str:
    """`1 h 02 min`, `12 min 31 s` or `8.4 s`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
