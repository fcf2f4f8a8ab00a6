"""What a plan becomes: words on a terminal, tables, a page in a browser, a picture, files."""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import ConfigError
from planning.figures import label, rejections, say
from planning.output.files import read_plan, record_of, redraw, write_plan
from planning.output.html_page import page
from planning.output.markdown import report
from planning.output.pareto import Scale, front, fronts, view
from planning.output.terminal import WIDTH, tell
from planning.plan import Axis, Plan, Row
from tests.support.plans import hostile_plan, impossible_plan, serving_plan

ALL = [serving_plan, impossible_plan, hostile_plan]
FILES = {
    *("candidates.csv", "failed.csv", "pareto.csv", "pareto.html", "pareto.png", "plan.json"),
    "report.md",
}


# ----------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("figure", "value", "name", "said"),
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
def test_a_figure_is_said_with_its_unit(figure: str, value: float, name: str, said: str) -> None:
    assert (label(figure), say(figure, value)) == (name, said)


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    rows = [
        Row("a", "rejected", {}, reason="needs 91.2 of 85.9 GB"),
        Row("b", "rejected", {}, reason="too slow"),
        Row("c", "rejected", {}, reason="needs 1,100.5 of 85.9 GB"),
        Row("d", "failed", {}, reason="too slow"),
    ]
    found = [(one.count, one.example, one.reason) for one in rejections(rows)]
    assert found == [(2, "a", "needs 91.2 of 85.9 GB"), (1, "b", "too slow")]


# ---------------------------------------------------------------------------------------- frontier

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25)


@given(POINTS, st.sampled_from(["low", "high"]), st.sampled_from(["low", "high"]))
@settings(deadline=None, derandomize=True)
def test_the_front_is_what_no_other_beats(points: list[tuple[int, int]], x: Any, y: Any) -> None:
    rows = [Row(f"{n}", "fits", {}, {"x": a, "y": b}) for n, (a, b) in enumerate(points)]
    found = front(rows, Axis("x", "", x), Axis("y", "", y))

    def good(point: tuple[int, int]) -> tuple[int, int]:
        return point[0] * (1 if x == "high" else -1), point[1] * (1 if y == "high" else -1)

    unbeaten = {
        one
        for one in points
        if not any(
            other != one and good(other)[0] >= good(one)[0] and good(other)[1] >= good(one)[1]
            for other in points
        )
    }
    assert {(row.figures["x"], row.figures["y"]) for row in found} == unbeaten
    assert len(found) == len(unbeaten)  # Of equal ones, one.


def test_each_group_has_a_front_and_groups_are_in_the_order_of_their_numbers() -> None:
    plan = serving_plan()
    assert list(fronts(plan)) == ["2 GPUs", "4 GPUs", "8 GPUs"]
    best = plan.best
    assert best is not None and best in fronts(plan)[best.group]
    assert all(row.standing != "rejected" for rows in fronts(plan).values() for row in rows)


@given(st.floats(1e-6, 1e15), st.floats(1.001, 1e9), st.booleans())
@settings(deadline=None, derandomize=True)
def test_a_scale_has_few_round_ticks_within_it(low: float, times: float, log: bool) -> None:
    scale = Scale(low, low * times, log)
    ticks = scale.ticks()
    assert len(ticks) <= 14
    assert all(-1e-6 <= scale.share(one) <= 1 + 1e-6 for one in ticks)
    assert scale.share(scale.low) == 0 and scale.share(scale.high) == pytest.approx(1)


def test_a_candidate_that_is_far_off_does_not_squeeze_the_others() -> None:
    plan = serving_plan()
    figures = {"itl_ms_p95": 53.0, "tokens_per_s_per_gpu": 1e-9}
    lame = Row("lame", "fits", {}, figures, group="8 GPUs")
    near, far = view(plan), view(replace(plan, rows=[*plan.rows, lame]))
    assert near is not None and far is not None
    assert far.y.low > 1e-3 and far.left_out == near.left_out + 1
    assert lame not in far.rows


# ---------------------------------------------------------------------------------------- terminal


def test_the_terminal_gives_the_verdict_its_reasons_a_table_and_the_command() -> None:
    plan = serving_plan()
    text = tell(plan)
    lines = text.splitlines()
    blocks = ["asked", "objective", "recommended", "settings", "memory", "binding", "why not"]
    starts = [next(n for n, line in enumerate(lines) if line.startswith(one)) for one in blocks]
    assert starts == sorted(starts)
    said = " ".join(text.split())
    assert "recommended TP4 x1, 128 at once tokens/s/GPU 1,264 ITL p95 26.3 ms measured" in said
    assert "[calibrated, ±9 %]" in said
    assert "memory 64.8 GB of 85.9 GB: weights 10 GB, KV 51.8 GB, workspace 3 GB" in said
    assert "118 looked at: 77 fit, 3 are tight, 37 rejected, 1 failed" in said
    assert "rejected: 37 such as TP1 x2, 256 at once: keys and values take" in said
    assert sum(line.startswith("* ") for line in lines) == 1
    assert lines[-1] == f"  {plan.command}"


