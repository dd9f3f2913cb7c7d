"""A box whose commands run in containers of docker."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

from burnish.core.boxes import Limits
from burnish.core.errors import UserError
from burnish.sandbox.cgroup_files import OVERHEAD_PIDS
from burnish.sandbox.engine.client import OWNER_LABEL, Docker
from burnish.sandbox.engine.images import DaemonImages
from burnish.sandbox.engine.launch import DockerLaunch
from burnish.sandbox.engine.options import (
    container_options,
    csv_words,
    mount_words,
    seccomp_profile,
)
from burnish.sandbox.engine.storage import VolumeStorage, accept_storage, volume_options
from burnish.sandbox.engine.storekeeper import storekeeper_source
from burnish.sandbox.images.running import ImageUser
from burnish.sandbox.keeper.children import end_child, readable
from burnish.sandbox.keeper.namespace import Identity
from burnish.sandbox.keeper.process import Command, Launched
from burnish.sandbox.keeper.protocol import CreateBox, Exec
from burnish.sandbox.keeper.stored_box import StoredBox
from burnish.sandbox.limits import QUEUED_SIGNALS
from burnish.sandbox.network.relay import relay_source
from burnish.sandbox.oci.bundle import storage_binds
from burnish.sandbox.oci.filter import plain_filter
from burnish.sandbox.oci.launch import Plan
from burnish.sandbox.oci.launcher import NET, RELAY, launcher, launcher_script
from burnish.sandbox.oci.spec import Bind, BoxSpec
from burnish.sandbox.proctree import TreeUsage

_LEAST_MEMORY_BYTES = 6 * 2**20
"""Docker takes no less."""
_PLACE = "/box"
_KEEPER = "/run/keeper"


class DockerHost(NamedTuple):
    """What all boxes of a keeper share."""

    docker: Docker
    owner: str
    """Label of the keeper's containers."""
    folder: Path
    """Of the keeper's files, which the daemon can see."""
    images: DaemonImages
    host_image: str
    """With mount points for `host_binds`."""
    host_binds: tuple[Bind, ...]
    """What boxes without an image see, and the storekeepers."""
    always_binds: tuple[Bind, ...]
    """What every box sees."""
    identity: Identity
    """Who boxes are, unless their image says so."""
    helpers: set[int]
    """Pids of the keeper's children that somebody else ends."""


class _Holder(NamedTuple):
    """The container that holds the files of a box."""

    name: str
    pid: int
    """Of the command line that is attached to it."""
    storage: VolumeStorage


async def make_box(host: DockerHost, name: str, request: CreateBox) -> "DockerBox":
    """Start the container of its files, and that of its first command.

    Raises:
        OSError: the daemon refused.
        UserError: the image's user cannot be had here.
    """
    image, binds, identity = host.host_image, host.host_binds, host.identity
    if request.root:
        root = Path(request.root)
        image = await asyncio.to_thread(host.images.image, request.digest, root)
        binds = ()
    if request.user is not None:
        identity = _identity(ImageUser(*request.user), host.identity)
    private = host.folder / name
    private.mkdir(mode=0o711)
    try:
        holder = await _hold(host, f"{host.owner}-{name}", private, identity)
    except BaseException:
        shutil.rmtree(private)
        raise
    return DockerBox(host, name, holder, Root(image, binds, identity), request.proxy_port)


def _identity(user: ImageUser, ours: Identity) -> Identity:
    """Ids of containers are the host's: an ordinary user's boxes can be nobody else.

    An image that names nobody runs as root, and here then as the user.
    """
    if os.geteuid() == 0:
        return Identity(*user)
    if user not in ((0, 0), ours):
        raise UserError(
            f"the image runs as user {user.uid}:{user.gid}, and boxes of docker run as you.",
            fix="run as root, or use podman or the native sandbox, which map user ids",
        )
    return ours


class Root(NamedTuple):
    """What the commands of a box see, and as whom."""

    image: str
    binds: tuple[Bind, ...]
    identity: Identity


