"""The keeper of boxes in containers: started in a process namespace of its own."""

import asyncio
import os
import socket
import sys

from burnish.core.errors import UserError, one_line
from burnish.sandbox.host_view import namespace_fix
from burnish.sandbox.images.running import ImageUser
from burnish.sandbox.keeper.keeper import Keeper, Start, parse_start, send_hello
from burnish.sandbox.keeper.namespace import fork_into_pid_namespace
from burnish.sandbox.keeper.protocol import CreateBox, Hello
from burnish.sandbox.limits import bound_for_boxes
from burnish.sandbox.oci.box import OciBox, OciHost
from burnish.sandbox.oci.host import Ground, close_host, enter_host, inspect_host
from burnish.sandbox.oci.process_box import ProcessBox
from burnish.sandbox.oci.users import box_users


class OciMaker:
    """Boxes in containers."""

    def __init__(self, host: OciHost) -> None:
        """Keep what all boxes share."""
        self._host = host

    async def make(self, name: str, slot: int, request: CreateBox) -> OciBox:
        """See `BoxMaker`."""
        if request.state:
            return await self._make_from(name, request)
        user = None if request.user is None else ImageUser(*request.user)
        users = box_users(self._host.runtime, slot, privileged=not self._host.rootless, user=user)
        kind = OciBox if self._host.checkpoints is None else ProcessBox
        return kind(self._host, name, users, request.root, request.proxy_port)

    async def _make_from(self, name: str, request: CreateBox) -> OciBox:
        """Its processes cannot change their user ids: it has those of the box that was saved."""
        assert self._host.checkpoints is not None, "no box was saved"
        state = self._host.checkpoints.find(request.state, request.root)
        box = ProcessBox(self._host, name, state.users, request.root, request.proxy_port)
        try:
            await box.restore(request.state)
        except BaseException:
            await box.destroy()
            raise
        return box

    def forget(self, state: int) -> None:
        """See `BoxMaker`."""
        if self._host.checkpoints is not None:
            self._host.checkpoints.forget(state)

    async def close(self) -> None:
        """See `BoxMaker`."""
        close_host(self._host)


def main(arguments: list[str]) -> None:
    """Entry of the keeper process: what `parse_start` reads, then RUNTIME and WITH_NETWORK.

    Runtimes do not die with who started them, nor do containers with their runtime. So the keeper
    proper is process 1 of a namespace, and what its owner started only waits for it.
    """
    os.umask(0o022)
    bound_for_boxes()
    os.chdir("/")
    start = parse_start(arguments)
    runtime, with_network = start.others
    owner_fd = os.pidfd_open(os.getppid())
    try:
        ground = enter_host(runtime, use_control_groups=start.use_control_groups)
        child = fork_into_pid_namespace()
    except (UserError, OSError) as error:
        _refuse(start.connection, error)
        return
    if child:
        start.connection.close()
        start.listeners.close()
        os.close(owner_fd)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    asyncio.run(_main(start, owner_fd, ground, with_network=with_network == "1"))


async def _main(start: Start, owner_fd: int, ground: Ground, *, with_network: bool) -> None:
    try:
        host, capabilities = await inspect_host(ground, with_network=with_network)
    except (UserError, OSError) as error:
        _refuse(start.connection, error)
        return
    send_hello(start.connection, Hello(capabilities=capabilities))
    await Keeper(OciMaker(host), max_boxes=start.max_boxes).serve(start, owner_fd)


def _refuse(connection: socket.socket, error: UserError | OSError) -> None:
    what = error.what if isinstance(error, UserError) else one_line(error)
    fix = error.fix if isinstance(error, UserError) else namespace_fix()
    send_hello(connection, Hello(capabilities=None, problem=what, fix=fix))


if __name__ == "__main__":
    main(sys.argv[1:])
