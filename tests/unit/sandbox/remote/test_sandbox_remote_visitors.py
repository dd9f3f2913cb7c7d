"""Who may hold a connection of a server, and for how long."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.clock import ManualClock
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.problems import Refused
from burnish.sandbox.remote.visitors import Visit, Visitors

TOKEN = "a-token-of-more-than-16-characters"
Served = Any  # conftest.Served
HEAD_S, STALL_S = 10.0, 30.0
HALF = b"GET /health HTTP/1.1\r\nX: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect_to(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    # Only a failure takes that long.
    client = socket.create_connection((host, int(port)), timeout=60)
    # What is sent is there at once, in the order of all connections.
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def answer(client: socket.socket) -> bytes:
    """What comes; nothing from a closed connection."""
    try:
        return client.recv(65536)
    except ConnectionError:
        return b""


def greet(served: Served) -> None:
    """When this returns, the server has seen all that was sent to it before."""
    with connect_to(served) as client:
        client.sendall(WHOLE)
        assert answer(client).startswith(b"HTTP/1.1 200")


def begin_upload(client: socket.socket) -> None:
    """Send a head and a part of its body."""
    lines = ["PUT /v4/files HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}"]
    lines += [f"{m.SESSION_HEADER}: session-1", "Content-Length: 1000", "Expect: 100-continue"]
    client.sendall("\r\n".join([*lines, "", ""]).encode())
    assert answer(client).startswith(b"HTTP/1.1 100")
    client.sendall(b"a part")


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
        await asyncio.sleep(0)


# By real sockets


def test_half_a_head_is_not_waited_for(serve: Callable[..., Served]) -> None:
    served = serve(listen="127.0.0.1:0")
    clients = [connect_to(served) for _ in range(30)]
    for client in clients[:20]:
        client.sendall(HALF)
    for client in clients[20:]:
        client.sendall(WHOLE + HALF)
        assert answer(client).startswith(b"HTTP/1.1 200")
    served.pass_time(HEAD_S)
    for client in clients:
        assert answer(client) == b""
        client.close()


def test_a_head_that_drips_is_no_faster(serve: Callable[..., Served]) -> None:
    served = serve(listen="127.0.0.1:0")
    with connect_to(served) as client:
        client.sendall(HALF)
        greet(served)
        served.pass_time(HEAD_S - 1)
        client.sendall(b"more")
        greet(served)
        served.pass_time(1)
        assert answer(client) == b""


def test_a_body_that_stalls_is_not_waited_for(serve: Callable[..., Served]) -> None:
    served = serve(listen="127.0.0.1:0")
    with connect_to(served) as stalls, connect_to(served) as goes_on:
        begin_upload(stalls)
        begin_upload(goes_on)
        greet(served)
        served.pass_time(STALL_S - 1)
        goes_on.sendall(b"more")
        greet(served)
        served.pass_time(1)
        assert answer(stalls) == b""
        goes_on.sendall(bytes(1000 - len(b"a partmore")))
        assert answer(goes_on).startswith(b"HTTP/1.1 200")


def test_a_command_may_be_silent_for_longer_than_any_head_or_body(
    serve: Callable[..., Served], connect: Callable[..., RemotePool]
) -> None:
    served = serve(listen="127.0.0.1:0", lease_s=1e6)

    async def main() -> bytes:
        pool = connect(served.url, TOKEN)
        async with pool.acquire() as box:
            running = asyncio.ensure_future(box.exec(("wait", "done")))
            await until(lambda: served.pool.num_started)
            await asyncio.to_thread(served.pass_time, 10 * STALL_S)
            served.pool.go.set()
            return (await running).stdout

    assert asyncio.run(main()) == b"done"


@pytest.mark.parametrize("num_strangers", [4, 40])
def test_strangers_leave_room_for_who_has_a_token(
    serve: Callable[..., Served], connect: Callable[..., RemotePool], num_strangers: int
) -> None:
    served = serve(listen="127.0.0.1:0", max_connections=4)
    strangers = [connect_to(served) for _ in range(num_strangers)]
    for stranger in strangers:
        stranger.sendall(HALF)

    async def main() -> bytes:
        pool = connect(served.url, TOKEN)
        async with pool.acquire() as box:
            return (await box.exec(("echo", "here"))).stdout

    assert asyncio.run(main()) == b"here"
    closed = 0
    for stranger in strangers:
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            closed += answer(stranger) == b""
        stranger.close()
    assert closed >= num_strangers - 3


def test_connections_leave_most_descriptors_to_boxes() -> None:
    code = """
