"""Attention of the engine against PyTorch's operators and against reading the same bytes.

Heads are those of SmolLM2-135M: 9 query and 3 key/value heads of 64, bf16. A decode row takes one
token of each sequence over several layers whose keys and values exceed the caches together, pages
in random order; its peers are gather + SDPA and a plain sum over as many bytes. A prefill row takes
one whole prompt; its peer is `scaled_dot_product_attention`. All alternate within one run, and the
medians count. The last rows compare one-byte caches with bf16.

On a shared machine `--cpu` compares CPU seconds of one thread instead of wall time.

    python benchmarks/attention.py [--quick] [--threads N] [--cpu] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype
from burnish.model.config import ModelConfig
from burnish.model.kernels.attention import attend_packed
from burnish.model.kernels.library import kernels
from burnish.model.loading import load_model
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape, StepAttend
from burnish.rollout.engine.weights import ServedModel

Row = dict[str, object]
HEADS, KV_HEADS, WIDTH = 9, 3, 64
# More than any cache of the processor.
MIN_BYTES = 192 * 2**20
MODEL = "smollm2-135m-instruct"
TEXT_TOKENS = 256


def config(num_layers: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=HEADS * WIDTH,
        intermediate_size=16,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        max_position_embeddings=10**6,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )


def medians(
    runs: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def filled(batch: int, context: int, num_layers: int, kv_dtype: KvDtype) -> Callable[[], object]:
    """One token of `batch` sequences over all layers of a full cache."""
    page_size = 16
    pages_each = context // page_size
    shape = CacheShape(
        config(num_layers), batch * pages_each, page_size, torch.bfloat16, kv_dtype=kv_dtype
    )
    cache = open_cache(shape)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * pages_each, generator=generator).tolist()
    tables = [order[i * pages_each : (i + 1) * pages_each] for i in range(batch)]
    k, v = torch.randn(2, context, KV_HEADS, WIDTH, generator=generator).bfloat16()
    for table in tables:
        step = cache.step([Span(table, 0, context)])
        for layer in range(num_layers):
            cache.write(layer, step, k, v)
    step = cache.step([Span(table, context - 1, context) for table in tables])
    q = torch.randn(batch, HEADS, WIDTH, generator=generator).bfloat16()

    def run() -> None:
        for layer in range(num_layers):
            cache.attend(layer, q, step)

    return run


def gather_and_sdpa(batch: int, context: int, num_layers: int) -> Callable[[], object]:
    """The usual way without a kernel for pages."""
    num_pages, generator = batch * context // 16, torch.Generator().manual_seed(0)
    order = torch.randperm(num_pages, generator=generator)
    shape = (2 * KV_HEADS, num_pages, 16, WIDTH)
    layers = [torch.randn(shape, generator=generator).bfloat16() for _ in range(num_layers)]
    q = torch.randn(batch, HEADS, 1, WIDTH, generator=generator).bfloat16()

    def run() -> None:
        for layer in layers:
            both = layer.index_select(1, order).view(2, KV_HEADS, batch, context, WIDTH)
            k, v = both.transpose(1, 2)
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def decode(batch: int, context: int, repeats: int, clock: Callable[[], float]) -> list[Row]:
    """Speeds of a decode step: bf16 and int8 pages, gathered pages, and a plain read."""
    layer_bytes = batch * context * KV_HEADS * WIDTH * 4
    num_layers = max(1, -(-MIN_BYTES // layer_bytes))
    taken = medians(
        {
            "bf16": filled(batch, context, num_layers, KvDtype.MODEL),
            "int8": filled(batch, context, num_layers, KvDtype.INT8),
            "gathered": gather_and_sdpa(batch, context, num_layers),
            "read": torch.ones(num_layers * layer_bytes // 4).sum,
        },
        repeats,
        clock,
    )
    name, total = f"decode b{batch} {context}", num_layers * layer_bytes
    per_layer = {key: seconds / num_layers * 1e3 for key, seconds in taken.items()}
    speed = {key: total / seconds / 1e9 for key, seconds in taken.items()}
    return [
        row(f"{name} over gather", per_layer["bf16"], "ms per layer", "gather + SDPA",
            per_layer["gathered"], taken["gathered"] / taken["bf16"], 8.0, repeats),
        row(f"{name} of read speed", speed["bf16"], "GB/s", "sum of as many bytes",
            speed["read"], taken["read"] / taken["bf16"], 0.85, repeats),
        row(f"{name} int8 over bf16", per_layer["int8"], "ms per layer", "bf16 pages",
            per_layer["bf16"], taken["bf16"] / taken["int8"], 1.0, repeats),
    ]  # fmt: skip


def prefill(length: int, repeats: int, clock: Callable[[], float]) -> Row:
    """One prompt, causal."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(length, HEADS, WIDTH, generator=generator).bfloat16()
    k, v = torch.randn(2, length, KV_HEADS, WIDTH, generator=generator).bfloat16()

    def peer() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )

    ours = {"ours": lambda: attend_packed(q, k, v, [length], with_tiles=True), "peer": peer}
    taken = medians(ours, repeats, clock)
    return row(f"prefill {length}", taken["ours"] * 1e3, "ms per layer",
               "scaled_dot_product_attention", taken["peer"] * 1e3,
               taken["peer"] / taken["ours"], 2.0, repeats)  # fmt: skip


