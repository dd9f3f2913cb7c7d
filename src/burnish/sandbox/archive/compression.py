"""Plain streams of archives that may be compressed."""

import bz2
import gzip
import importlib
import importlib.util
import io
import lzma
import os
import shutil
import stat
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from burnish.core.errors import UserError

_STANDARD_ZSTD = "compression.zstd"
_MAGICS = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
)
_MAX_LZMA_BYTES = 256 * 2**20


@contextmanager
def open_archive(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file as a stream of plain bytes, whatever it is compressed with.

    Raises:
        UserError: no such file, not a regular one, or nothing here can decompress it.
        ValueError: damaged compressed data, also while the stream is read within the context.
    """
    with open_regular(path) as raw, decompressed(raw) as stream:
        yield stream


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; a pipe or a device would make us wait or never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}.", fix="give a readable file."
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a regular file.", fix="give a regular file.")
    return open(descriptor, "rb")


@contextmanager
def decompressed(raw: io.BufferedReader) -> Iterator[BinaryIO]:
    """The plain bytes of a stream. Damage is a ValueError, also while it is read."""
    head = raw.peek(8)[:8]
    kind = next((name for magic, name in _MAGICS if head.startswith(magic)), None)
    try:
        if kind == "gzip":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif kind == "bzip2":
            yield cast(BinaryIO, bz2.BZ2File(raw))
        elif kind == "xz":
            yield _open_xz(raw)
        elif kind == "zstd":
            with _open_zstd(raw) as stream:
                yield stream
        else:
            yield raw
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"damaged {kind} data: {error}") from error
    except OSError as error:
        # What gzip and bz2 find is an OSError without a number.
        if error.errno is None:
            raise ValueError(f"damaged {kind} data: {error}") from error
        raise


def _open_xz(raw: BinaryIO) -> BinaryIO:
    # The memory limit keeps a header from asking for gigabytes; LZMAFile has none of its own.
    return cast(BinaryIO, io.BufferedReader(_XzStream(raw)))


class _XzStream(io.RawIOBase):
    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._codec = lzma.LZMADecompressor(memlimit=_MAX_LZMA_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._codec.eof:
            feed = self._raw.read(64 * 2**10) if self._codec.needs_input else b""
            if self._codec.needs_input and not feed:
                raise EOFError("it ends too early")
            plain = self._codec.decompress(feed, max_length=len(view))
            if plain:
                view[: len(plain)] = plain
                return len(plain)
        return 0


@contextmanager
def _open_zstd(raw: io.BufferedReader) -> Iterator[BinaryIO]:
    if importlib.util.find_spec("compression") and importlib.util.find_spec(_STANDARD_ZSTD):
        module = importlib.import_module(_STANDARD_ZSTD)
        try:
            yield module.ZstdFile(raw)
        except module.ZstdError as error:
            raise ValueError(f"damaged zstd data: {error}") from error
        return
    tool = shutil.which("zstd")
    if tool is None:
        raise UserError(
            "the archive is compressed with zstd, which is not installed.",
            fix="sudo apt-get install zstd",
        )
    # Not `seek`, which may move within the buffer only.
    os.lseek(raw.fileno(), 0, os.SEEK_SET)
    child = subprocess.Popen(
        [tool, "-d", "-c", "-q"],
        stdin=raw.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    try:
        yield cast(BinaryIO, child.stdout)
        rest_is_unread = bool(child.stdout.read(1))
        child.stdout.close()
        if not rest_is_unread and child.wait():
            raise ValueError("damaged zstd data")
    finally:
        child.kill()
        child.stdout.close()
        child.wait()
