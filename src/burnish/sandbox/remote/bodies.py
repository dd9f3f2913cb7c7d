"""Memory of a server for what clients send: counted as it comes, until it has been used."""

import asyncio
import hashlib
from collections import Counter

from aiohttp import web

from burnish.core.records import Record
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused


class Bodies:
    """The bodies of all requests that are under way."""

    def __init__(self, most: int, most_each: int) -> None:
        """Nothing has come; see `ServeConfig.max_bodies_bytes` and `max_request_bytes`."""
        self.most = most
        self._most_each = most_each
        self.taken: Counter[str] = Counter()
        """Bytes by user."""
        self._rooms: dict[int, Body] = {}

    async def receive(self, request: web.Request, user: str) -> bytes:
        """The body of a request; "" for users without names. End with `let_go` or `keep_until`.

        Raises:
            HTTPRequestEntityTooLarge: it is larger than one may be.
            Refused: see `Body.add`.
        """
        room = self._rooms[id(request)] = Body(self, user)
        body = bytearray()
        async for chunk in request.content.iter_any():
            if len(body) + len(chunk) > self._most_each:
                raise web.HTTPRequestEntityTooLarge(self._most_each, len(body) + len(chunk))
            room.add(len(chunk))
            body += chunk
        return bytes(body)

    def let_go(self, request: web.Request) -> None:
        """Release the body of a request, if there is one that nothing has kept."""
        if room := self._rooms.pop(id(request), None):
            room.release()

    def keep_until(self, request: web.Request, task: "asyncio.Task[Record] | None") -> None:
        """Release it when the work on it is done; without work, `let_go` does."""
        room = None if task is None else self._rooms.pop(id(request), None)
        if room is not None and task is not None:
            task.add_done_callback(lambda _: room.release())


class Body:
    """What one request holds. Call `release` when nothing needs it any more."""

    def __init__(self, bodies: Bodies, user: str) -> None:
        """Nothing yet."""
        self._bodies = bodies
        self._user = user
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So much more came. What comes slowly takes no more room than it needs.

        Raises:
            Refused: kind `busy`: all together have too much, or those of a named user half of it.
                Whoever is alone fits.
        """
        bodies, own = self._bodies, self._num_bytes
        everything, of_user = bodies.taken.total(), bodies.taken[self._user]
        full = everything > own and everything + num_bytes > bodies.most
        if self._user and of_user > own:
            full = full or of_user + num_bytes > bodies.most // 2
        if full:
            what = f"the requests under way have more than {bodies.most} bytes, the most here"
            raise Refused(ProblemKind.BUSY, what)
        bodies.taken[self._user] += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Give it back. May be called again."""
        taken = self._bodies.taken
        taken[self._user] -= self._num_bytes
        self._num_bytes = 0
        if not taken[self._user]:
            del taken[self._user]


def digest_of(path: str, body: bytes) -> bytes:
    """Two requests with the same one are the same request."""
    digest = hashlib.blake2b(path.encode() + b"\n", digest_size=16)
    digest.update(body)
    return digest.digest()
