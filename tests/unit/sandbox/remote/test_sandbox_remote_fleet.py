"""Several hosts as one pool."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from burnish.core.boxes import ExecStatus, Feature, Isolation
from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.fleet import FleetPool
from burnish.sandbox.remote.hosting import ServerThread
from burnish.sandbox.remote.problems import RemoteFailure

Served = Any  # conftest.Served
Serve = Callable[..., Served]
DEAD = "http://127.0.0.1:1"


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FleetPool]]:
    monkeypatch.setattr("burnish.sandbox.remote.fleet._QUEUE_S", 0.05)
    made: list[FleetPool] = []

    def make(*urls: str, **options: Any) -> FleetPool:
        made.append(FleetPool(urls, **options))
        return made[-1]

    yield make
    for pool in made:
        asyncio.run(pool.close())


async def hold(pool: FleetPool, count: int, use: Callable[[], Any]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(pool.acquire())
        use()


def test_boxes_go_where_there_is_room(serve: Serve, fleet: Callable[..., FleetPool]) -> None:
    small, large = serve(2), serve(6)
    found: list[tuple[int, int]] = []
    pool = fleet(small.url, large.url)
    asyncio.run(hold(pool, 4, lambda: found.append((len(small.pool.boxes), len(large.pool.boxes)))))
    asyncio.run(hold(pool, 8, lambda: found.append((len(small.pool.boxes), len(large.pool.boxes)))))
    assert found == [(1, 3), (2, 6)]


def test_a_batch_may_lie_on_several_hosts(serve: Serve, fleet: Callable[..., FleetPool]) -> None:
    small, large = serve(2), serve(3)
    pool = fleet(small.url, large.url)

    async def main() -> None:
        async with pool.acquire_many(5) as boxes:
            assert len({box.id for box in boxes}) == 5
            assert (len(small.pool.boxes), len(large.pool.boxes)) == (2, 3)
        assert small.pool.boxes == large.pool.boxes == []
        with pytest.raises(ValueError, match="6 boxes at once: 1 to 5"):
            async with pool.acquire_many(6):
                pass

    asyncio.run(main())


def test_boxes_of_others_are_counted(serve: Serve, fleet: Callable[..., FleetPool]) -> None:
    full, free = serve(2), serve(1)
    others, pool = fleet(full.url), fleet(full.url, free.url, acquire_timeout_s=30)

    async def main() -> None:
        async with others.acquire(), others.acquire(), pool.acquire() as box:
            assert (await box.exec(("cat",))).status is ExecStatus.OK
            assert len(free.pool.boxes) == 1

    asyncio.run(main())


def test_a_full_fleet_makes_callers_wait_for_whoever_is_free_first(
    serve: Serve, fleet: Callable[..., FleetPool]
) -> None:
    hosts = [serve(1), serve(1)]
    pool = fleet(*(host.url for host in hosts))
    most = 0

    async def one() -> None:
        nonlocal most
        async with pool.acquire() as box:
            most = max(most, sum(len(host.pool.boxes) for host in hosts))
            assert (await box.exec(("cat",))).status is ExecStatus.OK

    async def main() -> None:
        await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(main())
    assert most == 2
    assert sum(host.pool.num_made for host in hosts) >= 20


def test_a_deadline_holds_for_the_whole_fleet(
    serve: Serve, fleet: Callable[..., FleetPool]
) -> None:
    pool = fleet(serve(1).url, serve(1).url, acquire_timeout_s=0.2)

    async def main() -> None:
        async with pool.acquire(), pool.acquire():
            with pytest.raises(RemoteFailure, match="all hosts are full"):
                async with pool.acquire():
                    pass

    asyncio.run(main())


def test_a_host_that_is_down_is_passed_by(serve: Serve, fleet: Callable[..., FleetPool]) -> None:
    up = serve(4)
    pool = fleet(DEAD, up.url)
    asyncio.run(hold(pool, 3, lambda: None))
    assert up.pool.num_made == 3


def test_a_fleet_without_a_host_names_all_of_them() -> None:
    with pytest.raises(ClassifiedFailure) as caught:
        FleetPool([DEAD, "http://127.0.0.1:2"])
    assert "127.0.0.1:1" in str(caught.value)
    assert "127.0.0.1:2" in str(caught.value)


@pytest.mark.parametrize("urls", [[], ["nonsense"], [DEAD, DEAD]])
def test_wrong_urls_are_a_users_mistake(urls: list[str]) -> None:
    with pytest.raises(UserError):
        FleetPool(urls)


def test_a_host_that_dies_takes_its_commands_along_but_not_the_fleet(
    serve: Serve, fleet: Callable[..., FleetPool]
) -> None:
    hosts = [serve(2), serve(2)]
    pool = fleet(*(host.url for host in hosts))

    async def main() -> None:
        async with pool.acquire() as one, pool.acquire() as two:
            await asyncio.to_thread(hosts[0].server.close)
            results = [await box.exec(("cat",)) for box in (one, two)]
            statuses = Counter(result.status for result in results)
            assert statuses == {ExecStatus.OK: 1, ExecStatus.INFRA_ERROR: 1}
            (message,) = [result.message for result in results if result.message]
            assert hosts[0].url in message
            # Never run elsewhere.
            assert sum(host.pool.num_started for host in hosts) == 1
        for _ in range(3):
            async with pool.acquire() as box:
                assert (await box.exec(("cat",))).status is ExecStatus.OK

    asyncio.run(main())
    assert hosts[0].pool.num_made == 1


def test_a_host_whose_boxes_do_not_start_is_passed_by(
    serve: Serve, fleet: Callable[..., FleetPool]
) -> None:
    broken, sound = serve(8), serve(2)
    pool = fleet(broken.url, sound.url)
    broken.pool.broken = True
    asyncio.run(hold(pool, 2, lambda: None))
    assert sound.pool.num_made == 2


def test_a_host_that_comes_back_is_used_again(
    serve: Serve, fleet: Callable[..., FleetPool], memory_pool: Any
) -> None:
    host = serve(2)
    clock = ManualClock()
    pool = fleet(host.url, clock=clock)
    host.server.close()

    async def box_of(expected: str) -> None:
        async with pool.acquire() as box:
            assert (await box.exec(("cat", expected))).stdout == expected.encode()

    with pytest.raises(ClassifiedFailure):
        asyncio.run(box_of("x"))
    again = memory_pool()
    path = host.url.removeprefix("http+unix://")
    server = ServerThread(again, ServeConfig.model_validate({"socket": path}), max_boxes=2)
    try:
        with pytest.raises(ClassifiedFailure, match="no host gives boxes"):
            asyncio.run(box_of("too early"))
        clock.advance(1.5)
        asyncio.run(box_of("back"))
        assert again.num_made == 1
    finally:
        server.close()


def test_a_host_that_was_down_at_the_start_joins(
    serve: Serve, fleet: Callable[..., FleetPool], memory_pool: Any, tmp_path: Any
) -> None:
    up, clock = serve(1), ManualClock()
    path = tmp_path / "later"
    pool = fleet(up.url, f"http+unix://{path}", clock=clock)
    later = memory_pool()
    server = ServerThread(later, ServeConfig(socket=path), max_boxes=4)
    clock.advance(10)
    try:

        async def main() -> None:
            async with pool.acquire():
                # There is no room but on the one that joins meanwhile.
                async with pool.acquire() as box:
                    assert (await box.exec(("cat",))).status is ExecStatus.OK
                assert len(later.boxes) + later.num_made >= 1

        asyncio.run(main())
    finally:
        server.close()


def test_a_fleet_can_what_all_of_it_can(serve: Serve, fleet: Callable[..., FleetPool]) -> None:
    strong, weak = serve(), serve()
    strong.pool.capabilities = msgspec.structs.replace(
        strong.pool.capabilities, isolation=Isolation.USER_KERNEL, seccomp=True
    )
    weak.pool.capabilities = msgspec.structs.replace(
        weak.pool.capabilities,
        features=frozenset({Feature.SNAPSHOTS}),
        enforces=frozenset({"wall_s"}),
        isolation=Isolation.NAMESPACES,
    )
    found = fleet(strong.url, weak.url).capabilities
    assert found.features == {Feature.SNAPSHOTS}
    assert found.enforces == {"wall_s"}
    assert found.isolation is Isolation.NAMESPACES
    assert not found.seccomp


def test_an_image_that_a_host_lacks_is_told_and_not_taken_elsewhere(
    serve: Serve, fleet: Callable[..., FleetPool]
) -> None:
    pool = fleet(serve().url, serve().url)

    async def main() -> None:
        with pytest.raises(UserError, match="absent"):
            async with pool.acquire("absent"):
                pass

    asyncio.run(main())


def test_a_closed_fleet_gives_no_boxes(serve: Serve, fleet: Callable[..., FleetPool]) -> None:
    host = serve()
    pool = fleet(host.url)

    async def main() -> None:
        async with pool.acquire() as box:
            await pool.close()
            assert (await box.exec(("cat",))).status is ExecStatus.INFRA_ERROR
        with pytest.raises(ClassifiedFailure):
            async with pool.acquire():
                pass

    asyncio.run(main())
    assert host.pool.boxes == []
