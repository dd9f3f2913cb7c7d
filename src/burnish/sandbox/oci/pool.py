"""`SandboxPool` on an OCI runtime."""

import os

from burnish.core.boxes import Policy
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.base import ImageRoot, Images
from burnish.sandbox.keeper.client import KeeperClient
from burnish.sandbox.keeper.pool import KeeperPool, KeptBox
from burnish.sandbox.network.base import NetworkProvider
from burnish.sandbox.oci.podman import unshare_command
from burnish.sandbox.oci.process_pool import ProcessKeptBox
from burnish.sandbox.oci.runtime import RuntimeName, find_runtime


class OciPool(KeeperPool):
    """Boxes on this machine, each command in a container of its own."""

    def __init__(
        self,
        config: SandboxConfig | None = None,
        runtime: str = RuntimeName.CRUN,
        images: Images | None = None,
        network: NetworkProvider | None = None,
    ) -> None:
        """Start the keeper and try one box.

        Args:
            config: how many boxes, and with what limits.
            runtime: `crun`, `runc`, `runsc` (gVisor) or `podman`.
            images: where images come from; without, boxes see this host's programs only.
            network: carries out `Policy.allow`; without, boxes have no network.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        config = config or SandboxConfig()
        found = find_runtime(runtime)
        # Also where nobody but podman may make a user namespace, and with all ids that it has.
        by_podman = found.is_engine and os.geteuid() != 0
        launcher = unshare_command(found) if by_podman else ()
        # Its keeper says what is missing if it cannot.
        self._saves_processes = found.name is RuntimeName.RUNC
        self._needs_relay = found.has_own_network
        super().__init__(
            lambda: KeeperClient(
                config.max_boxes,
                module="burnish.sandbox.oci.keeper",
                control_groups=config.control_groups,
                arguments=(str(found.name), str(int(network is not None))),
                launcher=launcher,
            ),
            images,
            network,
            config=config,
        )

    def _wrap(
        self, client: KeeperClient, number: int, policy: Policy, image: ImageRoot | None
    ) -> KeptBox:
        if not self._saves_processes:
            return super()._wrap(client, number, policy, image)
        return ProcessKeptBox(client, number, self._network, policy, image, self._box_of)

    def check_root(self, image: ImageRoot, policy: Policy) -> None:
        """See `KeeperPool`: a shell starts commands, and gVisor's network needs a Python."""
        check_shell(image)
        if policy.allow and self._needs_relay:
            check_relay(image)


def check_shell(image: ImageRoot) -> None:
    """Refuse an image in which no command could be started.

    Raises:
        UserError: it has no shell.
    """
    if not os.path.lexists(image.root / "bin" / "sh"):
        raise UserError(
            f"image {image.name} has no /bin/sh, with which commands are started in containers.",
            fix="use the native sandbox, which needs none, or add a shell to the image (for one "
            "without a distribution: a static busybox as /bin/sh)",
        )


def check_relay(image: ImageRoot) -> None:
    """Refuse an image in which the relay of the network cannot run.

    Raises:
        UserError: it has no Python.
    """
    places = (image.root / place / "python3" for place in ("usr/local/bin", "usr/bin", "bin"))
    if not any(map(os.path.lexists, places)):
        raise UserError(
            f"image {image.name} has no python3, with which its boxes reach their network.",
            fix="install python3 in the image, or choose another backend",
        )
