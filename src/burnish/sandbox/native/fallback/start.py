"""The entry: a helper, or a template of warm Python jobs.

What only one of them needs is imported for that one: it takes as long as all the rest.
"""

from __future__ import annotations

import gc
import resource
import signal
import socket
import sys
from functools import partial
from typing import Callable

from ..protocol import Ability, Op
from . import kernel
from .hello import Hello, parse_hello
from .stage import Stage, make_stage, network_works
from .wire import Channel, Malformed, Message, close_all, read_all

Start = Callable[[Channel, Message, Hello, bytes], int]
"""What goes on after HELLO, which it gets, with the filter; returns the exit status."""
Role = Callable[[Channel, Message, Stage], int]
"""What goes on when the stage is there."""
_SITE = ("site", "no-site")
_USAGE = "usage: [--zygote FILE] FD | --template INTERPRETER site|no-site PATH:PATH... MODULE... FD"


def main(arguments: list[str]) -> int:
    """Exit status."""
    _hear_signals()
    if arguments == ["--serve"]:
        from .template import serve_template

        return serve_template()
    _lower_limits()
    start: Start
    if len(arguments) >= 5 and arguments[0] == "--template" and arguments[2] in _SITE:
        from .template import Wish, launch, read_sources

        _, interpreter, site, paths, *modules, number = arguments
        found = [path for path in paths.split(":") if path]
        wish = Wish(interpreter, site == "site", found, modules)
        start = partial(_leave_host, partial(launch, wish=wish, sources=read_sources()))
    elif len(arguments) == 3 and arguments[0] == "--zygote":
        from .zygote_start import become_zygote

        _, binary, number = arguments
        start = partial(become_zygote, binary)
    elif len(arguments) == 1:
        from .zygote import Helper

        def serve_boxes(channel: Channel, message: Message, stage: Stage) -> int:
            kernel.rename_process(b"init")
            gc.collect()
            gc.freeze()
            gc.disable()
            return Helper(channel, stage).serve(message.id)

        number = arguments[0]
        start = partial(_leave_host, serve_boxes)
    else:
        number = ""
    if not number.isdigit():
        sys.stderr.write(_USAGE + "\n")
        return 2
    return serve(Channel(socket.socket(fileno=int(number))), start)


def _hear_signals() -> None:
    """Boxes inherit what is ignored, and `nohup` or a shell's background may have begun this."""
    # Those two are the interpreter's own: without them a closed socket would end us.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _lower_limits() -> None:
    """For the boxes: those that nobody asks for.

    With a core limit of 1 the kernel neither writes a file nor starts, as root of the host, what
    core_pattern may name: with any other it does, 0 too. Queued signals are counted for us as
    well: one box could leave none to the host.
    """
    for which, most in ((resource.RLIMIT_CORE, 1), (resource.RLIMIT_SIGPENDING, 256)):
        _, hard = resource.getrlimit(which)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (least, least))


def serve(channel: Channel, start: Start) -> int:
    """Wait for HELLO, then be what we are to be."""
    request = 0
    try:
        message = channel.receive()
        if message is None:
            return 0
        if message.op != Op.HELLO or len(message.fds) != 1:
            close_all(message.fds)
            raise Malformed("HELLO with a filter comes first")
        request = message.id
        try:
            hello, program = parse_hello(message), read_all(message.fds[0])
        finally:
            close_all(message.fds)
        return start(channel, message, hello, program)
    except Malformed as error:
        sys.stderr.write(f"sandbox helper: {error}\n")
        return 1
    except OSError as error:
        channel.send_error(request, error.errno or 0, str(error))
        return 1


def _leave_host(
    role: Role, channel: Channel, message: Message, hello: Hello, program: bytes
) -> int:
    stage = make_stage(hello, program)
    kernel.enter_root(".")
    if network_works():
        stage = stage._replace(abilities=stage.abilities | Ability.NETWORK)
    return role(channel, message, stage)
