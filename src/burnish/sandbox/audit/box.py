"""Boxes whose every operation is in a log.

What changes a box is written down before it is tried: a job that takes the machine with it has left
its command behind, and a log that cannot be written stops the job. What only reads is written down
afterwards. An operation that raises, or whose caller gives up, gets a `failed` line.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar, cast, runtime_checkable

import msgspec

from burnish.core.boxes import (
    ExecResult,
    ExecStatus,
    Limits,
    NetworkedSandbox,
    Sandbox,
    Snapshot,
    StatefulSandbox,
)
from burnish.core.errors import one_line
from burnish.sandbox.audit import events
from burnish.sandbox.audit.log import AuditFailure, BoxLog
from burnish.sandbox.audit.logs import AuditLogs
from burnish.sandbox.forwarding import ForwardingBox, ForwardingStatefulBox
from burnish.sandbox.outcome import infra_error

Result = TypeVar("Result")

_LIMIT_STATUSES = frozenset(
    {ExecStatus.TIMEOUT, ExecStatus.OOM, ExecStatus.PIDS, ExecStatus.DISK, ExecStatus.OUTPUT}
)


@runtime_checkable
class HasLayers(Protocol):
    """A box that can name what it stands on."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Digests or ids of the layers below the writable one, lowest first."""
        ...


