"""Removes the containers of a keeper that is dead: they are the daemon's children, not ours."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from burnish.sandbox.cgroup import is_dead_owner
from burnish.sandbox.engine.client import OWNER_LABEL, Docker

_LISTED = f'{{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
# What was being started when the keeper died may appear after the first look.
_SCRIPT = """
read -r go
for pause in 0 1 3; do
  sleep $pause
  "$0" ps --all --quiet --filter "label=$1" | while read -r id; do
    "$0" rm --force --volumes "$id"
  done
done
rm -rf -- "$2"
"""


class Guard:
    """A shell that waits for the end of its input, which is the keeper's."""

    def __init__(self, docker: Docker, owner: str, folder: Path) -> None:
        """Start it.

        Args:
            docker: the command.
            owner: the keeper, as its containers are labelled.
            folder: files of the keeper, removed too.
        """
        theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        label = f"{OWNER_LABEL}={owner}"
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", _SCRIPT, docker.path, label, str(folder)],
                docker.environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs, 0),
                    (os.POSIX_SPAWN_DUP2, nothing, 1),
                    (os.POSIX_SPAWN_DUP2, nothing, 2),
                ],
                setsigdef=[signal.SIGPIPE],
                setsid=True,
            )
        finally:
            os.close(theirs)
            os.close(nothing)

    def dismiss(self) -> None:
        """Nothing is left: end it."""
        os.kill(self.pid, signal.SIGKILL)  # our child, which nobody has reaped
        os.waitpid(self.pid, 0)
        os.close(self._ours)


def sweep(docker: Docker) -> tuple[str, ...]:
    """Remove containers, with their volumes, whose keepers are dead; returns their ids.

    Raises:
        OSError: the daemon does not answer.
    """
    shown = docker.call(
        "ps",
        "--all",
        f"--filter=label={OWNER_LABEL}",
        f'--format={{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}',
    )
    removed = []
    for line in shown.splitlines():
        container, _, owner = line.partition(" ")
        if is_dead_owner(owner):
            with contextlib.suppress(OSError):  # somebody else was quicker
                docker.call("rm", "--force", "--volumes", container)
                removed.append(container)
    return tuple(removed)


def remove_folder(folder: Path) -> None:
    """Files of the keeper."""
    shutil.rmtree(folder, ignore_errors=True)
