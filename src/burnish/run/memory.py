"""Keeps the process small: one heap for all threads."""

import ctypes

# From glibc's malloc.h.
_M_ARENA_MAX = -8


def share_one_heap() -> bool:
    """Tell glibc to use one arena; True if it understood. Call before threads start.

    By default every thread gets an arena of its own, and what a thread frees stays in its arena:
    engine, trainer and event loop would each keep their own peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_ARENA_MAX, 1))
