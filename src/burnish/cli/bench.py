"""`burnish bench engine`: how fast this machine samples from a model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.run.config import RunConfig
    from burnish.run.engine_bench import BatchFigures, EngineFigures


def engine(
    *configs: Path,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    plot: Path | None = None,
    quick: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Measure throughput, time to the first token and between tokens, prefill and cache use.

    Reads the sections [model] and [engine] of a run's configuration; servers
    behind engine.remote.urls are measured as well.

    Args:
        configs: TOML files, later ones win; the defaults if none is given.
        set_: one value, as engine.KEY=VALUE; may be repeated.
        plot: draw the figures into this SVG file.
        quick: fewer and smaller sizes.
        as_json: print the figures as one JSON object.
    """
    from burnish.cli.console import people, write_json
    from burnish.core.config import load_config
    from burnish.core.disk import require_writable
    from burnish.run.config import RunConfig

    if plot is not None and plot.suffix.lower() != ".svg":
        raise UserError(f"--plot {plot}: only SVG is drawn.", fix="--plot figures.svg")
    if plot is not None:
        require_writable(plot, "--plot")
    config = load_config(RunConfig, list(configs), set_ or []).value
    figures = asyncio.run(_measure(config, quick))
    if plot is not None:
        _draw(figures, config, plot)
    if as_json:
        write_json(figures)
        return
    for shown in _tables(figures):
        people().print(shown)
    for reason in figures.skipped:
        people(sys.stderr).print(f"left out: {reason}")


async def _measure(config: RunConfig, quick: bool) -> EngineFigures:
    from burnish.core.clock import SystemClock
    from burnish.model.loading import load_model
    from burnish.run.config import EngineBackend
    from burnish.run.engine_bench import QUICK, BenchPlan, bench_engine
    from burnish.run.engines import check_engine, core_limits, open_engine

    check_engine(config)
    _progress(f"loading {config.model.source}")
    loaded = load_model(
        config.model.source,
        context=config.model.context,
        rope=config.model.rope,
        dtype=config.engine.dtype,
    )
    opened = await open_engine(config, loaded, None, for_training=False)
    is_local = config.engine.backend is EngineBackend.LOCAL
    limits = core_limits(config)
    try:
        return await bench_engine(
            opened,
            QUICK if quick else BenchPlan(),
            vocab_size=loaded.config.vocab_size,
            num_cache_tokens=limits.num_pages * limits.page_size if is_local else None,
            clock=SystemClock(),
            progress=_progress,
        )
    finally:
        await opened.close()


def _tables(figures: EngineFigures) -> list[object]:
    from burnish.cli.console import table

    batches = [
        (
            *(_name(f), f"{f.tokens_per_s:,.1f}"),
            f"{f.first_token_p50_s * 1e3:,.0f} / {f.first_token_p95_s * 1e3:,.0f}",
            f"{f.inter_token_p50_s * 1e3:,.1f} / {f.inter_token_p95_s * 1e3:,.1f}",
            "-" if f.used_page_ratio is None else f"{f.used_page_ratio:.0%}",
        )
        for f in figures.batches
    ]
    prefills = [
        (f"{f.prompt_tokens:,}", f"{f.tokens_per_s:,.0f}", f"{f.first_token_s * 1e3:,.0f}")
        for f in figures.prefills
    ]
    heads = ("batch", "tokens/s", "first token, ms p50 / p95", "between tokens, ms", "cache")
    more = [
        (
            _name(f),
            "none" if f.acceptance_ratio is None else f"{f.acceptance_ratio:.0%}",
            f"{f.mask_ms:,.2f}",
            f"{f.tier_read_bytes / 2**20:,.1f} / {f.tier_written_bytes / 2**20:,.1f}",
        )
        for f in figures.batches
        if f.acceptance_ratio is not None or f.mask_ms or f.tier_read_bytes + f.tier_written_bytes
    ]
    others = ("batch", "guesses right", "masks, ms per step", "disk, MiB read / written")
    return [
        table(heads, batches),
        *([table(others, more)] if more else []),
        table(("prompt", "tokens/s read", "first token, ms"), prefills),
    ]


def _name(figures: BatchFigures) -> str:
    return f"{figures.batch}, {figures.grammar}" if figures.grammar else str(figures.batch)


def _draw(figures: EngineFigures, config: RunConfig, path: Path) -> None:
    from burnish.core.errors import one_line
    from burnish.observe.engine_chart import Line, Panel, chart

    rows = [f for f in figures.batches if not f.grammar]
    speed = Line("decode", tuple((f.batch, f.tokens_per_s) for f in rows))
    waits = (
        Line("first token", tuple((f.batch, f.first_token_p50_s * 1e3) for f in rows)),
        Line("per token", tuple((f.batch, f.inter_token_p50_s * 1e3) for f in rows)),
    )
    read = Line("prefill", tuple((f.prompt_tokens, f.tokens_per_s) for f in figures.prefills))
    panels = (
        Panel("Sampled tokens per second", "requests at once", "tok/s", (speed,)),
        Panel("Latency, median", "requests at once", "ms", waits),
        Panel("Prompt tokens read per second", "length of the prompt", "tok/s", (read,)),
    )
    try:
        path.write_text(chart(f"{config.model.source} on {figures.engine}", panels))
    except OSError as error:
        raise UserError(
            f"--plot {path} cannot be written: {one_line(error)}.", fix="give another path."
        ) from error


def _progress(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
