"""The client's end of HTTP: one session, requests that are sent again until they are answered."""

import asyncio
import errno
import logging
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp

from burnish.core.errors import UserError, one_line
from burnish.core.records import Record
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure, exception_of

_LOG = logging.getLogger(__name__)
T = TypeVar("T", bound=Record)

# An answer is held back for `ServeConfig.poll_s` at most, 20 s; silence beyond means a dead host.
_SILENCE_S = 45.0
_CONNECT_S = 10.0
_PAUSES_S = (0.1, 0.5, 2.0)
"""Between tries of a request that broke: its id makes sure that it runs once."""
_BUSY_PAUSE_S = 0.5
_BOUND = ("/v4/boxes/", "/v4/requests/", "/v4/files/")
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)
_CHUNK_BYTES = 2**20


class Wire:
    """Talks to one server. All methods run in one loop."""

    def __init__(self, url: str, token: str | None = None, ca_file: Path | None = None) -> None:
        """Nothing is sent yet.

        Raises:
            UserError: the URL, the token or the CA file cannot be used.
        """
        self.url = url
        self._base, self._socket = split_url(url)
        self._ssl = _trust(ca_file) if self._base.startswith("https:") else None
        self.session = secrets.token_hex(16)
        self._headers = {
            m.SESSION_HEADER: self.session,
            "Accept": m.CONTENT_TYPE,
            "Content-Type": m.CONTENT_TYPE,
        }
        if token is not None:
            if not token.isascii() or not token.isprintable() or not token:
                raise UserError("the token is no line of text.", fix="give what the file holds")
            self._headers["Authorization"] = f"Bearer {token}"
        self._http: aiohttp.ClientSession | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, path: str, kind: type[T]) -> T:
        """Ask for something that changes nothing."""
        return self._decode(await self._retry("GET", path), kind)

    async def delete(self, path: str) -> None:
        """Remove something, by now or before."""
        await self._retry("DELETE", path)

    async def post(self, path: str, message: Record, kind: type[T]) -> T:
        """A request that may simply be sent twice."""
        return self._decode(await self._retry("POST", path, m.encode(message)), kind)

    async def job(
        self, path: str, message: Record, kind: type[T], deadline_s: float | None = None
    ) -> T:
        """Have something done once; polls until it is, and ends it if the caller is cancelled.

        Args:
            path: of the verb.
            message: its arguments.
            kind: of the answer.
            deadline_s: on the monotonic clock; None: as long as it takes.

        Raises:
            RemoteFailure: kind `busy` if the deadline passed; `unreachable`, `no_box`, ...
        """
        request_id = secrets.token_hex(16)
        headers = {m.REQUEST_HEADER: request_id}
        body = m.encode(message)
        done = False
        try:
            answer = await self._start(path, body, headers, deadline_s)
            while answer is None:
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise RemoteFailure(ProblemKind.BUSY, self.url, "no answer by the deadline")
                poll = self._retry_pending("GET", f"/v4/requests/{request_id}")
                answer = await _within(poll, deadline_s)
            done = True
            return self._decode(answer, kind)
        finally:
            # Whatever the reason: what nobody will hear of must not go on.
            if not done:
                self._end(request_id)

    async def upload(self, source: IO[bytes]) -> str:
        """Send a file; returns its id there."""
        answer, _ = await self._send("PUT", "/v4/files", _chunks(source), {})
        return self._decode(answer, m.Uploaded).file

    async def download(self, file: str, destination: IO[bytes], num_bytes: int) -> None:
        """Fetch a file, all of it, and remove it there.

        Raises:
            RemoteFailure: not all of it came.
        """
        path = f"/v4/files/{file}"
        got = 0
        try:
            async with self._session().get(self._base + path) as response:
                if response.status != 200:
                    self._checked(response, await response.read())
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    got += len(chunk)
                    await asyncio.to_thread(destination.write, chunk)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if got != num_bytes:
            what = f"{got} of {num_bytes} bytes came"
            raise RemoteFailure(ProblemKind.UNREACHABLE, self.url, what)
        await self.delete(path)

    async def close(self) -> None:
        """Say what is left to say, and hang up."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CONNECT_S)
        if self._http is not None:
            await self._http.close()

    async def _start(
        self, path: str, body: bytes, headers: dict[str, str], deadline_s: float | None
    ) -> bytes | None:
        while True:
            try:
                start = self._retry_pending("POST", path, body, headers)
                return await _within(start, deadline_s)
            except RemoteFailure as error:
                late = deadline_s is not None and time.monotonic() >= deadline_s
                if error.kind is not ProblemKind.BUSY or late:
                    raise
            await asyncio.sleep(_BUSY_PAUSE_S)

    def _end(self, request_id: str) -> None:
        async def tell() -> None:
            try:
                await self._retry("DELETE", f"/v4/requests/{request_id}")
            except (RemoteFailure, UserError, ValueError, OSError) as error:
                # It ends there without us, once nobody asks for it.
                _LOG.debug("a request could not be ended: %s", error)

        task = asyncio.get_running_loop().create_task(tell())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _retry(self, method: str, path: str, body: bytes | None = None) -> bytes:
        answer = await self._retry_pending(method, path, body)
        assert answer is not None
        return answer

    async def _retry_pending(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes | None:
        """The answer, or None for `Pending`."""
        for pause_s in (*_PAUSES_S, None):
            try:
                answer, status = await self._send(method, path, body, headers or {})
            except RemoteFailure as error:
                if pause_s is None or error.kind is not ProblemKind.UNREACHABLE:
                    raise
                if error.__cause__ is None or _nobody_there(
                    error.__cause__, bound=path.startswith(_BOUND)
                ):
                    raise
                await asyncio.sleep(pause_s)
            else:
                return None if status == 202 else answer
        raise AssertionError("the last try returns or raises")

    async def _send(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[bytes, int]:
        try:
            async with self._session().request(
                method, self._base + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        self._checked(response, answer)
        return answer, response.status

    def _checked(self, response: aiohttp.ClientResponse, answer: bytes) -> None:
        version = response.headers.get(m.API_HEADER)
        if version is None:
            what = f"HTTP status {response.status} from something that is no burnish sandbox server"
            raise RemoteFailure(ProblemKind.UNREACHABLE, self.url, what)
        if version != str(m.API_VERSION):
            what = f"it speaks version {version[:20]} of the interface, not {m.API_VERSION}"
            problem = m.Problem(kind=ProblemKind.VERSION, message=what)
            raise exception_of(problem, self.url)
        if response.status not in (200, 202):
            raise exception_of(self._decode(answer, m.Problem), self.url)

    def _decode(self, answer: bytes, kind: type[T]) -> T:
        try:
            return m.decode(answer, kind)
        except m.Malformed as error:
            raise RemoteFailure(ProblemKind.MALFORMED, self.url, str(error)) from error

    def _unreachable(self, error: Exception) -> RemoteFailure:
        what = str(error).strip() or one_line(error).rstrip(": ")
        failure = RemoteFailure(ProblemKind.UNREACHABLE, self.url, what)
        failure.__cause__ = error
        return failure

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector: aiohttp.BaseConnector
            if self._socket is not None:
                # Every command in every box holds a connection while it runs.
                connector = aiohttp.UnixConnector(self._socket, limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl or True)
            self._http = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S
                ),
            )
        return self._http


def split_url(url: str) -> tuple[str, str | None]:
    """(base of HTTP requests, path of the Unix socket or None).

    Raises:
        UserError: not a URL of a server.
    """
    fix = "as in https://host:8321, http://127.0.0.1:8321 or http+unix:///run/burnish.sock"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{url!r} is no URL: {error}.", fix=fix) from error
    if parts.query or parts.fragment or parts.username is not None:
        raise UserError(f"{url!r} has more than a server's URL may have.", fix=fix)
    if parts.scheme == "http+unix" and not parts.netloc and parts.path.startswith("/"):
        return "http://localhost", unquote(parts.path)
    if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        return f"{parts.scheme}://{parts.netloc}", None
    raise UserError(f"{url!r} is no URL of a sandbox server.", fix=fix)


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        what = f"{ca_file} holds no certificates: {error}."
        raise UserError(what, fix="give the PEM file of the authority") from error


def _nobody_there(error: BaseException | None, *, bound: bool) -> bool:
    """Whether to give up at once: what listened there is gone, with all that it had.

    A host that cannot be reached at all may come back to what is `bound` to it; anything else is
    better asked of another host.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.errno in _NOBODY or (not bound and error.errno != errno.EAGAIN)
    return isinstance(error, aiohttp.ConnectionTimeoutError) and not bound


async def _within(
    answer: Coroutine[Any, Any, bytes | None], deadline_s: float | None
) -> bytes | None:
    """The answer, or None at the deadline."""
    if deadline_s is None:
        return await answer
    try:
        return await asyncio.wait_for(answer, max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return None


async def _chunks(source: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(source.read, _CHUNK_BYTES):
        yield chunk
