"""One container that has everything but its command.

    bundle, spawn the runtime --> launcher says READY --> control groups --> it waits
                                                                              |
                        the command and its input, in files of its inbox  <--'  go

Nothing of the command is needed before `go`, so a container can be started ahead of time.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.keeper.children import child_pids, end_child, readable
from burnish.sandbox.keeper.listening import listen_in
from burnish.sandbox.keeper.namespace import unmount
from burnish.sandbox.keeper.pipes import Capture, above_shell, read_now
from burnish.sandbox.keeper.process import uninterrupted
from burnish.sandbox.oci.launcher import SCRIPT, SOCKET, STDIN
from burnish.sandbox.oci.marks import MarkedCapture
from burnish.sandbox.oci.podman import MONITOR_FILE

_GRACE_S = 5.0
"""For a runtime to end once process 1 is dead; then it is stuck and is killed too."""
ENGINE_GRACE_S = 30.0
"""For an engine to start a container and to end it, on a loaded host; 0.4 s are usual."""
_PID_PAUSE_S = 0.001
_MAX_PID = 2**22
_BACKLOG = 128
_ATTACH_AND_RUN = (
    "/bin/sh",
    "-c",
    'n=$1; shift; while [ $n -gt 0 ]; do echo $$ >"$1" || exit 125; shift; n=$((n-1)); done; '
    'exec "$@"',
    "sh",
)


class Plan(NamedTuple):
    """How to start containers for one box."""

    write_bundle: Callable[[Path], list[str]]
    """Fills a bundle, with an empty `inbox` among other things; the runtime's command line."""
    attach: Callable[[int], Awaitable[None]] | None
    """Moves process 1 into the control groups of the box."""
    attach_runtime: tuple[str, ...]
    """Instead: files of the control groups that the runtime itself joins."""
    remove_group: Callable[[Path], None]
    """Removes the control group that the runtime made for a bundle, if it was killed itself."""
    helpers: set[int]
    """Pids of the keeper's own children, which are no strays. Kept by `OciLaunch`."""
    reports: bool
    """The launcher says when the program has ended, which a kernel of its own may not live to see.
    """
    relayed: bool
    """The box's network is its own kernel's: a relay in it brings what is sent to a port to us."""
    remove: Callable[[Path], list[str]] | None = None
    """Of an engine, which keeps records and a monitor beside each container: the command that ends
    and forgets one."""
    environment: Mapping[str, str] | None = None
    """Of the runtime; by default what it needs and no more."""


