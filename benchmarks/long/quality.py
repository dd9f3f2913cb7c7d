"""What the options for long contexts cost SmolLM2-135M in quality, each against the dense engine.

text      a story that comes back to its facts: the change of the log-prob of given tokens
needles   facts in a text of another kind: of those that the dense engine answers, how many the
          option answers too (a model of this size answers about half of them)
rope      a text of twice the trained context, positions stretched or not; and what stretching
          costs a text that would have fitted
"""

import pydoc_data.topics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from long.forced import PAGE, Forced, force
from long.needles import hide, recall, run
from long.story import story
from torch import Tensor

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import KvDtype, KvPolicyKind
from burnish.model.config import ModelConfig
from burnish.model.context import stretch
from burnish.model.loading import LoadedModel
from burnish.model.rope_scaling import RopeKind
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.ring.prefill import RingPrefill
from burnish.rollout.engine.weights import ServedModel

KINDS: tuple[RopeKind, ...] = ("yarn", "linear", "dynamic")
SINKS, RECENT = 16, 64
MIB = 2**20
Row = dict[str, Any]


class Sizes(NamedTuple):
    """How much is read."""

    text: int
    """Tokens of the story."""
    forced: int
    """Given tokens after it."""
    haystack: int
    """Tokens that the needles lie in."""
    needles: int
    """How many; 0 leaves them out."""
    shares: tuple[int, ...]
    """Budgets of the policies, as parts of the text; needles are sought under the first."""
    stretches: tuple[int, ...]
    """Contexts to stretch to, times the trained one; the text is as long if `reads_far`."""
    reads_far: bool
    """Read texts beyond the trained context: minutes."""


FULL = Sizes(4096, 64, 2048, 16, (4, 2, 8), (2, 4), True)
QUICK = Sizes(512, 16, 256, 0, (4,), (2,), False)


class Option(NamedTuple):
    """One way to keep and attend keys and values."""

    name: str
    kind: KvPolicyKind = KvPolicyKind.FULL
    share: int = 1
    """The budget is the text divided by this."""
    windowed: bool = False
    """Prompts are read through a window of the budget."""
    kv_dtype: KvDtype = KvDtype.MODEL
    ring: bool = False

    def policy(self, num_tokens: int) -> KvPolicy:
        budget = num_tokens // self.share
        if self.kind is KvPolicyKind.FULL:
            return KvPolicy()
        return KvPolicy(
            kind=self.kind,
            budget_tokens=budget,
            sink_tokens=SINKS,
            recent_tokens=RECENT,
            prefill_window=budget if self.windowed else 0,
        )


def options_of(shares: Sequence[int]) -> list[Option]:
    found = [Option("int8", kv_dtype=KvDtype.INT8), Option("fp8", kv_dtype=KvDtype.FP8)]
    found.append(Option("ring prefill, 2 processes", ring=True))
    for kind in KvPolicyKind:
        if kind is not KvPolicyKind.FULL:
            found += [Option(f"{kind} 1/{share}", kind, share) for share in shares]
    quest = KvPolicyKind.QUEST
    n = shares[0]
    return [*found, Option(f"quest 1/{n}, prompts through a window of 1/{n}", quest, n, True)]


def quality(loaded: LoadedModel, dtype: Any, sizes: Sizes) -> Iterator[Row]:
    """Up to two rows for each option, and those of stretched positions."""
    state = loaded.decoder.state_dict()
    model = ServedModel(loaded.config, state, dtype)
    tokens = loaded.tokenizer.encode(story(sizes.text // 12))[: sizes.text + sizes.forced]
    reference = reference_text(loaded)
    needles = hide(loaded.tokenizer, reference, sizes.haystack, sizes.needles)
    num_prompt = len(tokens) - sizes.forced
    dense = force(model, tokens, num_prompt, KvPolicy())
    known = (
        recall(_core(loaded.config, state, Option("dense"), sizes.haystack), needles)
        if sizes.needles
        else set()
    )
    with RingPrefill(loaded.config, state, num_workers=2, dtype=dtype) as group:
        for option in options_of(sizes.shares):
            prefix: Any = group.prefill(tuple(tokens[:num_prompt])) if option.ring else ()
            kv = option.policy(num_prompt)
            found = force(model, tokens, num_prompt, kv, option.kv_dtype, prefix)
            yield _text_row(option.name, found, dense, tokens[num_prompt:])
            if not sizes.needles or option.share not in (1, sizes.shares[0]):
                continue
            core = _core(loaded.config, state, option, sizes.haystack)
            if option.ring:
                core.adopt(needles.body, group.prefill(needles.body))
            yield _recall_row(option.name, recall(core, needles), known, sizes.haystack)
            core.close()
    yield from _near(loaded, dtype, sizes, reference)
    if sizes.reads_far:
        yield from _far(loaded, dtype, sizes, reference)


def reference_text(loaded: LoadedModel) -> list[int]:
    """The language reference that comes with Python: some 100,000 tokens of prose."""
    topics = pydoc_data.topics.topics
    return loaded.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))


