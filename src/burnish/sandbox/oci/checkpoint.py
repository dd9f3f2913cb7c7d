"""Containers of runc saved and started again by CRIU, and where what was saved lies.

    states/N/files/{work,tmp,shm}     copy of the box's files
            /run-I/{img,inbox}        images of a container that was kept, and what it reads

Everything lies in memory in the keeper's mount namespace, so it ends with the keeper.
"""

import asyncio
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from burnish.core.boxes import Limits
from burnish.core.errors import UserError
from burnish.sandbox.keeper.namespace import mount_tmpfs, unmount
from burnish.sandbox.oci.launch import run_aside
from burnish.sandbox.oci.users import BoxUsers

_DEADLINE_S = 60.0
"""For one dump: 0.25 s are usual."""
_HASH_CHUNK_BYTES = 2**20
# Control groups are ours: restored processes are moved into those of the box that they are in now.
# Deleted files that are still open go into the images.
_NO_REASON = "RLIMIT_NOFILE for self"
# It goes on without, where the host has a hard limit.
_CONFIG = "manage-cgroups=ignore\nghost-limit 64M\nverbosity 1\n"


class SavedRun(NamedTuple):
    """One container."""

    place: Path
    digests: dict[str, str]
    """Of each file below `place`."""

    @property
    def images(self) -> Path:
        """What CRIU wrote."""
        return self.place / "img"

    @property
    def inbox(self) -> Path:
        """What the container reads."""
        return self.place / "inbox"


class State(NamedTuple):
    """Files and processes of a box."""

    place: Path
    image: str
    """Root file system of the box; empty: this host's programs."""
    users: BoxUsers
    """Whose files and processes they are."""
    limits: Limits
    """The last ones."""
    runs: tuple[SavedRun, ...]

    @property
    def files(self) -> Path:
        """Copy of the box's files."""
        return self.place / "files"


class Checkpoints:
    """All states of a keeper."""

    def __init__(self, base: Path, criu: str, runtime: str, helpers: set[int]) -> None:
        """Make the place.

        Args:
            base: directory of the keeper.
            criu: path of the program.
            runtime: path of runc.
            helpers: pids of the keeper's children other than strays.

        Raises:
            OSError: it cannot be mounted.
        """
        self._place = base / "states"
        self._start = [runtime, "--criu", criu]
        self._helpers = helpers
        self._numbers = itertools.count(1)
        self._states: dict[int, State] = {}
        self.turn = asyncio.Lock()
        """Held by whoever lets CRIU work: two at once get EINVAL for mounts of each other."""
        self._place.mkdir(mode=0o700)
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        mount_tmpfs(str(self._place), size_bytes=room, mode=0o700)
        self.config = self._place / "criu.conf"
        self.config.write_text(_CONFIG, encoding="ascii")

    def begin(self) -> Path:
        """An empty directory for a state; `add` or `abandon` it."""
        place = self._place / f"new-{next(self._numbers)}"
        (place / "files").mkdir(parents=True)
        return place

    def add(self, state: State) -> int:
        """The number by which `find` knows it."""
        number = next(self._numbers)
        self._states[number] = state
        return number

    def abandon(self, place: Path) -> None:
        """Free what `begin` gave."""
        shutil.rmtree(place)

    def find(self, number: int, image: str) -> State:
        """For a box with this root file system.

        Raises:
            UserError: it was forgotten, or is of another image.
        """
        state = self._states.get(number)
        if state is None:
            raise UserError(
                "there is no such snapshot in this pool any more.",
                fix="use snapshots that this pool made since its keeper was started",
            )
        if state.image != image:
            raise UserError(
                "the snapshot is of another image than the box.", fix="use a box of the same image"
            )
        return state

    def forget(self, number: int) -> None:
        """Free a state, if it is there."""
        state = self._states.pop(number, None)
        if state is not None:
            shutil.rmtree(state.place)

    def close(self) -> None:
        """Free everything."""
        unmount(str(self._place))

    async def dump(self, bundle: Path, box: str, place: Path) -> SavedRun:
        """Save a container, which is gone then; if it fails, it lives on.

        Args:
            bundle: of it.
            box: its name.
            place: an absent directory for it.

        Raises:
            UserError: it has something that CRIU cannot save.
            OSError: no room.
        """
        images = place / "img"
        images.mkdir(parents=True)
        shutil.copytree(bundle / "inbox", place / "inbox", ignore=shutil.ignore_patterns("ended"))
        where = ["--image-path", str(images), "--work-path", str(images)]
        records = ["--root", str(bundle / "state"), "--log", str(images / "runc.log")]
        command = [*self._start, *records, "checkpoint", *where]
        code = await run_aside([*command, "--file-locks", box], bundle, self._helpers, _DEADLINE_S)
        if code != 0:
            raise UserError(
                f"a kept process cannot be saved: {reason(images / 'dump.log')}.",
                fix="end the process before the snapshot, or what it has open",
            )
        return SavedRun(place, await asyncio.to_thread(digests, place))

    def restore_command(self, saved: SavedRun, bundle: Path, box: str) -> list[str]:
        """Starts a container again, in the foreground."""
        where = ["--image-path", str(saved.images), "--work-path", str(bundle / "state")]
        return [
            *self._start,
            *("--root", str(bundle / "state"), "restore", *where),
            *("--bundle", str(bundle), "--pid-file", str(bundle / "pid"), box),
        ]

    async def copy(self, source: Path, destination: Path) -> None:
        """All files with owners, times, links and named pipes; nothing else may write there.

        Raises:
            OSError: no room.
        """
        for name in ("work", "tmp", "shm"):
            target = destination / name
            target.mkdir(exist_ok=True)
            command = ["/bin/cp", "-a", "--sparse=auto", f"{source / name}/.", f"{target}/"]
            code = await run_aside(command, destination, self._helpers, None)
            if code != 0:
                raise OSError(0, "the files of a box could not be copied: no room is left for them")


async def check(state: State) -> None:
    """Refuse what is not as it was saved.

    Raises:
        OSError: names the file.
    """
    for saved in state.runs:
        try:
            now = await asyncio.to_thread(digests, saved.place)
        except FileNotFoundError as error:
            raise OSError(0, f"the snapshot is damaged: {error}") from error
        for name in sorted(now.keys() | saved.digests.keys()):
            if now.get(name) != saved.digests.get(name):
                raise OSError(0, f"the snapshot is damaged: {name} is not what was saved")


def digests(place: Path) -> dict[str, str]:
    """Of all files below a directory."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
            found[str(path.relative_to(place))] = digest.hexdigest()
    return found


def reason(log: Path) -> str:
    """What CRIU says first, in one line: what follows is of its own unwinding.

    Without a word from it, what runc says last (`runc.log` beside it).
    """
    errors = [line.partition("): ")[2] for line in _lines(log) if "Error (" in line]
    said = [error for error in errors if _NO_REASON not in error][:1]
    said = said or _lines(log.with_name("runc.log"))[-1:]
    return " ".join(said[0].split())[:200] if said else "it does not say why"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
