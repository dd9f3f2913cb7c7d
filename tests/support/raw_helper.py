"""The native sandbox's protocol, spoken by hand: independent of the client in the package."""

import errno
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from burnish.sandbox.host_view import system_paths
from burnish.sandbox.interpreter import find_python
from burnish.sandbox.native import binary
from burnish.sandbox.native.protocol import HEADER, MAX_MESSAGE_BYTES, VERSION, Ending, Flag, Op
from burnish.sandbox.native.wire import program_files
from burnish.sandbox.seccomp import build_filter

FIRST_ID, NUM_IDS, NOBODY = 1_900_000_000, 65536, 65534
TIMEOUT_S = 60
FALLBACK = Path(binary.__file__).with_name("fallback")
PATH = "PATH=/usr/local/bin:/usr/bin:/bin"

PYTHON = find_python() or "python3"
ARGUMENTS = ("-I", "-S", "-B", str(FALLBACK))
C_HELPER = os.environ.get("BURNISH_TEST_HELPER", str(binary.BINARY))
COMMANDS = {
    # Our own interpreter may lie where an ordinary user cannot read it.
    "c": (PYTHON, *ARGUMENTS, "--zygote", C_HELPER),
    "python": (sys.executable, *ARGUMENTS),
}
"""Implementations of the helper."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return data + b"\0"


def many(items: Sequence[bytes]) -> bytes:
    return struct.pack("<I", len(items)) + b"".join(items)


def job_body(
    user: int,
    argv: Sequence[str | bytes] = (),
    *,
    detail: int = 0,
    wall_us: int = 30_000_000,
    cwd: str = "/work",
    files: Sequence[str | bytes] = (),
    env: Sequence[str] = (),
    limits: Sequence[tuple[int, int, int]] = (),
) -> bytes:
    """Of EXEC and its like."""
    counts = len(limits), len(files), len(argv), len(env)
    body = struct.pack("<QQIIIIII", wall_us, detail, user, user, *counts)
    body += b"".join(struct.pack("<IQQ", *limit) for limit in limits)
    return body + b"".join(map(text, (cwd, *files, *argv, *env)))


def memory_file(data: bytes = b"") -> int:
    fd = os.memfd_create("test")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 24, 0)


class Reply(NamedTuple):
    op: Op
    id: int
    body: bytes
    fds: list[int]

    @property
    def error(self) -> int:
        assert self.op is Op.ERROR, self
        return struct.unpack_from("<i", self.body)[0]

    @property
    def stage(self) -> str:
        return self.body[8:].decode()


class Exited(NamedTuple):
    ending: Ending
    code: int
    wall_us: int
    user_us: int
    system_us: int
    max_rss_bytes: int


def exit_of(reply: Reply) -> Exited:
    assert reply.op is Op.EXITED, (reply, reply.stage)
    ending, *rest = struct.unpack("<IiQQQQ", reply.body)
    return Exited(Ending(ending), *rest)


def files_of(argv: Sequence[str], env: Sequence[str]) -> tuple[str, ...]:
    path = dict(variable.partition("=")[::2] for variable in env).get("PATH")
    return program_files(argv[0], path) if argv else ()


class Channel:
    """One SEQPACKET socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self.socket = sock
        self._next = 0

    def send(self, op: int, body: bytes = b"", fds: Sequence[int] = (), flags: int = 0) -> int:
        self._next += 1
        message = HEADER.pack(HEADER.size + len(body), op, flags, self._next) + body
        socket.send_fds(self.socket, [message], list(fds))
        return self._next

    def receive(self) -> Reply | None:
        """None: the other side is gone."""
        try:
            data, fds, flags, _ = socket.recv_fds(self.socket, MAX_MESSAGE_BYTES, 8)
        except ConnectionResetError:
            return None
        if not data:
            return None
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        size, op, _, number = HEADER.unpack_from(data)
        assert size == len(data)
        return Reply(Op(op), number, data[HEADER.size :], fds)

    def ask(self, op: int, body: bytes = b"", fds: Sequence[int] = (), flags: int = 0) -> Reply:
        number = self.send(op, body, fds, flags)
        reply = self.receive()
        assert reply is not None, f"{op!r}: the other side is gone"
        assert reply.id == number
        return reply

    def close(self) -> None:
        self.socket.close()


