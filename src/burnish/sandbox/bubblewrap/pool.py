"""`SandboxPool` on bubblewrap."""

from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.keeper.client import KeeperClient
from burnish.sandbox.keeper.pool import KeeperPool


class BubblewrapPool(KeeperPool):
    """Boxes on this machine, each command under bubblewrap."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        """Start the keeper and try one box.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        config = config or SandboxConfig()
        super().__init__(
            lambda: KeeperClient(
                config.max_boxes,
                module="burnish.sandbox.bubblewrap.keeper",
                control_groups=config.control_groups,
            )
        )
