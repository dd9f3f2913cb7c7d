"""Each request runs once, however often it is sent, and only as long as somebody waits for it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from burnish.core.clock import Clock
from burnish.core.errors import one_line
from burnish.core.records import Record
from burnish.sandbox.remote.messages import Boxes, BoxInfo, Pending, ProblemKind, encode
from burnish.sandbox.remote.problems import EXPECTED, Refused, http_status, problem_of

_LOG = logging.getLogger(__name__)

# Ids of jobs whose answers are forgotten: sent once more they must not run once more.
_MAX_TOMBSTONES = 100_000
_TOMBSTONE_S = 3600.0


class Reply(NamedTuple):
    """An answer, ready to be sent."""

    status: int
    body: bytes


PENDING = Reply(202, encode(Pending()))


class Owner(NamedTuple):
    """Whose job it is."""

    session: str
    box: str | None


class Job:
    """One request under way, or its answer."""

    def __init__(self, request_id: str, digest: bytes, owner: Owner, now_s: float) -> None:
        """Not yet started."""
        self.id = request_id
        self.digest = digest
        self.owner = owner
        self.task: asyncio.Task[Record] | None = None
        self.reply: Reply | None = None
        self.num_waiters = 0
        self.since_s = now_s
        """When it was left alone, or finished."""
        self.made: tuple[str, ...] = ()
        """Boxes that came of it."""


class Jobs:
    """Requests by the ids that their clients gave them."""

    def __init__(
        self,
        clock: Clock,
        *,
        grace_s: float,
        keep_s: float,
        keep_bytes: int,
        hang_up_ends: bool = False,
    ) -> None:
        """Nothing runs yet; see `ServeConfig` for the meanings."""
        self._clock = clock
        self._grace_s = grace_s
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._hang_up_ends = hang_up_ends
        self._jobs: dict[str, Job] = {}
        self._tombstones: dict[str, float] = {}
        self._kept_bytes = 0

    @property
    def num_running(self) -> int:
        """Jobs that are not done."""
        return sum(job.reply is None for job in self._jobs.values())

    def busy_boxes(self) -> set[str]:
        """Boxes in which something runs."""
        return {job.owner.box for job in self._jobs.values() if job.owner.box and not job.reply}

    def start(
        self,
        request_id: str,
        digest: bytes,
        owner: Owner,
        work: Callable[[], Coroutine[Any, Any, Record]],
    ) -> Job:
        """Run `work`, or find the job that runs it already.

        Args:
            request_id: the client's name for the request.
            digest: of its content, so that another request under the same name is noticed.
            owner: whose it is.
            work: gives the answer; may raise what `problems.EXPECTED` lists.

        Raises:
            Refused: it was cancelled, is too old, or another request had this id.
        """
        if job := self._jobs.get(request_id):
            if (job.digest, job.owner) != (digest, owner):
                raise Refused(ProblemKind.VALUE, "another request was sent under this id")
            return job
        if request_id in self._tombstones:
            raise Refused(ProblemKind.NO_REQUEST, "the request was cancelled, or is too old")
        job = Job(request_id, digest, owner, self._clock.now_s())
        self._jobs[request_id] = job
        job.task = asyncio.get_running_loop().create_task(work())
        job.task.add_done_callback(lambda task: self._finish(job, task))
        return job

    def find(self, request_id: str, session: str) -> Job:
        """A job that was started.

        Raises:
            Refused: there is none, or it is another session's.
        """
        job = self._jobs.get(request_id)
        if job is None or job.owner.session != session:
            raise Refused(ProblemKind.NO_REQUEST, "there is no such request: cancelled or too old")
        return job

    async def wait(self, job: Job, limit_s: float) -> Reply:
        """Its answer, or `PENDING` after `limit_s`.

        Raises:
            Refused: it was cancelled.
        """
        job.num_waiters += 1
        try:
            if job.reply is None and job.task is not None:
                await asyncio.wait((job.task,), timeout=limit_s)
                self._finish_if_done(job)
        except asyncio.CancelledError:
            if self._hang_up_ends and job.num_waiters == 1 and job.task is not None:
                job.task.cancel()
            raise
        finally:
            job.num_waiters -= 1
            if job.reply is None:
                job.since_s = self._clock.now_s()
        return job.reply or PENDING

    def cancel(self, request_id: str, session: str) -> Job | None:
        """End it; if it is not here yet, it will not start. Returns what was found."""
        job = self._jobs.get(request_id)
        if job is None:
            self._bury(request_id)
        elif job.owner.session != session:
            return None
        else:
            self._finish_if_done(job)
            if job.task is not None:
                job.task.cancel()
        return job

    async def cancel_all(self, *, box: str | None = None, session: str | None = None) -> None:
        """End all jobs of a box or a session, or simply all, and wait for their ends."""
        tasks = [
            job.task
            for job in self._jobs.values()
            if job.task is not None
            and not job.task.done()
            and job.task is not asyncio.current_task()
            and (box is None or job.owner.box == box)
            and (session is None or job.owner.session == session)
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def tend(self) -> None:
        """End what nobody waits for; forget old answers. To be called regularly."""
        now = self._clock.now_s()
        for job in list(self._jobs.values()):
            age = now - job.since_s
            if job.reply is None:
                if not job.num_waiters and age >= self._grace_s and job.task is not None:
                    job.task.cancel()
            elif age >= self._keep_s:
                self._forget(job)
        for name, buried in list(self._tombstones.items()):
            if now - buried < _TOMBSTONE_S and len(self._tombstones) <= _MAX_TOMBSTONES:
                break
            del self._tombstones[name]

    def _finish_if_done(self, job: Job) -> None:
        """The callback that sets the answer may stand behind us in the loop's queue."""
        if job.task is not None and job.task.done():
            self._finish(job, job.task)

    def _finish(self, job: Job, task: asyncio.Task[Record]) -> None:
        if job.reply is not None:
            return
        job.reply = _reply_of(task)
        job.made = _boxes_of(task)
        # It has the result, which is as large as the answer.
        job.task = None
        job.since_s = self._clock.now_s()
        self._kept_bytes += len(job.reply.body)
        # Finished jobs stand in the order of their starts, which is near enough to their age.
        for old in list(self._jobs.values()):
            if self._kept_bytes <= self._keep_bytes:
                break
            if old.reply is not None and old is not job and not old.num_waiters:
                self._forget(old)

    def _forget(self, job: Job) -> None:
        assert job.reply is not None
        self._kept_bytes -= len(job.reply.body)
        del self._jobs[job.id]
        self._bury(job.id)

    def _bury(self, request_id: str) -> None:
        self._tombstones[request_id] = self._clock.now_s()


def _boxes_of(task: asyncio.Task[Record]) -> tuple[str, ...]:
    if task.cancelled() or task.exception() is not None:
        return ()
    match task.result():
        case BoxInfo(id=box):
            return (box,)
        case Boxes(boxes=boxes):
            return tuple(box.id for box in boxes)
        case _:
            return ()


def _reply_of(task: asyncio.Task[Record]) -> Reply:
    if task.cancelled():
        problem = problem_of(Refused(ProblemKind.NO_REQUEST, "the request was cancelled"))
        return Reply(http_status(problem), encode(problem))
    error = task.exception()
    if error is None:
        return Reply(200, encode(task.result()))
    if not isinstance(error, EXPECTED):
        _LOG.error("a request failed: %s", one_line(error), exc_info=error)
    problem = problem_of(error)
    return Reply(http_status(problem), encode(problem))
