"""The keeper of boxes in containers: the bubblewrap package's keeper with another kind of box."""

import asyncio
import os
import socket
import sys

from burnish.core.errors import UserError, one_line
from burnish.sandbox.bubblewrap.keeper import Keeper, send_hello
from burnish.sandbox.bubblewrap.pipes import above_shell
from burnish.sandbox.bubblewrap.protocol import Hello
from burnish.sandbox.oci.box import OciBox, OciHost
from burnish.sandbox.oci.host import box_users, close_host, inspect_host


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
    """Entry of the keeper process: `keeper SOCKET_FD MAX_BOXES CONTROL_GROUPS RUNTIME`."""
    os.umask(0o022)
    os.chdir("/")
    connection = socket.socket(fileno=above_shell(int(arguments[0])))
    asyncio.run(
        _main(connection, int(arguments[1]), arguments[3], use_control_groups=arguments[2] == "1")
    )


async def _main(
    connection: socket.socket, max_boxes: int, runtime: str, *, use_control_groups: bool
) -> None:
    try:
        host, capabilities = await inspect_host(runtime, use_control_groups=use_control_groups)
    except (UserError, OSError) as error:
        what = error.what if isinstance(error, UserError) else one_line(error)
        fix = error.fix if isinstance(error, UserError) else "see the message"
        send_hello(connection, Hello(capabilities=None, problem=what, fix=fix))
        return
    send_hello(connection, Hello(capabilities=capabilities))
    await Keeper(OciMaker(host), max_boxes=max_boxes).serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
