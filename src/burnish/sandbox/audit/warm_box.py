"""Boxes of a template with a log: a Python job is in it like the command that it stands for."""

from burnish.core.boxes import ExecResult, Limits
from burnish.sandbox.audit import events
from burnish.sandbox.audit.box import AuditedStatefulBox
from burnish.sandbox.audit.log import BoxLog
from burnish.sandbox.audit.logs import AuditLogs
from burnish.sandbox.native.protocol import PythonKind
from burnish.sandbox.native.python_jobs import WarmBox

_SWITCHES: dict[PythonKind, tuple[str, ...]] = {
    PythonKind.CODE: ("-c",),
    PythonKind.SCRIPT: (),
    PythonKind.MODULE: ("-m",),
}


class AuditedWarmBox(AuditedStatefulBox):
    """A `WarmBox` with a log."""

    def __init__(self, box: WarmBox, log: BoxLog, logs: AuditLogs, created: events.Created) -> None:
        """See `AuditedStatefulBox`."""
        super().__init__(box, log, logs, created)
        self._warm = box

    async def python(
        self,
        source: str,
        *,
        kind: PythonKind = PythonKind.CODE,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
        isolated: bool = True,
    ) -> ExecResult:
        """See `WarmBox.python`. Without a log the job does not run: `INFRA_ERROR`."""
        switches = (*(("-I",) if isolated else ()), "-B", *_SWITCHES[kind])
        command = ("python3", *switches, source, *argv)
        return await self._command(
            self._started(command, stdin=stdin, limits=limits, env=env, cwd=cwd, keep=keep),
            lambda: self._warm.python(
                source,
                kind=kind,
                argv=argv,
                stdin=stdin,
                limits=limits,
                env=env,
                cwd=cwd,
                keep=keep,
                isolated=isolated,
            ),
        )
