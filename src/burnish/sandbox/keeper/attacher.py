"""Moves processes into control groups from a helper process.

The first such move after a pause waits for the kernel's RCU (6 to 13 ms here, later ones 0.03 ms),
in which the keeper would serve nobody. A shell that reads lines is all it takes.
"""

import asyncio
import os
import subprocess

_SCRIPT = """
while read -r pid files; do
  for file in $files; do echo "$pid" > "$file" || { echo "$pid failed"; continue 2; }; done
  echo "$pid done"
done
"""


class Attacher:
    """One helper; it ends when its input closes, so it cannot outlive us."""

    def __init__(self) -> None:
        """Start it. Use within a running event loop."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in_fd = self._process.stdin.fileno()
        self._out_fd = self._process.stdout.fileno()
        self._pending: dict[int, asyncio.Future[bool]] = {}
        self._rest = b""
        os.set_blocking(self._out_fd, False)
        asyncio.get_running_loop().add_reader(self._out_fd, self._on_answer)

    @property
    def pid(self) -> int:
        """Of the helper."""
        return self._process.pid

    async def attach(self, pid: int, files: tuple[str, ...]) -> None:
        """Write `pid` into each of `files`.

        Raises:
            OSError: it could not be moved.
        """
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending[pid] = answer
        os.write(self._in_fd, f"{pid} {' '.join(files)}\n".encode())
        if not await answer:
            raise OSError(0, f"process {pid} could not be moved into its control group")

    def close(self) -> None:
        """End the helper."""
        asyncio.get_running_loop().remove_reader(self._out_fd)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _on_answer(self) -> None:
        data = os.read(self._out_fd, 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(self._out_fd)
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_result(False)
            return
        *complete, self._rest = (self._rest + data).split(b"\n")
        for line in complete:
            pid, _, word = line.partition(b" ")
            answer = self._pending.pop(int(pid))
            if not answer.done():
                answer.set_result(word == b"done")
