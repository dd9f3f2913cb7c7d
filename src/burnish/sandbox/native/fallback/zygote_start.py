"""From the stage to the helper in C, which is told in its arguments what there is."""

from __future__ import annotations

import os
import resource
import signal
from typing import NoReturn

from ..protocol import Ability
from . import kernel
from .stage import Stage
from .wire import Channel, Message


def become_zygote(binary: str, channel: Channel, hello: Message, stage: Stage) -> NoReturn:
    """Execute it in an empty network. It leaves the host's files itself, and says READY.

    Where the binary is not static, its loader needs to see them once more.

    Args:
        binary: where it is.
        channel: to the owner.
        hello: what it has to answer.
        stage: where we are; its root is the working directory.

    Raises:
        OSError: the kernel refuses a step.
    """
    program = os.open(binary, os.O_RDONLY | os.O_CLOEXEC)
    kernel.unshare(kernel.NEW_NETWORK)
    _start_afresh()
    users = stage.users
    numbers = (
        channel.fileno(),
        _kept(stage.filter),
        hello.id,
        stage.abilities | Ability.NETWORK,
        users.first_uid,
        users.first_gid,
        users.num_ids,
        stage.job_uid,
        int(stage.has_image),
    )
    os.set_inheritable(channel.fileno(), True)
    arguments = ["init", *users.maps(), *map(str, map(int, numbers)), *stage.bind_targets]
    os.execve(program, arguments, os.environ)


def _kept(content: bytes) -> int:
    """A file in memory that outlives execution."""
    file = os.memfd_create("filter", 0)
    os.write(file, content)
    return file


def _start_afresh() -> None:
    """Nothing of the interpreter, of the owner or of whoever started it is left to boxes."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open("dev/null", os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
