"""From clone to init: what the first process of a box does before it serves commands."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
from typing import NamedTuple, NoReturn

from ..protocol import Op
from . import kernel
from .init import Init
from .python_job import Importing
from .root import build_root
from .stage import Stage
from .wire import Channel

NAMESPACES = (
    kernel.NEW_USER
    | kernel.NEW_MOUNTS
    | kernel.NEW_PID
    | kernel.NEW_NETWORK
    | kernel.NEW_IPC
    | kernel.NEW_UTS
)
_INIT_CAPABILITIES = (
    kernel.CAP_SETUID,
    kernel.CAP_SETGID,
    kernel.CAP_SETPCAP,
    kernel.CAP_KILL,
)
PACKAGE_CAPABILITIES = (
    kernel.CAP_CHOWN,
    kernel.CAP_DAC_OVERRIDE,
    kernel.CAP_FOWNER,
    kernel.CAP_FSETID,
    kernel.CAP_SETUID,
    kernel.CAP_SETGID,
    kernel.CAP_KILL,
    kernel.CAP_SYS_CHROOT,
    kernel.CAP_SETFCAP,
)
_HOSTNAME = "box"


class Plan(NamedTuple):
    """What a box is to be."""

    layers: list[str]
    """Where its layers are attached, the writable one first."""
    shm_bytes: int
    packages: bool
    processor: int | None
    """Of a deterministic box: the one that it may use."""
    network: bool
    """It is in a network namespace of its own."""
    importing: Importing | None
    """It runs Python jobs, which need this."""
    helper: int
    """Descriptor of the helper's process."""


def run_box(stage: Stage, plan: Plan, control: socket.socket, go: int) -> NoReturn:
    """Wait for the go, build the box, report, serve. Never returns to the helper's code."""
    status = 1
    try:
        status = _serve(stage, plan, control, go)
    finally:
        os._exit(status)


def _serve(stage: Stage, plan: Plan, control: socket.socket, go: int) -> int:
    channel = Channel(control)
    try:
        if os.read(go, 1) != b"g":
            return 1
        _build(stage, plan, control)
    except OSError as error:
        channel.send_error(0, error.errno or 0, str(error))
        return 1
    # From here on nothing may be imported: what the box holds under that name is not ours.
    sys.path.clear()
    sys.meta_path.clear()
    channel.send(Op.READY, 0)
    packages = PACKAGE_CAPABILITIES if plan.packages else ()
    return Init(channel, stage.users, packages, plan.importing).serve()


def become_root(stage: Stage) -> None:
    """Take the box's id 0 and its life: the process ends with the helper."""
    if stage.users.num_ids > 1:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    kernel.die_with_parent()


def _build(stage: Stage, plan: Plan, control: socket.socket) -> None:
    become_root(stage)
    build_root(stage, plan.layers, plan.shm_bytes)
    kernel.unshare(kernel.NEW_CGROUP)
    socket.sethostname(_HOSTNAME)
    if plan.network:
        kernel.start_loopback()
    if plan.processor is not None:
        kernel.fix_addresses()
        os.sched_setaffinity(0, [plan.processor])
    helper = _keep_only(control, plan.helper)
    os.setsid()
    os.umask(0o022)
    extra = PACKAGE_CAPABILITIES if plan.packages else ()
    kernel.bound_capabilities(extra)
    kernel.set_secure_bits(fixed=True, root_is_special=plan.packages)
    last = stage.users.init
    os.setresgid(last, last, last)
    os.setresuid(last, last, last)
    kernel.set_capabilities(tuple({*_INIT_CAPABILITIES, *extra}))
    # Changes of user cleared it.
    kernel.die_with_parent()
    if select.select([helper], [], [], 0)[0]:
        os._exit(1)  # the helper had ended before
    os.close(helper)
    kernel.no_new_privileges()
    kernel.load_filter(stage.filter)
    kernel.set_dumpable(False)


def _keep_only(control: socket.socket, helper: int) -> int:
    """Descriptor 3 becomes the control socket, 4 the helper, 0 to 2 lead nowhere, all others go."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    high = fcntl.fcntl(helper, fcntl.F_DUPFD_CLOEXEC, 5)
    kept = os.dup2(control.detach(), 3, inheritable=False)
    helper = os.dup2(high, 4, inheritable=False)
    kernel.close_from(5)
    control.__init__(fileno=kept)  # type: ignore[misc]
    return helper
