"""The keeper of boxes in containers of docker. It has no namespaces of its own and needs none."""

import asyncio
import os
import sys

from burnish.core.errors import UserError, one_line
from burnish.sandbox.engine.box import DockerBox, DockerHost, make_box
from burnish.sandbox.engine.guard import remove_folder
from burnish.sandbox.engine.host import Ground, inspect_host
from burnish.sandbox.keeper.keeper import Keeper, Start, parse_start, send_hello
from burnish.sandbox.keeper.protocol import CreateBox, Hello


class DockerMaker:
    """Boxes in containers of docker."""

    def __init__(self, host: DockerHost) -> None:
        """Keep what all boxes share."""
        self._host = host

    async def make(self, name: str, slot: int, request: CreateBox) -> DockerBox:
        """See `BoxMaker`."""
        return await make_box(self._host, name, request)

    def forget(self, state: int) -> None:
        """See `BoxMaker`: none is ever made."""

    async def close(self) -> None:
        """See `BoxMaker`. The guard looks once more when we are dead."""


def main(arguments: list[str]) -> None:
    """Entry of the keeper process: what `parse_start` reads, then WITH_NETWORK."""
    os.umask(0o022)
    os.chdir("/")
    start = parse_start(arguments)
    asyncio.run(_main(start, with_network=start.others[0] == "1"))


async def _main(start: Start, *, with_network: bool) -> None:
    try:
        ground = Ground()
    except (UserError, OSError) as error:
        _refuse(start, error)
        return
    try:
        host, capabilities = await inspect_host(ground, with_network=with_network)
        send_hello(start.connection, Hello(capabilities=capabilities))
        await Keeper(DockerMaker(host), max_boxes=start.max_boxes).serve(start)
        ground.guard.dismiss()
    except (UserError, OSError) as error:
        _refuse(start, error)
    finally:
        remove_folder(ground.folder)


def _refuse(start: Start, error: UserError | OSError) -> None:
    what = error.what if isinstance(error, UserError) else one_line(error)
    fix = error.fix if isinstance(error, UserError) else "see what `docker info` says"
    send_hello(start.connection, Hello(capabilities=None, problem=what, fix=fix))


if __name__ == "__main__":
    main(sys.argv[1:])
