"""From a configuration to a pool: the one place that knows all backends.

Backends are imported when they are chosen: a machine needs only what its own one needs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from burnish.core.boxes import SandboxPool
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.limits import TooManyBoxes

if TYPE_CHECKING:
    from burnish.sandbox.audit import AuditLogs
    from burnish.sandbox.images.manifest import Image
    from burnish.sandbox.images.store import ImageStore
    from burnish.sandbox.network.provider import AllowListNetwork


class Wanted(NamedTuple):
    """What a backend is started with."""

    config: SandboxConfig
    logs: "AuditLogs | None"

    def network(self) -> "AllowListNetwork":
        """The proxy of the boxes; its thread starts with the first box that has an allow-list."""
        from burnish.sandbox.network.provider import AllowListNetwork

        sink = _discard if self.logs is None else self.logs.network
        return AllowListNetwork(sink, private=self.config.private_hosts)

    def resolve(self, name: str) -> "Image":
        """Find an image."""
        return self._store().resolve(name)

    def lease(self, name: str) -> "AbstractContextManager[Image]":
        """Find an image, which stays while the context lasts."""
        return self._store().lease(name)

    def _store(self) -> "ImageStore":
        """Opened when an image is asked for: its directory is made then."""
        from burnish.sandbox.images.store import ImagesConfig

        return ImagesConfig(directory=self.config.images).open()


def open_pool(config: SandboxConfig | None = None) -> SandboxPool:
    """Start the backend that the configuration names; with `auto`, the best that works here.

    Raises:
        UserError: it cannot run here; says what is missing, for each one that was tried.
    """
    config = config or SandboxConfig()
    if config.audit is None:
        return _start(Wanted(config, None))
    from burnish.sandbox.audit import AuditedPool, AuditLogs

    unlogged = Wanted(config, None)
    logs = AuditLogs(config.audit, image_digest=lambda name: unlogged.resolve(name).digest)
    return AuditedPool(_start(Wanted(config, logs)), logs)


def _start(wanted: Wanted) -> SandboxPool:
    name: str = wanted.config.backend
    if name == "remote" and wanted.config.lease_s is not None:
        raise UserError(
            "how long boxes of other hosts live is up to those: there is no lease_s.",
            fix="leave sandbox.lease_s out; a host ends the boxes of clients that vanish",
        )
    if wanted.config.storage == "disk":
        if name == "remote":
            raise UserError(
                "where boxes of other hosts write is up to those.",
                fix="start those with `burnish sandbox serve --storage disk`, and leave out "
                "sandbox.storage here",
            )
        if name not in ("auto", "native"):
            raise UserError(
                f"the {name} sandbox keeps what boxes write in memory.",
                fix='set sandbox.storage = "memory", or sandbox.backend = "native"',
            )
        name = "native"
    if name != "auto":
        return _BACKENDS[name](wanted)
    problems: list[UserError | ClassifiedFailure] = []
    for name in PREFERRED:
        try:
            return _BACKENDS[name](wanted)
        except TooManyBoxes:
            raise
        except (UserError, ClassifiedFailure) as error:
            problems.append(error)
    whats = [error.what if isinstance(error, UserError) else str(error) for error in problems]
    fixes = [error.fix for error in problems if isinstance(error, UserError)]
    raise UserError(
        f"no sandbox runs here. {' '.join(whats)}", fix=fixes[0] if fixes else "run burnish doctor"
    )


def _native(wanted: Wanted) -> SandboxPool:
    from burnish.sandbox.native.pool import NativePool

    return NativePool(wanted.config, images=wanted, network=wanted.network())


def _bubblewrap(wanted: Wanted) -> SandboxPool:
    from burnish.sandbox.bubblewrap.pool import BubblewrapPool

    return BubblewrapPool(wanted.config, network=wanted.network())


def _oci(runtime: str) -> Callable[[Wanted], SandboxPool]:
    def start(wanted: Wanted) -> SandboxPool:
        from burnish.sandbox.oci.pool import OciPool

        return OciPool(wanted.config, runtime, images=wanted, network=wanted.network())

    return start


def _docker(wanted: Wanted) -> SandboxPool:
    from burnish.sandbox.engine.pool import DockerPool

    return DockerPool(wanted.config, images=wanted, network=wanted.network())


def _remote(wanted: Wanted) -> SandboxPool:
    from burnish.sandbox.remote.fleet import FleetPool
    from burnish.sandbox.remote.token_file import read_token

    config = wanted.config
    if not config.hosts:
        raise UserError(
            "the remote sandbox has no hosts.",
            fix='set hosts = ["https://HOST:PORT"], where `burnish sandbox serve` runs',
        )
    token = None if config.token_file is None else read_token(config.token_file)
    return FleetPool(config.hosts, token)


def _discard(event: object) -> None:
    """Decisions that nobody wants to keep."""


_BACKENDS: dict[str, Callable[[Wanted], SandboxPool]] = {
    "native": _native,
    "bubblewrap": _bubblewrap,
    "crun": _oci("crun"),
    "runc": _oci("runc"),
    "gvisor": _oci("runsc"),
    "podman": _oci("podman"),
    "docker": _docker,
    "remote": _remote,
}
PREFERRED = ("native", "bubblewrap")
"""What `auto` tries, in this order."""
