"""The memory of pages: given back to the system and taken again, at the same addresses."""

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import Any

from torch import Tensor

_HUGE_OFF, _DONT_NEED = 15, 4
# The system gives memory back in whole pages of its own: what a page of ours shares with its
# neighbours stays. Below this size that would be too much of it.
_LEAST_UNALIGNED = 4 * mmap.PAGESIZE


def memory_problem(regions: list[Tensor]) -> str | None:
    """Why pages cannot leave this memory; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"there is no disk tier for {sys.platform}"
    page = regions[0].shape[1]
    if page % mmap.PAGESIZE and page < _LEAST_UNALIGNED:
        return f"a page of one layer has {page} bytes: too few, and no multiple of {mmap.PAGESIZE}"
    return None


class PageMemory:
    """Regions of one layer, each uint8 [pages, bytes]."""

    def __init__(self, regions: list[Tensor]) -> None:
        """Have the system's pages small: of a huge one no part can be given back."""
        self._views = [memoryview(region.view(-1).numpy().data) for region in regions]
        self._addresses = [region.data_ptr() for region in regions]
        self._bytes = regions[0].shape[1]
        assert all(region.shape[1] == self._bytes for region in regions)
        for region, address in zip(regions, self._addresses, strict=True):
            first, last = _whole(address, address + region.numel())
            # Refused by systems without huge pages.
            _madvise()(first, max(0, last - first), _HUGE_OFF)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all regions."""
        return self._bytes * len(self._views)

    def buffers(self, page: int) -> list[memoryview]:
        """Its bytes, to read or write."""
        return [view[page * self._bytes : (page + 1) * self._bytes] for view in self._views]

    def release(self, page: int) -> None:
        """Give the memory of one page back; it reads as zeros until it is written."""
        for address, view in zip(self._addresses, self._views, strict=True):
            start, end = address + page * self._bytes, address + (page + 1) * self._bytes
            first, last = _whole(start, end)
            if first < last and _madvise()(first, last - first, _DONT_NEED):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if self._bytes % mmap.PAGESIZE:
                row = view[page * self._bytes : (page + 1) * self._bytes]
                row[: first - start] = bytes(first - start)
                row[last - start :] = bytes(end - last)


def _whole(start: int, end: int) -> tuple[int, int]:
    """The system's pages that lie entirely within."""
    size = mmap.PAGESIZE
    return -(-start // size) * size, end // size * size


@cache
def _madvise() -> Any:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
