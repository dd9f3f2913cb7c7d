"""The keeper of boxes in containers: started in a process namespace of its own."""

import asyncio
import os
import socket
import sys

from burnish.core.errors import UserError, one_line
from burnish.sandbox.host_view import namespace_fix
from burnish.sandbox.keeper.keeper import Keeper, send_hello
from burnish.sandbox.keeper.namespace import fork_into_pid_namespace
from burnish.sandbox.keeper.pipes import above_shell
from burnish.sandbox.keeper.protocol import Hello
from burnish.sandbox.limits import bound_for_boxes
from burnish.sandbox.oci.box import OciBox, OciHost
from burnish.sandbox.oci.host import Ground, box_users, close_host, enter_host, inspect_host


class OciMaker:
    """Boxes in containers."""

    def __init__(self, host: OciHost) -> None:
        """Keep what all boxes share."""
        self._host = host

    def make(self, name: str, slot: int, root: str) -> OciBox:
        """See `BoxMaker`."""
        users = box_users(self._host.runtime, slot, privileged=not self._host.rootless)
        return OciBox(self._host, name, users, root)

    def close(self) -> None:
        """See `BoxMaker`."""
        close_host(self._host)


def main(arguments: list[str]) -> None:
    """Entry of the keeper process: `keeper SOCKET_FD MAX_BOXES CONTROL_GROUPS RUNTIME`.

    Runtimes do not die with who started them, nor do containers with their runtime. So the keeper
    proper is process 1 of a namespace, and what its owner started only waits for it.
    """
    os.umask(0o022)
    bound_for_boxes()
    os.chdir("/")
    connection = socket.socket(fileno=above_shell(int(arguments[0])))
    owner_fd = os.pidfd_open(os.getppid())
    try:
        ground = enter_host(arguments[3], use_control_groups=arguments[2] == "1")
        child = fork_into_pid_namespace()
    except (UserError, OSError) as error:
        _refuse(connection, error)
        return
    if child:
        connection.close()
        os.close(owner_fd)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    asyncio.run(_main(connection, owner_fd, int(arguments[1]), ground))


async def _main(connection: socket.socket, owner_fd: int, max_boxes: int, ground: Ground) -> None:
    try:
        host, capabilities = await inspect_host(ground)
    except (UserError, OSError) as error:
        _refuse(connection, error)
        return
    send_hello(connection, Hello(capabilities=capabilities))
    await Keeper(OciMaker(host), max_boxes=max_boxes).serve(connection, owner_fd)


def _refuse(connection: socket.socket, error: UserError | OSError) -> None:
    what = error.what if isinstance(error, UserError) else one_line(error)
    fix = error.fix if isinstance(error, UserError) else namespace_fix()
    send_hello(connection, Hello(capabilities=None, problem=what, fix=fix))


if __name__ == "__main__":
    main(sys.argv[1:])
