"""Runs in a box: the process that executes code in a namespace, and messages to and from it.

Works with Python 3.9 and later, standard library only.
"""

from __future__ import annotations

import array
import ast
import json
import linecache
import os
import signal
import socket
import struct
import sys
import traceback
import types
import warnings
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 64 << 20
LENGTH = struct.Struct("<I")

Message = dict[str, Any]


def receive(channel: socket.socket) -> Message | None:
    """The next message, or None if the other side is gone."""
    head = receive_exactly(channel, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        return None
    body = receive_exactly(channel, length)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    """That many bytes, or None."""
    data = b""
    while len(data) < count:
        try:
            chunk = channel.recv(min(count - len(data), 1 << 20))
        except OSError:
            return None
        if not chunk:
            return None
        data += chunk
    return data


def send(channel: socket.socket, message: Message) -> None:
    """Send a message."""
    body = json.dumps(message).encode("ascii")
    channel.sendall(LENGTH.pack(len(body)) + body)


def printable(text: str, limit: int) -> str:
    """What every JSON reader takes: no lone surrogates; at most `limit` characters."""
    return text[:limit].encode("utf-8", "backslashreplace").decode("utf-8")


def reap() -> None:
    """Collect children that ended, so that they do not count as processes of the box."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:
        return


class Kernel:
    """Executes code. After a fork the child is the kernel, and the parent frozen."""

    def __init__(self, channel: socket.socket) -> None:
        """Begin with an empty namespace, which is that of `__main__`."""
        self.channel = channel
        self.running = False
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.namespace: dict[str, Any] = main.__dict__
        self.count = 0

    def serve(self) -> NoReturn:
        """Until the supervisor goes."""
        while True:
            message = receive(self.channel)
            if message is None:
                os._exit(0)
            if message["op"] == "fork":
                self.fork()
            else:
                pid = os.getpid()
                answer = self.execute(message["code"], message["max_chars"])
                if os.getpid() != pid:
                    # The code forked and its child came back here: there is one kernel.
                    os._exit(0)
                send(self.channel, answer)

    def fork(self) -> None:
        """Answer with the end of a new channel, whose other end the child has."""
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. They do not come along, which is documented.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            ours.close()
            self.channel.close()
            self.channel = theirs
            return
        theirs.close()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ours.fileno()]))
        self.channel.sendmsg([struct.pack("<i", pid)], [rights])
        ours.close()
        # Frozen from now on: what ends are its forks, and nobody else waits for them.
        reap()

    def execute(self, code: str, max_chars: int) -> Message:
        """Run code; the value is that of a last expression."""
        self.count += 1
        name = f"<cell {self.count}>"
        answer: Message = {"value": None, "error": None, "cut": False}
        signal.signal(signal.SIGINT, self.interrupt)
        try:
            try:
                self.running = True
                value = self.run(code, name)
                text = None if value is None else repr(value)
            finally:
                self.running = False
            if text is not None:
                answer["value"] = printable(text, max_chars)
                answer["cut"] = len(text) > max_chars
        except KeyboardInterrupt:
            answer["error"] = self.describe(max_chars)
        except BaseException:  # noqa: BLE001 (whatever user code raises is its result)
            answer["error"] = self.describe(max_chars)
        self.flush()
        return answer

    def run(self, code: str, name: str) -> Any:
        """The value of the last expression, or None."""
        tree = ast.parse(code, name)
        lines = code.splitlines(keepends=True)
        linecache.cache[name] = (len(code), None, lines, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        exec(compile(tree, name, "exec"), self.namespace)
        if last is None:
            return None
        return eval(compile(last, name, "eval"), self.namespace)

    def interrupt(self, number: int, frame: types.FrameType | None) -> None:
        """SIGINT that comes too late to stop anything is none."""
        if self.running:
            raise KeyboardInterrupt

    def describe(self, max_chars: int) -> str:
        """The traceback from the user's code on."""
        kind, error, trace = sys.exc_info()
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next
        try:
            text = "".join(traceback.format_exception(kind, error, trace))
        except BaseException:  # noqa: BLE001 (an exception whose text raises)
            text = f"{kind.__name__ if kind else 'error'} (its text cannot be made)\n"
        if len(text) > max_chars:
            # The end says what happened.
            text = "..." + text[-max(0, max_chars - 3) :]
        return printable(text, max_chars)

    def flush(self) -> None:
        """What code did to its streams must not end the kernel."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # noqa: BLE001 (streams may be replaced by anything)
                continue
