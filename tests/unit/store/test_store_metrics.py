import math
from pathlib import Path

from burnish.store.metrics import MetricStore, read_metrics
from burnish.telemetry.metrics import Sample


def sample(name: str, value: float, label: str = "") -> Sample:
    return Sample(name=name, label=label, value=value)


def test_series_are_by_name_and_label_in_the_order_of_steps(tmp_path: Path) -> None:
    store = MetricStore(tmp_path / "metrics")
    store.append(2, [sample("loss", 0.2)])
    store.append(1, [sample("loss", 0.1), sample("pass_rate", 0.5, "add")])
    assert read_metrics(tmp_path / "metrics") == {
        "loss": {"": [(1, 0.1), (2, 0.2)]},
        "pass_rate": {"add": [(1, 0.5)]},
    }


def test_the_last_write_of_a_step_wins_also_over_segments(tmp_path: Path) -> None:
    store = MetricStore(tmp_path / "metrics")
    for step in range(70):
        store.append(step, [sample("loss", 0.0)])
    store.append(3, [sample("loss", 9.0)])
    assert read_metrics(tmp_path / "metrics")["loss"][""][3] == (3, 9.0)
    store.close()
    assert len(read_metrics(tmp_path / "metrics")["loss"][""]) == 70
    assert len(list((tmp_path / "metrics").iterdir())) == 2


def test_rolled_back_rows_are_gone_even_if_they_never_come_again(tmp_path: Path) -> None:
    store = MetricStore(tmp_path / "metrics")
    for step in range(100):
        store.append(step, [sample("loss", float(step))])
    store.rollback_to(4)
    store = MetricStore(tmp_path / "metrics")
    store.append(5, [sample("loss", -5.0)])
    expected = [*((s, float(s)) for s in range(5)), (5, -5.0)]
    assert read_metrics(tmp_path / "metrics") == {"loss": {"": expected}}


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    store = MetricStore(tmp_path / "metrics")
    store.append(0, [sample("loss", math.nan), sample("grad_norm", -math.inf)])
    for _ in range(2):
        found = read_metrics(tmp_path / "metrics")
        assert math.isnan(found["loss"][""][0][1])
        assert found["grad_norm"][""] == [(0, -math.inf)]
        store.close()


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics") == {}
    MetricStore(tmp_path / "metrics").rollback_to(0)
    assert read_metrics(tmp_path / "metrics") == {}
