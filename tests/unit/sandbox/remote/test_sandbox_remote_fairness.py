"""One client of a server cannot keep the boxes from another."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.core.boxes import Sandbox, SandboxPool
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.fleet import FleetPool
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure

Connect = Callable[..., RemotePool]
Serve = Callable[..., Any]  # conftest.Served


class Asker:
    """Asks for many boxes at once and keeps each until it is told to let one go."""

    def __init__(self, pool: RemotePool, count: int) -> None:
        self.got: list[Sandbox] = []
        self.changed = asyncio.Event()
        self._leave = asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._hold(pool)) for _ in range(count)]

    async def _hold(self, pool: RemotePool) -> None:
        async with pool.acquire() as box:
            self.got.append(box)
            self.changed.set()
            await self._leave.acquire()

    def let_one_go(self) -> None:
        self._leave.release()

    async def has(self, count: int) -> None:
        while len(self.got) < count:
            self.changed.clear()
            await self.changed.wait()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


async def waiting(pool: RemotePool, count: int) -> None:
    while (await pool.stats()).num_waiting != count:
        continue


def test_each_release_goes_to_who_has_less_than_its_share(serve: Serve, connect: Connect) -> None:
    served = serve(4)
    one, other = connect(served.url), connect(served.url)

    async def main() -> None:
        greedy = Asker(one, 60)
        await greedy.has(4)
        await waiting(one, 56)
        modest = Asker(other, 5)
        await waiting(other, 61)
        for count in (1, 2):
            greedy.let_one_go()
            await modest.has(count)
            assert len(greedy.got) == 4
        greedy.let_one_go()
        await greedy.has(5)
        assert len(modest.got) == 2
        modest.let_one_go()
        await modest.has(3)
        await greedy.stop()
        await modest.has(5)
        await modest.stop()

    asyncio.run(main())


def test_sessions_of_one_user_have_one_share(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("ann a-token-of-anns-own\nbob a-token-of-bobs-own\n")
    served = serve(4, listen="127.0.0.1:0", token_file=tokens)
    pools = [connect(served.url, f"a-token-of-{name}s-own") for name in ("ann", "ann", "bob")]

    async def main() -> None:
        first = Asker(pools[0], 20)
        await first.has(4)
        second = Asker(pools[1], 20)
        await waiting(pools[1], 36)
        bob = Asker(pools[2], 20)
        await waiting(pools[2], 56)
        for count in (1, 2):
            first.let_one_go()
            await bob.has(count)
            assert (len(first.got), len(second.got)) == (4, 0)
        for asker in (first, second, bob):
            await asker.stop()

    asyncio.run(main())


def test_who_asks_for_too_much_is_told_so_and_others_are_not(
    serve: Serve, connect: Connect
) -> None:
    served = serve(1, max_waiting=8, max_waiting_per_client=3)
    one, other = connect(served.url), connect(served.url)

    async def main() -> None:
        greedy = Asker(one, 4)
        await greedy.has(1)
        await waiting(one, 3)
        with pytest.raises(RemoteFailure) as refused:
            await one.create(wait_s=0)
        assert refused.value.kind is ProblemKind.BUSY
        modest = Asker(other, 1)
        await waiting(other, 4)
        greedy.let_one_go()
        await modest.has(1)
        await greedy.stop()
        await modest.stop()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RemotePool, lambda url: FleetPool([url])])
def test_batches_of_two_clients_that_do_not_fit_together_go_one_after_the_other(
    serve: Serve, kind: Callable[[str], SandboxPool]
) -> None:
    served = serve(4)
    pools = [kind(served.url) for _ in range(2)]

    async def use(pool: SandboxPool) -> None:
        async with pool.acquire_many(3) as boxes:
            assert len({box.id for box in boxes}) == 3
            assert len(served.pool.boxes) <= 4

    async def main() -> None:
        await asyncio.gather(*(use(pool) for pool in pools for _ in range(3)))
        for pool in pools:
            with pytest.raises(ValueError, match="1 to 4 can be had"):
                async with pool.acquire_many(5):
                    pass
            await pool.close()

    asyncio.run(main())


def test_a_batch_that_fails_or_is_given_up_frees_its_places(serve: Serve, connect: Connect) -> None:
    served = serve(3)
    pool = connect(served.url)

    async def main() -> None:
        served.pool.broken = True
        with contextlib.suppress(Exception):
            async with pool.acquire_many(3):
                pytest.fail("there are no boxes")
        served.pool.broken = False
        async with pool.acquire_many(2):
            given_up = asyncio.create_task(pool.acquire_many(2).__aenter__())
            await waiting(pool, 1)
            given_up.cancel()
            await asyncio.wait((given_up,))
            await waiting(pool, 0)
        async with pool.acquire_many(3) as boxes:
            assert len(boxes) == 3

    asyncio.run(main())
