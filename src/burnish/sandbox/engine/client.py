"""The command line of docker: found, called, and what it says taken apart."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from burnish.core.errors import UserError, one_line

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
DEADLINE_S = 60.0
"""For one call on a loaded host; 0.05 s are usual."""
OWNER_LABEL = "burnish.owner"
"""Of containers: the keeper that made them, as `cgroup.owner_name` names it."""
_PASSED = ("HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK")
_SHOWN = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
_STATE = re.compile(r"([a-z]+) (-?\d+) (true|false)\s*")
_PID = re.compile(r"([0-9a-f]{64}) (\d+)\s*")


class State(NamedTuple):
    """How a container ended, as the daemon saw it."""

    exit_code: int
    """Of its process 1."""
    oom_killed: bool
    """The kernel ended a process of it for lack of memory."""


class Docker(NamedTuple):
    """Where the command is, and with what variables it finds its daemon."""

    path: str
    environment: dict[str, str]

    async def ask(self, *arguments: str) -> str:
        """Its output.

        Raises:
            OSError: it failed, or took too long.
        """
        process = await asyncio.create_subprocess_exec(
            self.path,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                said, complaint = await process.communicate()
        except BaseException as error:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if isinstance(error, TimeoutError):
                raise OSError(0, f"docker {arguments[0]} takes over {DEADLINE_S:.0f} s") from error
            raise
        if process.returncode:
            words = " ".join(complaint.decode("utf-8", "replace").split())
            raise OSError(0, f"docker {arguments[0]}: {words[:300]}")
        return said.decode("utf-8", "replace")

    def call(self, *arguments: str) -> str:
        """The same for callers without an event loop."""
        try:
            done = subprocess.run(
                [self.path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=self.environment,
                timeout=DEADLINE_S,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            words = " ".join(error.stderr.decode("utf-8", "replace").split())
            raise OSError(0, f"docker {arguments[0]}: {words[:300]}") from error
        except subprocess.TimeoutExpired as error:
            raise OSError(0, f"docker {arguments[0]} takes over {DEADLINE_S:.0f} s") from error
        return done.stdout.decode("utf-8", "replace")

    async def state(self, container: str) -> State | None:
        """Of a container that has ended; None if it has not, or nobody can say."""
        try:
            return parse_state(await self.ask("inspect", f"--format={_SHOWN}", container))
        except OSError:
            return None

    async def process_1(self, container: str) -> tuple[str, int] | None:
        """Id and pid of a container that runs, in the daemon's eyes; None if it does not."""
        shown = await self.ask("inspect", "--format={{.Id}} {{.State.Pid}}", container)
        found = _PID.fullmatch(shown)
        return (found[1], int(found[2])) if found and int(found[2]) else None

    async def remove(self, container: str) -> None:
        """With its volume, whatever it does now. Not there is as good."""
        try:
            await self.ask("rm", "--force", "--volumes", container)
        except OSError as error:
            if "No such container" not in str(error):
                raise


def parse_state(text: str) -> State | None:
    """From what `inspect` printed; None if it runs, or is none that we know."""
    found = _STATE.fullmatch(text)
    if found is None or found[1] not in ("exited", "dead"):
        return None
    return State(int(found[2]), found[3] == "true")


def find_docker(environment: Mapping[str, str] | None = None) -> Docker:
    """Where docker is.

    Args:
        environment: by default our own.

    Raises:
        UserError: it is not installed, is podman under its name, or its daemon does not answer.
    """
    given = os.environ if environment is None else environment
    path = shutil.which("docker", path=f"{given.get('PATH', '')}:{_SYSTEM_PATH}")
    if path is None:
        raise UserError("docker is not installed.", fix="install docker, or choose another backend")
    passed = {k: v for k, v in given.items() if k in _PASSED or k.startswith("DOCKER_")}
    docker = Docker(path, {"PATH": _SYSTEM_PATH, **passed})
    try:
        if "podman" in docker.call("--version"):
            raise UserError(
                f"{path} is podman under another name.", fix='set sandbox.backend = "podman"'
            )
        docker.call("version", "--format={{.Server.Version}}")
    except OSError as error:
        fix = "start the daemon, and join its group: sudo usermod -aG docker $USER, then log in"
        raise UserError(f"docker does not answer: {one_line(error)}.", fix=fix) from error
    return docker
