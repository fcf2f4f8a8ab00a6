"""Outputs of a plan: terminal report, CSV and Markdown, HTML page, plots, and files."""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import ConfigError
from planning.figures import format_figure, label, rejections
from planning.output.html_page import render_html
from planning.output.markdown import render_markdown
from planning.output.pareto import make_scatter_view, pareto_front, pareto_fronts
from planning.output.plan_writer import plan_record, read_plan, redraw, write_plan
from planning.output.terminal import WIDTH, render_text
from planning.plan import Axis, Plan, Row
from ptuning.reporting.svg_chart import AxisScale
from tests.support.plans import hostile_plan, impossible_plan, serving_plan

ALL = [serving_plan, impossible_plan, hostile_plan]
FILES = {
    *("candidates.csv", "failed.csv", "pareto.csv", "pareto.html", "pareto.png", "plan.json"),
    "report.md",
}


# ----------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("figure", "value", "name", "text"),
    [
        ("itl_ms_p95", 38.234, "ITL p95", "38.2 ms"),
        ("ttft_ms_mean", 1100.0, "TTFT mean", "1.1 s"),
        ("iteration_s", 24.82, "iteration", "24.8 s"),
        ("request_s", 9000.0, "request", "2.5 h"),
        ("tokens_per_s_per_gpu", 2140.4, "tokens/s/GPU", "2,140"),
        ("tflops_per_gpu", 163.2, "TFLOP/s/GPU", "163"),
        ("mfu", 0.5604, "MFU", "56 %"),
        ("bubble_fraction", 0.00911, "bubble", "0.911 %"),
        ("memory_bytes", 59.88e9, "memory", "59.9 GB"),
        ("training_days", 21.9, "training days", "21.9"),
        ("gpus", 8.0, "GPUs", "8"),
        ("itl_ms", math.inf, "ITL", "–"),
        ("itl_ms", 0.0, "ITL", "0 ms"),
    ],
)
def test_figures_are_formatted_with_units(figure: str, value: float, name: str, text: str) -> None:
    assert (label(figure), format_figure(figure, value)) == (name, text)


def test_rejections_group_reasons_that_differ_only_in_numbers() -> None:
    rows = [
        Row("a", "rejected", {}, reason="needs 91.2 of 85.9 GB"),
        Row("b", "rejected", {}, reason="too slow"),
        Row("c", "rejected", {}, reason="needs 1,100.5 of 85.9 GB"),
        Row("d", "failed", {}, reason="too slow"),
    ]
    grouped = [
        (rejection.count, rejection.example, rejection.reason) for rejection in rejections(rows)
    ]
    assert grouped == [(2, "a", "needs 91.2 of 85.9 GB"), (1, "b", "too slow")]


# ---------------------------------------------------------------------------------------- frontier

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25)


@given(POINTS, st.sampled_from(["low", "high"]), st.sampled_from(["low", "high"]))
@settings(deadline=None, derandomize=True)
def test_pareto_front_contains_exactly_the_undominated_rows(
    points: list[tuple[int, int]], x: Any, y: Any
) -> None:
    rows = [Row(f"{n}", "fits", {}, {"x": a, "y": b}) for n, (a, b) in enumerate(points)]
    front = pareto_front(rows, Axis("x", "", x), Axis("y", "", y))

    def goodness(point: tuple[int, int]) -> tuple[int, int]:
        return point[0] * (1 if x == "high" else -1), point[1] * (1 if y == "high" else -1)

    unbeaten = {
        point
        for point in points
        if not any(
            other_point != point
            and goodness(other_point)[0] >= goodness(point)[0]
            and goodness(other_point)[1] >= goodness(point)[1]
            for other_point in points
        )
    }
    assert {(row.figures["x"], row.figures["y"]) for row in front} == unbeaten
    assert len(front) == len(unbeaten)  # One of equal points.


def test_each_group_has_a_front_in_natural_order() -> None:
    plan = serving_plan()
    assert list(pareto_fronts(plan)) == ["2 GPUs", "4 GPUs", "8 GPUs"]
    best = plan.best
    assert best is not None and best in pareto_fronts(plan)[best.group]
    assert all(
        row.feasibility != "rejected" for rows in pareto_fronts(plan).values() for row in rows
    )


