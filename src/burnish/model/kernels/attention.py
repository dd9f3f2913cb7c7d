"""Attention over pages of keys and values, and over packed ones, by the native library.

A query's result depends on its own keys alone, in an order that their positions fix: the same bits
in any batch, chunk, number of threads or place of the pages. `native/attention.h` has the layout
and the order. Callers ask `attention_problem` first; there is no PyTorch twin here, since without
the library the engine keeps its keys in another layout (`rollout/engine/cache/gathered.py`).

Shapes: T tokens, H query heads, K key/value heads, D head width, P pages, S page size.
"""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels.library import Isa, function, kernels
from burnish.model.kernels.memory import lazy_zeros

UNIT_KEYS = 16
"""A page holds a multiple of this many tokens."""
_MAX_WIDTH = 256


class PageKind(IntEnum):
    """Numbers in a page; the order matches `page_kind` in attention.h."""

    BF16 = 0
    """As bf16 models compute them."""
    F32 = 1
    """As fp32 models compute them."""
    INT8 = 2
    """Eight bits with a bf16 scale per token and head."""
    FP8 = 3
    """e4m3 with a bf16 scale per token and head: storage only, products are in bf16."""


_BYTES = {PageKind.BF16: 2, PageKind.F32: 4, PageKind.INT8: 1, PageKind.FP8: 1}
_QUERY_DTYPES = (torch.bfloat16, torch.float32)


