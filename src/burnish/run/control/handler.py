"""Carries requests out on a live loop.

Everything runs on the loop's own event loop, between its awaits, so a request sees and changes
whole states only. What was changed is part of the next checkpoint.
"""

from __future__ import annotations

from typing import Any

import msgspec

from burnish.core.errors import UserError
from burnish.quality.audit import audit
from burnish.quality.gate import Gate
from burnish.run.control.messages import Answer, Request, Verb, parse
from burnish.run.loop import Loop
from burnish.run.loop_parts import LoopParts
from burnish.run.session import Session
from burnish.schedule.picks import DomainShare
from burnish.schedule.wishes import check_wishes
from burnish.telemetry.events import EventKind


class ControlHandler:
    """Answers the control socket of one run."""

    def __init__(self, session: Session, loop: Loop, parts: LoopParts) -> None:
        """Wire it."""
        self._session, self._loop, self._parts = session, loop, parts
        self._adding: set[str] = set()

    async def __call__(self, line: bytes) -> Answer:
        """Do what a line asks for, and say so.

        Raises:
            UserError: it cannot be done.
        """
        request = parse(line)
        if isinstance(request, str):
            return Answer(ok=False, error=request)
        match request.verb:
            case Verb.STATUS:
                return Answer(ok=True, result=self._status())
            case Verb.PAUSE:
                self._loop.pause()
            case Verb.RESUME:
                self._loop.pause(paused=False)
            case Verb.STOP:
                self._loop.stop()
            case Verb.ADD:
                await self._add(request)
            case Verb.REMOVE:
                self._remove(_domain(request))
            case Verb.SHARE:
                self._declare(request)
        data = {k: v for k, v in msgspec.to_builtins(request).items() if v is not None}
        step = self._loop.finished_steps
        self._session.directory.events.emit(EventKind.CONTROLLED, step, **data)
        return Answer(ok=True, result=data)

    def _status(self) -> dict[str, Any]:
        parts, flow = self._parts, self._parts.flow
        rows, engine = parts.scheduler.table(), self._session.engine.stats()
        return {
            "step": self._loop.finished_steps,
            "num_steps": self._session.config.run.steps,
            "paused": self._loop.paused,
            "groups": msgspec.to_builtins(parts.admission.counts()),
            "domains": [msgspec.to_builtins(row, enc_hook=float) | row.brief() for row in rows],
            "why": {row.domain: parts.scheduler.explain(row.domain).text for row in rows},
            "items": parts.intake.texts(),
            "figures": dict(parts.reporter.figures),
            "engine": {"running": engine.num_running, "waiting": engine.num_waiting},
            "breakers": [msgspec.to_builtins(row) for row in flow.table()] if flow else [],
            "flow": flow.status() if flow else {},
        }

    async def _add(self, request: Request) -> None:
        name, parts = _domain(request), self._parts
        if name in self._adding or name in self._domains():
            raise UserError(f"{name} is trained already.", fix="burnish control status RUN")
        if name in parts.environments or name in parts.roster.removed:
            raise UserError(
                f"{name} was removed from this run, and its items are used up to where it was.",
                fix="register it under another name.",
            )
        share = _share(DomainShare(), request)
        environment = parts.roster.build(name, request.environment)
        # Before the gate, which can take minutes, and after it, when others may be there.
        declared = parts.scheduler.state()["shares"]
        others = {other: DomainShare(**values) for other, values in declared.items()}
        check_wishes({**others, name: share}, self._session.config.schedule.floor)
        self._adding.add(name)
        try:
            report = await audit(environment, self._session.pool, self._session.config.quality)
        finally:
            self._adding.discard(name)
        reason = Gate().admit([report]).quarantined.get(name)
        if reason is not None:
            raise UserError(
                f"{name} does not pass the quality gate: {reason}.",
                fix=f"burnish check {request.environment or name} shows why.",
            )
        parts.scheduler.add(name, share)
        parts.environments[name] = environment
        parts.intake.add(environment)
        parts.roster.add(environment, request.environment)
        self._loop.pause(paused=self._loop.paused)

    def _remove(self, name: str) -> None:
        self._expect(name)
        if len(self._domains()) == 1:
            raise UserError(f"{name} is the last domain.", fix="burnish control stop RUN")
        self._parts.scheduler.remove(name)
        self._parts.intake.remove(name)
        self._parts.roster.remove(name)
        self._loop.leave(name)

    def _declare(self, request: Request) -> None:
        name = _domain(request)
        self._expect(name)
        before = DomainShare(**self._parts.scheduler.state()["shares"][name])
        self._parts.scheduler.declare(name, _share(before, request))
        if request.false_pass is not None:
            self._parts.scheduler.audited(name, request.false_pass)

    def _expect(self, name: str) -> None:
        if name not in self._domains():
            raise UserError(
                f"this run does not train {name[:80]!r}.",
                fix=f"use one of {', '.join(self._domains())}.",
            )

    def _domains(self) -> list[str]:
        return [row.domain for row in self._parts.scheduler.table()]


def _share(before: DomainShare, request: Request) -> DomainShare:
    given = {
        "weight": request.weight,
        "min_share": request.min_share,
        "max_share": request.max_share,
    }
    return before.model_copy(update={k: v for k, v in given.items() if v is not None})


def _domain(request: Request) -> str:
    assert request.domain, "checked when it was parsed"
    return request.domain
