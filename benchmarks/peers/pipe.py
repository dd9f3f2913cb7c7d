"""The parent's end: engines as child processes that are asked one thing at a time."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_END_S = 20


class PeerError(Exception):
    """A peer could not do what it was asked."""


class Peer:
    """An engine in a process of its own."""

    def __init__(
        self,
        name: str,
        python: Path,
        script: str,
        setup: dict[str, Any],
        *,
        threads: int,
        log: Path,
        env: dict[str, str] | None = None,
    ) -> None:
        """Start it and wait until it has loaded its model."""
        self.name = name
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        # Idle threads of one engine must not spin while another one is measured.
        limits |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        start = time.perf_counter()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(HERE / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **limits, **(env or {})},
                text=True,
            )
        try:
            ready = self._exchange(setup | {"threads": threads})
        except PeerError:
            self.close()
            raise
        self.operations = frozenset(ready["operations"])
        self.load_s = time.perf_counter() - start

    def ask(self, operation: str, **order: Any) -> tuple[float, Any]:
        """Seconds that an operation took there, and what it gave."""
        answer = self._exchange({"operation": operation, **order})
        return float(answer["seconds"]), answer["value"]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended with status {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer
