"""The helper: makes, freezes and destroys boxes for one owner, one request at a time."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import sys
from typing import Callable

from ..protocol import MAX_CREATE_FDS, MAX_LAYERS, VERSION, Ability, Flag, Op
from . import kernel
from .box import NAMESPACES, Plan, run_box
from .layers import Layer, Room, attach_all, detach_all
from .python_job import importing_now
from .stage import Stage
from .wire import Channel, Fields, Malformed, Message, close_all

_BUILD_LIMIT_MS = 10_000
_FLAGS: dict[int, int] = {
    Op.CREATE: Flag.CREATE_INTO_CGROUP
    | Flag.CREATE_DETERMINISTIC
    | Flag.CREATE_PACKAGES
    | Flag.CREATE_UPPER,
    Op.NEWLAYER: Flag.NEWLAYER_UPPER,
    Op.FREEZE: Flag.FREEZE_EARLY,
}


class _Box:
    """A box that has not been destroyed."""

    def __init__(self, pid: int, pidfd: int, upper: Layer) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.upper = upper
        self.alive = True


class Helper:
    """Serves until the owner hangs up."""

    def __init__(self, channel: Channel, stage: Stage, *, warm: bool = False) -> None:
        """Its boxes run Python jobs if it is `warm`: the image's own interpreter."""
        self._channel = channel
        self._stage = stage
        self._importing = importing_now() if warm else None
        self._proc = os.open(f"{stage.base}/proc", os.O_PATH | os.O_CLOEXEC)
        self._boxes: dict[int, _Box] = {}
        self._layers: dict[int, Layer] = {}
        self._poll = select.epoll()
        without = 0 if stage.abilities & Ability.NETWORK else kernel.NEW_NETWORK
        self._namespaces = NAMESPACES & ~without
        self._by_pidfd: dict[int, int] = {}

    def serve(self, request: int) -> int:
        """Answer HELLO and serve until the owner hangs up (0) or breaks the protocol (1)."""
        self._channel.send(Op.READY, request, struct.pack("<II", VERSION, self._stage.abilities))
        self._poll.register(self._channel, select.EPOLLIN)
        try:
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor != self._channel.fileno():
                        self._report_death(descriptor)
                    elif not self._receive():
                        return 0
        except Malformed as error:
            sys.stderr.write(f"sandbox helper: {error}\n")
            return 1
        except (BrokenPipeError, ConnectionResetError):
            return 0

    def _receive(self) -> bool:
        message = self._channel.receive()
        if message is None:
            return False
        handlers: dict[int, Callable[[Message], None]] = {
            Op.CREATE: self._create,
            Op.FREEZE: self._freeze,
            Op.DESTROY: self._destroy,
            Op.DROP: self._drop,
            Op.NEWLAYER: self._new_layer,
            Op.LAYERFD: self._layer_fd,
            Op.RESIZE: self._resize,
        }
        try:
            if message.op not in handlers:
                raise Malformed(f"op {message.op} is not for a helper")
            if message.flags & ~_FLAGS.get(message.op, 0):
                raise Malformed(f"flags {message.flags}")
            disks = int(bool(message.flags & Flag.CREATE_UPPER))
            most = disks + (MAX_CREATE_FDS if message.op == Op.CREATE else 0)
            if not disks <= len(message.fds) <= most:
                raise Malformed(f"{len(message.fds)} descriptors")
            handlers[message.op](message)
        except OSError as error:
            self._channel.send_error(message.id, error.errno or errno.EIO, str(error))
        finally:
            close_all(message.fds)
        return True

    # Boxes

    def _create(self, message: Message) -> None:
        fields = Fields(message.body)
        number, room = fields.u32(), Room(fields.u64(), fields.u32())
        shm_bytes = fields.u64()
        numbers = fields.many(fields.u32)
        fields.end()
        groups, place = _place(message, room)
        if message.flags & Flag.CREATE_INTO_CGROUP and len(groups) != 1:
            raise Malformed("one directory goes with CREATE_INTO_CGROUP")
        if number in self._boxes:
            raise OSError(errno.EEXIST, f"box {number} exists")
        if len(numbers) > MAX_LAYERS:
            raise OSError(errno.EINVAL, "too many layers")
        below = [self._layer(layer) for layer in reversed(numbers)]
        upper = Layer(place, self._stage.users)
        try:
            box, control = self._start(message, groups, number, [upper, *below], shm_bytes)
        except OSError:
            upper.close()
            raise
        self._boxes[number] = box
        self._by_pidfd[box.pidfd] = number
        self._poll.register(box.pidfd, select.EPOLLIN)
        folder = upper.open_upper()
        with control:
            fds = [control.fileno(), box.pidfd, folder]
            self._channel.send(Op.CREATED, message.id, struct.pack("<I", box.pid), fds)
        os.close(folder)

    def _start(
        self,
        message: Message,
        groups: list[int],
        number: int,
        layers: list[Layer],
        shm_bytes: int,
    ) -> tuple[_Box, socket.socket]:
        stage = self._stage
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wait, go = os.pipe2(os.O_CLOEXEC)
        attached = attach_all(layers, stage.base)
        into = bool(message.flags & Flag.CREATE_INTO_CGROUP)
        try:
            child = kernel.clone(self._namespaces, groups[0] if into else None)
            if child.pid == 0:
                os.close(go)
                plan = Plan(
                    attached,
                    shm_bytes,
                    bool(message.flags & Flag.CREATE_PACKAGES),
                    number if message.flags & Flag.CREATE_DETERMINISTIC else None,
                    bool(stage.abilities & Ability.NETWORK),
                    self._importing,
                )
                run_box(stage, plan, theirs, wait)
        except OSError:
            detach_all(attached)
            ours.close()
            os.close(go)
            raise
        finally:
            os.close(wait)
            theirs.close()
        try:
            stage.users.write_maps(self._proc, child.pid)
            for descriptor in () if into else groups:
                os.write(descriptor, str(child.pid).encode("ascii"))
            os.write(go, b"g")
            # The box has copies of these in its own mount namespace.
            detach_all(attached)
            attached = []
            _await_ready(ours)
        except (OSError, Malformed) as error:
            ours.close()
            _end(child.pid)
            os.close(child.pidfd)
            if isinstance(error, Malformed):
                raise OSError(errno.EPROTO, str(error)) from error
            raise
        finally:
            detach_all(attached)
            os.close(go)
        return _Box(child.pid, child.pidfd, layers[0]), ours

    def _freeze(self, message: Message) -> None:
        fields = Fields(message.body)
        number, layer = fields.u32(), fields.u32()
        fields.end()
        box = self._box(number)
        if layer in self._layers:
            raise OSError(errno.EEXIST, f"layer {layer} exists")
        if box.upper.is_empty():
            raise OSError(errno.ENODATA, "nothing changed")
        early = message.flags & Flag.FREEZE_EARLY and box.alive
        status = self._bury(number)
        box.upper.forget_shared_memory()
        self._layers[layer] = box.upper
        self._channel.send(Op.DONE, message.id)
        if early:
            self._channel.send(Op.DIED, 0, struct.pack("<Ii", number, status))

    def _destroy(self, message: Message) -> None:
        fields = Fields(message.body)
        number = fields.u32()
        fields.end()
        box = self._box(number)
        self._bury(number)
        box.upper.close()
        self._channel.send(Op.DONE, message.id)

    def _resize(self, message: Message) -> None:
        fields = Fields(message.body)
        number, room = fields.u32(), Room(fields.u64(), fields.u32())
        fields.end()
        self._box(number).upper.resize(room)
        self._channel.send(Op.DONE, message.id)

    def _bury(self, number: int) -> int:
        """End all processes of a box and free its number; returns the wait status."""
        box = self._boxes.pop(number)
        status = 0
        if box.alive:
            self._poll.unregister(box.pidfd)
            status = _end(box.pid)
        del self._by_pidfd[box.pidfd]
        os.close(box.pidfd)
        return status

    def _report_death(self, pidfd: int) -> None:
        number = self._by_pidfd.get(pidfd)
        if number is None:
            return
        box = self._boxes[number]
        self._poll.unregister(pidfd)
        _, status = os.waitpid(box.pid, 0)
        box.alive = False
        self._channel.send(Op.DIED, 0, struct.pack("<Ii", number, status))

    def _box(self, number: int) -> _Box:
        if number not in self._boxes:
            raise OSError(errno.ENOENT, f"no box {number}")
        return self._boxes[number]

    # Layers

    def _drop(self, message: Message) -> None:
        number = _only_number(message)
        self._layer(number).close()
        del self._layers[number]
        self._channel.send(Op.DONE, message.id)

    def _new_layer(self, message: Message) -> None:
        fields = Fields(message.body)
        number, room = fields.u32(), Room(fields.u64(), fields.u32())
        fields.end()
        _, place = _place(message, room)
        if number in self._layers:
            raise OSError(errno.EEXIST, f"layer {number} exists")
        self._layers[number] = Layer(place, self._stage.users)
        self._send_folder(message.id, self._layers[number])

    def _layer_fd(self, message: Message) -> None:
        self._send_folder(message.id, self._layer(_only_number(message)))

    def _send_folder(self, request: int, layer: Layer) -> None:
        folder = layer.open_upper()
        self._channel.send(Op.DONE, request, fds=[folder])
        os.close(folder)

    def _layer(self, number: int) -> Layer:
        if number not in self._layers:
            raise OSError(errno.ENOENT, f"no layer {number}")
        return self._layers[number]


def _place(message: Message, room: Room) -> tuple[list[int], Room | int]:
    """The descriptors that are no disk; and the disk, which comes last, or the room without one.

    Raises:
        OSError: EINVAL, no room.
    """
    if message.flags & Flag.CREATE_UPPER:
        return message.fds[:-1], message.fds[-1]
    if not all(room):
        raise OSError(errno.EINVAL, "no room")
    return message.fds, room


def _only_number(message: Message) -> int:
    fields = Fields(message.body)
    number = fields.u32()
    fields.end()
    return number


def _end(pid: int) -> int:
    """Kill a child and wait; with the first process of a pid namespace all others end."""
    assert pid > 1  # -1 would be every process of our user on this machine
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _await_ready(control: socket.socket) -> None:
    """Until the box reports; it runs nothing but our own code so far.

    Raises:
        OSError: the step that failed.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    if not poll.poll(_BUILD_LIMIT_MS):
        raise TimeoutError(errno.ETIMEDOUT, "the box was not built in time")
    message = Channel(control).receive()
    if message is None:
        raise OSError(errno.ECHILD, "the box ended while it was built")
    if message.op != Op.READY:
        fields = Fields(message.body)
        raise OSError(fields.u32(), fields.text().decode("utf-8", "replace"))
