"""Batches of boxes from pools that make them one by one, and through the wrappers of pools."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from burnish.core.boxes import Capabilities, ExecStatus, Feature, Isolation, Policy
from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure
from burnish.quality.isolation import BridgedPool, MissingPool
from burnish.run.group_pool import GroupPool
from burnish.sandbox.audit import AuditedPool
from burnish.sandbox.audit.directory import verify_all
from burnish.sandbox.batches import Batches
from burnish.sandbox.forwarding import ForwardingPool
from burnish.sandbox.measured import MeasuredPool

MOST = 4


class Box:
    def __init__(self, number: int) -> None:
        self.id = f"box-{number}"
        self.threads: list[int] = []

    async def exec(self, argv: tuple[str, ...], **options: object) -> str:
        self.threads.append(threading.get_ident())
        return self.id


class Pool:
    """At most four boxes; those in `sick` do not start, those in `slow` only when cancelled."""

    def __init__(self, sick: set[int] | None = None, slow: set[int] | None = None) -> None:
        self.sick, self.slow = sick or set(), slow or set()
        self.num_made = 0
        self.live: list[Box] = []
        self.places = asyncio.Semaphore(MOST)
        self.batches = Batches()
        self.capabilities = Capabilities(
            backend="fake",
            enforces=frozenset(),
            isolation=Isolation.NONE,
            features=frozenset[Feature](),
            seccomp=False,
        )

    @contextlib.asynccontextmanager
    async def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AsyncIterator[Box]:
        number, self.num_made = self.num_made, self.num_made + 1
        async with self.places:
            box = Box(number)
            self.live.append(box)
            try:
                if number in self.slow:
                    await asyncio.Event().wait()
                if number in self.sick:
                    raise OSError(f"{box.id} does not start")
                yield box
            finally:
                await asyncio.sleep(0)
                self.live.remove(box)

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> contextlib.AbstractAsyncContextManager[tuple[Box, ...]]:
        return self.batches.take(count, MOST, lambda: self.acquire(image, policy))

    async def close(self) -> None:
        assert not self.live


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_if_one_box_fails_the_others_are_gone_before_the_user_hears_of_it() -> None:
    async def main() -> None:
        for sick in range(3):
            # One never comes: it must be given up.
            pool = Pool({sick}, slow={(sick + 1) % 3})
            with pytest.raises(OSError, match=f"box-{sick} does not start"):
                async with pool.acquire_many(3):
                    raise AssertionError("there is no third box")
            assert pool.live == []
            async with pool.acquire_many(MOST) as boxes:
                assert pool.live == list(boxes)

    asyncio.run(main())


def test_whoever_gives_up_at_any_moment_leaves_no_box_and_gives_the_turn_on() -> None:
    async def main(after: int) -> None:
        pool = Pool(slow={2})

        async def use() -> None:
            async with pool.acquire_many(3):
                raise AssertionError("the third box never comes")

        task = asyncio.create_task(use())
        await turns(after)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert pool.live == []
        pool.slow.clear()
        async with pool.acquire_many(MOST) as boxes:
            assert len(boxes) == MOST

    for after in range(8):
        asyncio.run(main(after))


def test_a_batch_that_waits_does_not_keep_boxes_from_going_back() -> None:
    async def main() -> None:
        pool = Pool()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(pool.acquire_many(2))
            one = await stack.enter_async_context(pool.acquire())
            waiting = [asyncio.create_task(_entered(pool)) for _ in range(3)]
            await turns(20)
            # The first has one of the four, and waits for two.
            assert len(pool.live) == MOST
            assert one in pool.live
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting)
        assert pool.live == []

    asyncio.run(main())


async def _entered(pool: Pool) -> None:
    async with pool.acquire_many(3):
        await turns(3)


def test_boxes_of_a_batch_are_measured(plain_pool: Any) -> None:
    class Plain(Pool):
        def acquire(self, image: str | None = None, policy: Policy | None = None) -> Any:
            return plain_pool.acquire(image, policy)

    async def main() -> None:
        pool = MeasuredPool(Plain())
        async with pool.acquire_many(3) as boxes:
            for box in boxes:
                await box.exec(("true",))
        use = pool.take()
        assert (len(use.waits_s), use.commands) == (3, {ExecStatus.OK: 3})

    asyncio.run(main())


def test_boxes_of_a_batch_have_logs_that_end_with_them(tmp_path: Path) -> None:
    async def main() -> None:
        pool = AuditedPool(Pool(), tmp_path)
        async with pool.acquire_many(3) as boxes:
            assert [report.ended for report in verify_all(tmp_path)] == [False] * 3
            assert len({box.id for box in boxes}) == 3
        assert [(report.ok, report.ended) for report in verify_all(tmp_path)] == [(True, True)] * 3

    asyncio.run(main())


def test_a_batch_of_which_one_box_has_no_log_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        inner = Pool()
        pool = AuditedPool(inner, tmp_path)
        begin, begun = pool._logs.begin, []

        def fails_at_the_third(*arguments: object) -> object:
            begun.append(arguments)
            if len(begun) == 3:
                raise OSError("no room for the third")
            return begin(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(pool._logs, "begin", fails_at_the_third)
        with pytest.raises(OSError, match="third"):
            async with pool.acquire_many(4):
                raise AssertionError("a box without a log")
        assert inner.live == []
        assert [(report.ok, report.ended) for report in verify_all(tmp_path)] == [(True, True)] * 2

    asyncio.run(main())


def test_boxes_of_a_batch_stay_with_the_loop_that_owns_them() -> None:
    async def main() -> None:
        pool = Pool()
        bridged = BridgedPool(pool, asyncio.get_running_loop())

        async def elsewhere() -> None:
            async with bridged.acquire_many(2) as boxes:
                assert [await box.exec(("true",)) for box in boxes] == ["box-0", "box-1"]
                assert {t for box in pool.live for t in box.threads} == {owner}

        owner = threading.get_ident()
        await asyncio.to_thread(asyncio.run, elsewhere())
        assert pool.live == []

    asyncio.run(main())


def test_the_time_for_which_a_group_holds_each_box_of_a_batch_is_counted() -> None:
    async def main() -> None:
        clock, held = ManualClock(), list[float]()
        async with GroupPool(Pool(), clock, None, held.append).acquire_many(2):
            clock.advance(3.0)
        assert held == [3.0, 3.0]

    asyncio.run(main())


def test_a_wrapper_that_changes_nothing_passes_batches_on() -> None:
    async def main() -> None:
        pool = Pool()
        async with ForwardingPool(pool).acquire_many(2) as boxes:
            assert list(boxes) == pool.live
        with pytest.raises(ClassifiedFailure, match="needs a sandbox"):
            MissingPool().acquire_many(2)

    asyncio.run(main())
