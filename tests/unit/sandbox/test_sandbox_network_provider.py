"""Attachments: loops, threads, phases, forks, and the system's own resolver."""

import asyncio
import contextlib
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.boxes import Policy
from burnish.core.errors import UserError
from burnish.sandbox.network import addresses
from burnish.sandbox.network.bounds import ProxyBounds
from burnish.sandbox.network.events import NetworkEvent, Reason, Verdict
from burnish.sandbox.network.provider import (
    PROXY_PORT,
    AllowListNetwork,
    Attachment,
    Listen,
    unix_listener,
)
from burnish.sandbox.network.shares import Shares, affordable_connections

T = TypeVar("T")
CERTIFICATE = Path(__file__).parent / "certificates" / "server.pem"


def run(main: Coroutine[Any, Any, T]) -> T:
    """A broken proxy is a failure and no hang."""
    return asyncio.run(asyncio.wait_for(main, 60))


class Ports:
    """A `Listen` that takes any free port and remembers which."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ports: list[int] = []

    async def __call__(self, port: int) -> socket.socket:
        self.asked.append(port)
        made = socket.create_server(("127.0.0.1", 0))
        self.ports.append(made.getsockname()[1])
        return made


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def connect(
    port: int, target: str
) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
    return (await reader.readuntil(b"\r\n\r\n"))[9:12], reader, writer


async def status_of(port: int, target: str) -> bytes:
    status, _, writer = await connect(port, target)
    writer.close()
    return status


def descriptors() -> set[str]:
    """What this process holds open, without the directory that is read for it."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {entry for entry in found if "/proc/" not in entry}


def test_an_attachment_may_be_used_from_several_loops_and_leaves_nothing() -> None:
    events: list[NetworkEvent] = []
    network = AllowListNetwork(events.append)
    ports = Ports()
    threads, before = set(threading.enumerate()), descriptors()
    attachment = asyncio.run(network.attach(ports, Policy(allow=("pypi.org",)), "box"))
    (port,) = ports.ports
    assert asyncio.run(status_of(port, "evil.test:443")) == b"403"
    asyncio.run(attachment.set_allow(("localhost:1",)))
    assert asyncio.run(status_of(port, "localhost:1")) == b"403"
    assert [event.reason for event in events] == [Reason.NOT_LISTED, Reason.ADDRESS]
    asyncio.run(attachment.close())
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(status_of(port, "pypi.org:443"))
    asyncio.run(network.close())
    assert set(threading.enumerate()) == threads
    assert descriptors() == before


def test_hostile_clients_leave_no_descriptor_and_no_thread() -> None:
    async def main() -> None:
        network = AllowListNetwork(lambda event: None, bounds=ProxyBounds(head_s=0.05))
        ports = Ports()
        await network.attach(ports, Policy(allow=("localhost:1",)), "box")
        clients = []
        for number in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", ports.ports[0])
            clients.append(writer.transport)
            writer.write(
                (b"", b"\x05\x01", b"GET", b"CONNECT localhost:1 HTTP/1.1\r\n\r\n")[number % 4]
            )
            if number % 3:
                writer.transport.abort()
        await network.close()  # with some of them open
        # Whether our own ends have heard of it by now is not what is tested.
        for client in clients:
            client.abort()
        await asyncio.sleep(0)

    threads, before = set(threading.enumerate()), descriptors()
    run(main())
    assert set(threading.enumerate()) == threads
    assert descriptors() == before


