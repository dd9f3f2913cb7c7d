"""Boxes with an allow-list: what is on it is reached by every command, and nothing else is.

Each backend gives its boxes their network in its own way; programs see the same.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature, Limits, Policy, Sandbox, SandboxPool
from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.network.base import PROXY_PORT, NetworkProvider
from burnish.sandbox.network.events import NetworkEvent, Reason, Verdict
from burnish.sandbox.network.provider import AllowListNetwork
from burnish.sandbox.oci.pool import OciPool

MakePool = Callable[[SandboxConfig, NetworkProvider], SandboxPool]
BACKENDS: dict[str, MakePool] = {
    "native": lambda config, network: NativePool(config, network=network),
    "bubblewrap": BubblewrapPool,
    "oci-crun": lambda config, network: OciPool(config, "crun", network=network),
    "oci-runc": lambda config, network: OciPool(config, "runc", network=network),
    "gvisor": lambda config, network: OciPool(config, "runsc", network=network),
    "podman": lambda config, network: OciPool(config, "podman", network=network),
}
SLOW = frozenset({"oci-runc", "gvisor", "podman"})
PROBE = """
import os, socket, sys, urllib.request
port = int(sys.argv[1])

def fetch(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()

def reach(host, to, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as direct:
        direct.settimeout(5)
        direct.connect((host, to))
        if kind == socket.SOCK_DGRAM:
            direct.send(b"x")
        return "connected"

def take(to):
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", to))
        own.listen()
        return "listens"

def attempt(name, work, *arguments):
    try:
        print(name, work(*arguments))
    except OSError as error:
        print(name, "failed:", error)

attempt("listed", fetch, f"http://allowed.test:{port}/")
attempt("unlisted", fetch, f"http://other.test:{port}/")
attempt("address", fetch, f"http://127.0.0.2:{port}/")
attempt("moved", fetch, f"http://allowed.test:{port}/moved")
attempt("direct4", reach, "8.8.8.8", 443)
attempt("direct6", reach, "2001:4860:4860::8888", 443, socket.AF_INET6)
attempt("udp", reach, "8.8.8.8", 53, socket.AF_INET, socket.SOCK_DGRAM)
attempt("host", reach, "127.0.0.1", port)
attempt("dns", socket.gethostbyname, "allowed.test")
attempt("taken", take, 3128)
"""


class Ground:
    """A pool with a network that leads to one server on this machine."""

    def __init__(self, make: MakePool, http_port: int) -> None:
        self.http_port = http_port
        self.events: list[NetworkEvent] = []
        names = ("allowed.test", "other.test", "127.0.0.2")
        private = tuple(f"{name}:{http_port}" for name in names)
        self.network = AllowListNetwork(self.events.append, private=private, resolver=_resolve)
        self.policy = Policy(allow=(f"allowed.test:{http_port}",))
        self.pool = make(SandboxConfig(max_boxes=2), self.network)

    async def close(self) -> None:
        await self.pool.close()
        await self.network.close()


async def _resolve(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.fixture(scope="module")
def http_port() -> Iterator[int]:
    """A server on the loopback of the host."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            first = b"200 OK"
            if head.startswith(b"GET /moved "):
                port = writer.get_extra_info("sockname")[1]
                first = b"302 Found\r\nLocation: http://other.test:%d/" % port
            more = b"Content-Length: 5\r\nConnection: close\r\n\r\nhello"
            writer.write(b"HTTP/1.1 " + first + b"\r\n" + more)
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BACKENDS
    ],
)
def ground(request: pytest.FixtureRequest, http_port: int) -> Iterator[Ground]:
    try:
        made = Ground(BACKENDS[request.param], http_port)
    except UserError as error:
        pytest.skip(str(error))
    try:
        if Feature.ALLOW_LIST not in made.pool.capabilities.features:
            pytest.skip("; ".join(made.pool.capabilities.notes))
        yield made
    finally:
        asyncio.run(made.close())


def run_in(ground: Ground, work: Callable[[Sandbox], object], *, listed: bool = True) -> object:
    async def main() -> object:
        async with ground.pool.acquire(policy=ground.policy if listed else None) as box:
            return await work(box)  # type: ignore[misc]

    return asyncio.run(main())


async def python(box: Sandbox, code: str, *arguments: str, **limits: int) -> ExecResult:
    # Without -I, with which urllib would still read the environment, but not -S.
    return await box.exec(python_argv("-c", code, *arguments), limits=Limits(**limits))


def check(result: ExecResult) -> None:
    assert result.status is ExecStatus.OK, result
    said = dict(line.split(" ", 1) for line in result.stdout.decode().splitlines())
    assert said["listed"] == "hello", said
    # The listed server sends its clients to the one that is not.
    for name in ("unlisted", "address", "moved"):
        assert "403" in said[name], said
    for name in ("direct4", "direct6", "udp", "host", "dns", "taken"):
        assert said[name].startswith("failed:"), said


def test_every_command_reaches_the_list_and_nothing_else(ground: Ground) -> None:
    async def work(box: Sandbox) -> None:
        for _ in range(3):
            check(await python(box, PROBE, str(ground.http_port)))

    ground.events.clear()
    run_in(ground, work)
    denied = [event.reason for event in ground.events if event.verdict is Verdict.DENIED]
    assert denied == [Reason.NOT_LISTED, Reason.IP_LITERAL, Reason.NOT_LISTED] * 3
    assert len({event.box for event in ground.events}) == 1


