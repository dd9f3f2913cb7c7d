"""Runs in a box: a Python interpreter that lives on between commands, and its checkpoints.

    supervisor                one per kernel; holds no user code; answers one request at a time
      |-- kernel              executes code in one namespace
      |-- frozen kernel       a checkpoint: a kernel that forked and waits; each restore forks it
      '-- ...

The supervisor listens on an abstract socket, which only this box's network namespace has. A request
is JSON, ended by shutting down the sender's side; the answer is JSON. Kernels speak with the
supervisor over a socket pair, in messages with a length before them. Their stdout and stderr are
pipes that the supervisor empties, keeping at most what was asked for.

Everything here runs with the rights of the job: hostile code can break its own kernel, so the owner
of the box believes nothing that comes out. Works with Python 3.9 and later, standard library only.

argv: name of the socket, most checkpoints.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import NamedTuple, NoReturn

from burnish.sandbox.session.kernel_process import (
    MAX_MESSAGE_BYTES,
    Kernel,
    Message,
    reap,
    receive,
    send,
)

GRACE_S = 2.0
# A kernel that ignores an interrupt for so long is killed: above any `finally` worth waiting for.

FORK_DEADLINE_S = 10.0
# A fork of a large process takes 30 ms per GiB; one that takes longer hangs.


class Process(NamedTuple):
    """A kernel as the supervisor sees it."""

    pid: int
    channel: socket.socket
    ended: int
    """Descriptor that is readable when it has ended, whoever else holds its end of the channel."""

    def forget(self) -> None:
        """Free the descriptors."""
        self.channel.close()
        os.close(self.ended)

    def kill(self) -> None:
        """End it."""
        kill(self.pid, signal.SIGKILL)
        self.forget()


class Streams:
    """What a kernel prints while it answers a request."""

    def __init__(self, out: int, err: int, limit: int) -> None:
        """Keep at most `limit` bytes of each."""
        self.kept = {out: bytearray(), err: bytearray()}
        self.limit = limit
        self.cut = False

    def drain(self) -> None:
        """Empty the pipes, or read 4 MiB of an endless stream."""
        for descriptor, kept in self.kept.items():
            for _ in range(64):
                try:
                    chunk = os.read(descriptor, 1 << 16)
                except BlockingIOError:
                    break
                room = self.limit - len(kept)
                kept += chunk[: max(0, room)]
                self.cut |= len(chunk) > room


def converse(
    kernel: Process, connection: socket.socket, streams: Streams, timeout_s: float
) -> tuple[Message | None, bool]:
    """Wait for the answer of a kernel: None if it died. True: it was interrupted."""
    channel = kernel.channel.fileno()
    poll = select.poll()
    for descriptor in (channel, kernel.ended, *streams.kept):
        poll.register(descriptor, select.POLLIN)
    # Both directions closed: whoever asked is gone, so nobody wants the answer.
    poll.register(connection.fileno(), 0)
    deadline, interrupted = time.monotonic() + timeout_s, False
    while True:
        # An hour at most, as poll takes no more than 24 days.
        left_s = min(3600.0, max(0.0, deadline - time.monotonic()))
        events = dict(poll.poll(left_s * 1000))
        streams.drain()
        if channel in events:
            return receive(kernel.channel), interrupted
        if kernel.ended in events:
            return None, interrupted
        if connection.fileno() in events:
            poll.unregister(connection.fileno())
            deadline = min(deadline, time.monotonic())
        if time.monotonic() < deadline:
            continue
        if interrupted:
            kill(kernel.pid, signal.SIGKILL)
            select.select([kernel.ended], [], [])
            return None, True
        kill(kernel.pid, signal.SIGINT)
        interrupted, deadline = True, time.monotonic() + GRACE_S


class Supervisor:
    """Keeps kernels and answers requests."""

    def __init__(self, listener: socket.socket, max_checkpoints: int) -> None:
        """Start the first kernel."""
        self.listener = listener
        self.max_checkpoints = max_checkpoints
        self.frozen: dict[int, Process] = {}
        self.next_checkpoint = 1
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        for descriptor in (self.out, self.err):
            os.set_blocking(descriptor, False)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            listener.close()
            os.close(self.out)
            os.close(self.err)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.close(out)
            os.close(err)
            for stream in (sys.stdout, sys.stderr):
                assert isinstance(stream, io.TextIOWrapper)
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
            sys.argv = [""]
            Kernel(theirs).serve()
        theirs.close()
        # Open here too, so that the pipes never end while a kernel may be forked.
        self.kept = (out, err)
        self.live: Process | None = Process(pid, ours, os.pidfd_open(pid))

    def serve(self) -> NoReturn:
        """One request at a time."""
        while True:
            connection, _ = self.listener.accept()
            with connection:
                request = read_request(connection)
                if request is not None:
                    self.answer(connection, request)
            reap()

    def answer(self, connection: socket.socket, request: Message) -> None:
        """Do what is asked, and say so if anybody still listens."""
        operations = {
            "execute": self.execute,
            "checkpoint": self.checkpoint,
            "restore": self.restore,
            "drop": self.drop,
        }
        reply = operations[request["op"]](connection, request)
        try:
            connection.sendall(json.dumps(reply).encode("ascii"))
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def execute(self, connection: socket.socket, request: Message) -> Message:
        """Run code in the live kernel."""
        if self.live is None:
            return {"status": "died", "why": "there is no living kernel"}
        kernel, limit = self.live, request["max_bytes"]
        try:
            send(kernel.channel, {"op": "execute", "code": request["code"], "max_chars": limit})
        except OSError:
            return self.buried("it was dead already")
        streams = Streams(self.out, self.err, limit)
        answer, interrupted = converse(kernel, connection, streams, request["timeout_s"])
        streams.drain()
        if answer is None:
            why = "it ignored the interrupt and was killed" if interrupted else "it ended by itself"
            reply = self.buried(why)
        else:
            status = "timeout" if interrupted else "error" if answer.get("error") else "ok"
            streams.cut |= bool(answer.pop("cut", False))
            reply = {**answer, "status": status}
        out, err = (bytes(kept).decode("latin-1") for kept in streams.kept.values())
        return {**reply, "stdout": out, "stderr": err, "truncated": streams.cut}

    def checkpoint(self, connection: socket.socket, request: Message) -> Message:
        """The live kernel freezes; a fork of it lives on."""
        if self.live is None:
            return {"status": "died", "why": "there is no living kernel"}
        if len(self.frozen) >= self.max_checkpoints:
            return {"status": "full"}
        frozen = self.live
        child = forked(frozen)
        if child is None:
            kill(frozen.pid, signal.SIGKILL)
            return self.buried("it could not be forked")
        number = self.next_checkpoint
        self.next_checkpoint += 1
        self.frozen[number] = frozen
        self.live = child
        return {"status": "ok", "checkpoint": number}

    def restore(self, connection: socket.socket, request: Message) -> Message:
        """A fork of a frozen kernel takes the place of the live one."""
        frozen = self.frozen.get(request["checkpoint"])
        child = forked(frozen) if frozen is not None else None
        if child is None:
            return {"status": "lost"}
        if self.live is not None:
            self.live.kill()
        # What the old one had still to say belongs to no request.
        Streams(self.out, self.err, 0).drain()
        self.live = child
        return {"status": "ok"}

    def drop(self, connection: socket.socket, request: Message) -> Message:
        """Free a checkpoint."""
        frozen = self.frozen.pop(request["checkpoint"], None)
        if frozen is not None:
            frozen.kill()
        return {"status": "ok"}

    def buried(self, why: str) -> Message:
        """The live kernel is gone."""
        if self.live is not None:
            self.live.forget()
            self.live = None
        return {"status": "died", "why": why}


def forked(kernel: Process) -> Process | None:
    """A new kernel like this one, or None if this one is gone."""
    try:
        send(kernel.channel, {"op": "fork"})
        if not select.select([kernel.channel], [], [], FORK_DEADLINE_S)[0]:
            return None
        data, ancillary, _, _ = kernel.channel.recvmsg(4, socket.CMSG_SPACE(4))
    except OSError:
        return None
    if len(data) != 4 or len(ancillary) != 1:
        return None
    (descriptor,) = struct.unpack("i", ancillary[0][2][:4])
    channel = socket.socket(fileno=descriptor)
    (pid,) = struct.unpack("<i", data)
    try:
        return Process(pid, channel, os.pidfd_open(pid))
    except OSError:
        channel.close()
        return None


def kill(pid: int, number: int) -> None:
    """Signal a kernel that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def read_request(connection: socket.socket) -> Message | None:
    """A whole request, or None."""
    data = b""
    connection.settimeout(FORK_DEADLINE_S)
    try:
        while chunk := connection.recv(1 << 20):
            data += chunk
            if len(data) > MAX_MESSAGE_BYTES:
                return None
        request = json.loads(data)
    except (OSError, ValueError):
        return None
    return request if isinstance(request, dict) else None


def main() -> None:
    """Start in the background; return when the socket listens."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + sys.argv[1])
    listener.listen(4)
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    Supervisor(listener, int(sys.argv[2])).serve()
