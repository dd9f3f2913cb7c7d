"""The loop of reinforcement learning: one file, top to bottom.

    scheduler --pick--> dispatch --> collector (engine, sandbox, verifier) --Group--> complete
        ^                  ^                                                             |
        |            admission (bounded lag)                                             v
        '----observe----------------------------------------------- store, ledger, shelf
                                                                                |
    served weights <-- canary <-- publish <-- trainer <-- credit <-- batch (dispatch order)

| task     | consumes         | produces             | waits for               | unblocked by     |
|----------|------------------|----------------------|-------------------------|------------------|
| dispatch | admission's room | running groups       | nothing                 | complete, step   |
| collect  | a pick           | a stored group       | engine, sandbox         | their answers    |
| complete | a stored group   | a group on the shelf | earlier dispatches (*)  | collect          |
| train    | a planned batch  | new master weights   | a ready batch           | complete         |
| publish  | master weights   | a served version     | the canary, all runs (*) | engine, complete |

(*) in deterministic mode only: there every decision happens in dispatch order and at fixed points
of the training sequence, so the wall clock decides nothing. The mode is a policy of admission
(`fixed_lag`), not another loop.

Step numbers: everything between the publication of step s - 1 and that of step s belongs to step
s. What a checkpoint after step s does not hold is undone by a resume, and done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from burnish.core.errors import ClassifiedFailure
from burnish.core.group_id import parse_group_id
from burnish.core.records import Failure, Group
from burnish.core.vocabulary import DropReason, FailureKind
from burnish.run.batch import drop_reason, make_batch, trained_tokens
from burnish.run.intake import Start
from burnish.run.loop_parts import LoopConfig, LoopParts
from burnish.schedule.admission import GroupState
from burnish.schedule.batcher import BatchStatus, plan_batch
from burnish.schedule.breakers.retries import RETRIED
from burnish.telemetry.events import EventKind

_BREAKER_LOOK_S = 1.0


class Loop:
    """Runs steps until the last one, or until asked to stop. One event loop, no locks."""

    def __init__(self, config: LoopConfig, parts: LoopParts, *, finished_steps: int = 0) -> None:
        """Go on after so many finished steps; the parts are in the state of that moment."""
        self._config, self._parts = config, parts
        self._finished_steps = finished_steps
        self._saved_steps = finished_steps if finished_steps else -1
        self._collecting: dict[str, asyncio.Task[None]] = {}
        self._order: list[str] = []
        self._done: dict[str, Group] = {}
        self._shelf: dict[str, Group] = {}
        self._changed = asyncio.Event()
        self._stopping = self._paused = False
        self._snapshot = self._state()

    @property
    def finished_steps(self) -> int:
        """Steps that are trained and published."""
        return self._finished_steps

    def stop(self) -> None:
        """End after the step in progress, with a checkpoint. Call from the event loop's thread."""
        self._stopping = True
        self._changed.set()

    @property
    def paused(self) -> bool:
        """Whether it stands still on request."""
        return self._paused

    def pause(self, *, paused: bool = True) -> None:
        """Start and train nothing new, or go on. What runs is finished and kept."""
        self._paused = paused
        self._changed.set()

    def leave(self, domain: str) -> None:
        """A domain was removed: nothing of it trains any more."""
        for group_id in [g for g, group in self._shelf.items() if group.domain == domain]:
            self._drop(group_id, DropReason.QUARANTINED)
        self._changed.set()

    async def run(self) -> bool:
        """Train until the last step; True if it was reached, False if stopped before.

        Raises:
            ExceptionGroup: holding the ClassifiedFailure or the bug that ended it.
        """
        async with asyncio.TaskGroup() as tasks:
            self._watch_flow(tasks)
            self._restart(tasks)
            self._dispatch(tasks)
            while self._finished_steps < self._config.num_steps and not self._stopping:
                groups = await self._next_batch(tasks)
                if groups is not None:
                    await self._step(groups)
                    self._dispatch(tasks)
            for task in self._collecting.values():
                task.cancel()
        reached = self._finished_steps >= self._config.num_steps
        if reached:
            for entry in self._parts.admission.entries():
                self._drop(entry.group_id, DropReason.SURPLUS)
            self._snapshot = self._state()
        await self._checkpoint()
        return reached

    # Dispatch and collection.

    def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """Start as many groups as the lag bound allows. No await inside: see Collector.reserve."""
        parts, started = self._parts, []
        flow = parts.flow
        while not self._stopping and not self._paused and parts.admission.may_dispatch():
            if flow is not None and not flow.may_start(self._config.group_size):
                break
            start = parts.intake.next(self._finished_steps)
            if start is None:
                break
            parts.admission.dispatched(start.group_id)
            started.append(start)
        if not started:
            return
        with parts.directory.ledger.transaction():
            for group_id, domain, choice in started:
                parts.directory.ledger.dispatch(
                    group_id,
                    domain,
                    choice.item,
                    choice.size,
                    self._current_step(),
                    parts.admission.version,
                )
        self._collect_all(tasks, started)

    def _restart(self, tasks: asyncio.TaskGroup) -> None:
        """After a resume: put stored groups back on the shelf, sample the others again."""
        running = []
        for entry in self._parts.admission.entries():
            if entry.state is GroupState.WAITING:
                group = self._parts.directory.rollouts.get_group(entry.group_id)
                assert group is not None, f"{entry.group_id} waits but was never stored"
                self._shelf[entry.group_id] = group
            else:
                domain = parse_group_id(entry.group_id).domain
                choice = self._parts.intake.choice(entry.group_id)
                running.append(Start(entry.group_id, domain, choice))
        self._collect_all(tasks, running)

    def _collect_all(self, tasks: asyncio.TaskGroup, started: Sequence[Start]) -> None:
        stored = self._stored(started)
        for start in started:
            group_id = start.group_id
            self._order.append(group_id)
            if group_id in stored:
                self._done[group_id] = stored[group_id]
                continue
            self._parts.collector.reserve(start.choice.size)
            task = tasks.create_task(self._collect(tasks, start))
            self._collecting[group_id] = task
        self._absorb(tasks)

    def _stored(self, started: Sequence[Start]) -> dict[str, Group]:
        """Groups that were sampled before the run was stopped and need not be again."""
        store, stored, useless = self._parts.directory.rollouts, {}, []
        for start in started:
            group = store.get_group(start.group_id) if start.group_id in store else None
            if group is not None and len(group.rollouts) == start.choice.size:
                stored[start.group_id] = group
            elif group is not None:
                useless.append(start.group_id)
        if self._config.deterministic and len(stored) < len(started):
            # What shares a batch is sampled together or not at all: a part of it would be
            # computed in another batch, with other roundings.
            useless += stored
            stored = {}
        store.discard(useless)
        return stored

    async def _collect(self, tasks: asyncio.TaskGroup, start: Start) -> None:
        group_id, domain, choice = start
        group = await self._parts.collector.group(
            self._parts.environments[domain],
            choice.item,
            num_samples=choice.size,
            root_seed=self._config.seed,
            sampling=self._config.sampling,
            version=self._parts.admission.version,
            visit=choice.visit,
        )
        self._collecting.pop(group_id, None)
        self._parts.directory.rollouts.append(group)
        self._done[group_id] = group
        self._absorb(tasks)

    def _current_step(self) -> int:
        """The step that what happens now belongs to; what follows the last one belongs to it."""
        return min(self._finished_steps + 1, self._config.num_steps)

    # What flow control sets off.

    def _watch_flow(self, tasks: asyncio.TaskGroup) -> None:
        flow = self._parts.flow
        if flow is not None:
            flow.on_opened = lambda domain, kind: self._pause_domain(tasks, domain, kind)
            flow.on_abandon = self._give_up
            flow.on_room = lambda: self._dispatch(tasks)

    def _pause_domain(self, tasks: asyncio.TaskGroup, domain: str, kind: FailureKind) -> None:
        """A breaker opened: others get its room at once.

        What is sampled behind it ends, unless the environment itself is at fault: then the gate
        must see how often, and such failures are quick.
        """
        self._parts.reporter.paused(domain, kind.value)
        for group_id in [g for g in self._collecting if parse_group_id(g).domain == domain]:
            if kind in RETRIED:
                self._give_up(group_id)
        self._dispatch(tasks)

    def _give_up(self, group_id: str) -> None:
        task, flow = self._collecting.pop(group_id, None), self._parts.flow
        if task is None or flow is None:
            return
        task.cancel()
        self._order.remove(group_id)
        flow.cancelled(group_id)
        self._drop(group_id, DropReason.INVALID, judged=False)

    # Completion.

    def _absorb(self, tasks: asyncio.TaskGroup) -> None:
        """Take finished groups in: at once, or in deterministic mode in dispatch order."""
        ready = [group_id for group_id in self._order if group_id in self._done]
        if self._config.deterministic:
            ready = [g for g, due in zip(ready, self._order, strict=False) if g == due]
        for group_id in ready:
            self._order.remove(group_id)
            self._complete(self._done.pop(group_id))
        if ready:
            self._changed.set()
            self._dispatch(tasks)

    def _complete(self, group: Group) -> None:
        parts = self._parts
        parts.directory.ledger.complete(group.group_id, self._current_step())
        parts.reporter.group(group)
        parts.intake.judged(group, self._finished_steps)
        parts.health.judged(group)
        if parts.flow is not None:
            parts.flow.completed(group)
        reason = drop_reason(group)
        if group.domain not in parts.scheduler.active():
            reason = DropReason.QUARANTINED
        if reason is None:
            oldest = min(r.oldest_version for r in group.rollouts if r.num_sampled_tokens)
            parts.admission.completed(group.group_id, oldest)
            self._shelf[group.group_id] = group
        else:
            parts.health.excluded(group)
            self._drop(group.group_id, reason)

    def _drop(self, group_id: str, reason: DropReason, *, judged: bool = True) -> None:
        intake = self._parts.intake
        size = intake.choice(group_id).size
        self._parts.admission.dropped(group_id, reason)
        if judged:
            intake.ended(group_id, 0.0)
        else:
            intake.cancelled(group_id)
        self._parts.directory.ledger.drop(group_id, reason, self._current_step())
        self._parts.reporter.dropped(group_id, reason, size)
        self._shelf.pop(group_id, None)

    def _quarantine(self) -> None:
        """Shut out environments whose own code keeps failing, by name, from the next step on."""
        for domain, failure in self._parts.health.unfit().items():
            if domain not in self._parts.scheduler.active():
                continue
            self._parts.scheduler.quarantine(domain, failure.message)
            self._parts.reporter.quarantined(domain, failure)
            for group_id in [g for g, held in self._shelf.items() if held.domain == domain]:
                self._parts.health.excluded(self._shelf[group_id])
                self._drop(group_id, DropReason.QUARANTINED)
        if not self._parts.scheduler.active():
            raise _nothing_left()

    # Training.

    async def _next_batch(self, tasks: asyncio.TaskGroup) -> list[Group] | None:
        """The next batch in dispatch order, or None when asked to stop."""
        while not self._stopping:
            self._changed.clear()
            if self._paused:
                await self._changed.wait()
                continue
            plan = plan_batch(self._parts.admission)
            for group_id in plan.stale:
                self._drop(group_id, DropReason.STALE)
            if plan.status is BatchStatus.READY:
                self._parts.admission.trained(plan.group_ids)
                return [self._shelf.pop(group_id) for group_id in plan.group_ids]
            self._parts.reporter.waiting(plan)
            self._dispatch(tasks)
            with suppress(TimeoutError):
                # A breaker that closes tells nobody: look again now and then.
                await asyncio.wait_for(self._changed.wait(), _BREAKER_LOOK_S)
        return None

    async def _step(self, groups: Sequence[Group]) -> None:
        """Train on a batch, publish, and close the step."""
        parts, step = self._parts, self._finished_steps + 1
        batch = make_batch(groups, parts.scale, self._config.normaliser)
        metrics = await parts.trainer.step(batch.sequences) if batch.sequences else None
        if metrics is not None:
            parts.intake.trained(metrics.num_stored_tokens, metrics.seconds)
        for group in groups:
            parts.health.trained(group)
            parts.intake.ended(group.group_id, float(trained_tokens(group)))
        with parts.directory.ledger.transaction():
            for group_id, num_invalid in batch.num_invalid.items():
                parts.directory.ledger.drop(group_id, DropReason.INVALID, step, num_invalid)
                parts.reporter.dropped(group_id, DropReason.INVALID, num_invalid)
            parts.directory.ledger.train([g.group_id for g in groups], step)
        parts.directory.rollouts.append_advantages(step, batch.advantages)
        while not parts.admission.may_publish():
            self._changed.clear()
            await self._changed.wait()
        version = parts.admission.version + 1
        publication = await parts.publisher.publish(version)
        parts.reporter.step(
            step,
            groups,
            metrics,
            publication,
            parts.scheduler,
            parts.intake.texts(),
            parts.health.length_bias(),
        )
        parts.admission.published(version)
        self._quarantine()
        if parts.flow is not None:
            parts.reporter.cases(step, parts.flow.take_cases())
        self._finished_steps = step
        self._snapshot = self._state()
        is_last = step == self._config.num_steps
        if step % self._config.checkpoint_every_steps == 0 and not is_last:
            await self._checkpoint()

    # What a resume needs.

    def _state(self) -> dict[str, Any]:
        parts = self._parts
        return {
            "step": self._finished_steps,
            "roster": parts.roster.state(),
            "scheduler": parts.scheduler.state(),
            "intake": parts.intake.state(),
            "admission": parts.admission.state(),
            "scale": parts.scale.state(),
            "health": parts.health.state(),
        }

    async def _checkpoint(self) -> None:
        """Save the state of the end of the last finished step, once."""
        if self._saved_steps == self._finished_steps:
            return
        step, snapshot = self._finished_steps, self._snapshot
        await self._parts.trainer.save(self._parts.directory.checkpoints, step, snapshot)
        self._saved_steps = step
        self._parts.directory.events.emit(EventKind.CHECKPOINT_SAVED, step)


def _nothing_left() -> ClassifiedFailure:
    message = "every environment is quarantined; `burnish check` shows why"
    failure = Failure(kind=FailureKind.ENVIRONMENT, where="scheduler", message=message)
    return ClassifiedFailure(failure)
