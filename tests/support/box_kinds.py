"""Two more kinds of native boxes for the escape suites: of warm Python, and of an image."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from burnish.core.boxes import Capabilities, ExecResult, Policy
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import PYTHON_FIX, find_python, python_argv
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.protocol import PythonKind
from burnish.sandbox.native.python_jobs import WarmBox

_PYTHON = python_argv()


class _WarmBox:
    """Starts Python programs as forks of the template; all else is as in any box."""

    def __init__(self, box: WarmBox) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, argv: tuple[str, ...], **options: Any) -> ExecResult:
        if argv[: len(_PYTHON)] != _PYTHON:
            return await self._box.exec(argv, **options)
        kind, *rest = argv[len(_PYTHON) :]
        if kind == "-c":
            return await self._box.python(rest[0], argv=tuple(rest[1:]), **options)
        return await self._box.python(kind, kind=PythonKind.SCRIPT, argv=tuple(rest), **options)


class WarmPool:
    """Every box is one of a template that has imported what attacks use."""

    def __init__(self, max_boxes: int) -> None:
        self._pool = NativePool(SandboxConfig(max_boxes=max_boxes))

    @property
    def capabilities(self) -> Capabilities:
        return self._pool.capabilities

    @asynccontextmanager
    async def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AsyncIterator[_WarmBox]:
        async with self._pool.acquire_python(("ctypes", "socket"), image, policy) as box:
            yield _WarmBox(box)

    async def close(self) -> None:
        await self._pool.close()


class _Root(NamedTuple):
    root: Path
    name: str = "host"
    digest: str = "of the programs of this host"
    env: Mapping[str, str] = MappingProxyType({})
    workdir: str = ""
    user: str = ""


class _OneImage:
    def __init__(self, root: Path) -> None:
        self._root = _Root(root)

    def resolve(self, name: str) -> _Root:
        return self._root

    @contextmanager
    def lease(self, name: str) -> Iterator[_Root]:
        yield self._root


class ImagePool(NativePool):
    """Every box has a root file system of its own: the programs of this host that attacks use.

    Programs may change their box's copy of it. When the pool is closed, the image is as before.
    """

    def __init__(self, max_boxes: int) -> None:
        self._root = Path(_copied().name)
        self._before = tree_digest(self._root)
        super().__init__(SandboxConfig(max_boxes=max_boxes), images=_OneImage(self._root))

    def acquire(self, image: str | None = None, policy: Policy | None = None) -> Any:
        return super().acquire(image or "host", policy)

    async def close(self) -> None:
        await super().close()
        assert tree_digest(self._root) == self._before, "a box has changed its image"


@cache
def _copied() -> "tempfile.TemporaryDirectory[str]":
    """Made once; removed when we end."""
    folder = tempfile.TemporaryDirectory()
    root = Path(folder.name)
    root.chmod(0o755)
    copy_programs(root)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n", encoding="ascii")
    (root / "etc/group").write_text("root:x:0:\n", encoding="ascii")
    return folder


def tree_digest(root: Path) -> str:
    """Of names, owners, modes, times and content."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        seen = (path, *status[:7], status.st_mtime_ns)
        digest.update(repr(seen).encode("utf-8", "surrogateescape"))
        if path.is_file() and not path.is_symlink():
            digest.update(path.read_bytes())
    return digest.hexdigest()


_NAMES = """
bash cat chmod cp dd df echo env false find head id ln ls mkdir mkfifo mknod mount mv newgrp passwd
rm rmdir seq setsid sh sleep stat su tail test timeout touch tr true uname wc yes
"""


def copy_programs(root: Path) -> None:
    """Copy a shell, the usual small programs and the system's Python, and what they are linked to.

    Raises:
        UserError: the system has no Python.
    """
    python = find_python()
    if python is None:
        raise UserError("there is no python3 below /usr.", fix=PYTHON_FIX)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (host := Path("/", name)).is_symlink():
            (root / host.readlink()).mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(host.readlink())
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    asked = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True)
    library = root / asked.stdout.strip()[1:]
    skip = shutil.ignore_patterns("test", "tests", "__pycache__", "config-*", "*-packages")
    shutil.copytree(asked.stdout.strip(), library, ignore=skip, symlinks=True)
    programs = [path for name in _NAMES.split() if (path := shutil.which(name))]
    modules = map(str, library.rglob("*.so"))
    ldd = ["ldd", *programs, python, *modules]
    linked = subprocess.run(ldd, capture_output=True, text=True, check=False).stdout
    for path in {*programs, python, *re.findall(r"(/\S+) \(0x", linked)}:
        copy = root / path[1:]
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