class DockerBox(StoredBox):
    """A private directory of limited size, in which commands run one after another."""

    def __init__(
        self, host: DockerHost, name: str, holder: _Holder, root: Root, proxy_port: int
    ) -> None:
        """Start the container of the first command; see `make_box`."""
        self._host = host
        self._name = name
        self._holder = holder
        self._root = root
        self._private = host.folder / name
        self._num_launches = 0
        self._current: DockerLaunch | None = None
        super().__init__(
            host.folder,
            None,
            name,
            root.identity,
            proxy_port=proxy_port,
            storage=holder.storage,
        )
        self.warm_up()

    @property
    def counts_cpu(self) -> bool:
        """Whether the last command's CPU time was seen while it ran."""
        return self._current is not None and self._current.counts.counts_cpu

    async def destroy(self) -> None:
        """Free everything. No command runs any more."""
        await super().destroy()
        await _let_go(self._host, self._holder.name, self._holder.pid)
        shutil.rmtree(self._private)

    def _launch(self) -> DockerLaunch:
        number, self._num_launches = self._num_launches, self._num_launches + 1
        name = f"{self._host.owner}-{self._name}-{number}"
        plan = Plan(
            write_bundle=lambda bundle: self._write_bundle(bundle, name),
            attach=None,
            attach_runtime=(),
            remove_group=lambda _: None,
            helpers=self._host.helpers,
            reports=False,
            relayed=bool(self._proxy_port),
            environment=self._host.docker.environment,
        )
        return DockerLaunch(self._host.docker, name, plan, self._private / f"run-{number}")

    def _write_bundle(self, bundle: Path, name: str) -> list[str]:
        """Returns the command line."""
        inbox = bundle / "inbox"
        inbox.mkdir(mode=0o755)
        (bundle / "state").mkdir(mode=0o700)
        binds = (
            *self._root.binds,
            *self._host.always_binds,
            *storage_binds(self._files.path, inbox),
        )
        if self._proxy_port:
            net = bundle / "net"
            net.mkdir(mode=0o755)
            (net / RELAY).write_bytes(relay_source())
            binds = (*binds, Bind(source=str(net), destination=NET))
        seccomp_file = bundle / "seccomp.json"
        seccomp_file.write_bytes(seccomp_profile(plain_filter()))
        spec = BoxSpec(
            root="",
            args=launcher(self._proxy_port),
            uid=self._root.identity.uid,
            gid=self._root.identity.gid,
            binds=binds,
        )
        docker = self._host.docker
        return [
            docker.path, "run", "--pull=never", "--sig-proxy=false", "--cgroupns=private",
            f"--label={OWNER_LABEL}={self._host.owner}", *_limit_options(Limits(), 0),
            # Ours are not inherited; see `limits.bound_for_boxes`.
            "--ulimit=core=1:1", f"--ulimit=sigpending={QUEUED_SIGNALS}:{QUEUED_SIGNALS}",
            *container_options(spec, name, seccomp_file), self._root.image, *spec.args,
        ]  # fmt: skip

    def _script(self, argv: tuple[str, ...], request: Exec, bounds: list[str]) -> bytes:
        return launcher_script(argv, request.variables, request.directory, bounds)

    def _num_processes(self, limits: Limits) -> int | None:
        return None  # its control group has them

    async def _join(self, limits: Limits, launch: Launched) -> None:
        """Give the container that waits the limits of its command."""
        assert isinstance(launch, DockerLaunch)
        self._current = launch
        wanted = _limit_options(limits, self._files.used_bytes())
        if wanted == _limit_options(Limits(), 0) or not launch.ready:
            return
        try:
            await launch.set_limits(wanted)
        except BaseException:
            await launch.end()
            launch.close()
            raise

    def _command(self, argv: tuple[str, ...], request: Exec) -> Command:
        assert self._current is not None
        made = super()._command(argv, request)
        return made._replace(group=self._current.counts, sample=None)

    def _sample(self, monitor_pid: int) -> TreeUsage:
        raise AssertionError("the daemon counts")


