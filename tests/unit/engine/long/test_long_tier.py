"""Pages on disk: any order of use gives the same bytes; what is lost is found."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from burnish.core.errors import UserError
from burnish.core.records import Failure, GenerateRequest, Generation, SamplingParams
from burnish.core.vocabulary import KvDtype, KvPolicyKind, SleepLevel
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import Isa, kernels, restricted
from burnish.model.kernels.memory import lazy_zeros
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.tier.frames import Frames
from burnish.rollout.engine.tier.limits import TierLimits
from burnish.rollout.engine.tier.memory import PageMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the disk tier needs Linux")
KERNELS = [Isa.TORCH] if kernels().isa is Isa.TORCH else [Isa.TORCH, kernels().isa]
PAGE_BYTES, NUM_PAGES, NUM_LAYERS = 4096, 24, 2


class TierMachine(RuleBasedStateMachine):
    """Frames beside a dictionary that keeps everything."""

    @initialize(frames=st.integers(4, 12), prefetch=st.booleans(), extra=st.sampled_from([0, 64]))
    def start(self, frames: int, prefetch: bool, extra: int) -> None:
        self.size = PAGE_BYTES * 4 + extra
        self.regions = [[lazy_zeros(NUM_PAGES, self.size)] for _ in range(NUM_LAYERS)]
        limits = TierLimits(frames * self.size, 1 << 30, prefetch=prefetch)
        self.free: set[int] = set()
        self.frames = Frames(
            [PageMemory(each) for each in self.regions],
            NUM_PAGES, limits, lambda page: page in self.free,
        )  # fmt: skip
        self.num_frames, self.counter = frames, 0
        self.model: dict[tuple[int, int], int] = {}

    pages = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=4, unique=True)
    layers = st.integers(0, NUM_LAYERS - 1)

    @rule(layer=layers, pages=pages, fresh=st.booleans())
    def write(self, layer: int, pages: list[int], fresh: bool) -> None:
        self.frames.begin(layer, pages, fresh=np.full(len(pages), fresh))
        for page in pages:
            if not fresh:
                self.compare(layer, page)
            self.counter += 1
            row = self.regions[layer][0][page]
            row[:] = self.counter % 251
            row[::7] = (self.counter // 251) % 251
            self.model[layer, page] = int(row.long().sum())
        self.frames.unpin()
        self.free -= set(pages)

    @rule(layer=layers, pages=pages)
    def read(self, layer: int, pages: list[int]) -> None:
        self.frames.require(layer, pages)
        for page in pages:
            if page not in self.free:
                self.compare(layer, page)
        self.frames.unpin()

    @rule(layer=layers, pages=pages)
    def prefetch(self, layer: int, pages: list[int]) -> None:
        self.frames.prefetch(layer, pages)

    @rule(pages=pages)
    def forget(self, pages: list[int]) -> None:
        self.frames.forget(pages)
        for layer in range(NUM_LAYERS):
            for page in pages:
                self.model.pop((layer, page), None)

    @rule(layer=layers, pages=pages, data=st.data())
    def score(self, layer: int, pages: list[int], data: st.DataObject) -> None:
        values = st.floats(-5, 5) | st.just(-np.inf)
        size = len(pages)
        scores = data.draw(st.lists(values, min_size=size, max_size=size))
        self.frames.score(layer, np.array(pages), np.array(scores, dtype=np.float64))

    def compare(self, layer: int, page: int) -> None:
        assert int(self.regions[layer][0][page].long().sum()) == self.model.get((layer, page), 0)

    @invariant()
    def memory_is_within_the_budget(self) -> None:
        if hasattr(self, "frames"):
            self.frames.check()
            assert self.frames.stats.ram_bytes <= self.num_frames * self.size
            assert not self.frames.broken

    def teardown(self) -> None:
        if hasattr(self, "frames"):
            self.frames.close()


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_is_read_ahead_gives_way_to_what_is_needed_now() -> None:
    """Over the budget in 96 of 100 tries when nobody waited for the page on its way."""
    for _ in range(20):
        machine = TierMachine()
        machine.start(frames=4, prefetch=True, extra=0)
        machine.write(0, [0, 1, 3, 4], False)
        machine.write(0, [2], False)
        machine.prefetch(0, [0])
        machine.read(0, [1, 2, 3, 4])
        machine.memory_is_within_the_budget()
        machine.teardown()


def ask(name: str, prompt: list[int], **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), params=SamplingParams(**params)
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


def core_of(decoder: Decoder, tier: TierLimits | None, **limits: Any) -> EngineCore:
    sizes = CoreLimits(num_pages=128, page_size=64, budget_tokens=96, tier=tier)
    return EngineCore(
        decoder.config, decoder.state_dict(), limits=sizes._replace(**limits), dtype=torch.float32
    )


def run(core: EngineCore, *requests: GenerateRequest) -> list[Generation | Failure]:
    sequences = [core.add(request) for request in requests]
    ended: dict[Any, Any] = {}
    while core.has_work:
        ended.update(core.step())
        core.check()
    return [ended[s] for s in sequences]


def wide(make: Callable[..., Decoder], **more: Any) -> Decoder:
    return make(max_position_embeddings=4096, head_dim=32, **more)


def tier_of(decoder: Decoder, frames: int, **more: Any) -> TierLimits:
    c = decoder.config
    page = 2 * c.num_kv_heads * c.head_dim * 64 * 4
    return TierLimits(frames * page, more.pop("disk_bytes", 1 << 30), **more)


@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("kind", [KvPolicyKind.FULL, KvPolicyKind.QUEST, KvPolicyKind.H2O])
def test_a_disk_below_memory_changes_no_bit(
    make_decoder: Callable[..., Decoder], kind: KvPolicyKind, isa: Isa
) -> None:
    decoder = wide(make_decoder)
    kv = KvPolicy(kind, budget_tokens=768, sink_tokens=16, recent_tokens=64)
    requests = [ask(f"{i}", prompt_of(1500 + 64 * i, i), max_tokens=8, seed=i) for i in range(3)]
    with restricted(isa):
        plain = run(core_of(decoder, None, kv=kv), *requests)
        core = core_of(decoder, tier_of(decoder, 64), kv=kv)
        tiered = run(core, *requests)
        stats = core.tier
        core.close()
    for one, other in zip(plain, tiered, strict=True):
        assert isinstance(one, Generation)
        assert isinstance(other, Generation)
        assert other.token_ids == one.token_ids
        # PyTorch's products promise no bits: with a disk fewer rows share one, padded to another
        # length.
        tolerance = 1e-4 if isa is Isa.TORCH else 0
        assert other.logprobs == pytest.approx(one.logprobs, abs=tolerance, rel=0)
    assert stats.ram_bytes <= tier_of(decoder, 64).ram_bytes
    if kind is not KvPolicyKind.H2O:
        assert stats.spilled > 0
        assert stats.written_bytes > 0
        assert stats.written_bytes % stats.spilled == 0
        assert stats.misses > 0


def test_a_corrupt_page_ends_its_request_alone(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = wide(make_decoder)
    kv = KvPolicy()
    request, other = (ask(n, prompt_of(1600, i), max_tokens=6) for i, n in enumerate("ab"))
    alone = run(core_of(decoder, None, kv=kv, budget_tokens=96), other)[0]
    core = core_of(decoder, tier_of(decoder, 64, prefetch=False), kv=kv)
    first = core.add(request)
    while first.num_computed < 1500:
        core.step()
    assert core.tier.disk_bytes > 0
    fd = core._cache._frames._file._fd  # type: ignore[union-attr]
    size = os.fstat(fd).st_size
    os.pwrite(fd, os.urandom(size), 0)
    second = core.add(other)
    ended: dict[Any, Any] = {}
    while core.has_work:
        ended.update(core.step())
        core.check()
    assert isinstance(ended[first], Failure)
    assert "its checksum is wrong" in ended[first].message
    assert isinstance(ended[second], Generation)
    assert ended[second].token_ids == alone.token_ids  # type: ignore[union-attr]
    # Nobody may find the lost pages in the prefix index.
    again = run(core, ask("c", prompt_of(1600, 0), max_tokens=6))[0]
    assert isinstance(again, Generation)
    assert again.cached_tokens == 0
    core.close()


def test_a_full_disk_ends_the_largest_request_alone(make_decoder: Callable[..., Decoder]) -> None:
    decoder = wide(make_decoder)
    tier = tier_of(decoder, 64)
    small = tier._replace(disk_bytes=tier.ram_bytes // 4)
    core = core_of(decoder, small, kv=KvPolicy())
    big, little = ask("big", prompt_of(1980), max_tokens=6), ask("b", prompt_of(70), max_tokens=40)
    found = run(core, little, big)
    assert isinstance(found[0], Generation)
    assert isinstance(found[1], Failure)
    assert "do not fit" in found[1].message
    assert isinstance(run(core, ask("c", prompt_of(300, 5), max_tokens=3))[0], Generation)
    core.close()


_LIMITED = """
import resource, sys
from burnish.rollout.engine.tier.file import TierFile
file = TierFile(64, 4096, 1 << 30, sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 4096, 8 * 4096))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
written = 0
try:
    for i in range(64):
        file.write(i, [memoryview(bytearray([i]) * 4096)])
        written += 1
