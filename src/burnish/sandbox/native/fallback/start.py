"""The entry: a helper, or a template of warm Python jobs."""

from __future__ import annotations

import gc
import resource
import socket
import sys

from ..protocol import Op
from . import kernel
from .hello import parse_hello
from .stage import Stage, make_stage
from .template import Wish, launch, read_sources, serve_template
from .wire import Channel, Malformed, Message, close_all, read_all
from .zygote import Helper

_SITE = ("site", "no-site")
_USAGE = "usage: FD | --template INTERPRETER site|no-site PATH:PATH... [MODULE...] FD"


def main(arguments: list[str]) -> int:
    """Exit status."""
    if arguments == ["--serve"]:
        return serve_template()
    _lower_limits()
    wish = None
    if len(arguments) >= 5 and arguments[0] == "--template" and arguments[2] in _SITE:
        _, interpreter, site, paths, *modules, number = arguments
        found = [path for path in paths.split(":") if path]
        wish = Wish(interpreter, site == "site", found, modules)
    elif len(arguments) == 1:
        number = arguments[0]
    else:
        number = ""
    if not number.isdigit():
        sys.stderr.write(_USAGE + "\n")
        return 2
    return serve(Channel(socket.socket(fileno=int(number))), wish)


def _lower_limits() -> None:
    """For the boxes, as the C helper does (`prepare` in main.c)."""
    for which, most in ((resource.RLIMIT_CORE, 1), (resource.RLIMIT_SIGPENDING, 256)):
        _, hard = resource.getrlimit(which)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (least, least))


def serve(channel: Channel, wish: Wish | None) -> int:
    """Wait for HELLO, build the stage, then serve or become the launcher of a template."""
    request = 0
    try:
        message = channel.receive()
        if message is None:
            return 0
        if message.op != Op.HELLO or len(message.fds) != 1:
            close_all(message.fds)
            raise Malformed("HELLO with a filter comes first")
        request = message.id
        stage, sources = _prepare(message, wish)
    except Malformed as error:
        sys.stderr.write(f"sandbox helper: {error}\n")
        return 1
    except OSError as error:
        channel.send_error(request, error.errno or 0, str(error))
        return 1
    if wish is not None:
        return launch(channel, message, stage, wish, sources)
    kernel.rename_process(b"init")
    gc.collect()
    gc.freeze()
    gc.disable()
    return Helper(channel, stage).serve(message.id)


def _prepare(message: Message, wish: Wish | None) -> tuple[Stage, dict[str, bytes]]:
    """Read what is needed of the host, then leave it."""
    try:
        hello = parse_hello(message)
        program = read_all(message.fds[0])
    finally:
        close_all(message.fds)
    sources = read_sources() if wish is not None else {}
    return make_stage(hello, program), sources