def _core(
    config: ModelConfig, state: dict[str, Tensor], option: Option, num_tokens: int
) -> EngineCore:
    limits = CoreLimits(
        num_pages=24 * (num_tokens // PAGE),
        page_size=PAGE,
        kv=option.policy(num_tokens),
        kv_dtype=option.kv_dtype,
    )
    return EngineCore(config, state, limits=limits)


def _text_row(name: str, found: Forced, dense: Forced, given: Sequence[int]) -> Row:
    kl_N = (dense.logprobs_NV.exp() * (dense.logprobs_NV - found.logprobs_NV)).sum(-1)
    same = (dense.logprobs_NV.argmax(-1) == found.logprobs_NV.argmax(-1)).float().mean()
    rows = range(len(given))
    change_N = (found.logprobs_NV - dense.logprobs_NV)[rows, list(given)]
    return _row(
        f"quality of {name}: text", float(change_N.mean()), "nats/token",
        peer="dense", peer_value=0.0, n=len(given),
        note=(
            f"mean change of a given token's log-prob, {float(change_N.abs().mean()):.3f} either "
            f"way; KL {float(kl_N.mean()):.4f}; same likeliest token {float(same):.0%}; "
            f"{found.kept_bytes / MIB:.1f} MiB kept, dense {dense.kept_bytes / MIB:.1f}"
        ),
    )  # fmt: skip


def _recall_row(name: str, found: set[int], known: set[int], num_tokens: int) -> Row:
    kept = len(found & known)
    return _row(
        f"quality of {name}: needles", kept, "answered", peer="dense", peer_value=len(known),
        ratio=kept / len(known) if known else None, n=len(known),
        note=f"of those that the dense engine answers, in {num_tokens} tokens",
    )  # fmt: skip


def _near(loaded: LoadedModel, dtype: Any, sizes: Sizes, reference: Sequence[int]) -> Iterator[Row]:
    """A text that fits, under each stretch."""
    state, trained = loaded.decoder.state_dict(), loaded.config.max_position_embeddings
    near = tuple(reference[: sizes.haystack])
    plain = _logprobs(loaded.config, state, near, dtype)[0]
    for times in sizes.stretches:
        for kind in KINDS:
            config = stretch(loaded.config, times * trained, kind)
            found = _logprobs(config, state, near, dtype)[0]
            yield _row(
                f"quality of rope {kind} x{times}: text within the trained context",
                _mean(found) - _mean(plain), "nats/token", peer="unstretched", peer_value=0.0,
                n=len(near), note=f"change of log-prob; {len(near)} tokens of prose, "
                f"{_mean(plain):.2f} unstretched",
            )  # fmt: skip


def _far(loaded: LoadedModel, dtype: Any, sizes: Sizes, reference: Sequence[int]) -> Iterator[Row]:
    """A text of twice the trained context under each stretch and under none."""
    trained = loaded.config.max_position_embeddings
    needles = hide(loaded.tokenizer, reference, 2 * trained - 64, sizes.needles)
    unscaled = msgspec.structs.replace(loaded.config, max_position_embeddings=2 * trained)
    configs = {kind: stretch(loaded.config, 2 * trained, kind) for kind in KINDS}
    before: float | None = None
    for name, config in {"none": unscaled, **configs}.items():
        state = loaded.decoder.state_dict()
        logprobs, core = _logprobs(config, state, needles.body, dtype)
        quarters = range(0, len(logprobs) + 1, len(logprobs) // 4)
        parts = [f"{_mean(logprobs[a:b]):.2f}" for a, b in pairwise(quarters)]
        value = _mean(logprobs[trained:])
        before = value if before is None else before
        yield _row(
            f"quality of rope {name} x2: text beyond the trained context", value,
            "nats/token", peer="unstretched", peer_value=before, n=len(logprobs) - trained,
            note=f"log-prob; quarters of {len(logprobs)} tokens: {', '.join(parts)}; "
            f"{len(recall(core, needles))} of {sizes.needles} needles",
        )  # fmt: skip
        core.close()


def _logprobs(
    config: ModelConfig, state: dict[str, Tensor], tokens: tuple[int, ...], dtype: Any
) -> tuple[Sequence[float], EngineCore]:
    """Of every token but the first; and the engine, whose cache holds the text now."""
    limits = CoreLimits(num_pages=len(tokens) // PAGE + 64, page_size=PAGE)
    core = EngineCore(config, state, dtype=dtype, limits=limits)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add(
        GenerateRequest(request_id="text", prompt_ids=tokens, params=params, prompt_logprobs=True)
    )
    ((_, generation),) = run(core)
    return generation.prompt_logprobs[1:], core


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(name: str, value: float, unit: str, **more: Any) -> Row:
    base = {"peer": "", "peer_value": None, "ratio": None, "target": None, "ok": None, "n": 1}
    return {"name": name, "value": value, "unit": unit, **base, "note": "", **more}