@pytest.mark.parametrize("make", ALL)
def test_the_terminal_is_a_hundred_columns_and_gets_no_commands(make: Callable[[], Plan]) -> None:
    text = tell(make())
    body = text.split("\nstart with\n")[0]
    long = [line for line in body.splitlines() if len(line) > WIDTH and " " in line.strip()]
    assert not [line for line in long if "<script>" not in line]
    assert "\x1b" not in text and "\u202e" not in text


def test_where_nothing_fits_the_terminal_says_what_would() -> None:
    text = tell(impossible_plan())
    assert "recommended    nothing: no candidate fits\nwhat would fit TP8 PP2 on" in text
    assert "start with" not in text
    over = {"itl_ms_p95": 10.0, "tokens_per_s": 5.0}
    rows = [replace(row, figures=over) for row in impossible_plan().rows]
    assert "is better" not in tell(replace(impossible_plan(), rows=rows))  # Nothing to draw.


def test_the_picture_of_characters_has_the_recommended_one_where_its_figures_are() -> None:
    figures = [(10.0, 100.0), (20.0, 150.0), (40.0, 200.0)]
    rows = [Row(f"{x}", "best" if x == 20 else "fits", {}, {"a_ms": x, "b": y}) for x, y in figures]
    axes = Axis("a_ms", "wait", "low"), Axis("b", "speed", "high", 120.0)
    lines = tell(Plan("x", (), "", rows, *axes)).splitlines()
    frame = [line[11:] for line in lines if line[9:11] == " |"]
    assert [line.count("*") for line in frame].count(1) == 1
    (up,) = (n for n, line in enumerate(frame) if "*" in line)
    highs = [n for n, line in enumerate(frame) if "o" in line]
    assert highs[0] < up < highs[1]  # Between the other two, as its figures are.
    across = [line.index("*" if "*" in line else "o") for line in frame if set(line) & {"*", "o"}]
    assert across == sorted(across, reverse=True)
    assert any(set(line) == {":"} for line in frame)  # The limit of the speed.


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("make", ALL)
def test_a_plan_is_written_and_read_again(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan = make()
    written = write_plan(plan, tmp_path / "deep" / "plan")
    folder = tmp_path / "deep" / "plan"
    assert {path.name for path in folder.iterdir()} >= FILES
    assert {path.name for path in written.paths} == {path.name for path in folder.iterdir()}
    again = read_plan(folder)
    assert (again.x, again.y, again.title) == (plan.x, plan.y, plan.title)
    assert len(again.rows) == len(plan.rows)
    for one, two in zip(plan.rows, again.rows, strict=True):
        assert (one.name, one.standing, one.group, one.reason) == (
            *(two.name, two.standing, two.group),
            two.reason,
        )
        assert dict(two.settings) == dict(one.settings) and two.trust == one.trust
        assert dict(two.figures) == pytest.approx(dict(one.figures), rel=1e-6, nan_ok=True)
        assert dict(two.measured) == pytest.approx(dict(one.measured), rel=1e-6)
        assert two.memory == one.memory


def test_each_file_has_what_its_name_says(tmp_path: Path) -> None:
    plan = serving_plan()
    plan = replace(plan, command="preamble serve --config serve_config.yaml   # 2 times")
    folder = tmp_path / "a plan"
    written = write_plan(plan, folder)

    def names(file: str) -> list[str]:
        with (folder / file).open(newline="") as text:
            return [row["name"] for row in csv.DictReader(text)]

    assert names("candidates.csv") == [row.name for row in plan.rows]
    assert names("failed.csv") == ["TP8 x1, 512 at once"]
    assert names("pareto.csv") == [row.name for rows in fronts(plan).values() for row in rows]
    assert (folder / "serve_config.yaml").read_text() == plan.settings_yaml
    assert (
        written.plan.command == f"preamble serve --config '{folder}/serve_config.yaml'   # 2 times"
    )
    record = json.loads((folder / "plan.json").read_text())
    assert record == json.loads(json.dumps(record_of(written.plan)))
    assert record["feasible"] and record["best"]["name"] == "TP4 x1, 128 at once"
    assert record["best"]["memory_bytes"]["verdict"] == "fits"
    assert record["counts"] == {"fits": 77, "tight": 3, "rejected": 37, "failed": 1}
    assert sum(one["count"] for one in record["rejections"]) == 37


def test_a_table_holds_no_formula_and_a_record_nothing_that_json_lacks() -> None:
    rows = [Row("=1+1", "best", {"a": "@x"}, {"x": math.nan, "y": math.inf}, reason="+2")]
    plan = Plan("t", (), "", rows, Axis("x", "", "low"), Axis("y", "", "high"))
    from planning.output.csv_table import table

    (cells,) = list(csv.DictReader(io.StringIO(table(plan.rows))))
    assert (cells["name"], cells["a"], cells["reason"]) == ("'=1+1", "'@x", "'+2")
    json.dumps(record_of(plan), allow_nan=False)


def test_without_matplotlib_all_but_the_picture_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(serving_plan(), tmp_path)
    assert (tmp_path / "pareto.png").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written = write_plan(impossible_plan(), tmp_path)
    assert written.notes == (
        "pareto.png needs matplotlib, which is not installed; pip install 'preamble[plots]'",
    )
    assert not (tmp_path / "pareto.png").exists()  # It was another plan's.
    assert (tmp_path / "pareto.html").exists()


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written into .*; name another folder"):
        write_plan(serving_plan(), tmp_path / "file" / "plan")


def test_a_csv_that_was_edited_is_drawn_as_it_is_now(tmp_path: Path) -> None:
    write_plan(serving_plan(), tmp_path / "one")
    lines = (tmp_path / "one" / "candidates.csv").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "TP2 x1" not in line]
    (tmp_path / "one" / "candidates.csv").write_text("".join(kept))
    drawn = redraw(tmp_path / "one", tmp_path / "two")
    assert {path.name for path in drawn.paths} == {"pareto.csv", "pareto.html", "pareto.png"}
    text = (tmp_path / "two" / "pareto.html").read_text()
    assert "TP2 x1, 64" not in text and "TP4 x1, 128" in text


