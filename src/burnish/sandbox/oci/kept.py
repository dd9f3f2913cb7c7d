"""A container that lives on after its command, and one that CRIU started again."""

import asyncio
import os

from burnish.sandbox.keeper.pipes import read_now
from burnish.sandbox.keeper.process import Launched, uninterrupted
from burnish.sandbox.oci.checkpoint import reason
from burnish.sandbox.oci.launch import OciLaunch, has_ended
from burnish.sandbox.oci.launcher import ENDED


class RestoredLaunch(OciLaunch):
    """Its program has ended long ago; what it left behind runs."""

    async def prepare(self) -> None:
        """Wait until CRIU has done it.

        Raises:
            OSError: it failed; says why.
        """
        try:
            pid = await self._find_process_1()
        except OSError as error:
            why = reason(self.bundle / "state" / "restore.log")
            raise OSError(0, f"kept processes could not be restored: {why}") from error
        self.process_1 = pid
        self._init_fd = os.pidfd_open(pid)
        discard_output(self)


async def ended_status(launch: OciLaunch) -> int | None:
    """How the program ended, once all of its output is here; None if that makes no sense.

    Args:
        launch: with streams that expect a mark.
    """
    descriptor = os.open(launch.bundle / "inbox" / ENDED, os.O_RDONLY | os.O_NONBLOCK)
    loop = asyncio.get_running_loop()
    something = asyncio.Event()
    loop.add_reader(descriptor, something.set)
    try:
        await something.wait()
        text = read_now(descriptor).decode("ascii", "replace").strip()
        await launch.stdout.marked.wait()
        await launch.stderr.marked.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return int(text) if text.isdigit() and len(text) <= 3 and int(text) <= 255 else None


def discard_output(launch: Launched) -> None:
    """Nobody reads what kept processes write."""
    launch.stdout.discard()
    launch.stderr.discard()


def is_over(launch: OciLaunch) -> bool:
    """Whether nothing of it lives any more."""
    return has_ended(launch.monitor_pid)


async def end_all(launches: list[OciLaunch]) -> None:
    """End them, also if we are cancelled."""
    while launches:
        launch = launches.pop()
        try:
            await uninterrupted(asyncio.ensure_future(launch.end()))
        finally:
            launch.close()