class _Store(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("page_keys", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("is_f32", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("masses", ctypes.c_void_p),
    )


class PageShape(NamedTuple):
    """What all pages of a model have in common."""

    kind: PageKind
    """Numbers stored."""
    page_size: int
    """Tokens of a page."""
    num_heads: int
    """Key/value heads."""
    width: int
    """Numbers per head."""

    @property
    def bytes_per_head(self) -> int:
        """Bytes of one head of a page."""
        numbers = 2 * self.page_size * self.width * _BYTES[self.kind]
        scales = 4 * self.page_size if self.kind in (PageKind.INT8, PageKind.FP8) else 0
        return numbers + scales


class SpanTable(NamedTuple):
    """Which tokens of a flat batch see which pages."""

    spans: Tensor
    """int64 [N, 6]: first token, count, first position, first entry of `pages`, window, sinks."""
    pages: Tensor
    """int32, -1 where there is no page."""


class PagedLayer:
    """Keys and values of one layer."""

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        *,
        with_bounds: bool = False,
        with_tiles: bool = False,
    ) -> None:
        """Zero-filled, so untouched pages cost no memory.

        Args:
            shape: of every page.
            num_pages: pages in all.
            with_bounds: keep the least and greatest key of every page, for `bound`.
            with_tiles: where the CPU has tiles (AMX), attend long spans by them. The bits of their
                rows are then others than when they are decoded; nothing exact may ask for it.
        """
        self.shape = shape
        self.data = lazy_zeros(num_pages, shape.num_heads * shape.bytes_per_head)
        self.bounds: Tensor | None = None
        if with_bounds:
            size = (num_pages, shape.num_heads, 2, shape.width)
            self.bounds = torch.zeros(size, dtype=torch.bfloat16)
        # What all rows share, whoever asks: the bits of the vectors.
        self._isa = Isa.AVX512_BF16 if kernels().isa is Isa.AMX else kernels().isa
        self._attend_isa = kernels().isa if with_tiles else self._isa
        self._store = self._describe()

    def write(self, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values; a slot is page * S + offset, filled in order within a page."""
        assert slots_T.dtype is torch.int64
        k_TKD, v_TKD = _rows(k_TKD), _rows(v_TKD)
        assert k_TKD.shape == v_TKD.shape == (len(slots_T), self.shape.num_heads, self.shape.width)
        self._native("write_pages")(
            ctypes.byref(self._store),
            slots_T.data_ptr(),
            len(slots_T),
            k_TKD.data_ptr(),
            k_TKD.stride(0),
            v_TKD.data_ptr(),
            v_TKD.stride(0),
            int(k_TKD.dtype is torch.float32),
            torch.get_num_threads(),
        )

    def attend(self, q_THD: Tensor, table: SpanTable, masses_TH: Tensor | None = None) -> Tensor:
        """Attention of every token that a span covers, [T, H, D]; scale is D ** -0.5.

        Args:
            q_THD: queries.
            table: which tokens see which pages.
            masses_TH: fp32, filled with the log of each row's summed exponentials.

        Raises:
            MemoryError: if there is no room for the sums.
        """
        q_THD = self._queries(q_THD)
        out_THD = torch.empty_like(q_THD)
        batch = self._batch(q_THD, out_THD)
        if masses_TH is not None:
            assert masses_TH.dtype is torch.float32
            assert masses_TH.is_contiguous()
            batch.masses = masses_TH.data_ptr()
        failed = self._native("attend_pages")(
            ctypes.byref(self._store),
            ctypes.byref(batch),
            table.spans.data_ptr(),
            len(table.spans),
            table.pages.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the sums of attention")
        return out_THD

    def bound(self, q_BHD: Tensor, starts: Tensor, pages: Tensor) -> Tensor:
        """Upper bounds on the scaled scores of each row's pages, fp32 [B, H, W] (Quest, eq. 2).

        Args:
            q_BHD: one query token per row.
            starts: int64 [B + 1]; the pages of row b are `pages[starts[b] : starts[b + 1]]`.
            pages: int32; -1, and what is beyond a row's pages, has the bound -inf.
        """
        assert self.bounds is not None
        q_BHD = self._queries(q_BHD)
        most = int((starts[1:] - starts[:-1]).max()) if len(q_BHD) else 0
        out_BHW = torch.full((*q_BHD.shape[:2], most), -torch.inf)
        batch = self._batch(q_BHD, out_BHW)
        self._native("bound_pages")(
            ctypes.byref(self._store),
            ctypes.byref(batch),
            starts.data_ptr(),
            len(q_BHD),
            pages.data_ptr(),
            out_BHW.data_ptr(),
            most,
            torch.get_num_threads(),
        )
        return out_BHW

    def mass(self, q_BHD: Tensor, table: SpanTable, most_pages: int) -> Tensor:
        """How much attention falls on each page: log of summed exponentials, fp32 [B, H, W].

        Args:
            q_BHD: one query token per span, in order.
            table: spans of one token each.
            most_pages: W; what is beyond a row's pages has -inf.

        Raises:
            MemoryError: if there is no room for copies.
        """
        q_BHD = self._queries(q_BHD)
        out_BHW = torch.full((*q_BHD.shape[:2], most_pages), -torch.inf)
        batch = self._batch(q_BHD, out_BHW)
        failed = self._native("mass_pages")(
            ctypes.byref(self._store),
            ctypes.byref(batch),
            table.spans.data_ptr(),
            len(table.spans),
            table.pages.data_ptr(),
            out_BHW.data_ptr(),
            most_pages,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the copies of attention")
        return out_BHW

    def by_head(self) -> "PagedLayer":
        """The same memory as pages of one head each: head h of page p is page p * K + h.

        So every key/value head can attend pages of its own.
        """
        heads, shape = self.shape.num_heads, self.shape._replace(num_heads=1)
        view = object.__new__(PagedLayer)
        view.shape, view._isa, view._attend_isa = shape, self._isa, self._attend_isa
        view.data = self.data.view(-1, shape.bytes_per_head)
        view.bounds = None if self.bounds is None else self.bounds.view(-1, 1, 2, shape.width)
        assert len(view.data) == len(self.data) * heads
        view._store = view._describe()
        return view

    def _describe(self) -> _Store:
        shape = self.shape
        return _Store(
            self.data.data_ptr(),
            None if self.bounds is None else self.bounds.data_ptr(),
            shape.page_size,
            shape.num_heads,
            shape.width,
            shape.kind,
        )

    def _native(self, name: str) -> Callable[..., int]:
        """Its status means something for `attend_pages` and `mass_pages` only."""
        isa = self._attend_isa if name == "attend_pages" else self._isa
        return function(name, isa, *_ARGUMENTS[name])

    def _queries(self, q_THD: Tensor) -> Tensor:
        assert q_THD.dtype in _QUERY_DTYPES
        assert q_THD.dtype is torch.float32 or self.shape.kind is not PageKind.F32
        assert q_THD.shape[2] == self.shape.width
        assert q_THD.shape[1] % self.shape.num_heads == 0
        return q_THD.contiguous()

    def _batch(self, q_THD: Tensor, out: Tensor) -> _Batch:
        is_f32 = int(q_THD.dtype is torch.float32)
        return _Batch(
            q_THD.data_ptr(), out.data_ptr(), q_THD.shape[1], is_f32, self.shape.width**-0.5
        )


def attention_problem(width: int, page_size: int, dtype: torch.dtype) -> str | None:
    """Why the native kernels cannot serve such a model; None if they can."""
    found = kernels()
    if found.isa is Isa.TORCH:
        return found.problem or "BURNISH_KERNELS=torch"
    if width % UNIT_KEYS or not 0 < width <= _MAX_WIDTH:
        return f"heads are {width} wide, the kernels take multiples of 16 up to {_MAX_WIDTH}"
    if page_size % UNIT_KEYS:
        return f"pages hold {page_size} tokens, the kernels take multiples of {UNIT_KEYS}"
    if dtype not in _QUERY_DTYPES:
        return f"the kernels take bfloat16 and float32, not {dtype}"
    return None


def attend_packed(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    sinks: int = 0,
    with_tiles: bool = False,
) -> Tensor:
    """Causal attention within consecutive segments: the bits that pages would give.

    Args:
        q_THD: queries of all segments, one after the other.
        k_TKD: keys.
        v_TKD: values.
        lengths: tokens of each segment; their sum is T.
        window: tokens that a query sees back, itself included; None for all.
        sinks: first tokens of a segment that stay visible beyond the window.
        with_tiles: as of `PagedLayer`.
    """
    kind = PageKind.F32 if k_TKD.dtype is torch.float32 else PageKind.BF16
    shape = PageShape(kind, UNIT_KEYS, k_TKD.shape[1], k_TKD.shape[2])
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    pages_N = (lengths_N + UNIT_KEYS - 1) // UNIT_KEYS
    num_pages = int(pages_N.sum())
    layer = PagedLayer(shape, num_pages, with_tiles=with_tiles)
    first_N, page_N = lengths_N.cumsum(0) - lengths_N, pages_N.cumsum(0) - pages_N
    slots_T = torch.arange(int(lengths_N.sum())) + torch.repeat_interleave(
        page_N * UNIT_KEYS - first_N, lengths_N
    )
    layer.write(slots_T, k_TKD, v_TKD)
    zero_N = torch.zeros_like(lengths_N)
    spans = torch.stack(
        (first_N, lengths_N, zero_N, page_N, zero_N + (window or 0), zero_N + sinks), dim=1
    )
    return layer.attend(q_THD, SpanTable(spans, torch.arange(num_pages, dtype=torch.int32)))


def _rows(x_TKD: Tensor) -> Tensor:
    """The same numbers with the heads of a token side by side."""
    if x_TKD.stride(2) != 1 or x_TKD.stride(1) != x_TKD.shape[2]:
        return x_TKD.contiguous()
    return x_TKD


_P, _I, _C = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "write_pages": (_P, _P, _I, _P, _I, _P, _I, _I, _C),
    "attend_pages": (_P, _P, _P, _I, _P, _C),
    "bound_pages": (_P, _P, _P, _I, _P, _P, _I, _C),
    "mass_pages": (_P, _P, _P, _I, _P, _P, _I, _C),
}
