"""Starts, preempts and resumes runs as the job scheduler says.

A job is `burnish run` in a process of its own. To preempt one it is sent SIGTERM: the run saves a
checkpoint and ends with status 130, and `--resume` goes on from there. The list of jobs is on the
disk before anything is started. The runs of a daemon that was killed go on: the next one waits for
those that still live as if it had started them, and resumes the others.

While jobs wait, the daemon looks at what the running ones demand, and has those that wait for
something else lend their units (`schedule/jobs/lending.py`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from burnish.core.clock import Clock
from burnish.core.disk import write_atomically
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.run.control.client import SilentError, ask
from burnish.run.control.messages import Answer
from burnish.run.control.server import serve_control
from burnish.run.jobs.demand import Demand
from burnish.run.jobs.messages import JobRequest, JobVerb, jobs_socket, parse_job
from burnish.run.jobs.survivor import Survivor, find_survivor, newest_run, note_process
from burnish.schedule.jobs.base import OVER, ActionKind, JobsConfig, JobSpec, JobState
from burnish.schedule.jobs.lending import Lending
from burnish.schedule.jobs.scheduler import JobScheduler

_INTERRUPTED = 130
# Looks for each quiet time of a job, and the longest pause between two.
_LOOKS = 6
_LOOK_S = 5.0


class _Saved(Record, frozen=True, kw_only=True):
    """The list of jobs on the disk."""

    scheduler: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of `JobScheduler.state`; empty before the first job."""
    lines: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """What `burnish run` is told, by job."""


