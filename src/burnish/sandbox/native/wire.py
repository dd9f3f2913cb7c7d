"""Bytes of the messages in `protocol.py`: requests are built here, replies are judged here.

Replies of an init come out of a box, so of hostile code: every field is checked.
"""

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from burnish.sandbox.native.protocol import (
    HEADER,
    JOB,
    LIMIT,
    MAX_MESSAGE_BYTES,
    Ending,
    Flag,
    Op,
    PythonKind,
    PythonOption,
)

REPLY_BYTES = 4096
"""No reply is longer; a longer one is cut by the receiver and then refused."""
_COUNT = struct.Struct("<I")
_CREATE = struct.Struct("<IQIQI")
_EXITED = struct.Struct(f"{HEADER.format}IiQQQQ")
# What was kept in the box can stop the process that reads or writes for us.
_FILE_TASK_US = 20_000_000
_MAX_U64 = 2**64 - 1
_MAX_ERRNO = 4095
_MAX_PATH_BYTES = 4096
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_CODES = {
    Ending.EXITED: range(256),
    Ending.SIGNALED: range(1, 65),
    Ending.TIMEOUT: range(1),
    Ending.NOT_STARTED: range(1, _MAX_ERRNO + 1),
    Ending.KILLED: range(1),
}
_ENDINGS = {ending.value: ending for ending in Ending}


class BadReply(Exception):
    """A reply that is not what the protocol says: its sender cannot be trusted any more."""


class Reply(NamedTuple):
    """A message without its header."""

    op: int
    id: int
    body: bytes


class Exited(NamedTuple):
    """How a command ended, as the init saw it."""

    ending: Ending
    code: int
    wall_s: float
    cpu_s: float
    max_rss_bytes: int


class Hello(NamedTuple):
    """What a helper serves."""

    version: int
    uid_first: int
    gid_first: int
    num_ids: int
    job_uid: int
    rootfs: str
    binds: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()


def message(op: Op, number: int, body: bytes = b"", flags: int = 0) -> bytes:
    """A whole message.

    Raises:
        ValueError: too long to be sent.
    """
    size = HEADER.size + len(body)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message may have {MAX_MESSAGE_BYTES} bytes, this one has {size}")
    return HEADER.pack(size, op, flags, number) + body


def hello_body(hello: Hello) -> bytes:
    """Of HELLO."""
    numbers = struct.pack("<IIIII", *hello[:5])
    pairs = (hello.binds, hello.links)
    return b"".join(
        (
            numbers,
            _text(hello.rootfs),
            *(_list(_text(a) + _text(b) for a, b in entries) for entries in pairs),
            _list(_text(path) for path in hello.hidden),
            _list(_text(path) + _text(text) for path, text in hello.files),
        )
    )


def create_body(
    disk_bytes: int, num_inodes: int, shm_bytes: int, processor: int, layers: Sequence[int]
) -> bytes:
    """Of CREATE; layers lowest first."""
    numbers = _CREATE.pack(0, disk_bytes, num_inodes, shm_bytes, processor)
    return numbers + _list(map(_COUNT.pack, layers))


def numbers_body(kinds: str, *numbers: int) -> bytes:
    """Of a message that is only numbers; `kinds` as in `struct`."""
    return struct.pack(f"<{kinds}", *numbers)


class PythonPart(NamedTuple):
    """What PYTHON has beyond EXEC."""

    kind: PythonKind
    options: PythonOption
    source: bytes


class Job(NamedTuple):
    """Fields of EXEC, or of PYTHON."""

    wall_us: int
    uid: int
    gid: int
    rlimits: tuple[tuple[int, int, int], ...]
    cwd: str
    argv: tuple[str, ...]
    base_env: tuple[tuple[str, str], ...]
    env: Mapping[str, str]
    python: PythonPart | None = None
    """The first of `argv` is then only a name for messages."""


class _Strings(NamedTuple):
    """A list of strings in a message."""

    num: int
    body: bytes


def exec_body(job: Job) -> bytes:
    """Of EXEC or PYTHON. Later variables take the place of earlier ones of the same name."""
    variables, path = _base_environment(job.base_env)
    if job.env:
        variables, path = _environment(tuple({**dict(job.base_env), **job.env}.items()))
    if job.python is None:
        return _job_body(job, 0, _files(job.argv[0], path), job.argv, variables)
    kind, options, source = job.python
    source_file = _Strings(1, _terminated(source))
    return _job_body(job, kind | options << 32, source_file, job.argv[1:], variables)


def file_body(user: tuple[int, int], detail: int, path: str) -> bytes:
    """Of PUT, where the detail is the mode, and of GET: the most bytes."""
    return JOB.pack(_FILE_TASK_US, detail, *user, 0, 0, 1, 0) + b"/\0" + _text(path)


