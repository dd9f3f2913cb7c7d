"""`SandboxPool` on an OCI runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.keeper.client import KeeperClient
from burnish.sandbox.keeper.pool import KeeperPool
from burnish.sandbox.oci.runtime import RuntimeName, find_runtime


class RootImage(Protocol):
    """An image that lies unpacked on this machine."""

    @property
    def root(self) -> Path:
        """Directory with its root file system. It is never written."""
        ...


class OciPool(KeeperPool):
    """Boxes on this machine, each command in a container of its own."""

    def __init__(
        self,
        config: SandboxConfig | None = None,
        runtime: str = RuntimeName.CRUN,
        resolve: Callable[[str], RootImage] | None = None,
    ) -> None:
        """Start the keeper and try one box.

        Args:
            config: how many boxes, and with what limits.
            runtime: `crun`, `runc`, `runsc` (gVisor), or the one that `podman` or `docker` brings.
            resolve: finds an image by its name; without, boxes see this host's programs only.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        config = config or SandboxConfig()
        name = str(find_runtime(runtime).name)
        super().__init__(
            lambda: KeeperClient(
                config.max_boxes,
                module="burnish.sandbox.oci.keeper",
                control_groups=config.control_groups,
                arguments=(name,),
            ),
            None if resolve is None else lambda image: str(resolve(image).root.resolve()),
        )