class OciLaunch:
    """One container. Every way out leads through `end` and `close`."""

    def __init__(self, plan: Plan, bundle: Path) -> None:
        """Start it.

        Raises:
            OSError: it could not be started.
        """
        self._plan = plan
        self.bundle = bundle
        bundle.mkdir(mode=0o711)
        command = plan.write_bundle(bundle)
        if files := plan.attach_runtime:
            command = [*_ATTACH_AND_RUN, str(len(files)), *files, *command]
        self._init_fd: int | None = None
        self.process_1: int | None = None
        self.stdout: Capture = Capture()
        self._marked = MarkedCapture()
        self.stderr: Capture = self._marked
        self.started_fd = self._marked.started_fd
        go, self._go = _both_ways() if plan.reports else os.pipe2(os.O_CLOEXEC)
        self.is_complete = True
        # Sources must not be where a target goes, or one would overwrite the other.
        placed = {
            target: above_shell(source)
            for target, source in enumerate((go, self.stdout.write_fd, self.stderr.write_fd))
        }
        try:
            self.monitor_pid = _spawn(plan.environment or _environment(bundle), command, placed)
        except OSError:
            self.close()
            raise
        finally:
            for descriptor in placed.values():
                os.close(descriptor)
        self.root_pid = self.monitor_pid
        self._second_monitor: int | None = None
        plan.helpers.add(self.monitor_pid)

    async def prepare(self) -> None:
        """Bring the container to where it waits for its command.

        If the runtime fails this returns too: it is dead then and stderr says why.

        Raises:
            OSError: the control groups refused.
        """
        loop = asyncio.get_running_loop()
        something = asyncio.Event()
        loop.add_reader(self.stderr.read_fd, something.set)
        ended = asyncio.ensure_future(readable(os.pidfd_open(self.monitor_pid)))
        ended.add_done_callback(lambda _: something.set())
        try:
            while not self._marked.ready and not ended.done():
                await something.wait()
                something.clear()
                if not self._marked.pump():
                    loop.remove_reader(self.stderr.read_fd)
        finally:
            loop.remove_reader(self.stderr.read_fd)
            ended.cancel()
            await asyncio.wait((ended,))
        if self._marked.ready:
            await self._on_ready()

    async def _on_ready(self) -> None:
        """The launcher waits."""
        pid = self.process_1 = await self._find_process_1()
        if self._plan.remove is not None:
            self._find_second_monitor()
        # It waits for us, so the number is still its own.
        self._init_fd = os.pidfd_open(pid)
        if self._plan.attach is not None:
            await self._plan.attach(pid)

    def go(self, stdin: bytes, script: bytes) -> None:
        """Give the launcher its command."""
        inbox = self.bundle / "inbox"
        (inbox / STDIN).write_bytes(stdin)
        (inbox / SCRIPT).write_bytes(script)
        try:
            os.write(self._go, b"\n")
        except BrokenPipeError:
            return

    def listen(self, port: int) -> socket.socket | None:
        """See `Launched`."""
        if self._init_fd is None:
            return None
        if self._plan.relayed:
            return unix_listener(self.bundle / "net" / SOCKET)
        return listen_in(self._init_fd, port)

    async def end(self) -> tuple[int, float]:
        """Kill what is left; nothing of the box lives afterwards.

        Returns the runtime's status (or minus the signal that killed it) and the CPU seconds of
        all.
        """
        # runc copies the output itself, and ends only when it got rid of it.
        self.stdout.drain()
        self.stderr.drain()
        if self._init_fd is not None:
            _kill(self._init_fd)
            await dead_within(os.pidfd_open(self.monitor_pid), _GRACE_S)
        elif self._plan.remove is not None:
            # Killed on its way an engine leaves what nobody would find: without its command the
            # launcher ends by itself.
            self._hang_up()
            await dead_within(os.pidfd_open(self.monitor_pid), ENGINE_GRACE_S)
        ended = await end_child(self.monitor_pid)
        assert ended is not None, "somebody else reaped the monitor"
        self._plan.helpers.discard(self.monitor_pid)
        if self._init_fd is not None:
            await dead_within(self._init_fd, None)
            self._init_fd = None
        self.is_complete = not self._plan.reports or bool(_read_report(self._go))
        if self._plan.remove is not None:
            left = self._plan.remove(self.bundle) if ended.wait_code < 0 else []
            return ended.wait_code, await self._forget(left)
        cpu_s = ended.cpu_s
        # Process 1 if the runtime was killed, and what gVisor leaves to us: zombies of its own.
        for pid in child_pids():
            if pid not in self._plan.helpers:
                stray = await end_child(pid)
                cpu_s += stray.cpu_s if stray else 0.0
        return ended.wait_code, cpu_s

    async def _forget(self, command: list[str]) -> float:
        """Reap the monitor that an engine has beside a container.

        Args:
            command: run before; removes the container.

        Returns:
            CPU seconds of the container and of what started it; 0 where control groups count.
        """
        helpers = self._plan.helpers
        if command:
            await run_aside(command, self.bundle, helpers, ENGINE_GRACE_S)
        cpu_s = 0.0
        if self._second_monitor is not None:
            await dead_within(os.pidfd_open(self._second_monitor), ENGINE_GRACE_S)
            ended = await end_child(self._second_monitor)
            helpers.discard(self._second_monitor)
            cpu_s = ended.cpu_s if ended and self._plan.attach is None else 0.0
        # Others' monitors that nobody knows yet are our children too: what lives is left alone.
        for pid in child_pids():
            if pid not in helpers and _is_dead_child(pid):
                await end_child(pid)
        return cpu_s

    def close(self) -> None:
        """Free our descriptors and files; call once."""
        self.stdout.close()
        self.stderr.close()
        self._hang_up()
        self._plan.remove_group(self.bundle)
        for left in (self.bundle / "state").glob("crun.*"):
            with contextlib.suppress(OSError):  # it is no mount point if crun came further
                unmount(str(left))
        shutil.rmtree(self.bundle)

    def _hang_up(self) -> None:
        if self._go >= 0:
            os.close(self._go)
            self._go = -1

    async def _find_process_1(self) -> int:
        """Some runtimes write its number only after they have let it go.

        Raises:
            OSError: what was written is no number, or nothing was.
        """
        # Who waits for us has a deadline; one of our own was too short for an overloaded host.
        while True:
            # All of them write it at once, so it is empty or whole.
            if (pid := parse_pid(self.bundle / "pid")) is not None:
                return pid
            if has_ended(self.monitor_pid):
                break
            await asyncio.sleep(_PID_PAUSE_S)
        raise OSError(0, "the runtime does not say which process it started")

    def _find_second_monitor(self) -> None:
        """An engine's, which is our child: whoever started it has ended."""
        pid = parse_pid(self.bundle / MONITOR_FILE)
        if pid is None or pid not in child_pids():
            raise OSError(0, "the engine does not say which process watches the container")
        self._second_monitor = pid
        # Its other children clean up when the container ends: 60 MB that are not the box's.
        assert self.process_1 is not None
        self.root_pid = self.process_1
        self._plan.helpers.add(pid)


