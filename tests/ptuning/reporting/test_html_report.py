"""HTML report of a run: its figures, its verdict and warnings, and the escaping of all data.

The tests parse the page with Python's HTML parser, and once with a real browser. The expected
sentences follow from small numbers that can be checked by hand.
"""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from ptuning.config import TuneConfig
from ptuning.reporting.html_report import render_report
from ptuning.reporting.html_template import clean_text, template_environment
from ptuning.reporting.svg_chart import (
    Chart,
    Line,
    Point,
    draw_chart,
    linear_ticks,
    smooth_points,
    thin_points,
)
from ptuning.reporting.verdict import confidence_margin, run_summary, run_warnings, task_verdict
from ptuning.run_facts import (
    ADAPTER,
    NO_PROMPT,
    ORACLE,
    GroupMetrics,
    RunFacts,
    Sample,
    StepMetrics,
    TaskFacts,
    Validation,
)
from tests.support.page_style import STYLE, colours, contrast

STEPS = 200
VALIDATION_RECORDS = 400
OUTPUT = "planning.output"
# Hostile content of records, names and settings, all of it at once.
HOSTILE = (
    "<script>window.hit = 1</script>\"'><img src=x onerror='window.hit = 1'></style>"
    "</pre><!-- ]]> &lt; \x00\x1b[31m \u202eedis rehto eht\u2066 \ud800 javascript:alert(1)"
)
BASELINES = {
    NO_PROMPT: {"exact_match": 0.05, "f1": 0.2},
    ORACLE: {"exact_match": 0.88, "f1": 0.9},
    ADAPTER: {"exact_match": 0.92, "f1": 0.95},
}


class ParsedPage(HTMLParser):
    """Elements of a page with their attributes, and the texts of each kind of element."""

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
        return [attributes for element, attributes in self.elements if element == name]


def progress(losses: list[float], **changes: Any) -> list[StepMetrics]:
    return [
        replace(StepMetrics(step, STEPS, loss, 2400, 2000, 0.5, 1e-2 / step, 1.0), **changes)
        for step, loss in enumerate(losses, 1)
    ]


def falling_losses(count: int = STEPS) -> list[float]:
    return [0.3 + 3 * math.exp(-step / 20) for step in range(count)]


def task(name: str = "refunds", **changes: Any) -> TaskFacts:
    samples = (
        Sample({"mail": "Where is it?"}, "track order 7", "I do not know", "track order 7"),
        Sample({"mail": "Money back!"}, "refund order 8", "", "refund order 9", cut=True),
    )
    facts = TaskFacts(
        name,
        "what a mail asks for",
        f"adapters/{name}@1.safetensors",
        {"name": name, "virtual_tokens": 20, "hidden_size": 512, "template": {"text": "{mail}"}},
        ("mail",),
        "mails.jsonl",
        "held-out.jsonl",
        examples=1000,
        validation_examples=VALIDATION_RECORDS,
        validation_records=VALIDATION_RECORDS,
        lengths=[10, 20, 20, 30],
        metrics_by_variant=BASELINES,
        samples=samples,
    )
    return replace(facts, **changes)


def run(*tasks: TaskFacts, **changes: Any) -> RunFacts:
    settings = TuneConfig(model="gpt/", data="mails.jsonl", name="refunds").to_record()
    validations = [
        Validation(
            step, 3 / (1 + step), {"exact_match": step / 250}, {"tone": {"exact_match": 0.5}}
        )
        for step in (0, 100, STEPS)
    ]
    facts = RunFacts(
        "refunds",
        tasks or (task(),),
        "finished",
        {"Layers": 24},
        settings,
        progress(falling_losses()),
        validations,
        best_step=100,
    )
    return replace(facts, **changes)


