"""What a scraper reads: checked by the parser of the Prometheus project itself."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from burnish.telemetry.prometheus import Family, Histogram, Kind, Point, render

# The parser splits lines as Python does, the format at newlines only.
TEXT = st.text(
    st.characters(
        exclude_categories=("Cs",), exclude_characters="\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    )
)


@given(TEXT, st.dictionaries(st.sampled_from(("a", "b2", "c_c")), TEXT), st.floats())
def test_every_value_label_and_meaning_comes_back(
    meaning: str, labels: dict[str, str], value: float
) -> None:
    text = render([Family("x_bytes", Kind.GAUGE, meaning, (Point(value, labels),))])
    (found,) = text_string_to_metric_families(text)
    (sample,) = found.samples
    assert (found.name, found.type) == ("x_bytes", "gauge")
    assert sample.labels == labels
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@given(st.lists(st.floats(0, 1e6)))
def test_classes_are_cumulative_and_the_last_counts_all(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 100.0))
    for value in values:
        histogram.add(value)
    text = render([Family("t_seconds", Kind.HISTOGRAM, "Time.", histogram.points())])
    (found,) = text_string_to_metric_families(text)
    counts = {s.labels["le"]: s.value for s in found.samples if s.name.endswith("_bucket")}
    assert found.type == "histogram"
    assert counts == {
        "0.5": sum(v <= 0.5 for v in values),
        "1.0": sum(v <= 1 for v in values),
        "100.0": sum(v <= 100 for v in values),
        "+Inf": len(values),
    }
    rest = {s.name: s.value for s in found.samples if not s.labels}
    assert rest["t_seconds_count"] == len(values)
    assert math.isclose(rest["t_seconds_sum"], math.fsum(values), rel_tol=1e-9)
