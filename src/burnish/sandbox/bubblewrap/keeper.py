"""The keeper of boxes under bubblewrap."""

import asyncio
import os
import socket
import sys

from burnish.core.errors import UserError, one_line
from burnish.sandbox.bubblewrap.box import Box, Host
from burnish.sandbox.bubblewrap.inspection import close_host, inspect_host
from burnish.sandbox.keeper.keeper import Keeper, send_hello
from burnish.sandbox.keeper.namespace import box_identity
from burnish.sandbox.keeper.pipes import above_shell
from burnish.sandbox.keeper.protocol import Hello
from burnish.sandbox.limits import bound_for_boxes


class BubblewrapMaker:
    """Boxes on bubblewrap."""

    def __init__(self, host: Host, *, privileged: bool) -> None:
        """Keep what all boxes share."""
        self._host = host
        self._privileged = privileged

    def make(self, name: str, slot: int, root: str) -> Box:
        """See `BoxMaker`. There are no images here, which the pool has checked."""
        assert not root
        return Box(self._host, name, box_identity(self._privileged, slot))

    def close(self) -> None:
        """See `BoxMaker`."""
        close_host(self._host)


def main(arguments: list[str]) -> None:
    """Entry of the keeper process: `keeper SOCKET_FD MAX_BOXES CONTROL_GROUPS`."""
    os.umask(0o022)
    bound_for_boxes()
    os.chdir("/")
    connection = socket.socket(fileno=above_shell(int(arguments[0])))
    asyncio.run(_main(connection, int(arguments[1]), use_control_groups=arguments[2] == "1"))


async def _main(connection: socket.socket, max_boxes: int, *, use_control_groups: bool) -> None:
    try:
        host, capabilities, privileged = await inspect_host(use_control_groups=use_control_groups)
    except (UserError, OSError) as error:
        what = error.what if isinstance(error, UserError) else one_line(error)
        fix = error.fix if isinstance(error, UserError) else "see the message"
        send_hello(connection, Hello(capabilities=None, problem=what, fix=fix))
        return
    send_hello(connection, Hello(capabilities=capabilities))
    maker = BubblewrapMaker(host, privileged=privileged)
    await Keeper(maker, max_boxes=max_boxes).serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