class AuditedBox(ForwardingBox):
    """A `Sandbox` with a log."""

    def __init__(self, box: Sandbox, log: BoxLog, layers: tuple[str, ...] = ()) -> None:
        """Wrap a box.

        Args:
            box: where operations go.
            log: begins with the `create` line.
            layers: what the box stands on, for backends that cannot name it themselves.
        """
        super().__init__(box)
        self._log = log
        self._base = layers
        self._knows_layers = box if isinstance(box, HasLayers) else None

    @property
    def log(self) -> BoxLog:
        """For decisions that are made outside the box, such as those of a proxy."""
        return self._log

    @property
    def layers(self) -> tuple[str, ...]:
        """What the box stands on; without help of the backend, the last snapshot."""
        return self._base if self._knows_layers is None else self._knows_layers.layers

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Sandbox.write_file`.

        Raises:
            AuditFailure: nothing was written.
        """
        place = self._log.append(
            events.Put(path=events.cut_text(path), num_bytes=len(data), digest=events.digest(data))
        )
        await self._try("put", place.number, lambda: self._box.write_file(path, data))

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.read_file`.

        Raises:
            AuditFailure: what was read may not be used, as nobody would know.
        """
        data = await self._try("get", None, lambda: self._box.read_file(path, limit_bytes))
        self._log.append(
            events.Got(path=events.cut_text(path), num_bytes=len(data), digest=events.digest(data))
        )
        return data

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
    ) -> ExecResult:
        """See `Sandbox.exec`. Without a log the command does not run: `INFRA_ERROR`."""
        return await self._command(
            self._started(argv, stdin=stdin, limits=limits, env=env, cwd=cwd, keep=keep),
            lambda: self._box.exec(argv, stdin=stdin, limits=limits, env=env, cwd=cwd, keep=keep),
        )

    def _started(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes,
        limits: Limits | None,
        env: dict[str, str] | None,
        cwd: str | None,
        keep: bool,
    ) -> events.Started:
        return events.Started(
            argv=events.cut_argv(argv),
            argv_digest=events.digest_of_text(argv),
            env_digest=events.digest_of_env(env),
            cwd=events.cut_text(cwd or ""),
            stdin_digest=events.digest(stdin),
            keep=keep,
            limits=limits or Limits(),
            layers=self.layers,
        )

    async def _command(
        self, started: events.Started, call: Callable[[], Awaitable[ExecResult]]
    ) -> ExecResult:
        try:
            place = self._log.append(started)
        except AuditFailure as error:
            return infra_error(error.failure.message)
        result = await self._try("exec", place.number, call)
        try:
            self._log.append(self._ended(place.number, result))
        except AuditFailure as error:
            return infra_error(error.failure.message)
        return result

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """See `NetworkedSandbox.set_allow`.

        Raises:
            AuditFailure: the list is the old one.
        """
        place = self._log.append(events.AllowChanged(allow=allow))
        box = cast(NetworkedSandbox, self._box)
        await self._try("allow", place.number, lambda: box.set_allow(allow))

    def _ended(self, number: int, result: ExecResult) -> events.Ended:
        hit = result.status.value if result.status in _LIMIT_STATUSES else None
        return events.Ended(
            of=number,
            status=result.status,
            exit_code=result.exit_code,
            signal=result.signal,
            truncated=result.truncated,
            usage=result.usage,
            limit_hit=hit or (ExecStatus.OUTPUT.value if result.truncated else None),
            stdout_digest=events.digest(result.stdout),
            stderr_digest=events.digest(result.stderr),
            message=events.cut_text(result.message),
            layers=self.layers,
        )

    async def _try(
        self, operation: str, number: int | None, call: Callable[[], Awaitable[Result]]
    ) -> Result:
        try:
            return await call()
        except BaseException as error:
            # Cancellation too: somebody stopped waiting for what was announced.
            self._note_failure(operation, number, error)
            raise

    def _note_failure(self, operation: str, number: int | None, error: BaseException) -> None:
        failed = events.Failed(operation=operation, of=number, error=one_line(error))
        try:
            self._log.append(failed)
        except AuditFailure as failure:
            error.add_note(f"and the audit log does not say so: {failure}")


class AuditedStatefulBox(AuditedBox, ForwardingStatefulBox):
    """A `StatefulSandbox` with a log."""

    def __init__(
        self,
        box: StatefulSandbox,
        log: BoxLog,
        logs: AuditLogs,
        created: events.Created,
    ) -> None:
        """Wrap a box.

        Args:
            box: where operations go.
            log: begins with `created`.
            logs: where those of forks go.
            created: what forks inherit.
        """
        super().__init__(box, log, (created.snapshot,) if created.snapshot else ())
        self._logs = logs
        self._created = created

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """See `NetworkedSandbox.set_allow`; forks begin with the new list.

        Raises:
            AuditFailure: the list is the old one.
        """
        await super().set_allow(allow)
        policy = msgspec.structs.replace(self._created.policy, allow=allow)
        self._created = msgspec.structs.replace(
            self._created, policy=policy, policy_digest=events.digest_of_record(policy)
        )

    async def snapshot(self) -> Snapshot:
        """See `StatefulSandbox.snapshot`.

        Raises:
            AuditFailure: the snapshot was made but not written down, and is not handed out.
        """
        snapshot = await self._try("snapshot", None, self._stateful.snapshot)
        self._log.append(events.Snapshotted(snapshot=snapshot.id, num_layers=snapshot.num_layers))
        self._base = (snapshot.id,)
        return snapshot

    async def rollback(self, snapshot: Snapshot) -> None:
        """See `StatefulSandbox.rollback`.

        Raises:
            AuditFailure: nothing was rolled back.
        """
        place = self._log.append(events.RolledBack(snapshot=snapshot.id))
        await self._try("rollback", place.number, lambda: self._stateful.rollback(snapshot))
        self._base = (snapshot.id,)

    async def forget(self, snapshot: Snapshot) -> None:
        """See `StatefulSandbox.forget`. It changes no box, so no log has a line of it."""
        await self._stateful.forget(snapshot)

    def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AbstractAsyncContextManager[tuple[StatefulSandbox, ...]]:
        """See `StatefulSandbox.fork`; every fork has a log of its own.

        Raises:
            AuditFailure: nothing was forked, or the forks are gone again.
        """
        return self._fork(count, snapshot)

    @asynccontextmanager
    async def _fork(
        self, count: int, snapshot: Snapshot | None
    ) -> AsyncIterator[tuple[StatefulSandbox, ...]]:
        name = snapshot.id if snapshot else None
        place = self._log.append(events.Forked(count=count, snapshot=name))
        with ExitStack() as ends:
            async with AsyncExitStack() as stack:
                boxes = await self._try(
                    "fork",
                    place.number,
                    lambda: stack.enter_async_context(self._stateful.fork(count, snapshot)),
                )
                created = _inherit(self._created, self.id, name)
                forks = []
                for box in boxes:
                    log = self._logs.begin(box, created, place.hash)
                    ends.enter_context(self._logs.ending(log))
                    forks.append(AuditedStatefulBox(box, log, self._logs, created))
                yield tuple(forks)

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        """See `StatefulSandbox.export_tar`."""
        digest = await self._try(
            "export", None, lambda: self._stateful.export_tar(destination, snapshot)
        )
        self._log.append(events.Exported(snapshot=snapshot.id if snapshot else None, digest=digest))
        return digest

    async def import_tar(self, source: Path) -> None:
        """See `StatefulSandbox.import_tar`.

        Raises:
            AuditFailure: nothing was imported.
        """
        digest = await asyncio.to_thread(_digest_of_file, source)
        place = self._log.append(events.Imported(digest=digest))
        await self._try("import", place.number, lambda: self._stateful.import_tar(source))


def _inherit(created: events.Created, parent: str, snapshot: str | None) -> events.Created:
    return events.Created(
        backend=created.backend,
        isolation=created.isolation,
        kernel=created.kernel,
        image=created.image,
        image_digest=created.image_digest,
        policy=created.policy,
        policy_digest=created.policy_digest,
        parent=parent,
        snapshot=snapshot,
    )


def _digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
