"""What docker can do on this host: found by trying it, once, when a keeper starts."""

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from burnish.core.boxes import Capabilities, ExecResult, Feature, Isolation, Limits
from burnish.core.errors import UserError, one_line
from burnish.sandbox.cgroup import owner_name
from burnish.sandbox.commands import INSIDE_ID, WORK
from burnish.sandbox.engine.box import DockerBox, DockerHost, make_box
from burnish.sandbox.engine.client import find_docker
from burnish.sandbox.engine.guard import Guard, sweep
from burnish.sandbox.engine.images import DaemonImages, sweep_images
from burnish.sandbox.engine.options import make_covers
from burnish.sandbox.host_view import OWN_PACKAGE, HostPath, hidden_paths, system_paths
from burnish.sandbox.interpreter import PYTHON_FIX, find_python
from burnish.sandbox.keeper.namespace import Identity
from burnish.sandbox.keeper.protocol import CreateBox, Exec
from burnish.sandbox.network.base import PROXY_PORT
from burnish.sandbox.oci.selftest import SELF_TEST, check_self_test
from burnish.sandbox.oci.spec import Bind

_DEADLINE_S = 60.0
_ENFORCED = frozenset(
    {
        "wall_s", "memory_bytes", "swap_bytes", "num_pids", "disk_bytes", "num_inodes",
        "stdout_bytes", "num_files", "cpus",
    }
)  # fmt: skip


class Ground:
    """What is made before the first box, and must be removed whatever happens."""

    def __init__(self) -> None:
        """Find docker and start the guard.

        Raises:
            UserError: names what is missing and the fix.
        """
        self.docker = find_docker()
        if find_python() is None:
            raise UserError("boxes of docker need python3 below /usr.", fix=PYTHON_FIX)
        with contextlib.suppress(OSError):
            sweep(self.docker)
            sweep_images(self.docker)
        self.owner = owner_name()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.owner}-", suffix=".docker"))
        self.guard = Guard(self.docker, self.owner, self.folder)


async def inspect_host(ground: Ground, *, with_network: bool) -> tuple[DockerHost, Capabilities]:
    """Run one box to see that everything holds, and one more if boxes shall have a network.

    Raises:
        UserError: names what is missing and the fix.
    """
    images = DaemonImages(ground.docker)
    system = system_paths()
    empty = ground.folder / "empty"
    empty.mkdir(mode=0o755)
    no_sys = make_covers(ground.folder / "sys")
    try:
        host_image = await asyncio.to_thread(images.host_root, system)
    except OSError as error:
        raise _refused(str(error)) from error
    privileged = os.geteuid() == 0
    ours = (INSIDE_ID, INSIDE_ID) if privileged else (os.geteuid(), os.getegid())
    host = DockerHost(
        docker=ground.docker,
        owner=ground.owner,
        folder=ground.folder,
        images=images,
        host_image=host_image,
        host_binds=_host_binds(system, empty),
        always_binds=no_sys,
        identity=Identity(*ours),
        helpers={ground.guard.pid},
    )
    try:
        counts_cpu = await _self_test(host)
        has_network = with_network and await _network_test(host)
    except OSError as error:
        raise _refused(one_line(error)) from error
    return host, _describe(counts_cpu=counts_cpu, has_network=has_network, privileged=privileged)


def _host_binds(system: tuple[HostPath, ...], empty: Path) -> tuple[Bind, ...]:
    binds = [Bind(source=e.path, destination=e.path) for e in system if e.link is None]
    hidden = hidden_paths([*sys.path, OWN_PACKAGE], system)
    binds += [Bind(source=str(empty), destination=path) for path in hidden]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.exists(name):
            binds.append(Bind(source=name, destination=name))
    return tuple(binds)


def _refused(what: str) -> UserError:
    return UserError(
        f"docker cannot run a box here: {what}.",
        fix="use a daemon on this machine that sees its files (not in a virtual machine), without "
        "userns-remap, or choose another backend",
    )


async def _self_test(host: DockerHost) -> bool:
    """Returns whether CPU time over all processes is seen."""
    async with asyncio.timeout(_DEADLINE_S):
        box = await make_box(host, "self-test", CreateBox(id=0))
        try:
            # Another size than the first, so that it is seen whether it can be set.
            limits = Limits(disk_bytes=32 * 2**20)
            result = await _run(box, SELF_TEST, limits)
            counts_cpu = box.counts_cpu
        finally:
            await box.destroy()
    check_self_test(result, "docker", whole=False, fix="use docker 20.10 or newer")
    return counts_cpu


async def _network_test(host: DockerHost) -> bool:
    """Whether a box reaches a socket of ours."""
    async with asyncio.timeout(_DEADLINE_S):
        box = await make_box(host, "network-test", CreateBox(id=0, proxy_port=PROXY_PORT))
        try:
            listener = await box.listen()
            if listener is None:
                return False
            with listener:
                listener.setblocking(False)
                code = f"import socket; socket.create_connection(('127.0.0.1', {PROXY_PORT}))"
                await _run(box, ("python3", "-c", code), Limits())
                listener.accept()[0].close()
                return True
        except OSError:
            return False
        finally:
            await box.destroy()


async def _run(box: DockerBox, argv: tuple[str, ...], limits: Limits) -> ExecResult:
    request = Exec(id=0, box=0, argv=(), stdin=b"", env={}, cwd=os.fsencode(WORK), limits=limits)
    return await box.run(argv, request)


def _describe(*, counts_cpu: bool, has_network: bool, privileged: bool) -> Capabilities:
    notes = [
        "namespaces share the host's kernel: a kernel bug is a way out of the box",
        "the daemon is asked for everything: a box takes about a second, and so does a command",
        "each box has one more container, which holds its files; it has the power to mount, and "
        "runs nothing of the box",
    ]
    if not privileged:
        notes.append("not root: boxes run as your own user id")
    if not counts_cpu:
        notes.append("control groups of the daemon are not seen: no limit on CPU time")
    if has_network:
        notes.append("boxes with an allow-list need python3 in PATH, for a relay")
    return Capabilities(
        backend="docker",
        enforces=_ENFORCED | ({"cpu_s"} if counts_cpu else set()),
        isolation=Isolation.NAMESPACES,
        features=frozenset({Feature.IMAGES, *([Feature.ALLOW_LIST] if has_network else [])}),
        seccomp=True,
        notes=tuple(notes),
    )
