"""The proxy against real servers and hostile clients on loopback."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from burnish.core.boxes import Policy
from burnish.sandbox.network.addresses import Resolver
from burnish.sandbox.network.bounds import ProxyBounds
from burnish.sandbox.network.events import NetworkEvent, Reason, Verdict
from burnish.sandbox.network.provider import AllowListNetwork, Attachment

T = TypeVar("T")
CERTIFICATE = Path(__file__).parent / "certificates" / "server.pem"
PUBLIC = "8.8.8.8"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(main: Coroutine[Any, Any, T]) -> T:
    """A broken proxy is a failure and no hang."""
    return asyncio.run(asyncio.wait_for(main, 60))


class World:
    """One attached box whose servers are all the one on loopback, whatever it asks for."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers: Sequence[str] = [PUBLIC]
        self.looked_up: list[str] = []
        self.dialed: list[tuple[str, int]] = []
        self.received = bytearray()
        self.source = "127.0.0.2"
        self.events: asyncio.Queue[NetworkEvent] = asyncio.Queue()
        self.port = self.server_port = 0
        self.broken_log = False
        self.dialing: asyncio.Event | None = None
        """Set when a server is dialed that never answers."""
        self.attachment: Attachment

    def sink(self, event: NetworkEvent) -> None:
        if self.broken_log:
            raise OSError(28, "No space left on device")
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        return self.answers

    async def dial(self, address: str, port: int) -> Streams:
        self.dialed.append((address, port))
        if self.dialing is not None:
            self.loop.call_soon_threadsafe(self.dialing.set)
            await asyncio.get_running_loop().create_future()
        return await asyncio.open_connection(
            "127.0.0.1", self.server_port, local_addr=(self.source, 0), limit=2**15
        )

    async def listen(self, port: int) -> socket.socket:
        made = socket.create_server(("127.0.0.1", 0), backlog=2000)
        self.port = made.getsockname()[1]
        return made

    async def open(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> bytes:
        """Everything that comes back."""
        reader, writer = await self.open()
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer

    async def tunnel(self, target: str) -> Streams:
        reader, writer = await self.open()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        return reader, writer

    async def said_by_socks(self, target: str) -> tuple[Verdict, Reason]:
        host, _, port = target.rpartition(":")
        assert (await self.ask(socks_name(host, int(port))))[:4] == b"\x05\x00\x05\x02"
        return await self.said()

    async def said(self) -> tuple[Verdict, Reason]:
        event = await self.events.get()
        return event.verdict, event.reason

    async def record(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A server that keeps what it gets and answers at the end of the first request."""
        answered = False
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.received += data
                if not answered and b"\r\n\r\n" in self.received:
                    answered = True
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    writer.write_eof()
        writer.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def world(
    *allow: str,
    serve: Handler | None = None,
    tls: bool = False,
    resolver: Resolver | None = None,
    **bounds: float,
) -> AsyncIterator[World]:
    made = World()
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
    server = await asyncio.start_server(serve or made.record, "127.0.0.1", 0, ssl=context)
    made.server_port = server.sockets[0].getsockname()[1]
    network = AllowListNetwork(
        made.sink,
        bounds=ProxyBounds(**bounds),  # type: ignore[arg-type]
        resolver=resolver or made.resolve,
        dialer=made.dial,
        now=lambda: 1.0,
    )
    made.attachment = await network.attach(made.listen, Policy(allow=allow), "box-1")
    try:
        yield made
    finally:
        await network.close()
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def hello(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def socks(command: int, kind: int, host: bytes, port: int) -> bytes:
    return b"\x05\x01\x00" + bytes((5, command, 0, kind)) + host + port.to_bytes(2)


def socks_name(name: str, port: int) -> bytes:
    return socks(1, 3, bytes((len(name),)) + name.encode(), port)


def test_tls_goes_through_to_the_server_that_was_asked_for() -> None:
    async def main() -> None:
        async with world("allowed.test", serve=echo, tls=True) as box:
            reader, writer = await box.tunnel("Allowed.TEST.:443")
            await writer.start_tls(
                ssl.create_default_context(cafile=str(CERTIFICATE)),
                server_hostname="allowed.test",
            )
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            writer.close()
            opened, ended = await box.events.get(), await box.events.get()
        assert opened == NetworkEvent(
            time=1.0,
            box="box-1",
            host="allowed.test",
            port=443,
            address=PUBLIC,
            verdict=Verdict.ALLOWED,
            reason=Reason.ON_LIST,
        )
        assert (ended.verdict, ended.host, ended.address) == (Verdict.ENDED, "allowed.test", PUBLIC)
        assert ended.bytes_out > 200
        assert ended.bytes_in > 200
        assert box.dialed == [(PUBLIC, 443)]

    run(main())


def test_socks_goes_through_by_name() -> None:
    async def main() -> None:
        async with world("db.test:5432", serve=echo) as box:
            reader, writer = await box.open()
            writer.write(socks_name("db.test", 5432))
            assert await reader.readexactly(12) == b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6)
            writer.write(b"\x00anything")
            assert await reader.readexactly(9) == b"\x00anything"
            writer.write_eof()
            assert await reader.read() == b""
            assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            assert await box.events.get() == NetworkEvent(
                time=1.0,
                box="box-1",
                host="db.test",
                port=5432,
                address=PUBLIC,
                verdict=Verdict.ENDED,
                reason=Reason.FINISHED,
                bytes_out=9,
                bytes_in=9,
            )
            writer.close()

    run(main())


def test_a_server_that_speaks_first_is_heard() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-server\r\n")
        await echo(reader, writer)

    async def main() -> None:
        async with world("git.test:22", serve=greet) as box:
            reader, writer = await box.tunnel("git.test:22")
            assert await reader.readline() == b"SSH-2.0-server\r\n"
            writer.write(b"SSH-2.0-client\r\n")
            assert await reader.readline() == b"SSH-2.0-client\r\n"
            writer.close()

    run(main())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("evil.test:443", Reason.NOT_LISTED),
        ("sub.pypi.org:443", Reason.NOT_LISTED),
        ("pypi.org.evil.test:443", Reason.NOT_LISTED),
        ("pypi.org:22", Reason.PORT),
        ("1.1.1.1:443", Reason.IP_LITERAL),
        ("2130706433:443", Reason.IP_LITERAL),
        ("0x7f.0.0.1:443", Reason.IP_LITERAL),
        ("[::1]:443", Reason.IP_LITERAL),
        ("[::ffff:169.254.169.254]:443", Reason.IP_LITERAL),
        ("pypi..org:443", Reason.BAD_NAME),
    ],
)
def test_what_is_not_listed_is_neither_looked_up_nor_dialed(target: str, reason: Reason) -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            answer = await box.ask(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert target.encode() in answer
            assert await box.said() == (Verdict.DENIED, reason)
            assert await box.said_by_socks(target) == (Verdict.DENIED, reason)
            assert (box.looked_up, box.dialed) == ([], [])

    run(main())


@pytest.mark.parametrize(
    ("request_", "reply", "reason"),
    [
        (socks(1, 1, bytes((169, 254, 169, 254)), 80), 2, Reason.IP_LITERAL),
        (socks(1, 4, bytes(15) + b"\x01", 80), 2, Reason.IP_LITERAL),
        (socks(2, 3, b"\x08pypi.org", 443), 7, Reason.COMMAND),
        (socks(3, 1, bytes(4), 53), 7, Reason.COMMAND),
        (socks(1, 9, b"", 80), 1, Reason.BAD_REQUEST),
        (b"\x05\x01\x00\x04\x01\x00\x01" + bytes(6), 1, Reason.BAD_REQUEST),
    ],
)
def test_socks_refuses_addresses_and_all_commands_but_connect(
    request_: bytes, reply: int, reason: Reason
) -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            assert (await box.ask(request_))[:4] == bytes((5, 0, 5, reply))
            assert await box.said() == (Verdict.DENIED, reason)
            assert box.dialed == []

    run(main())


def test_a_refused_socks_command_is_logged_with_its_target() -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            await box.ask(socks(3, 3, b"\x08pypi.org", 53))
            event = await box.events.get()
            assert (event.host, event.port, event.reason) == ("pypi.org", 53, Reason.COMMAND)

    run(main())


def test_socks_with_authentication_only_is_refused() -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            assert await box.ask(b"\x05\x01\x02") == b"\x05\xff"
            assert await box.said() == (Verdict.DENIED, Reason.COMMAND)

    run(main())


@pytest.mark.parametrize("answers", [["10.0.0.1"], ["::ffff:8.8.8.8"], ["169.254.169.254", "::1"]])
def test_a_name_with_private_addresses_only_is_refused(answers: list[str]) -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            box.answers = answers
            answer = await box.ask(b"CONNECT pypi.org:443 HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert await box.said() == (Verdict.DENIED, Reason.ADDRESS)
            assert box.dialed == []

    run(main())


def test_a_name_is_resolved_once_and_the_address_stays() -> None:
    async def main() -> None:
        async with world("rebind.test:99", serve=echo) as box:
            reader, writer = await box.tunnel("rebind.test:99")
            box.answers = ["127.0.0.1"]
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            assert (box.looked_up, box.dialed) == (["rebind.test"], [(PUBLIC, 99)])
            assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            await box.ask(b"CONNECT rebind.test:99 HTTP/1.1\r\n\r\n")
            assert await box.said() == (Verdict.DENIED, Reason.ADDRESS)
            assert box.dialed == [(PUBLIC, 99)]
            writer.close()

    run(main())


def test_a_public_address_of_this_host_is_refused() -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            box.source = "127.0.0.1"  # the kernel uses one address for both ends
            await box.ask(b"CONNECT pypi.org:443 HTTP/1.1\r\n\r\n")
            assert await box.said() == (Verdict.DENIED, Reason.ADDRESS)

    run(main())


def test_names_without_addresses_and_servers_that_are_away_are_bad_gateways() -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            box.server_port = unused_port()
            ask = b"CONNECT pypi.org:443 HTTP/1.1\r\n\r\n"
            assert (await box.ask(ask)).startswith(b"HTTP/1.1 502 ")
            assert await box.said() == (Verdict.DENIED, Reason.UNREACHABLE)
            assert (await box.ask(socks_name("pypi.org", 443)))[:4] == b"\x05\x00\x05\x04"
            assert await box.said() == (Verdict.DENIED, Reason.UNREACHABLE)
            box.answers = []
            assert (await box.ask(ask)).startswith(b"HTTP/1.1 502 ")
            assert await box.said() == (Verdict.DENIED, Reason.UNRESOLVED)

    run(main())


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (hello("evil.test"), Reason.SERVER_NAME),
        (hello(None), Reason.NO_SERVER_NAME),
        (b"\x16\x03\x01\x00\x01\x02", Reason.BAD_HELLO),
    ],
)
@pytest.mark.parametrize("port", [80, 443, 8443])
def test_tls_for_another_server_is_cut_before_a_byte_is_sent(
    first: bytes, reason: Reason, port: int
) -> None:
    async def main() -> None:
        async with world("pypi.org", "pypi.org:8443") as box:
            reader, writer = await box.tunnel(f"pypi.org:{port}")
            writer.write(first)
            assert await reader.read() == b"\x15\x03\x03\x00\x02\x02\x31"
            if port == 8443:  # its server might have spoken first
                assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            assert await box.said() == (Verdict.DENIED, reason)
            assert box.received == b""
            writer.close()

    run(main())


def test_a_hello_in_single_bytes_arrives_untouched() -> None:
    async def main() -> None:
        async with world("pypi.org", serve=echo) as box:
            reader, writer = await box.tunnel("pypi.org:443")
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = hello("pypi.org")
            for at in range(len(data)):
                writer.write(data[at : at + 1])
                await writer.drain()
            assert await reader.readexactly(len(data)) == data
            writer.close()

    run(main())


def test_port_443_takes_nothing_but_tls() -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            reader, writer = await box.tunnel("pypi.org:443")
            writer.write(b"GET / HTTP/1.1\r\nHost: pypi.org\r\n\r\n")
            assert await reader.read() == b""
            assert await box.said() == (Verdict.DENIED, Reason.NOT_TLS)
            writer.close()
            ask = b"GET http://pypi.org:443/ HTTP/1.1\r\nHost: pypi.org:443\r\n\r\n"
            assert (await box.ask(ask)).startswith(b"HTTP/1.1 403 ")
            assert await box.said() == (Verdict.DENIED, Reason.NOT_TLS)
            assert box.received == b""

    run(main())


@pytest.mark.parametrize("way", ["absolute", "tunnel"])
def test_plain_http_is_one_request_and_what_follows_never_arrives(way: str) -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            if way == "tunnel":
                reader, writer = await box.tunnel("pypi.org:80")
                target = b"/a"
            else:
                reader, writer = await box.open()
                target = b"http://pypi.org/a"
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: pypi.org\r\nContent-Length: 3\r\n\r\nabc"
                b"GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n" % target
            )
            assert (await reader.read()).endswith(b"\r\n\r\nok")
            writer.write(b"GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n")
            writer.close()
            assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            ended = await box.events.get()
            assert ended.verdict is Verdict.ENDED
            assert ended.bytes_out == len(box.received)
            assert box.received == (
                b"POST /a HTTP/1.1\r\nHost: pypi.org\r\nContent-Length: 3\r\n"
                b"Connection: close\r\n\r\nabc"
            )

    run(main())


@pytest.mark.parametrize("port", [80, 8080])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", Reason.HOST_HEADER),
        (b"CONNECT evil.test:443 HTTP/1.1\r\n\r\n", Reason.NESTED_CONNECT),
        (b"GET http://evil.test/ HTTP/1.1\r\nHost: pypi.org\r\n\r\n", Reason.BAD_REQUEST),
        (b"GET / HTTP/1.1\r\nHost: pypi.org\r\nHost: evil.test\r\n\r\n", Reason.HOST_HEADER),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Reason.BAD_REQUEST),
    ],
)
def test_http_inside_of_a_tunnel_must_be_for_its_server(
    data: bytes, reason: Reason, port: int
) -> None:
    async def main() -> None:
        async with world("pypi.org", "pypi.org:8080") as box:
            reader, writer = await box.tunnel(f"pypi.org:{port}")
            writer.write(data)
            assert (await reader.read()).startswith(b"HTTP/1.1 40")
            if port == 8080:
                assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            assert await box.said() == (Verdict.DENIED, reason)
            assert box.received == b""
            writer.close()

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: pypi.org\r\n\r\n",
        b"GET http://pypi.org/ HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
        b"A" * 100_000,
        b"\x04\x01\x00\x50\x01\x01\x01\x01\x00\r\n\r\n",
        b"CONNECT pypi.org HTTP/1.1\r\n\r\n",
        b"\x00\r\n\r\n",
    ],
)
def test_what_is_no_request_to_a_proxy_is_refused_with_an_answer(data: bytes) -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            assert (await box.ask(data)).startswith(b"HTTP/1.1 400 ")
            assert await box.said() == (Verdict.DENIED, Reason.BAD_REQUEST)

    run(main())


@pytest.mark.parametrize(
    "start", [b"GET http://pypi.org/ HTTP/1.1\r\nX: ", b"\x05\x01\x00\x05", b""]
)
def test_a_client_that_never_finishes_asking_is_cut(start: bytes) -> None:
    async def main() -> None:
        async with world("pypi.org", head_s=0.05) as box:
            reader, writer = await box.open()
            writer.write(start)
            await reader.read()
            assert await box.said() == (Verdict.DENIED, Reason.TIMEOUT)
            writer.close()

    run(main())


def test_a_client_that_never_finishes_its_hello_is_cut() -> None:
    async def main() -> None:
        async with world("pypi.org", head_s=0.5) as box:
            reader, writer = await box.tunnel("pypi.org:443")
            writer.write(hello("pypi.org")[:-1])
            assert await reader.read() == b""
            assert await box.said() == (Verdict.DENIED, Reason.TIMEOUT)
            assert box.received == b""
            writer.close()

    run(main())


def test_a_client_that_does_not_read_stops_the_server_and_is_cut() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()

    async def main() -> None:
        async with world("big.test:99", serve=flood, idle_s=0.3) as box:
            _, writer = await box.tunnel("big.test:99")
            assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            ended = await box.events.get()
            assert (ended.verdict, ended.reason) == (Verdict.ENDED, Reason.TIMEOUT)
            assert ended.bytes_in < 64 * 2**20  # what the buffers of the kernel take
            writer.close()

    run(main())


def test_a_shorter_list_cuts_what_is_open_and_only_that() -> None:
    async def main() -> None:
        async with world("a.test:99", "b.test:99", serve=echo) as box:
            kept, cut = await box.tunnel("a.test:99"), await box.tunnel("b.test:99")
            for _, writer in (kept, cut):
                writer.write(b"x")
                await _.readexactly(1)
                assert await box.said() == (Verdict.ALLOWED, Reason.ON_LIST)
            await box.attachment.set_allow(("a.test:99",))
            event = box.events.get_nowait()  # it was over before set_allow came back
            assert (event.host, event.verdict, event.reason) == (
                "b.test",
                Verdict.ENDED,
                Reason.POLICY_CHANGED,
            )
            with contextlib.suppress(ConnectionResetError):
                assert await cut[0].read() == b""
            kept[1].write(b"y")
            assert await kept[0].readexactly(1) == b"y"
            assert b" 403 " in await box.ask(b"CONNECT b.test:99 HTTP/1.1\r\n\r\n")
            assert await box.said() == (Verdict.DENIED, Reason.NOT_LISTED)
            await box.attachment.set_allow(())
            assert await box.said() == (Verdict.ENDED, Reason.POLICY_CHANGED)
            for _, writer in (kept, cut):
                writer.close()

    run(main())


def test_a_shorter_list_cuts_what_is_still_being_connected() -> None:
    async def main() -> None:
        async with world("a.test:99") as box:
            box.dialing = asyncio.Event()
            asking = asyncio.create_task(box.ask(b"CONNECT a.test:99 HTTP/1.1\r\n\r\n"))
            await box.dialing.wait()
            await box.attachment.set_allow(())
            assert await box.said() == (Verdict.DENIED, Reason.POLICY_CHANGED)
            with contextlib.suppress(ConnectionResetError):
                assert await asking == b""

    run(main())


def test_a_box_that_is_refused_without_end_loses_its_network() -> None:
    async def main() -> None:
        async with world("pypi.org", num_denials=3) as box:
            for _ in range(3):
                await box.ask(b"CONNECT evil.test:443 HTTP/1.1\r\n\r\n")
                assert await box.said() == (Verdict.DENIED, Reason.NOT_LISTED)
            assert await box.said() == (Verdict.DENIED, Reason.TOO_MANY)
            with pytest.raises(ConnectionRefusedError):
                await box.open()

    run(main())


def test_what_cannot_be_logged_is_not_allowed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            box.broken_log = True
            reader, writer = await box.open()
            writer.write(b"GET http://pypi.org/ HTTP/1.1\r\nHost: pypi.org\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert box.received == b""
            writer.close()

    run(main())
    assert "No space left" in caplog.text


def test_hostile_text_reaches_the_log_in_one_printable_piece() -> None:
    async def main() -> None:
        async with world("pypi.org") as box:
            name = b"\n\x1b[31mverdict=allowed\r\n\xff"
            await box.ask(socks(1, 3, bytes((len(name),)) + name, 443))
            event = await box.events.get()
            assert event.reason is Reason.BAD_NAME
            assert event.host == r"\n\x1b[31mverdict=allowed\r\n\xff"

    run(main())


def test_few_names_of_a_box_are_looked_up_at_once_and_none_for_long() -> None:
    async def main() -> None:
        now = most = 0

        async def hang(host: str, port: int) -> Sequence[str]:
            nonlocal now, most
            now += 1
            most = max(most, now)
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                now -= 1

        async with world("*.slow.test", lookup_s=0.05, resolver=hang) as box:
            ask = "CONNECT {}.slow.test:443 HTTP/1.1\r\n\r\n"
            answers = await asyncio.gather(*(box.ask(ask.format(n).encode()) for n in range(20)))
            assert all(answer.startswith(b"HTTP/1.1 502 ") for answer in answers)
            assert [await box.said() for _ in range(20)] == [
                (Verdict.DENIED, Reason.UNRESOLVED)
            ] * 20
        assert (now, most) == (0, 4)

    run(main())


def test_garbage_hurts_nobody() -> None:
    async def main() -> None:
        draw = random.Random(0)
        starts = [
            b"",
            b"\x05",
            b"\x05\x01\x00",
            b"GET http://",
            b"CONNECT ",
            b"\x16\x03\x01\x00\x20",
        ]
        async with world("pypi.org", "db.test:5432", head_s=0.1, serve=echo) as box:
            for _ in range(150):
                reader, writer = await box.open()
                writer.write(
                    draw.choice(starts) + draw.randbytes(draw.randrange(200)) + b"\r\n\r\n"
                )
                if draw.random() < 0.5:
                    writer.transport.abort()
                    continue
                writer.write_eof()
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
                writer.close()
            reader, writer = await box.tunnel("db.test:5432")
            writer.write(b"alive")
            assert await reader.readexactly(5) == b"alive"
            writer.close()

    run(main())


def test_a_thousand_connections_are_all_answered_a_few_at_a_time() -> None:
    async def main() -> None:
        open_now = most = 0

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            await echo(reader, writer)
            open_now -= 1

        async with world("db.test:99", serve=count, num_connections=32) as box:

            async def one(number: int) -> None:
                reader, writer = await box.open()
                writer.write(socks_name("db.test", 99) + b"%d" % number)
                writer.write_eof()
                assert (await reader.read())[12:] == b"%d" % number
                writer.close()

            await asyncio.gather(*(one(number) for number in range(1000)))
        assert most <= 32
        assert len(box.dialed) == 1000

    run(main())
