"""Collects rollouts: episodes of one task at once, failures classified, retried and counted.

A failure of the machine or the sandbox is retried with a fresh episode and the same seed, because
it says nothing about the policy. One of the environment or the verifier would only repeat itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from burnish.core.boxes import SandboxPool
from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure
from burnish.core.group_id import group_id
from burnish.core.protocols import Engine, Environment, EpisodeContext, Renderer
from burnish.core.records import Failure, Group, Rollout, Task
from burnish.core.seeds import derive_seed
from burnish.core.vocabulary import FailureKind, Split
from burnish.rollout.agent.episode import EpisodePlan, failed_rollout, run_episode

RETRIED = frozenset({FailureKind.INFRA, FailureKind.SANDBOX})


class Sampling(NamedTuple):
    """How the tokens of an episode are drawn."""

    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass."""


class Presence(NamedTuple):
    """Told when an episode begins and ends: the engine's barrier in deterministic mode."""

    enter: Callable[[int], None]
    """So many episodes are about to ask the engine for tokens."""
    leave: Callable[[], None]
    """One of them will not ask again."""


class Watch(Protocol):
    """Told of attempts as they happen; decides about retries and urgency."""

    def asks(self, task: Task, group_id: str, turn: int) -> int:
        """A turn is about to ask the engine: its priority, higher first."""
        ...

    async def may_begin(self, group_id: str, sample: int) -> None:
        """Return when this sample of a group may begin."""
        ...

    def sandboxes(self, pool: SandboxPool, group_id: str) -> SandboxPool:
        """The pool that an episode of this group gets instead of `pool`."""
        ...

    def attempt(self, task: Task, group_id: str, failure: Failure | None, attempts: int) -> bool:
        """The latest of so many attempts ended; True to try again after a failure."""
        ...


class Collector:
    """Runs episodes against one engine. All methods run on one event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        context: Callable[[int], EpisodeContext],
        clock: Clock,
        presence: Presence | None = None,
        max_attempts: int = 3,
        step_timeout_s: float = 30.0,
        on_failure: Callable[[Failure], None] = lambda failure: None,
        watch: Watch | None = None,
    ) -> None:
        """Wire it.

        Args:
            engine: answers the prompts.
            renderer: messages to tokens and back.
            context: makes an episode's context from its seed.
            clock: measures durations.
            presence: the barrier of deterministic mode; durations are then recorded as 0.0.
            max_attempts: tries for one episode when the machine or the sandbox fails.
            step_timeout_s: bound on each call into an environment.
            on_failure: told of every failure, retried or not.
            watch: flow control; without it every episode has its `max_attempts`.
        """
        self._engine, self._renderer, self._context, self._clock = engine, renderer, context, clock
        self._presence, self._max_attempts = presence, max_attempts
        self._step_timeout_s, self._on_failure = step_timeout_s, on_failure
        self.watch = watch

    def reserve(self, num_episodes: int) -> None:
        """Announce episodes before any of them starts.

        In deterministic mode the engine waits until every announced episode has asked or ended, so
        all that are meant to share a batch must be announced together, without an await between.
        Each announced episode must be run by `rollout`, or through `group`.
        """
        if self._presence is not None:
            self._presence.enter(num_episodes)

    async def group(
        self,
        environment: Environment,
        index: int,
        *,
        num_samples: int,
        root_seed: int,
        sampling: Sampling,
        version: int,
        visit: int = 0,
    ) -> Group:
        """All samples of training item `index`, judged. Reserve `num_samples` first.

        Each `visit` of an item samples with randomness of its own.
        """
        task = environment.task(Split.TRAIN, index)
        name = group_id(environment.name, index, visit)
        seeds = [derive_seed(root_seed, "train", name, n) for n in range(num_samples)]
        rollouts = await asyncio.gather(
            *(
                self.rollout(environment, task, sample=n, seed=seed, sampling=sampling, visit=visit)
                for n, seed in enumerate(seeds)
            )
        )
        return Group(
            group_id=name,
            domain=environment.name,
            index=index,
            dispatched_version=version,
            rollouts=tuple(rollouts),
        )

    async def rollout(
        self,
        environment: Environment,
        task: Task,
        *,
        sample: int,
        seed: int,
        sampling: Sampling,
        visit: int = 0,
    ) -> Rollout:
        """One episode with retries, reserved before. A classified failure becomes its outcome."""
        name = group_id(task.domain, task.index, visit)
        plan = EpisodePlan(
            rollout_id=f"{name}/{sample}",
            group_id=name,
            task=task,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            step_timeout_s=self._step_timeout_s,
        )
        try:
            if self.watch is not None:
                await self.watch.may_begin(name, sample)
            return await self._attempts(plan, environment)
        finally:
            if self._presence is not None:
                self._presence.leave()

    async def _attempts(self, plan: EpisodePlan, environment: Environment) -> Rollout:
        start_s = self._clock.now_s()
        for attempt in range(1, self._max_attempts + 1):
            try:
                rollout = await run_episode(
                    plan,
                    engine=self._engine,
                    renderer=self._renderer,
                    environment=environment,
                    context=self._context_of(plan),
                    priority=self._priority(plan),
                )
            except ClassifiedFailure as error:
                self._on_failure(error.failure)
                if self._tries_again(plan, error.failure, attempt):
                    continue
                prompt = self._renderer.prompt(plan.task.prompt, environment.tools)
                rollout = failed_rollout(plan, environment, prompt, error.failure)
            else:
                if self.watch is not None:
                    self.watch.attempt(plan.task, plan.group_id, None, attempt)
            elapsed_s = 0.0 if self._presence is not None else self._clock.now_s() - start_s
            return msgspec.structs.replace(rollout, duration_s=elapsed_s)
        raise AssertionError("the last attempt returns")

    def _context_of(self, plan: EpisodePlan) -> EpisodeContext:
        context = self._context(plan.seed)
        if self.watch is None:
            return context
        return context._replace(sandboxes=self.watch.sandboxes(context.sandboxes, plan.group_id))

    def _tries_again(self, plan: EpisodePlan, failure: Failure, attempts: int) -> bool:
        may = failure.kind in RETRIED and attempts < self._max_attempts
        if self.watch is None:
            return may
        return self.watch.attempt(plan.task, plan.group_id, failure, attempts) and may

    def _priority(self, plan: EpisodePlan) -> Callable[[int], int]:
        watch = self.watch
        if watch is None:
            return lambda turn: 0
        return lambda turn: watch.asks(plan.task, plan.group_id, turn)
