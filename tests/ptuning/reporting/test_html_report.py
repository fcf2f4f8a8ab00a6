"""The report of a run: what it says, that it says it honestly, and that no record can speak in it.

The page is parsed again by Python's own parser, and once by a real browser. Sentences follow from
numbers that one can check by eye.
"""

import base64
import hashlib
import json
import math
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ptuning.config import TuneConfig
from ptuning.reporting.html_report import page
from ptuning.reporting.markup import cleaned, tag
from ptuning.reporting.svg_charts import Chart, Line, Point, draw, smoothed, thinned, ticks
from ptuning.reporting.verdict import margin, summary, verdict, warnings
from ptuning.run_facts import (
    ADAPTER,
    NO_PROMPT,
    ORACLE,
    Progress,
    RunFacts,
    Sample,
    TaskFacts,
    Validation,
)
from tests.support.page_style import STYLE, colours, contrast

STEPS = 200
HELD = 400
# What records, names and settings may hold, all of it at once.
HOSTILE = (
    "<script>window.hit = 1</script>\"'><img src=x onerror='window.hit = 1'></style>"
    "</pre><!-- ]]> &lt; \x00\x1b[31m \u202eedis rehto eht\u2066 \ud800 javascript:alert(1)"
)
BASELINES = {
    NO_PROMPT: {"exact_match": 0.05, "f1": 0.2},
    ORACLE: {"exact_match": 0.88, "f1": 0.9},
    ADAPTER: {"exact_match": 0.92, "f1": 0.95},
}


