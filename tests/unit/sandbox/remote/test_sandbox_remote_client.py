"""A pool on a server, and everything that can break between the two."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature, Limits, Sandbox, StatefulSandbox
from burnish.core.errors import ClassifiedFailure, FileTooLargeError, UserError
from burnish.core.loop_thread import LoopThread
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure

Served = Any  # conftest.Served
Connect = Callable[..., RemotePool]
TOKEN = "a-token-of-more-than-16-characters"


async def until(condition: Callable[[], object]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to be")


def in_box(pool: RemotePool, use: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with pool.acquire() as box:
            return await use(box)

    return asyncio.run(main())


class Proxy:
    """Passes bytes on, until it is told to cut connections instead of bringing answers."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("http+unix://")
        self._thread = LoopThread()
        self.cuts_left = 0
        self.mute = False

        async def start() -> int:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            return int(self._server.sockets[0].getsockname()[1])

        self.url = f"http://127.0.0.1:{self._thread.run_blocking(start)}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_unix_connection(self._target)

        async def ask() -> None:
            while data := await reader.read(65536):
                questions.write(data)
            questions.close()

        asking = asyncio.create_task(ask())
        while data := await answers.read(65536):
            if self.cuts_left:
                self.cuts_left -= 1
                break
            writer.write(data)
        asking.cancel()
        questions.close()
        writer.close()

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()

        self._thread.run_blocking(stop)
        self._thread.close()


@pytest.fixture
def proxy(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("burnish.sandbox.remote.wire._PAUSES_S", (0, 0, 0))
    made = Proxy(served.url)
    yield made
    made.close()


# As a local pool


def test_it_can_what_the_pool_behind_it_can(served: Served, connect: Connect) -> None:
    found, inner = connect(served.url).capabilities, served.pool.capabilities
    assert found.backend == "remote memory"
    features = inner.features - {Feature.PROCESSES, Feature.WARM_PYTHON}  # the wire has no words
    assert (found.enforces, found.features) == (inner.enforces, features)


def test_boxes_are_stateful_exactly_where_the_server_has_snapshots(
    serve: Callable[..., Served], connect: Connect
) -> None:
    served = serve()
    assert in_box(connect(served.url), lambda box: _has(box, "snapshot"))
    plain = serve()
    plain.pool.capabilities = _without_snapshots(plain.pool.capabilities)
    assert not in_box(connect(plain.url), lambda box: _has(box, "snapshot"))


async def _has(box: Sandbox, name: str) -> bool:
    return hasattr(box, name)


def _without_snapshots(capabilities: Any) -> Any:
    import msgspec

    features = capabilities.features - {Feature.SNAPSHOTS}
    return msgspec.structs.replace(capabilities, features=features)


def test_snapshot_rollback_and_fork_work_as_on_the_host(served: Served, connect: Connect) -> None:
    async def use(box: StatefulSandbox) -> None:
        await box.write_file("f", b"old")
        snapshot = await box.snapshot()
        await box.write_file("f", b"new")
        async with box.fork(2, snapshot) as olds, box.fork(1) as (new,):
            assert len({old.id for old in olds} | {new.id, box.id}) == 4
            assert [await old.read_file("f") for old in olds] == [b"old", b"old"]
            assert await new.read_file("f") == b"new"
            await olds[0].write_file("f", b"its own")
            assert len(served.pool.boxes) == 4
        assert len(served.pool.boxes) == 1
        await box.rollback(snapshot)
        assert await box.read_file("f") == b"old"

    in_box(connect(served.url), use)


def test_a_snapshot_lives_until_it_is_forgotten_or_its_session_ends(
    served: Served, connect: Connect
) -> None:
    async def use(box: StatefulSandbox) -> None:
        kept, freed = await box.snapshot(), await box.snapshot()
        async with box.fork(2):
            assert set(served.pool.snapshots) == {kept.id, freed.id}, "forks keep none of their own"
        await box.forget(freed)
        await box.forget(freed)
        assert set(served.pool.snapshots) == {kept.id}
        with pytest.raises(UserError, match="no snapshot"):
            await box.rollback(freed)
        await box.rollback(kept)

    pool = connect(served.url)
    in_box(pool, use)
    asyncio.run(pool.close())
    assert served.pool.snapshots == {}


def test_a_fork_that_fails_leaves_nothing(serve: Callable[..., Served], connect: Connect) -> None:
    served = serve(2, max_waiting=5)

    async def use(box: StatefulSandbox) -> None:
        other = connect(served.url)
        forking = asyncio.create_task(box.fork(2).__aenter__())
        while (await other.stats()).num_waiting == 0:
            continue
        forking.cancel()
        await asyncio.wait((forking,))
        async with other.acquire():
            assert len(served.pool.boxes) == 2
        for count in (0, 3):
            with pytest.raises(ValueError, match="1 to 2 can be had"):
                async with box.fork(count):
                    pass

    in_box(connect(served.url), use)


def test_forks_that_are_not_free_in_time_are_given_up(
    serve: Callable[..., Served], connect: Connect
) -> None:
    served = serve(3, max_waiting=5)

    async def use(box: StatefulSandbox) -> None:
        hasty = connect(served.url, acquire_timeout_s=0.05).attach(box.id)
        with pytest.raises(RemoteFailure) as failed:
            await hasty.fork_boxes(3)
        assert failed.value.kind is ProblemKind.BUSY
        await until(lambda: len(served.pool.boxes) == 1)

    in_box(connect(served.url), use)


def test_tars_go_out_and_in_and_are_whole(served: Served, connect: Connect, tmp_path: Path) -> None:
    big = os.urandom(3 * 2**20)

    async def use(box: StatefulSandbox) -> None:
        await box.write_file("a/big", big)
        digest = await box.export_tar(tmp_path / "out.tar")
        assert digest == "digest of 1"
        with tarfile.open(tmp_path / "out.tar") as tar:
            assert tar.getnames() == ["a/big"]
        await box.write_file("a/big", b"")
        await box.import_tar(tmp_path / "out.tar")
        assert await box.read_file("a/big", 2**23) == big
        with pytest.raises(FileNotFoundError):
            await box.export_tar(tmp_path / "absent" / "out.tar")
        (tmp_path / "garbage").write_bytes(b"no tar")
        with pytest.raises(ValueError, match="no tar"):
            await box.import_tar(tmp_path / "garbage")

    in_box(connect(served.url), use)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "garbage", "out.tar"]


