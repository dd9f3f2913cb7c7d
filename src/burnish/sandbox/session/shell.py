"""A shell whose directory, variables, functions, aliases and options last from command to command.

Every command is an `exec` of its own: limits, results and audit are the box's. What the session
holds is written into the box as shell code when a command ends, and read when the next one starts.
So a rollback, fork or export of the box takes the session with it, and a hostile job can damage its
own session only.

What to expect:

* `exit` ends the command, with its status, not the session. So does a syntax error, or a failure
  under `set -e`.
* A command that is killed (limit, signal) or replaces the shell (`exec program`) leaves the session
  as it was before it.
* Background jobs end with their command, unless it is run with `keep`.
* An EXIT trap runs when its command ends; traps, open files and `ulimit`s do not last.
* A function that calls `exit` leaves its local variables behind as global ones.
* In `sh`, functions and positional parameters do not last, as POSIX shells cannot print them.

A command takes 3 ms more than the shell alone.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from pathlib import Path

from burnish.core.boxes import ExecResult, Limits, Sandbox
from burnish.sandbox.commands import BASE_ENV, WORK

MAX_STATE_CHARS = 256 * 2**10
"""What a session may hold. More is not kept, and stderr says so."""
_MAX_COMMAND_BYTES = 96 * 2**10
# The kernel takes 128 KiB for one argument, and the driver needs a part of it.

_FOLDER = Path(__file__).parent


class Shell(StrEnum):
    """What runs the commands."""

    BASH = "bash"
    """Everything lasts."""
    SH = "sh"
    """Any POSIX shell."""


class ShellSession:
    """Commands that share a state. One at a time: what runs at once, saves over each other."""

    def __init__(
        self,
        box: Sandbox,
        shell: Shell = Shell.BASH,
        *,
        cwd: str = WORK,
        max_state_chars: int = MAX_STATE_CHARS,
    ) -> None:
        """Begin a session; nothing runs yet.

        Args:
            box: where commands run.
            shell: must be in the box.
            cwd: absolute directory in which the session starts.
            max_state_chars: bound on what it holds.
        """
        self._box = box
        self._shell = shell
        self._driver = (_FOLDER / f"driver.{shell.value}").read_text(encoding="ascii")
        self._cwd = cwd
        self._max_state_chars = max_state_chars
        # In /tmp, which jobs can write on every backend, under a name that no job expects.
        self._state = f"/tmp/.session-{secrets.token_hex(8)}"

    def of(self, fork: Sandbox) -> ShellSession:
        """The same session in a fork of its box, which goes its own way from there."""
        session = ShellSession(
            fork, self._shell, cwd=self._cwd, max_state_chars=self._max_state_chars
        )
        session._state = self._state
        return session

    async def run(
        self,
        command: str,
        limits: Limits | None = None,
        *,
        stdin: bytes = b"",
        keep: bool = False,
    ) -> ExecResult:
        """Run a command to its end; the exit status is the command's.

        Args:
            command: shell code, any number of lines.
            limits: bounds; `Limits()` by default.
            stdin: what it reads.
            keep: see `Sandbox.exec`.

        Raises:
            ValueError: the command is too long for an argument, or has a NUL byte.
        """
        if len(command.encode("utf-8", "surrogatepass")) > _MAX_COMMAND_BYTES:
            raise ValueError(
                f"a command must be below {_MAX_COMMAND_BYTES} bytes: write a script and run that"
            )
        options = ("--norc", "--noprofile") if self._shell is Shell.BASH else ()
        argv = (
            self._shell.value,
            *options,
            "-c",
            self._driver,
            self._shell.value,
            self._state,
            command,
            str(self._max_state_chars),
            self._cwd,
            " ".join(BASE_ENV),
        )
        return await self._box.exec(argv, stdin=stdin, limits=limits, cwd="/", keep=keep)
