"""A box whose commands run under bubblewrap."""

from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.bubblewrap.argv import (
    BoxView,
    BwrapFeatures,
    box_options,
    encode_options,
    launcher_script,
)
from burnish.sandbox.bubblewrap.launch import Launch, Plan
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.host_view import HostPath
from burnish.sandbox.keeper.attacher import Attacher
from burnish.sandbox.keeper.namespace import Identity
from burnish.sandbox.keeper.protocol import Exec
from burnish.sandbox.keeper.stored_box import StoredBox

EMPTY = "empty"
"""Name below the keeper's base of the directory that covers what boxes must not see."""


class Host(NamedTuple):
    """What all boxes of a keeper share."""

    bwrap: str
    features: BwrapFeatures
    base: Path
    """Directory of the boxes, visible to the keeper only."""
    system: tuple[HostPath, ...]
    hidden: tuple[str, ...]
    """See `BoxView`."""
    etc: tuple[tuple[str, str], ...]
    seccomp: bytes
    controllers: Controllers | None
    attacher: Attacher | None
    """Set exactly when `controllers` is."""
    helpers: set[int]
    """Pids of the keeper's children other than strays."""


class Box(StoredBox):
    """A private directory of limited size, in which commands run one after another."""

    def __init__(
        self, host: Host, name: str, identity: Identity | None, proxy_port: int = 0
    ) -> None:
        """Make storage and control groups, and start the process of the first command.

        Raises:
            OSError: the host is out of something.
        """
        super().__init__(host.base, host.controllers, name, identity, proxy_port=proxy_port)
        self._host = host
        self._plan = self._make_plan()
        self.warm_up()

    def _launch(self) -> Launch:
        return Launch(self._plan)

    def _script(self, argv: tuple[str, ...], request: Exec, bounds: list[str]) -> bytes:
        return launcher_script(argv, request.variables, request.directory, bounds)

    def _make_plan(self) -> Plan:
        host, group = self._host, self._group
        view = BoxView(
            system=host.system,
            etc=host.etc,
            hidden=host.hidden,
            empty=str(host.base / EMPTY),
            storage=str(self._storage),
        )

        async def attach(pid: int) -> None:
            assert group is not None
            assert host.attacher is not None
            await host.attacher.attach(pid, group.attach_files())

        return Plan(
            bwrap=host.bwrap,
            options=encode_options(box_options(view, host.features)),
            seccomp=host.seccomp,
            identity=self._identity,
            attach=attach if group is not None else None,
            helpers=host.helpers,
        )
