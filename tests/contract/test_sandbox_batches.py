"""Every pool gives several boxes at once: all of them, or none."""

import asyncio

import pytest

from burnish.core.boxes import ExecStatus, SandboxPool
from burnish.core.errors import UserError

MOST = 4
"""Boxes of the pools of these suites."""


async def all_free(pool: SandboxPool) -> None:
    """Waits for ever if a box was left behind."""
    async with pool.acquire_many(MOST) as boxes:
        assert len({box.id for box in boxes}) == MOST


def test_a_batch_is_so_many_boxes_of_their_own_at_once(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire_many(MOST) as boxes:
            assert len({box.id for box in boxes}) == len(boxes) == MOST
            for number, box in enumerate(boxes):
                await box.write_file("f", b"%d" % number)
            results = await asyncio.gather(*(box.exec(("cat", "f")) for box in boxes))
            assert [result.stdout for result in results] == [b"%d" % n for n in range(MOST)]
        assert (await boxes[0].exec(("true",))).status is ExecStatus.INFRA_ERROR
        await all_free(pool)

    asyncio.run(main())


@pytest.mark.parametrize("count", [-1, 0, MOST + 1])
def test_a_batch_that_the_pool_can_never_have_is_an_error(pool: SandboxPool, count: int) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=f"{count} boxes"):
            async with pool.acquire_many(count):
                pass
        with pytest.raises(UserError, match="image"):
            async with pool.acquire_many(2, image="debian"):
                pass
        await all_free(pool)

    asyncio.run(main())


def test_nothing_is_left_of_a_batch_whose_user_fails_or_gives_up(pool: SandboxPool) -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with pool.acquire_many(MOST):
                raise ZeroDivisionError
        async with pool.acquire_many(MOST - 1):

            async def ask() -> None:
                async with pool.acquire_many(MOST):
                    raise AssertionError("one of them is in use")

            waiting = asyncio.create_task(ask())
            # So that the one that is free has been made, where they are made one by one.
            await asyncio.wait((waiting,), timeout=0.2)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()
            async with pool.acquire() as box:
                assert (await box.exec(("true",))).status is ExecStatus.OK
        await all_free(pool)

    asyncio.run(main())


def test_batches_that_want_more_than_there_are_wait_for_one_another(pool: SandboxPool) -> None:
    async def use() -> None:
        async with pool.acquire_many(MOST - 1) as boxes:
            for box in boxes:
                assert (await box.exec(("true",))).status is ExecStatus.OK

    async def main() -> None:
        await asyncio.gather(use(), use())

    asyncio.run(main())