def test_a_pipe_is_not_replaced_by_a_tar_and_nothing_is_read(
    served: Served, connect: Connect, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    # A box that there is not: it would be the error if it were asked.
    with pytest.raises(UserError, match=r"pipe is no regular file.* Fix: give a file"):
        asyncio.run(connect(served.url).attach("0").export_to(tmp_path / "pipe"))
    assert (tmp_path / "pipe").is_fifo()


def test_a_snapshot_of_nowhere_is_a_users_mistake(served: Served, connect: Connect) -> None:
    from burnish.core.boxes import Snapshot

    async def use(box: StatefulSandbox) -> None:
        with pytest.raises(UserError, match="no snapshot"):
            await box.rollback(Snapshot(id="../../x", image="", num_layers=0))

    in_box(connect(served.url), use)


def test_errors_arrive_as_what_they_are(served: Served, connect: Connect) -> None:
    async def use(box: Sandbox) -> None:
        with pytest.raises(FileNotFoundError):
            await box.read_file("absent")
        with pytest.raises(OSError, match="space") as caught:
            await box.write_file("full", b"")
        assert caught.value.errno == errno.ENOSPC
        await box.write_file("large", bytes(1000))
        with pytest.raises(FileTooLargeError, match="large has 1000 bytes") as refused:
            await box.read_file("large", limit_bytes=999)
        assert (refused.value.size_bytes, refused.value.errno) == (1000, errno.EFBIG)
        with pytest.raises(ValueError, match="path"):
            await box.write_file("../x", b"")
        with pytest.raises(UserError, match="do it right"):
            await box.exec(("mistake",))
        for program in ("bug", "broken"):
            result = await box.exec((program,))
            assert result.status is ExecStatus.INFRA_ERROR
            assert served.url in result.message

    in_box(connect(served.url), use)


def test_images_and_policies_are_the_servers(served: Served, connect: Connect) -> None:
    async def main() -> None:
        with pytest.raises(UserError, match="absent"):
            async with pool.acquire("absent"):
                pass
        served.pool.broken = True
        with pytest.raises(ClassifiedFailure) as caught:
            async with pool.acquire():
                pass
        assert caught.value.failure.kind is FailureKind.SANDBOX

    pool = connect(served.url)
    asyncio.run(main())


def test_one_pool_serves_several_event_loops(served: Served, connect: Connect) -> None:
    pool = connect(served.url)
    answers: list[bytes] = []

    def work(number: int) -> None:
        async def use(box: Sandbox) -> None:
            result = await box.exec(("cat",), stdin=bytes([number]))
            answers.append(result.stdout)

        in_box(pool, use)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [bytes([n]) for n in range(12)]
    assert served.pool.num_made == 12


def test_two_clients_race_for_the_last_box_and_both_get_it(
    serve: Callable[..., Served], connect: Connect
) -> None:
    served = serve(1)
    pools = [connect(served.url) for _ in range(2)]

    async def main() -> None:
        async def one(pool: RemotePool) -> None:
            for _ in range(5):
                async with pool.acquire() as box:
                    assert (await box.exec(("cat",))).status is ExecStatus.OK
                    assert len(served.pool.boxes) == 1

        await asyncio.gather(*map(one, pools))

    asyncio.run(main())
    assert served.pool.num_made == 10


def test_a_deadline_for_a_box_is_a_failure_that_says_so(
    serve: Callable[..., Served], connect: Connect
) -> None:
    served = serve(1)
    pool = connect(served.url, acquire_timeout_s=0.05)

    async def use(_: Sandbox) -> None:
        with pytest.raises(RemoteFailure, match="all 1 boxes are in use") as caught:
            async with pool.acquire():
                pass
        assert caught.value.kind is ProblemKind.BUSY
        # What nobody waits for any more does not take the box when it becomes free.
        assert (await _drained(pool)).num_waiting == 0

    in_box(pool, use)
    in_box(pool, lambda box: box.exec(("cat",)))


async def _drained(pool: RemotePool) -> Any:
    while (stats := await pool.stats()).num_waiting:
        continue
    return stats


# What breaks


def test_a_command_runs_once_though_the_connection_breaks(
    served: Served, proxy: Proxy, connect: Connect
) -> None:
    async def use(box: Sandbox) -> ExecResult:
        proxy.cuts_left = 2
        return await box.exec(("cat",), stdin=b"in")

    result = in_box(connect(proxy.url), use)
    assert (result.status, result.stdout) == (ExecStatus.OK, b"in")
    assert served.pool.num_started == 1


def test_a_box_is_made_once_though_the_connection_breaks(
    served: Served, proxy: Proxy, connect: Connect
) -> None:
    pool = connect(proxy.url)
    proxy.cuts_left = 2
    in_box(pool, lambda box: box.exec(("cat",)))
    assert served.pool.num_made == 1
    assert served.pool.boxes == []


def test_a_network_that_stays_broken_is_an_infra_error_that_names_the_host(
    served: Served, proxy: Proxy, connect: Connect
) -> None:
    async def use(box: Sandbox) -> ExecResult:
        proxy.cuts_left = 10**6
        result = await box.exec(("cat",))
        with pytest.raises(ClassifiedFailure) as caught:
            await box.read_file("f")
        assert proxy.url in str(caught.value)
        return result

    result = in_box(connect(proxy.url), use)
    assert result.status is ExecStatus.INFRA_ERROR
    assert proxy.url in result.message
    assert served.pool.num_started <= 1


def test_a_cancelled_command_ends_on_the_server(served: Served, connect: Connect) -> None:
    async def use(box: Sandbox) -> None:
        running = asyncio.create_task(box.exec(("wait",)))
        await until(lambda: served.pool.num_started)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: served.pool.num_cancelled)

    in_box(connect(served.url), use)