def hostile_run() -> RunFacts:
    long_text = HOSTILE + "x" * 1_000_000
    sample = Sample({HOSTILE: long_text, "b": HOSTILE}, HOSTILE, long_text, f"{HOSTILE} more")
    measures = {HOSTILE: 0.5, "f1": float("nan"), "exact_match": float("inf")}
    validations = [Validation(5, float("nan"), measures, {HOSTILE: measures})]
    task_facts = task(
        HOSTILE,
        task=long_text,
        path=HOSTILE,
        card={
            HOSTILE: long_text,
            "template": {"text": HOSTILE},
            "golden": [HOSTILE],
            "stop": [HOSTILE],
        },
        fields=(HOSTILE,),
        data=HOSTILE,
        dropped=[long_text] * 9,
        metrics_by_variant={ADAPTER: measures, NO_PROMPT: {"f1": 2.0}, HOSTILE: {}},
        samples=[sample] * 100,
    )
    return run(
        task_facts,
        replace(task_facts, name="second"),
        name=long_text,
        state="running",
        model={HOSTILE: HOSTILE},
        config={"model": HOSTILE, HOSTILE: long_text},
        progress=progress([float("nan"), 1e308, float("inf"), -1e308, 0.0]),
        validations=validations,
        notes=[long_text],
    )


def test_report_compares_the_adapter_with_the_baselines() -> None:
    page = ParsedPage(render_report(run(), datetime(2026, 1, 2, 3, 4, tzinfo=UTC)))
    assert page.texts["p"][2] == (
        "Exact match is 92.0 % on 400 held-out examples with the adapter, 5.0 % without a prompt "
        "and 88.0 % with a written instruction."
    )
    rows = [row.split("%")[0] for row in page.texts["tr"]]
    assert rows[1:] == ["No prompt5.0 ", "Written instruction88.0 ", "Adapter92.0 "]
    assert {header.get("scope") for header in page.all("th")} == {"col", "row"}
    assert "track order 7" in page.texts["article"][0]
    assert "Without the adapter ✗ wrong" in page.texts["article"][0]
    assert "With the adapter ✓ right" in page.texts["article"][0]
    assert page.texts["mark"] == ["9"]  # In "refund order 9", where 8 is right.
    assert "(cut at the length limit)" in page.texts["article"][1]
    assert "2026-01-02 03:04 UTC" in page.texts["footer"][0]
    commands = next(text for text in page.texts["pre"] if text.startswith("preamble serve"))
    assert commands.splitlines() == [
        "preamble serve gpt/ --adapters adapters",
        "preamble generate --server localhost:9000 --task refunds --field 'mail=Where is it?'",
    ]


