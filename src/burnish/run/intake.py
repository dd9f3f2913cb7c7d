"""What starts next: a domain, an item of it, and how many samples; and what became of it.

    scheduler --domain--> curriculum --item, samples--> long? --no--> start
                                                          |
                                                          '-yes--> waits for its round --> start

Every choice is remembered until its group is trained or dropped, and is part of the checkpoint:
groups in flight are sampled again after a resume, with the same samples of the same items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from burnish.core.errors import boundary
from burnish.core.group_id import group_id, parse_group_id
from burnish.core.protocols import Environment, Tiered
from burnish.core.records import Group
from burnish.core.vocabulary import FailureKind, Split
from burnish.run.batch import computed_tokens
from burnish.run.flow import FlowControl, image_of
from burnish.schedule.curriculum.curriculum import Choice, Curriculum
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.flow.resources import GroupCosts
from burnish.schedule.flow.rounds import LongTail

# Items of paused images passed over in one go: beyond that the next event may look again.
_MOST_REFUSALS = 64


class Start(NamedTuple):
    """A group to be sampled."""

    group_id: str
    """Its name."""
    domain: str
    """Environment name."""
    choice: Choice
    """What of it."""


class Intake:
    """Between the scheduler and the loop; one event loop, no locks."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        scheduler: DomainScheduler,
        curriculum: Curriculum,
        flow: FlowControl | None,
        rounds: LongTail | None,
        costs: GroupCosts,
    ) -> None:
        """Choose among `environments`; without `rounds` nothing waits for its like."""
        self._environments, self._scheduler = environments, scheduler
        self._curriculum, self._flow, self._rounds = curriculum, flow, rounds
        self._costs = costs
        self._choices: dict[str, Choice] = {}
        self._ready: deque[str] = deque()
        self.on_round: Callable[[int], None] = lambda num_groups: None
        for environment in environments.values():
            self.add(environment)

    def add(self, environment: Environment) -> None:
        """Choose items of a further domain."""

        def tier_of(item: int) -> int:
            assert isinstance(environment, Tiered)
            return environment.tier(environment.task(Split.TRAIN, item))

        num_tiers = environment.num_tiers if isinstance(environment, Tiered) else 1
        self._curriculum.add(environment.name, num_tiers, tier_of)

    def remove(self, domain: str) -> None:
        """Choose no more items of `domain`."""
        self._curriculum.remove(domain)

    def next(self, step: int) -> Start | None:
        """What to start now, or None; `step` is the batch that is being collected."""
        for _ in range(_MOST_REFUSALS):
            start = self._due(step) or self._picked(step)
            if start is None:
                return None
            if self._may_start(start):
                return start
            self.cancelled(start.group_id)
        return None

    def choice(self, name: str) -> Choice:
        """What a group in flight samples."""
        return self._choices[name]

    def judged(self, group: Group, step: int) -> None:
        """Teach scheduler and curriculum what came back."""
        choice = self._choices[group.group_id]
        scored = [r.verdict for r in group.rollouts if r.verdict.score is not None]
        # A group without a single score taught nothing, but was paid for.
        scores = [v.score for v in scored if v.score is not None] or [0.0]
        mean = sum(scores) / len(scores)
        num_passed = sum(bool(v.passed) for v in scored)
        self._curriculum.judged(group.domain, choice, len(scored), num_passed)
        seconds, tokens = sum(r.duration_s for r in group.rollouts), float(computed_tokens(group))
        box_s = self._flow.box_seconds(group.group_id) if self._flow is not None else 0.0
        self._scheduler.observe(
            group.domain,
            pass_rate=num_passed / max(len(scored), 1),
            mean_score=mean,
            num_rollouts=len(scored),
            step=step,
            cost_s=seconds,
            cost_tokens=tokens,
            cost_dominant=self._costs.cost(episodes_s=seconds, box_s=box_s, num_tokens=tokens),
            score_std=(sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5,
            band=self._curriculum.band(group.domain, choice),
            rehearsed=choice.visit > 0,
        )

    def cancelled(self, name: str) -> None:
        """A group will not be judged: its domain gets back what it was charged."""
        domain = parse_group_id(name).domain
        self._scheduler.cancelled(domain)
        self._curriculum.cancelled(domain, self._choices[name])
        self._choices.pop(name)

    def ended(self, name: str, trained_tokens: float) -> None:
        """A judged group was trained, or dropped with 0 tokens."""
        self._scheduler.settle(parse_group_id(name).domain, trained_tokens)
        self._choices.pop(name)

    def trained(self, num_tokens: int, seconds: float) -> None:
        """A batch took the trainer so long."""
        self._costs.trained(num_tokens, seconds)

    def texts(self) -> dict[str, str]:
        """Which items are chosen in each domain, and why."""
        return {domain: self._curriculum.text(domain) for domain in self._scheduler.active()}

    def state(self) -> dict[str, Any]:
        """All that `load` needs, as JSON values."""
        return {
            "curriculum": self._curriculum.state(),
            "choices": {name: [c.tier, c.size] for name, c in self._choices.items()},
            "ready": list(self._ready),
            "rounds": self._rounds.state() if self._rounds is not None else [],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; nothing was chosen yet."""
        self._curriculum.load(state["curriculum"])
        for name, (tier, size) in state["choices"].items():
            parsed = parse_group_id(name)
            self._choices[name] = Choice(parsed.item, parsed.visit, tier, size)
        self._ready.extend(state["ready"])
        if self._rounds is not None:
            self._rounds.load(state["rounds"])
        else:
            # Rounds were turned off since: what waited for one starts now.
            self._ready.extend(name for name, _ in state["rounds"])

    def _due(self, step: int) -> Start | None:
        """The next group of a round that has begun."""
        if self._rounds is not None and not self._ready:
            self._ready.extend(self._rounds.round(step))
            if self._ready:
                self.on_round(len(self._ready))
        if not self._ready:
            return None
        name = self._ready.popleft()
        return Start(name, parse_group_id(name).domain, self._choices[name])

    def _picked(self, step: int) -> Start | None:
        """The scheduler's next pick that need not wait."""
        while True:
            pick = self._scheduler.next(self._flow.blocked() if self._flow is not None else ())
            if pick is None:
                return None
            # What an environment says about tiers is its own code.
            with boundary(FailureKind.ENVIRONMENT, f"envs.{pick.domain}.tier"):
                choice = self._curriculum.choose(pick.domain)
            name = group_id(pick.domain, choice.item, choice.visit)
            self._choices[name] = choice
            if not self._defers(name, pick.domain, step):
                return Start(name, pick.domain, choice)
            # Ends: a round that is full begins at once.
            if (start := self._due(step)) is not None:
                return start

    def _defers(self, name: str, domain: str, step: int) -> bool:
        if self._rounds is None or self._flow is None:
            return False
        expected, usual = self._flow.expected_tokens(domain)
        return self._rounds.defers(name, expected, usual, step)

    def _may_start(self, start: Start) -> bool:
        if start.domain not in self._scheduler.active():
            return False
        if self._flow is None:
            return True
        task = self._environments[start.domain].task(Split.TRAIN, start.choice.item)
        if self._flow.refuses(start.domain, task):
            return False
        self._flow.dispatched(start.group_id, start.domain, image_of(task), start.choice.size)
        return True