def test_a_csv_alone_is_drawn_by_the_columns_that_are_named(tmp_path: Path) -> None:
    write_plan(serving_plan(), tmp_path / "one")
    alone = tmp_path / "mine.csv"
    alone.write_bytes((tmp_path / "one" / "candidates.csv").read_bytes())
    with pytest.raises(ConfigError, match="give --x, one of: tokens_per_s, tokens_per_s_per_gpu"):
        redraw(alone)
    with pytest.raises(ConfigError, match="--y is 'tokens_per'; did you mean 'tokens_per_s'"):
        redraw(alone, x="ttft_ms_p95", y="tokens_per")
    plan = read_plan(alone, x="ttft_ms_p95", y="tokens_per_s")
    assert (plan.x.better, plan.y.better) == ("low", "high")
    assert view(plan) is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lacks the column 'name'"),
        ("name,standing,group,source,error,note,reason\n", "has no candidates"),
        ("name,standing,group,a,a,source,error,note,reason\n", "has a column twice"),
        ("name,standing,group,source,error,note,reason\na,fits\n", ":2 has 2 cells, its header 7"),
        ("name,standing,group,source,error,note,reason\na,good,,,,,\n", ":2: standing is 'good'"),
        ("name,standing,group,source,error,note,x,reason\na,fits,,,,,much,\n", "x is 'much'"),
        ("name,standing,group,source,error,note,reason\na,fits,,hearsay,0,,\n", "source is 'hear"),
        ("name,standing,group,source,error,note,reason\na,fits,,measured,-1,,\n", "0 or more"),
        ("name,standing,group,source,error,note,x,reason\na,fits,,,,,1e-320,\n", "no picture"),
        (
            "name,standing,group,source,error,note,ledger_kv_bytes,reason\na,fits,,,,,inf,\n",
            "a number of bytes",
        ),
    ],
)
def test_a_csv_that_is_no_plans_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "candidates.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        redraw(path)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        redraw(tmp_path / "none.csv")


