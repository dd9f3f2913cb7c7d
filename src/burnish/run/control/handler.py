"""Carries requests out on a live loop. Everything runs on the loop's own event loop, between its
awaits, so a request sees and changes whole states only.
"""

from __future__ import annotations

import msgspec

from burnish.core.errors import UserError
from burnish.quality.audit import audit
from burnish.quality.gate import Gate
from burnish.run.control.messages import Answer, Request, Verb
from burnish.run.loop import Loop
from burnish.run.session import Session
from burnish.schedule.picks import DomainShare
from burnish.telemetry.events import EventKind


class ControlHandler:
    """Answers the control socket of one run."""

    def __init__(self, session: Session, loop: Loop) -> None:
        """Wire it."""
        self._session, self._loop = session, loop
        self._adding: set[str] = set()

    async def __call__(self, request: Request) -> Answer:
        """Do it and say so.

        Raises:
            UserError: it cannot be done.
        """
        match request.verb:
            case Verb.STATUS:
                return Answer(ok=True, result=self._loop.status())
            case Verb.PAUSE:
                self._loop.pause()
            case Verb.RESUME:
                self._loop.go_on()
            case Verb.STOP:
                self._loop.stop()
            case Verb.ADD:
                await self._add(request)
            case Verb.REMOVE:
                self._loop.remove_domain(_domain(request))
            case Verb.SHARE:
                self._loop.declare(_domain(request), self._share(request))
        data = {k: v for k, v in msgspec.to_builtins(request).items() if v is not None}
        step = self._loop.finished_steps
        self._session.directory.events.emit(EventKind.CONTROLLED, step, **data)
        return Answer(ok=True, result=data)

    async def _add(self, request: Request) -> None:
        name = _domain(request)
        if name in self._adding or self._loop.trains(name):
            raise UserError(f"{name} is trained already.", fix="burnish control status RUN")
        environment = self._loop.roster.build(name, request.environment)
        self._adding.add(name)
        try:
            report = await audit(environment, self._session.pool, self._session.config.quality)
            reason = Gate().admit([report]).quarantined.get(name)
            if reason is not None:
                raise UserError(
                    f"{name} does not pass the quality gate: {reason}.",
                    fix=f"burnish check {request.environment or name} shows why.",
                )
            self._loop.add_domain(environment, request.environment, self._share(request))
        finally:
            self._adding.discard(name)

    def _share(self, request: Request) -> DomainShare:
        before = self._loop.share_of(_domain(request))
        given = {
            "weight": request.weight,
            "min_share": request.min_share,
            "max_share": request.max_share,
        }
        return before.model_copy(update={k: v for k, v in given.items() if v is not None})


def _domain(request: Request) -> str:
    assert request.domain, "checked when it was parsed"
    return request.domain
