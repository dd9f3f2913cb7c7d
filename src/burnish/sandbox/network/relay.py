"""Runs inside of a box: carries connections to 127.0.0.1:PORT over to a unix socket.

    python3 -I -S relay.py SOCKET PORT [program argument...]

For boxes whose sockets are not this machine's (gVisor): a unix socket of ours is bound into the box
at SOCKET. The relay listens, leaves a process behind that
carries, and becomes the program; without one it ends with status 0 once it listens. It judges
nothing: all that it could decide, code in the box could decide otherwise.

The image needs a Python; gVisor needs `--host-uds=open` to reach the socket.

Only the standard library, any Python from 3.6 on, one file: it is copied into boxes. One thread,
bounded buffers.
"""

import os
import select
import socket
import sys
import time

BUFFER_BYTES = 64 * 1024
MAX_CONNECTIONS = 64
_ACCEPT_PAUSE_S = 0.05
_READ = select.POLLIN
_WRITE = select.POLLOUT


def relay_source() -> bytes:
    """This file, to be written into a box."""
    with open(__file__, "rb") as file:
        return file.read()


class End:
    """One side of a carried connection."""

    def __init__(self, sock: socket.socket) -> None:
        """`other` is set by whoever makes the pair."""
        sock.setblocking(False)
        self.sock = sock
        self.other = self
        self.out = bytearray()
        self.ended = False
        self.shut = False
        self.waited_for = False

    def events(self) -> int:
        """What it waits for."""
        reads = not self.ended and len(self.other.out) < BUFFER_BYTES
        return (_READ if reads else 0) | (_WRITE if self.out else 0)

    def read(self) -> None:
        """Take bytes for the other side."""
        data = self.sock.recv(BUFFER_BYTES)
        self.other.out += data
        self.ended = not data

    def write(self) -> None:
        """Send what waits, and the end if the other side has ended."""
        if self.out:
            del self.out[: self.sock.send(self.out)]
        if self.other.ended and not self.out and not self.shut:
            self.sock.shutdown(socket.SHUT_WR)
            self.shut = True

    def step(self, events: int) -> bool:
        """Do what is possible; False if the connection is over."""
        try:
            if events & (_READ | select.POLLHUP | select.POLLERR) and not self.ended:
                self.read()
            self.write()
            self.other.write()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return not (self.shut and self.other.shut)


class Carrier:
    """Pairs connections to the listener with connections to the socket at `path`."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        """Serves with `serve`."""
        self._listener = listener
        self._path = path
        self._poll = select.poll()
        self._ends = {}  # type: dict[int, End]

    def serve(self) -> None:
        """Until killed."""
        self._poll.register(self._listener, _READ)
        while True:
            for number, events in self._poll.poll():
                end = self._ends.get(number)
                if number == self._listener.fileno():
                    self._accept()
                elif end is None:
                    continue
                elif end.step(events):
                    self._wait_for(end)
                    self._wait_for(end.other)
                else:
                    self._drop(end)

    def _accept(self) -> None:
        client = server = None
        try:
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.setblocking(False)  # a full queue is an error, not a wait for all
            server.connect(self._path)
        except OSError:
            for sock in (client, server):
                if sock is not None:
                    sock.close()
            time.sleep(_ACCEPT_PAUSE_S)  # out of descriptors, say: do not spin
            return
        pair = End(client), End(server)
        pair[0].other, pair[1].other = pair[1], pair[0]
        for end in pair:
            self._ends[end.sock.fileno()] = end
            self._wait_for(end)
        if len(self._ends) >= 2 * MAX_CONNECTIONS:
            self._poll.unregister(self._listener)

    def _wait_for(self, end: End) -> None:
        events = end.events()
        if events:
            self._poll.register(end.sock, events)
        elif end.waited_for:
            self._poll.unregister(end.sock)  # else a hang-up would be reported without end
        end.waited_for = bool(events)

    def _drop(self, end: End) -> None:
        for side in (end, end.other):
            del self._ends[side.sock.fileno()]
            if side.waited_for:
                self._poll.unregister(side.sock)
            side.sock.close()
        self._poll.register(self._listener, _READ)


def main(argv: "list[str]") -> None:
    """Listen, leave the carrier behind, become the program."""
    path, port, program = argv[0], int(argv[1]), argv[2:]
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    # Twice, so that the carrier is no child of the program, which may wait for its children.
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            _detach(listener)
            Carrier(listener, path).serve()
        os._exit(0)
    os.waitpid(child, 0)
    listener.close()
    if program:
        os.execvp(program[0], program)


def _detach(listener: socket.socket) -> None:
    """Hold none of the program's pipes open, and outlive its session."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    keep = listener.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, 65536)


if __name__ == "__main__":
    main(sys.argv[1:])
