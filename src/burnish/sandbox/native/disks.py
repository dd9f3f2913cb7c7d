"""The disks of one helper's boxes and layers.

We keep a descriptor of each until the helper is done with it: whoever has the last one pays for the
unmounting, 25 ms, and the helper would keep all its other boxes waiting.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup_files import BoxGroup
from burnish.sandbox.descriptors import on_own_descriptors
from burnish.sandbox.native.box_room import Room
from burnish.sandbox.native.client import failure
from burnish.sandbox.native.disk_uppers import (
    DiskUppers,
    check_written,
    write_through,
)

if TYPE_CHECKING:
    from burnish.core.errors import ClassifiedFailure


class Disks:
    """Which box or layer has which. Usable from any thread."""

    def __init__(self, uppers: DiskUppers, owner: tuple[int, int]) -> None:
        """`owner` is root as the helper counts: it makes its own directories at the top."""
        self._uppers = uppers
        self._owner = owner
        self._lock = threading.Lock()
        self._closed = False
        self._of_boxes: dict[int, int] = {}
        self._of_layers: dict[int, int] = {}
        self._written_through: set[int] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._of_boxes) + len(self._of_layers)

    def make(self, disk_bytes: int, num_inodes: int) -> int:
        """A new one. Blocks.

        Raises:
            OSError: ENOSPC if the disk of the host cannot hold so much; or another step.
        """
        return self._uppers.make(disk_bytes, num_inodes, self._owner)

    def make_later(self, room: Room, then: Callable[[int | OSError], None]) -> None:
        """Make one in another thread, which calls `then`."""

        def work() -> None:
            try:
                made: int | OSError = self.make(room.disk_bytes, room.num_inodes)
            except OSError as error:
                made = error
            then(made)

        try:
            self._uppers.submit(work)
        except RuntimeError:
            then(OSError(0, "the pool is closed"))

    async def made(self, disk_bytes: int, num_inodes: int) -> int:
        """A new one; a cancellation leaves none behind.

        Raises:
            OSError: as `make`.
        """
        making = asyncio.ensure_future(asyncio.to_thread(self.make, disk_bytes, num_inodes))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._unmake)
            raise

    def _unmake(self, making: "asyncio.Future[int]") -> None:
        if not making.cancelled() and making.exception() is None:
            self.unused(making.result())

    def unused(self, disk: int) -> None:
        """Nobody got it."""
        self._uppers.drop(disk, unwanted=True)

    def is_of_box(self, box: int, disk: int) -> None:
        """The helper has made the box."""
        self._keep(self._of_boxes, box, disk)

    def is_of_layer(self, layer: int, disk: int) -> None:
        """The helper has made the layer."""
        self._keep(self._of_layers, layer, disk)

    def _keep(self, table: dict[int, int], number: int, disk: int) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                table[number] = disk
        if closed:
            self.unused(disk)

    def becomes_layer(self, box: int, layer: int) -> None:
        """The box was frozen."""
        with self._lock:
            self._written_through.discard(box)
            disk = self._of_boxes.pop(box, None)
            if disk is not None:
                self._of_layers[layer] = disk

    def end_box(self, box: int) -> None:
        """No process of it is left, and nobody will read what it wrote."""
        with self._lock:
            self._written_through.discard(box)
            disk = self._of_boxes.pop(box, None)
        if disk is not None:
            self._uppers.drop(disk, unwanted=True)

    def end_layer(self, layer: int) -> None:
        """Nobody starts from it any more; boxes may still stand on it."""
        with self._lock:
            disk = self._of_layers.pop(layer, None)
        if disk is not None:
            self._uppers.drop(disk, unwanted=False)

    def complete(self, folder: int) -> None:
        """A layer will not grow: what it does not use is for others. Closes the descriptor."""
        self._uppers.give_back_unused(folder)

    async def pace(self, box: int, limits: Limits, group: BoxGroup) -> None:
        """Let writes of a box wait for its disk where the rate would not hold otherwise.

        Control groups of version 1 slow down only what a process writes itself, and not what the
        kernel writes later for it.

        Raises:
            OSError: the file system has failed.
        """
        wanted = limits.write_bytes_per_s is not None and not group.slows_writeback
        if (box in self._written_through) != wanted:
            await asyncio.to_thread(self._write_through, box, on=wanted)

    def _write_through(self, box: int, *, on: bool) -> None:
        with self._lock:
            if box in self._of_boxes:
                # Under the lock: nobody may close it meanwhile.
                write_through(self._of_boxes[box], on=on)
                (self._written_through.add if on else self._written_through.discard)(box)

    def close(self) -> None:
        """The helper has ended, and all its boxes with it."""
        with self._lock:
            self._closed = True
            boxes = [self._of_boxes.popitem()[1] for _ in range(len(self._of_boxes))]
            layers = [self._of_layers.popitem()[1] for _ in range(len(self._of_layers))]
        for disk in boxes:
            self._uppers.drop(disk, unwanted=True)
        for disk in layers:
            self._uppers.drop(disk, unwanted=False)


async def write_out(folder: int) -> None:
    """Write out the disk of an open folder.

    Raises:
        ClassifiedFailure: something of what was written since is lost.
    """
    try:
        await on_own_descriptors(lambda own: check_written(own[0]), (folder,))
    except OSError as error:
        raise lost(os.strerror(error.errno or 0)) from error


def lost(reason: str = "") -> "ClassifiedFailure":
    """The disk of the host let a box down."""
    return failure(f"the disk of the box has lost what was written{reason and f': {reason}'}")
