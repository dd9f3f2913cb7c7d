"""Progress: readable on a terminal, plain in a log, harmless whatever a model wrote."""

import io

from rich.console import Console

from burnish.core.observer import RunPhase, StepView
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.observe.duration import duration
from burnish.observe.live import TITLES, LiveObserver, PlainObserver
from burnish.observe.printable import printable


def view(step: int = 1, **changes: object) -> StepView:
    values = {"phase": RunPhase.TRAIN, "step": step, "num_steps": 5, "reward": {"code": 0.25}}
    return StepView(**(values | {"engine_tokens_per_s": 1234.0, "lag": 0.5} | changes))


def play(observer: PlainObserver | LiveObserver) -> None:
    with observer:
        observer.phase(RunPhase.LOAD, 0)
        observer.phase(RunPhase.EVAL_BEFORE, 8)
        for done in range(1, 9):
            observer.progress(done)
        observer.phase(RunPhase.TRAIN, 5)
        observer.step(view(1))
        observer.step(view(2, reward={"code": 0.75}, pass_rate={"code": 0.5}, eta_s=100.0))
        failure = Failure(kind=FailureKind.SANDBOX, where="box", message="[red]no\x1b[2J[/red]")
        observer.failure(failure)
        observer.failure(failure)


def test_plain_output_has_no_control_characters_and_one_line_per_event() -> None:
    stream = io.StringIO()
    play(PlainObserver(stream))
    lines = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if "failure [sandbox]" in line][1:] == []
    assert any("step 2/5" in line and "1 min 40 s left" in line for line in lines)
    assert [line.strip() for line in lines if "/8" in line] == ["2/8", "4/8", "6/8", "8/8"]


def test_live_output_shows_reward_change_and_text_without_markup() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=30, color_system=None)
    play(LiveObserver(console))
    shown = stream.getvalue()
    assert "+0.50" in shown
    assert "[red]no" in shown
    assert "\x1b[2J" not in shown
    assert shown.count("failure [sandbox]") == 1


def test_live_output_of_many_domains_fits_the_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=24, color_system=None)
    observer = LiveObserver(console)
    observer.step(view(reward={f"d{i}": 0.1 for i in range(200)}))
    console.print(observer._picture())
    assert len(stream.getvalue().splitlines()) <= 24
    assert "more" in stream.getvalue()


def test_every_phase_has_a_title() -> None:
    assert set(TITLES) == set(RunPhase)


def test_durations_read_as_people_say_them() -> None:
    spans = {0.04: "0.0 s", 59.97: "1 min 00 s", 751: "12 min 31 s", 3720: "1 h 02 min"}
    assert {seconds: duration(seconds) for seconds in spans} == spans


def test_printable_keeps_text_and_defuses_control_characters() -> None:
    assert printable("a\nb\tc \N{SNOWMAN}") == "a\nb\tc \N{SNOWMAN}"
    assert "\x1b" not in printable("\x1b]0;title\x07")
    assert printable("a\nb", keep="") == "a\N{REPLACEMENT CHARACTER}b"
