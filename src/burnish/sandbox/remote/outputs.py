"""Memory of a server for what commands write: so much for each, so much for all together."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from burnish.core.boxes import Limits
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused


class Outputs:
    """What running commands may keep counts from their start: a program fills it in a moment."""

    def __init__(self, most_each: int, most: int) -> None:
        """Nothing is kept; see `ServeConfig.max_stdout_bytes` and `max_outputs_bytes`."""
        self._most_each = most_each
        self._most = most
        self._taken: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    def check(self, limits: Limits) -> None:
        """Refuse what no command may have here.

        Raises:
            Refused: says how much it may be.
        """
        if limits.stdout_bytes > self._most_each:
            raise Refused(
                ProblemKind.USER,
                f"limits.stdout_bytes is {limits.stdout_bytes}, and this server keeps at most "
                f"{self._most_each} of each stream.",
                fix="lower it; let the command write to a file of its box, and read that",
            )

    @asynccontextmanager
    async def room(self, limits: Limits, user: str) -> AsyncIterator[None]:
        """Wait until the output of a command fits; a named user has half of all at most."""
        share = self._most // 2 if user else self._most
        # Whoever is alone fits, whatever the numbers.
        wanted = min(2 * limits.stdout_bytes, share)
        while self._taken[user] + wanted > share or self._taken.total() + wanted > self._most:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                self._waiting.remove(turn)
        self._taken[user] += wanted
        try:
            yield
        finally:
            self._taken[user] -= wanted
            if not self._taken[user]:
                del self._taken[user]
            for turn in self._waiting:
                if not turn.done():
                    turn.set_result(None)