import resource
from burnish.sandbox.remote.door import room_for_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
print(room_for_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    low = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert low.stdout.split() == ["100", "400"]
    raised = code.replace("(400, 400)", "(100, 400)")
    some = subprocess.run(
        [sys.executable, "-c", raised], capture_output=True, check=True, text=True
    )
    assert some.stdout.split() == ["300", "400"]


# The rules


class Guests:
    """Visits that note whether they were closed."""

    def __init__(self, most: int) -> None:
        self.clock = ManualClock()
        self.visitors = Visitors(self.clock, head_s=HEAD_S, stall_s=STALL_S)
        self.visitors.most = most
        self.closed: list[Visit] = []

    def come(self, user: str | None = None) -> Visit | None:
        holder: list[Visit] = []
        visit = self.visitors.come(lambda: self.closed.append(holder[0]))
        if visit is not None:
            holder.append(visit)
            if user is not None:
                with self.visitors.asking(visit, lambda: False):
                    self.visitors.know(visit, user)
        return visit


def test_the_oldest_stranger_goes_first() -> None:
    guests = Guests(most=3)
    guests.come("ann")
    old, new = guests.come(), guests.come()
    assert guests.come() is not None
    assert guests.closed == [old]
    assert guests.come("bob") is not None
    assert guests.closed == [old, new]


def test_without_strangers_an_idle_connection_of_who_has_most_goes() -> None:
    guests = Guests(most=5)
    guests.come("bob")
    anns = [guests.come("ann"), guests.come("ann")]
    cid = guests.come("cid")
    assert cid is not None
    with guests.visitors.asking(cid, lambda: False):
        guests.come("dan")
        assert guests.come() is not None
    assert guests.closed == anns[:1]


def test_with_a_request_on_each_connection_nobody_is_sent_away() -> None:
    guests = Guests(most=2)
    first, second = guests.come("ann"), guests.come("bob")
    assert first is not None
    assert second is not None
    with (
        guests.visitors.asking(first, lambda: False),
        guests.visitors.asking(second, lambda: False),
    ):
        assert guests.come() is None
    assert guests.closed == []


def test_a_named_user_has_half_of_the_connections() -> None:
    guests = Guests(most=4)
    first, second = guests.come("ann"), guests.come("ann")
    assert first is not None
    assert second is not None
    with (
        guests.visitors.asking(first, lambda: False),
        guests.visitors.asking(second, lambda: False),
        pytest.raises(Refused, match="ann has 2 connections"),
    ):
        guests.come("ann")
    # An idle one makes room.
    guests.come("ann")
    assert guests.closed == [first]


@given(
    st.lists(st.tuples(st.sampled_from([None, "", "ann", "bob"]), st.floats(0, 20)), max_size=30)
)
def test_there_are_never_more_than_the_most_and_no_stranger_stays(
    arrivals: list[tuple[str | None, float]],
) -> None:
    guests = Guests(most=4)
    for user, pause_s in arrivals:
        guests.come(user)
        guests.clock.advance(pause_s)
        guests.visitors.tend()
        assert len(guests.visitors) <= 4
    num_known = sum(user is not None for user, _ in arrivals)
    guests.clock.advance(HEAD_S)
    guests.visitors.tend()
    assert len(guests.visitors) <= num_known
    assert len(set(guests.closed)) == len(guests.closed)
