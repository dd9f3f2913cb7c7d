"""The keeper of boxes under bubblewrap."""

import asyncio
import os
import sys

from burnish.core.errors import UserError, one_line
from burnish.sandbox.bubblewrap.box import Box, Host
from burnish.sandbox.bubblewrap.inspection import close_host, inspect_host
from burnish.sandbox.keeper.keeper import Keeper, Start, parse_start, send_hello
from burnish.sandbox.keeper.namespace import box_identity
from burnish.sandbox.keeper.protocol import CreateBox, Hello
from burnish.sandbox.limits import bound_for_boxes


class BubblewrapMaker:
    """Boxes on bubblewrap."""

    def __init__(self, host: Host, *, privileged: bool) -> None:
        """Keep what all boxes share."""
        self._host = host
        self._privileged = privileged

    async def make(self, name: str, slot: int, request: CreateBox) -> Box:
        """See `BoxMaker`. There are no images here, which the pool has checked."""
        assert not request.root
        identity = box_identity(self._privileged, slot)
        return Box(self._host, name, identity, request.proxy_port)

    def forget(self, state: int) -> None:
        """See `BoxMaker`: none is ever made."""

    async def close(self) -> None:
        """See `BoxMaker`."""
        close_host(self._host)


def main(arguments: list[str]) -> None:
    """Entry of the keeper process: `keeper` and what `parse_start` reads."""
    os.umask(0o022)
    bound_for_boxes()
    os.chdir("/")
    asyncio.run(_main(parse_start(arguments)))


async def _main(start: Start) -> None:
    try:
        host, capabilities, privileged = await inspect_host(
            use_control_groups=start.use_control_groups
        )
    except (UserError, OSError) as error:
        what = error.what if isinstance(error, UserError) else one_line(error)
        fix = error.fix if isinstance(error, UserError) else "see the message"
        send_hello(start.connection, Hello(capabilities=None, problem=what, fix=fix))
        return
    send_hello(start.connection, Hello(capabilities=capabilities))
    maker = BubblewrapMaker(host, privileged=privileged)
    await Keeper(maker, max_boxes=start.max_boxes).serve(start)


if __name__ == "__main__":
    main(sys.argv[1:])
