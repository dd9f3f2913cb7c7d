"""Install online, then deny: lists that change while boxes live, through every way to a box."""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.core.boxes import (
    ExecResult,
    ExecStatus,
    Feature,
    Limits,
    NetworkedSandbox,
    Policy,
    SandboxPool,
    StatefulSandbox,
)
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.audit.events import AllowChanged, Created
from burnish.sandbox.audit.verify import read, verify
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.hosting import ServerThread
from burnish.sandbox.start import open_pool

FETCH = """
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
        open("tool.py", "wb").write(answer.read())
    print("fetched")
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print("no network")
"""
HOLD = """
import socket, sys
port = int(sys.argv[1])
held = socket.create_connection(("127.0.0.1", 3128))
host = b"localhost:%d" % port
held.send(b"GET http://" + host + b"/hold HTTP/1.1\\r\\nHost: " + host + b"\\r\\n\\r\\n")
while held.recv(1000): pass
print("cut")
"""
# The mirror is on this machine; programs would not ask their proxy for such a name.
ENV = {"no_proxy": "", "NO_PROXY": ""}


class Mirror:
    """A server with one file, and a page that never ends."""

    def __init__(self) -> None:
        self.held, self.end = threading.Event(), threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                if self.path == "/hold":
                    self.wfile.write(b"begin")
                    self.wfile.flush()
                    mirror.held.set()
                    mirror.end.wait()
                else:
                    self.wfile.write(b"print('installed')\n")

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("localhost", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.end.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    made = Mirror()
    yield made
    made.close()


class Served(RemotePool):
    """Boxes of a server that ends with its one client."""

    def __init__(self, config: SandboxConfig) -> None:
        self._folder = tempfile.TemporaryDirectory()
        serve = ServeConfig(socket=Path(self._folder.name, "socket"))
        self._server = ServerThread(open_pool(config), serve, max_boxes=config.max_boxes)
        super().__init__(self._server.url)

    async def close(self) -> None:
        await super().close()
        self._server.close()
        self._folder.cleanup()


WAYS: dict[str, Callable[[dict[str, Any], Path], SandboxPool]] = {
    "native": lambda options, folder: open_pool(SandboxConfig(backend="native", **options)),
    "audited": lambda options, folder: open_pool(
        SandboxConfig(backend="native", audit=folder, **options)
    ),
    "remote": lambda options, folder: Served(SandboxConfig(backend="native", **options)),
    "bubblewrap": lambda options, folder: open_pool(SandboxConfig(backend="bubblewrap", **options)),
    "oci-crun": lambda options, folder: open_pool(SandboxConfig(backend="crun", **options)),
    "gvisor": lambda options, folder: open_pool(SandboxConfig(backend="gvisor", **options)),
    "podman": lambda options, folder: open_pool(SandboxConfig(backend="podman", **options)),
}
SLOW = frozenset({"oci-crun", "gvisor", "podman"})


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in WAYS]
)
def pool(request: pytest.FixtureRequest, mirror: Mirror, tmp_path: Path) -> Iterator[SandboxPool]:
    options = {"max_boxes": 3, "private_hosts": (f"localhost:{mirror.port}",)}
    try:
        made = WAYS[request.param](options, tmp_path / "logs")
    except UserError as error:
        pytest.skip(str(error))
    if Feature.ALLOW_LIST in made.capabilities.features:
        yield made
    asyncio.run(made.close())
    if Feature.ALLOW_LIST not in made.capabilities.features:
        pytest.skip("; ".join(made.capabilities.notes))


def listed(mirror: Mirror) -> Policy:
    return Policy(allow=(f"localhost:{mirror.port}",))


