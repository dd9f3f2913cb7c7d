"""The runtimes: where they are, how they are called, and what each one lacks."""

import os
import re
import shutil
import subprocess
from enum import StrEnum
from pathlib import Path

from burnish.core.boxes import Isolation
from burnish.core.errors import UserError
from burnish.core.records import Record

_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_VERSION_DEADLINE_S = 5.0
RELAY_BYTES = 24 * 2**20
"""What the relay may use beside the program: 9 MiB were seen."""
SENTRY_BYTES = 48 * 2**20
"""What gVisor itself may use beside the program: 22 MiB were seen around `true`."""


class RuntimeName(StrEnum):
    """What can run a container."""

    CRUN = "crun"
    """The host's kernel; the fastest."""
    RUNC = "runc"
    """The host's kernel."""
    RUNSC = "runsc"
    """gVisor: a kernel of its own in user space."""
    PODMAN = "podman"
    """The engine, with the runtime that it is set to."""


class FilterForm(StrEnum):
    """How a runtime takes our system-call filter."""

    BYTES = "bytes"
    """The very filter of the other backends, as an annotation."""
    NAMES = "names"
    """As the specification's section of names."""
    PLAIN_NAMES = "plain_names"
    """So too, but every refusal with a number is EPERM: gVisor reads no other."""


class Runtime(Record, frozen=True, kw_only=True):
    """A runtime that is installed here."""

    name: RuntimeName
    path: str
    version: str
    """As printed."""

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return _BACKEND_NAMES.get(self.name, f"oci-{self.name}")

    @property
    def isolation(self) -> Isolation:
        """What stands between a box and this machine."""
        own_kernel = self.name is RuntimeName.RUNSC
        return Isolation.USER_KERNEL if own_kernel else Isolation.NAMESPACES

    @property
    def filter_form(self) -> FilterForm:
        """How it takes the filter."""
        return _FILTER_FORMS[self.name]

    @property
    def needs_root_id(self) -> bool:
        """Whether the box's user namespace must have a user 0."""
        return self.name is not RuntimeName.CRUN

    @property
    def counted_whole(self) -> bool:
        """Whether control groups hold the runtime too: its processes are the box's kernel."""
        return self.name is RuntimeName.RUNSC

    @property
    def is_engine(self) -> bool:
        """Whether it keeps containers in a store of its own, and a monitor beside each."""
        return self.name is RuntimeName.PODMAN

    @property
    def has_own_network(self) -> bool:
        """Whether sockets of programs are not this machine's, so that nobody can listen to them."""
        return self.name is RuntimeName.RUNSC

    def command(
        self, *, state: Path, bundle: Path, box: str, rootless: bool, relayed: bool
    ) -> list[str]:
        """Runs a container in the foreground; its status is the container's.

        Args:
            state: directory for its own records, of this container alone.
            bundle: directory with `config.json`; the pid of process 1 is written to `pid` in it.
            box: id of the container.
            rootless: we are not root outside our user namespace.
            relayed: a relay in the box connects to a socket of ours.
        """
        run = ["run", "--bundle", str(bundle), "--pid-file", str(bundle / "pid"), box]
        start = [self.path, "--root", str(state)]
        if self.name is RuntimeName.CRUN:
            return [*start, "--cgroup-manager=disabled", *run]
        if self.name is RuntimeName.RUNC:
            # A session keyring for each container would fill the user's quota of keys. The filter
            # denies all calls on keys.
            return [*start, "--rootless", "true", "run", "--no-new-keyring", *run[1:]]
        options = ["--network=none", "--platform=ptrace", "--ignore-cgroups", "--oci-seccomp"]
        if relayed:
            # It may connect to sockets that it sees, and it sees one; it may make none of its own.
            options.append("--host-uds=open")
        return [*start, *options, *(["--rootless"] if rootless else []), *run]


_BACKEND_NAMES = {RuntimeName.RUNSC: "gvisor", RuntimeName.PODMAN: "podman"}
_FILTER_FORMS = {
    RuntimeName.PODMAN: FilterForm.BYTES,
    RuntimeName.CRUN: FilterForm.BYTES,
    RuntimeName.RUNC: FilterForm.NAMES,
    RuntimeName.RUNSC: FilterForm.PLAIN_NAMES,
}
_PACKAGES = {
    RuntimeName.CRUN: "sudo apt-get install crun",
    RuntimeName.RUNC: "sudo apt-get install runc",
    RuntimeName.RUNSC: "sudo apt-get install runsc",
    RuntimeName.PODMAN: "sudo apt-get install podman crun",
}


def find_runtime(name: str, search_path: str | None = None) -> Runtime:
    """Where a runtime is.

    Args:
        name: one of `RuntimeName`.
        search_path: directories to look in; by default PATH and the system's own.

    Raises:
        UserError: it is not installed, or not known.
    """
    if name not in set(RuntimeName):
        known = ", ".join(RuntimeName)
        raise UserError(f"there is no container runtime {name!r} here.", fix=f"one of {known}")
    known_name = RuntimeName(name)
    path = _which(name, search_path)
    if path is None:
        raise UserError(f"{name} is not installed.", fix=_PACKAGES[known_name])
    return Runtime(name=known_name, path=path, version=_version(path))


def _which(name: str, search_path: str | None) -> str | None:
    if search_path is None:
        search_path = os.environ.get("PATH", "") + ":" + _SYSTEM_PATH
    return shutil.which(name, path=search_path)


def _version(path: str) -> str:
    try:
        said = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_VERSION_DEADLINE_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path} does not run: {error}.", fix="reinstall it") from error
    return parse_version(said)


def parse_version(text: str) -> str:
    """From the first line, such as `runc version 1.1.5`; empty if it says nothing like that."""
    found = re.match(r"\S+ version:? (?:release-)?([^\s,]{1,40})", text)
    return found[1] if found else ""
