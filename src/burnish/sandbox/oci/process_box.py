"""A box of containers whose kept processes are saved and restored together with its files.

exec(keep) --> container stays --.            save: dump each (they are gone then), copy files,
exec(keep) --> container stays --+-- kept           start each again from its images
exec       --> ... then all kept end          restore: files into new storage, start each there;
                                                    only then end the old ones and change over
"""

import asyncio
import secrets
import shutil
from pathlib import Path

import msgspec

from burnish.core.boxes import ExecResult, ExecStatus, Limits
from burnish.sandbox.keeper.process import START_DEADLINE_S, Command, Launched, Run, uninterrupted
from burnish.sandbox.keeper.protocol import Exec
from burnish.sandbox.keeper.storage import Storage
from burnish.sandbox.oci.box import OciBox, OciHost
from burnish.sandbox.oci.checkpoint import Checkpoints, SavedRun, State, check
from burnish.sandbox.oci.kept import (
    RestoredLaunch,
    discard_output,
    end_all,
    ended_status,
    is_over,
)
from burnish.sandbox.oci.launch import OciLaunch
from burnish.sandbox.oci.launcher import launcher_script
from burnish.sandbox.oci.users import BoxUsers
from burnish.sandbox.proctree import read_process, read_processes

_MAX_ROUNDS = 100
"""Of moving processes into control groups while they fork; two are usual."""


