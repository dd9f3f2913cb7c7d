"""A box whose commands run in containers of an OCI runtime."""

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.keeper.attacher import Attacher
from burnish.sandbox.keeper.namespace import unmount
from burnish.sandbox.keeper.protocol import Exec
from burnish.sandbox.keeper.stored_box import StoredBox
from burnish.sandbox.oci.bundle import HostRoot, make_image_root, write_bundle
from burnish.sandbox.oci.checkpoint import Checkpoints
from burnish.sandbox.oci.hierarchies import remove_group
from burnish.sandbox.oci.launch import OciLaunch, Plan
from burnish.sandbox.oci.launcher import launcher_script
from burnish.sandbox.oci.podman import remove_command, run_command
from burnish.sandbox.oci.runtime import RELAY_BYTES, SENTRY_BYTES, Runtime
from burnish.sandbox.oci.sentry import sentry_file_bytes
from burnish.sandbox.oci.spec import Bind
from burnish.sandbox.oci.users import BoxUsers
from burnish.sandbox.proctree import TreeUsage

_SENTRY_TASKS = 1024
"""Threads of gVisor and of its gofer, and host processes that stand for those of the box."""


class OciHost(NamedTuple):
    """What all boxes of a keeper share."""

    runtime: Runtime
    token: str
    """No other keeper of this machine has it."""
    base: Path
    """Directory of the boxes, visible to the keeper only."""
    root: HostRoot
    """Of boxes without an image."""
    always_binds: tuple[Bind, ...]
    """What every box sees besides."""
    rootless: bool
    """We are not root outside our user namespace."""
    cgroups_path: str | None
    """Parent of what the runtime makes itself, where it cannot be kept from it."""
    controllers: Controllers | None
    attacher: Attacher | None
    """Set exactly when `controllers` is."""
    helpers: set[int]
    """Pids of the keeper's children other than strays."""
    checkpoints: Checkpoints | None = None
    """Where processes are saved, if they can be."""


class OciBox(StoredBox):
    """A private directory of limited size, in which commands run one after another."""

    def __init__(
        self, host: OciHost, name: str, users: BoxUsers, image: str, proxy_port: int = 0
    ) -> None:
        """Make storage and control groups, and start the container of the first command.

        Args:
            host: what all boxes share.
            name: unique among the boxes of the keeper.
            users: who it is.
            image: directory with a root file system; empty: this host's programs.
            proxy_port: where its commands find their network; 0: nowhere.

        Raises:
            OSError: the host is out of something, or the image cannot be used.
        """
        self._host = host
        self._name = name
        self._users = users
        self._num_launches = 0
        self._private = host.base / "boxes" / name
        self._private.mkdir(mode=0o711)
        self._root = host.root
        self._is_image = bool(image)
        self._counts_root = host.runtime.is_engine
        if image:
            try:
                self._root = HostRoot(
                    make_image_root(self._private, Path(image), engine=host.runtime.is_engine), ()
                )
            except OSError:
                self._remove_root()
                raise
        self._relay_port = proxy_port if host.runtime.has_own_network else 0
        super().__init__(host.base, host.controllers, name, users.identity, proxy_port=proxy_port)
        self.warm_up()

    async def destroy(self) -> None:
        """Free everything. No command runs any more."""
        await super().destroy()
        self._remove_root()

    def _remove_root(self) -> None:
        for name in ("root", "image") if self._is_image else ():
            try:
                unmount(str(self._private / name))
            except OSError:  # it was never mounted
                continue
        shutil.rmtree(self._private)

    def _launch(self) -> OciLaunch:
        number, self._num_launches = self._num_launches, self._num_launches + 1
        return OciLaunch(self._plan(), self._private / f"run-{number}")

    def _plan(self) -> Plan:
        group, attacher = self._group, self._host.attacher
        whole = self._host.runtime.counted_whole

        async def attach(pid: int) -> None:
            assert group is not None
            assert attacher is not None
            await attacher.attach(pid, group.attach_files())

        return Plan(
            write_bundle=self._write_bundle,
            attach=attach if group is not None and not whole else None,
            attach_runtime=group.attach_files() if group is not None and whole else (),
            remove_group=self._remove_group,
            helpers=self._host.helpers,
            reports=whole,
            relayed=bool(self._relay_port),
            remove=self._remove_command if self._host.runtime.is_engine else None,
        )

    def _criu_config(self) -> Path | None:
        """Settings of the CRIU that may save the container; None: none does."""
        return None

    def _write_bundle(self, bundle: Path, storage: Path | None = None) -> list[str]:
        """Returns the runtime's command line."""
        host, relayed = self._host, bool(self._relay_port)
        spec = write_bundle(
            bundle,
            runtime=host.runtime,
            root=self._root._replace(binds=(*self._root.binds, *host.always_binds)),
            storage=storage or self._storage,
            users=self._users,
            cgroups_path=self._cgroups_path(bundle),
            relay_port=self._relay_port,
            criu_config=self._criu_config(),
        )
        box = self._container(bundle)
        if host.runtime.is_engine:
            own_ids = self._users.identity is not None
            return run_command(host.runtime, host.base, bundle, box, spec, own_ids=own_ids)
        state = bundle / "state"
        return host.runtime.command(
            state=state, bundle=bundle, box=box, rootless=host.rootless, relayed=relayed
        )

    def _container(self, bundle: Path) -> str:
        """GVisor listens under this name in the network of the host, where other keepers do too."""
        return f"{self._host.token}-{self._name}-{bundle.name}"

    def _remove_command(self, bundle: Path) -> list[str]:
        return remove_command(self._host.runtime, self._host.base, self._container(bundle))

    def _cgroups_path(self, bundle: Path) -> str | None:
        parent = self._host.cgroups_path
        return parent and f"{parent}/{self._container(bundle)}"

    def _remove_group(self, bundle: Path) -> None:
        if path := self._cgroups_path(bundle):
            remove_group(path)

    def _script(self, argv: tuple[str, ...], request: Exec, bounds: list[str]) -> bytes:
        whole = self._host.runtime.counted_whole
        return launcher_script(argv, request.variables, request.directory, bounds, reports=whole)

    def _group_limits(self, limits: Limits) -> Limits:
        if not self._host.runtime.counted_whole:
            return limits
        return msgspec.structs.replace(
            limits,
            memory_bytes=limits.memory_bytes + SENTRY_BYTES + self._relay_bytes,
            num_pids=_SENTRY_TASKS + 4 * limits.num_pids,
        )

    def _num_processes(self, limits: Limits) -> int | None:
        if self._host.runtime.counted_whole:
            return limits.num_pids + 1 + bool(self._relay_port)
        return super()._num_processes(limits)

    def _sample(self, root_pid: int) -> TreeUsage:
        usage = super()._sample(root_pid)
        if not self._host.runtime.counted_whole:
            return usage
        # Its processes are no tasks of the box: there RLIMIT_NPROC counts. And what a program uses
        # is resident in no process, but in one file in memory.
        used = self._files.used_bytes() + sentry_file_bytes(root_pid)
        return usage._replace(num_tasks=1, memory_bytes=max(0, used - self._relay_bytes))

    @property
    def _relay_bytes(self) -> int:
        return RELAY_BYTES if self._relay_port else 0
