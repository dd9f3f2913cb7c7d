"""HTTP with one server: JSON in, JSON or a stream of JSON events out, every failure typed.

Nothing is sent twice here. Whether a request may go out again is decided where it is known what
the request means.
"""

import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from burnish.core.errors import UserError, one_line
from burnish.rollout.remote.config import RemoteConfig
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem, refused

# One event of a stream: 256 log-probs of a long chunk are some 20 kB.
_MAX_EVENT_BYTES = 16 * 2**20
_MAX_ERROR_BYTES = 64 * 2**10


class Wire:
    """Talks to one server. All methods run in one loop."""

    def __init__(self, url: str, config: RemoteConfig) -> None:
        """Nothing is sent yet.

        Raises:
            UserError: the URL, the token or the CA file cannot be used.
        """
        self.url = _checked_url(url)
        self._ssl = _trust(config.ca_file) if self.url.startswith("https:") else None
        self._headers = {"Accept": "application/json, text/event-stream"}
        token = read_token(config)
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connect_s, self._silence_s = config.connect_timeout_s, config.silence_timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The JSON of an answer; None if its body is empty.

        Raises:
            UserError: the server refuses the request as wrong.
            RemoteFailure: it cannot be reached, failed, or sent no JSON.
        """
        async with self._request("GET", path, None, timeout_s) as response:
            return self._json(await self._body(response))

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        is_text: bool = False,
    ) -> Any:
        """As `get`, with a JSON body; an answer that `is_text` is not read."""
        async with self._request("POST", path, body, timeout_s, query) as response:
            data = await self._body(response)
            return None if is_text else self._json(data)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The server-sent events of an answer, up to `[DONE]`; closing it hangs up.

        Raises:
            UserError: the server refuses the request as wrong.
            RemoteFailure: as `get`; `lost` if the stream ends without its end mark.
        """
        async with self._request("POST", path, body, None) as response:
            if "event-stream" not in response.headers.get("Content-Type", ""):
                what = "a stream was asked for, and something else came"
                raise RemoteFailure(RemoteProblem.MALFORMED, self.url, what)
            pending = b""
            while chunk := await self._more(response):
                *lines, pending = (pending + chunk).split(b"\n")
                if len(pending) > _MAX_EVENT_BYTES:
                    what = f"an event is longer than {_MAX_EVENT_BYTES >> 20} MiB"
                    raise RemoteFailure(RemoteProblem.MALFORMED, self.url, what)
                for line in lines:
                    data = line.strip()
                    if not data.startswith(b"data:"):
                        continue
                    data = data[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield self._event(data)
        raise RemoteFailure(RemoteProblem.LOST, self.url, "the stream ended in the middle")

    async def close(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.close()

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_s: float | None,
        query: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limits = aiohttp.ClientTimeout(
            total=timeout_s,
            sock_connect=self._connect_s,
            sock_read=None if timeout_s is not None else self._silence_s,
        )
        try:
            response = await self._session().request(
                method,
                self.url + path,
                json=body,
                params=query,
                timeout=limits,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._translated(error, timeout_s) from error
        try:
            if response.status != 200:
                raise refused(self.url, response.status, await self._reason(response))
            yield response
        finally:
            # An answer that nobody reads to its end is ended here: the server sees it and stops.
            response.close()

    async def _reason(self, response: aiohttp.ClientResponse) -> str:
        try:
            data = await response.content.read(_MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""
        text = data.decode("utf-8", "replace")
        try:
            document = json.loads(text)
        except ValueError:
            return text
        for _ in range(3):
            if isinstance(document, dict):
                document = (
                    document.get("error") or document.get("message") or document.get("detail")
                )
        return str(document or text)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._translated(error, None) from error

    async def _more(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._translated(error, None) from error

    def _event(self, data: bytes) -> Any:
        event = self._json(data)
        if isinstance(event, dict) and event.get("error"):
            error = event["error"]
            message = error.get("message") if isinstance(error, dict) else error
            code = error.get("code") if isinstance(error, dict) else None
            if isinstance(code, int) and 400 <= code < 500:
                # It had begun to answer before it looked at the request.
                raise refused(self.url, code, str(message))
            raise RemoteFailure(RemoteProblem.BROKEN, self.url, f"the request failed: {message}")
        return event

    def _json(self, data: bytes) -> Any:
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RemoteFailure(
                RemoteProblem.MALFORMED, self.url, f"no JSON came: {one_line(error, 80)}"
            ) from error

    def _translated(self, error: Exception, timeout_s: float | None) -> Exception:
        what = one_line(error, 200)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return UserError(
                f"{self.url}: its certificate is not trusted.",
                fix="give the PEM file of its authority as engine.remote.ca_file.",
            )
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return RemoteFailure(RemoteProblem.UNREACHABLE, self.url, what)
        if isinstance(error, TimeoutError):
            limit = f"{timeout_s:g} s" if timeout_s is not None else f"{self._silence_s:g} s"
            return RemoteFailure(RemoteProblem.TIMEOUT, self.url, f"no answer within {limit}")
        return RemoteFailure(RemoteProblem.LOST, self.url, what)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                # Every running request holds a connection.
                connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl or True),
                headers=self._headers,
                read_bufsize=2**18,
            )
        return self._http


def read_token(config: RemoteConfig) -> str | None:
    """The bearer token, if there is one.

    Raises:
        UserError: it is not there, or no line of text.
    """
    if config.token_env is not None and config.token_file is not None:
        raise UserError(
            "engine.remote.token_env and engine.remote.token_file are both set.", fix="keep one."
        )
    if config.token_env is not None:
        token = os.environ.get(config.token_env, "")
        where = f"environment variable {config.token_env}"
    elif config.token_file is not None:
        where = str(config.token_file)
        try:
            token = config.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"engine.remote.token_file cannot be read: {one_line(error)}.",
                fix="give a file with the token in it.",
            ) from error
    else:
        return None
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f"{where} holds no token.", fix="put the server's token there, one line.")
    return token


def _checked_url(url: str) -> str:
    fix = "as in http://127.0.0.1:8000 or https://host:8000"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"engine.remote.urls: {url!r} is no URL: {error}.", fix=fix) from error
    plain = not (parts.query or parts.fragment or parts.username is not None)
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"engine.remote.urls: {url!r} is no URL of a server.", fix=fix)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        what = f"engine.remote.ca_file {ca_file} holds no certificates: {one_line(error)}."
        raise UserError(what, fix="give the PEM file of the authority.") from error
