"""From inside of real boxes: what the list names is reached, and nothing else is."""

import asyncio
import contextlib
import os
import shutil
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus, Policy, Sandbox
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.network.events import NetworkEvent, Reason, Verdict
from burnish.sandbox.network.provider import PROXY_PORT, AllowListNetwork, unix_listener
from burnish.sandbox.network.relay import relay_source

CERTIFICATE = Path(__file__).parent / "certificates" / "server.pem"
SYSTEM_PYTHON = "/usr/bin/python3"
PROBE = """
import os, socket, ssl, sys, urllib.request
port, certificate = int(sys.argv[1]), sys.argv[2]
context = ssl.create_default_context(cafile=certificate)

def fetch(url):
    with urllib.request.urlopen(url, context=context) as answer:
        return answer.read().decode()

def reach(host, to, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as direct:
        direct.connect((host, to))
        return "connected"

def attempt(name, work, *arguments):
    try:
        print(name, work(*arguments))
    except OSError as error:
        print(name, "failed:", error)

attempt("listed", fetch, f"https://allowed.test:{port}/")
attempt("unlisted", fetch, f"https://other.test:{port}/")
attempt("address", fetch, f"https://127.0.0.1:{port}/".replace("127.0.0.1", "127.0.0.2"))
attempt("direct4", reach, "8.8.8.8", 443)
attempt("direct6", reach, "2001:4860:4860::8888", 443, socket.AF_INET6)
attempt("udp", reach, "8.8.8.8", 53, socket.AF_INET, socket.SOCK_DGRAM)
attempt("host", reach, "127.0.0.1", port)
attempt("dns", socket.gethostbyname, "allowed.test")
"""


async def resolve(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.fixture
def https_port() -> Iterator[int]:
    """A server for allowed.test and other.test on the loopback of the host."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
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
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    yield ready[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def network_to(port: int, events: list[NetworkEvent]) -> AllowListNetwork:
    private = (f"allowed.test:{port}", f"other.test:{port}", f"127.0.0.2:{port}")
    return AllowListNetwork(events.append, private=private, resolver=resolve)


def check(output: str, events: list[NetworkEvent], *, listed: str = "hello") -> None:
    said = dict(line.split(" ", 1) for line in output.splitlines())
    assert listed in said["listed"], said
    for name in ("unlisted", "address"):
        assert "403" in said[name], said
    for name in ("direct4", "direct6", "udp", "host", "dns"):
        assert said[name].startswith("failed:"), said
    assert [event.reason for event in events if event.verdict is Verdict.DENIED][-2:] == [
        Reason.NOT_LISTED,
        Reason.IP_LITERAL,
    ]


needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None or not os.path.exists(SYSTEM_PYTHON),
    reason="install bubblewrap and python3 with the system's packages",
)


@needs_bubblewrap
def test_the_relay_is_the_only_way_out_of_a_bubblewrap_box(https_port: int, tmp_path: Path) -> None:
    async def main() -> str:
        network = network_to(https_port, events)
        allow = (f"allowed.test:{https_port}",)
        attachment = await network.attach(unix_listener(path), Policy(allow=allow), "box")
        process = await asyncio.create_subprocess_exec(
            *("bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--proc", "/proc"),
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--dev", "/dev"),
            *("--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"),
            *("--bind", str(tmp_path), "/run"),
            *(part for item in attachment.env.items() for part in ("--setenv", *item)),
            *(SYSTEM_PYTHON, "-I", "-S", "/run/relay.py", "/run/proxy.sock", str(PROXY_PORT)),
            *(SYSTEM_PYTHON, "-c", PROBE, str(https_port), "/run/server.pem"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        await network.close()
        assert process.returncode == 0
        return output.decode()

    events: list[NetworkEvent] = []
    path = tmp_path / "proxy.sock"
    (tmp_path / "relay.py").write_bytes(relay_source())
    shutil.copy(CERTIFICATE, tmp_path)
    check(asyncio.run(main()), events)


def test_a_native_box_reaches_its_list_and_keeps_to_it_after_rollback(https_port: int) -> None:
    async def main() -> list[str]:
        network = network_to(https_port, events)
        pool = NativePool(SandboxConfig(max_boxes=2), network=network)
        outputs = []
        try:
            policy = Policy(allow=(f"allowed.test:{https_port}",))
            async with pool.acquire(policy=policy) as box:
                await box.write_file("server.pem", CERTIFICATE.read_bytes())

                async def probe(box: Sandbox) -> str:
                    argv = ("python3", "-c", PROBE, str(https_port), "server.pem")
                    result = await box.exec(argv)
                    assert result.status is ExecStatus.OK, result
                    return result.stdout.decode()

                outputs.append(await probe(box))
                snapshot = await box.snapshot()
                outputs.append(await probe(box))
                await box.rollback(snapshot)
                outputs.append(await probe(box))
                async with box.fork(1) as (fork,):
                    outputs.append(await probe(fork))
        finally:
            await pool.close()
            await network.close()
        return outputs

    events: list[NetworkEvent] = []
    before = threading.active_count()
    for output in asyncio.run(main()):
        check(output, events)
    assert len({event.box for event in events}) == 2
    assert threading.active_count() == before


def test_a_native_box_without_a_list_has_nothing_but_its_own_loopback(https_port: int) -> None:
    async def main() -> str:
        pool = NativePool(SandboxConfig(max_boxes=1))
        try:
            async with pool.acquire() as box:
                await box.write_file("server.pem", CERTIFICATE.read_bytes())
                argv = ("python3", "-c", PROBE, str(https_port), "server.pem")
                return (await box.exec(argv)).stdout.decode()
        finally:
            await pool.close()

    lines = asyncio.run(main()).splitlines()
    assert len(lines) == 8
    assert all(" failed: " in line for line in lines)
