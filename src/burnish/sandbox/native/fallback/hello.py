"""The first message: which image, which users, what is shown and what is hidden."""

from __future__ import annotations

import errno
from typing import NamedTuple

from ..protocol import VERSION
from .wire import Fields, Malformed, Message


class Pair(NamedTuple):
    """A bind (source, target), a link (path, target) or a file (path, text)."""

    first: str
    second: str


class Hello(NamedTuple):
    """See HELLO in `protocol`."""

    uid_first: int
    gid_first: int
    num_ids: int
    job_uid: int
    rootfs: str
    binds: list[Pair]
    links: list[Pair]
    hidden: list[str]
    files: list[Pair]


def parse_hello(message: Message) -> Hello:
    """Check and take apart.

    Raises:
        OSError: another version.
        Malformed: anything else is wrong.
    """
    fields = Fields(message.body)
    version = fields.u32()
    if version != VERSION:
        raise OSError(errno.EPROTO, f"version {version} of the protocol, this is {VERSION}")
    hello = Hello(
        fields.u32(),
        fields.u32(),
        fields.u32(),
        fields.u32(),
        fields.path(),
        fields.many(lambda: Pair(fields.path(), fields.path())),
        fields.many(lambda: Pair(fields.path(), fields.path())),
        fields.many(fields.path),
        fields.many(lambda: Pair(fields.path(), fields.path())),
    )
    fields.end()
    if hello.num_ids < 1 or hello.job_uid >= hello.num_ids or hello.num_ids > 2**31:
        raise Malformed("job_uid is not an id of the box")
    inside = [pair.second for pair in hello.binds] + [pair.first for pair in hello.links]
    inside += hello.hidden + [pair.first for pair in hello.files]
    for path in inside:
        if not path.startswith("/") or ".." in path.split("/") or path.strip("/") == "":
            raise Malformed(f"not an absolute path: {path!r}")
    for path in [pair.first for pair in hello.binds] + ([hello.rootfs] if hello.rootfs else []):
        if not path.startswith("/"):
            raise Malformed(f"not an absolute path: {path!r}")
    return hello
