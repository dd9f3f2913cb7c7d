"""Waiting for what a process that lives will do."""

import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_NEVER = threading.Event()
_LOOKS = 2400


def until(look: Callable[[], T], process: "subprocess.Popen[str]") -> T:
    """The first truthy answer of `look`, while the process lives."""
    for _ in range(_LOOKS):
        found = look()
        if found:
            return found
        assert process.poll() is None, process.communicate()[1][-2000:]
        _NEVER.wait(0.1)
    raise AssertionError("it never happened")
