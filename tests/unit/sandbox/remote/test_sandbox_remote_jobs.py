"""Each request runs once, and only as long as somebody waits for it."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from burnish.core.clock import ManualClock
from burnish.core.records import Record
from burnish.sandbox.remote.jobs import PENDING, Jobs, Owner
from burnish.sandbox.remote.messages import FileData, Problem, ProblemKind, decode
from burnish.sandbox.remote.problems import Refused

OWNER = Owner("session", "box")


class Work:
    """Counts its runs; ends when `go` is set."""

    def __init__(self, size: int = 1, error: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self.num_runs = 0
        self.num_cancelled = 0
        self._size = size
        self._error = error

    async def __call__(self) -> Record:
        self.num_runs += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return FileData(data=bytes(self._size))


def with_jobs(
    use: Callable[[Jobs, ManualClock], Coroutine[Any, Any, None]], keep: int = 10**6
) -> None:
    async def main() -> None:
        clock = ManualClock()
        await use(Jobs(clock, grace_s=10, keep_s=60, keep_bytes=keep), clock)

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def kind_of(error: BaseException) -> ProblemKind:
    assert isinstance(error, Refused)
    return error.problem.kind


def test_a_request_that_is_sent_again_does_not_run_again() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        work = Work()
        first = jobs.start("request-1", b"d", OWNER, work)
        assert await jobs.wait(first, 0) == PENDING
        again = jobs.start("request-1", b"d", OWNER, work)
        work.go.set()
        replies = [await jobs.wait(job, 9) for job in (first, again)]
        replies.append(await jobs.wait(jobs.start("request-1", b"d", OWNER, work), 9))
        assert work.num_runs == 1
        assert {reply.status for reply in replies} == {200}
        assert len(set(replies)) == 1

    with_jobs(use)


def test_another_request_or_session_under_the_same_id_is_refused() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        work = Work()
        jobs.start("request-1", b"d", OWNER, work)
        for digest, owner in ((b"other", OWNER), (b"d", Owner("other", "box"))):
            with pytest.raises(Refused) as caught:
                jobs.start("request-1", digest, owner, work)
            assert kind_of(caught.value) is ProblemKind.VALUE
        with pytest.raises(Refused):
            jobs.find("request-1", "other")
        jobs.cancel("request-1", "other")
        await settle()
        assert work.num_cancelled == 0
        await jobs.cancel_all()

    with_jobs(use)


def test_what_nobody_waits_for_is_ended_after_the_grace() -> None:
    async def use(jobs: Jobs, clock: ManualClock) -> None:
        work = Work()
        job = jobs.start("request-1", b"d", OWNER, work)
        waiting = asyncio.create_task(jobs.wait(job, 1e6))
        await settle()
        clock.advance(1000)
        jobs.tend()
        await settle()
        assert work.num_cancelled == 0
        waiting.cancel()
        await settle()
        clock.advance(9)
        jobs.tend()
        await settle()
        assert work.num_cancelled == 0
        clock.advance(2)
        jobs.tend()
        await settle()
        assert work.num_cancelled == 1

    with_jobs(use)


def test_who_comes_back_in_time_finds_it_running() -> None:
    async def use(jobs: Jobs, clock: ManualClock) -> None:
        work = Work()
        jobs.start("request-1", b"d", OWNER, work)
        for _ in range(5):
            clock.advance(9)
            jobs.tend()
            await jobs.wait(jobs.find("request-1", "session"), 0)
        work.go.set()
        assert (await jobs.wait(jobs.find("request-1", "session"), 9)).status == 200

    with_jobs(use)


def test_a_cancelled_request_does_not_start_even_if_it_comes_later() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        work = Work()
        jobs.cancel("request-1", "session")
        with pytest.raises(Refused) as caught:
            jobs.start("request-1", b"d", OWNER, work)
        assert kind_of(caught.value) is ProblemKind.NO_REQUEST
        assert work.num_runs == 0

    with_jobs(use)


def test_a_forgotten_answer_is_not_made_again() -> None:
    async def use(jobs: Jobs, clock: ManualClock) -> None:
        work = Work()
        work.go.set()
        await jobs.wait(jobs.start("request-1", b"d", OWNER, work), 9)
        clock.advance(61)
        jobs.tend()
        with pytest.raises(Refused):
            jobs.start("request-1", b"d", OWNER, work)
        assert work.num_runs == 1

    with_jobs(use)


def test_kept_answers_are_bounded_and_the_newest_stay() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        for n in range(10):
            work = Work(size=300)
            work.go.set()
            await jobs.wait(jobs.start(f"request-{n}", b"d", OWNER, work), 9)
        kept = []
        for n in range(10):
            try:
                kept.append(jobs.find(f"request-{n}", "session").id)
            except Refused:
                continue
        assert kept == ["request-7", "request-8", "request-9"]

    with_jobs(use, keep=1000)


def test_jobs_end_with_their_box_or_session_and_others_go_on() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        works = [Work() for _ in range(3)]
        owners = [Owner("session", "box"), Owner("session", "other"), Owner("else", None)]
        for n, (work, owner) in enumerate(zip(works, owners, strict=True)):
            jobs.start(f"request-{n}", b"d", owner, work)
        await settle()
        await jobs.cancel_all(box="box")
        assert [work.num_cancelled for work in works] == [1, 0, 0]
        await jobs.cancel_all(session="session")
        assert [work.num_cancelled for work in works] == [1, 1, 0]
        assert jobs.num_running == 1
        await jobs.cancel_all()
        assert jobs.num_running == 0

    with_jobs(use)


def test_a_bug_is_an_internal_problem_that_names_it() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        work = Work(error=ZeroDivisionError("by zero"))
        work.go.set()
        reply = await jobs.wait(jobs.start("request-1", b"d", OWNER, work), 9)
        problem = decode(reply.body, Problem)
        assert (reply.status, problem.kind) == (500, ProblemKind.INTERNAL)
        assert "by zero" in problem.message

    with_jobs(use)


def test_waiting_ends_when_the_job_does() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        work = Work()
        job = jobs.start("request-1", b"d", OWNER, work)
        waits: list[Awaitable[Any]] = [asyncio.create_task(jobs.wait(job, 1e6)) for _ in range(3)]
        await settle()
        jobs.cancel("request-1", "session")
        replies = await asyncio.gather(*waits)
        kinds = {decode(reply.body, Problem).kind for reply in replies}
        assert kinds == {ProblemKind.NO_REQUEST}

    with_jobs(use)


def test_an_answer_is_kept_once() -> None:
    async def use(jobs: Jobs, _: ManualClock) -> None:
        work = Work()
        job = jobs.start("request-1", b"d", OWNER, work)
        assert job.task is not None
        # It holds the result as an object beside the bytes of the answer.
        task = weakref.ref(job.task)
        work.go.set()
        assert (await jobs.wait(job, 9)).status == 200
        await settle()
        assert jobs.find("request-1", OWNER.session) is job
        assert task() is None

    gc.collect()
    gc.disable()
    try:
        with_jobs(use)
    finally:
        gc.enable()
