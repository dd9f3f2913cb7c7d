"""A box on a server, as its user sees it."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from burnish.core.boxes import ExecResult, Limits, Snapshot, StatefulSandbox
from burnish.core.disk import replaceable, replacing
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Record
from burnish.sandbox.commands import check_argv
from burnish.sandbox.descriptors import in_threads
from burnish.sandbox.files import check_limit, split_path
from burnish.sandbox.limits import check_enforced, check_limits
from burnish.sandbox.outcome import infra_error
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure

if TYPE_CHECKING:
    from burnish.sandbox.remote.client import RemotePool

R = TypeVar("R", bound=Record)
_BOX_ID = re.compile(r"[0-9a-z]{1,64}")


class RemoteBox:
    """A box on a server."""

    def __init__(self, pool: "RemotePool", box_id: str) -> None:
        """A box that the server has under this id.

        Raises:
            RemoteFailure: no server has a box of such a name.
        """
        self._pool = pool
        self._path = box_path(box_id, pool.url)
        self.id = box_id

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Sandbox.write_file`.

        Raises:
            ValueError: `path` leaves `/work`, or `data` is more than the server takes.
            OSError: what the box's file system said.
            ClassifiedFailure: the box or the server is gone.
        """
        split_path(path)
        await self._job("write", m.WriteFile(path=os.fsencode(path), data=data), m.Done)

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.read_file`.

        Raises:
            ValueError: `path` leaves `/work`, or the limit is no number of bytes.
            FileTooLargeError: it has more than `limit_bytes`.
            FileNotFoundError: absent, or not a regular file.
            ClassifiedFailure: the box or the server is gone.
        """
        split_path(path)
        check_limit(limit_bytes)
        request = m.ReadFile(path=os.fsencode(path), limit_bytes=limit_bytes)
        return (await self._job("read", request, m.FileData)).data

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
        """See `Sandbox.exec`. A server that is lost meanwhile is `ExecStatus.INFRA_ERROR`.

        Raises:
            ValueError: the command, environment or limits could not run on any machine.
            UserError: a limit, or `keep`, that the server does not have.
        """
        try:
            return await self.exec_or_raise(
                argv, stdin=stdin, limits=limits, env=env, cwd=cwd, keep=keep
            )
        except (OSError, ClassifiedFailure) as error:
            return infra_error(str(error))

    async def exec_or_raise(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
    ) -> ExecResult:
        """As `exec`, but what is wrong with the box or the server is raised.

        Raises:
            ValueError: the command, environment or limits could not run on any machine.
            UserError: a limit, or `keep`, that the server does not have.
            ClassifiedFailure: the box or the server is gone.
        """
        limits = limits or Limits()
        check_argv(argv, env or {}, cwd)
        check_limits(limits)
        check_enforced(limits, self._pool.capabilities)
        request = m.Exec(
            argv=tuple(os.fsencode(argument) for argument in argv),
            stdin=stdin,
            limits=limits,
            env={name: os.fsencode(value) for name, value in (env or {}).items()},
            cwd=None if cwd is None else os.fsencode(cwd),
            keep=keep,
        )
        return await self._job("exec", request, ExecResult)

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """See `NetworkedSandbox.set_allow`.

        Raises:
            UserError: a malformed entry, or a network that the server cannot give.
            ClassifiedFailure: the box or the server is gone.
        """
        await self._job("allow", m.SetAllow(allow=allow), m.Done)

    async def _job(self, verb: str, message: Record, kind: type[R]) -> R:
        path = f"{self._path}/{verb}"
        return await self._pool.run(lambda: self._pool.wire.job(path, message, kind))


class RemoteStatefulBox(RemoteBox):
    """A box on a server whose boxes have snapshots."""

    async def snapshot(self) -> Snapshot:
        """See `StatefulSandbox.snapshot`; valid on this server."""
        return await self._job("snapshot", m.Done(), Snapshot)

    async def rollback(self, snapshot: Snapshot) -> None:
        """See `StatefulSandbox.rollback`.

        Raises:
            UserError: the server has no such snapshot.
        """
        await self.rollback_to(snapshot.id)

    async def rollback_to(self, snapshot_id: str) -> None:
        """The same, by id."""
        await self._job("rollback", m.Rollback(snapshot=snapshot_id), m.Done)

    async def forget(self, snapshot: Snapshot) -> None:
        """See `StatefulSandbox.forget`."""
        await self.forget_id(snapshot.id)

    async def forget_id(self, snapshot_id: str) -> None:
        """The same, by id."""
        await self._job("forget", m.Forget(snapshot=snapshot_id), m.Done)

    @asynccontextmanager
    async def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AsyncIterator[tuple[StatefulSandbox, ...]]:
        """See `StatefulSandbox.fork`."""
        made = await self.fork_boxes(count, None if snapshot is None else snapshot.id)
        try:
            yield tuple(RemoteStatefulBox(self._pool, info.id) for info in made)
        finally:
            await asyncio.gather(*(self._pool.release(info.id) for info in made))

    async def fork_boxes(self, count: int, snapshot_id: str | None = None) -> tuple[m.BoxInfo, ...]:
        """Boxes that start alike and live as long as this one might.

        Raises:
            ValueError: the server has not so many.
            RemoteFailure: of kind BUSY: not so many were free in the time that the pool waits.
        """
        most = self._pool.max_boxes
        if not 1 <= count <= most:
            raise ValueError(f"asked for {count} boxes at once: 1 to {most} can be had")
        request = m.Fork(count=count, snapshot=snapshot_id)
        return (await self._pool.claim(f"{self._path}/fork", request, m.Boxes)).boxes

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        """See `StatefulSandbox.export_tar`; `destination` is whole or untouched.

        Raises:
            OSError: it cannot be written.
            UserError: what is there is no regular file.
        """
        return await self.export_to(destination, None if snapshot is None else snapshot.id)

    async def export_to(self, destination: Path, snapshot_id: str | None = None) -> str:
        """The same, by id."""
        await asyncio.to_thread(replaceable, destination)
        request = m.Export(snapshot=snapshot_id)
        made = await self._job("export", request, m.Exported)
        async with in_threads(replacing(destination)) as file:
            wire = self._pool.wire
            await self._pool.run(lambda: wire.download(made.file, file, made.num_bytes))
        return made.digest

    async def import_tar(self, source: Path) -> None:
        """See `StatefulSandbox.import_tar`.

        Raises:
            OSError: it cannot be read.
            ValueError: the archive tries to leave the box, or is larger than the server takes.
        """
        file = await asyncio.to_thread(open, source, "rb")
        try:
            name = await self._pool.run(lambda: self._pool.wire.upload(file))
        finally:
            await asyncio.to_thread(file.close)
        try:
            await self._job("import", m.Import(file=name), m.Done)
        except UserError:
            raise
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error


def box_path(box_id: str, url: str) -> str:
    """Where a server has a box.

    Raises:
        RemoteFailure: no box has such a name.
    """
    if not _BOX_ID.fullmatch(box_id):
        raise RemoteFailure(ProblemKind.NO_BOX, url, "there is no box of that name")
    return f"/v4/boxes/{box_id}"
