"""What killed processes left on this machine, and its removal."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.cgroup import sweep
from burnish.sandbox.engine.client import find_docker
from burnish.sandbox.engine.guard import sweep as sweep_containers
from burnish.sandbox.engine.images import sweep_images
from burnish.sandbox.proctree import start_ticks
from burnish.sandbox.remote.daemon import remove_dead_socket

_OWNED = re.compile(r"burnish-(\d+)-(\d+)-(\d+)-[0-9a-f]+\.\w+")
_GROUPS = Path("/sys/fs/cgroup")
# Groups are made at the top of a hierarchy or in the group of their owner, a service at most.
_GROUP_DEPTH = 4


class Leftover(Record, frozen=True, kw_only=True):
    """One thing that was removed."""

    kind: str
    """What it was."""
    path: str
    """Where it was."""


def sweep_leftovers() -> tuple[Leftover, ...]:
    """Remove what no living process owns; what others own is left alone."""
    return (*_control_groups(), *_containers(), *_files(), *_socket())


def _control_groups() -> Iterator[Leftover]:
    for folder, names, _ in os.walk(_GROUPS):
        place = Path(folder)
        if len(place.relative_to(_GROUPS).parts) >= _GROUP_DEPTH:
            names.clear()
        owned = {name for name in names if name.startswith("burnish-")}
        names[:] = [name for name in names if name not in owned]
        if owned:
            sweep(place)
        for name in sorted(owned):
            if not (place / name).exists():
                yield Leftover(kind="control group", path=str(place / name))


def _containers() -> Iterator[Leftover]:
    """Of a docker daemon, if there is one; and images of ours that nobody used for long."""
    try:
        docker = find_docker()
        removed = sweep_containers(docker)
        sweep_images(docker)
    except (UserError, OSError):
        return
    for container in removed:
        yield Leftover(kind="container", path=container)


def _files() -> Iterator[Leftover]:
    """Directories below the one for temporary files that are named after their owner."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    for path in sorted(Path(tempfile.gettempdir()).iterdir()):
        found = _OWNED.fullmatch(path.name)
        if found is None or int(found[1]) != namespace:
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # its owner, who lives, has removed it
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            continue
        if start_ticks(int(found[2])) != int(found[3]):
            shutil.rmtree(path, ignore_errors=True)
            yield Leftover(kind="temporary files", path=str(path))


def _socket() -> Iterator[Leftover]:
    path = remove_dead_socket()
    if path is not None:
        yield Leftover(kind="socket", path=str(path))
