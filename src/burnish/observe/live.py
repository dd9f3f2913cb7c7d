"""Live progress of a run in a terminal, and the same as plain lines everywhere else."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from burnish.core.observer import RunPhase, StepView
from burnish.core.records import Failure
from burnish.observe.duration import duration
from burnish.observe.printable import printable

TITLES = {
    RunPhase.LOAD: "Load the model",
    RunPhase.CHECK: "Check the environments",
    RunPhase.EVAL_BEFORE: "Evaluate the base model",
    RunPhase.WARM_UP: "Warm up on references",
    RunPhase.EVAL_WARMED: "Evaluate the warmed model",
    RunPhase.TRAIN: "Train by reinforcement",
    RunPhase.EVAL_AFTER: "Evaluate the trained model",
    RunPhase.REPORT: "Write the report",
}
# Rows of domains that fit beside the rest on a small terminal.
_OTHER_ROWS = 14
# Plain output tells progress within a phase at these shares: a log needs no more.
_PLAIN_SHARES = 4


class PlainObserver:
    """One line per phase, step, note and kind of failure. For pipes, logs and CI."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to `stream`, stderr if absent."""
        self._stream = stream or sys.stderr
        self._name, self._total, self._told = RunPhase.LOAD, 0, 0
        self._failures: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Nothing to undo."""

    def phase(self, name: RunPhase, total: int) -> None:
        """Name the phase."""
        self._name, self._total, self._told = name, total, 0
        self._line(f"{TITLES[name]}{f' ({total})' if total else ''}")

    def progress(self, done: int) -> None:
        """Tell every quarter; steps of training tell of themselves."""
        if self._name in (RunPhase.TRAIN, RunPhase.WARM_UP) or not self._total:
            return
        share = done * _PLAIN_SHARES // self._total
        if share > self._told:
            self._told = share
            self._line(f"  {done}/{self._total}")

    def step(self, view: StepView) -> None:
        """The step in one line."""
        self._line("  " + "  ".join([f"step {view.step}/{view.num_steps}", *step_figures(view)]))
        if view.reward:
            self._line("    reward " + " ".join(f"{k}={v:.2f}" for k, v in view.reward.items()))

    def failure(self, failure: Failure) -> None:
        """The first of its kind and place; the count is in the step lines."""
        key = (failure.kind, failure.where)
        self._failures[key] += 1
        if self._failures[key] == 1:
            self._line(f"  failure [{failure.kind}] {failure.where}: {failure.message}")

    def note(self, text: str) -> None:
        """The line."""
        self._line(f"  {text}")

    def result(self, path: Path) -> None:
        """The place."""
        self._line(f"Done: {path}")

    def _line(self, text: str) -> None:
        self._stream.write(printable(text, keep="") + "\n")
        self._stream.flush()


class LiveObserver:
    """A panel that stays in place: phase, reward per domain, speed, lag, failures, time left."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`."""
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(TITLES[RunPhase.LOAD], total=None)
        self._view: StepView | None = None
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._pass: dict[str, float] = {}
        self._seen: set[tuple[str, str]] = set()
        self._live = Live(
            console=console, get_renderable=self._picture, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Stop drawing; what was drawn last stays."""
        self._live.stop()

    def phase(self, name: RunPhase, total: int) -> None:
        """Close the last bar and open one for this phase."""
        task = self._progress.tasks[-1]
        if task.completed == 0 and task.total is None:
            self._progress.remove_task(self._task)
        else:
            self._progress.update(self._task, total=task.total or task.completed)
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(TITLES[name], total=total or None)

    def progress(self, done: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done)

    def step(self, view: StepView) -> None:
        """Remember the figures; they are drawn at the next refresh."""
        self._view = view
        for name, value in view.reward.items():
            self._first.setdefault(name, value)
            self._latest[name] = value
        self._pass.update(view.pass_rate)
        self._progress.update(self._task, completed=view.step)

    def failure(self, failure: Failure) -> None:
        """Print the first of its kind and place above the panel."""
        key = (str(failure.kind), failure.where)
        if key not in self._seen:
            self._seen.add(key)
            self._print(f"failure [{failure.kind}] {failure.where}: {failure.message}", "yellow")

    def note(self, text: str) -> None:
        """Print it above the panel."""
        self._print(text, "dim")

    def result(self, path: Path) -> None:
        """Print where the run lies."""
        self._print(f"Done: {path}", "bold")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(printable(text, keep=""), style=style))

    def _picture(self) -> Group:
        if self._view is None:
            return Group(self._progress)
        figures = Text("  ".join(step_figures(self._view)), style="dim")
        return Group(self._progress, Text(), self._domains(), Text(), figures)

    def _domains(self) -> Table:
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        grid.add_column("domain")
        for header in ("reward", "since start", "pass rate"):
            grid.add_column(header, justify="right")
        grid.add_column("")
        room = max(4, self._console.height - _OTHER_ROWS)
        for name in sorted(self._latest)[:room]:
            change = self._latest[name] - self._first[name]
            style = "green" if change > 0.005 else "red" if change < -0.005 else "dim"
            rate = self._pass.get(name)
            grid.add_row(
                Text(name),
                f"{self._latest[name]:.2f}",
                Text(f"{change:+.2f}", style=style),
                "" if rate is None else f"{rate:.0%}",
                _bar(self._latest[name]),
            )
        if len(self._latest) > room:
            grid.add_row(Text(f"and {len(self._latest) - room} more", style="dim"))
        return grid


def step_figures(view: StepView) -> list[str]:
    """Speed, lag, losses and time left of a step, as short texts."""
    figures = []
    if view.engine_tokens_per_s:
        figures.append(f"engine {view.engine_tokens_per_s:,.0f} tok/s")
    figures.append(f"trained {view.trainer_tokens_per_s:,.0f} tok/s")
    if view.engine_tokens_per_s:
        figures.append(f"lag {view.lag:.1f}")
    figures.append(f"failures {view.failures}")
    figures.append(f"dropped {view.dropped}")
    if view.eta_s is not None:
        figures.append(f"{duration(view.eta_s)} left")
    return figures


def _bar(share: float) -> Text:
    width = 16
    filled = round(min(max(share, 0.0), 1.0) * width)
    return Text("\u2588" * filled, style="dark_orange3") + Text(
        "\u2591" * (width - filled), style="dim"
    )
