"""The helpers of a pool: one for the host's programs, one for each image that was asked for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from burnish.sandbox.cgroup import Controllers, find_controllers, owner_name
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.client import Helper, failure
from burnish.sandbox.native.groups import Groups
from burnish.sandbox.native.identities import of_this_process
from burnish.sandbox.native.launch import ImageRoot, hello_for, helper_command
from burnish.sandbox.native.station import Station
from burnish.sandbox.native.stats import Tally
from burnish.sandbox.seccomp import build_filter


class Stations:
    """Starts helpers when they are needed, and again when they were killed."""

    def __init__(
        self,
        pool_id: str,
        config: SandboxConfig,
        *,
        resolve: Callable[[str], ImageRoot] | None,
        keep_open: bool,
        tally: Tally,
    ) -> None:
        """Start the one for the host. Blocks.

        Raises:
            UserError: boxes cannot run here; says what to do.
            ClassifiedFailure: the helper failed.
        """
        self._config = config
        self._resolve = resolve
        self._tally = tally
        self._lock = threading.Lock()
        self._images: dict[str, ImageRoot] = {}
        self._stations: dict[str, Station] = {}
        self._closed = False
        self._filter = build_filter()
        self._command = helper_command(config.helper)
        self.ids = of_this_process()
        self.controllers = _controllers(pool_id) if config.control_groups else None
        self._groups = (
            Groups(self.controllers, keep_open=keep_open) if self.controllers is not None else None
        )
        try:
            self._host = self._open(None)
        except BaseException:
            self.close(lambda station: None)
            raise

    @property
    def host(self) -> Station:
        """For boxes without an image."""
        return self._host

    @property
    def helper_pids(self) -> tuple[int, ...]:
        """Of all helpers."""
        return tuple(station.helper.pid for station in list(self._stations.values()))

    async def find(self, image: str | None) -> Station:
        """The station of an image, with a helper that is alive as far as we know.

        Raises:
            UserError: there is no such image.
            ClassifiedFailure: the helper does not start, or the pool is closed.
        """
        station = self._host if image is None else self._known(image)
        if station is not None:
            station.helper.poll()
            if station.alive:
                return station
        return await asyncio.to_thread(self._open, image)

    def _known(self, image: str) -> Station | None:
        root = self._images.get(image)
        return self._stations.get(root.digest) if root else None

    def _open(self, image: str | None) -> Station:
        """Start a helper, unless another thread has done so."""
        with self._lock:
            if self._closed:
                raise failure("the pool is closed")
            root = None if image is None else self._root(image)
            key = root.digest if root else ""
            old = self._stations.get(key)
            if old is not None:
                if old.alive:
                    return old
                self._tally.lost()
                old.helper.close()
            helper = Helper(self._command, hello_for(root, self.ids), self._filter)
            station = Station(helper, root, self.ids, self._groups)
            self._stations[key] = station
            if root is None:
                self._host = station
            return station

    def _root(self, image: str) -> ImageRoot:
        """A name means the same for the life of a pool."""
        assert self._resolve is not None
        if image not in self._images:
            self._images[image] = self._resolve(image)
        return self._images[image]

    def close(self, on_closed: Callable[[Station], None]) -> None:
        """End all helpers, with all boxes. Blocks until nothing of them is left."""
        with self._lock:
            self._closed = True
            stations = list(self._stations.values())
        for station in stations:
            station.helper.close()
            on_closed(station)
        if self._groups is not None:
            self._groups.close()


def _controllers(pool_id: str) -> Controllers | None:
    with contextlib.suppress(OSError):
        return find_controllers(
            Path("/proc/self/cgroup").read_text(encoding="ascii"),
            Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
            owner_name(part=pool_id),
            rates=True,
        )
    return None
