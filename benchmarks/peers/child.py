"""The child's end of the pipe: one JSON object per line in, one out. Standard library only.

Each engine under test lives in a process, and where needed a virtual environment, of its own.
Whatever an engine prints goes to stderr, so that stdout holds the protocol alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Operation = Callable[..., Any]


def serve(build: Callable[[dict[str, Any]], dict[str, Operation]]) -> None:
    """Build the engine from the first line, then time one operation per line until the last."""
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        protocol.write(json.dumps(answer) + "\n")
        protocol.flush()

    operations = build(json.loads(sys.stdin.readline()))
    say(ready=True, operations=sorted(operations))
    for line in sys.stdin:
        order = json.loads(line)
        operation = operations[order.pop("operation")]
        start = time.perf_counter()
        try:
            value = operation(**order)
        except Exception as error:  # noqa: BLE001 - told to the parent, which reports it.
            say(error=f"{type(error).__name__}: {error}"[:300])
            continue
        say(seconds=time.perf_counter() - start, value=value)