def test_the_picture_is_a_png_with_every_group_in_its_colour(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_plan(serving_plan(), tmp_path)
    pixels = imread(tmp_path / "pareto.png")
    assert pixels.shape[:2] == (810, 1350)
    for colour in ((15, 107, 92), (180, 86, 11), (47, 98, 181), (179, 38, 30)):
        near = abs(pixels[..., :3] * 255 - colour).max(axis=-1) < 3
        assert near.sum() > 20, colour


EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples/plan").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_can_be_read(path: Path) -> None:
    from planning.cli.specification import Specification

    found = Specification.read(str(path), {})
    assert found.model.config().num_layers > 1 and found.hardware.cluster().gpus > 1


@pytest.mark.slow  # It plays a load against hundreds of candidates.
def test_the_example_of_a_server_makes_a_plan_that_keeps_its_limits(
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
def test_the_report_is_tables_whose_lines_have_as_many_cells(make: Callable[[], Plan]) -> None:
    text = report(make())
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for block in blocks:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1
    assert "\x1b" not in text and "\n<script" not in text
    assert not re.search(r"(?<![\\`'])<script", text.split("```")[0])


class Elements(HTMLParser):
    """Every start tag, and every address that one has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("make", ALL)
def test_the_page_loads_nothing_and_takes_no_text_for_markup(make: Callable[[], Plan]) -> None:
    text = page(make())
    elements = Elements(text)
    assert elements.addresses == [] and elements.tags.count("script") == 1
    assert "@import" not in text and "url(" not in text and "<script>window" not in text
    assert "default-src 'none'; style-src 'sha256-" in text.replace("&#x27;", "'")


def test_the_page_of_thousands_of_candidates_stays_small() -> None:
    plan = serving_plan()
    many = [replace(row, name=f"{row.name} {n}") for n in range(60) for row in plan.rows[1:]]
    text = page(replace(plan, rows=[plan.rows[0], *many]))
    assert len(text) < 1_000_000 and text.count("<tr") < 300
    assert "The first 200 of" in text


def test_the_page_says_why_nothing_fits() -> None:
    text = page(impossible_plan())
    assert "No configuration fits." in text and "What would fit" in text
    assert "TP8 PP2 on 16 a100-40g" in text and '<svg class="chart' not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_the_page_adds_can_be_read_on_what_it_lies_on(scheme: str) -> None:
    from tests.support.page_style import STYLE, colours, contrast

    light, dark = STYLE.split("@media screen", 1)
    seen = {**colours(light), **(colours(dark.split("* {")[0]) if scheme == "dark" else {})}
    # A reason in the panel; a row under the pointer; the limit's words, on its shade and beside it.
    pairs = [("warn", "well"), ("ink", "tint"), ("soft", "tint"), ("bad", "bad-tint")]
    assert not [pair for pair in pairs if contrast(*(seen[one] for one in pair)) < 4.5]


@pytest.mark.slow  # A browser.
def test_a_browser_shows_every_candidate_under_the_pointer(tmp_path: Path) -> None:
    from tests.support.chromium import browsing

    plan = serving_plan()
    for name, one in {"good": plan, "hostile": hostile_plan()}.items():
        (tmp_path / f"{name}.html").write_text(page(one), "utf-8")
    address = (tmp_path / "good.html").as_uri()
    with browsing(tmp_path / "browser") as browser:
        tab = browser.open(address)
        assert tab.text(".panel h3") == "TP4 x1, 128 at once"
        # The point that stands lowest on the first group's front, and its whole configuration.
        place = tab.value(
            "(one => { one.scrollIntoView({block: 'center'}); const box ="
            " one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2,"
            " Number(one.getAttribute('cx')), Number(one.getAttribute('cy'))] })"
            "([...document.querySelectorAll('.scatter circle.c0:not(.faint)')]"
            ".sort((a, b) => b.getAttribute('cy') - a.getAttribute('cy'))[0])"
        )
        pointed = {"x": place[0], "y": place[1]}
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", **pointed)
        said = tab.read(".panel", "2 GPUs")
        row = next(r for r in plan.rows if r.group == "2 GPUs" and r.name == tab.text(".panel h3"))
        assert row.figures["tokens_per_s_per_gpu"] < 100
        for name, value in row.settings.items():
            assert re.search(rf"{name.split('_')[0]}.*\s{value}\b", said, re.IGNORECASE)
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        assert tab.read(".panel h3", "TP4 x1, 128")
        # A click keeps one; arrows go on from it; Escape lets go.
        tab.send(
            "Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **pointed
        )
        tab.send(
            "Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **pointed
        )
        tab.value("document.querySelector('.scatter').focus()")
        tab.press("Escape")
        assert tab.read(".panel h3", "TP4 x1, 128")
        # Sorted by a column, and filtered by words.
        tab.click(".candidates thead th:nth-child(3) button")
        first = "[...document.querySelectorAll('.candidates tbody tr:not([hidden]) th')]"
        least = min(
            (row for row in plan.rows if row.standing in ("best", "fits", "tight")),
            key=lambda row: row.figures["tokens_per_s_per_gpu"],
        )
        assert tab.value(f"{first}[0].innerText") == least.name
        tab.click("input[type=search]")
        tab.type("tp8 256")
        assert tab.wait(f"{first}.length === 1 && {first}[0].innerText") == "TP8 x1, 256 at once"
        grounds = set()
        for scheme in ("light", "dark"):
            tab.picture(tmp_path / f"{scheme}.png", scheme)
            grounds.add(tab.value("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        tab.picture(tmp_path / "narrow.png", width=360)
        assert tab.value("document.documentElement.scrollWidth") <= 360
        assert tab.asked == [address] and tab.complaints == []

        other = browser.open((tmp_path / "hostile.html").as_uri())
        assert other.value("window.hit === undefined && document.scripts.length === 1")
        assert len(other.asked) == 1 and other.complaints == []
