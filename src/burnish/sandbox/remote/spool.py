"""Files on their way between boxes and clients."""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from burnish.core.clock import Clock
from burnish.sandbox.cgroup import owner_name
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused

# Nobody fetched it, or named it, for so long: its client is gone.
_UNCLAIMED_S = 600.0


class Spool:
    """A private directory of files that are known by random ids."""

    def __init__(self, clock: Clock, max_bytes: int) -> None:
        """Make the directory; its name says whose it is, so that others can sweep it."""
        self._clock = clock
        self._max_bytes = max_bytes
        self._folder = Path(tempfile.gettempdir(), f"{owner_name()}-{secrets.token_hex(4)}.spool")
        self._folder.mkdir(mode=0o700)
        self._made_s: dict[str, float] = {}

    def new(self) -> tuple[str, Path]:
        """An id and a path at which nothing is yet."""
        name = secrets.token_hex(16)
        self._made_s[name] = self._clock.now_s()
        return name, self._folder / name

    def find(self, name: str) -> Path:
        """Where a file lies.

        Raises:
            Refused: there is none of that id.
        """
        if name not in self._made_s:
            raise Refused(ProblemKind.NO_REQUEST, "there is no such file: fetched, or too old")
        return self._folder / name

    async def receive(self, chunks: AsyncIterator[bytes]) -> str:
        """Write a new file.

        Raises:
            Refused: it is too large.
            OSError: no space.
        """
        name, path = self.new()
        size = 0
        try:
            file = await asyncio.to_thread(open, path, "xb")
            try:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self._max_bytes:
                        what = f"the file has more than {self._max_bytes} bytes, the most here"
                        raise Refused(ProblemKind.TOO_LARGE, what)
                    await asyncio.to_thread(file.write, chunk)
            finally:
                await asyncio.to_thread(file.close)
        except BaseException:
            self.remove(name)
            raise
        return name

    def remove(self, name: str) -> None:
        """Forget a file; fine if there is none."""
        if self._made_s.pop(name, None) is not None:
            (self._folder / name).unlink(missing_ok=True)

    def tend(self) -> None:
        """Remove what nobody wants. To be called regularly."""
        now = self._clock.now_s()
        for name, made_s in list(self._made_s.items()):
            if now - made_s >= _UNCLAIMED_S:
                self.remove(name)

    def close(self) -> None:
        """Remove all."""
        shutil.rmtree(self._folder, ignore_errors=True)