class ProcessBox(OciBox):
    """See `ProcessSandbox`."""

    def __init__(
        self, host: OciHost, name: str, users: BoxUsers, image: str, proxy_port: int = 0
    ) -> None:
        """See `OciBox`."""
        assert host.checkpoints is not None
        self._checkpoints: Checkpoints = host.checkpoints
        self._image = image
        self._kept: list[OciLaunch] = []
        self._num_restores = 0
        self._mark = secrets.token_hex(16).encode()
        self._limits = Limits()
        super().__init__(host, name, users, image, proxy_port)

    async def destroy(self) -> None:
        """Free everything. No command runs any more."""
        await end_all(self._kept)
        await super().destroy()

    async def save(self) -> int:
        """See `StoredBox.save`."""
        async with self._lock, self._checkpoints.turn:
            return await uninterrupted(asyncio.ensure_future(self._save()))

    async def restore(self, state: int) -> None:
        """See `StoredBox.restore`."""
        found = self._checkpoints.find(state, self._image)
        async with self._lock, self._checkpoints.turn:
            await check(found)
            await uninterrupted(asyncio.ensure_future(self._restore(found)))

    async def _finish(self, command: Command, launch: Launched, request: Exec) -> ExecResult:
        """See `StoredBox`: keeps the container if the program ended and may leave something."""
        assert isinstance(launch, OciLaunch)
        if request.keep:
            launch.stdout.expect(self._mark)
            launch.stderr.expect(self._mark)
        run = Run(command, launch, ended_status(launch) if request.keep else None)
        refused = self._pids_refused()
        try:
            result = await run.result()
            if (
                result.status is ExecStatus.INFRA_ERROR
                and self._kept
                and self._pids_refused() > refused
            ):
                # What was kept left no process for the launcher itself.
                return msgspec.structs.replace(result, status=ExecStatus.PIDS, message="")
            return result
        finally:
            if run.kept:
                discard_output(launch)
                self._kept.append(launch)
            elif not request.keep:
                await end_all(self._kept)

    def _pids_refused(self) -> int:
        return 0 if self._group is None else self._group.counters().pids_refused

    async def _apply(self, limits: Limits) -> ExecResult | None:
        problem = await super()._apply(limits)
        if problem is None:
            self._limits = limits
        return problem

    def _script(self, argv: tuple[str, ...], request: Exec, bounds: list[str]) -> bytes:
        return launcher_script(
            argv,
            request.variables,
            request.directory,
            bounds,
            end_mark=self._mark if request.keep else b"",
        )

    def _criu_config(self) -> Path | None:
        return self._checkpoints.config

    async def _save(self) -> int:
        await self._forget_ended()
        place = self._checkpoints.begin()
        saved: list[SavedRun] = []
        try:
            try:
                await self._dump_all(place, saved)
                await self._checkpoints.copy(self._storage, place / "files")
            finally:
                # Whatever failed, what was dumped goes on.
                self._kept += await self._start_all(saved, self._storage)
                await self._attach_all(self._kept)
        except BaseException:
            self._checkpoints.abandon(place)
            raise
        return self._checkpoints.add(
            State(place, self._image, self._users, self._limits, tuple(saved))
        )

    async def _dump_all(self, place: Path, saved: list[SavedRun]) -> None:
        for number, launch in enumerate(list(self._kept)):
            where = place / f"run-{number}"
            box = self._container(launch.bundle)
            saved.append(await self._checkpoints.dump(launch.bundle, box, where))
            self._kept.remove(launch)
            await end_all([launch])

    async def _restore(self, state: State) -> None:
        self._num_restores += 1
        path = self._host.base / f"{self._name}-{self._num_restores}"
        files = Storage(path, state.users.identity)
        started: list[OciLaunch] = []
        try:
            files.resize(state.limits)
            await self._checkpoints.copy(state.files, files.path)
            started = await self._start_all(state.runs, files.path)
        except BaseException:
            files.close()
            raise
        # From here on it cannot fail for anything that the state has or lacks.
        await self._cool_down()
        await end_all(self._kept)
        self._files.close()
        self._files, self._storage, self._limits = files, files.path, state.limits
        self._users, self._identity = state.users, state.users.identity
        self._kept = started
        try:
            if self._group is not None:
                self._group.set_limits(self._group_limits(state.limits))
            await self._attach_all(started)
        except OSError:
            await end_all(self._kept)  # nothing runs outside of its limits
            raise

    async def _start_all(
        self, saved: list[SavedRun] | tuple[SavedRun, ...], storage: Path
    ) -> list[OciLaunch]:
        """Start containers again; all or none."""
        started: list[OciLaunch] = []
        try:
            for run in saved:
                started.append(await self._start_again(run, storage))
        except BaseException:
            await end_all(started)
            raise
        return started

    async def _start_again(self, saved: SavedRun, storage: Path) -> OciLaunch:
        def write_bundle(bundle: Path) -> list[str]:
            self._write_bundle(bundle, storage)
            shutil.copytree(saved.inbox, bundle / "inbox", dirs_exist_ok=True)
            return self._checkpoints.restore_command(saved, bundle, self._container(bundle))

        number, self._num_launches = self._num_launches, self._num_launches + 1
        plan = self._plan()._replace(write_bundle=write_bundle)
        launch = RestoredLaunch(plan, self._private / f"run-{number}")
        try:
            await asyncio.wait_for(launch.prepare(), START_DEADLINE_S)
        except BaseException:
            await end_all([launch])
            raise
        return launch

    async def _attach_all(self, launches: list[OciLaunch]) -> None:
        """Move all processes into the control groups of this box.

        Raises:
            OSError: they refused, or fork faster than they can be moved.
        """
        group, attacher = self._group, self._host.attacher
        if group is None or attacher is None:
            return
        moved: set[int] = set()
        for _ in range(_MAX_ROUNDS):
            new = _members({launch.process_1 for launch in launches}) - moved
            if not new:
                return
            for pid in new:
                try:
                    await attacher.attach(pid, group.attach_files())
                except OSError:
                    if read_process(pid) is not None:  # else it has just ended
                        raise
            moved |= new
        raise OSError(0, "restored processes could not be moved into their control groups")

    async def _forget_ended(self) -> None:
        over = [launch for launch in self._kept if is_over(launch)]
        self._kept = [launch for launch in self._kept if launch not in over]
        await end_all(over)


def _members(roots: set[int | None]) -> set[int]:
    """Pids of these and all below them."""
    processes = [process for process in read_processes() if not process.dead]
    found: set[int] = set()
    new = {process.pid for process in processes if process.pid in roots}
    while new:
        found |= new
        new = {p.pid for p in processes if p.parent in new} - found
    return found