def quality() -> list[Row]:
    """Bytes of one-byte caches, and how far they move the log-probs of likely text."""
    loaded = load_model(MODEL)
    model = ServedModel(loaded.config, loaded.decoder.state_dict(), torch.bfloat16)
    # Towards text that the model finds likely: each token becomes the choice after those before.
    ids = torch.arange(100, 100 + TEXT_TOKENS)
    pages = range(-(-TEXT_TOKENS // 16))

    def logprobs(kv_dtype: KvDtype) -> tuple[Tensor, int]:
        shape = CacheShape(loaded.config, len(pages), 16, torch.bfloat16, kv_dtype=kv_dtype)
        cache = open_cache(shape)
        step = cache.step([Span(pages, 0, TEXT_TOKENS)])
        with torch.inference_mode():
            positions = torch.arange(TEXT_TOKENS)
            hidden = model.hidden(ids, positions, StepAttend(cache, step))
            return model.logits(hidden).log_softmax(-1), cache.num_bytes_per_page

    with torch.inference_mode():
        for _ in range(8):
            likely, _ = logprobs(KvDtype.MODEL)
            ids = torch.cat((ids[:1], likely.argmax(-1)[:-1]))
    plain, plain_bytes = logprobs(KvDtype.MODEL)
    rows = []
    for kv_dtype in (KvDtype.INT8, KvDtype.FP8):
        coded, coded_bytes = logprobs(kv_dtype)
        chosen = ids[1:, None]
        change = (coded[:-1].gather(1, chosen) - plain[:-1].gather(1, chosen)).abs()
        note = f"log-prob change: mean {change.mean():.4f}, max {change.max():.4f} nats"
        rows.append(
            row(f"{kv_dtype} bytes", coded_bytes, "bytes per page", "bf16 pages", plain_bytes,
                coded_bytes / plain_bytes, 0.53, 1, note, smaller=True)
        )  # fmt: skip
    return rows


def row(
    name: str, value: float, unit: str, peer: str, peer_value: float, ratio: float,
    target: float, n: int, note: str = "", *, smaller: bool = False,
) -> Row:  # fmt: skip
    ok = ratio <= target if smaller else ratio >= target
    made: Row = {
        "name": name, "value": round(value, 4), "unit": unit, "peer": peer,
        "peer_value": round(peer_value, 4), "ratio": round(ratio, 3), "target": target,
        "ok": ok, "n": n, "note": note,
    }  # fmt: skip
    print(f"{name:28} {value:9.3f} {unit:14} {peer}: {peer_value:.3f}  ratio {ratio:.2f} "
          f"({'<=' if smaller else '>='} {target}) {note}", flush=True)  # fmt: skip
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of one thread, not wall")
    parser.add_argument("--json")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu else time.perf_counter
    threads = 1 if options.cpu else options.threads
    torch.set_num_threads(threads)
    print(f"kernels: {kernels().isa}, {threads} threads, {'CPU' if options.cpu else 'wall'} time")
    cases = [(1, 2048), (1, 8192), (16, 2048), (16, 8192), (64, 2048)]
    repeats = 3 if options.quick else 7
    rows = []
    for batch, context in cases[1:3] if options.quick else cases:
        rows += decode(batch, context, repeats, clock)
    for length in (2048,) if options.quick else (2048, 8192):
        rows.append(prefill(length, repeats, clock))
    rows += quality()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
