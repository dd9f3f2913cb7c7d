"""A server in a thread of this process: for one who lends out boxes beside other work."""

import asyncio
from concurrent.futures import CancelledError, Future

from burnish.core.boxes import SandboxPool
from burnish.core.clock import Clock
from burnish.core.loop_thread import LoopThread
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.server import SandboxServer
from burnish.sandbox.remote.serving import listening


class ServerThread:
    """Serves a pool until it is closed."""

    def __init__(
        self,
        pool: SandboxPool,
        config: ServeConfig,
        *,
        max_boxes: int,
        clock: Clock | None = None,
    ) -> None:
        """Start, and wait until clients can come. The pool is closed with the server.

        Raises:
            UserError: it cannot listen there, or must not.
        """
        self._thread = LoopThread()
        self._stop = asyncio.Event()
        ready: Future[tuple[str, SandboxServer]] = Future()

        async def hold() -> None:
            try:
                async with listening(pool, config, max_boxes=max_boxes, clock=clock) as serving:
                    ready.set_result(serving)
                    await self._stop.wait()
            finally:
                if not ready.done():
                    ready.cancel()

        async def start() -> None:
            self._holding = asyncio.get_running_loop().create_task(hold())

        self._thread.run_blocking(start)
        try:
            self.url, self._server = ready.result()
        except CancelledError:
            try:
                # Raises what kept it from starting.
                self._thread.run_blocking(self._held)
            finally:
                self._thread.close()
            raise

    def tend(self) -> None:
        """Do at once what happens regularly, as after time was made to pass."""
        self._thread.run_blocking(self._server.tend)

    def close(self) -> None:
        """Destroy all boxes and close the pool; may be called twice."""
        if self._thread.closed:
            return

        async def stop() -> None:
            self._stop.set()
            await self._held()

        try:
            self._thread.run_blocking(stop)
        finally:
            self._thread.close()

    async def _held(self) -> None:
        await self._holding
