"""`SandboxPool` by our own helper: boxes in a millisecond, with states.

    acquire --> Places (first come first served) --> WarmBoxes, or Station.make --> NativeBox
                                                         |  one Station per image: helper, layers
    release --> Station.end (helper kills, group and layers are given back) --> Places

All of it runs in the loops of its callers; the only other processes are the helpers, one per image.
"""

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from burnish.core.boxes import Capabilities, Policy, Snapshot
from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.cancellation import insist, uninterrupted
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.base import Images
from burnish.sandbox.lease import lease_ended
from burnish.sandbox.limits import check_policy
from burnish.sandbox.native.capabilities import describe
from burnish.sandbox.native.loans import Loan
from burnish.sandbox.native.making import Making
from burnish.sandbox.native.python_jobs import WarmBox
from burnish.sandbox.native.room import Bound, bounds, this_host
from burnish.sandbox.native.self_test import as_users_problem, try_a_box
from burnish.sandbox.native.services import Services
from burnish.sandbox.native.snapshots import SnapshotBook
from burnish.sandbox.native.stateful import NativeBox
from burnish.sandbox.native.station import Kind, Station, kind_of
from burnish.sandbox.native.stations import Stations
from burnish.sandbox.native.stats import BoxInfo, PoolStats, Tally
from burnish.sandbox.native.templates import Template, check_template
from burnish.sandbox.native.warm import WarmBoxes
from burnish.sandbox.network.base import NetworkProvider
from burnish.sandbox.places import Places
from burnish.sandbox.pooling.fair_queue import Ticket

_DEFAULT_POLICY = Policy()


