"""From the stage to the helper in C, which is told in a file what there is."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
from typing import Iterator, NoReturn

from ..protocol import Ability
from . import kernel
from .hello import Hello
from .stage import Stage, make_stage
from .wire import Channel, Message

_SETTINGS = struct.Struct("<7I64s64s32s")
_MAX_BYTES = 2**16
"""Of what follows the settings in their file."""
_FIRST_FREE = 10
_INSTRUCTION_BYTES = 8
_BIND = kernel.MS_BIND | kernel.MS_RECURSIVE
_BARE = kernel.NO_SETUID | kernel.NO_EXEC
_FROZEN = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.READ_ONLY | kernel.NO_DEVICES | _BARE
_TERMINALS = "newinstance,ptmxmode=0666,mode=0600,max=64"
"""Few, of a number for all."""

# What shows the host, its switches or other users' keys. Each costs a hundredth of a box.
_COVERED_FILES = ("keys", "kallsyms", "interrupts", "kcore", "timer_list", "sysrq-trigger")
_COVERED_FOLDERS = ("acpi", "scsi")
_READ_ONLY = ("sys", "irq", "bus", "fs")


def become_zygote(
    binary: str, channel: Channel, message: Message, hello: Hello, program: bytes
) -> int:
    """Have a child make the stage; execute the binary, which joins the child and says READY.

    Not in the child: what an ordinary user executes in a user namespace belongs, for the kernel, to
    root of that one, so that jobs with this id could look at the inits (/proc/1/fd).

    Returns:
        An exit status, if the child has said why not.
    """
    user = kernel.NEW_USER if os.geteuid() else 0
    namespaces = user | kernel.NEW_MOUNTS | kernel.NEW_NETWORK
    telling, told = os.pipe()
    kept, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        status = 1
        try:
            stage = make_stage(hello, program)
            kernel.unshare(kernel.NEW_NETWORK)
            os.write(told, _settings(stage, message.id, namespaces))
            os.close(told)
            os.read(kept, 1)  # until we have been joined
            status = 0
        except OSError as error:
            channel.send_error(message.id, error.errno or 0, str(error))
        finally:
            os._exit(status)
    os.close(told)
    os.close(kept)
    settings = b"".join(iter(lambda: os.read(telling, 2**16), b""))
    if settings:
        _join(child, hold, binary, channel.fileno(), settings)
    return 1


def _join(child: int, hold: int, binary: str, channel: int, settings: bytes) -> NoReturn:
    """Execute the binary; `hold` keeps the child alive until it has been joined."""
    file = os.memfd_create("settings")
    os.write(file, settings)
    place = kernel.pidfd_open(child)
    root = os.open(f"/proc/{child}/cwd", os.O_PATH | os.O_DIRECTORY)
    program = os.open(binary, os.O_PATH)
    _start_afresh()
    # From 3 on, as in main.c, whatever was there before.
    moved = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
        for descriptor in (channel, file, place, root, hold, program)
    ]
    for number, descriptor in enumerate(moved[:-1], 3):
        os.dup2(descriptor, number)
    os.execve(moved[-1], [b"init"], os.environ)


def _settings(stage: Stage, request: int, namespaces: int) -> bytes:
    """The file; see `struct settings` in zygote.h."""
    users = stage.users
    rest = stage.filter + b"".join(
        b"\0".join(str(field).encode("utf-8", "surrogateescape") for field in row) + b"\0"
        for group in _mounts(stage)
        for row in (*group, ("",))
    )
    if len(rest) > _MAX_BYTES:
        raise OSError(errno.E2BIG, "the filter and the binds of an image")
    abilities = stage.abilities | Ability.NETWORK
    numbers = (request, abilities, namespaces, users.first_uid, users.first_gid, users.num_ids)
    lower = "/skel:/image" if stage.has_image else "/skel"
    texts = (text.encode("ascii") for text in (*users.maps(), lower))
    return _SETTINGS.pack(*numbers, len(stage.filter) // _INSTRUCTION_BYTES, *texts) + rest


def _mounts(stage: Stage) -> Iterator[list[tuple[object, ...]]]:
    """What a box mounts: source, target, kind, flags, data, and what failing is called.

    Four groups: on the stage, before the box has its root, and there what may be absent; in the
    root, what may be absent, and the rest.
    """
    masking = "masking /proc"
    container = "mounting /proc (does a container mask its own? systempaths=unconfined)"
    yield [
        ("proc", "/proc", "proc", kernel.NO_DEVICES | _BARE, "", container),
        ("/dev", "/dev", "", _BIND, "", "mounting /dev"),
        ("devpts", "/dev/pts", "devpts", _BARE, _TERMINALS, "mounting /dev/pts"),
    ]
    covers = [("/dev/null", name) for name in _COVERED_FILES]
    covers += [("/empty", name) for name in _COVERED_FOLDERS]
    covers += [(f"/proc/{name}", name) for name in _READ_ONLY]
    yield [
        *((cover, f"/proc/{name}", "", _BIND, "", masking) for cover, name in covers),
        *(("none", f"/proc/{name}", "", _FROZEN, "", masking) for name in _READ_ONLY),
    ]
    yield [
        (f"/b{number}", path[1:], "", _BIND, "", "binding what a box sees of the host")
        for number, path in enumerate(stage.bind_targets)
    ]
    yield [
        (f"/{name}", name, "", kernel.MS_MOVE, "", f"moving /{name}") for name in ("proc", "dev")
    ]


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
