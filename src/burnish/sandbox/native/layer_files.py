"""The files of layers: read and written by ourselves as root, else in the helper's namespace."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.sandbox.state.export import export_layers
from burnish.sandbox.state.imports import import_tar
from burnish.sandbox.state.squash import squash
from burnish.sandbox.state.worker import NamespaceWorker


class LayerFiles:
    """The functions of `burnish.sandbox.state` for the layers of one helper. Calls block.

    Root owns more than boxes, and ids of the box are one shift away. For an ordinary user they are
    two (0 is the user, the others are subordinate), and what a box closed is closed to the user:
    both are solved by doing the work in the user namespace of the helper, which is the user's.
    """

    def __init__(self, uid_base: int, helper_pid: int) -> None:
        """For the helper with this process id, whose root of boxes is `uid_base` for root."""
        self._uid_base = uid_base
        self._namespace = f"/proc/{helper_pid}/ns/user"

    def export(self, layer_fds: Sequence[int], destination: Path) -> str:
        """See `export_layers`."""
        if os.geteuid() == 0:
            return export_layers(layer_fds, destination, self._uid_base)
        with self._worker() as worker:
            return worker.export_layers(layer_fds, destination)

    def import_tar(self, source: Path, into_fd: int) -> None:
        """See `import_tar`."""
        if os.geteuid() == 0:
            import_tar(source, into_fd, self._uid_base)
            return
        with self._worker() as worker:
            worker.import_tar(source, into_fd)

    def squash(self, layer_fds: Sequence[int], into_fd: int) -> None:
        """See `squash`."""
        if os.geteuid() == 0:
            squash(layer_fds, into_fd)
            return
        with self._worker() as worker:
            worker.squash(layer_fds, into_fd)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[NamespaceWorker]:
        namespace = os.open(self._namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield NamespaceWorker(namespace)
        finally:
            os.close(namespace)
