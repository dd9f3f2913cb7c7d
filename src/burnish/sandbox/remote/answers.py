"""What a server says: answers, refusals, and which version of the interface it speaks."""

import re

import msgspec
from aiohttp import web

from burnish.core.records import Record
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.jobs import Reply
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused, http_status, problem_of


def check_version(request: web.Request) -> None:
    """Refuse paths of another version.

    Raises:
        Refused: it is of another one.
    """
    found = re.match(r"/v(\d{1,6})/", request.path)
    if found and int(found[1]) != m.API_VERSION:
        what = f"the server speaks version {m.API_VERSION} of the interface, not {found[1]}"
        raise Refused(ProblemKind.VERSION, what)


def reply(reply: Reply) -> web.Response:
    """An answer that is encoded already."""
    return web.Response(status=reply.status, body=reply.body, content_type=m.CONTENT_TYPE)


def answer(request: web.Request, message: Record, status: int = 200) -> web.Response:
    """MessagePack for those who accept it; JSON for all others."""
    if m.CONTENT_TYPE in request.headers.get("Accept", ""):
        return reply(Reply(status, m.encode(message)))
    text = msgspec.json.encode(message) + b"\n"
    return web.Response(status=status, body=text, content_type="application/json")


def problem(request: web.Request, error: BaseException) -> web.Response:
    """The answer to a request that failed."""
    found = problem_of(error)
    return answer(request, found, http_status(found))
