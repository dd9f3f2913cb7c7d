"""Which pages of which layers are in memory, on disk, or on their way.

absent    in neither place: its memory reads as zeros
dirty     in memory only
clean     in memory, and the same on disk
spilled   on disk only

require -> (load | wait for prefetch) -> pinned -> release pins -> evict -> spilled
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from burnish.rollout.engine.tier.file import TierFile
from burnish.rollout.engine.tier.limits import TierLimits, TierStats
from burnish.rollout.engine.tier.memory import PageMemory
from burnish.rollout.engine.tier.victims import choose_victims, promised

Pages = NDArray[np.int64]
# Evicting a few at once costs one look at all pages.
_BATCH_SHARE = 32
_PREFETCH_SHARE = 4


class Frames:
    """Pages of all layers within a budget of memory; for one thread, which owns the content."""

    def __init__(
        self,
        layers: list[PageMemory],
        num_pages: int,
        limits: TierLimits,
        is_free: Callable[[int], bool],
    ) -> None:
        """Everything is absent.

        Args:
            layers: the memory of each layer.
            num_pages: pages of each.
            limits: sizes.
            is_free: whether the content of a page means nothing any more.

        Raises:
            UserError: if the file cannot be made.
        """
        self._layers, self._num_pages, self._is_free = layers, num_pages, is_free
        self._bytes, total = layers[0].page_bytes, len(layers) * num_pages
        self.num_frames = limits.ram_bytes // self._bytes
        self._file = TierFile(total, self._bytes, limits.disk_bytes, limits.directory)
        self._resident, self._pinned, self._dirty, self._ahead = (
            np.zeros(total, dtype=np.bool_) for _ in range(4)
        )
        self._values = np.zeros(total)
        self._loading: dict[int, Future[str | None]] = {}
        self._pool = ThreadPoolExecutor(1, "burnish-kv") if limits.prefetch else None
        self._uses = 0
        self._num_resident = 0
        self._counts = dict.fromkeys(("hits", "misses", "spilled", "loaded", "ahead", "useful"), 0)
        self.broken: dict[int, str] = {}
        """Pages whose content is lost, and why."""
        self.full: str | None = None
        """Why pages cannot leave memory, once that happened."""

    @property
    def stats(self) -> TierStats:
        """What happened so far."""
        counts = self._counts
        return TierStats(
            ram_bytes=self._num_resident * self._bytes,
            disk_bytes=self._file.used_bytes,
            hits=counts["hits"],
            misses=counts["misses"],
            spilled=counts["spilled"],
            prefetched=counts["ahead"],
            prefetch_useful=counts["useful"],
            read_bytes=(counts["loaded"] + counts["ahead"]) * self._bytes,
            written_bytes=counts["spilled"] * self._bytes,
        )

    def require(self, layer: int, pages: Iterable[int]) -> None:
        """Have pages in memory until `unpin`."""
        keys = self._keys(layer, pages)
        self._uses += 1
        self._pinned[keys] = True
        self._values[keys] = self._uses
        self._counts["useful"] += int(self._ahead[keys].sum())
        self._ahead[keys] = False
        for key in keys[self._resident[keys]]:
            if future := self._loading.get(int(key)):
                self._counts["misses"] += not future.done()
                self._settle(int(key))
        missing = [int(key) for key in keys[~self._resident[keys]]]
        self._counts["hits"] += len(keys) - len(missing)
        if not self._make_room(len(missing)) and self._loading:
            # What was to be read ahead takes room that is needed now.
            self._land(self._loading)
            self._make_room(len(missing))
        for key in missing:
            self._set_resident(key)
            if self._file.has(key):
                self._counts["misses"] += 1
                self._counts["loaded"] += 1
                self._note(key, self._file.read(key, self._buffers(key)))

    def begin(self, layer: int, pages: Iterable[int], *, fresh: NDArray[np.bool_]) -> None:
        """Have pages in memory to be written; what was in the fresh ones is forgotten."""
        pages = np.fromiter(pages, dtype=np.int64)
        self._forget(self._keys(layer, pages[fresh]))
        self.require(layer, pages)
        keys = self._keys(layer, pages)
        self._dirty[keys] = True
        for key in keys:
            self._file.drop(int(key))

    def unpin(self) -> None:
        """Let all pages go again that are not on their way."""
        self._pinned[:] = False
        self._pinned[list(self._loading)] = True

    def prefetch(self, layer: int, pages: Iterable[int]) -> None:
        """Begin to read pages that will be wanted soon."""
        if self._pool is None:
            return
        keys = self._keys(layer, pages)
        wanted = [int(k) for k in keys[~self._resident[keys]] if self._file.has(int(k))]
        wanted = wanted[: self.num_frames // _PREFETCH_SHARE]
        if not wanted or not self._make_room(len(wanted)):
            return
        for key in wanted:
            self._set_resident(key)
            self._pinned[key] = self._ahead[key] = True
            self._values[key] = self._uses
            self._loading[key] = self._pool.submit(self._file.read, key, self._buffers(key))
        self._counts["ahead"] += len(wanted)

    def score(self, layer: int, pages: Pages, scores: NDArray[np.float64]) -> None:
        """Note what bounds promise."""
        keys = self._keys(layer, pages)
        self._values[keys] = promised(self._values[keys], scores, float(self._uses))

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages absent in every layer."""
        pages = list(pages)
        for layer in range(len(self._layers)):
            self._forget(self._keys(layer, pages))

    def close(self) -> None:
        """Wait for what is on its way and give the disk back."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def check(self) -> None:
        """Assert that the books are right."""
        assert self._num_resident == int(self._resident.sum())
        assert not (self._dirty & ~self._resident).any(), "unsaved content was given back"

    def _keys(self, layer: int, pages: Iterable[int]) -> Pages:
        return np.asarray(pages, dtype=np.int64) + layer * self._num_pages

    def _buffers(self, key: int) -> list[memoryview]:
        return self._layers[key // self._num_pages].buffers(key % self._num_pages)

    def _set_resident(self, key: int) -> None:
        self._resident[key] = True
        self._num_resident += 1

    def _settle(self, key: int) -> None:
        self._note(key, self._loading.pop(key).result())

    def _land(self, keys: Iterable[int]) -> None:
        """Wait for pages on their way that nobody needs yet, and let them go."""
        for key in list(keys):
            self._settle(key)
            self._pinned[key] = False

    def _note(self, key: int, problem: str | None) -> None:
        if problem is not None:
            self.broken[key % self._num_pages] = problem
            # Whoever reads it is about to fail, but in numbers.
            for buffer in self._buffers(key):
                buffer[:] = bytes(len(buffer))

    def _forget(self, keys: Pages) -> None:
        for key in map(int, keys):
            if key in self._loading:
                self._settle(key)
            self._file.drop(key)
            if self._resident[key]:
                self._leave(key)

    def _leave(self, key: int) -> None:
        self._layers[key // self._num_pages].release(key % self._num_pages)
        self._resident[key] = self._dirty[key] = self._ahead[key] = False
        self._num_resident -= 1

    def _make_room(self, count: int) -> bool:
        """Evict until `count` more fit; False if they do not."""
        excess = self._num_resident + count - self.num_frames
        if excess <= 0:
            return True
        self._land(key for key, future in self._loading.items() if future.done())
        may_leave = self._resident & ~self._pinned
        wanted = max(excess, self.num_frames // _BATCH_SHARE)
        for key in map(int, choose_victims(self._values, may_leave, wanted)):
            if not self._evict(key):
                break
        if self._num_resident + count > self.num_frames and self.full is not None:
            # Only what is on disk already can still leave.
            clean = self._resident & ~self._pinned & ~self._dirty
            for key in map(int, choose_victims(self._values, clean, excess)):
                self._evict(key)
        return self._num_resident + count <= self.num_frames

    def _evict(self, key: int) -> bool:
        """Whether the page could leave."""
        if self._dirty[key] and not self._is_free(key % self._num_pages):
            try:
                self._file.write(key, self._buffers(key))
            except OSError as error:
                self.full = error.strerror
                return False
            self._counts["spilled"] += 1
        self._leave(key)
        return True