def _both_ways() -> tuple[int, int]:
    theirs, ours = socket.socketpair()
    return theirs.detach(), ours.detach()


def _read_report(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    with contextlib.suppress(ConnectionError):
        return read_now(descriptor)
    return b""


def unix_listener(path: Path) -> socket.socket:
    """A socket to which users of boxes may connect.

    Raises:
        OSError: it cannot be made.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(os.fspath(path))
        path.chmod(0o666)  # users of the box are others on the host
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def has_ended(child: int) -> bool:
    """Without reaping it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _is_dead_child(pid: int) -> bool:
    try:
        return has_ended(pid)
    except ChildProcessError:  # another command took it
        return False


def parse_pid(file: Path) -> int | None:
    """None if it is absent, empty or no number of a process."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() and 1 < int(text) <= _MAX_PID else None


def _environment(bundle: Path) -> dict[str, str]:
    state = f"{bundle}/state"
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        # Engines want a home directory, of which they read nothing there.
        "HOME": state,
        "XDG_RUNTIME_DIR": state,
        # Where crun and runc mount a copy of themselves; by default that is the host's /tmp, where
        # it stays if they are killed.
        "_LIBCONTAINER_STATEDIR": state,
    }


def _spawn(environment: Mapping[str, str], command: list[str], placed: dict[int, int]) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in placed.items()]
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=actions,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores both
        setsid=True,
    )


async def run_aside(
    command: list[str], bundle: Path, helpers: set[int], deadline_s: float | None
) -> int:
    """Run a command that belongs to no box, silently; it is killed at its deadline.

    Returns:
        Its status, or minus the signal that killed it.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = _spawn(_environment(bundle), command, dict.fromkeys((0, 1, 2), nothing))
    finally:
        os.close(nothing)
    helpers.add(pid)
    try:
        await dead_within(os.pidfd_open(pid), deadline_s)
    finally:
        ended = await uninterrupted(asyncio.ensure_future(end_child(pid)))
        helpers.discard(pid)
    assert ended is not None, "somebody else reaped it"
    return ended.wait_code


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return


async def dead_within(pidfd: int, deadline_s: float | None) -> None:
    """Wait for a death that is under way; the descriptor is closed."""
    try:
        await asyncio.wait_for(readable(pidfd), deadline_s)
    except TimeoutError:
        return
