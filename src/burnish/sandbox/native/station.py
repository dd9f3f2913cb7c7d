"""One helper with what its boxes share, and the making and ending of boxes there."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

from burnish.core.boxes import Policy, Privileges
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.cancellation import resolve, uninterrupted
from burnish.sandbox.cgroup_files import BoxGroup
from burnish.sandbox.descriptors import on_own_descriptors
from burnish.sandbox.images.base import ImageRoot
from burnish.sandbox.images.running import ImageUser
from burnish.sandbox.native import wire
from burnish.sandbox.native.box_room import DEFAULT_ROOM, Room
from burnish.sandbox.native.client import Answer, Helper, failure
from burnish.sandbox.native.disks import Disks, write_out
from burnish.sandbox.native.gauge import Census
from burnish.sandbox.native.groups import Groups
from burnish.sandbox.native.identities import Identities
from burnish.sandbox.native.image_settings import image_problem, is_machines
from burnish.sandbox.native.init import Init
from burnish.sandbox.native.kept_layers import KeptLayers
from burnish.sandbox.native.layer_files import LayerFiles
from burnish.sandbox.native.making import Making
from burnish.sandbox.native.protocol import Op
from burnish.sandbox.native.templates import Template, host_pid

_MEMBER = os.O_WRONLY | os.O_CLOEXEC


class Kind(NamedTuple):
    """Boxes of one kind can stand in for each other until they are used."""

    packages: bool
    deterministic: bool


def kind_of(policy: Policy) -> Kind:
    """The part of a policy that a box is born with."""
    return Kind(policy.privileges is Privileges.PACKAGES, policy.deterministic)


class _Entry(NamedTuple):
    fds: tuple[int, ...]
    """What CREATE takes."""
    opened: tuple[int, ...]
    """Those that were opened for it alone."""
    into_directory: bool


class _Wanted(NamedTuple):
    """A box, as `Station.make` was asked for it."""

    kind: Kind
    group: BoxGroup | None
    room: Room
    hold: int | None
    disk: int | None


class Station(KeptLayers):
    """Makes and ends boxes of one image with one helper. Usable from any thread and loop."""

    def __init__(
        self,
        helper: Helper,
        image: ImageRoot | None,
        user: ImageUser,
        ids: Identities,
        groups: Groups | None,
        template: Template | None = None,
        disks: Disks | None = None,
    ) -> None:
        """Take over the helper, whose jobs are of `user`; with a `template`, it is warm Python.

        With `disks`, that is where boxes write.
        """
        super().__init__(helper, disks)
        self.image = image
        self.template = template
        self.ids = ids
        self.user = user
        self.files = LayerFiles(ids.uid_first, ids.gid_first, helper.pid)
        self.groups = groups
        self.proven = False
        """There was a box: what fails from now on is not the image."""
        self.census = Census(in_memory=disks is None)
        self._numbers = itertools.count()
        self._processors = sorted(os.sched_getaffinity(0))

    @property
    def alive(self) -> bool:
        """Whether boxes can be made here."""
        return self.helper.alive

    @property
    def is_idle(self) -> bool:
        """Whether no box in use and no snapshot stands on it."""
        with self.layers_lock:
            return not self.layers.num_holds

    def refusal(self, error: OSError) -> UserError | ClassifiedFailure:
        """What it means that a box could not be made."""
        if self.image is not None and not self.proven and not is_machines(error):
            return image_problem(self.image.name, str(error))
        return failure(f"a box could not be made: {error}")

    def take_group(self) -> BoxGroup | None:
        """Control groups for a box, where there are any."""
        return self.groups.take() if self.groups else None

    def give_group(self, group: BoxGroup | None) -> None:
        """For the next box."""
        if group is not None and self.groups is not None:
            self.groups.give(group)

    def make(
        self,
        kind: Kind,
        group: BoxGroup | None,
        *,
        room: Room = DEFAULT_ROOM,
        hold: int | None = None,
        lent: bool = False,
        after: int = 0,
        disk: int | None = None,
        on_made: Callable[[Making], None] | None = None,
    ) -> Making:
        """Begin to make a box.

        Args:
            kind: what it is born with.
            group: where its processes go. Belongs to the making and then to its box.
            room: what it may store.
            hold: layers that it starts from.
            lent: the group belongs to somebody else.
            after: number of the box whose place it takes, and in whose group it is.
            disk: where it writes, if there is one already; taken over.
            on_made: called when it is there or has failed, in any thread.
        """
        making = Making(self, None if lent else group, after)

        def settle(outcome: Init | Exception) -> None:
            making.settle(outcome)
            if on_made is not None:
                on_made(making)

        def with_disk(found: int | OSError | None) -> None:
            if isinstance(found, OSError):
                settle(found)
            else:
                self._create(_Wanted(kind, group, room, hold, found), settle)

        if self.disks is not None and disk is None:
            self.disks.make_later(room, with_disk)
        else:
            with_disk(disk)
        return making

    def _create(self, wanted: _Wanted, settle: Callable[[Init | Exception], None]) -> None:
        group, disk = wanted.group, wanted.disk
        try:
            entry = self._entry(group)
        except OSError as error:
            self.unused(disk)
            settle(error)
            return

        def on_answer(answer: Answer | None) -> None:
            for descriptor in entry.opened:
                os.close(descriptor)
            if group is not None:
                group.entered()
            made = self._made(answer)
            if self.disks is not None and disk is not None and isinstance(made, Init):
                self.disks.is_of_box(made.number, disk)
            else:
                self.unused(disk)
            settle(made)

        flags = wire.create_flags(
            into_cgroup=entry.into_directory,
            deterministic=wanted.kind.deterministic,
            packages=wanted.kind.packages,
            upper=disk is not None,
        )
        fds = entry.fds if disk is None else (*entry.fds, disk)
        # No layer of the stack may be dropped before the helper has read it.
        with self.layers_lock:
            try:
                layers = self.numbers(wanted.hold) if wanted.hold is not None else ()
            except ValueError:
                # Whoever wanted it has given up while its disk was made.
                on_answer(None)
                return
            body = wire.create_body(*wanted.room, self._processor(), layers)
            self.helper.submit(Op.CREATE, body, on_answer, flags=flags, fds=fds)

    def unused(self, disk: int | None) -> None:
        """Nobody will write to a disk that was made, if one was."""
        if self.disks is not None and disk is not None:
            self.disks.unused(disk)

    def _processor(self) -> int:
        """Of a deterministic box: they take turns."""
        return self._processors[next(self._numbers) % len(self._processors)]

    def _entry(self, group: BoxGroup | None) -> _Entry:
        """How a process gets into a group."""
        if group is None:
            return _Entry((), (), False)
        if group.into_directory and self.template is not None:
            # A template has no right to enter a directory: it can use what we opened.
            opened = tuple(os.open(name, _MEMBER) for name in group.attach_files())
            return _Entry(opened, opened, False)
        return _Entry(group.entry_fds(), (), group.into_directory)

    def _made(self, answer: Answer | None) -> Init | Exception:
        try:
            reply, fds = self.helper.checked(answer)
            number, pid = wire.read_numbers(reply, Op.CREATED, "II")
        except OSError as error:
            return error
        except wire.BadReply as error:
            self.helper.kill()
            return failure(f"the helper broke the protocol: {error}")
        except ClassifiedFailure as error:
            return error
        return Init(number, pid if self.template is None else host_pid(fds[1]), fds)

    def end(self, init: Init, on_ended: Callable[[], None]) -> None:
        """End a box; `on_ended` is called, in any thread, when no process of it is left."""
        number = init.number

        def on_answer(answer: Answer | None) -> None:
            self.helper.died.pop(number, None)
            if self.disks is not None:
                self.disks.end_box(number)
            on_ended()

        self.helper.submit(Op.DESTROY, wire.numbers_body("I", number), on_answer)
        init.close()

    async def ended(self, init: Init) -> None:
        """End a box and wait for it.

        Raises:
            ClassifiedFailure: the helper has ended, and so nothing can follow.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end(init, lambda: resolve(future, None))
        with self.helper.watching():
            await future
        if not self.helper.alive:
            raise failure("the helper of the boxes has ended")

    async def gone(self, number: int) -> None:
        """Wait until no process of a box that was frozen is left."""
        if end := self.helper.fading.end_of(number):
            with self.helper.watching():
                await end

    async def freeze(self, init: Init, hold: int) -> bool:
        """End a box and lay what it wrote on top of the stack of `hold`.

        False if it wrote nothing: then it lives on. Else its processes can write nothing any more,
        but they may be there for a moment: `Making.wait` of the next box waits for their end.

        Raises:
            OSError: the helper said so.
            ClassifiedFailure: the helper has ended, or the disk has lost something.
        """
        if not init.wrote():
            return False
        await _forget_shared(init)
        if self.disks is not None:
            # Most of it here, where no other box of the helper has to wait.
            await write_out(init.upper_fd)
        with self.layers_lock:
            layer = self.layers.new()
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()

        def on_answer(answer: Answer | None) -> None:
            # Here and not after the waiting, which may end early.
            failed = answer is None or answer.reply.op == Op.ERROR
            with self.layers_lock:
                if failed:
                    self.layers.discard(layer)
                else:
                    if self.disks is not None:
                        self.disks.becomes_layer(init.number, layer)
                    self.learn(layer, init.number)
                    self._push(hold, layer)
            if failed:
                self.helper.fading.ended(init.number)
            resolve(future, answer)

        self.helper.fading.add(init.number)
        if init.number in self.helper.died:
            self.helper.fading.ended(init.number)
        self.helper.submit(Op.FREEZE, wire.numbers_body("I", init.number), on_answer)
        with self.helper.watching():
            answer = await future
        self.helper.checked(answer)
        self.helper.died.pop(init.number, None)
        if self.disks is not None:
            self.disks.complete(os.dup(init.upper_fd))
            await write_out(init.upper_fd)
        init.close()
        return True

    def _push(self, hold: int, layer: int) -> None:
        try:
            self.layers.push(hold, layer)
        except ValueError:
            # The box was given up meanwhile.
            self.layers.discard(layer)
            self.drop([layer])

    async def resize(self, init: Init, room: Room) -> None:
        """Change what a box may store.

        Raises:
            OSError: EINVAL if it stores more already.
            ClassifiedFailure: the helper has ended.
        """
        body = wire.numbers_body("IQI", init.number, room.disk_bytes, room.num_inodes)
        await self.helper.ask(Op.RESIZE, body)


async def _forget_shared(init: Init) -> None:
    """Shared memory is no part of a snapshot."""
    try:
        folder = init.shared_files()
    except OSError:
        return  # the box has closed it to us: the layer only takes more room

    def empty(own: list[int]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=own[0])

    try:
        if names := os.listdir(folder):
            await uninterrupted(asyncio.ensure_future(on_own_descriptors(empty, (folder,))))
    finally:
        os.close(folder)