def test_long_commands_are_polled_for(serve: Callable[..., Served], connect: Connect) -> None:
    served = serve(poll_s=0.001)

    async def use(box: Sandbox) -> ExecResult:
        running = asyncio.create_task(box.exec(("wait", "done")))
        await until(lambda: served.pool.num_started)
        for _ in range(10):
            await asyncio.to_thread(served.pass_time, 5)
            await asyncio.sleep(0.005)
        served.pool.go.set()
        return await running

    assert in_box(connect(served.url), use).stdout == b"done"
    assert served.pool.num_started == 1


def test_a_box_whose_lease_ran_out_is_an_infra_error(served: Served, connect: Connect) -> None:
    async def use(box: Sandbox) -> None:
        for _ in range(8):
            await asyncio.to_thread(served.pass_time, 25)
        assert served.pool.boxes == []
        result = await box.exec(("cat",))
        assert result.status is ExecStatus.INFRA_ERROR
        assert "lease" in result.message

    in_box(connect(served.url), use)


def test_closing_destroys_the_boxes_and_fails_what_runs(served: Served, connect: Connect) -> None:
    pool = connect(served.url)

    async def main() -> None:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("wait",)))
            await until(lambda: served.pool.num_started)
            await pool.close()
            assert (await running).status is ExecStatus.INFRA_ERROR
            assert served.pool.boxes == []
            assert (await box.exec(("cat",))).status is ExecStatus.INFRA_ERROR
        with pytest.raises(ClassifiedFailure):
            async with pool.acquire():
                pass

    asyncio.run(main())


