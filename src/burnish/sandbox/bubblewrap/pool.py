"""`SandboxPool` on bubblewrap."""

from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.keeper.client import KeeperClient
from burnish.sandbox.keeper.pool import KeeperPool
from burnish.sandbox.network.base import NetworkProvider


class BubblewrapPool(KeeperPool):
    """Boxes on this machine, each command under bubblewrap."""

    def __init__(
        self, config: SandboxConfig | None = None, network: NetworkProvider | None = None
    ) -> None:
        """Start the keeper and try one box.

        Args:
            config: how many boxes, and with what limits.
            network: carries out `Policy.allow`; without, boxes have no network.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        config = config or SandboxConfig()
        super().__init__(
            lambda: KeeperClient(
                config.max_boxes,
                module="burnish.sandbox.bubblewrap.keeper",
                control_groups=config.control_groups,
            ),
            network=network,
            config=config,
        )
