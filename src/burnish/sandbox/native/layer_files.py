"""The files of layers: read and written by ourselves as root, else in the helper's namespace."""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.state.export import export_layers
from burnish.sandbox.state.imports import import_tar
from burnish.sandbox.state.squash import squash
from burnish.sandbox.state.worker import NamespaceWorker

_LIBC = ctypes.CDLL(None, use_errno=True)
_CAPABILITY_VERSION = 0x20080522
_Words = ctypes.c_uint32 * 6


class LayerFiles:
    """The functions of `burnish.sandbox.state` for the layers of one helper. Calls block.

    Root owns more than boxes, and ids of the box are one shift away. For an ordinary user they are
    two (0 is the user, the others are subordinate), and what a box closed is closed to the user:
    both are solved by doing the work in the user namespace of the helper, which is the user's.
    """

    def __init__(self, uid_base: int, gid_base: int, helper_pid: int) -> None:
        """For the helper with this process id; to root, root of its boxes is these two ids."""
        self._uid_base, self._gid_base = uid_base, gid_base
        self._namespace = f"/proc/{helper_pid}/ns/user"

    def export(self, layer_fds: Sequence[int], destination: Path, stop: Stop | None = None) -> str:
        """See `export_layers`."""
        if os.geteuid() == 0:
            return export_layers(layer_fds, destination, self._uid_base, stop)
        with self._worker() as worker:
            return worker.export_layers(layer_fds, destination, stop)

    def import_tar(
        self,
        source: Path,
        into_fd: int,
        below: Path | None = None,
        covered: Sequence[str] = (),
        stop: Stop | None = None,
    ) -> None:
        """See `import_tar`."""
        base = self._uid_base
        if os.geteuid() == 0:
            with _files_of(base, self._gid_base):
                import_tar(source, into_fd, base, below=below, covered=covered, stop=stop)
            return
        with self._worker() as worker:
            worker.import_tar(source, into_fd, below, covered, stop)

    def squash(self, layer_fds: Sequence[int], into_fd: int, stop: Stop | None = None) -> None:
        """See `squash`."""
        if os.geteuid() == 0:
            with _files_of(self._uid_base, self._gid_base):
                squash(layer_fds, into_fd, stop)
            return
        with self._worker() as worker:
            worker.squash(layer_fds, into_fd, stop)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[NamespaceWorker]:
        namespace = os.open(self._namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield NamespaceWorker(namespace)
        finally:
            os.close(namespace)


@contextlib.contextmanager
def _files_of(uid: int, gid: int) -> Iterator[None]:
    """What this thread makes belongs to these ids from the first moment; its powers are the same.

    Layers of warm Python are of a user namespace that has no other ids: no file of ours can be in
    them (EOVERFLOW), not even until it is given away.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    powers = _Words()
    _check(_LIBC.capget(header, powers))
    try:
        _LIBC.setfsgid(gid)
        _LIBC.setfsuid(uid)
        # The kernel has just taken away those over files.
        _check(_LIBC.capset(header, powers))
        yield
    finally:
        _LIBC.setfsuid(os.geteuid())
        _LIBC.setfsgid(os.getegid())


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"powers of a thread: {os.strerror(code)}")