def test_who_cannot_be_reached_is_a_failure_that_names_the_host(tmp_path: Path) -> None:
    for url in (f"http+unix://{tmp_path}/absent", "http://127.0.0.1:1"):
        with pytest.raises(ClassifiedFailure, match=url.replace("+", r"\+")) as caught:
            RemotePool(url)
        assert caught.value.failure.kind is FailureKind.SANDBOX


def test_a_wrong_token_is_a_users_mistake(serve: Callable[..., Served], connect: Connect) -> None:
    served = serve(listen="127.0.0.1:0")
    for token in (None, "wrong", TOKEN + "x"):
        with pytest.raises(UserError, match="token"):
            RemotePool(served.url, token)
    with pytest.raises(UserError, match="token"):
        RemotePool(served.url, "two\r\nlines")
    assert in_box(connect(served.url, TOKEN), lambda b: b.exec(("cat",))).status is ExecStatus.OK


def test_another_program_at_the_address_is_told_apart() -> None:
    class Other:
        def __init__(self) -> None:
            self.thread = LoopThread()

            async def start() -> Any:
                return await asyncio.start_server(self._answer, "127.0.0.1", 0)

            self.server = self.thread.run_blocking(start)
            self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

        async def _answer(self, reader: Any, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
            writer.close()

    other = Other()
    try:
        with pytest.raises(ClassifiedFailure, match="no burnish sandbox server"):
            RemotePool(other.url)
    finally:
        other.thread.close()


SERVE = "import sys; from burnish.cli.main import main; main(sys.argv[1:])"


def start_server(folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    command = ["sandbox", "serve", "--socket", str(folder / "socket"), "--json", *options]
    process = subprocess.Popen([sys.executable, "-c", SERVE, *command], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith(b'{"url"'):
        process.wait()
        pytest.skip(f"no box runs here: {line.decode()}")
    return process, f"http+unix://{folder}/socket"


def test_a_server_killed_mid_command_is_an_infra_error_and_leaves_no_box(
    tmp_path: Path, connect: Connect
) -> None:
    process, url = start_server(tmp_path)
    pool = connect(url)

    async def main() -> None:
        async with pool.acquire() as box:
            await box.write_file("f", b"")
            running = asyncio.create_task(box.exec(("sleep", "1000"), limits=Limits(wall_s=1000)))
            while (await pool.stats()).num_running == 0:
                continue
            process.kill()
            result = await running
            assert result.status is ExecStatus.INFRA_ERROR
            assert url in result.message
        with pytest.raises(ClassifiedFailure):
            async with pool.acquire():
                pass

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.wait()
    # Another one takes its place, and its former clients with it.
    process, _ = start_server(tmp_path)
    try:
        assert in_box(pool, lambda box: box.exec(("true",))).status is ExecStatus.OK
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


CLIENT = """
import asyncio, sys
from burnish.core.boxes import Limits
from burnish.sandbox.remote.client import RemotePool

async def main():
    pool = RemotePool(sys.argv[1])
    async with pool.acquire() as box:
        print(box.id, flush=True)
        await box.exec(("wait",), limits=Limits(wall_s=1000))

asyncio.run(main())
"""


def test_a_killed_client_loses_its_boxes_when_the_lease_ends(
    serve: Callable[..., Served], connect: Connect
) -> None:
    served = serve(1, lease_s=60)
    client = subprocess.Popen([sys.executable, "-c", CLIENT, served.url], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline()
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert len(served.pool.boxes) == 1
    for _ in range(4):
        served.pass_time(20)
    assert served.pool.boxes == []
    assert served.pool.num_cancelled == served.pool.num_started
    in_box(connect(served.url), lambda box: box.exec(("cat",)))


def test_tls_is_checked_against_the_given_authority(
    serve: Callable[..., Served], connect: Connect, tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate: sudo apt-get install openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    make += ["-nodes", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    make += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(make, check=True, capture_output=True)
    served = serve(listen="127.0.0.1:0", tls_cert=cert, tls_key=key)
    assert served.url.startswith("https://")
    pool = connect(served.url, TOKEN, ca_file=cert)
    assert in_box(pool, lambda box: box.exec(("cat", "x"))).stdout == b"x"
    with pytest.raises(ClassifiedFailure, match="certificate"):
        RemotePool(served.url, TOKEN)
    with pytest.raises(ClassifiedFailure):
        RemotePool(served.url.replace("https", "http"), TOKEN)
    with pytest.raises(UserError, match="certificates"):
        RemotePool(served.url, TOKEN, ca_file=key)
    with pytest.raises(UserError, match="certificate"):
        serve(listen="127.0.0.1:0", tls_cert=key, tls_key=cert)
