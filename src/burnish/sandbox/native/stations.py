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
from burnish.sandbox.native.templates import Template, template_command, template_problem
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
        on_lost: Callable[[], None],
        on_gone: Callable[[Station], None],
    ) -> None:
        """Start the one for the host. Blocks.

        Args:
            pool_id: letters and digits, unique in this process.
            config: of the pool.
            resolve: finds images.
            keep_open: see `Groups`.
            on_lost: called when a helper has ended by itself.
            on_gone: called when a station makes no boxes any more, whyever.

        Raises:
            UserError: boxes cannot run here; says what to do.
            ClassifiedFailure: the helper failed.
        """
        self._config = config
        self._resolve = resolve
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._images: dict[str, ImageRoot] = {}
        self._stations: dict[tuple[str, Template | None], Station] = {}
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
            self.close()
            raise

    @property
    def host(self) -> Station:
        """For boxes without an image."""
        return self._host

    @property
    def helper_pids(self) -> tuple[int, ...]:
        """Of all helpers."""
        return tuple(station.helper.pid for station in list(self._stations.values()))

    async def find(self, image: str | None, template: Template | None = None) -> Station:
        """The station of an image, with a helper that is alive as far as we know.

        Raises:
            UserError: there is no such image, or it has no such modules.
            ClassifiedFailure: the helper does not start, or the pool is closed.
        """
        station = self._known(image, template)
        if station is not None and station.helper.still_runs():
            return station
        return await asyncio.to_thread(self._open, image, template)

    def _known(self, image: str | None, template: Template | None) -> Station | None:
        if image is None and template is None:
            return self._host
        root = self._images.get(image) if image is not None else None
        if image is not None and root is None:
            return None
        return self._stations.get((root.digest if root else "", template))

    def _open(self, image: str | None, template: Template | None = None) -> Station:
        """Start a helper, unless another thread has done so."""
        with self._lock:
            if self._closed:
                raise failure("the pool is closed")
            root = None if image is None else self._root(image)
            key = (root.digest if root else "", template)
            old = self._stations.get(key)
            if old is not None:
                if old.alive:
                    return old
                self._on_lost()
                old.helper.close()
                self._on_gone(old)
            station = Station(self._start(root, template), root, self.ids, self._groups, template)
            self._stations[key] = station
            if root is None and template is None:
                self._host = station
            return station

    def _start(self, root: ImageRoot | None, template: Template | None) -> Helper:
        hello = hello_for(root, self.ids)
        if template is None:
            return Helper(self._command, hello, self._filter)
        command = template_command(template, has_image=root is not None)
        return Helper(command, hello, self._filter, template_problem)

    def _root(self, image: str) -> ImageRoot:
        """A name means the same for the life of a pool."""
        assert self._resolve is not None
        if image not in self._images:
            self._images[image] = self._resolve(image)
        return self._images[image]

    def close(self) -> None:
        """End all helpers, with all boxes. Blocks until nothing of them is left."""
        with self._lock:
            self._closed = True
            stations = list(self._stations.values())
        for station in stations:
            station.helper.close()
            self._on_gone(station)
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