class RawBox(Channel):
    """The init of a box."""

    def __init__(self, created: Reply, job_id: int) -> None:
        control, self.pidfd, self.upper = created.fds
        super().__init__(socket.socket(fileno=control))
        self.number, self.pid = struct.unpack("<II", created.body)
        self.job_id = job_id
        self._null = os.open("/dev/null", os.O_RDWR)

    def ready(self) -> None:
        reply = self.receive()
        assert reply is not None, "the init is gone"
        assert (reply.op, reply.id) == (Op.READY, 0), (reply, reply.stage)

    def start(
        self,
        *argv: str,
        fds: Sequence[int] | None = None,
        flags: int = 0,
        wall_us: int = 30_000_000,
        uid: int | None = None,
        cwd: str = "/work",
        env: Sequence[str] = (PATH,),
        limits: Sequence[tuple[int, int, int]] = (),
        in_file: bool = False,
    ) -> int:
        user = self.job_id if uid is None else uid
        files = files_of(argv, env)
        body = job_body(user, argv, wall_us=wall_us, cwd=cwd, files=files, env=env, limits=limits)
        streams = list(fds) if fds is not None else [self._null] * 3
        if not in_file:
            return self.send(Op.EXEC, body, streams, flags)
        file = memory_file(body)
        try:
            return self.send(Op.EXEC, b"", [*streams, file], flags | Flag.EXEC_IN_FILE)
        finally:
            os.close(file)

    def exited(self) -> Exited:
        reply = self.receive()
        assert reply is not None, "the init is gone"
        return exit_of(reply)

    def exec(self, *argv: str, **options: object) -> Exited:
        self.start(*argv, **options)  # type: ignore[arg-type]
        return self.exited()

    def output(self, *argv: str, **options: object) -> str:
        """What a command that must succeed wrote."""
        out, err = memory_file(), memory_file()
        try:
            exited = self.exec(*argv, fds=[self._null, out, err], **options)
            assert (exited.ending, exited.code) == (Ending.EXITED, 0), (exited, content(err))
            return content(out).decode()
        finally:
            os.close(out)
            os.close(err)

    def put(self, path: str, data: bytes, mode: int = 0o644, uid: int | None = None) -> int:
        """The errno, or 0."""
        return self.transfer(Op.PUT, path, memory_file(data), mode, uid)

    def get(self, path: str, limit_bytes: int = 1 << 20) -> bytes | int:
        """The content, or the errno."""
        file = memory_file()
        error = self.transfer(Op.GET, path, os.dup(file), limit_bytes)
        data = content(file)
        os.close(file)
        return error or data

    def transfer(self, op: Op, path: str, file: int, detail: int, uid: int | None = None) -> int:
        user = self.job_id if uid is None else uid
        fds = [file, self._null, self._null] if op is Op.PUT else [self._null, file, self._null]
        self.send(op, job_body(user, [path], detail=detail), fds, Flag.EXEC_KEEP)
        os.close(file)
        reply = self.receive()
        assert reply is not None, "the init is gone"
        if reply.op is Op.ERROR:
            return reply.error
        exited = exit_of(reply)
        assert exited.ending is Ending.NOT_STARTED or exited[:2] == (Ending.EXITED, 0)
        return exited.code

    def close(self) -> None:
        super().close()
        for fd in (self.pidfd, self.upper, self._null):
            os.close(fd)


