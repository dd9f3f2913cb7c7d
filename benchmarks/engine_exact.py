"""What exactness and the kernels cost or give: one model, one machine, interleaved runs.

    python benchmarks/engine_exact.py [--quick] [--threads N] [--json FILE]

`exact/...` rows decode the same requests in exact and in fast mode: tokens per second of the first
over the second. Their bits are compared too: exact mode alone and in a batch, and against the
trainer's packed forward. `train exact` is a training step of the exact forward beside the plain
one. `kernels/...` compares the native kernels with PyTorch's operators in the same engine.
`swap pause` is what an update
keeps a running batch from its next step.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from burnish.core.records import GenerateRequest, Generation, SamplingParams, TrainSequence
from burnish.model.kernels import library
from burnish.model.kernels.library import Isa
from burnish.model.loading import load_model
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.train.config import TrainConfig
from burnish.train.trainer import Trainer

MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS = 32
# Exact over fast at one thread, at two.
LEAST_RATIO = {1: 0.85, 2: 0.75}
SWAP_LIMIT_S = 0.2
Row = dict[str, Any]


def requests(number: int, new: int) -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1000, 40_000, (number, PROMPT_TOKENS), generator=generator).tolist()
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_tokens=new, seed=i),
        )
        for i, prompt in enumerate(ids)
    ]


def run(core: EngineCore, asked: list[GenerateRequest]) -> tuple[float, dict[str, Generation]]:
    """Seconds of decoding, prompts left out, and what was generated."""
    core.forget_prefixes()
    ended: dict[str, Generation] = {}
    for request in asked:
        core.add(request)
    before = core.counters.sampled_tokens
    while core.counters.sampled_tokens < before + len(asked):
        core.step()
    start = time.perf_counter()
    while core.has_work:
        for _, outcome in core.step():
            assert isinstance(outcome, Generation)
            ended[outcome.request_id] = outcome
    return time.perf_counter() - start, ended


def interleaved(number: int, *tasks: Callable[[], float]) -> list[float]:
    """Median seconds of each; the first round warms up."""
    rounds = [[task() for task in tasks] for _ in range(number + 1)][1:]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def row(name: str, value: float, unit: str, peer: str, peer_value: float, **more: Any) -> Row:
    ratio = value / peer_value if peer_value else None
    target = more.get("target")
    ok = None if target is None or ratio is None else ratio >= target
    base = {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value}
    return base | {"ratio": ratio, "target": target, "ok": ok, "note": ""} | more


def exact_rows(loaded: Any, state: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    rows = []
    new = 6 if args.quick else 24
    cores = [
        EngineCore(loaded.config, state, limits=CoreLimits(exact=exact)) for exact in (False, True)
    ]
    with library.restricted(Isa.TORCH):
        plain = EngineCore(loaded.config, state)
    for batch in (1, 16) if args.quick else (1, 16, 64):
        asked = requests(batch, new)

        def slow(asked: list[GenerateRequest] = asked) -> float:
            with library.restricted(Isa.TORCH):
                return run(plain, asked)[0]

        tasks = [lambda core=core: run(core, asked)[0] for core in cores]  # noqa: B023
        fast_s, exact_s, torch_s = interleaved(args.rounds, *tasks, slow)
        tokens = batch * (new - 1)
        rows.append(
            row(
                f"exact/b{batch}",
                tokens / exact_s,
                "tokens/s",
                "fast mode",
                tokens / fast_s,
                target=LEAST_RATIO.get(args.threads),
                n=args.rounds,
            )
        )
        rows.append(
            row(f"kernels/b{batch}", tokens / fast_s, "tokens/s", "PyTorch", tokens / torch_s)
            | {"n": args.rounds}
        )
    return [*rows, *bit_rows(loaded, cores[1], 16 if args.quick else 64, new)]


def bit_rows(loaded: Any, core: EngineCore, number: int, new: int) -> list[Row]:
    asked = requests(number, new)
    together = run(core, asked)[1]
    alone = run(core, asked[:1])[1]["0"]
    same = alone.logprobs == together["0"].logprobs and alone.token_ids == together["0"].token_ids
    trainer = Trainer(TrainConfig(exact=True), copy.deepcopy(loaded.decoder))
    scored = trainer.logprobs([as_sequence(r, together[r.request_id]) for r in asked])
    sampled = [torch.tensor(together[r.request_id].logprobs).tolist() for r in asked]
    equal = sum(
        a == b for x, y in zip(scored, sampled, strict=True) for a, b in zip(x, y, strict=True)
    )
    total = sum(map(len, sampled))
    return [
        row("bits/alone=batch", float(same), "share", "all", 1.0, target=1.0, n=1),
        row("bits/engine=trainer", equal / total, "share", "all", 1.0, target=1.0, n=total),
    ]


def as_sequence(request: GenerateRequest, reply: Generation) -> TrainSequence:
    zeros, sampled = [0.0] * len(request.prompt_ids), len(reply.token_ids)
    return TrainSequence(
        token_ids=(*request.prompt_ids, *reply.token_ids),
        loss_mask=(*[False] * len(zeros), *[True] * sampled),
        logprobs=(*zeros, *reply.logprobs),
        advantages=(*zeros, *[1.0] * sampled),
        prefix_group=request.request_id,
        num_prefix_tokens=len(zeros),
        domain="bench",
    )


def train_row(loaded: Any, number: int, args: argparse.Namespace) -> Row:
    generator = torch.Generator().manual_seed(0)
    length = 64 if args.quick else 128
    ids = torch.randint(1000, 40_000, (number, length), generator=generator).tolist()
    sequences = [
        TrainSequence(
            token_ids=tuple(tokens),
            loss_mask=(False, *[True] * (length - 1)),
            logprobs=(0.0, *[-9.0] * (length - 1)),
            advantages=(0.0, *[1.0] * (length - 1)),
            prefix_group=str(i),
            num_prefix_tokens=0,
            domain="bench",
        )
        for i, tokens in enumerate(ids)
    ]
    trainers = [
        Trainer(TrainConfig(exact=exact), copy.deepcopy(loaded.decoder)) for exact in (False, True)
    ]
    plain_s, exact_s = interleaved(
        args.rounds, *(lambda t=trainer: t.step(sequences).seconds for trainer in trainers)
    )
    tokens = number * length
    return row("train exact", tokens / exact_s, "tokens/s", "plain forward", tokens / plain_s) | {
        "n": args.rounds
    }


def swap_rows(loaded: Any, state: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    """As the engine's worker does it: packing happens beside the steps, then comes the pause."""
    core = EngineCore(loaded.config, state)
    for request in requests(16, 200):
        core.add(request)
    for _ in range(3):
        core.step()
    packing, pauses = [], []
    for version in range(1, args.rounds + 2):
        start = time.perf_counter()
        prepared = core.prepare(state)
        middle = time.perf_counter()
        core.update_weights(prepared, version)
        pauses.append(time.perf_counter() - middle)
        packing.append(middle - start)
        core.step()
    pause_s, packing_s = (statistics.median(each[1:]) for each in (pauses, packing))
    made = row("swap pause", pause_s, "s", "limit", SWAP_LIMIT_S, n=args.rounds)
    made |= {"ok": pause_s <= SWAP_LIMIT_S, "note": "lower is better"}
    return [made, row("swap packing", packing_s, "s", "none", 0.0, n=args.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.rounds = 1 if args.quick else 3
    torch.set_num_threads(args.threads)
    loaded = load_model(MODEL)
    state = {name: t.to(torch.bfloat16) for name, t in loaded.decoder.state_dict().items()}
    rows = exact_rows(loaded, state, args)
    rows += swap_rows(loaded, state, args)
    rows.append(train_row(loaded, 2 if args.quick else 16, args))
    for each in rows:
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.2f}"
        verdict = {True: "ok", False: "MISSED", None: ""}[each["ok"]]
        peer = f"{each['peer']} {each['peer_value']:.1f}"
        print(
            f"{each['name']:22} {each['value']:9.3f} {each['unit']:9} {peer:24} {ratio} {verdict}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