def _job_body(
    job: Job, detail: int, files: _Strings, argv: tuple[str, ...], variables: _Strings
) -> bytes:
    counts = len(job.rlimits), files.num, len(argv), variables.num
    return b"".join(
        (
            JOB.pack(job.wall_us, detail, job.uid, job.gid, *counts),
            _limits(job.rlimits),
            _text(job.cwd),
            files.body,
            *map(_text, argv),
            variables.body,
        )
    )


@lru_cache(maxsize=256)
def _limits(entries: tuple[tuple[int, int, int], ...]) -> bytes:
    return b"".join(LIMIT.pack(which, soft, hard) for which, soft, hard in entries)


def program_files(name: str, path: str | None) -> tuple[str, ...]:
    """Where a program may be, by the PATH of its job."""
    if "/" in name or not name:
        return (name,)
    folders = (_DEFAULT_PATH if path is None else path).split(":")
    files = (f"{folder}/{name}" if folder else name for folder in folders)
    return tuple(file for file in files if len(os.fsencode(file)) < _MAX_PATH_BYTES)


@lru_cache(maxsize=256)
def _files(name: str, path: str | None) -> _Strings:
    return _strings(program_files(name, path))


def _environment(entries: tuple[tuple[str, str], ...]) -> tuple[_Strings, str | None]:
    """Variables as bytes, and what PATH is."""
    return _strings([f"{name}={value}" for name, value in entries]), dict(entries).get("PATH")


_base_environment = lru_cache(maxsize=64)(_environment)


def _list(items: Iterable[bytes]) -> bytes:
    encoded = list(items)
    return _COUNT.pack(len(encoded)) + b"".join(encoded)


def _strings(texts: Sequence[str]) -> _Strings:
    return _Strings(len(texts), b"".join(map(_text, texts)))


def _text(text: str) -> bytes:
    return _terminated(text.encode("utf-8", "surrogateescape"))


def _terminated(data: bytes) -> bytes:
    if b"\0" in data:
        raise ValueError("text of a message must not contain NUL bytes")
    return data + b"\0"


def split(data: bytes) -> Reply:
    """Check a header.

    Raises:
        BadReply: shorter than a header, or of another size than it says.
    """
    if len(data) < HEADER.size:
        raise BadReply(f"a reply of {len(data)} bytes")
    size, op, flags, number = HEADER.unpack_from(data)
    if size != len(data) or flags:
        raise BadReply(f"a reply of {len(data)} bytes says size {size}, flags {flags}")
    return Reply(op, number, data[HEADER.size :])


def read_numbers(reply: Reply, op: Op, kinds: str) -> tuple[int, ...]:
    """The fields of a reply that has only numbers.

    Raises:
        BadReply: another operation or another size.
    """
    layout = struct.Struct(f"<{kinds}")
    if reply.op != op or len(reply.body) != layout.size:
        raise BadReply(f"reply {reply.op} of {len(reply.body)} bytes where {op.name} was due")
    return layout.unpack(reply.body)


def read_error(reply: Reply) -> tuple[int, str] | None:
    """(errno, stage) if the reply is an ERROR, else None.

    Raises:
        BadReply: an ERROR that is malformed.
    """
    if reply.op != Op.ERROR:
        return None
    if len(reply.body) < 8:
        raise BadReply("an error without a text")
    number, length = struct.unpack_from("<iI", reply.body)
    if not 1 <= number <= _MAX_ERRNO or length != len(reply.body) - 8:
        raise BadReply(f"an error with number {number} and {len(reply.body)} bytes")
    return number, reply.body[8:].decode("utf-8", "replace")


def read_exited(data: bytes, number: int) -> Exited:
    """The EXITED that answers EXEC `number`.

    Raises:
        BadReply: anything else, or values that no command can end with.
    """
    if len(data) != _EXITED.size:
        raise BadReply(f"{len(data)} bytes where the end of {number} was due")
    size, op, flags, request, ending, code, wall_us, user_us, system_us, rss = _EXITED.unpack(data)
    if (size, op, flags, request) != (len(data), Op.EXITED, 0, number):
        raise BadReply(f"reply {op} to {request} where the end of {number} was due")
    if code not in _CODES.get(ending, ()):
        raise BadReply(f"an end of kind {ending} with code {code}")
    return Exited(_ENDINGS[ending], code, wall_us / 1e6, (user_us + system_us) / 1e6, rss)


def exec_flags(*, keep: bool, packages: bool) -> int:
    """Of EXEC, without EXEC_IN_FILE."""
    return keep * Flag.EXEC_KEEP | packages * Flag.EXEC_PACKAGES


def create_flags(*, into_cgroup: bool, deterministic: bool, packages: bool, upper: bool) -> int:
    """Of CREATE."""
    return (
        into_cgroup * Flag.CREATE_INTO_CGROUP
        | deterministic * Flag.CREATE_DETERMINISTIC
        | packages * Flag.CREATE_PACKAGES
        | upper * Flag.CREATE_UPPER
    )


def u64(value: float) -> int:
    """Rounded and within what the wire can carry."""
    return min(_MAX_U64, max(0, round(value)))