class NativePool:
    """Boxes on this machine, made by one helper process per image.

    Start-up removes what killed owners left. `close` must be called; if the owner is killed
    instead, the helpers notice and all boxes end with them.
    """

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        images: Images | None = None,
        network: NetworkProvider | None = None,
    ) -> None:
        """Start the helper for this host's own programs and try one box. Blocks for 50 ms.

        Args:
            config: how boxes are made.
            images: where images come from; without, boxes have the host's programs only.
            network: carries out `Policy.allow`; without, boxes have no network. Closed with the
                pool.

        Raises:
            UserError: boxes cannot run here, or not so many; says what to do.
        """
        self._config = config or SandboxConfig()
        self._id = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._places = Places(self._config.max_boxes)
        self._book = SnapshotBook(self._id)
        self._live: dict[NativeBox, Ticket] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._warm = WarmBoxes(self._config.warm_boxes, self._on_made)
        try:
            with as_users_problem():
                self._stations = Stations(
                    self._id,
                    self._config,
                    images=images,
                    on_lost=self._tally.lost,
                    on_gone=self._on_gone,
                )
        except BaseException:
            os.close(self._null_fd)
            raise
        self._services = self._make_services(images is not None, network)
        try:
            with as_users_problem():
                try_a_box(self)
        except BaseException:
            self._close()
            raise

    def _make_services(self, images: bool, network: NetworkProvider | None) -> Services:
        stations = self._stations
        controllers = stations.controllers
        bases = controllers.bases if controllers else {}
        return Services(
            capabilities=describe(
                controllers,
                stations.ids,
                stations.host.helper.abilities,
                images=images,
                network=network is not None,
                disk=stations.uppers.directory if stations.uppers is not None else None,
            ),
            null_fd=self._null_fd,
            sampled=not {"memory", "pids"} <= bases.keys(),
            counts_pids="pids" in bases,
            init_counts=stations.ids.num_ids == 1,
            counts_memory="memory" in bases,
            network=network,
            observe_exec=self._tally.execs.add,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What boxes can do here, as found by running one."""
        return self._services.capabilities

    @property
    def helper_pids(self) -> tuple[int, ...]:
        """Of the processes that hold the boxes now."""
        return self._stations.helper_pids

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[NativeBox]:
        """A fresh box, destroyed on exit. Waits while `max_boxes` are in use.

        Raises:
            UserError: the policy cannot be enforced, or there is no such image.
            ClassifiedFailure: of kind `sandbox`, if the box cannot start.
        """
        policy = policy or _DEFAULT_POLICY
        check_policy(image, policy, self.capabilities)
        return Loan(self, NativeBox, image, policy)

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[NativeBox, ...]]:
        """Like `acquire`, for so many boxes at once: all or none.

        Raises:
            ValueError: more than `max_boxes`.
        """
        policy = policy or _DEFAULT_POLICY
        check_policy(image, policy, self.capabilities)
        return self._many(count, image, policy)

    @asynccontextmanager
    async def _many(
        self, count: int, image: str | None, policy: Policy
    ) -> AsyncIterator[tuple[NativeBox, ...]]:
        boxes = await self._take(count, image, policy)
        try:
            yield boxes
        finally:
            await _all(boxes, self.give_back)

    def acquire_python(
        self,
        modules: tuple[str, ...] = (),
        image: str | None = None,
        policy: Policy | None = None,
        *,
        site: bool = False,
        paths: tuple[str, ...] = (),
    ) -> AbstractAsyncContextManager[WarmBox]:
        """Like `acquire`; jobs of `WarmBox.python` start with their modules imported.

        The first box of a combination of arguments waits for the imports; their interpreter then
        stays, with the memory that it takes, until the pool is closed.

        Args:
            modules: what is imported, in this order.
            image: as in `acquire`; its own Python is what jobs get.
            policy: as in `acquire`.
            site: search the site packages of the image.
            paths: directories of the image that are searched before all others.

        Raises:
            UserError: as `acquire`, or a module cannot be imported or has started a thread.
        """
        policy = policy or _DEFAULT_POLICY
        check_policy(image, policy, self.capabilities)
        template = Template(modules, site, paths)
        check_template(template)
        return Loan(self, WarmBox, image, policy, template)

    async def take(
        self, image: str | None, policy: Policy, template: Template | None = None
    ) -> NativeBox:
        """A box that must be handed to `give_back`; better use `acquire`."""
        return (await self._take(1, image, policy, template))[0]

    async def _take(
        self, count: int, image: str | None, policy: Policy, template: Template | None = None
    ) -> tuple[NativeBox, ...]:
        ticket = await self._places.take(count)
        try:
            for attempt in range(2):
                station = await self._stations.find(image, template)
                try:
                    return await self._start(station, count, policy, None, ticket)
                except ClassifiedFailure:
                    # A helper that was killed is noticed when it is needed; the next one is new.
                    if attempt or station.helper.still_runs() or self._closed:
                        raise
            raise AssertionError
        except BaseException:
            self._places.give_back(ticket)
            raise

    async def give_back(self, box: NativeBox) -> None:
        """Destroy a box that `take` returned. May be called again."""
        with self._lock:
            ticket = self._live.pop(box, None)
        if ticket is None:
            return
        on_first, box.on_first = box.on_first, None
        try:
            await box.destroy()
        finally:
            if on_first is not None and not self._closed:
                on_first()
            self._tally.ended()
            self._places.give_back(ticket, 1)

    @asynccontextmanager
    async def _spawn(
        self, station: Station, count: int, policy: Policy, hold: int | None
    ) -> AsyncIterator[tuple[NativeBox, ...]]:
        ticket = await self._places.take(count)
        try:
            boxes = await self._start(station, count, policy, hold, ticket)
        except BaseException:
            self._places.give_back(ticket)
            raise
        try:
            yield boxes
        finally:
            await _all(boxes, self.give_back)

    async def _start(
        self, station: Station, count: int, policy: Policy, hold: int | None, ticket: Ticket
    ) -> tuple[NativeBox, ...]:
        """Boxes in use; if one fails, none."""
        kind = kind_of(policy)
        boxes: list[NativeBox] = []
        try:
            for _ in range(count):
                making = self._making(station, kind, hold)
                kind_of_box = NativeBox if station.template is None else WarmBox
                boxes.append(
                    kind_of_box(
                        station,
                        making,
                        station.hold(hold),
                        policy,
                        self._services,
                        self._book,
                        self._spawn,
                    )
                )
            if hold is None:
                self._warm.asked((station, kind), count)
            for box in boxes:
                await box.start()
                # Not at once: their first command, which follows, would share the processors with
                # the making of the next boxes (0.5 ms more).
                box.on_first = partial(self._warm.fill, (station, kind))
        except BaseException as error:
            await _all(boxes, NativeBox.destroy)
            if isinstance(error, OSError):
                raise station.refusal(error) from error
            raise
        station.proven = True
        self._hand_out(boxes, ticket)
        return tuple(boxes)

    def _making(self, station: Station, kind: Kind, hold: int | None) -> Making:
        if hold is None and (making := self._warm.take((station, kind))):
            if making.number:
                self._tally.hit()
            return making
        return station.make(kind, station.take_group(), hold=hold, on_made=self._on_made)

    def _hand_out(self, boxes: list[NativeBox], ticket: Ticket) -> None:
        with self._lock:
            closed = self._closed
            self._live.update(dict.fromkeys(boxes, ticket))
        for box in boxes:
            if closed:
                box.end("the pool is closed")
            elif self._config.lease_s is not None:
                loop = asyncio.get_running_loop()
                box.lease = loop.call_later(self._config.lease_s, self._expire, box)

    def _expire(self, box: NativeBox) -> None:
        assert self._config.lease_s is not None
        box.end(lease_ended(self._config.lease_s))
        task = asyncio.ensure_future(self.give_back(box))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _on_made(self, making: Making) -> None:
        self._tally.made(making.took_s, failed=making.failed)

    def _on_gone(self, station: Station) -> None:
        self._warm.forget(station)
        self._book.lost(station)

    def forget(self, snapshot: Snapshot) -> None:
        """Free the layers that only this snapshot needs."""
        self._book.forget(snapshot)

    def stats(self) -> PoolStats:
        """Counts since the start, and what is there now."""
        tally = self._tally
        return PoolStats(
            live=len(self._live),
            warm=len(self._warm),
            waiting=self._places.num_waiting,
            snapshots=len(self._book),
            created=tally.created,
            destroyed=tally.destroyed,
            creates_failed=tally.creates_failed,
            warm_hits=tally.warm_hits,
            helpers_lost=tally.helpers_lost,
            create_p50_s=tally.creates.quantile(0.5),
            create_p99_s=tally.creates.quantile(0.99),
            exec_p50_s=tally.execs.quantile(0.5),
            exec_p99_s=tally.execs.quantile(0.99),
        )

    def boxes(self) -> list[BoxInfo]:
        """Those in use, oldest first."""
        now_s = time.monotonic()
        with self._lock:
            live = list(self._live)
        return [box.info(now_s) for box in live]

    def room(self) -> list[Bound]:
        """What bounds the number of boxes here, the tightest first."""
        stations = self._stations
        return bounds(stations.controllers, this_host(), on_disk=stations.uppers is not None)

    async def close(self) -> None:
        """Destroy all boxes and end the helpers. May be called twice."""
        await uninterrupted(asyncio.ensure_future(self._close_all()))

    async def _close_all(self) -> None:
        await asyncio.to_thread(self._close)
        if self._services.network is not None:
            await self._services.network.close()

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live)
        self._places.close()
        for box in live:
            box.end("the pool is closed")
        self._stations.close()
        os.close(self._null_fd)


async def _all(
    boxes: Sequence[NativeBox], step: Callable[[NativeBox], Coroutine[Any, Any, None]]
) -> None:
    """Take a step that may be repeated with all boxes at once, although we are being cancelled."""
    cancelled = None
    try:
        if len(boxes) > 1:
            tasks = [asyncio.ensure_future(step(box)) for box in boxes]
            cancelled = await insist(lambda: asyncio.wait(tasks))
        for box in boxes:
            # A task that is cancelled before it begins, as by a loop that is closed, does nothing.
            cancelled = await insist(partial(step, box)) or cancelled
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled
