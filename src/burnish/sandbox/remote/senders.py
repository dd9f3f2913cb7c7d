"""Who may ask a server, and as whom."""

import hmac
import re
from collections.abc import Mapping
from ipaddress import ip_address

from aiohttp import web

from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused


class Senders:
    """Those who have a token."""

    def __init__(self, tokens: Mapping[str, str] | None) -> None:
        """Let these in.

        Args:
            tokens: what they send, and whose it is ("": anybody's); None: all on this machine.
        """
        self._tokens = None if tokens is None else {t.encode(): n for t, n in tokens.items()}
        self.num_refused = 0
        """Requests with no token, or a wrong one."""

    def user_of(self, request: web.Request) -> str:
        """Whose token came; "" if it is nobody's in particular.

        Raises:
            Refused: none came, or a wrong one.
        """
        if self._tokens is None:
            # A web page must not reach us under a name of its own that leads to this machine.
            if not _is_local(request.host):
                raise Refused(ProblemKind.UNAUTHORIZED, "without a token only local names serve")
            return ""
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        # The names of schemes are the same in any case (RFC 9110, section 11.1).
        sent = credentials.strip(" ") if scheme.lower() == "bearer" else ""
        given = sent.encode("utf-8", "surrogateescape")
        # All are compared, so that the time says nothing.
        found = [name for token, name in self._tokens.items() if hmac.compare_digest(given, token)]
        if not found:
            self.num_refused += 1
            raise Refused(ProblemKind.UNAUTHORIZED, "no token, or a wrong one")
        return found[0]


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
