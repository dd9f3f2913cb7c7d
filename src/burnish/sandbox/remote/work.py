"""What a server does in a box, verb by verb."""

import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, cast

import msgspec

from burnish.core.boxes import ExecStatus, NetworkedSandbox
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.files import check_limit
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.exposition import Observed
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.outputs import Outputs
from burnish.sandbox.remote.problems import Refused
from burnish.sandbox.remote.spool import Spool
from burnish.sandbox.remote.tenants import Owner, Tenant, Tenants

Work = Callable[[], Coroutine[Any, Any, Record]]


class _Call(NamedTuple):
    """What a verb works on."""

    tenant: Tenant
    owner: Owner
    """Who asks: not always whose the box is."""


class Worker:
    """Turns messages into calls of a box."""

    def __init__(
        self,
        tenants: Tenants,
        spool: Spool,
        outputs: Outputs,
        info: Callable[[Tenant], m.BoxInfo],
    ) -> None:
        """Work on these boxes and files; `info` describes a box."""
        self._outputs = outputs
        self._tenants = tenants
        self._spool = spool
        self._info = info
        self._num_running = 0
        self._num_commands = 0
        self.observed = Observed()
        self._verbs: dict[str, tuple[type[Any], Callable[[_Call, Any], Awaitable[Record]]]] = {
            "exec": (m.Exec, self._exec),
            "write": (m.WriteFile, self._write),
            "read": (m.ReadFile, self._read),
            "allow": (m.SetAllow, self._set_allow),
            "snapshot": (m.Done, self._snapshot),
            "rollback": (m.Rollback, self._rollback),
            "forget": (m.Forget, self._forget),
            "fork": (m.Fork, self._fork),
            "export": (m.Export, self._export),
            "import": (m.Import, self._import),
        }

    def prepare(self, box: str, owner: Owner, verb: str, body: bytes) -> Work:
        """Check a request of a client; what is returned does it.

        Raises:
            Refused: there is no such box or verb, or no command may have such limits here.
            Malformed: the body is not the message of this verb.
        """
        if verb not in self._verbs:
            raise Refused(ProblemKind.MALFORMED, f"boxes have no {verb[:40]!r}")
        kind, act = self._verbs[verb]
        message = m.decode(body, kind)
        if isinstance(message, m.Exec):
            self._outputs.check(message.limits)

        async def work() -> Record:
            # Looked up when it runs: a request that is sent again finds its answer even if the
            # box is gone by then.
            return await act(_Call(self._tenants.get(box, owner.user), owner), message)

        return work

    def stats(self, **others: Any) -> m.Stats:
        """Counts of this side, with `others` beside them."""
        return m.Stats(
            pid=os.getpid(),
            num_boxes=len(self._tenants),
            num_waiting=self._tenants.num_waiting,
            num_running=self._num_running,
            num_created=self._tenants.num_created,
            num_commands=self._num_commands,
            num_infra_errors=self.observed.commands[ExecStatus.INFRA_ERROR],
            **others,
        )

    async def _exec(self, call: _Call, message: m.Exec) -> Record:
        async with self._outputs.room(message.limits, call.owner.user):
            return await self._exec_now(call.tenant, message)

    async def _exec_now(self, tenant: Tenant, message: m.Exec) -> Record:
        self._num_running += 1
        self._num_commands += 1
        tenant.num_commands += 1
        begun_s = time.perf_counter()
        try:
            result = await tenant.box.exec(
                tuple(os.fsdecode(argument) for argument in message.argv),
                stdin=message.stdin,
                limits=message.limits,
                env={name: os.fsdecode(value) for name, value in message.env.items()},
                cwd=None if message.cwd is None else os.fsdecode(message.cwd),
                keep=message.keep,
            )
        finally:
            self._num_running -= 1
        self.observed.commands[result.status] += 1
        self.observed.command_s.add(time.perf_counter() - begun_s)
        return result

    async def _write(self, call: _Call, message: m.WriteFile) -> Record:
        await call.tenant.box.write_file(os.fsdecode(message.path), message.data)
        return m.Done()

    async def _read(self, call: _Call, message: m.ReadFile) -> Record:
        path = os.fsdecode(message.path)
        check_limit(message.limit_bytes)
        return m.FileData(data=await call.tenant.box.read_file(path, message.limit_bytes))

    async def _set_allow(self, call: _Call, message: m.SetAllow) -> Record:
        policy = msgspec.structs.replace(call.tenant.policy, allow=message.allow)
        await cast(NetworkedSandbox, call.tenant.box).set_allow(message.allow)
        call.tenant.policy = policy
        return m.Done()

    async def _snapshot(self, call: _Call, _: m.Done) -> Record:
        snapshot = await self._tenants.stateful(call.tenant).snapshot()
        self._tenants.remember(call.tenant, snapshot)
        return snapshot

    async def _rollback(self, call: _Call, message: m.Rollback) -> Record:
        box = self._tenants.stateful(call.tenant)
        snapshot = self._tenants.snapshot(call.tenant, message.snapshot)
        assert snapshot is not None
        await box.rollback(snapshot)
        return m.Done()

    async def _forget(self, call: _Call, message: m.Forget) -> Record:
        await self._tenants.forget(call.tenant, message.snapshot)
        return m.Done()

    async def _fork(self, call: _Call, message: m.Fork) -> Record:
        made = await self._tenants.fork(call.owner, call.tenant, message.count, message.snapshot)
        return m.Boxes(boxes=tuple(map(self._info, made)))

    async def _export(self, call: _Call, message: m.Export) -> Record:
        box = self._tenants.stateful(call.tenant)
        snapshot = self._tenants.snapshot(call.tenant, message.snapshot)
        name, path = self._spool.new(call.owner)
        try:
            digest = await box.export_tar(path, snapshot)
            size = path.stat().st_size
            self._spool.charge(name, size)
        except BaseException:
            self._spool.remove(name)
            raise
        return m.Exported(digest=digest, file=name, num_bytes=size)

    async def _import(self, call: _Call, message: m.Import) -> Record:
        box = self._tenants.stateful(call.tenant)
        path = self._spool.find(message.file)
        try:
            await box.import_tar(path)
        except UserError:
            raise
        except ValueError as error:
            # Where files lie on this host is nobody else's business.
            raise ValueError(str(error).removeprefix(f"{path}: ")) from error
        finally:
            self._spool.remove(message.file)
        return m.Done()
