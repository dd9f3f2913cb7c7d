"""The boxes of a server: what a fork that does not come to be leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from burnish.core.boxes import Capabilities, Feature, Isolation, Policy, Snapshot
from burnish.core.clock import ManualClock
from burnish.sandbox.places import Places
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.tenants import Owner, Tenants


async def turns() -> None:
    """So many that all that can go on has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_fork_that_is_cancelled_twice_leaves_nothing() -> None:
    """As by a client that gives up its request and then its session."""
    leaving, gates = asyncio.Event(), []

    class Box:
        id = "box"

        async def snapshot(self) -> Snapshot:
            return Snapshot(id="s", image="", num_layers=0)

        async def forget(self, snapshot: Snapshot) -> None: ...

        @contextlib.asynccontextmanager
        async def fork(self, count: int, snapshot: Snapshot) -> AsyncIterator[tuple["Box", ...]]:
            gates.append(snapshot)
            if len(gates) == 3:
                await asyncio.Event().wait()
            try:
                yield (self,)
            finally:
                await leaving.wait()

    class Pool:
        capabilities = Capabilities(
            backend="slow",
            enforces=frozenset(),
            isolation=Isolation.NONE,
            features=frozenset({Feature.SNAPSHOTS}),
            seccomp=False,
        )

        @contextlib.asynccontextmanager
        async def acquire(self, image: str | None, policy: Policy) -> AsyncIterator[Box]:
            yield Box()

        async def close(self) -> None: ...

    async def main() -> None:
        tenants = Tenants(Pool(), ManualClock(), places := Places(10))
        request = m.CreateBox(detached=True)
        owner = Owner("session", "client")
        (parent,) = await tenants.create(owner, request)
        forking = asyncio.ensure_future(tenants.fork(owner, parent, 3, None))
        while len(gates) < 3:
            await turns()
        for _ in range(2):
            forking.cancel()
            await turns()
        leaving.set()
        await asyncio.wait((forking,))
        assert forking.cancelled()
        assert tenants.all() == (parent,)
        assert places.num_taken == 1
        await tenants.destroy_all(tenants.all())
        assert places.num_taken == 0

    asyncio.run(main())