def test_report_is_self_contained_and_its_policy_forbids_loading() -> None:
    text = render_report(run())
    page = ParsedPage(text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=", text)
    rules = next(meta for meta in page.all("meta") if "Security" in str(meta.get("http-equiv")))
    for kind in ("style", "script"):
        (content,) = page.texts[kind]
        hashed = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{hashed}'" in str(rules["content"])
    assert str(rules["content"]).startswith("default-src 'none'; ")
    assert not any("style" in attributes for _, attributes in page.elements)


@pytest.mark.parametrize(
    ("measure", "count", "selection"),
    [
        ("sample", VALIDATION_RECORDS - 1, "a sample of 399 of 400"),
        ("first", VALIDATION_RECORDS - 1, "the first 399 of 400"),
        ("sample", VALIDATION_RECORDS, "all 400"),
    ],
)
def test_report_says_which_validation_records_are_evaluated(
    measure: str, count: int, selection: str
) -> None:
    facts = run(task(validation_examples=count))
    page = render_report(replace(facts, config={**facts.config, "measure": measure}))
    assert f">{selection}<" in page


def test_report_reloads_only_while_the_run_continues() -> None:
    def refreshing(facts: RunFacts) -> bool:
        return any(
            meta.get("http-equiv") == "refresh"
            for meta in ParsedPage(render_report(facts)).all("meta")
        )

    assert refreshing(run(state="running")) and not refreshing(run())


def test_report_escapes_all_data_and_truncates_long_texts() -> None:
    text = render_report(hostile_run())
    page = ParsedPage(text)
    assert len(text.encode()) < 400_000
    assert {name for name, _ in page.elements} <= {
        name for name, _ in ParsedPage(render_report(run())).elements
    }
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert not [key for _, attributes in page.elements for key in attributes if key[:2] == "on"]
    assert not [character for character in "\x00\x1b\u202e\u2066" if character in text]
    assert "<script>window.hit = 1</script>" in page.texts["main"][0]
    assert "␀␛[31m" in page.texts["main"][0] and "\\u202eedis" in page.texts["main"][0]
    assert "more characters)" in page.texts["h1"][0]
    for chart in page.all("svg"):
        if "data-lines" in chart:
            json.loads(str(chart["data-lines"]), parse_constant=pytest.fail)
    assert not re.search(r'="(nan|inf|-inf)"|nan,|inf,', text)


@pytest.mark.parametrize("state", ["running", "interrupted"])
def test_report_of_a_run_without_steps_renders(state: Any) -> None:
    empty = RunFacts("refunds", [TaskFacts("refunds")], state)
    assert ParsedPage(render_report(empty)).texts["p"][2] == "No step has finished yet."
    facts = replace(empty, progress=progress([2.5]), config={"model": "gpt/"})
    assert "fell" not in ParsedPage(render_report(facts)).texts["p"][2]
    assert run_summary(empty)["first_loss"] is None


def test_verdict_of_a_running_run_uses_the_last_validation() -> None:
    facts = run(task(metrics_by_variant={NO_PROMPT: {"exact_match": 0.1}}), state="running")
    verdict = task_verdict(facts.tasks[0], facts)
    assert verdict.sentence.startswith("So far: Exact match is 80.0 % on 400 held-out examples")
    assert verdict.is_good


def test_verdict_without_evaluated_answers_uses_the_loss() -> None:
    facts = run(task(metrics_by_variant={}), validations=VALIDATIONS)
    verdict = task_verdict(facts.tasks[0], facts)
    assert verdict.sentence == (
        "The loss fell from 3.3000 to 0.3002 in 200 steps, and is 0.7000 on held-out records; "
        "no answers were evaluated, so their quality is unknown."
    )
    assert verdict.is_good is None


def test_report_of_several_tasks_has_a_table_and_sections() -> None:
    tone = {NO_PROMPT: {"accuracy": 0.5}, ADAPTER: {"accuracy": 0.75}}
    facts = run(task(), task("tone", metrics_by_variant=tone))
    page = ParsedPage(render_report(facts))
    sections = [facts for facts in page.all("section") if facts.get("class") == "task"]
    assert [section["aria-label"] for section in sections] == ["refunds", "tone"]
    assert page.texts["tr"][:3] == [
        "TaskMeasureNo promptWritten instructionAdapter",
        "refundsExact match5.0 % ± 2.288.0 % ± 3.292.0 % ± 2.7",
        "toneAccuracy50.0 % ± 4.9–75.0 % ± 4.2",
    ]


def test_tasks_that_are_trained_independently_have_their_own_curves_and_warnings() -> None:
    losses = falling_losses()
    steps = [
        replace(
            step,
            by_task={"refunds": GroupMetrics(step.loss, step.rate, 1.0)}
            # It stops early, after 40 steps; its loss was still falling.
            | ({"tone": GroupMetrics(2 * step.loss, step.rate, 1.0)} if step.step <= 40 else {}),
        )
        for step in progress(losses)
    ]
    validations = [
        Validation(step, 1.0, {}, {"refunds": {"loss": 1.0}, "tone": {"loss": tone_loss}})
        for step, tone_loss in ((10, 1.0), (20, 1.2), (30, 1.4))
    ]
    tasks = task(best_step=30), task("tone", best_step=10)
    facts = run(*tasks, progress=tuple(steps), validations=tuple(validations), best_step=None)
    assert [step.loss for step in facts.of_task(tasks[1]).progress] == [
        2 * loss for loss in losses[:40]
    ]
    warnings = run_warnings(facts)
    assert [line.split(":")[0] for line in warnings] == ["tone", "tone"]
    assert "the loss was still falling at the end" in warnings[0]
    assert "rising since step 10 (1.0000 to 1.4000)" in warnings[1]
    assert warnings[1].endswith("the adapter of step 10 was kept")
    page = render_report(facts)
    assert "Loss of each task" in page
    # Tasks that are trained together have one loss.
    together = replace(facts, progress=tuple(progress(losses)))
    assert "Loss of each task" not in render_report(together)


def test_report_of_a_full_run_names_and_serves_the_tuned_model() -> None:
    settings = {"model": "gpt/", "method": "full"}
    text = render_report(run(task(path="out/refunds-1"), config=settings))
    page = ParsedPage(text)
    assert "with the tuned model" in page.texts["p"][2]
    assert "preamble serve out/refunds-1" in page.texts["pre"][0]
    assert "Adapter" not in "".join(page.texts["main"])


def test_verdict_is_good_only_beyond_the_confidence_margin() -> None:
    def good(
        plain_f1: float, adapter_f1: float, validation_records: int = VALIDATION_RECORDS
    ) -> bool | None:
        baselines = {NO_PROMPT: {"f1": plain_f1}, ADAPTER: {"f1": adapter_f1}}
        return task_verdict(
            task(metrics_by_variant=baselines, validation_examples=validation_records), run()
        ).is_good

    assert good(0.05, 0.92) is True
    assert good(0.60, 0.50) is False
    assert good(0.50, 0.53) is None  # Within the margin of 4.9 points for so many records.
    assert good(0.50, 0.60, validation_records=10) is None


def test_confidence_margin_is_the_wilson_interval() -> None:
    assert confidence_margin(0.5, 100) == pytest.approx(0.0962, abs=1e-4)
    assert confidence_margin(1.0, 10) == pytest.approx(0.1389, abs=1e-3)
    assert confidence_margin(0.5, 0) == 0


VALIDATIONS = [
    Validation(step, loss) for step, loss in ((50, 1.0), (100, 0.5), (150, 0.6), (200, 0.7))
]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (run(progress=progress([4 - step / 60 for step in range(STEPS)])), "still falling"),
        (run(progress=progress(falling_losses(), skipped=True)), "200 of 200 steps were skipped"),
        (run(validations=VALIDATIONS), "rising since step 100 (0.5000 to 0.7000)"),
        (
            run(task(validation_examples=0, validation="", metrics_by_variant={})),
            "no record was held out",
        ),
        (run(task(validation_examples=20)), "only 20 examples were held out"),
        (run(task(overlapping_examples=7)), "7 of the held-out records are also training records"),
        (
            run(task(answers_cut=90, answer_tokens_max=7)),
            "90 of 400 answers did not end within the limit of 7 tokens",
        ),
        (run(task(dropped=["line 3"] * 500)), "500 of 1500 records were dropped"),
        (
            run(task(metrics_by_variant={**BASELINES, NO_PROMPT: {"exact_match": 0.92}})),
            "do not serve it",
        ),
        (
            run(task(metrics_by_variant={**BASELINES, ORACLE: {"exact_match": 0.99}})),
            "instruction is better",
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_report_warns_about_each_problem(facts: RunFacts, message: str) -> None:
    assert any(message.casefold() in run_warning.casefold() for run_warning in run_warnings(facts))
    assert message.casefold() in ParsedPage(render_report(facts)).texts["ul"][0].casefold()


def test_a_good_run_has_no_warnings() -> None:
    assert run_warnings(run()) == []
    noisy = [0.5 + 0.3 * ((step * 7919) % 13) / 13 for step in range(STEPS)]
    assert run_warnings(run(progress=progress(noisy))) == []


def test_summary_is_strict_json_of_the_same_numbers() -> None:
    summary = run_summary(
        run(task(metrics_by_variant={ADAPTER: {"f1": float("nan"), "exact_match": 0.5}}))
    )
    decoded = json.loads(json.dumps(summary, allow_nan=False))
    assert decoded["tasks"][0]["measures"] == {"adapter": {"f1": None, "exact_match": 0.5}}
    assert (
        decoded["steps"] == STEPS
        and decoded["seconds"] == 100
        and decoded["text_tokens"] == 400_000
    )
    assert (
        decoded["first_loss"] == 3.3
        and decoded["tasks"][0]["path"] == "adapters/refunds@1.safetensors"
    )


def test_report_size_does_not_grow_with_steps() -> None:
    losses = [1 + math.sin(step) / 2 for step in range(5_000)]
    losses[2_777] = 9.0
    assert len(render_report(run(progress=progress(losses)))) < 120_000
    points = [Point(step, loss) for step, loss in enumerate(losses)]
    thinned = thin_points(points)
    assert len(thinned) <= 302 and Point(2_777, 9.0) in thinned
    assert thinned == sorted(thinned)


def test_smoothing_keeps_a_straight_line_and_adds_no_lag() -> None:
    line = [Point(step, 5 - step) for step in range(20)]
    mean = smooth_points(line, 3)
    assert [point.y for point in mean[:17]] == pytest.approx([point.y for point in line[:17]])
    level = smooth_points([Point(step, (-1) ** step) for step in range(50)], 4)
    assert max(abs(point.y) for point in level[4:]) <= 0.34


def test_axes_have_round_ticks_and_points_have_the_right_coordinates() -> None:
    assert linear_ticks(0, 400) == [0, 100, 200, 300, 400]
    assert linear_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    points = [Point(0, 0), Point(50, 1), Point(75, float("nan")), Point(100, 0.5)]
    svg = draw_chart(Chart("t", [Line("a", points)], 100, str, y_max=1.0))
    assert 'points="50,186 258,10"' in svg  # From the bottom at the left margin to the top middle.
    assert 'cx="466" cy="98"' in svg  # Beyond the gap, on the right, at half height.


def test_clean_text_keeps_normal_text_and_shows_invisible_characters() -> None:
    normal_text = "हिन्दी می‌خواهم 家族　👨‍👩‍👧 a\tb\nc\u00a0d"
    assert clean_text(normal_text) == normal_text
    assert clean_text("a\x00b\u202ec\x7f\u2028") == "a␀b\\u202ec\\x7f\\u2028"
    assert clean_text("abc" * 1000, 4) == "abca… (2,996 more characters)"
    template = template_environment("ptuning.reporting").from_string(
        '<p class="{{ a }}">{{ b }}</p>'
    )
    assert template.render(a='"x\x00', b='<b>"') == '<p class="&#34;x␀">&lt;b&gt;&#34;</p>'


def test_templates_escape_all_values_and_refuse_missing_ones() -> None:
    folders = [files(package).joinpath("templates") for package in ("ptuning.reporting", OUTPUT)]
    templates = [file for folder in folders for file in folder.iterdir() if ".html" in file.name]
    assert len(templates) == 4
    for template in templates:
        assert not re.search(r"\| *safe|autoescape", template.read_text("utf-8"))
    with pytest.raises(UndefinedError):
        template_environment(OUTPUT).from_string("{{ view.name }}").render(view=object())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_has_enough_contrast_with_its_background(scheme: str) -> None:
    light, dark = STYLE.split("@media screen", 1)
    values = {**colours(light), **(colours(dark.split("* {")[0]) if scheme == "dark" else {})}
    grounds = ("ground", "card", "well", "good-tint", "bad-tint")
    texts = [(ink, background) for ink in ("ink", "soft") for background in grounds]
    texts += [("good", "card"), ("bad", "card"), ("bad", "bad-tint")]
    low_contrast = [pair for pair in texts if contrast(*(values[colour] for colour in pair)) < 4.5]
    low_contrast += [
        (f"c{n}", "card") for n in range(6) if contrast(values[f"c{n}"], values["card"]) < 3
    ]
    assert not low_contrast


@pytest.mark.slow  # It starts a browser.
def test_browser_shows_the_curves_and_loads_nothing(tmp_path: Path) -> None:
    from tests.support.chromium import browsing

    for name, facts in {"good": run(), "hostile": hostile_run()}.items():
        (tmp_path / f"{name}.html").write_text(render_report(facts), "utf-8")
    address = (tmp_path / "good.html").as_uri()
    with browsing(tmp_path / "browser") as browser:
        tab = browser.open(address)
        boxes = tab.value(
            "[...document.querySelectorAll('.chart polyline:not(.faint)')].map(one => "
            "[one.getBoundingClientRect().width, getComputedStyle(one).stroke])"
        )
        assert len(boxes) == 5 and all(width > 200 and "rgb" in stroke for width, stroke in boxes)
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", **middle(tab, "svg.chart"))
        assert tab.read("figcaption output", r"step \d").startswith("step ")
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
        assert "<script>" in hostile_tab.text("h1")
        assert len(hostile_tab.requested) == 1 and hostile_tab.complaints == []


def middle(tab: Any, selector: str) -> dict[str, float]:
    box = tab.value(
        f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
        f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
    )
    return {"x": box[0], "y": box[1]}
