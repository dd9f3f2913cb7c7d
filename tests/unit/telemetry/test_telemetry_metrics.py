import math
import threading

import pytest

from burnish.telemetry.catalogue import CATALOGUE, LOSS, PASS_RATE
from burnish.telemetry.metrics import Metric, Recorder, Reduction, Registry, reduce


def test_values_of_a_step_are_reduced_as_declared_and_then_forgotten() -> None:
    recorder = Recorder(CATALOGUE)
    for value in (1.0, 3.0):
        recorder.record(LOSS, value)
    recorder.record("lag_max", 2)
    recorder.record("lag_max", 1)
    recorder.record(PASS_RATE, 0.5, "sort")
    recorder.record(PASS_RATE, 1, "add")
    recorder.record_all({"step_s": 2.0})
    recorder.record("step_s", 3.0)
    found = {(s.name, s.label): s.value for s in recorder.take()}
    assert found == {
        ("loss", ""): 2.0,
        ("lag_max", ""): 2.0,
        ("pass_rate", "sort"): 0.5,
        ("pass_rate", "add"): 1.0,
        ("step_s", ""): 5.0,
    }
    assert recorder.take() == []


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("no_such_metric", 1.0, ""),
        ("loss", "1.0", ""),
        ("loss", None, ""),
        ("loss", True, ""),
        ("loss", 1.0, "sort"),
        ("pass_rate", 1.0, ""),
    ],
)
def test_what_was_not_declared_is_our_bug(name: str, value: object, label: str) -> None:
    with pytest.raises(AssertionError):
        Recorder(CATALOGUE).record(name, value, label)  # type: ignore[arg-type]


def test_a_name_is_declared_once() -> None:
    registry = Registry([LOSS])
    registry.declare(LOSS)
    rival = Metric(name="loss", unit="1", reduction=Reduction.MAX, meaning="Another.")
    with pytest.raises(AssertionError, match="twice"):
        registry.declare(rival)
    with pytest.raises(AssertionError, match="another"):
        Recorder(registry).record(rival, 1.0)


@pytest.mark.parametrize("reduction", sorted(set(Reduction) - {Reduction.LAST}))
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_is_never_hidden_by_a_reduction(reduction: Reduction, values: list[float]) -> None:
    assert math.isnan(reduce(reduction, values))


def test_every_declared_metric_has_name_unit_and_meaning() -> None:
    for metric in CATALOGUE:
        assert metric.name.replace("_", "").isalnum()
        assert metric.name.islower()
        assert metric.unit
        assert metric.meaning.endswith(".")


def test_no_record_is_lost_between_threads() -> None:
    recorder = Recorder(CATALOGUE)

    def work() -> None:
        for _ in range(2000):
            recorder.record("step_s", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    total = 0.0
    while any(thread.is_alive() for thread in threads):
        total += sum(sample.value for sample in recorder.take())
    for thread in threads:
        thread.join()
    total += sum(sample.value for sample in recorder.take())
    assert total == 8000