def test_boxes_at_once_have_lists_of_their_own(ground: Ground) -> None:
    async def main() -> None:
        other = Policy(allow=("nowhere.test:1",))
        async with (
            ground.pool.acquire(policy=ground.policy) as one,
            ground.pool.acquire(policy=other) as two,
        ):
            port = str(ground.http_port)
            mine, theirs = await asyncio.gather(python(one, PROBE, port), python(two, PROBE, port))
        check(mine)
        assert b"listed failed: HTTP Error 403" in theirs.stdout, theirs

    asyncio.run(main())


def test_a_box_without_a_list_has_nobody_to_ask(ground: Ground) -> None:
    async def work(box: Sandbox) -> ExecResult:
        code = f"""
import os, socket
print([name for name in os.environ if "proxy" in name.lower()])
try: socket.create_connection(("127.0.0.1", {PROXY_PORT}))
except ConnectionRefusedError: print("refused")
"""
        return await python(box, code)

    result = run_in(ground, work, listed=False)
    assert isinstance(result, ExecResult)
    assert result.stdout == b"[]\nrefused\n", result


def test_variables_of_the_caller_win(ground: Ground) -> None:
    async def work(box: Sandbox) -> ExecResult:
        code = "import os; print(os.environ['HTTP_PROXY'], os.environ['HTTPS_PROXY'])"
        return await box.exec(python_argv("-c", code), env={"HTTP_PROXY": "mine"})

    result = run_in(ground, work)
    assert isinstance(result, ExecResult)
    assert result.stdout.split() == [b"mine", f"http://127.0.0.1:{PROXY_PORT}".encode()]


def test_a_bad_list_is_refused_before_anything_runs(ground: Ground) -> None:
    async def main() -> None:
        async with ground.pool.acquire(policy=Policy(allow=("http://a b",))):
            pytest.fail("the box was made")

    with pytest.raises(UserError):
        asyncio.run(main())


def test_a_program_that_kills_all_it_can_fails_like_any_other(ground: Ground) -> None:
    async def work(box: Sandbox) -> tuple[ExecResult, ExecResult]:
        code = """
import os, signal
try: os.kill(-1, signal.SIGKILL)
except ProcessLookupError: pass
raise SystemExit(3)
"""
        killed = await python(box, code)
        return killed, await python(box, PROBE, str(ground.http_port))

    found = run_in(ground, work)
    assert isinstance(found, tuple)
    killed, after = found
    assert (killed.status, killed.exit_code) == (ExecStatus.EXIT, 3), killed
    check(after)


def test_the_network_takes_nothing_from_the_programs_limits(ground: Ground) -> None:
    code = """
import os, time
made = 0
try:
    while made < 30:
        if os.fork() == 0: time.sleep(60)
        made += 1
except OSError: pass
print(made, flush=True)
"""

    async def work(box: Sandbox) -> bytes:
        return (await python(box, code, num_pids=8)).stdout

    assert run_in(ground, work) == run_in(ground, work, listed=False)


def test_sockets_of_a_box_stay_its_own(ground: Ground) -> None:
    code = """
import os, socket, stat
found = []
for top, names, files in os.walk("/", onerror=None):
    names[:] = [n for n in names if os.path.join(top, n) not in ("/proc", "/sys", "/usr")]
    for name in names + files:
        path = os.path.join(top, name)
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode): found.append(path)
        except OSError: pass
print(found)
listener = socket.socket(socket.AF_UNIX); listener.bind("/work/own"); listener.listen()
client = socket.socket(socket.AF_UNIX); client.connect("/work/own")
client.send(b"hi"); print(listener.accept()[0].recv(2).decode())
"""

    async def work(box: Sandbox) -> ExecResult:
        return await python(box, code)

    result = run_in(ground, work)
    assert isinstance(result, ExecResult)
    sockets, said = result.stdout.decode().splitlines()
    assert sockets in ("[]", "['/run/net/socket']")
    assert said == "hi"


def test_a_connection_ends_with_its_command(ground: Ground) -> None:
    code = f"""
import os, socket, sys, time
if os.fork() == 0:
    os.setsid()
    held = socket.create_connection(("127.0.0.1", {PROXY_PORT}))
    held.send(b"CONNECT allowed.test:%d HTTP/1.1\\r\\n\\r\\n" % int(sys.argv[1]))
    held.recv(100)
    open("/work/ready", "w").close()
    time.sleep(600)
while not os.path.exists("/work/ready"): time.sleep(0.01)
"""

    async def work(box: Sandbox) -> ExecResult:
        result = await python(box, code, str(ground.http_port))
        # When the command is over, not when the box is; some backends see it a moment later.
        for _ in range(200):
            if len(ground.events) > 1:
                break
            await box.exec(("true",))
        assert [event.verdict for event in ground.events] == [Verdict.ALLOWED, Verdict.ENDED]
        return result

    ground.events.clear()
    result = run_in(ground, work)
    assert isinstance(result, ExecResult)
    assert result.status is ExecStatus.OK, result


def test_many_commands_leave_no_descriptor(ground: Ground) -> None:
    async def work(box: Sandbox) -> tuple[int, int]:
        counts = []
        for _ in range(2):
            for _ in range(5):
                await box.exec(("true",))
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts[0], counts[1]

    found = run_in(ground, work)
    assert isinstance(found, tuple)
    assert found[0] == found[1]


@pytest.mark.parametrize("num_steps", [1, 3, 10, 100])
def test_a_cancelled_command_leaves_a_box_with_its_network(ground: Ground, num_steps: int) -> None:
    async def work(box: Sandbox) -> ExecResult:
        await box.exec(("true",))
        task = asyncio.create_task(box.exec(("sleep", "600")))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return await python(box, PROBE, str(ground.http_port))

    result = run_in(ground, work)
    assert isinstance(result, ExecResult)
    check(result)
