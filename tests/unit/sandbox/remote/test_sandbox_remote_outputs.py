"""A server holds so much of what commands write and clients send, and no more."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from burnish.core.boxes import Limits
from burnish.core.errors import UserError
from burnish.sandbox.limits import check_limits
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.bodies import Bodies, Body
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.outputs import Outputs
from burnish.sandbox.remote.problems import Refused

MIB = 2**20
Served = Any  # conftest.Served


def test_more_output_than_a_server_keeps_is_refused_and_says_how_much(
    serve: Callable[..., Served], connect: Callable[..., RemotePool]
) -> None:
    served = serve(max_stdout_bytes=MIB)

    async def main() -> bytes:
        async with connect(served.url).acquire() as box:
            with pytest.raises(UserError, match=f"{MIB + 1}, and this server keeps at most {MIB}"):
                await box.exec(("echo", "a"), limits=Limits(stdout_bytes=MIB + 1))
            return (await box.exec(("echo", "a"), limits=Limits(stdout_bytes=MIB))).stdout

    assert asyncio.run(main()) == b"a"
    assert served.pool.num_started == 1


def test_output_that_does_not_fit_waits_for_that_of_others(
    serve: Callable[..., Served], connect: Callable[..., RemotePool]
) -> None:
    served = serve(max_stdout_bytes=MIB, max_outputs_bytes=3 * MIB)
    limits = Limits(stdout_bytes=MIB)

    async def main() -> list[bytes]:
        async with connect(served.url).acquire_many(2) as (one, other):
            first = asyncio.ensure_future(one.exec(("wait", "1"), limits=limits))
            second = asyncio.ensure_future(other.exec(("wait", "2"), limits=limits))
            # Small ones find room, and show that the server has seen what came before.
            async with connect(served.url).acquire() as third:
                await third.exec(("echo", "3"), limits=Limits(stdout_bytes=1024))
            started = served.pool.num_started
            served.pool.go.set()
            assert started <= 2
            return [(await first).stdout, (await second).stdout]

    assert asyncio.run(main()) == [b"1", b"2"]


def test_room_is_given_back_also_by_who_is_cancelled() -> None:
    outputs = Outputs(most_each=MIB, most=2 * MIB)
    limits = Limits(stdout_bytes=MIB)

    async def hold(go: asyncio.Event, ran: list[str], name: str) -> None:
        async with outputs.room(limits, ""):
            ran.append(name)
            await go.wait()

    async def main() -> list[str]:
        go, ran = asyncio.Event(), list[str]()
        tasks = [asyncio.create_task(hold(go, ran, name)) for name in "abcd"]
        for _ in range(3):
            await asyncio.sleep(0)
        assert ran == ["a"]
        tasks[1].cancel()
        tasks[0].cancel()
        go.set()
        await asyncio.wait(tasks)
        return ran

    assert asyncio.run(main()) == ["a", "c", "d"]


def test_a_named_user_leaves_half_of_the_room_to_others() -> None:
    outputs = Outputs(most_each=MIB, most=4 * MIB)
    limits = Limits(stdout_bytes=MIB)

    async def main() -> list[str]:
        go, ran = asyncio.Event(), list[str]()

        async def hold(user: str) -> None:
            async with outputs.room(limits, user):
                ran.append(user)
                await go.wait()

        tasks = [asyncio.create_task(hold(user)) for user in ("ann", "ann", "bob")]
        for _ in range(3):
            await asyncio.sleep(0)
        before = list(ran)
        go.set()
        await asyncio.wait(tasks)
        assert ran == ["ann", "bob", "ann"]
        return before

    assert asyncio.run(main()) == ["ann", "bob"]


def test_output_beyond_what_memory_is_for_is_refused_everywhere() -> None:
    check_limits(Limits(stdout_bytes=2**30))
    with pytest.raises(ValueError, match=r"limits.stdout_bytes is 1073741825: it may be at most"):
        check_limits(Limits(stdout_bytes=2**30 + 1))


def test_what_clients_send_is_counted_until_it_has_been_used(
    serve: Callable[..., Served], connect: Callable[..., RemotePool]
) -> None:
    served = serve(max_bodies_bytes=3 * MIB)

    async def main() -> list[bytes]:
        async with connect(served.url).acquire_many(2) as (one, other):
            first = asyncio.ensure_future(one.exec(("wait",), stdin=b"1" * 2 * MIB))
            second = asyncio.ensure_future(other.exec(("echo",), stdin=b"2" * 2 * MIB))
            # Small ones find room, and take time.
            for _ in range(3):
                await one.write_file("f", b"x")
            started = served.pool.num_started
            served.pool.go.set()
            assert started <= 1
            return [(await first).stdout[:1], (await second).stdout[:1]]

    assert asyncio.run(main()) == [b"1", b"2"]
    assert not served.server._server._bodies.taken


def http_to(served: Served) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(served.url.removeprefix("http+unix://"))
    headers = {
        "Accept": m.CONTENT_TYPE,
        "Content-Type": m.CONTENT_TYPE,
        m.SESSION_HEADER: "session-1",
        m.REQUEST_HEADER: "request-1",
    }
    return aiohttp.ClientSession("http://localhost", connector=connector, headers=headers)


def test_a_request_that_is_sent_again_after_its_answer_keeps_nothing(
    serve: Callable[..., Served],
) -> None:
    served = serve()

    async def main() -> list[int]:
        async with http_to(served) as http:
            body = m.encode(m.CreateBox())
            answers = [await http.post("/v4/boxes", data=body) for _ in range(3)]
            return [answer.status for answer in answers]

    assert asyncio.run(main()) == [200] * 3
    assert not served.server._server._bodies.taken


def test_a_body_is_in_memory_once_while_it_is_worked_on(
    serve: Callable[..., Served], connect: Callable[..., RemotePool]
) -> None:
    served = serve()

    async def body() -> AsyncIterator[bytes]:
        message = m.encode(m.Exec(argv=(b"wait",), stdin=b"1"))
        # The length of a byte string is in the four bytes before it.
        head, tail = message.split(b"\xc4\x011")
        yield head + b"\xc6" + (16 * MIB).to_bytes(4, "big")
        for _ in range(16):
            yield bytes(MIB)
        yield tail

    async def main() -> int:
        async with connect(served.url).acquire() as box, http_to(served) as http:
            path = f"/v4/boxes/{box.id}/exec"
            tracemalloc.start()
            try:
                work = asyncio.ensure_future(http.post(path, data=body()))
                while not served.pool.num_started:
                    await served.pool.pause()
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            served.pool.go.set()
            assert (await work).status == 200
            return held

    assert 16 * MIB <= asyncio.run(main()) < 24 * MIB


@pytest.mark.parametrize(("method", "path"), [("POST", "/v4/boxes"), ("PUT", "/v4/files")])
def test_a_body_that_cannot_be_decoded_is_the_clients_mistake(
    serve: Callable[..., Served], method: str, path: str
) -> None:
    served = serve()

    async def main() -> tuple[int, bytes]:
        async with http_to(served) as http:
            # The library would encode it.
            sent = http.request(
                method, path, data=b"no gzip", headers={"Content-Encoding": "gzip"}, compress=False
            )
            async with sent as answer:
                return answer.status, await answer.read()

    status, answer = asyncio.run(main())
    assert status == 400
    assert m.decode(answer, m.Problem).message.endswith("not encoded as its head says")


def test_a_body_takes_what_has_come_of_it_and_gives_all_back() -> None:
    bodies = Bodies(most=4 * MIB, most_each=8 * MIB)
    alone = Body(bodies, "ann")
    alone.add(8 * MIB)  # whoever is alone fits
    with pytest.raises(Refused, match=f"more than {4 * MIB} bytes"):
        Body(bodies, "bob").add(1)
    alone.release()
    alone.release()
    assert not bodies.taken


def test_a_named_user_leaves_half_of_what_may_be_sent_to_others() -> None:
    bodies = Bodies(most=4 * MIB, most_each=MIB)
    first, second, other = Body(bodies, "ann"), Body(bodies, "ann"), Body(bodies, "bob")
    first.add(MIB)
    second.add(MIB)
    with pytest.raises(Refused):
        second.add(1)
    other.add(2 * MIB)
    for body in (first, second, other):
        body.release()
    assert not bodies.taken
