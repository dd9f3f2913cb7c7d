"""From a configuration to a pool: the one place that knows all backends.

Backends are imported when they are chosen: a machine needs only what its own one needs.
"""

from collections.abc import Callable

from burnish.core.boxes import SandboxPool
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.config import SandboxConfig


def open_pool(config: SandboxConfig | None = None) -> SandboxPool:
    """Start the backend that the configuration names; with `auto`, the best that works here.

    Raises:
        UserError: it cannot run here; says what is missing, for each one that was tried.
    """
    config = config or SandboxConfig()
    if config.backend != "auto":
        return _BACKENDS[config.backend](config)
    problems: list[UserError | ClassifiedFailure] = []
    for name in _PREFERRED:
        try:
            return _BACKENDS[name](config)
        except (UserError, ClassifiedFailure) as error:
            problems.append(error)
    whats = [error.what if isinstance(error, UserError) else str(error) for error in problems]
    fixes = [error.fix for error in problems if isinstance(error, UserError)]
    raise UserError(
        f"no sandbox runs here. {' '.join(whats)}", fix=fixes[0] if fixes else "run burnish doctor"
    )


def _bubblewrap(config: SandboxConfig) -> SandboxPool:
    from burnish.sandbox.bubblewrap.pool import BubblewrapPool

    return BubblewrapPool(config)


_BACKENDS: dict[str, Callable[[SandboxConfig], SandboxPool]] = {"bubblewrap": _bubblewrap}
_PREFERRED = ("bubblewrap",)