class Read(HTMLParser):
    """The elements of a page with their attributes, and the text in each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name != "meta":
            self._open.append(name)
            self.texts.setdefault(name, []).append("")

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        for name in set(self._open):
            self.texts[name][-1] += text

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for one, attributes in self.elements if one == name]


def progress(losses: list[float], **changed: Any) -> list[Progress]:
    return [
        replace(Progress(step, STEPS, loss, 2400, 2000, 0.5, 1e-2 / step, 1.0), **changed)
        for step, loss in enumerate(losses, 1)
    ]


def falling(count: int = STEPS) -> list[float]:
    return [0.3 + 3 * math.exp(-step / 20) for step in range(count)]


def task(name: str = "refunds", **changed: Any) -> TaskFacts:
    samples = (
        Sample({"mail": "Where is it?"}, "track order 7", "I do not know", "track order 7"),
        Sample({"mail": "Money back!"}, "refund order 8", "", "refund order 9", cut=True),
    )
    one = TaskFacts(
        name,
        "what a mail asks for",
        f"adapters/{name}@1.safetensors",
        {"name": name, "virtual_tokens": 20, "hidden_size": 512, "template": {"text": "{mail}"}},
        ("mail",),
        "mails.jsonl",
        "held-out.jsonl",
        examples=1000,
        validation_examples=HELD,
        lengths=[10, 20, 20, 30],
        baselines=BASELINES,
        samples=samples,
    )
    return replace(one, **changed)


def run(*tasks: TaskFacts, **changed: Any) -> RunFacts:
    settings = asdict(TuneConfig(model="gpt/", data="mails.jsonl", name="refunds"))
    validations = [
        Validation(
            step, 3 / (1 + step), {"exact_match": step / 250}, {"tone": {"exact_match": 0.5}}
        )
        for step in (0, 100, STEPS)
    ]
    one = RunFacts(
        "refunds",
        tasks or (task(),),
        "finished",
        {"Layers": 24},
        settings,
        progress(falling()),
        validations,
        best_step=100,
    )
    return replace(one, **changed)


def hostile() -> RunFacts:
    long = HOSTILE + "x" * 1_000_000
    sample = Sample({HOSTILE: long, "b": HOSTILE}, HOSTILE, long, f"{HOSTILE} more")
    measures = {HOSTILE: 0.5, "f1": float("nan"), "exact_match": float("inf")}
    validations = [Validation(5, float("nan"), measures, {HOSTILE: measures})]
    one = task(
        HOSTILE,
        task=long,
        path=HOSTILE,
        card={HOSTILE: long, "template": {"text": HOSTILE}, "golden": [HOSTILE], "stop": [HOSTILE]},
        fields=(HOSTILE,),
        data=HOSTILE,
        dropped=[long] * 9,
        baselines={ADAPTER: measures, NO_PROMPT: {"f1": 2.0}, HOSTILE: {}},
        samples=[sample] * 100,
    )
    return run(
        one,
        replace(one, name="second"),
        name=long,
        state="running",
        model={HOSTILE: HOSTILE},
        config={"model": HOSTILE, HOSTILE: long},
        progress=progress([float("nan"), 1e308, float("inf"), -1e308, 0.0]),
        validations=validations,
        notes=[long],
    )


def test_the_page_says_what_the_adapter_is_worth_beside_the_others() -> None:
    read = Read(page(run(), datetime(2026, 1, 2, 3, 4, tzinfo=UTC)))
    assert read.texts["p"][2] == (
        "Exact match is 92.0 % on 400 held-out examples with the adapter, 5.0 % without a prompt "
        "and 88.0 % with a written instruction."
    )
    rows = [row.split("%")[0] for row in read.texts["tr"]]
    assert rows[1:] == ["No prompt5.0 ", "Written instruction88.0 ", "Adapter92.0 "]
    assert {one.get("scope") for one in read.all("th")} == {"col", "row"}
    assert "track order 7" in read.texts["article"][0]
    assert "Without the adapter ✗ wrong" in read.texts["article"][0]
    assert "With the adapter ✓ right" in read.texts["article"][0]
    assert read.texts["mark"] == ["9"]  # Of "refund order 9", where 8 is right.
    assert "(cut at max_new_tokens)" in read.texts["article"][1]
    assert "2026-01-02 03:04 UTC" in read.texts["footer"][0]
    commands = next(text for text in read.texts["pre"] if text.startswith("preamble serve"))
    assert commands.splitlines() == [
        "preamble serve gpt/ --adapters adapters",
        "preamble generate --server localhost:9000 --task refunds --field 'mail=Where is it?'",
    ]


def test_the_page_is_whole_in_itself_and_forbids_all_else() -> None:
    text = page(run())
    read = Read(text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=", text)
    rules = next(one for one in read.all("meta") if "Security" in str(one.get("http-equiv")))
    for kind in ("style", "script"):
        (inside,) = read.texts[kind]
        hashed = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{hashed}'" in str(rules["content"])
    assert str(rules["content"]).startswith("default-src 'none'; ")
    assert not any("style" in attributes for _, attributes in read.elements)


def test_a_browser_loads_the_page_again_only_while_the_run_goes_on() -> None:
    def refreshing(facts: RunFacts) -> bool:
        return any(one.get("http-equiv") == "refresh" for one in Read(page(facts)).all("meta"))

    assert refreshing(run(state="running")) and not refreshing(run())


def test_nothing_from_data_is_ever_markup_and_long_texts_are_cut() -> None:
    text = page(hostile())
    read = Read(text)
    assert len(text.encode()) < 400_000
    assert {name for name, _ in read.elements} <= {name for name, _ in Read(page(run())).elements}
    assert len(read.all("script")) == len(read.all("style")) == 1
    assert not [key for _, attributes in read.elements for key in attributes if key[:2] == "on"]
    assert not [one for one in "\x00\x1b\u202e\u2066" if one in text]
    assert "<script>window.hit = 1</script>" in read.texts["main"][0]
    assert "␀␛[31m" in read.texts["main"][0] and "\\u202eedis" in read.texts["main"][0]
    assert "more characters)" in read.texts["h1"][0]
    for chart in read.all("svg"):
        if "data-lines" in chart:
            json.loads(str(chart["data-lines"]), parse_constant=pytest.fail)
    assert not re.search(r'="(nan|inf|-inf)"|nan,|inf,', text)


@pytest.mark.parametrize("state", ["running", "interrupted"])
def test_a_run_that_has_hardly_begun_has_a_page(state: Any) -> None:
    empty = RunFacts("refunds", [TaskFacts("refunds")], state)
    assert Read(page(empty)).texts["p"][2] == "No step was made yet."
    one = replace(empty, progress=progress([2.5]), config={"model": "gpt/"})
    assert "fell" not in Read(page(one)).texts["p"][2]
    assert summary(empty)["first_loss"] is None


def test_a_running_runs_verdict_is_its_last_validations() -> None:
    one = run(task(baselines={NO_PROMPT: {"exact_match": 0.1}}), state="running")
    said = verdict(one.tasks[0], one)
    assert said.sentence.startswith("So far: Exact match is 80.0 % on 400 held-out examples")
    assert said.good


def test_without_measured_answers_the_verdict_is_about_the_loss_and_says_so() -> None:
    one = run(task(baselines={}), validations=HELD_LOSSES)
    said = verdict(one.tasks[0], one)
    assert said.sentence == (
        "The loss fell from 3.3000 to 0.3002 in 200 steps, and is 0.7000 on held-out records; "
        "no answers were measured, so their quality is not known."
    )
    assert said.good is None


def test_several_tasks_have_a_table_and_a_section_each() -> None:
    tone = {NO_PROMPT: {"accuracy": 0.5}, ADAPTER: {"accuracy": 0.75}}
    one = run(task(), task("tone", baselines=tone))
    read = Read(page(one))
    sections = [one for one in read.all("section") if one.get("class") == "task"]
    assert [one["aria-label"] for one in sections] == ["refunds", "tone"]
    assert read.texts["tr"][:3] == [
        "TaskMeasureNo promptWritten instructionAdapter",
        "refundsExact match5.0 % ± 2.288.0 % ± 3.292.0 % ± 2.7",
        "toneAccuracy50.0 % ± 4.9–75.0 % ± 4.2",
    ]


def test_a_model_that_was_tuned_whole_is_called_so_and_served_itself() -> None:
    settings = {"model": "gpt/", "method": "full"}
    text = page(run(task(path="out/refunds-1"), config=settings))
    read = Read(text)
    assert "with the tuned model" in read.texts["p"][2]
    assert "preamble serve out/refunds-1" in read.texts["pre"][0]
    assert "Adapter" not in "".join(read.texts["main"])


def test_what_an_adapter_cannot_be_shown_to_do_is_not_called_good() -> None:
    def good(plain: float, adapter: float, held: int = HELD) -> bool | None:
        made = {NO_PROMPT: {"f1": plain}, ADAPTER: {"f1": adapter}}
        return verdict(task(baselines=made, validation_examples=held), run()).good

    assert good(0.05, 0.92) is True
    assert good(0.60, 0.50) is False
    assert good(0.50, 0.53) is None  # Within 4.9 points, so many records say nothing.
    assert good(0.50, 0.60, held=10) is None


def test_the_margin_of_a_share_is_wilsons() -> None:
    assert margin(0.5, 100) == pytest.approx(0.0962, abs=1e-4)
    assert margin(1.0, 10) == pytest.approx(0.1389, abs=1e-3)
    assert margin(0.5, 0) == 0


HELD_LOSSES = [
    Validation(step, loss) for step, loss in ((50, 1.0), (100, 0.5), (150, 0.6), (200, 0.7))
]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (run(progress=progress([4 - step / 60 for step in range(STEPS)])), "still falling"),
        (run(progress=progress(falling(), skipped=True)), "200 of 200 steps were skipped"),
        (run(validations=HELD_LOSSES), "rises since step 100 (0.5000 to 0.7000)"),
        (run(task(validation_examples=0, validation="", baselines={})), "no record was held out"),
        (run(task(validation_examples=20)), "only 20 examples were held out"),
        (run(task(shared=7)), "7 of the held-out records are also learned from"),
        (run(task(answers_cut=90)), "90 of 400 answers were cut at max_new_tokens"),
        (run(task(dropped=["line 3"] * 500)), "500 of 1500 records were left out"),
        (run(task(baselines={**BASELINES, NO_PROMPT: {"exact_match": 0.92}})), "do not serve it"),
        (run(task(baselines={**BASELINES, ORACLE: {"exact_match": 0.99}})), "still does better"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_reader_is_warned(facts: RunFacts, said: str) -> None:
    assert any(said.casefold() in one.casefold() for one in warnings(facts))
    assert said.casefold() in Read(page(facts)).texts["ul"][0].casefold()


def test_a_good_run_has_no_warnings() -> None:
    assert warnings(run()) == []
    noisy = [0.5 + 0.3 * ((step * 7919) % 13) / 13 for step in range(STEPS)]
    assert warnings(run(progress=progress(noisy))) == []


def test_the_machines_summary_is_strict_json_of_the_same_numbers() -> None:
    one = summary(run(task(baselines={ADAPTER: {"f1": float("nan"), "exact_match": 0.5}})))
    read = json.loads(json.dumps(one, allow_nan=False))
    assert read["tasks"][0]["measures"] == {"adapter": {"f1": None, "exact_match": 0.5}}
    assert read["steps"] == STEPS and read["seconds"] == 100 and read["text_tokens"] == 400_000
    assert (
        read["first_loss"] == 3.3 and read["tasks"][0]["path"] == "adapters/refunds@1.safetensors"
    )


def test_a_long_runs_page_is_no_longer_than_a_short_ones() -> None:
    losses = [1 + math.sin(step) / 2 for step in range(5_000)]
    losses[2_777] = 9.0
    assert len(page(run(progress=progress(losses)))) < 120_000
    points = [Point(step, loss) for step, loss in enumerate(losses)]
    kept = thinned(points)
    assert len(kept) <= 302 and Point(2_777, 9.0) in kept
    assert kept == sorted(kept)


def test_a_smoothed_curve_keeps_a_line_and_is_not_late() -> None:
    line = [Point(step, 5 - step) for step in range(20)]
    mean = smoothed(line, 3)
    assert [one.y for one in mean[:17]] == pytest.approx([one.y for one in line[:17]])
    level = smoothed([Point(step, (-1) ** step) for step in range(50)], 4)
    assert max(abs(one.y) for one in level[4:]) <= 0.34


def test_axes_have_round_numbers_and_points_lie_where_they_belong() -> None:
    assert ticks(0, 400) == [0, 100, 200, 300, 400]
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    points = [Point(0, 0), Point(50, 1), Point(75, float("nan")), Point(100, 0.5)]
    svg = draw(Chart("t", [Line("a", points)], 100, str, top=1.0))
    assert 'points="50,186 258,10"' in svg  # From the left margin's foot to the middle's top.
    assert 'cx="466" cy="98"' in svg  # Beyond the gap, on the right, half-way up.


def test_text_keeps_what_people_write_and_shows_what_they_cannot_see() -> None:
    kept = "हिन्दी می‌خواهم 家族　👨‍👩‍👧 a\tb\nc\u00a0d"
    assert cleaned(kept) == kept
    assert cleaned("a\x00b\u202ec\x7f\u2028") == "a␀b\\u202ec\\x7f\\u2028"
    assert cleaned("abc" * 1000, 4) == "abca… (2,996 more characters)"
    assert tag("p", '<b>"', class_='"x') == '<p class="&quot;x">&lt;b&gt;&quot;</p>'


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_can_be_read_on_what_it_lies_on(scheme: str) -> None:
    light, dark = STYLE.split("@media screen", 1)
    seen = {**colours(light), **(colours(dark.split("* {")[0]) if scheme == "dark" else {})}
    grounds = ("ground", "card", "well", "good-tint", "bad-tint")
    texts = [(ink, on) for ink in ("ink", "soft") for on in grounds]
    texts += [("good", "card"), ("bad", "card"), ("bad", "bad-tint")]
    poor = [pair for pair in texts if contrast(*(seen[one] for one in pair)) < 4.5]
    poor += [(f"c{n}", "card") for n in range(6) if contrast(seen[f"c{n}"], seen["card"]) < 3]
    assert not poor


@pytest.mark.slow  # A browser.
def test_a_browser_shows_the_curves_and_asks_for_nothing(tmp_path: Path) -> None:
    from tests.support.chromium import browsing

    for name, facts in {"good": run(), "hostile": hostile()}.items():
        (tmp_path / f"{name}.html").write_text(page(facts), "utf-8")
    address = (tmp_path / "good.html").as_uri()
    with browsing(tmp_path / "browser") as browser:
        tab = browser.open(address)
        boxes = tab.value(
            "[...document.querySelectorAll('.chart polyline:not(.faint)')].map(one => "
            "[one.getBoundingClientRect().width, getComputedStyle(one).stroke])"
        )
        assert len(boxes) == 5 and all(width > 200 and "rgb" in seen for width, seen in boxes)
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", **middle(tab, "svg.chart"))
        assert tab.read("figcaption output", r"step \d").startswith("step ")
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
        assert "<script>" in other.text("h1")
        assert len(other.asked) == 1 and other.complaints == []


def middle(tab: Any, of: str) -> dict[str, float]:
    box = tab.value(
        f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
        f"(document.querySelector({json.dumps(of)}).getBoundingClientRect())"
    )
    return {"x": box[0], "y": box[1]}
