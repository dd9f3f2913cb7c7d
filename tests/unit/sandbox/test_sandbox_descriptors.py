"""Threads that work on files of a box, after whoever waited for them is gone."""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.core.errors import ClassifiedFailure
from burnish.sandbox import descriptors
from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.descriptors import on_own_descriptors
from burnish.sandbox.native.layer_files import LayerFiles
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.start import open_pool
from burnish.sandbox.state.layers import SQUASH_DEPTH


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> ThreadPoolExecutor:
    """Threads that end when they are told to, so that what they leave open can be counted."""
    made = ThreadPoolExecutor(2)
    monkeypatch.setattr(descriptors, "_THREADS", made)
    return made


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_cancelled_work_goes_on_in_the_file_that_it_was_given(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def work(own: list[int]) -> None:
        begun.set()
        go.wait()
        os.write(own[0], b"late")
        done.set()

    async def main() -> None:
        descriptor = os.open(tmp_path / "mine", os.O_WRONLY | os.O_CREAT)
        waiting = asyncio.create_task(on_own_descriptors(work, [descriptor]))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.close(descriptor)
        others = [os.open(tmp_path / f"{i}", os.O_WRONLY | os.O_CREAT) for i in range(8)]
        assert descriptor in others
        go.set()
        await asyncio.to_thread(done.wait)
        for other in others:
            os.close(other)

    before = num_open()
    asyncio.run(main())
    threads.shutdown()
    assert (tmp_path / "mine").read_bytes() == b"late"
    assert [(tmp_path / f"{i}").read_bytes() for i in range(8)] == [b""] * 8
    assert num_open() == before


def test_work_that_was_cancelled_before_it_began_closes_what_is_its_own(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        waiting = asyncio.create_task(on_own_descriptors(len, [descriptor]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.close(descriptor)

    before = num_open()
    asyncio.run(main())
    threads.shutdown()
    assert num_open() == before


def test_cancellation_tells_the_thread_to_end() -> None:
    begun, ended = threading.Event(), threading.Event()
    stop = Stop()

    def work(own: list[int]) -> None:
        begun.set()
        try:
            while True:
                stop.check()
        finally:
            ended.set()

    async def main() -> None:
        waiting = asyncio.create_task(on_own_descriptors(work, (), stop))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(ended.wait)

    asyncio.run(main())


async def native_pool() -> NativePool:
    """Of one box."""
    pool = open_pool(SandboxConfig(max_boxes=1))
    if not isinstance(pool, NativePool):
        await pool.close()
        pytest.skip("no native sandbox here")
    return pool


def test_a_merge_of_a_box_that_has_ended_writes_nothing_into_what_the_host_opens_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    squash = LayerFiles.squash

    def held(files: LayerFiles, layer_fds: Sequence[int], into_fd: int, stop: Stop) -> None:
        # It does not look at `stop`, as if it had read half of them.
        read = [os.dup(layer) for layer in layer_fds]
        begun.set()
        go.wait()
        try:
            squash(files, read, into_fd)
        finally:
            for layer in read:
                os.close(layer)
            done.set()

    async def main() -> None:
        pool = await native_pool()
        monkeypatch.setattr(LayerFiles, "squash", held)
        async with pool.acquire() as box:
            for i in range(SQUASH_DEPTH):
                await box.write_file(f"work/f{i}", b"hostile")
                await box.snapshot()
            await asyncio.to_thread(begun.wait)
        victims = [os.open(tmp_path, os.O_RDONLY) for _ in range(64)]
        go.set()
        await asyncio.to_thread(done.wait)
        for victim in victims:
            os.close(victim)
        await pool.close()

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Imports do not end by themselves; set when one has begun."""
    begun = threading.Event()

    def endless(
        files: LayerFiles, source: Path, into_fd: int, below: Path, covered: object, stop: Stop
    ) -> None:
        os.close(os.open("half", os.O_CREAT | os.O_WRONLY, dir_fd=into_fd))
        begun.set()
        while True:
            stop.check()

    monkeypatch.setattr(LayerFiles, "import_tar", endless)
    return begun


def test_an_import_that_is_cancelled_ends_and_the_box_is_as_it_was(
    importing: threading.Event,
) -> None:
    async def main() -> None:
        pool = await native_pool()
        async with pool.acquire() as box:
            await box.write_file("kept", b"")
            work = asyncio.create_task(box.import_tar(Path("a.tar")))
            await asyncio.to_thread(importing.wait)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            result = await box.exec(("sh", "-c", "ls /half; ls"))
            assert result.stdout == b"kept\n"
            assert result.stderr != b""
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["destroyed", "closed"])
def test_an_import_ends_with_its_box(importing: threading.Event, how: str) -> None:
    async def main() -> None:
        pool = await native_pool()
        async with pool.acquire() as box:
            work = asyncio.create_task(box.import_tar(Path("a.tar")))
            await asyncio.to_thread(importing.wait)
            await (box.destroy() if how == "destroyed" else pool.close())
            with pytest.raises(ClassifiedFailure, match=how):
                await work
        await pool.close()

    asyncio.run(main())
