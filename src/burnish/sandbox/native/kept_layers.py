"""The layers of one helper: our table of who needs which, and what the helper calls them."""

import asyncio
import contextlib
import os
import threading

from burnish.sandbox.cancellation import uninterrupted
from burnish.sandbox.native import wire
from burnish.sandbox.native.client import Answer, Helper, failure
from burnish.sandbox.native.disks import Disks, write_out
from burnish.sandbox.native.protocol import Flag, Op
from burnish.sandbox.state.layers import LayerTable


class KeptLayers:
    """Usable from any thread and loop."""

    def __init__(self, helper: Helper, disks: Disks | None) -> None:
        """Start without any. With `disks`, that is where they are."""
        self.helper = helper
        self.disks = disks
        self.layers = LayerTable()
        self.layers_lock = threading.RLock()
        self._known_as: dict[int, int] = {}

    def learn(self, layer: int, number: int) -> None:
        """The helper has made a layer, which it calls `number`."""
        self._known_as[layer] = number

    def numbers(self, hold: int) -> tuple[int, ...]:
        """What the helper calls the layers of a hold, lowest first."""
        with self.layers_lock:
            return tuple(self._known_as[layer] for layer in self.layers.stack(hold))

    async def new_layer(self, layer: int, size_bytes: int, num_inodes: int) -> int:
        """An empty layer; returns its directory, for the caller to fill and close."""

        async def ask() -> int:
            body = wire.numbers_body("IQI", 0, size_bytes, num_inodes)
            fds: tuple[int, ...] = ()
            if self.disks is not None:
                disk = await self.disks.made(size_bytes, num_inodes)
                # Before anybody can drop it.
                self.disks.is_of_layer(layer, disk)
                fds = (disk,)
            flags = Flag.NEWLAYER_UPPER if fds else 0
            answer = await self.helper.ask(Op.NEWLAYER, body, flags=flags, fds=fds)
            (number,) = wire.read_numbers(answer.reply, Op.DONE, "I")
            self.learn(layer, number)
            return _one_fd(answer)

        # Or else nobody would know its number.
        making = asyncio.ensure_future(ask())
        try:
            return await uninterrupted(making)
        except asyncio.CancelledError:
            if making.done() and not making.cancelled() and making.exception() is None:
                os.close(making.result())
            raise

    async def layer_fd(self, layer: int) -> int:
        """The directory of a layer; the caller closes it."""
        number = self._known_as[layer]
        return _one_fd(await self.helper.ask(Op.LAYERFD, wire.numbers_body("I", number)))

    async def complete(self, folder: int) -> None:
        """A new layer has been filled through this descriptor.

        Raises:
            ClassifiedFailure: the disk has lost something.
        """
        if self.disks is not None:
            await write_out(folder)
            self.disks.complete(os.dup(folder))

    def drop(self, layers: list[int]) -> None:
        """Nobody needs them any more."""
        for layer in layers:
            number = self._known_as.pop(layer, None)
            if number is not None:
                self._drop(layer, number)
            elif self.disks is not None:
                self.disks.end_layer(layer)

    def _drop(self, layer: int, number: int) -> None:
        def on_answer(answer: Answer | None) -> None:
            # Who made this layer may be ending until now.
            self.helper.fading.ended(number)
            if self.disks is not None:
                self.disks.end_layer(layer)

        self.helper.submit(Op.DESTROY, wire.numbers_body("I", number), on_answer)

    def hold(self, stack_of: int | None = None) -> int:
        """A new hold in the layer table, on nothing or on what another hold stands for."""
        with self.layers_lock:
            return self.layers.acquire() if stack_of is None else self.layers.fork(stack_of)

    def let_go(self, hold: int) -> None:
        """End a hold."""
        with self.layers_lock, contextlib.suppress(ValueError):
            self.drop(self.layers.release(hold))

    def stack(self, hold: int) -> tuple[int, ...]:
        """Layers of a hold, lowest first."""
        with self.layers_lock:
            return self.layers.stack(hold)


def _one_fd(answer: Answer) -> int:
    if len(answer.fds) != 1:
        raise failure("the helper answered without the directory that was asked for")
    return answer.fds[0]