@given(st.floats(1e-6, 1e15), st.floats(1.001, 1e9), st.booleans())
@settings(deadline=None, derandomize=True)
def test_scales_have_few_round_ticks(low: float, times: float, log: bool) -> None:
    scale = AxisScale(low, low * times, log)
    ticks = scale.ticks()
    assert len(ticks) <= 14
    assert all(-1e-6 <= scale.position(tick) <= 1 + 1e-6 for tick in ticks)
    assert scale.position(scale.low) == 0 and scale.position(scale.high) == pytest.approx(1)


def test_outliers_do_not_compress_the_plot() -> None:
    plan = serving_plan()
    figures = {"itl_ms_p95": 53.0, "tokens_per_s_per_gpu": 1e-9}
    lame = Row("lame", "fits", {}, figures, group="8 GPUs")
    view = make_scatter_view(plan)
    view_with_outlier = make_scatter_view(replace(plan, rows=[*plan.rows, lame]))
    assert view is not None and view_with_outlier is not None
    assert (
        view_with_outlier.y.low > 1e-3 and view_with_outlier.hidden_count == view.hidden_count + 1
    )
    assert lame not in view_with_outlier.rows


# ---------------------------------------------------------------------------------------- terminal


def test_terminal_report_contains_verdict_reasons_table_and_command() -> None:
    plan = serving_plan()
    text = render_text(plan)
    lines = text.splitlines()
    blocks = ["request", "objective", "recommended", "settings", "memory", "binding", "why not"]
    starts = [next(n for n, line in enumerate(lines) if line.startswith(block)) for block in blocks]
    assert starts == sorted(starts)
    words_of_report = " ".join(text.split())
    assert (
        "recommended TP4 x1, 128 at once tokens/s/GPU 1,264 ITL p95 26.3 ms measured"
        in words_of_report
    )
    assert "[calibrated, ±9 %]" in words_of_report
    assert "memory 64.8 GB of 85.9 GB: weights 10 GB, KV 51.8 GB, workspace 3 GB" in words_of_report
    assert "118 tried: 77 fit, 3 are tight, 37 rejected, 1 failed" in words_of_report
    assert "rejected: 37, for example TP1 x2, 256 at once: keys and values take" in words_of_report
    assert sum(line.startswith("* ") for line in lines) == 1
    assert lines[-1] == f"  {plan.command}"


@pytest.mark.parametrize("make", ALL)
def test_terminal_report_is_100_columns_without_control_characters(
    make: Callable[[], Plan],
) -> None:
    text = render_text(make())
    body = text.split("\nstart with\n")[0]
    long_lines = [line for line in body.splitlines() if len(line) > WIDTH and " " in line.strip()]
    assert not [line for line in long_lines if "<script>" not in line]
    assert "\x1b" not in text and "\u202e" not in text


def test_terminal_report_names_what_would_fit() -> None:
    text = render_text(impossible_plan())
    assert "recommended    nothing: no candidate fits\nwhat would fit TP8 PP2 on" in text
    assert "start with" not in text
    figures = {"itl_ms_p95": 10.0, "tokens_per_s": 5.0}
    rows = [replace(row, figures=figures) for row in impossible_plan().rows]
    assert "is better" not in render_text(replace(impossible_plan(), rows=rows))  # No plot.


