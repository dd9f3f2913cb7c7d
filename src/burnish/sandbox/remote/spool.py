"""Files on their way between boxes and clients."""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from burnish.core.clock import Clock
from burnish.sandbox.cgroup import owner_name
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused
from burnish.sandbox.remote.tenants import Owner

# Nobody fetched it, or named it, for so long: its client is gone.
_UNCLAIMED_S = 600.0


@dataclass
class _File:
    owner: Owner
    made_s: float
    num_bytes: int = 0


class Spool:
    """A private directory of files that are known by random ids."""

    def __init__(self, clock: Clock, max_bytes: int, max_all_bytes: int) -> None:
        """Make the directory; its name says whose it is, so that others can sweep it.

        Args:
            clock: where the time comes from.
            max_bytes: one file.
            max_all_bytes: all together; a named user may have half of it.
        """
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_all_bytes = max_all_bytes
        self._folder = Path(tempfile.gettempdir(), f"{owner_name()}-{secrets.token_hex(4)}.spool")
        self._folder.mkdir(mode=0o700)
        self._files: dict[str, _File] = {}

    def new(self, owner: Owner) -> tuple[str, Path]:
        """An id and a path at which nothing is yet; it goes with the session of its owner."""
        name = secrets.token_hex(16)
        self._files[name] = _File(owner, self._clock.now_s())
        return name, self._folder / name

    def charge(self, name: str, num_bytes: int) -> None:
        """A file has so many bytes more.

        Raises:
            Refused: it was removed meanwhile, it is too large, or there are too many.
        """
        file = self._files.get(name)
        if file is None:
            raise Refused(ProblemKind.NO_REQUEST, "the session of the file has ended")
        if file.num_bytes + num_bytes > self._max_bytes:
            what = f"the file has more than {self._max_bytes} bytes, the most here"
            raise Refused(ProblemKind.TOO_LARGE, what)
        user = file.owner.user
        everything = num_bytes + sum(f.num_bytes for f in self._files.values())
        of_user = num_bytes + sum(f.num_bytes for f in self._files.values() if f.owner.user == user)
        if everything > self._max_all_bytes or (user and of_user > self._max_all_bytes // 2):
            raise Refused(
                ProblemKind.USER,
                f"the files on their way have more than {self._max_all_bytes} bytes, the most for "
                "all; of one user half of it.",
                fix="try again when other imports and exports have ended",
            )
        file.num_bytes += num_bytes

    def find(self, name: str) -> Path:
        """Where a file lies.

        Raises:
            Refused: there is none of that id.
        """
        if name not in self._files:
            raise Refused(ProblemKind.NO_REQUEST, "there is no such file: fetched, or too old")
        return self._folder / name

    async def receive(self, owner: Owner, chunks: AsyncIterator[bytes]) -> str:
        """Write a new file.

        Raises:
            Refused: see `charge`.
            OSError: no space.
        """
        name, path = self.new(owner)
        try:
            file = await asyncio.to_thread(open, path, "xb")
            try:
                async for chunk in chunks:
                    self.charge(name, len(chunk))
                    await asyncio.to_thread(file.write, chunk)
            finally:
                await asyncio.to_thread(file.close)
        except BaseException:
            self.remove(name)
            raise
        return name

    def remove(self, name: str) -> None:
        """Forget a file; fine if there is none."""
        if self._files.pop(name, None) is not None:
            (self._folder / name).unlink(missing_ok=True)

    def tend(self) -> None:
        """Remove what nobody wants. To be called regularly."""
        now = self._clock.now_s()
        for name, file in list(self._files.items()):
            if now - file.made_s >= _UNCLAIMED_S:
                self.remove(name)

    def release(self, session: str) -> None:
        """A session has ended; what still comes for it is refused."""
        for name, file in list(self._files.items()):
            if file.owner.session == session:
                self.remove(name)

    def close(self) -> None:
        """Remove all."""
        shutil.rmtree(self._folder, ignore_errors=True)
