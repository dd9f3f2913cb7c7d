"""A made-up run for the report's tests. Its texts are as hostile as a model may write them."""

import math
import random

from burnish.observe import data as d

HOSTILE = "<script>alert('x')</script></style><img src=x onerror=alert(1)>"
DOMAINS = ("chain_sum", "letter_counting", "code_repair", "tool_notes", "extraction", "form_reply")


def curves(num_steps: int = 60) -> tuple[d.Curve, ...]:
    """Rising, noisy, reproducible."""
    rng = random.Random(7)
    made = []
    for position, name in enumerate(DOMAINS):
        steps = tuple(s for s in range(1, num_steps + 1) if rng.random() < 0.8)
        rates = tuple(
            min(
                1.0,
                max(0.0, 0.1 + 0.1 * position + 0.4 * (1 - math.exp(-s / 20)) + rng.gauss(0, 0.09)),
            )
            for s in steps
        )
        rewards = tuple(min(1.0, 0.25 + 0.6 * r) for r in rates)
        made.append(d.Curve(domain=name, steps=steps, reward=rewards, pass_rate=rates))
    return tuple(made)


def domains() -> tuple[d.DomainResult, ...]:
    """One clearly worse, one flat, the rest up."""
    made = []
    for position, name in enumerate(DOMAINS):
        diff = (0.31, 0.12, 0.22, 0.45, 0.02, -0.09)[position]
        before = 0.1 + 0.09 * position
        made.append(
            d.DomainResult(
                name=name,
                n=96,
                before=before,
                warmed=before + diff / 3,
                after=before + diff,
                diff=diff,
                ci_low=diff - 0.06,
                ci_high=diff + 0.06,
                rl_diff=diff * 2 / 3,
                rl_ci_low=diff * 2 / 3 - 0.06,
                rl_ci_high=diff * 2 / 3 + 0.06,
            )
        )
    return tuple(made)


def attempt(text: str, score: float) -> d.Attempt:
    """One answer."""
    return d.Attempt(
        speeches=(d.Speech(role="assistant", pieces=(d.Piece(text=text),)),),
        outcome="scored",
        score=score,
        passed=score > 0.9,
        credits=(
            ("outcome", float(score > 0.9), f"expected 42, got {text[:9]}"),
            ("compliance", 1.0, ""),
        ),
    )


def example(**changes: object) -> d.ReportData:
    """A full page."""
    steps = tuple(range(1, 61))
    rng = random.Random(3)
    speed = tuple(900 + rng.gauss(0, 60) for _ in steps)
    samples = tuple(
        d.Sample(
            domain=name,
            index=3,
            why="gained",
            prompt=f"What is 31 + 11?\nReply as <answer>N</answer>. {HOSTILE}",
            before=attempt("I think that the answer is about forty. " * 4 + HOSTILE, 0.1),
            after=attempt("<answer>42</answer>", 1.0),
        )
        for name in DOMAINS
    )
    pieces = tuple(
        d.Piece(text=w + " ", advantage=a)
        for w, a in zip(
            ["The", "answer", "is", "<answer>", "42", "</answer>", "\n[tool]", " ok"],
            [0.2, 0.2, 0.2, 0.9, 0.9, -0.4, None, None],
            strict=True,
        )
    )
    values: dict[str, object] = {
        "title": "2026-11-29-quickstart",
        "model": "SmolLM2-135M-Instruct",
        "status": "complete",
        "wall_s": 751.0,
        "peak_rss_bytes": 4_210_000_000,
        "num_steps": 60,
        "domains": domains(),
        "curves": curves(),
        "ledger": d.LedgerView(
            dispatched=3840,
            trained=2410,
            in_flight=0,
            dropped={"zero_variance": 1200, "stale": 190, "invalid": 8, "surplus": 32},
        ),
        "failures": (
            d.FailureCount(kind="sandbox", where="sandbox.bwrap.exec", message=HOSTILE, count=8),
        ),
        "panels": (
            d.Panel(
                title="Engine",
                unit="tokens/s",
                meaning="Tokens sampled per second.",
                steps=steps,
                values=speed,
            ),
            d.Panel(
                title="Trainer",
                unit="tokens/s",
                meaning="Tokens trained on per second.",
                steps=steps,
                values=tuple(v * 1.7 for v in speed),
            ),
            d.Panel(
                title="Lag",
                unit="versions",
                meaning="Mean age of trained tokens.",
                steps=steps,
                values=tuple(abs(rng.gauss(0.8, 0.2)) for _ in steps),
            ),
        ),
        "bottleneck": "The trainer waited 41 % of the time for rollouts; the engine was busy 97 %.",
        "lengths": tuple(
            d.LengthRow(
                domain=n,
                num_all=600,
                mean_all=31.2,
                tail_all=40.0,
                num_trained=400,
                mean_trained=30.9,
                tail_trained=39.0,
            )
            for n in DOMAINS
        ),
        "shares": d.Shares(
            steps=steps,
            by_domain={
                n: tuple((1 + p + (0.05 * s if p == 2 else 0)) / (21 + 0.05 * s) for s in steps)
                for p, n in enumerate(DOMAINS)
            },
        ),
        "samples": samples,
        "token_views": (
            d.TokenView(
                domain="chain_sum",
                why="best",
                rollout_id="chain_sum/17/3",
                score=1.0,
                pieces=pieces,
            ),
        ),
        "gates": (
            d.Gate(name="chain_sum", passed=True, detail="3 checks"),
            d.Gate(name="broken", passed=False, detail="oracle scored 0.4"),
        ),
        "canary": (
            d.CanaryFact(name="checks", value="61", meaning="One after each delivery."),
            d.CanaryFact(name="largest difference", value="0 nats", meaning="On any token."),
        ),
        "mean_gain": d.Interval(diff=0.17, low=0.15, high=0.19),
        "mean_rl_gain": d.Interval(diff=0.11, low=0.09, high=0.13),
        "steps_with_gradient": 58,
        "quarantined": {"broken": "oracle scored 0.4"},
        "facts": (
            ("burnish", "0.1.0"),
            ("torch", "2.13.0"),
            ("hardware", "2 cores, 16 GB"),
            ("seed", "0"),
        ),
        "config": (d.Origin(key="train.lr", value="1e-5", origin="recipes/quickstart.toml:12"),),
    }
    values.update(changes)
    return d.ReportData(**values)  # type: ignore[arg-type]
