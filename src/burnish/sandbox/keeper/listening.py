"""A socket that listens in the network of a box, made from outside of it.

Nothing of ours runs in the box for that: there is nothing to kill, to count or to take over, and no
image needs a program for it.
"""

import ctypes
import os
import socket
import threading

_CLONE_NEWNET = 0x40000000
_IP_FREEBIND = 15
_BACKLOG = 128
_libc = ctypes.CDLL(None, use_errno=True)


def listen_in(pidfd: int, port: int) -> socket.socket:
    """Listen on 127.0.0.1 in the network namespace of a process. Takes 0.4 ms.

    A thread that ends goes there, as not everybody who may go may come back: an ordinary user has
    no rights over the host's network.

    Raises:
        OSError: the process is gone, or its port is in use.
    """
    made: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            if _libc.setns(pidfd, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
            made.append(_listener(port))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=work, name="listen")
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, OSError):
        raise result
    return result


def _listener(port: int) -> socket.socket:
    made = socket.socket()
    try:
        # The loopback may still be down: bubblewrap takes it up later.
        made.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        made.bind(("127.0.0.1", port))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made