def _limit_options(limits: Limits, used_bytes: int) -> list[str]:
    """Of `run` and `update`. What lies in the volume counts as memory.

    Args:
        limits: what was asked.
        used_bytes: what is there already, which the container is not charged with.
    """
    memory = max(_LEAST_MEMORY_BYTES, limits.memory_bytes - used_bytes)
    options = [
        f"--memory={memory}",
        f"--memory-swap={memory + limits.swap_bytes}",
        f"--pids-limit={limits.num_pids + OVERHEAD_PIDS}",
    ]
    return options if limits.cpus is None else [*options, f"--cpus={limits.cpus}"]


async def _hold(host: DockerHost, name: str, private: Path, identity: Identity) -> _Holder:
    """Start a storekeeper and take the files that it gives."""
    keeper = private / "keeper"
    keeper.mkdir(mode=0o711)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # The path may be too long for an address; its directory has a short name for us.
        folder_fd = os.open(keeper, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{folder_fd}/socket")
        finally:
            os.close(folder_fd)
        (keeper / "storekeeper.py").write_bytes(storekeeper_source())
        (keeper / "socket").chmod(0o666)  # its root is another user than we are
        listener.listen(1)
        listener.setblocking(False)
        command = _holder_command(host, name, keeper, identity)
        pid = _spawn_quietly(command, host.docker.environment, private / "holder")
        host.helpers.add(pid)
        try:
            storage = await _first_words(listener, pid, private)
            storage.path = await _volume_path(host.docker, name)
        except BaseException:
            await _let_go(host, name, pid)
            raise
    return _Holder(name, pid, storage)


async def _first_words(listener: socket.socket, pid: int, private: Path) -> VolumeStorage:
    """What the storekeeper gives, unless docker ends first."""
    coming = asyncio.ensure_future(accept_storage(listener, private))
    ended = asyncio.ensure_future(readable(os.pidfd_open(pid)))
    try:
        await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
        said = " ".join((private / "holder").read_text("utf-8", "replace").split())
        raise OSError(0, f"the container of the box's files ended: {said[:300]}")
    finally:
        coming.cancel()
        ended.cancel()
        await asyncio.wait((coming, ended))


def _holder_command(host: DockerHost, name: str, keeper: Path, identity: Identity) -> list[str]:
    volume = [
        "type=volume", f"dst={_PLACE}", "volume-driver=local", "volume-opt=type=tmpfs",
        "volume-opt=device=tmpfs", f"volume-opt=o={volume_options()}", "volume-nocopy",
        f"volume-label={OWNER_LABEL}={host.owner}",
    ]  # fmt: skip
    binds = [mount_words(bind) for bind in host.host_binds]
    binds.append(mount_words(Bind(source=str(keeper), destination=_KEEPER)))
    mounts = [word for mount in (csv_words(volume), *binds) for word in ("--mount", mount)]
    return [
        host.docker.path, "run", "--pull=never", "--sig-proxy=false", f"--name={name}",
        f"--label={OWNER_LABEL}={host.owner}", "--network=none", "--read-only", "--cap-drop=ALL",
        "--cap-add=SYS_ADMIN", "--cap-add=CHOWN", "--security-opt=no-new-privileges",
        "--security-opt=apparmor=unconfined", "--user=0:0", "--log-driver=none", "--entrypoint=",
        "--pids-limit=64", *mounts, host.host_image, "python3", "-I", "-S", "-B",
        f"{_KEEPER}/storekeeper.py", f"{_KEEPER}/socket", _PLACE, str(identity.uid),
        str(identity.gid),
    ]  # fmt: skip


def _spawn_quietly(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Its words go to a file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


async def _volume_path(docker: Docker, name: str) -> Path:
    """Of the files, as the daemon knows it."""
    shown = json.loads(await docker.ask("inspect", "--format={{json .Mounts}}", name))
    for mount in shown:
        if mount.get("Destination") == _PLACE:
            return Path(mount["Source"])
    raise OSError(0, "docker does not say where a volume is")


async def _let_go(host: DockerHost, name: str, pid: int) -> None:
    """End the container of a box's files."""
    with contextlib.suppress(OSError):  # the guard tries again
        await host.docker.remove(name)
    await end_child(pid)
    host.helpers.discard(pid)