def in_box(
    pool: SandboxPool,
    policy: Policy,
    use: Callable[[NetworkedSandbox], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        async with pool.acquire(policy=policy) as box:
            await use(cast(NetworkedSandbox, box))

    asyncio.run(main())


async def python(box: NetworkedSandbox, code: str, *arguments: str) -> str:
    result: ExecResult = await box.exec(
        python_argv("-c", code, *arguments), env=ENV, limits=Limits(wall_s=60.0)
    )
    assert result.status is ExecStatus.OK, result
    return result.stdout.decode().strip()


def test_what_was_installed_online_runs_offline(pool: SandboxPool, mirror: Mirror) -> None:
    url = f"http://localhost:{mirror.port}/tool.py"

    async def use(box: NetworkedSandbox) -> None:
        assert await python(box, FETCH, url) == "fetched"
        await box.set_allow(())
        assert await python(box, FETCH, url) == "403"
        assert await python(box, "exec(open('tool.py').read())") == "installed"
        if Feature.SNAPSHOTS in pool.capabilities.features:
            stateful = cast(StatefulSandbox, box)
            snapshot = await stateful.snapshot()
            await stateful.rollback(snapshot)
            assert await python(box, FETCH, url) == "403"
            async with stateful.fork(1) as (fork,):
                child = cast(NetworkedSandbox, fork)
                assert await python(child, FETCH, url) in ("403", "no network")
        await box.set_allow((f"localhost:{mirror.port}",))
        assert await python(box, FETCH, url) == "fetched"

    in_box(pool, listed(mirror), use)


def test_a_connection_that_is_no_longer_allowed_is_cut(pool: SandboxPool, mirror: Mirror) -> None:
    async def use(box: NetworkedSandbox) -> None:
        running = asyncio.ensure_future(python(box, HOLD, str(mirror.port)))
        assert await asyncio.to_thread(mirror.held.wait, 60)
        assert not running.done()
        await box.set_allow(("elsewhere.test",))
        assert await running == "cut"

    in_box(pool, listed(mirror), use)


def test_a_malformed_list_changes_nothing(pool: SandboxPool, mirror: Mirror) -> None:
    async def use(box: NetworkedSandbox) -> None:
        with pytest.raises(UserError):
            await box.set_allow(("elsewhere.test", "http://a b"))
        assert await python(box, FETCH, f"http://localhost:{mirror.port}/tool.py") == "fetched"

    in_box(pool, listed(mirror), use)


def test_a_box_without_a_list_gets_one_or_says_why_not(pool: SandboxPool, mirror: Mirror) -> None:
    url = f"http://localhost:{mirror.port}/tool.py"

    async def use(box: NetworkedSandbox) -> None:
        await box.set_allow(())
        assert await python(box, FETCH, url) == "no network"
        if Feature.SNAPSHOTS not in pool.capabilities.features:  # those of a keeper
            with pytest.raises(UserError, match="without a network"):
                await box.set_allow(listed(mirror).allow)
            return
        lists = [listed(mirror).allow, (), listed(mirror).allow]
        await asyncio.gather(*(box.set_allow(allow) for allow in lists))
        assert await python(box, FETCH, url) in ("fetched", "403", "no network")
        await box.set_allow(listed(mirror).allow)
        assert await python(box, FETCH, url) == "fetched"
        async with cast(StatefulSandbox, box).fork(1) as (fork,):
            assert await python(cast(NetworkedSandbox, fork), FETCH, url) == "fetched"

    in_box(pool, Policy(), use)


def test_a_box_that_is_gone_has_no_list(pool: SandboxPool, mirror: Mirror) -> None:
    gone: list[NetworkedSandbox] = []

    async def use(box: NetworkedSandbox) -> None:
        gone.append(box)

    if pool.capabilities.backend == "bubblewrap":
        pytest.skip("its boxes have nothing that could be reached then")
    in_box(pool, Policy(), use)
    with pytest.raises(ClassifiedFailure):
        asyncio.run(gone[0].set_allow(listed(mirror).allow))


@pytest.mark.parametrize("pool", ["audited"], indirect=True)
def test_lists_are_in_the_log_and_forks_begin_with_theirs(
    pool: SandboxPool, mirror: Mirror, tmp_path: Path
) -> None:
    async def use(box: NetworkedSandbox) -> None:
        await box.set_allow(())
        async with cast(StatefulSandbox, box).fork(1):
            pass

    in_box(pool, listed(mirror), use)
    lines = [list(read(path)) for path in sorted((tmp_path / "logs").glob("*/*.jsonl"))]
    changed = [
        line.event.allow for log in lines for line in log if isinstance(line.event, AllowChanged)
    ]
    assert changed == [()]
    created = [line.event for log in lines for line in log if isinstance(line.event, Created)]
    assert {event.parent is None: event.policy.allow for event in created} == {
        True: listed(mirror).allow,
        False: (),
    }
    assert all(verify(path).ok for path in (tmp_path / "logs").glob("*/*.jsonl"))
