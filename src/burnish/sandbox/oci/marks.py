"""What comes on stderr of a container: words of ours first, then the program's."""

import os

from burnish.sandbox.keeper.pipes import Capture
from burnish.sandbox.oci.launcher import READY, STARTED

_MAX_EARLY_BYTES = 64 * 2**10


class MarkedCapture(Capture):
    """stderr of a container: ours up to STARTED, then the program's."""

    def __init__(self) -> None:
        """Make the pipes."""
        super().__init__()
        self._early = b""
        self._started = False
        self.started_fd, self._started_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def ready(self) -> bool:
        """Whether the launcher waits."""
        return READY in self._early or self._started

    def pump(self) -> bool:
        """Take what is there; False at the end, but not if there is just nothing now."""
        try:
            chunk = os.read(self.read_fd, _MAX_EARLY_BYTES)
        except BlockingIOError:
            return True
        self._keep(chunk)
        return bool(chunk)

    def finish(self) -> bytes:
        """What the program wrote; if it never started, what the runtime or the launcher did."""
        kept = super().finish()
        return kept if self._started else self._early.replace(READY, b"")

    def close(self) -> None:
        """Free our descriptors."""
        super().close()
        os.close(self.started_fd)
        os.close(self._started_in)

    def _keep(self, chunk: bytes) -> None:
        if not self._started:
            head, mark, chunk = (self._early + chunk).partition(STARTED)
            self._early = head[-_MAX_EARLY_BYTES:]
            if not mark:
                return
            self._started = True
            os.write(self._started_in, b"s")
        if chunk:
            super()._keep(chunk)
