"""What an OCI runtime can do on this host: found by trying it, once, when a keeper starts."""

import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

from burnish.core.boxes import Capabilities, ExecResult, ExecStatus, Limits
from burnish.core.errors import UserError, one_line
from burnish.sandbox.commands import WORK
from burnish.sandbox.engine.options import make_covers
from burnish.sandbox.host_view import OWN_PACKAGE, hidden_paths, namespace_fix, system_paths
from burnish.sandbox.keeper.attacher import Attacher
from burnish.sandbox.keeper.namespace import enter, make_base, mount_tmpfs
from burnish.sandbox.keeper.process import START_DEADLINE_S
from burnish.sandbox.keeper.protocol import Exec
from burnish.sandbox.network.base import PROXY_PORT
from burnish.sandbox.oci.box import OciBox, OciHost
from burnish.sandbox.oci.bundle import make_host_root
from burnish.sandbox.oci.capabilities import describe
from burnish.sandbox.oci.checkpoint import Checkpoints
from burnish.sandbox.oci.hierarchies import Groups, remove_group, settle
from burnish.sandbox.oci.podman import make_store
from burnish.sandbox.oci.process_box import ProcessBox
from burnish.sandbox.oci.runtime import Runtime, RuntimeName, find_runtime
from burnish.sandbox.oci.selftest import SELF_TEST, check_self_test
from burnish.sandbox.oci.users import BoxUsers, box_users
from burnish.sandbox.session.criu import CriuProbe, criu_probe

_BUNDLES_BYTES = 2**30
"""Room for the inputs of all commands that wait or run at once."""
_SELF_TEST_DEADLINE_S = START_DEADLINE_S


class Ground(NamedTuple):
    """What was made before the keeper became process 1 of its namespace."""

    runtime: Runtime
    base: Path
    groups: Groups
    privileged: bool
    """We are root outside any namespace of ours."""
    criu: CriuProbe | None = None
    """What was found, where the runtime can make use of it."""


def enter_host(name: str, *, use_control_groups: bool) -> Ground:
    """Enter the keeper's mount namespace and make what its boxes share.

    Control groups are named after the process that others see, so this comes first.

    Raises:
        UserError: names what is missing and the fix.
    """
    runtime = find_runtime(name)
    criu = criu_probe() if runtime.name is RuntimeName.RUNC else None
    privileged = enter()
    base = make_base()
    (base / "boxes").mkdir(mode=0o711)
    mount_tmpfs(str(base / "boxes"), size_bytes=_BUNDLES_BYTES, mode=0o711)
    if runtime.is_engine:
        make_store(base)
    groups = settle(
        base, runtime.name, privileged=privileged, use_control_groups=use_control_groups
    )
    return Ground(runtime, base, groups, privileged, criu)


async def inspect_host(ground: Ground, *, with_network: bool) -> tuple[OciHost, Capabilities]:
    """Run one box to see that everything holds, and one more if boxes shall have a network.

    Raises:
        UserError: names what is missing and the fix.
    """
    runtime, base, groups, privileged, criu = ground
    system = system_paths()
    attacher = Attacher() if groups.controllers else None
    host = OciHost(
        runtime=runtime,
        token=secrets.token_hex(8),
        base=base,
        root=make_host_root(
            base / "host",
            system,
            hidden_paths([*sys.path, OWN_PACKAGE], system),
            engine=runtime.is_engine,
        ),
        always_binds=make_covers(base / "host" / "sys") if runtime.is_engine else (),
        rootless=not privileged,
        cgroups_path=groups.runtime_path,
        controllers=groups.controllers,
        attacher=attacher,
        helpers={attacher.pid} if attacher else set(),
    )
    users = box_users(runtime, 0, privileged=privileged)
    try:
        await _self_test(host, users)
        has_network = with_network and await _network_test(host, users)
        host, without = await _with_checkpoints(host, users, criu)
    except BaseException:
        close_host(host)
        raise
    found = describe(
        runtime,
        groups.controllers,
        users,
        rootless=not privileged,
        has_network=has_network,
        without_processes=without,
    )
    return host, found


def close_host(host: OciHost) -> None:
    """Free what `inspect_host` made outside the namespace."""
    if host.attacher is not None:
        host.attacher.close()
    if host.controllers is not None:
        host.controllers.close()
    if host.cgroups_path is not None:
        remove_group(host.cgroups_path)


async def _with_checkpoints(
    host: OciHost, users: BoxUsers, criu: CriuProbe | None
) -> tuple[OciHost, str]:
    """With them, if a process of a box comes back; else why not, where that can be changed."""
    if criu is None:
        return host, ""
    if not criu.usable:
        return host, f"{criu.detail}; {criu.fix}"
    exact = host.controllers
    if host.rootless or not (exact and exact.memory and exact.pids):
        return host, "it takes root and control groups for memory and pids"
    made = Checkpoints(host.base, criu.path, host.runtime.path, host.helpers)
    able = host._replace(checkpoints=made)
    box = ProcessBox(able, "criu-test", users, "")
    argv = ("sh", "-c", "sleep 1000 </dev/null >/dev/null 2>&1 &")
    where = os.fsencode(WORK)
    request = Exec(id=0, box=0, argv=(), stdin=b"", env={}, cwd=where, limits=Limits(), keep=True)
    try:
        ran = await asyncio.wait_for(box.run(argv, request), _SELF_TEST_DEADLINE_S)
        if ran.status is not ExecStatus.OK:
            raise OSError(0, ran.message or ran.stderr.decode("utf-8", "replace")[:200])
        made.forget(await box.save())
    except (OSError, UserError, TimeoutError) as error:
        made.close()
        return host, f"{criu.detail}, but not a container: {one_line(error)}"
    finally:
        with contextlib.suppress(OSError):
            await box.destroy()
    return able, ""


async def _network_test(host: OciHost, users: BoxUsers) -> bool:
    """Whether a box reaches a socket of ours, and nothing says that it could not."""
    box = OciBox(host, "network-test", users, "", PROXY_PORT)
    try:
        if not host.runtime.has_own_network:
            return await box.has_network()
        listener = await asyncio.wait_for(box.listen(), _SELF_TEST_DEADLINE_S)
        if listener is None:
            return False
        with listener:
            listener.setblocking(False)
            code = f"import socket; socket.create_connection(('127.0.0.1', {PROXY_PORT}))"
            where = os.fsencode(WORK)
            request = Exec(id=0, box=0, argv=(), stdin=b"", env={}, cwd=where, limits=Limits())
            await box.run(("python3", "-c", code), request)
            listener.accept()[0].close()
            return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            await box.destroy()


async def _self_test(host: OciHost, users: BoxUsers) -> None:
    box = OciBox(host, "self-test", users, "")
    request = Exec(id=0, box=0, argv=(), stdin=b"", env={}, cwd=os.fsencode(WORK), limits=Limits())
    try:
        result = await asyncio.wait_for(box.run(SELF_TEST, request), _SELF_TEST_DEADLINE_S)
    except TimeoutError as error:
        raise UserError(
            f"{host.runtime.name} {host.runtime.version} got stuck starting a box.",
            fix="choose another backend (`burnish doctor` lists them)",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            await box.destroy()
    runtime = host.runtime
    check_self_test(
        result, f"{runtime.name} {runtime.version}", whole=runtime.counted_whole, fix=_fix(result)
    )


def _fix(result: ExecResult) -> str:
    if "seccomp" in result.message:
        return "install a runtime built with libseccomp"
    if os.getuid() != 0 and "newuidmap" in result.message:
        return "sudo apt-get install uidmap"
    return namespace_fix()
