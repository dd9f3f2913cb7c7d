"""Runs in a box: carries one request to the supervisor of a kernel, and its answer back.

argv: name of the socket. Exit status 3: nobody listens. Started anew for every request, so it
imports nothing that takes time.
"""

import _socket
import os
import sys


def main() -> int:
    """Copy stdin to the supervisor, and what it answers to stdout."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect("\0" + sys.argv[1])
    except OSError:
        return 3
    request = b""
    while chunk := os.read(0, 1 << 16):
        request += chunk
    try:
        # The socket's own sendall repeats short writes.
        connection.sendall(request)
        connection.shutdown(_socket.SHUT_WR)
        while chunk := connection.recv(1 << 16):
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
    except OSError:
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
