"""The report: everything on it, nothing that runs, nothing that calls out."""

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from burnish.observe import charts
from burnish.observe import data as d
from burnish.observe.page import headline, render

_SPEC = importlib.util.spec_from_file_location(
    "report_example", Path(__file__).with_name("report_example.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
report_example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(report_example)
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Outline(HTMLParser):
    """Collects elements and attributes; checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def page() -> str:
    return render(report_example.example())


def test_markup_written_by_a_model_shows_as_text(page: str) -> None:
    found = outline(page)
    assert "script" not in found.elements
    assert "img" not in found.elements
    assert report_example.HOSTILE in "".join(found.text)


def test_no_attribute_runs_code_or_leaves_the_file(page: str) -> None:
    for name, value in outline(page).attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "action", "xlink:href"):
            assert value is not None
            assert value.startswith("#")
    assert not re.search(r"url\(|@import", page)


def test_the_page_forbids_scripts_and_connections_by_policy(page: str) -> None:
    values = [value for _, value in outline(page).attributes if value]
    assert "default-src 'none'; style-src 'unsafe-inline'" in values


def test_hostile_names_of_domains_are_escaped_everywhere() -> None:
    name = 'x"><script>1</script>'
    data = report_example.example()
    row = d.DomainResult(name=name, n=1, before=0.0, after=1.0, diff=1.0, ci_low=0.5, ci_high=1.0)
    curve = d.Curve(domain=name, steps=(1,), reward=(0.0,), pass_rate=(0.0,))
    shares = d.Shares(steps=(1, 2), by_domain={name: (1.0, 1.0)})
    ledger = d.LedgerView(dispatched=2, trained=1, in_flight=0, dropped={name: 1})
    hostile = report_example.example(
        domains=(row,),
        curves=(curve,),
        shares=shares,
        ledger=ledger,
        title=name,
        panels=(d.Panel(title=name, unit=name, meaning=name, steps=(1,), values=(1.0,)),),
        config=(d.Origin(key=name, value=name, origin=name),),
        samples=data.samples,
    )
    assert "script" not in outline(render(hostile)).elements


def test_every_link_of_the_menu_has_its_section(page: str) -> None:
    found = outline(page)
    ids = {value for name, value in found.attributes if name == "id"}
    links = {value[1:] for name, value in found.attributes if name == "href" and value}
    assert links == ids


def test_every_table_names_its_columns_and_every_chart_has_a_label(page: str) -> None:
    found = outline(page)
    assert found.elements.count("thead") == found.elements.count("table")
    assert page.count('role="img"') == found.elements.count("svg")
    assert page.count("<svg ") == len(re.findall(r"<svg [^>]*aria-label=", page))


def test_a_run_without_anything_still_has_a_page() -> None:
    empty = report_example.example(
        domains=(),
        curves=(),
        failures=(),
        panels=(),
        lengths=(),
        shares=None,
        samples=(),
        token_views=(),
        gates=(),
        canary=(),
        config=(),
        wall_s=None,
        peak_rss_bytes=None,
        ledger=d.LedgerView(dispatched=0, trained=0, in_flight=0, dropped={}),
    )
    assert "no held-out result yet" in render(empty)


def test_missing_rollouts_are_shouted_not_hidden() -> None:
    ledger = d.LedgerView(dispatched=10, trained=4, in_flight=1, dropped={"stale": 3})
    assert ledger.missing == 2
    assert "2 rollouts are not accounted for" in render(report_example.example(ledger=ledger))


def test_a_significant_loss_stands_at_the_top(page: str) -> None:
    assert "Significantly worse than before: form_reply." in page


def test_the_headline_is_the_mean_over_domains() -> None:
    rows = tuple(
        d.DomainResult(name=n, n=4, before=b, after=a, diff=a - b, ci_low=0.0, ci_high=1.0)
        for n, b, a in (("a", 0.0, 0.5), ("b", 0.5, 1.0))
    )
    assert headline(report_example.example(domains=rows)).endswith("from 25.0 % to 75.0 %")


def test_the_gain_is_split_between_warm_up_and_reinforcement_learning(page: str) -> None:
    rows = (
        d.DomainResult(
            name="a",
            n=4,
            before=0.0,
            warmed=0.5,
            after=0.25,
            diff=0.25,
            ci_low=0.1,
            ci_high=0.4,
            rl_diff=-0.25,
            rl_ci_low=-0.4,
            rl_ci_high=-0.1,
        ),
    )
    made = report_example.example(domains=rows, mean_rl_gain=d.Interval(diff=-0.25))
    assert headline(made).endswith(
        "from 0.0 % to 50.0 % by the warm-up, to 25.0 % by reinforcement learning"
    )
    shown = render(made)
    assert "Reinforcement learning made these worse: a." in shown
    assert re.search(r"of which RL</dt><dd>-25\.0", shown)
    assert re.search(r"Steps with a gradient</dt><dd>58 <small>of 60", page)


def test_a_run_without_any_gradient_says_that_the_model_is_unchanged(page: str) -> None:
    ledger = d.LedgerView(dispatched=8, trained=0, in_flight=0, dropped={"zero_variance": 8})
    alert = "No step had a gradient"
    assert alert in render(report_example.example(ledger=ledger))
    assert alert not in page


def test_names_of_domains_break_between_words_only() -> None:
    css = (Path(charts.__file__).parent / "templates" / "report.css").read_text()
    for selector in ("h3", "tbody th"):
        (rule,) = re.findall(rf"^{selector} \{{([^}}]*)\}}", css, flags=re.MULTILINE)
        assert "anywhere" not in rule
        assert "break-all" not in rule


def test_the_page_is_the_same_for_the_same_data(page: str) -> None:
    assert render(report_example.example()) == page


def test_two_hundred_domains_fit_on_the_page() -> None:
    names = [f"domain_{i}" for i in range(200)]
    curves = tuple(
        d.Curve(domain=n, steps=tuple(range(1, 41)), reward=(0.5,) * 40, pass_rate=(0.5,) * 40)
        for n in names
    )
    shares = d.Shares(steps=(1, 2), by_domain=dict.fromkeys(names, (1 / 200, 1 / 200)))
    made = render(report_example.example(curves=curves, shares=shares))
    assert len(made) < 6_000_000
    assert "193 others" in made


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 1.0), (float("nan"), 1.0), (-3.0, 2.0, 1e12)])
def test_charts_take_any_numbers(values: tuple[float, ...]) -> None:
    panel = d.Panel(
        title="t", unit="", meaning="", steps=tuple(range(1, len(values) + 1)), values=values
    )
    chart = charts.panel_chart(panel)
    outline(chart)
    assert "nan" not in re.sub(r"<title>.*?</title>", "", chart)


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert charts.smooth([0.25] * 57) == [0.25] * 57
    assert charts.smooth([]) == []


def test_bands_hold_everything_that_was_shared() -> None:
    shares = d.Shares(steps=(1,), by_domain={f"d{i}": (1 / 30,) for i in range(30)})
    bands = charts.share_bands(shares)
    assert len(bands) == charts.MAX_BANDS
    assert sum(values[0] for _, values in bands) == pytest.approx(1.0)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1) of `#rrggbb`."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_aa_asks_for(theme: int) -> None:
    css = (Path(charts.__file__).parent / "templates" / "report.css").read_text()
    block = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[theme]
    colour = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    for ink in ("ink", "soft", "faint", "copper", "up", "down", "flat"):
        for ground in ("paper", "card", "wash"):
            a, b = sorted((luminance(colour[ink]), luminance(colour[ground])))
            assert (b + 0.05) / (a + 0.05) >= 4.5, (ink, ground)
