"""`SandboxPool` on docker."""

from burnish.core.boxes import Policy
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.engine.client import find_docker
from burnish.sandbox.images.base import ImageRoot, Images
from burnish.sandbox.keeper.client import KeeperClient
from burnish.sandbox.keeper.pool import KeeperPool
from burnish.sandbox.network.base import NetworkProvider
from burnish.sandbox.oci.pool import check_relay, check_shell


class DockerPool(KeeperPool):
    """Boxes of a docker daemon on this machine, each command in a container of its own."""

    def __init__(
        self,
        config: SandboxConfig | None = None,
        images: Images | None = None,
        network: NetworkProvider | None = None,
    ) -> None:
        """Start the keeper and try one box.

        Args:
            config: how many boxes.
            images: where images come from; without, boxes see this host's programs only.
            network: carries out `Policy.allow`; without, boxes have no network.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        config = config or SandboxConfig()
        find_docker()
        super().__init__(
            lambda: KeeperClient(
                config.max_boxes,
                module="burnish.sandbox.engine.keeper",
                arguments=(str(int(network is not None)),),
            ),
            images,
            network,
            config=config,
        )

    def check_root(self, image: ImageRoot, policy: Policy) -> None:
        """See `KeeperPool`: a shell starts commands, and their network needs a Python."""
        check_shell(image)
        if policy.allow:
            check_relay(image)
