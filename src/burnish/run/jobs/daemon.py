"""Starts, preempts and resumes runs as the job scheduler says.

A job is `burnish run` in a process of its own. To preempt one it is sent SIGTERM: the run saves a
checkpoint and ends with status 130, and `--resume` goes on from there. The list of jobs is on the
disk before anything is started; a daemon that was killed resumes all that was running.

While jobs wait, the daemon looks at what the running ones demand, and has those that wait for
something else lend their units (`schedule/jobs/lending.py`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from burnish.core.clock import Clock
from burnish.core.disk import write_atomically
from burnish.core.errors import UserError
from burnish.run.control.client import SilentError, ask
from burnish.run.control.messages import Answer
from burnish.run.control.server import serve_control
from burnish.run.jobs.demand import Demand
from burnish.run.jobs.messages import JobRequest, JobVerb, jobs_socket, parse_job
from burnish.schedule.jobs.base import ActionKind, JobsConfig, JobSpec, JobState
from burnish.schedule.jobs.lending import Lending
from burnish.schedule.jobs.scheduler import JobScheduler

_INTERRUPTED = 130
# Looks for each quiet time of a job, and the longest pause between two.
_LOOKS = 6
_LOOK_S = 5.0


class JobsDaemon:
    """One per directory, which its socket and its lock by `serve_control` see to."""

    def __init__(self, directory: Path, config: JobsConfig, clock: Clock) -> None:
        """Take up the list of jobs that is there.

        Raises:
            UserError: another version wrote it.
        """
        self._directory, self._clock = directory, clock
        self._lending, self._lend_after_s = Lending(config.lend_after_s), config.lend_after_s
        self._demands: dict[str, Demand] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "jobs.json"
        self._lines: dict[str, list[str]] = {}
        self._scheduler = JobScheduler(config, clock)
        if self._file.exists():
            saved = msgspec.json.decode(self._file.read_bytes())
            self._lines = saved["lines"]
            self._scheduler = JobScheduler.from_state(saved["scheduler"], config, clock)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._cancelled: set[str] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop; then preempt what runs, and wait for it.

        Raises:
            UserError: another daemon serves this directory.
        """
        async with asyncio.TaskGroup() as tasks:
            async with serve_control(jobs_socket(self._directory), self._answerer(tasks)):
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
        self._processes[job_id] = process
        self._demands[job_id] = Demand(process.pid, self._clock.now_s())
        if self._stopping.is_set() or job_id in self._cancelled or self._is_stopping(job_id):
            self._terminate(job_id)
        status = await process.wait()
        del self._processes[job_id], self._demands[job_id]
        self._lending.forget(job_id)
        self._scheduler.ended(job_id, self._verdict(job_id, status))
        self._save()
        self._act(tasks)

    def _words(self, job_id: str, folder: Path) -> list[str]:
        runs = [p for p in folder.iterdir() if (p / "manifest.json").exists()]
        if runs:
            return ["--resume", str(max(runs, key=lambda p: p.stat().st_mtime))]
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


def is_served(directory: Path) -> bool:
    """Whether a daemon answers there: it must not lose its socket to another."""
    try:
        ask(jobs_socket(directory), JobRequest(verb=JobVerb.LIST))
    except SilentError:
        return True
    except UserError:
        return False
    return True
