"""From the stage to the helper in C, which is told in its arguments what there is."""

from __future__ import annotations

import os
import resource
import signal
from typing import NoReturn

from ..protocol import Ability
from . import kernel
from .hello import Hello
from .stage import Stage, make_stage
from .wire import Channel, Message


def become_zygote(
    binary: str, channel: Channel, message: Message, hello: Hello, program: bytes
) -> int:
    """Have a child make the stage; execute the binary, which joins the child and says READY.

    Not in the child: what an ordinary user executes in a user namespace belongs, for the kernel, to
    root of that one, so that jobs with this id could look at the inits (/proc/1/fd).

    Returns:
        An exit status, if the child has said why not.
    """
    telling, told = os.pipe()
    kept, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        status = 1
        try:
            stage = make_stage(hello, program)
            kernel.unshare(kernel.NEW_NETWORK)
            os.write(told, "\0".join(_described(stage)).encode("utf-8", "surrogateescape"))
            os.close(told)
            os.read(kept, 1)  # until we have been joined
            status = 0
        except OSError as error:
            channel.send_error(message.id, error.errno or 0, str(error))
        finally:
            os._exit(status)
    os.close(told)
    os.close(kept)
    described = b"".join(iter(lambda: os.read(telling, 2**16), b""))
    if described:
        _join(child, hold, binary, (channel.fileno(), message.id, _memory_file(program)), described)
    return 1


def _join(
    child: int, hold: int, binary: str, given: tuple[int, int, int], described: bytes
) -> NoReturn:
    """Execute the binary; `hold` keeps the child alive until it has been joined."""
    pidfd = kernel.pidfd_open(child)
    place = os.open(f"/proc/{child}/cwd", os.O_PATH | os.O_DIRECTORY)
    user = kernel.NEW_USER if os.geteuid() else 0
    channel, request, filter_file = given
    for descriptor in (channel, pidfd, place, hold):
        os.set_inheritable(descriptor, True)
    namespaces = user | kernel.NEW_MOUNTS | kernel.NEW_NETWORK
    numbers = (channel, filter_file, request, pidfd, namespaces, place, hold)
    _start_afresh()
    arguments = [b"init", *(str(number).encode() for number in numbers), *described.split(b"\0")]
    os.execve(binary, arguments, os.environ)


def _described(stage: Stage) -> list[str]:
    users = stage.users
    numbers = (
        stage.abilities | Ability.NETWORK,
        users.first_uid,
        users.first_gid,
        users.num_ids,
        stage.job_uid,
        stage.has_image,
    )
    return [*(str(int(number)) for number in numbers), *users.maps(), *stage.bind_targets]


def _memory_file(content: bytes) -> int:
    """Outlives execution."""
    file = os.memfd_create("filter", 0)
    os.write(file, content)
    return file


def _start_afresh() -> None:
    """Nothing of the interpreter, of the owner or of whoever started it is left to boxes."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
