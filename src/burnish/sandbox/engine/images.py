"""Root file systems as the daemon has them: imported once for each content, and labelled."""

import contextlib
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from burnish.sandbox.engine.client import Docker
from burnish.sandbox.host_view import GROUP, PASSWD, HostPath

LABEL = "burnish.image"
_FOLDERS = ("proc", "dev", "sys", "work", "tmp", "etc", "run", "run/box", "run/net", "box")
_IMPORT_DEADLINE_S = 600.0
_KEPT = 16
"""Images of the daemon that no container uses; older ones are removed."""


class DaemonImages:
    """Imports what is missing. May be used from several threads."""

    def __init__(self, docker: Docker) -> None:
        """Look for nothing yet."""
        self._docker = docker
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}

    def host_root(self, system: tuple[HostPath, ...]) -> str:
        """Mount points, links and two files, in which this machine's programs are shown.

        Raises:
            OSError: the daemon refused.
        """
        packed = _pack_host_root(system)
        digest = f"sha256:{hashlib.sha256(packed).hexdigest()}"
        return self._get(digest, lambda stream: _write(stream, packed))

    def image(self, digest: str, root: Path) -> str:
        """A root file system of the image store, under a name of the daemon.

        Args:
            digest: of its content.
            root: where it lies.

        Raises:
            OSError: the daemon refused, or a file cannot be read.
        """
        return self._get(digest, lambda stream: _pack(stream, root))

    def _get(self, digest: str, write: Callable[[IO[bytes]], None]) -> str:
        with self._lock:
            name = self._known.get(digest)
            if name is None:
                name = self._find(digest) or self._import(digest, write)
                self._known[digest] = name
            return name

    def _find(self, digest: str) -> str:
        """Empty if the daemon has none."""
        label = f"--filter=label={LABEL}={digest}"
        found = self._docker.call("images", "--no-trunc", "--quiet", label).split()
        return found[0] if found else ""

    def _import(self, digest: str, write: Callable[[IO[bytes]], None]) -> str:
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [self._docker.path, "import", f"--change=LABEL {LABEL}={digest}", "-"],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=self._docker.environment,
            )
            assert process.stdin is not None
            try:
                # If it hangs up early it says why.
                with process.stdin, contextlib.suppress(BrokenPipeError):
                    write(process.stdin)
                process.wait(_IMPORT_DEADLINE_S)
            except BaseException:
                process.kill()
                process.wait()
                raise
            said.seek(0)
            words = said.read().decode("utf-8", "replace").split()
        if process.returncode or not words:
            raise OSError(0, f"docker import: {' '.join(words)[:300]}")
        return words[-1]


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)


def _pack(stream: IO[bytes], root: Path) -> None:
    """Owners as an ordinary user's store has them mean nothing: all is root's there."""
    ours = os.geteuid()

    def own(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if ours and member.uid == ours:
            member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, ".", filter=own)


def _pack_host_root(system: tuple[HostPath, ...]) -> bytes:
    """Always the same bytes for the same machine."""
    packed = io.BytesIO()
    shown = [entry.path[1:] for entry in system if entry.link is None]
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in (*_FOLDERS, *shown):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        for entry in system:
            if entry.link is not None:
                link = tarfile.TarInfo(entry.path[1:])
                link.type, link.linkname = tarfile.SYMTYPE, entry.link
                archive.addfile(link)
        for name, text in (("etc/passwd", PASSWD), ("etc/group", GROUP)):
            file = tarfile.TarInfo(name)
            file.size = len(text)
            archive.addfile(file, io.BytesIO(text.encode("ascii")))
    return packed.getvalue()


def sweep_images(docker: Docker) -> None:
    """Remove all but the newest images that we imported and nobody uses.

    Raises:
        OSError: the daemon does not answer.
    """
    shown = docker.call("images", "--no-trunc", "--quiet", f"--filter=label={LABEL}")
    for image in list(dict.fromkeys(shown.split()))[_KEPT:]:
        with contextlib.suppress(OSError):  # a container uses it
            docker.call("rmi", image)