class JobsDaemon:
    """One per directory, which its socket and its lock by `serve_control` see to."""

    def __init__(self, directory: Path, config: JobsConfig, clock: Clock) -> None:
        """Take up the list of jobs that is there.

        Raises:
            UserError: the directory cannot be used, or its list is damaged or another version's.
        """
        self._directory, self._clock = directory, clock
        self._lending, self._lend_after_s = Lending(config.lend_after_s), config.lend_after_s
        self._demands: dict[str, Demand] = {}
        self._file = directory / "jobs.json"
        saved = _load(self._file)
        self._lines = saved.lines
        found = {job_id: find_survivor(directory / job_id) for job_id in saved.lines}
        self._survivors = {job_id: one for job_id, one in found.items() if one is not None}
        self._scheduler = JobScheduler(config, clock)
        if saved.scheduler:
            with _damage_told(self._file):
                self._scheduler = JobScheduler.from_state(
                    saved.scheduler, config, clock, alive=self._survivors.keys()
                )
                _require_lines(self._scheduler, self._lines)
        self._processes: dict[str, asyncio.subprocess.Process | Survivor] = {}
        self._cancelled: set[str] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop; then preempt what runs, and wait for it.

        Raises:
            UserError: another daemon serves this directory.
        """
        async with asyncio.TaskGroup() as tasks:
            async with serve_control(jobs_socket(self._directory), self._answerer(tasks)):
                self._take_over(tasks)
                self._act(tasks)
                while not self._stopping.is_set():
                    await self._look(tasks)
            for job_id in self._processes:
                self._terminate(job_id)

    def stop(self) -> None:
        """End; all that runs saves a checkpoint."""
        self._stopping.set()

    def _answerer(self, tasks: asyncio.TaskGroup) -> Any:
        async def answer(line: bytes) -> Answer:
            request = parse_job(line)
            if isinstance(request, str):
                return Answer(ok=False, error=request)
            result = self._do(request)
            self._act(tasks)
            return Answer(ok=True, result=result)

        return answer

    def _do(self, request: JobRequest) -> dict[str, Any]:
        job_id = request.job_id or ""
        match request.verb:
            case JobVerb.SUBMIT:
                assert request.config, "checked when it was parsed"
                spec = JobSpec(
                    job_id=job_id,
                    tenant=request.tenant,
                    units=request.units,
                    priority=request.priority,
                )
                self._scheduler.submit(spec)
                sets = [word for value in request.overrides for word in ("--set", value)]
                self._lines[job_id] = [request.config, *sets]
            case JobVerb.CANCEL:
                if self._scheduler.cancel(job_id):
                    self._cancelled.add(job_id)
                    self._terminate(job_id)
            case JobVerb.LEND:
                self._scheduler.lend(job_id, request.units)
            case JobVerb.STOP:
                self.stop()
            case JobVerb.LIST:
                pass
        return {"jobs": [msgspec.to_builtins(row) for row in self._scheduler.table()]}

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Pause, then see who could lend and who wants units back."""
        if not self._lend_after_s:
            await self._stopping.wait()
            return
        with suppress(TimeoutError):
            pause_s = min(self._lend_after_s / _LOOKS, _LOOK_S)
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        now, changed = self._clock.now_s(), False
        for row in self._scheduler.table():
            demand = self._demands.get(row.spec.job_id)
            if demand is None or row.state is not JobState.RUNNING or row.is_guest:
                continue
            cores = demand.since(now)
            units = self._lending.look(row.spec.job_id, row.spec.units, cores, now)
            if units != row.lent:
                self._scheduler.lend(row.spec.job_id, units)
                changed = True
        if changed:
            self._act(tasks)

    def _act(self, tasks: asyncio.TaskGroup) -> None:
        if self._stopping.is_set():
            return
        actions = self._scheduler.plan()
        self._save()
        for action in actions:
            if action.kind is ActionKind.PREEMPT:
                self._terminate(action.job_id)
            else:
                tasks.create_task(self._attend(tasks, action.job_id))

    def _take_over(self, tasks: asyncio.TaskGroup) -> None:
        for row in self._scheduler.table():
            survivor = self._survivors.pop(row.spec.job_id, None)
            if survivor is not None and row.state in (JobState.RUNNING, JobState.STOPPING):
                tasks.create_task(self._wait_for(tasks, row.spec.job_id, survivor))

    async def _attend(self, tasks: asyncio.TaskGroup, job_id: str) -> None:
        folder = self._directory / job_id
        folder.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "burnish.cli.main", "run", *self._words(job_id, folder)]
        with (folder / "log.txt").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *words,
                "--json",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        note_process(folder, process.pid)
        if self._stopping.is_set() or job_id in self._cancelled or self._is_stopping(job_id):
            with suppress(ProcessLookupError):
                process.terminate()
        await self._wait_for(tasks, job_id, process)

    async def _wait_for(
        self, tasks: asyncio.TaskGroup, job_id: str, process: asyncio.subprocess.Process | Survivor
    ) -> None:
        self._processes[job_id] = process
        self._demands[job_id] = Demand(process.pid, self._clock.now_s())
        status = await process.wait()
        del self._processes[job_id], self._demands[job_id]
        self._lending.forget(job_id)
        self._scheduler.ended(job_id, self._verdict(job_id, status))
        self._save()
        self._act(tasks)

    def _words(self, job_id: str, folder: Path) -> list[str]:
        run = newest_run(folder)
        if run is not None:
            return ["--resume", str(run)]
        return [*self._lines[job_id], "--set", f"run.directory={folder}"]

    def _verdict(self, job_id: str, status: int) -> JobState:
        if job_id in self._cancelled:
            return JobState.CANCELLED
        if status == 0:
            return JobState.DONE
        asked = self._stopping.is_set() or self._is_stopping(job_id)
        # Before its handlers are installed a process dies of the signal itself; nothing is lost.
        gave_way = asked and status in (_INTERRUPTED, -signal.SIGTERM)
        return JobState.QUEUED if gave_way else JobState.FAILED

    def _is_stopping(self, job_id: str) -> bool:
        rows = {row.spec.job_id: row.state for row in self._scheduler.table()}
        return rows[job_id] is JobState.STOPPING

    def _terminate(self, job_id: str) -> None:
        process = self._processes.get(job_id)
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()

    def _save(self) -> None:
        content = {"scheduler": self._scheduler.state(), "lines": self._lines}
        write_atomically(self._file, msgspec.json.encode(content))


def _load(file: Path) -> _Saved:
    with _damage_told(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            return _Saved()
        saved = msgspec.json.decode(file.read_bytes(), type=_Saved)
        if not saved.scheduler:
            raise msgspec.ValidationError("it names no jobs")
        return saved


def _require_lines(scheduler: JobScheduler, lines: Mapping[str, list[str]]) -> None:
    for row in scheduler.table():
        if row.state not in OVER and not lines.get(row.spec.job_id):
            raise msgspec.ValidationError(f"it does not say what {row.spec.job_id} runs")


@contextmanager
def _damage_told(file: Path) -> Iterator[None]:
    """Turn what a file system refuses, and a list that makes no sense, into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{file.parent}: cannot hold jobs ({error.strerror}).",
            fix="name a directory where you may write with --directory.",
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(
            f"{file}: not a list of jobs ({error}).",
            fix="put the file back, or move it away to begin with no jobs.",
        ) from error


def is_served(directory: Path) -> bool:
    """Whether a daemon answers there: it must not lose its socket to another."""
    try:
        ask(jobs_socket(directory), JobRequest(verb=JobVerb.LIST))
    except SilentError:
        return True
    except UserError:
        return False
    return True