@pytest.mark.parametrize("answers", [True, False])
def test_a_look_up_that_runs_at_the_end_leaves_no_thread_unless_it_never_ends(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    begun, answer = threading.Event(), threading.Event()

    def look_up(host: str, port: int) -> list[str]:
        begun.set()
        answer.wait(60)
        return []

    async def main() -> None:
        resolver = addresses.SystemResolver()
        asked = asyncio.ensure_future(resolver("a.test", 1))
        await asyncio.to_thread(begun.wait, 60)
        closing = asyncio.ensure_future(resolver.close())
        await asyncio.sleep(0)  # it waits now
        if answers:
            answer.set()
        await closing
        asked.cancel()
        left = {thread.name for thread in threading.enumerate() if "resolver" in thread.name}
        assert bool(left) is not answers

    monkeypatch.setattr(addresses, "_look_up", look_up)
    if not answers:
        monkeypatch.setattr(addresses, "_LAST_ANSWER_S", 0.0)
    try:
        run(main())
    finally:
        answer.set()


def test_a_box_that_makes_its_socket_block_loses_its_network_and_no_other_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        network = AllowListNetwork(lambda event: None)
        ports = Ports()
        kept: list[socket.socket] = []

        async def keep_a_copy(port: int) -> socket.socket:
            made = await ports(port)
            kept.append(made.dup())
            return made

        await network.attach(keep_a_copy, Policy(), "hostile")
        await network.attach(ports, Policy(), "other")
        assert await status_of(ports.ports[0], "a.org:443") == b"403"
        os.set_blocking(kept[0].fileno(), True)
        _, writer = await asyncio.open_connection("127.0.0.1", ports.ports[0])
        assert await status_of(ports.ports[1], "a.org:443") == b"403"
        writer.close()
        kept[0].close()
        await network.close()

    run(main())
    assert "box hostile: it has no network any more" in caplog.text


@given(num_in_all=st.integers(1, 5000), num_per_box=st.integers(1, 200), boxes=st.integers(0, 9000))
def test_boxes_share_what_there_is_and_none_is_shut_out(
    num_in_all: int, num_per_box: int, boxes: int
) -> None:
    shares = Shares(num_in_all=num_in_all, num_per_box=num_per_box)
    shares.num_boxes = boxes
    assert 1 <= shares.num_each <= num_per_box
    assert shares.num_each * boxes <= max(num_in_all, boxes)
    assert affordable_connections() >= 1


def test_closing_twice_and_in_any_order_is_fine() -> None:
    async def main() -> None:
        network = AllowListNetwork(print)
        await network.close()
        network = AllowListNetwork(print)
        first = await network.attach(Ports(), Policy(), "one")
        second = await network.attach(Ports(), Policy(), "two")
        await first.close()
        await asyncio.gather(first.close(), network.close(), network.close())
        await second.close()
        await network.close()

    run(main())


def test_a_closed_network_attaches_nothing_and_keeps_no_socket() -> None:
    async def main() -> None:
        network = AllowListNetwork(print)
        await network.close()
        ports = Ports()
        with pytest.raises(RuntimeError, match="closed"):
            await network.attach(ports, Policy(), "box")
        with pytest.raises(ConnectionRefusedError):
            await status_of(ports.ports[0], "a.org:443")

    run(main())


def test_a_malformed_policy_is_refused_before_anything_listens() -> None:
    async def main() -> None:
        network = AllowListNetwork(print)
        ports = Ports()
        with pytest.raises(UserError, match=r"`10\.0\.0\.0/8`"):
            await network.attach(ports, Policy(allow=("10.0.0.0/8",)), "box")
        assert ports.asked == []
        attachment = await network.attach(ports, Policy(allow=("a.org",)), "box")
        assert ports.asked == [PROXY_PORT]
        with pytest.raises(UserError, match=r"`https://b\.org`"):
            await attachment.set_allow(("https://b.org",))
        with pytest.raises(UserError, match="never be reached"):
            await attachment.set_allow(("b.org", "169.254.169.254"))
        assert attachment.allow == ("a.org",)
        with pytest.raises(UserError, match="never be reached"):
            await network.attach(ports, Policy(allow=("169.254.169.254",)), "box")
        assert ports.asked == [PROXY_PORT]
        await network.close()

    run(main())


def test_a_box_that_cannot_listen_leaves_no_proxy() -> None:
    async def broken(port: int) -> socket.socket:
        raise OSError(98, "Address already in use")

    async def main() -> None:
        network = AllowListNetwork(print)
        with pytest.raises(OSError, match="in use"):
            await network.attach(broken, Policy(allow=("a.org",)), "box")
        assert not network._proxies
        await network.close()

    run(main())


def test_online_then_offline_stays_offline_through_forks_and_rollbacks() -> None:
    async def main() -> None:
        events: list[NetworkEvent] = []
        async with echo_server() as server:
            target = f"localhost:{server}"
            network = AllowListNetwork(events.append, private=(target,))
            ports = Ports()
            box = await network.attach(ports, Policy(allow=(target,)), "box")
            early = await box.fork(ports, "early")
            status, _, writer = await connect(ports.ports[0], target)
            assert status == b"200"
            await box.set_allow(())
            assert [e.reason for e in events] == [Reason.ON_LIST, Reason.POLICY_CHANGED]
            late = await box.fork(ports, "late")
            await box.restore(ports)
            old, of_early, of_late, restored = ports.ports
            with pytest.raises(ConnectionRefusedError):
                await status_of(old, target)
            assert await status_of(of_early, target) == b"200"  # a fork has a list of its own
            assert await status_of(of_late, target) == b"403"
            assert await status_of(restored, target) == b"403"
            await box.set_allow((target,))
            assert await status_of(restored, target) == b"200"
            assert await status_of(of_late, target) == b"403"
            assert {event.box for event in events} == {"box", "early", "late"}
            writer.close()
            assert (early.allow, late.allow) == ((target,), ())
            await network.close()

    run(main())


def test_a_list_that_changes_while_a_box_comes_back_is_the_one_that_counts() -> None:
    async def main() -> None:
        network = AllowListNetwork(lambda event: None)
        ports = Ports()
        box = await network.attach(ports, Policy(allow=("localhost:1",)), "box")

        async def meanwhile(port: int) -> socket.socket:
            await box.set_allow(())
            return await ports(port)

        await box.restore(meanwhile)
        _, reader, writer = await connect(ports.ports[1], "localhost:1")
        assert b"not_listed" in await reader.read()
        writer.close()
        await network.close()

    run(main())


def test_a_cancelled_change_of_the_list_happens_all_the_same() -> None:
    async def main() -> None:
        async with echo_server() as server:
            target = f"localhost:{server}"
            events: list[NetworkEvent] = []
            network = AllowListNetwork(events.append, private=(target,))
            ports = Ports()
            box = await network.attach(ports, Policy(allow=(target,)), "box")
            _, reader, writer = await connect(ports.ports[0], target)
            change = asyncio.create_task(box.set_allow(()))
            await asyncio.sleep(0)  # it has begun
            change.cancel()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert await status_of(ports.ports[0], target) == b"403"
            writer.close()
            await network.close()

    run(main())


@pytest.fixture
def https_server() -> Iterator[int]:
    """Answers every request with the same page over TLS."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        ready.append(server.sockets[0].getsockname()[1])
        started.set()
        await stop.wait()
        server.close()

    ready: list[int] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    yield ready[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_an_ordinary_https_client_reaches_what_is_listed_and_nothing_else(
    https_server: int,
) -> None:
    events: list[NetworkEvent] = []
    mirror = f"localhost:{https_server}"
    network = AllowListNetwork(events.append, private=(mirror,))
    ports = Ports()
    attachment = asyncio.run(network.attach(ports, Policy(allow=(mirror,)), "box"))
    proxy = attachment.env["HTTPS_PROXY"].replace(str(PROXY_PORT), str(ports.ports[0]))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({"https": proxy, "http": proxy}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(CERTIFICATE))),
    )
    with opener.open(f"https://{mirror}/") as response:
        assert response.read() == b"hello"
    with pytest.raises(urllib.error.URLError, match="403"):
        opener.open(f"https://127.0.0.1:{https_server}/")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        opener.open("http://evil.test/")
    asyncio.run(network.close())
    # The end of the first may be a reset: clients close with tickets of TLS 1.3 unread.
    assert [event.reason for event in events if event.verdict is not Verdict.ENDED] == [
        Reason.ON_LIST,
        Reason.IP_LITERAL,
        Reason.NOT_LISTED,
    ]
    assert sum(event.bytes_in for event in events if event.verdict is Verdict.ENDED) > 500


def test_private_opens_nothing_that_the_policy_does_not_list() -> None:
    async def main() -> None:
        async with echo_server() as server:
            network = AllowListNetwork(print, private=(f"localhost:{server}",))
            ports = Ports()
            await network.attach(ports, Policy(allow=("pypi.org",)), "box")
            assert await status_of(ports.ports[0], f"localhost:{server}") == b"403"
            await network.close()

    run(main())


def test_the_environment_names_the_proxy_in_both_spellings() -> None:
    async def main() -> dict[str, str]:
        network = AllowListNetwork(print)
        attachment = await network.attach(Ports(), Policy(), "box")
        await network.close()
        return attachment.env

    env = run(main())
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        assert env[name] == env[name.lower()] == f"http://127.0.0.1:{PROXY_PORT}"
    assert env["NO_PROXY"] == env["no_proxy"] == "localhost,127.0.0.1,::1"


# ---- the relay, for boxes whose init makes no sockets

RELAY = "burnish.sandbox.network.relay"


@contextlib.asynccontextmanager
async def over_unix(tmp_path: Path, *allow: str) -> AsyncIterator[tuple[Path, Attachment]]:
    path = tmp_path / "proxy.sock"
    network = AllowListNetwork(lambda event: None, private=allow)
    yield path, await network.attach(unix_listener(path), Policy(allow=allow), "box")
    await network.close()
    assert not path.exists()


@contextlib.contextmanager
def carrier(path: Path) -> Iterator[int]:
    """The relay's inner loop in a process that is surely ended."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    code = (
        f"import socket, {RELAY} as relay; "
        f"relay.Carrier(socket.socket(fileno={listener.fileno()}), {str(path)!r}).serve()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(listener.fileno(),))
    port = listener.getsockname()[1]
    listener.close()
    try:
        yield port
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_the_socket_of_a_box_is_open_to_its_users_and_removed_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with over_unix(tmp_path) as (path, _):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666

    run(main())


def test_a_path_too_long_for_a_socket_is_the_users_mistake(tmp_path: Path) -> None:
    listen: Listen = unix_listener(tmp_path / ("x" * 120))
    with pytest.raises(UserError, match="TMPDIR"):
        asyncio.run(listen(0))  # type: ignore[arg-type]


def test_the_relay_carries_everything_both_ways_and_the_ends_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with echo_server() as server:
            target = f"localhost:{server}"
            async with over_unix(tmp_path, target) as (path, _):
                with carrier(path) as port:
                    status, reader, writer = await connect(port, target)
                    assert status == b"200"
                    data = os.urandom(3 * 2**20)

                    async def send() -> None:
                        writer.write(data)
                        await writer.drain()
                        writer.write_eof()

                    _, got = await asyncio.gather(send(), reader.read())
                    assert got == data
                    writer.close()

    run(main())


def test_the_relay_outlives_clients_that_vanish_and_serves_many(tmp_path: Path) -> None:
    async def main() -> None:
        async with over_unix(tmp_path) as (path, attachment):
            with carrier(path) as port:
                for number in range(200):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(b"CONNECT a.org" if number % 2 else b"")
                    writer.transport.abort()
                answers = await asyncio.gather(*(status_of(port, "a.org:443") for _ in range(300)))
                assert set(answers) == {b"403"}
                await attachment.close()  # the socket is gone: clients are cut, the relay stays
                for _ in range(3):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
                    writer.close()

    run(main())
