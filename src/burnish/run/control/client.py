"""Asks a live run."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.run.control.messages import Answer, Verb
from burnish.run.control.server import ShortName

_ANSWER_S = 10.0
# Adding a domain runs the quality gate first, which can take minutes.
_GATE_S = 600.0


class SilentError(UserError):
    """Somebody holds the socket and says nothing."""


def ask_for(
    path: Path, kind: type[Record], fields: Mapping[str, Any], *, usage: str, fix: str
) -> dict[str, Any]:
    """Send a request made of `fields`; what the answer holds.

    Args:
        path: of the socket.
        kind: of the request.
        fields: its values.
        usage: a command that says which values there are.
        fix: of a refusal that names none itself.

    Raises:
        UserError: a value makes no sense, nobody listens, or it was refused.
    """
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise UserError(_said_of_a_flag(str(error), fields), fix=usage) from error
    answer = ask(path, request)
    if not answer.ok:
        what, _, given = (answer.error or "refused").partition(" Fix: ")
        raise UserError(what, fix=given or fix)
    return answer.result


def ask(path: Path, request: Record) -> Answer:
    """Send one request to the socket at `path`.

    Raises:
        SilentError: who listens there does not answer in time.
        UserError: nobody listens there, or the socket is another user's.
    """
    # Requests to the jobs daemon have verbs of their own, none of which takes long.
    patience_s = _GATE_S if getattr(request, "verb", None) is Verb.ADD else _ANSWER_S
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(patience_s)
            with ShortName(path) as name:
                link.connect(name)
            link.sendall(msgspec.json.encode(request) + b"\n")
            line = link.makefile("rb").readline()
    except TimeoutError as error:
        raise SilentError(
            f"{path.parent} does not answer (stopped? nothing came in {patience_s:.0f} s).",
            fix="wake its process if it was stopped (kill -CONT), or ask again later.",
        ) from error
    except OSError as error:
        raise UserError(
            f"{path.parent} does not answer ({error.strerror or error}).",
            fix="name the directory of a run that trains now, or start `burnish jobs serve`.",
        ) from error
    if not line:
        raise UserError(f"{path.parent} hung up.", fix="ask again; it may have just ended.")
    return msgspec.json.decode(line, type=Answer)


def _said_of_a_flag(message: str, fields: Mapping[str, Any]) -> str:
    """What a decoder says of a path in a message, said of what was typed."""
    found = re.fullmatch(r"(.*) - at `\$\.(\w+).*`", message)
    if found is None or found[2] not in fields:
        return f"{message}."
    name, value = found[2], str(fields[found[2]])[:80]
    flag = "the name" if name == "job_id" else f"--{name.replace('_', '-')}"
    expected = found[1].replace("`", "")
    return f"{flag} {value!r}: {expected[:1].lower()}{expected[1:]}."
