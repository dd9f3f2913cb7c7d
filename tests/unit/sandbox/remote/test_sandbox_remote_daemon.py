"""The server behind `burnish sandbox`: when it ends, and where it lives."""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.sandbox.remote import daemon
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.serving import listening


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base, "burnish")


def test_a_server_is_idle_after_so_long_without_boxes_and_not_before(
    tmp_path: Path, memory_pool: Any
) -> None:
    clock = ManualClock()
    config = ServeConfig(socket=tmp_path / "s", idle_exit_s=100, lease_s=1e6, allow_detached=True)

    async def main() -> None:
        async with listening(memory_pool(), config, max_boxes=4, clock=clock) as (url, server):

            async def later(seconds: float) -> bool:
                clock.advance(seconds)
                await server.tend()
                return server.idle.is_set()

            assert not await later(99)
            pool = await asyncio.to_thread(RemotePool, url)
            info = await pool.create(detached=True)
            await pool.close()
            assert not await later(1000)
            pool = await asyncio.to_thread(RemotePool, url)
            await pool.destroy(info.id)
            await pool.close()
            assert not await later(99)
            assert await later(1)

    asyncio.run(main())


def test_it_does_not_leave_while_somebody_is_about_to_come(folder: Path) -> None:
    path = daemon.runtime_folder() / daemon.SOCKET
    path.touch()
    holder = os.open(folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert not daemon._leave(path)
    assert path.exists()
    os.close(holder)
    assert daemon._leave(path)
    assert not path.exists()


def test_the_folder_is_made_for_its_user_alone(folder: Path) -> None:
    assert daemon.runtime_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(UserError, match="yours alone"):
        daemon.runtime_folder()


def test_without_a_runtime_directory_it_is_below_tmp_by_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    existed = Path(f"/tmp/burnish-{os.getuid()}").exists()
    assert daemon.runtime_folder() == Path(f"/tmp/burnish-{os.getuid()}")
    if not existed:
        daemon.runtime_folder().rmdir()


def test_a_runtime_directory_that_is_absent_is_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="XDG_RUNTIME_DIR"):
        daemon.runtime_folder()


def test_a_client_that_hangs_up_ends_its_command_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServeConfig] = []

    async def serve(pool: object, config: ServeConfig, **_: object) -> None:
        served.append(config)

    monkeypatch.setattr("burnish.sandbox.remote.serving.serve", serve)
    monkeypatch.setattr("burnish.sandbox.start.open_pool", lambda config: config)
    asyncio.run(daemon._serve(folder / "s", lambda _: None))
    assert served[0].hang_up_ends


def test_a_daemon_that_is_stopped_is_named_with_the_command_that_helps(folder: Path) -> None:
    code = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "s.listen(); print(flush=True); time.sleep(1000)"
    )
    path = str(daemon.runtime_folder() / daemon.SOCKET)
    command = (sys.executable, "-I", "-c", code, path)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert daemon.running_url() == daemon.ensure_running()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        for ask in (daemon.running_url, daemon.ensure_running, daemon.stop):
            with pytest.raises(UserError, match=f"kill -CONT {process.pid}"):
                ask()
        process.kill()
    assert daemon.running_url() is None


def test_a_daemon_that_lets_nobody_in_is_not_waited_for_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_CONNECT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(daemon.runtime_folder() / daemon.SOCKET))
        listener.listen(0)
        assert daemon.running_url() is not None
        verbs = (daemon.running_url, daemon.ensure_running, daemon.stop, daemon.has_died)
        for ask in (*verbs, daemon.remove_dead_socket):
            with pytest.raises(UserError, match=r"does not answer.*sandbox\.log names"):
                ask()
