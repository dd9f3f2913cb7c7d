"""What the users of a pool see of boxes whose processes are saved with their files."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from burnish.core.boxes import Policy, Snapshot
from burnish.core.errors import UserError
from burnish.sandbox.images.base import ImageRoot
from burnish.sandbox.keeper.client import KeeperClient
from burnish.sandbox.keeper.pool import KeptBox
from burnish.sandbox.keeper.protocol import Forget, Restore, Save
from burnish.sandbox.network.base import NetworkProvider

Spawn = Callable[[ImageRoot | None, Policy, int], AbstractAsyncContextManager[KeptBox]]
"""Makes a box that goes on from a state of the keeper."""


class ProcessKeptBox(KeptBox):
    """A `ProcessSandbox`."""

    def __init__(
        self,
        client: KeeperClient,
        number: int,
        provider: NetworkProvider | None,
        policy: Policy,
        image: ImageRoot | None,
        spawn: Spawn,
    ) -> None:
        """See `KeptBox`; `spawn` makes forks."""
        super().__init__(client, number, provider, policy, image)
        self._image = image
        self._policy = policy
        self._spawn = spawn

    async def snapshot(self) -> Snapshot:
        """See `ProcessSandbox`."""
        client = self._client
        done = await self._ask(Save(id=client.next_id(), box=self._number))
        return Snapshot(
            id=f"{client.pid}-{done.state}",
            image="" if self._image is None else self._image.name,
            num_layers=1,
        )

    async def rollback(self, snapshot: Snapshot) -> None:
        """See `ProcessSandbox`."""
        client = self._client
        state = self._state(snapshot)
        await self._ask(Restore(id=client.next_id(), box=self._number, state=state))

    @asynccontextmanager
    async def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AsyncIterator[tuple["ProcessKeptBox", ...]]:
        """See `ProcessSandbox`. They count towards `max_boxes`.

        Raises:
            UserError: the snapshot is of another pool or image, or forgotten.
            ClassifiedFailure: of kind `sandbox`, if they cannot start.
        """
        async with AsyncExitStack() as stack:
            source = snapshot
            if source is None:
                source = await self.snapshot()
                stack.push_async_callback(self.forget, source)
            state = self._state(source)
            boxes = []
            for _ in range(count):
                made = self._spawn(self._image, self._policy, state)
                box = await stack.enter_async_context(made)
                assert isinstance(box, ProcessKeptBox)
                boxes.append(box)
            yield tuple(boxes)

    async def forget(self, snapshot: Snapshot) -> None:
        """See `ProcessSandbox`."""
        client = self._client
        if client.alive:
            await client.ask(Forget(id=client.next_id(), state=self._state(snapshot)))

    def _state(self, snapshot: Snapshot) -> int:
        keeper, _, number = snapshot.id.partition("-")
        if keeper != str(self._client.pid) or not number.isdigit():
            raise UserError(
                f"there is no snapshot {snapshot.id} in this pool any more.",
                fix="use snapshots that this pool made since its keeper was started",
            )
        return int(number)
