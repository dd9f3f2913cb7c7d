"""A box whose files can be frozen, multiplied and put back: layers instead of copies."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from burnish.core.boxes import Policy, Snapshot
from burnish.core.errors import UserError
from burnish.sandbox.archive.stop import Stop, Stopped
from burnish.sandbox.cancellation import uninterrupted
from burnish.sandbox.descriptors import on_own_descriptors
from burnish.sandbox.host_view import covered_paths
from burnish.sandbox.limits import check_policy
from burnish.sandbox.native.box import LiveBox
from burnish.sandbox.native.client import failure
from burnish.sandbox.native.init import ENDED, Init
from burnish.sandbox.native.making import Making
from burnish.sandbox.native.services import Services
from burnish.sandbox.native.snapshots import SnapshotBook
from burnish.sandbox.native.squashing import squash_if_due
from burnish.sandbox.native.station import Station
from burnish.sandbox.native.stats import BoxInfo
from burnish.sandbox.state.layers import MAX_DEPTH

Spawn = Callable[
    [Station, int, Policy, int | None], AbstractAsyncContextManager[tuple["NativeBox", ...]]
]
"""Makes so many boxes from what a hold stands for."""


class NativeBox(LiveBox):
    """A `StatefulSandbox`."""

    def __init__(
        self,
        station: Station,
        making: Making,
        hold: int,
        policy: Policy,
        services: Services,
        book: SnapshotBook,
        spawn: Spawn,
    ) -> None:
        """See `LiveBox`."""
        super().__init__(station, making, hold, policy, services)
        self._book = book
        self._spawn = spawn
        self._squashing: asyncio.Task[None] | None = None
        self._stop: Stop | None = None
        """Of the import that is under way."""
        self._same_as: Snapshot | None = None
        """Has the files that were frozen last."""
        self.lease: asyncio.TimerHandle | None = None
        """Ends the box when it fires."""

    def info(self, now_s: float) -> BoxInfo:
        """What lists of boxes say about it; `now_s` is monotonic."""
        station = self._station
        with station.layers_lock:
            num_layers = 0 if self._destroyed else len(station.layers.stack(self._hold))
        return BoxInfo(
            id=self.id,
            image=station.image.name if station.image else "",
            age_s=now_s - self.since_s,
            num_layers=num_layers,
            busy=self._lock.locked(),
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """Numbers of the layers that it stands on, lowest first; unique in its helper."""
        station = self._station
        with station.layers_lock:
            stack = () if self._destroyed else station.layers.stack(self._hold)
        return tuple(map(str, stack))

    async def snapshot(self) -> Snapshot:
        """Freeze all files. Processes that were kept end. Costs nothing if nothing changed.

        Raises:
            ClassifiedFailure: the box is gone.
        """
        async with self._lock:
            changed = await self._steadily(self._freeze_now())
            known = self._same_as
            if known is None or changed or known not in self._book:
                known = self._same_as = self._book.add(self._station, self._hold)
            return known

    async def rollback(self, snapshot: Snapshot) -> None:
        """Back to a snapshot of this pool and image; everything since, processes too, is gone.

        A box that has ended, such as one whose process 1 was killed, lives again.

        Raises:
            UserError: the snapshot is of another pool or image, or forgotten.
            ClassifiedFailure: the box is gone.
        """
        target = self._book.find(snapshot, self._station)
        async with self._lock:
            if self._gone == ENDED:
                self._gone = ""
            try:
                init = await self._ready()
            except OSError as error:
                raise failure(
                    f"the box cannot be started, so it cannot go back ({error}): fork the snapshot"
                ) from error
            self._same_as = None
            await self._steadily(self._return_to(init, target))
            self._same_as = snapshot

    async def forget(self, snapshot: Snapshot) -> None:
        """Free what only this snapshot needs. Nothing happens if it is not there."""
        self._book.forget(snapshot)

    @asynccontextmanager
    async def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AsyncIterator[tuple["NativeBox", ...]]:
        """Boxes that start from a snapshot, or from the present state; destroyed on exit.

        They count towards `max_boxes`: forking boxes that all wait for places wait for ever.

        Raises:
            ValueError: more boxes than the pool may have.
            UserError: the snapshot is of another pool or image, or forgotten.
            ClassifiedFailure: of kind `sandbox`, if they cannot start.
        """
        station = self._station
        hold = await self._hold_on(snapshot)
        try:
            async with self._spawn(station, count, self._policy, hold) as boxes:
                yield boxes
        finally:
            station.let_go(hold)

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """Replace the allow-list; see `NetworkedSandbox.set_allow`.

        Only the first list of a box that was made without one waits for the command that runs.

        Raises:
            UserError: a malformed entry, or boxes have no networks here; nothing was changed.
            ClassifiedFailure: the box is gone.
        """
        policy = msgspec.structs.replace(self._policy, allow=allow)
        check_policy(None, policy, self._services.capabilities)
        if self._services.network is not None:
            self._services.network.check(allow)
        if self._gone:
            raise failure(self._gone)
        # From here on forks have it, and what is attached to the box from now on.
        before, self._policy = self._policy, policy
        if self._attachment is None and allow:
            try:
                await self._first_network()
            except BaseException:
                self._policy = before
                raise
        if self._attachment is not None:
            # The latest one, wherever several were set at once.
            await self._attachment.set_allow(self._policy.allow)

    async def _first_network(self) -> None:
        async with self._lock:
            init = await self._ready()
            if self._attachment is None:
                await self._attach(init)

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        """Write what was changed above the image as a tar; returns its content digest.

        Raises:
            UserError: the snapshot is of another pool or image, or forgotten; or a path in the box
                is longer than archives hold.
            ClassifiedFailure: the box is gone.
        """
        station = self._station
        hold = await self._hold_on(snapshot)
        try:
            with contextlib.ExitStack() as stack:
                fds = []
                for layer in station.stack(hold):
                    fds.append(await station.layer_fd(layer))
                    stack.callback(os.close, fds[-1])
                stop = Stop()
                return await on_own_descriptors(
                    lambda own: station.files.export(own, destination, stop), fds, stop
                )
        finally:
            station.let_go(hold)

    async def import_tar(self, source: Path) -> None:
        """Put the files of a tar (from `export_tar`, or of any origin) on top.

        Cancelled, it ends soon; the box is then as it was before, or as it is after.

        Raises:
            UserError: it has files below what the box has of this host: they would be hidden.
            ValueError: the archive tries to leave the box, or holds devices.
            OSError: it does not fit into `disk_bytes`, or cannot be read.
            ClassifiedFailure: the box is gone.
        """
        stop, cancelled = Stop(), Stop()

        def cancel() -> None:
            cancelled.set()
            stop.set()

        async with self._lock:
            init = await self._ready()
            self._stop = stop
            if self._gone:
                stop.set()
            importing = asyncio.ensure_future(self._import(init, source, stop))
            try:
                await uninterrupted(importing, cancel)
            except Stopped as error:
                if cancelled.is_set:
                    raise asyncio.CancelledError from error
                raise failure(self._gone) from error
            finally:
                self._stop = None

    def end(self, reason: str) -> None:
        """See `LiveBox.end`. An import ends too, which would hold up the end of the box."""
        super().end(reason)
        if (stop := self._stop) is not None:
            stop.set()

    async def destroy(self) -> None:
        """See `LiveBox.destroy`."""
        if self.lease is not None:
            self.lease.cancel()
        if self._squashing is not None and not self._squashing.done():
            self._squashing.cancel()
            await asyncio.wait((self._squashing,))
        await super().destroy()

    async def _hold_on(self, snapshot: Snapshot | None) -> int:
        """A hold of our own on a snapshot, or on the present state."""
        if snapshot is not None:
            return self._station.hold(self._book.find(snapshot, self._station))
        async with self._lock:
            await self._steadily(self._freeze_now())
            return self._station.hold(self._hold)

    async def _freeze(self, init: Init) -> bool:
        """See `LiveBox`: what it wrote since the last snapshot is in none of them."""
        changed = await super()._freeze(init)
        if changed:
            self._same_as = None
        return changed

    async def _freeze_now(self) -> bool:
        init = await self._ready()
        await self._make_way()
        changed = await self._freeze(init)
        if changed:
            self._squash_later()
        return changed

    async def _make_way(self, num_layers: int = 1) -> None:
        """Squash until so many layers fit on the stack. Two rounds: one may be under way already.

        Raises:
            ClassifiedFailure: it could not be squashed.
        """
        for _ in range(3):
            if len(self._station.stack(self._hold)) + num_layers <= MAX_DEPTH:
                return
            if self._squashing is not None and not self._squashing.done():
                await asyncio.wait((self._squashing,))
            else:
                await squash_if_due(self._station, self._hold)
        raise failure(f"the box has {MAX_DEPTH} layers and they could not be merged")

    def _squash_later(self) -> None:
        if self._squashing is None or self._squashing.done():
            work: Coroutine[Any, Any, None] = squash_if_due(self._station, self._hold)
            self._squashing = asyncio.ensure_future(work)

    async def _return_to(self, init: Init, target: int) -> None:
        station = self._station
        with station.layers_lock:
            station.drop(station.layers.rollback(self._hold, target))
        ending = asyncio.ensure_future(station.ended(init))
        await asyncio.sleep(0)
        # The helper reads the second request while the first one's processes die.
        self._init = None
        self._continue()
        await ending

    async def _import(self, init: Init, source: Path, stop: Stop) -> None:
        station, room = self._station, self._room
        await self._make_way(2)
        with station.layers_lock:
            layer = station.layers.new()
        try:
            into = await station.new_layer(layer, room.disk_bytes, room.num_inodes)
            try:
                # Whose root it is, is sure: it is not used if the init has ended by the freeze.
                below = Path("/proc", str(init.pid), "root")
                covered = () if station.image is not None else covered_paths()
                await on_own_descriptors(
                    lambda own: station.files.import_tar(source, own[0], below, covered, stop),
                    (into,),
                    stop,
                )
                await station.complete(into)
            except UserError:
                raise
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
            except (FileNotFoundError, ProcessLookupError) as error:
                # Not the archive, which would be a mistake of the user: the root of the box.
                raise failure(self._gone or ENDED) from error
            finally:
                os.close(into)
            if not await station.freeze(init, self._hold):
                await station.ended(init)
        except BaseException:
            with station.layers_lock:
                station.layers.discard(layer)
            station.drop([layer])
            raise
        with station.layers_lock:
            station.layers.push(self._hold, layer)
        self._init = self._same_as = None
        self._continue()
        self._squash_later()
