r"""Who runs: gangs by priority, then by fair share; places are taken back by checkpoint.

    queued --start--> running --preempt--> stopping --ended--> queued
                         \------ended----------------------> done, failed

Order of the queue: what is within its tenant's quota first, then priority plus age, then the tenant
with the least decayed use (Slurm's fair share, with a charge at entry as Kueue has it), then first
come. A gang that does not fit may take the places of jobs of lower priority, and, up to its
tenant's quota, those of tenants beyond theirs; only if that makes enough room, and beyond its own
quota never the place of another tenant within theirs, who would take it straight back. What it
waits for is kept for it. A job may lend units that it does not need at the moment; guests on them
give way as soon as it wants them back.

Pure: time comes from a clock, and nothing is started here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from burnish.core.clock import Clock
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.schedule.jobs.base import (
    OVER,
    Action,
    ActionKind,
    JobRow,
    JobsConfig,
    JobSpec,
    JobState,
)
from burnish.schedule.state_version import require_version

STATE_VERSION = 1


class _State(Record, frozen=True, kw_only=True):
    """What `state` returns."""

    version: int
    """Of the format."""
    usage: dict[str, float]
    """Decayed unit-seconds by tenant."""
    jobs: list[tuple[JobSpec, JobState, float, int]]
    """What was asked for, where it stands, its age in seconds and times it was started."""


class _Job:
    """A job and its history."""

    def __init__(self, spec: JobSpec, submitted_s: float, number: int) -> None:
        self.spec, self.submitted_s, self.number = spec, submitted_s, number
        self.state = JobState.QUEUED
        self.is_guest = False
        self.lent = 0
        self.num_starts = 0
        self.charged_s = 0.0
        self.rank = spec.priority

    @property
    def holds(self) -> int:
        return self.spec.units if self.state in (JobState.RUNNING, JobState.STOPPING) else 0


class JobScheduler:
    """See the module text."""

    def __init__(self, config: JobsConfig, clock: Clock) -> None:
        """Nothing is queued."""
        self._config, self._clock = config, clock
        self._jobs: dict[str, _Job] = {}
        self._usage: dict[str, tuple[float, float]] = {}
        self._number = 0

    def submit(self, spec: JobSpec) -> None:
        """Queue a job.

        Raises:
            UserError: it can never run here, or its id is taken.
        """
        if not 1 <= spec.units <= self._config.units:
            raise UserError(
                f"{spec.job_id} asks for {spec.units} units, this machine has "
                f"{self._config.units}.",
                fix=f"ask for 1 to {self._config.units}.",
            )
        if spec.job_id in self._jobs:
            raise UserError(f"there is a job {spec.job_id} already.", fix="choose another name.")
        self._number += 1
        self._jobs[spec.job_id] = _Job(spec, self._clock.now_s(), self._number)

    def cancel(self, job_id: str) -> bool:
        """Give a job up; True if it is running and has to be ended.

        Raises:
            UserError: there is none.
        """
        job = self._get(job_id)
        if job.state is JobState.QUEUED:
            job.state = JobState.CANCELLED
        return job.holds > 0

    def ended(self, job_id: str, state: JobState) -> None:
        """A job that held units ended: QUEUED if it gave way, else a final state."""
        job = self._get(job_id)
        assert job.holds, f"{job_id} held nothing"
        assert state in OVER or state is JobState.QUEUED
        self._charge(job)
        job.state, job.is_guest, job.lent = state, False, 0
        job.submitted_s = self._clock.now_s() if state is JobState.QUEUED else job.submitted_s

    def lend(self, job_id: str, units: int) -> None:
        """A running job can do without `units` for now; 0 takes all of them back."""
        job = self._get(job_id)
        if job.state is JobState.RUNNING and not job.is_guest:
            # One unit stays: a job that holds nothing cannot take anything back.
            job.lent = max(min(units, job.spec.units - 1), 0)

    def plan(self) -> list[Action]:
        """What to do now; the jobs named are in their new states when this returns."""
        actions = self._evict_guests()
        own, lent = self._free()
        for job in self._queue():
            if job.spec.units <= own:
                own -= job.spec.units
                actions.append(self._start(job, guest=False))
                continue
            if job.spec.units <= own + lent:
                lent -= job.spec.units - max(own, 0)
                own = min(own, 0)
                actions.append(self._start(job, guest=True))
                continue
            coming = sum(j.spec.units for j in self._jobs.values() if j.state is JobState.STOPPING)
            victims = self._victims(job, job.spec.units - own - coming)
            actions += [self._preempt(victim) for victim in victims]
            # What is free or becomes free is kept for it; nobody smaller slips in before.
            break
        return actions

    def table(self) -> tuple[JobRow, ...]:
        """All jobs, those that wait in the order of the queue."""
        rest = [j for j in self._jobs.values() if j.state is not JobState.QUEUED]
        return tuple(
            JobRow(
                spec=j.spec,
                state=j.state,
                is_guest=j.is_guest,
                lent=j.lent,
                num_starts=j.num_starts,
            )
            for j in (*rest, *self._queue())
        )

    def usage(self, tenant: str) -> float:
        """Decayed unit-seconds of a tenant, what runs now included."""
        amount, at_s = self._usage.get(tenant, (0.0, 0.0))
        now = self._clock.now_s()
        total = amount * math.exp2(-(now - at_s) / self._config.half_life_s)
        for job in self._jobs.values():
            if job.spec.tenant == tenant and job.holds:
                total += (now - job.charged_s) * job.holds
        return total

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values. Times become ages."""
        now = self._clock.now_s()
        return {
            "version": STATE_VERSION,
            "usage": {tenant: self.usage(tenant) for tenant in self._tenants()},
            "jobs": [
                [msgspec.to_builtins(j.spec), str(j.state), now - j.submitted_s, j.num_starts]
                for j in self._jobs.values()
            ],
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        config: JobsConfig,
        clock: Clock,
        *,
        alive: Collection[str] = (),
    ) -> JobScheduler:
        """Continue; what was running when the daemon died waits again, for its checkpoint.

        Args:
            state: of `state`.
            config: of now; it may offer less than before.
            clock: of now.
            alive: jobs whose processes go on; they keep their units. Who lent what to whom is
                forgotten, so those that do not fit beside each other are guests, and give way.

        Raises:
            UserError: if another version of the program wrote it.
            msgspec.ValidationError: if it makes no sense.
        """
        require_version(state, STATE_VERSION, "list of jobs")
        saved = msgspec.convert(state, _State)
        scheduler, now = cls(config, clock), clock.now_s()
        scheduler._usage = {tenant: (used, now) for tenant, used in saved.usage.items()}
        free = config.units
        for spec, was, age_s, num_starts in saved.jobs:
            scheduler._number += 1
            job = _Job(spec, now - age_s, scheduler._number)
            job.state = was if was in OVER or spec.job_id in alive else JobState.QUEUED
            job.num_starts, job.charged_s = num_starts, now
            job.is_guest = job.holds > free
            free -= 0 if job.is_guest else job.holds
            scheduler._jobs[spec.job_id] = job
        return scheduler

    def _free(self) -> tuple[int, int]:
        """Units free of anybody, and units lent and not taken."""
        own = sum(j.holds for j in self._jobs.values() if not j.is_guest)
        guests = sum(j.holds for j in self._jobs.values() if j.is_guest)
        lent = sum(j.lent for j in self._jobs.values())
        free = self._config.units - own
        spare = free + lent - guests
        # Guests sit on lent units first; on free ones only if those do not suffice.
        return min(free, spare), max(spare - free, 0)

    def _evict_guests(self) -> list[Action]:
        own, lent = self._free()
        short = -(own + lent)
        actions = []
        guests = [j for j in self._jobs.values() if j.is_guest and j.state is JobState.RUNNING]
        leaving = sum(
            j.holds for j in self._jobs.values() if j.is_guest and j.state is JobState.STOPPING
        )
        short -= leaving
        for job in sorted(guests, key=lambda j: (j.rank, -j.number)):
            if short <= 0:
                break
            actions.append(self._preempt(job))
            short -= job.spec.units
        return actions

    def _queue(self) -> list[_Job]:
        now = self._clock.now_s()
        use = {tenant: self.usage(tenant) for tenant in self._tenants()}

        def key(job: _Job) -> tuple[float, float, int]:
            return (-self._aged(job, now), use[job.spec.tenant], job.number)

        waiting = sorted((j for j in self._jobs.values() if j.state is JobState.QUEUED), key=key)
        # Jobs use their tenant's quota up in this order; what it covers goes before all else.
        left = {t: self._config.quotas.get(t, 0) - self._held(t) for t in use}
        covered: list[_Job] = []
        others: list[_Job] = []
        for job in waiting:
            left[job.spec.tenant] -= job.spec.units
            (covered if left[job.spec.tenant] >= 0 else others).append(job)
        return covered + others

    def _aged(self, job: _Job, now_s: float) -> int:
        return job.spec.priority + int((now_s - job.submitted_s) // self._config.ageing_s)

    def _victims(self, job: _Job, missing: int) -> list[_Job]:
        """Who gives way to it: lowest priority first, youngest first; nobody if not enough."""
        if missing <= 0:
            return []
        quotas = self._config.quotas
        held = {t: self._held(t) for t in self._tenants()}
        entitled = held[job.spec.tenant] + job.spec.units <= quotas.get(job.spec.tenant, 0)
        chosen: list[_Job] = []
        running = [j for j in self._jobs.values() if j.state is JobState.RUNNING]
        for other in sorted(running, key=lambda j: (j.rank, -j.number)):
            if missing <= 0:
                break
            tenant = other.spec.tenant
            own = tenant == job.spec.tenant
            beyond = held[tenant] > quotas.get(tenant, 0)
            lower = other.rank < job.spec.priority
            if (lower and (own or beyond or entitled)) or (entitled and beyond and not own):
                chosen.append(other)
                held[tenant] -= other.spec.units
                missing -= other.spec.units
        return chosen if missing <= 0 else []

    def _held(self, tenant: str) -> int:
        return sum(j.holds for j in self._jobs.values() if j.spec.tenant == tenant)

    def _start(self, job: _Job, *, guest: bool) -> Action:
        job.state, job.is_guest = JobState.RUNNING, guest
        job.num_starts += 1
        # What waiting earned it stays with it: else the next in the queue would take its place.
        job.rank = self._aged(job, self._clock.now_s())
        job.charged_s = self._clock.now_s()
        self._add_usage(job.spec.tenant, self._config.entry_s * job.spec.units)
        return Action(ActionKind.START, job.spec.job_id)

    def _preempt(self, job: _Job) -> Action:
        job.state = JobState.STOPPING
        return Action(ActionKind.PREEMPT, job.spec.job_id)

    def _charge(self, job: _Job) -> None:
        now = self._clock.now_s()
        self._add_usage(job.spec.tenant, (now - job.charged_s) * job.holds)
        job.charged_s = now

    def _add_usage(self, tenant: str, amount: float) -> None:
        before, at_s = self._usage.get(tenant, (0.0, 0.0))
        now = self._clock.now_s()
        faded = before * math.exp2(-(now - at_s) / self._config.half_life_s)
        self._usage[tenant] = (faded + amount, now)

    def _tenants(self) -> set[str]:
        return {j.spec.tenant for j in self._jobs.values()} | set(self._usage)

    def _get(self, job_id: str) -> _Job:
        if job_id not in self._jobs:
            raise UserError(f"there is no job {job_id[:80]!r}.", fix="burnish jobs list")
        return self._jobs[job_id]
