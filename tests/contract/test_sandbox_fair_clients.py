"""Two processes, one server, real boxes: who asks for all of them does not starve the other."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.hosting import ServerThread
from burnish.sandbox.start import open_pool

MAX_BOXES = 4
NUM_ASKED = 300
# Each box runs a command until it is told by a line to let one go.
GREEDY = """
import asyncio, sys
from burnish.sandbox.remote.client import RemotePool

async def main(url, count):
    pool, leave = RemotePool(url), asyncio.Semaphore(0)

    async def hold():
        async with pool.acquire() as box:
            await box.exec(("true",))
            print("got", flush=True)
            await leave.acquire()

    tasks = [asyncio.create_task(hold()) for _ in range(count)]
    while await asyncio.to_thread(sys.stdin.readline):
        leave.release()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await pool.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    try:
        pool = open_pool(SandboxConfig(max_boxes=MAX_BOXES))
    except UserError as error:
        pytest.skip(str(error))
    # So that some of the many are turned away and come again.
    config = ServeConfig(socket=tmp_path / "socket", max_waiting_per_client=NUM_ASKED // 2)
    server = ServerThread(pool, config, max_boxes=MAX_BOXES)
    yield server.url
    server.close()


def test_who_asks_for_very_many_boxes_does_not_starve_another(url: str) -> None:
    command = [sys.executable, "-c", GREEDY, url, str(NUM_ASKED)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as greedy:
        assert greedy.stdin is not None
        assert greedy.stdout is not None
        for _ in range(MAX_BOXES):
            assert greedy.stdout.readline() == "got\n"
        modest = RemotePool(url)
        try:
            asyncio.run(modest_work(modest, greedy.stdin.write))
        finally:
            asyncio.run(modest.close())
            greedy.stdin.close()
        # What the modest one gave back has gone to the greedy one, and nothing before.
        assert greedy.stdout.read().count("got\n") <= MAX_BOXES
    assert greedy.returncode == 0


async def modest_work(pool: RemotePool, let_go: Callable[[str], object]) -> None:
    while (await pool.stats()).num_waiting < NUM_ASKED // 2:
        continue
    share = [asyncio.create_task(pool.create()) for _ in range(MAX_BOXES // 2)]
    while (await pool.stats()).num_waiting < NUM_ASKED // 2 + len(share):
        continue
    for _ in share:
        let_go("\n")
    for info in await asyncio.gather(*share):
        assert (await pool.attach(info.id).exec(("true",))).status is ExecStatus.OK
    assert (await pool.stats()).num_created == MAX_BOXES + len(share)
