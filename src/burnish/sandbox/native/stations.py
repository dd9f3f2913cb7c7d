"""The helpers of a pool: one for the host's programs, one for each image that was asked for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.cgroup import Controllers, find_controllers, owner_name
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.base import ImageRoot, Images
from burnish.sandbox.images.running import check_workdir
from burnish.sandbox.native.client import Helper, failure
from burnish.sandbox.native.disk_storage import open_uppers
from burnish.sandbox.native.disks import Disks
from burnish.sandbox.native.groups import Groups
from burnish.sandbox.native.identities import of_this_process
from burnish.sandbox.native.image_settings import job_user, refusal_of
from burnish.sandbox.native.launch import hello_for, helper_command
from burnish.sandbox.native.room import make_room
from burnish.sandbox.native.station import Station
from burnish.sandbox.native.templates import Template, template_command, template_problem
from burnish.sandbox.seccomp import build_filter


class _Key(NamedTuple):
    """What boxes of one helper have in common."""

    image: str
    digest: str
    settings: tuple[str, ...]
    template: Template | None


def _key(image: ImageRoot | None, template: Template | None) -> _Key:
    if image is None:
        return _Key("", "", (), template)
    variables = (f"{name}={value}" for name, value in sorted(image.env.items()))
    settings = (image.workdir, image.user, *variables)
    return _Key(image.name, image.digest, settings, template)


class Stations:
    """Starts helpers when they are needed, and again when they were killed."""

    def __init__(
        self,
        pool_id: str,
        config: SandboxConfig,
        *,
        images: Images | None,
        on_lost: Callable[[], None],
        on_gone: Callable[[Station], None],
    ) -> None:
        """Start the one for the host. Blocks.

        Args:
            pool_id: letters and digits, unique in this process.
            config: of the pool.
            images: where images come from. A name that is given to another image means that one
                from the next box on; who uses the old one keeps it.
            on_lost: called when a helper has ended by itself.
            on_gone: called when a station makes no boxes any more, whyever.

        Raises:
            UserError: boxes cannot run here; says what to do.
            ClassifiedFailure: the helper failed.
        """
        self._config = config
        self._images = images
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._stations: dict[_Key, Station] = {}
        self._leases: dict[Station, contextlib.ExitStack] = {}
        self._closed = False
        self._filter = build_filter()
        self._command = helper_command(config.helper)
        self.ids = of_this_process()
        self.controllers = _controllers(pool_id) if config.control_groups else None
        self._groups: Groups | None = None
        self.uppers = open_uppers(config.storage_directory) if config.storage == "disk" else None
        try:
            keep_open = make_room(
                config.max_boxes + config.warm_boxes, self.controllers, on_disk=bool(self.uppers)
            )
            if self.controllers is not None:
                self._groups = Groups(self.controllers, keep_open=keep_open)
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
        station: Station | None = self._host
        if image is not None or template is not None:
            station = self._stations.get(_key(self._root(image), template))
        if station is not None and station.helper.still_runs():
            return station
        return await asyncio.to_thread(self._open, image, template)

    def _root(self, image: str | None) -> ImageRoot | None:
        if image is None:
            return None
        assert self._images is not None
        return self._images.resolve(image)

    def _open(self, image: str | None, template: Template | None = None) -> Station:
        """Start a helper, unless another thread has done so."""
        with self._lock, contextlib.ExitStack() as lease:
            if self._closed:
                raise failure("the pool is closed")
            root = None
            if image is not None:
                assert self._images is not None
                root = lease.enter_context(self._images.lease(image))
            key = _key(root, template)
            old = self._stations.get(key)
            if old is not None:
                if old.alive:
                    return old
                self._on_lost()
                self._end(old)
            station = self._start(root, template)
            self._leases[station] = lease.pop_all()
            self._stations[key] = station
            self._end_replaced(key)
            if root is None and template is None:
                self._host = station
            return station

    def _start(self, root: ImageRoot | None, template: Template | None) -> Station:
        check_workdir(root)
        user = job_user(root, self.ids)
        hello = hello_for(root, self.ids, user.uid)
        if template is not None:
            command = template_command(template, has_image=root is not None)
            helper = Helper(command, hello, self._filter, template_problem)
        elif root is not None:
            helper = Helper(self._command, hello, self._filter, partial(refusal_of, root.name))
        else:
            helper = Helper(self._command, hello, self._filter)
        return Station(helper, root, user, self.ids, self._groups, template, self._disks(template))

    def _disks(self, template: Template | None) -> Disks | None:
        if self.uppers is None:
            return None
        # A template is root of a user namespace of its own.
        is_mapped = template is not None
        return Disks(self.uppers, (self.ids.uid_first, self.ids.gid_first) if is_mapped else (0, 0))

    def _end_replaced(self, key: _Key) -> None:
        """End what a name meant before, unless a box or a snapshot of it is left."""
        for old, station in list(self._stations.items()):
            replaced = old != key and (old.image, old.template) == (key.image, key.template)
            if replaced and station.is_idle:
                del self._stations[old]
                self._end(station)

    def _end(self, station: Station) -> None:
        station.helper.close()
        if station.disks is not None:
            station.disks.close()
        self._on_gone(station)
        if lease := self._leases.pop(station, None):
            lease.close()

    def close(self) -> None:
        """End all helpers, with all boxes. Blocks until nothing of them is left."""
        with self._lock:
            self._closed = True
            stations = list(self._stations.values())
        for station in stations:
            self._end(station)
        if self._groups is not None:
            self._groups.close()
        elif self.controllers is not None:
            self.controllers.close()
        if self.uppers is not None:
            self.uppers.close()


def _controllers(pool_id: str) -> Controllers | None:
    with contextlib.suppress(OSError):
        return find_controllers(
            Path("/proc/self/cgroup").read_text(encoding="ascii"),
            Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
            owner_name(part=pool_id),
            rates=True,
        )
    return None
