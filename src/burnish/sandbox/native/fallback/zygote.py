"""The helper: makes, freezes and destroys boxes for one owner, one request at a time."""

from __future__ import annotations

import errno
import itertools
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

_FLAGS: dict[int, int] = {
    Op.CREATE: Flag.CREATE_INTO_CGROUP
    | Flag.CREATE_DETERMINISTIC
    | Flag.CREATE_PACKAGES
    | Flag.CREATE_UPPER,
    Op.NEWLAYER: Flag.NEWLAYER_UPPER,
}


class _Box:
    """A box that has not been destroyed, or a layer."""

    def __init__(self, upper: Layer, child: kernel.Child | None = None) -> None:
        self.upper = upper
        self.child = child
        """Its init, while that is there."""
        self.is_layer = child is None


class Helper:
    """Serves until the owner hangs up."""

    def __init__(self, channel: Channel, stage: Stage, *, warm: bool = False) -> None:
        """Its boxes run Python jobs if it is `warm`: the image's own interpreter."""
        self._channel = channel
        self._stage = stage
        self._importing = importing_now() if warm else None
        self._proc = os.open(f"{stage.base}/proc", os.O_PATH | os.O_CLOEXEC)
        self._own_pidfd = kernel.pidfd_open(os.getpid())
        self._boxes: dict[int, _Box] = {}
        self._numbers = itertools.count(1)
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
        _no_number(fields)
        room, shm_bytes = Room(fields.u64(), fields.u32()), fields.u64()
        processor = fields.u32()
        numbers = fields.many(fields.u32)
        fields.end()
        groups, place = _place(message, room)
        if message.flags & Flag.CREATE_INTO_CGROUP and len(groups) != 1:
            raise Malformed("one directory goes with CREATE_INTO_CGROUP")
        if len(numbers) > MAX_LAYERS:
            raise OSError(errno.EINVAL, "too many layers")
        if len(set(numbers)) != len(numbers):
            raise OSError(errno.ENOENT, "a layer twice")
        below = [self._box(layer, is_layer=True).upper for layer in reversed(numbers)]
        upper = Layer(place, self._stage.users)
        try:
            child, control = self._start(message, groups, [upper, *below], shm_bytes, processor)
        except OSError:
            upper.close()
            raise
        number = self._add(_Box(upper, child))
        self._by_pidfd[child.pidfd] = number
        self._poll.register(child.pidfd, select.EPOLLIN)
        folder = upper.open_upper()
        with control:
            fds = [control.fileno(), child.pidfd, folder]
            body = struct.pack("<II", number, child.pid)
            self._channel.send(Op.CREATED, message.id, body, fds)
        os.close(folder)

    def _start(
        self,
        message: Message,
        groups: list[int],
        layers: list[Layer],
        shm_bytes: int,
        processor: int,
    ) -> tuple[kernel.Child, socket.socket]:
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
                    processor if message.flags & Flag.CREATE_DETERMINISTIC else None,
                    bool(stage.abilities & Ability.NETWORK),
                    self._importing,
                    self._own_pidfd,
                )
                run_box(stage, plan, theirs, wait)
        except OSError:
            ours.close()
            os.close(go)
            raise
        finally:
            os.close(wait)
            theirs.close()
            # The box has copies of these in its own mount namespace.
            detach_all(attached)
        try:
            stage.users.write_maps(self._proc, child.pid)
            for descriptor in () if into else groups:
                os.write(descriptor, str(child.pid).encode("ascii"))
            os.write(go, b"g")
        except OSError:
            ours.close()
            _end(child.pid)
            os.close(child.pidfd)
            raise
        finally:
            os.close(go)
        return child, ours

    def _freeze(self, message: Message) -> None:
        number = _only_number(message)
        box = self._box(number)
        status = self._bury(box)
        box.is_layer = True
        self._channel.send(Op.DONE, message.id)
        if status is not None:
            self._channel.send(Op.DIED, 0, struct.pack("<Ii", number, status))

    def _destroy(self, message: Message) -> None:
        number = _only_number(message)
        box = self._boxes.get(number)
        if box is None:
            raise OSError(errno.ENOENT, f"no box {number}")
        self._bury(box)
        del self._boxes[number]
        box.upper.close()
        self._channel.send(Op.DONE, message.id)

    def _resize(self, message: Message) -> None:
        fields = Fields(message.body)
        number, room = fields.u32(), Room(fields.u64(), fields.u32())
        fields.end()
        if not all(room):
            raise OSError(errno.EINVAL, "no room")
        self._box(number).upper.resize(room)
        self._channel.send(Op.DONE, message.id)

    def _bury(self, box: _Box) -> int | None:
        """End all processes of a box; returns the wait status, None if none was left."""
        child, box.child = box.child, None
        if child is None:
            return None
        self._poll.unregister(child.pidfd)
        del self._by_pidfd[child.pidfd]
        os.close(child.pidfd)
        return _end(child.pid)

    def _report_death(self, pidfd: int) -> None:
        number = self._by_pidfd.get(pidfd)
        if number is None:
            return
        status = self._bury(self._boxes[number])
        self._channel.send(Op.DIED, 0, struct.pack("<Ii", number, status))

    def _add(self, box: _Box) -> int:
        number = next(self._numbers)
        self._boxes[number] = box
        return number

    def _box(self, number: int, *, is_layer: bool = False) -> _Box:
        box = self._boxes.get(number)
        if box is None or box.is_layer != is_layer:
            raise OSError(errno.ENOENT, f"no {'layer' if is_layer else 'box'} {number}")
        return box

    # Layers

    def _new_layer(self, message: Message) -> None:
        fields = Fields(message.body)
        _no_number(fields)
        room = Room(fields.u64(), fields.u32())
        fields.end()
        _, place = _place(message, room)
        number = self._add(_Box(Layer(place, self._stage.users)))
        self._send_folder(message.id, number)

    def _layer_fd(self, message: Message) -> None:
        self._send_folder(message.id, _only_number(message))

    def _send_folder(self, request: int, number: int) -> None:
        folder = self._box(number, is_layer=True).upper.open_upper()
        self._channel.send(Op.DONE, request, struct.pack("<I", number), fds=[folder])
        os.close(folder)


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


def _no_number(fields: Fields) -> None:
    if fields.u32() != 0:
        raise Malformed("what is made has no number yet")


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
