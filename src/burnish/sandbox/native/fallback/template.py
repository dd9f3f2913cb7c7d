"""Warm Python: an interpreter of the image that has imported modules and makes boxes by forking.

    launcher    trusted interpreter of the host; opens image and binds, then only waits
       |        clone into namespaces of its own: user, mount, pid, network, ipc, uts
    template    the image's interpreter, process 1 of those: a helper whose boxes are its forks
       |        clone into namespaces below these
    init        of a box; jobs are its forks

What an image says is its Python is not trusted: it gets no descriptor but the owner's socket and
no right outside a user namespace whose ids own nothing. Control group files that come with CREATE
let it move only processes that it can name, those of its own pid namespace.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import NamedTuple, NoReturn

from ..protocol import Ability
from . import kernel
from .box import NAMESPACES, become_root
from .layers import Layer, Room, attach_all, detach_all
from .root import build_root
from .stage import Stage
from .users import Users
from .wire import Channel, Message
from .zygote import Helper

BASE = "/.burnish"
_ROOM_BYTES, _ROOM_INODES = 8 * 2**20, 4096
_STATE = f"{BASE}/state.json"
_CODE = f"{BASE}/code"
_CHANNEL = 3

# Threads would be missing in every fork, and whoever waits for them would wait for ever.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Wish(NamedTuple):
    """What the template is to be."""

    interpreter: str
    """Path in the image."""
    site: bool
    """Site packages are searched."""
    paths: list[str]
    """Directories of the image that are searched before all others."""
    modules: list[str]
    """What is imported."""


def read_sources() -> dict[str, bytes]:
    """This package: it goes into the template's file system, as the host's is out of its sight."""
    here = os.path.dirname(os.path.abspath(__file__))
    found = {}
    for folder in (os.path.dirname(here), here):
        for name in os.listdir(folder):
            if name.endswith(".py") and (folder == here or name == "protocol.py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, os.path.dirname(here))] = file.read()
    return found


def launch(
    channel: Channel, hello: Message, stage: Stage, wish: Wish, sources: dict[str, bytes]
) -> int:
    """Start the template and wait for its end, or the owner's. Returns an exit status."""
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    layer = Layer(Room(_ROOM_BYTES, _ROOM_INODES), stage.users)
    attached = attach_all([layer], stage.base)
    wait, go = os.pipe2(os.O_CLOEXEC)
    child = kernel.clone(NAMESPACES)
    if child.pid == 0:
        os.close(go)
        try:
            if os.read(wait, 1) != b"g":
                os._exit(1)
            _become_template(channel, hello.id, stage, wish, sources, attached[0])
        except OSError as error:
            channel.send_error(hello.id, error.errno or 0, str(error))
        finally:
            os._exit(1)
    detach_all(attached)
    stage.users.write_maps(proc, child.pid)
    os.write(go, b"g")
    poll = select.poll()
    poll.register(child.pidfd, select.POLLIN)
    poll.register(channel, 0)
    ended = [descriptor for descriptor, _ in poll.poll()]
    try:
        os.kill(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _, status = os.waitpid(child.pid, 0)
    if channel.fileno() in ended or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0):
        return 0
    try:
        channel.send_error(hello.id, 0, f"{wish.interpreter} ended with wait status {status}")
    except OSError:
        pass
    return 1


def _become_template(
    channel: Channel,
    request: int,
    stage: Stage,
    wish: Wish,
    sources: dict[str, bytes],
    layer: str,
) -> NoReturn:
    become_root(stage)
    build_root(stage, [layer], 0, nested=BASE)
    socket.sethostname("template")
    for path, source in sources.items():
        target = f"{_CODE}/{path}"
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        with open(target, "wb") as file:
            file.write(source)
    state = {
        "request": request,
        "num_ids": stage.users.num_ids,
        "has_image": stage.has_image,
        "bind_targets": stage.bind_targets,
        "filter": stage.filter.hex(),
        "abilities": int(stage.abilities),
        "paths": wish.paths,
        "modules": wish.modules,
    }
    with open(_STATE, "w", encoding="utf-8") as file:
        json.dump(state, file)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if channel.fileno() != _CHANNEL:
        os.dup2(channel.fileno(), _CHANNEL)
    os.set_inheritable(_CHANNEL, True)
    kernel.close_from(_CHANNEL + 1)
    # What this interpreter ignores would stay ignored.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    flags = ["-s", "-B"] if wish.site else ["-s", "-S", "-B"]
    argv = [wish.interpreter, *flags, f"{_CODE}/fallback", "--serve"]
    try:
        os.execve(wish.interpreter, argv, _ENVIRONMENT)
    except OSError as error:
        message = f"{wish.interpreter} of the image: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, message) from error


def serve_template() -> int:
    """The second half, in the image's interpreter."""
    os.set_inheritable(_CHANNEL, False)
    channel = Channel(socket.socket(fileno=_CHANNEL))
    with open(_STATE, encoding="utf-8") as file:
        state = json.load(file)
    gc.disable()
    sys.path[:0] = state["paths"]
    for name in state["modules"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - modules of the image raise what they like
            reason = f"import {name}: {type(error).__name__}: {error}"
            channel.send_error(state["request"], 2, reason)
            return 0
    if len(os.listdir("/proc/self/task")) > 1:
        channel.send_error(state["request"], 22, "the modules started threads")
        return 0
    stage = Stage(
        BASE,
        Users(0, 0, state["num_ids"]),
        state["has_image"],
        state["bind_targets"],
        bytes.fromhex(state["filter"]),
        Ability(state["abilities"]),
    )
    kernel.rename_process(b"init")
    gc.collect()
    gc.freeze()
    return Helper(channel, stage, warm=True).serve(state["request"])