class RawHelper(Channel):
    """A helper that has said READY, unless `hello` is False."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        rootfs: str = "",
        first_id: int = FIRST_ID,
        num_ids: int = NUM_IDS,
        job_id: int | None = None,
        hidden: Sequence[str] = (),
        files: Sequence[tuple[str, str]] = (("/etc/passwd", "root:x:0:0::/:/bin/sh\n"),),
        binds: Sequence[tuple[str, str]] = (),
        user: int | None = None,
        hello: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ids = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self.process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            env=environment or {"ASAN_OPTIONS": "detect_leaks=0"},
            **ids,  # type: ignore[call-overload]
        )
        theirs.close()
        super().__init__(ours)
        self.job_id = (0 if num_ids == 1 or rootfs else NOBODY) if job_id is None else job_id
        self.boxes: list[RawBox] = []
        self.abilities = 0
        if not hello:
            return
        system = [] if rootfs else system_paths()
        shown = [text(entry.path) * 2 for entry in system if entry.link is None]
        shown += [text(source) + text(target) for source, target in binds]
        links = [text(e.path) + text(e.link) for e in system if e.link is not None]
        body = struct.pack("<IIIII", VERSION, first_id, first_id, num_ids, self.job_id)
        body += text(rootfs) + many(shown) + many(links) + many([text(path) for path in hidden])
        body += many([text(path) + text(data) for path, data in files])
        filter_file = memory_file(build_filter())
        try:
            self.ready = self.ask(Op.HELLO, body, [filter_file])
        finally:
            os.close(filter_file)
        if self.ready.op is Op.READY:
            version, self.abilities = struct.unpack("<II", self.ready.body)
            assert version == VERSION

    def send_create(
        self,
        *,
        disk_bytes: int = 16 << 20,
        num_inodes: int = 4096,
        shm_bytes: int = 1 << 20,
        processor: int = 0,
        layers: Sequence[int] = (),
        fds: Sequence[int] = (),
        flags: int = 0,
    ) -> int:
        body = struct.pack("<IQIQI", 0, disk_bytes, num_inodes, shm_bytes, processor)
        body += many([struct.pack("<I", layer) for layer in layers])
        return self.send(Op.CREATE, body, fds, flags)

    def created(self) -> RawBox:
        reply = self.receive()
        assert reply is not None, "the helper is gone"
        assert reply.op is Op.CREATED, (reply, reply.body)
        box = RawBox(reply, self.job_id)
        self.boxes.append(box)
        return box

    def create(self, **options: object) -> RawBox:
        self.send_create(**options)  # type: ignore[arg-type]
        box = self.created()
        box.ready()
        return box

    def refused(self, **options: object) -> int:
        """The errno, of the helper or of the init."""
        self.send_create(**options)  # type: ignore[arg-type]
        reply = self.receive()
        assert reply is not None
        if reply.op is Op.ERROR:
            return reply.error
        box = RawBox(reply, self.job_id)
        refusal = box.receive()
        assert refusal is not None
        assert ended(box.pidfd)
        assert self.receive_died(box.number) == 1 << 8
        assert self.tell(Op.DESTROY, box.number).op is Op.DONE
        box.close()
        return refusal.error

    def freeze(self, box: RawBox) -> int:
        """The number of the layer; no process of the box is left."""
        assert self.tell(Op.FREEZE, box.number).op is Op.DONE
        self.receive_died(box.number)
        return box.number

    def receive_died(self, number: int) -> int:
        """Wait status of an init."""
        died = self.receive()
        assert died is not None, "the helper is gone"
        assert (died.op, died.id) == (Op.DIED, 0)
        found, status = struct.unpack("<Ii", died.body)
        assert found == number
        return int(status)

    def tell(self, op: Op, *numbers: int) -> Reply:
        return self.ask(op, struct.pack(f"<{len(numbers)}I", *numbers))

    def resize(self, number: int, disk_bytes: int, num_inodes: int = 4096) -> Reply:
        return self.ask(Op.RESIZE, struct.pack("<IQI", number, disk_bytes, num_inodes))

    def new_layer(
        self, disk_bytes: int = 1 << 20, fds: Sequence[int] = (), flags: int = 0
    ) -> Reply:
        return self.ask(Op.NEWLAYER, struct.pack("<IQI", 0, disk_bytes, 1024), fds, flags)

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> tuple[int, str]:
        """Hang up, if that has not happened; returns exit status and what it had to say."""
        for box in self.boxes:
            box.close()
        self.boxes.clear()
        self.close()
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, said.decode()


ROOT = os.geteuid() == 0
# Of processes, the init and the shell itself included; no other one is started.
COUNT = "set -- /proc/[0-9]*; echo $#"


def open_helper(name: str, **options: object) -> RawHelper:
    if name == "c" and (problem := binary.helper_problem()):
        pytest.skip(f"the compiled helper is not there: {problem}")
    options.setdefault("num_ids", NUM_IDS if ROOT else 1)
    helper = RawHelper(COMMANDS[name], **options)  # type: ignore[arg-type]
    if helper.ready.op is Op.ERROR and helper.ready.error in (errno.EPERM, errno.ENOSYS):
        helper.end()
        pytest.skip(f"this host allows no namespaces: {helper.ready.stage}")
    assert helper.ready.op is Op.READY, helper.ready
    return helper


def shell(box: RawBox, script: str, **options: object) -> str:
    return box.output("sh", "-c", script, **options)


def python(box: RawBox, script: str, **options: object) -> str:
    return box.output(PYTHON, "-I", "-S", "-c", script, **options)


def ended(pidfd: int) -> bool:
    """Whether the init is dead; waits, as its end is seen a moment after its cause."""
    return bool(select.select([pidfd], [], [], 30)[0])