def test_ascii_scatter_marks_the_best_candidate_at_its_figures() -> None:
    figures = [(10.0, 100.0), (20.0, 150.0), (40.0, 200.0)]
    rows = [Row(f"{x}", "best" if x == 20 else "fits", {}, {"a_ms": x, "b": y}) for x, y in figures]
    axes = Axis("a_ms", "wait", "low"), Axis("b", "speed", "high", 120.0)
    lines = render_text(Plan("x", (), "", rows, *axes)).splitlines()
    frame = [line[11:] for line in lines if line[9:11] == " |"]
    assert [line.count("*") for line in frame].count(1) == 1
    (best_line,) = (n for n, line in enumerate(frame) if "*" in line)
    highs = [n for n, line in enumerate(frame) if "o" in line]
    assert highs[0] < best_line < highs[1]  # Between the other two, as its figures are.
    columns = [line.index("*" if "*" in line else "o") for line in frame if set(line) & {"*", "o"}]
    assert columns == sorted(columns, reverse=True)
    assert any(set(line) == {":"} for line in frame)  # The limit of the latency.


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("make", ALL)
def test_written_plan_is_read_back(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan = make()
    written = write_plan(plan, tmp_path / "deep" / "plan")
    folder = tmp_path / "deep" / "plan"
    assert {path.name for path in folder.iterdir()} >= FILES
    assert {path.name for path in written.paths} == {path.name for path in folder.iterdir()}
    reread = read_plan(folder)
    assert (reread.x, reread.y, reread.title) == (plan.x, plan.y, plan.title)
    assert len(reread.rows) == len(plan.rows)
    for row, two in zip(plan.rows, reread.rows, strict=True):
        assert (row.name, row.feasibility, row.group, row.reason) == (
            *(two.name, two.feasibility, two.group),
            two.reason,
        )
        assert dict(two.settings) == dict(row.settings) and two.confidence == row.confidence
        assert dict(two.figures) == pytest.approx(dict(row.figures), rel=1e-6, nan_ok=True)
        assert dict(two.measured) == pytest.approx(dict(row.measured), rel=1e-6)
        assert two.memory == row.memory


def test_plan_files_have_their_contents(tmp_path: Path) -> None:
    plan = serving_plan()
    plan = replace(plan, command="preamble serve --config serve_config.yaml   # 2 times")
    folder = tmp_path / "a plan"
    written = write_plan(plan, folder)

    def names(file: str) -> list[str]:
        with (folder / file).open(newline="") as text:
            return [row["name"] for row in csv.DictReader(text)]

    assert names("candidates.csv") == [row.name for row in plan.rows]
    assert names("failed.csv") == ["TP8 x1, 512 at once"]
    assert names("pareto.csv") == [
        row.name for rows in pareto_fronts(plan).values() for row in rows
    ]
    assert (folder / "serve_config.yaml").read_text() == plan.settings_yaml
    assert (
        written.plan.command == f"preamble serve --config '{folder}/serve_config.yaml'   # 2 times"
    )
    record = json.loads((folder / "plan.json").read_text())
    assert record == json.loads(json.dumps(plan_record(written.plan)))
    assert record["feasible"] and record["best"]["name"] == "TP4 x1, 128 at once"
    assert record["best"]["memory_bytes"]["verdict"] == "fits"
    assert record["counts"] == {"fits": 77, "tight": 3, "rejected": 37, "failed": 1}
    assert sum(rejection["count"] for rejection in record["rejections"]) == 37


def test_csv_has_no_formulas_and_json_no_infinities() -> None:
    rows = [Row("=1+1", "best", {"a": "@x"}, {"x": math.nan, "y": math.inf}, reason="+2")]
    plan = Plan("t", (), "", rows, Axis("x", "", "low"), Axis("y", "", "high"))
    from planning.output.csv_table import format_csv

    (cells,) = list(csv.DictReader(io.StringIO(format_csv(plan.rows))))
    assert (cells["name"], cells["a"], cells["reason"]) == ("'=1+1", "'@x", "'+2")
    json.dumps(plan_record(plan), allow_nan=False)


def test_without_matplotlib_all_files_but_the_png_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(serving_plan(), tmp_path)
    assert (tmp_path / "pareto.png").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written = write_plan(impossible_plan(), tmp_path)
    assert written.notes == (
        "pareto.png was not written: matplotlib is not installed; install it with "
        "pip install 'preamble[plots]'",
    )
    assert not (tmp_path / "pareto.png").exists()  # It showed another plan.
    assert (tmp_path / "pareto.html").exists()


def test_unwritable_folder_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the plan to .*; give another folder"):
        write_plan(serving_plan(), tmp_path / "file" / "plan")


def test_edited_csv_is_redrawn(tmp_path: Path) -> None:
    write_plan(serving_plan(), tmp_path / "one")
    lines = (tmp_path / "one" / "candidates.csv").read_text().splitlines(keepends=True)
    remaining_lines = [line for line in lines if "TP2 x1" not in line]
    (tmp_path / "one" / "candidates.csv").write_text("".join(remaining_lines))
    redrawn = redraw(tmp_path / "one", tmp_path / "two")
    assert {path.name for path in redrawn.paths} == {"pareto.csv", "pareto.html", "pareto.png"}
    text = (tmp_path / "two" / "pareto.html").read_text()
    assert "TP2 x1, 64" not in text and "TP4 x1, 128" in text


def test_csv_without_plan_json_is_drawn_with_given_axes(tmp_path: Path) -> None:
    write_plan(serving_plan(), tmp_path / "one")
    csv_file = tmp_path / "mine.csv"
    csv_file.write_bytes((tmp_path / "one" / "candidates.csv").read_bytes())
    with pytest.raises(ConfigError, match="set --x to one of: tokens_per_s, tokens_per_s_per_gpu"):
        redraw(csv_file)
    with pytest.raises(ConfigError, match="--y is 'tokens_per'; did you mean 'tokens_per_s'"):
        redraw(csv_file, x="ttft_ms_p95", y="tokens_per")
    plan = read_plan(csv_file, x="ttft_ms_p95", y="tokens_per_s")
    assert (plan.x.better, plan.y.better) == ("low", "high")
    assert make_scatter_view(plan) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'name'"),
        ("name,standing,group,source,error,note,reason\n", "has no candidates"),
        ("name,standing,group,a,a,source,error,note,reason\n", "has a column twice"),
        (
            "name,standing,group,source,error,note,reason\na,fits\n",
            ":2 has 2 cells, and the header has 7",
        ),
        ("name,standing,group,source,error,note,reason\na,good,,,,,\n", ":2: standing is 'good'"),
        ("name,standing,group,source,error,note,x,reason\na,fits,,,,,much,\n", "x is 'much'"),
        ("name,standing,group,source,error,note,reason\na,fits,,hearsay,0,,\n", "source is 'hear"),
        ("name,standing,group,source,error,note,reason\na,fits,,measured,-1,,\n", "at least 0"),
        (
            "name,standing,group,source,error,note,x,reason\na,fits,,,,,1e-320,\n",
            "too small or too large",
        ),
        (
            "name,standing,group,source,error,note,ledger_kv_bytes,reason\na,fits,,,,,inf,\n",
            "a finite number of bytes",
        ),
    ],
)
def test_invalid_csv_raises_config_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        redraw(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        redraw(tmp_path / "none.csv")


def test_plot_is_a_png_with_every_group_in_its_colour(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_plan(serving_plan(), tmp_path)
    pixels = imread(tmp_path / "pareto.png")
    assert pixels.shape[:2] == (810, 1350)
    for colour in ((15, 107, 92), (180, 86, 11), (47, 98, 181), (179, 38, 30)):
        matching_pixels = abs(pixels[..., :3] * 255 - colour).max(axis=-1) < 3
        assert matching_pixels.sum() > 20, colour


EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples/plan").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_can_be_read(path: Path) -> None:
    from planning.cli.specification import Specification

    specification = Specification.read(str(path), {})
    assert specification.model.config().num_layers > 1 and specification.hardware.cluster().gpus > 1


@pytest.mark.slow  # It simulates a load on hundreds of candidates.
def test_serving_example_plan_satisfies_its_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from planning.__main__ import main

    (example,) = (path for path in EXAMPLES if path.name == "serve.yaml")
    assert main(["plan", "serve", "--spec", str(example), "--output", str(tmp_path)]) == 0
    assert f"preamble serve --config {tmp_path}/serve_config.yaml" in capsys.readouterr().out
    best = read_plan(tmp_path).best
    assert best is not None and best.figures["itl_ms_p95"] <= 54
    assert best.figures["ttft_ms_p95"] <= 1350


# ------------------------------------------------------------------------------------ report, page


@pytest.mark.parametrize("make", ALL)
def test_markdown_tables_have_equal_cell_counts(make: Callable[[], Plan]) -> None:
    text = render_markdown(make())
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for block in blocks:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1
    assert "\x1b" not in text and "\n<script" not in text
    assert not re.search(r"(?<![\\`'])<script", text.split("```")[0])


class Elements(HTMLParser):
    """All start tags, and all addresses in attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("make", ALL)
def test_page_loads_nothing_and_escapes_texts(make: Callable[[], Plan]) -> None:
    text = render_html(make())
    elements = Elements(text)
    assert elements.addresses == [] and elements.tags.count("script") == 1
    assert "@import" not in text and "url(" not in text and "<script>window" not in text
    assert "default-src 'none'; style-src 'sha256-" in unescape(text)


def test_page_of_thousands_of_candidates_stays_small() -> None:
    plan = serving_plan()
    rows = [replace(row, name=f"{row.name} {n}") for n in range(60) for row in plan.rows[1:]]
    text = render_html(replace(plan, rows=[plan.rows[0], *rows]))
    assert len(text) < 1_000_000 and text.count("<tr") < 300
    assert "The first 200 of" in text


def test_page_says_why_nothing_fits() -> None:
    text = render_html(impossible_plan())
    assert "No configuration fits." in text and "What would fit" in text
    assert "TP8 PP2 on 16 a100-40g" in text and '<svg class="chart' not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_colours_have_enough_contrast(scheme: str) -> None:
    from tests.support.page_style import STYLE, colours, contrast

    light, dark = STYLE.split("@media screen", 1)
    values = {**colours(light), **(colours(dark.split("* {")[0]) if scheme == "dark" else {})}
    # A reason in the panel; a row under the pointer; the limit's label, on its shade and beside it.
    pairs = [("warn", "well"), ("ink", "tint"), ("soft", "tint"), ("bad", "bad-tint")]
    assert not [pair for pair in pairs if contrast(*(values[colour] for colour in pair)) < 4.5]


@pytest.mark.slow  # It starts a browser.
def test_browser_shows_every_candidate_under_the_pointer(tmp_path: Path) -> None:
    from tests.support.chromium import browsing

    plan = serving_plan()
    for name, rendered_plan in {"good": plan, "hostile": hostile_plan()}.items():
        (tmp_path / f"{name}.html").write_text(render_html(rendered_plan), "utf-8")
    address = (tmp_path / "good.html").as_uri()
    with browsing(tmp_path / "browser") as browser:
        tab = browser.open(address)
        assert tab.text(".panel h3") == "TP4 x1, 128 at once"
        # The lowest point on the first group's front, and its whole configuration.
        position = tab.value(
            "(one => { one.scrollIntoView({block: 'center'}); const box ="
            " one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2,"
            " Number(one.getAttribute('cx')), Number(one.getAttribute('cy'))] })"
            "([...document.querySelectorAll('.scatter circle.c0:not(.faint)')]"
            ".sort((a, b) => b.getAttribute('cy') - a.getAttribute('cy'))[0])"
        )
        pointed = {"x": position[0], "y": position[1]}
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", **pointed)
        panel_text = tab.read(".panel", "2 GPUs")
        row = next(r for r in plan.rows if r.group == "2 GPUs" and r.name == tab.text(".panel h3"))
        assert row.figures["tokens_per_s_per_gpu"] < 100
        for name, value in row.settings.items():
            assert re.search(rf"{name.split('_')[0]}.*\s{value}\b", panel_text, re.IGNORECASE)
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        assert tab.read(".panel h3", "TP4 x1, 128")
        # A click pins a candidate; arrow keys move on from it; Escape releases it.
        tab.send(
            "Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **pointed
        )
        tab.send(
            "Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **pointed
        )
        tab.value("document.querySelector('.scatter').focus()")
        tab.press("Escape")
        assert tab.read(".panel h3", "TP4 x1, 128")
        # Sorted by a column, and filtered by text.
        tab.click(".candidates thead th:nth-child(3) button")
        first_row = "[...document.querySelectorAll('.candidates tbody tr:not([hidden]) th')]"
        lowest = min(
            (row for row in plan.rows if row.feasibility in ("best", "fits", "tight")),
            key=lambda row: row.figures["tokens_per_s_per_gpu"],
        )
        assert tab.value(f"{first_row}[0].innerText") == lowest.name
        tab.click("input[type=search]")
        tab.type("tp8 256")
        assert (
            tab.wait(f"{first_row}.length === 1 && {first_row}[0].innerText")
            == "TP8 x1, 256 at once"
        )
        grounds = set()
        for scheme in ("light", "dark"):
            tab.screenshot(tmp_path / f"{scheme}.png", scheme)
            grounds.add(tab.value("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        tab.screenshot(tmp_path / "narrow.png", width=360)
        assert tab.value("document.documentElement.scrollWidth") <= 360
        assert tab.requested == [address] and tab.complaints == []

        hostile_tab = browser.open((tmp_path / "hostile.html").as_uri())
        assert hostile_tab.value("window.hit === undefined && document.scripts.length === 1")
        assert len(hostile_tab.requested) == 1 and hostile_tab.complaints == []