except OSError as error:
    buffer = memoryview(bytearray(4096))
    assert all(file.read(i, [buffer]) is None and buffer[0] == i for i in range(written))
    assert not file.has(written)
    sys.exit(written)
"""


def test_what_the_system_refuses_to_keep_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path)], check=False)
    assert done.returncode == 8
    assert list(tmp_path.iterdir()) == []


def test_memory_is_really_given_back() -> None:
    region = lazy_zeros(512, 1 << 16)
    frames = Frames([PageMemory([region])], 512, TierLimits(32 << 16, 1 << 30), lambda _: False)
    before = _resident_bytes()
    for page in range(512):
        frames.begin(0, [page], fresh=np.array([True]))
        region[page] = page % 251
        frames.unpin()
    assert _resident_bytes() - before < 12 << 20
    for page in range(0, 512, 31):
        frames.require(0, [page])
        assert (region[page] == page % 251).all()
        frames.unpin()
    assert frames.stats.disk_bytes >= 480 << 16
    frames.close()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_what_cannot_be_served_is_refused(
    make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = wide(make_decoder)
    with pytest.raises(UserError, match=r"engine\.kv\.ram_mb holds 2 pages"):
        core_of(decoder, tier_of(decoder, 2))
    with pytest.raises(UserError, match="no file can be made there"):
        core_of(decoder, tier_of(decoder, 64, directory=str(tmp_path / "none")))
    for kv_dtype in (KvDtype.INT8, KvDtype.FP8):
        with pytest.raises(UserError, match="too few") as refused:
            core_of(decoder, tier_of(decoder, 64), page_size=16, kv_dtype=kv_dtype)
        assert refused.value.fix == "set engine.kv.disk_mb to 0, or engine.kv_dtype to model."
    narrow = make_decoder(head_dim=2)
    with pytest.raises(UserError, match="too few") as refused:
        core_of(narrow, tier_of(decoder, 64), page_size=16)
    assert refused.value.fix == "set engine.kv.disk_mb to 0."
    core = core_of(decoder, tier_of(decoder, 64))
    with pytest.raises(UserError, match="attends 63 cache pages at once"):
        core.add(ask("a", prompt_of(4000), max_tokens=3))
    core.close()


def test_counts_go_on_after_the_cache_was_given_back(make_decoder: Callable[..., Decoder]) -> None:
    decoder = wide(make_decoder)
    core = core_of(decoder, tier_of(decoder, 64))
    run(core, *(ask(f"{i}", prompt_of(1500, i), max_tokens=2) for i in range(3)))
    before = core.tier
    core.sleep(SleepLevel.CACHE)
    assert core.tier == before._replace(ram_bytes=0, disk_bytes=0)
    core.wake()
    run(core, ask("more", prompt_of(1500), max_tokens=2))
    after = core.tier
    core.close()
    assert before.spilled > 0
    assert after.spilled >= before.spilled
    assert after.hits > before.hits
