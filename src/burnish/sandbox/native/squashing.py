"""Merges the layers of a deep stack into one, while boxes go on with the old ones."""

import asyncio
import contextlib
import os

from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.descriptors import on_own_descriptors
from burnish.sandbox.native.station import Station
from burnish.sandbox.state.layers import Squash

# Rounding up to pages and directories that more than one layer had.
_SLACK_BYTES, _SLACK_INODES = 2**20, 64


async def squash_if_due(station: Station, hold: int) -> None:
    """Squash what the layer table says is due in the stack of `hold`; a failure changes nothing."""
    with station.layers_lock:
        job = station.layers.begin_squash(hold)
    if job is None:
        return
    try:
        await _merge(station, job)
    except (OSError, ValueError, ClassifiedFailure, asyncio.CancelledError) as error:
        with station.layers_lock:
            station.drop(station.layers.abandon_squash(job))
        if isinstance(error, asyncio.CancelledError):
            raise
        return
    with station.layers_lock:
        station.drop(station.layers.end_squash(job))


async def _merge(station: Station, job: Squash) -> None:
    with contextlib.ExitStack() as stack:
        fds = []
        for layer in job.run:
            fds.append(await station.layer_fd(layer))
            stack.callback(os.close, fds[-1])
        rooms = [os.fstatvfs(descriptor) for descriptor in fds]
        size = sum((room.f_blocks - room.f_bfree) * room.f_frsize for room in rooms)
        inodes = sum(room.f_files - room.f_ffree for room in rooms)
        if station.disks is None:
            # In memory each name counts, and a file of several may get one more while we merge.
            inodes += inodes // 2
        into = await station.new_layer(
            job.layer, _rounded(size, _SLACK_BYTES), _rounded(inodes, _SLACK_INODES)
        )
        stack.callback(os.close, into)
        stop = Stop()
        await on_own_descriptors(
            lambda own: station.files.squash(own[:-1], own[-1], stop), (*fds, into), stop
        )
        await station.complete(into)


def _rounded(needed: int, slack: int) -> int:
    """A little more, and one of few sizes: on a disk each is prepared once."""
    step = max(16 * slack, 1 << max(0, needed.bit_length() - 4))
    return (needed + slack + step - 1) // step * step
