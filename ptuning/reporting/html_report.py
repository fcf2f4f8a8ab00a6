"""HTML report: report.html with a run's verdict, curves, answers, data and settings.

The page is rendered from the run's facts alone. It is rendered again after each validation, so that
a browser can follow a run. This module selects and formats the content of the page as plain values;
templates/report.html lays them out. The page's script only shows the values of the curves at the
pointer; everything else works without the script.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from datetime import datetime
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from markupsafe import Markup

from gpt.settings import setting_fields
from ptuning.config import TuneConfig
from ptuning.evaluation.answer_metrics import exact_match
from ptuning.reporting.curves import Curve, select_curves
from ptuning.reporting.html_template import TEXT_MAX, PageTemplate, clean_text
from ptuning.reporting.progress_bar import format_duration
from ptuning.reporting.svg_chart import draw_chart, draw_histogram
from ptuning.reporting.verdict import (
    LAST_LOSS_STEPS,
    MEANINGS,
    artifact_name,
    confidence_margin,
    format_measure,
    headline_measure,
    is_share,
    label,
    row_label,
    run_warnings,
    task_measures,
    task_verdict,
)
from ptuning.run_facts import (
    ADAPTER,
    NO_PROMPT,
    VARIANTS,
    RunFacts,
    Sample,
    TaskFacts,
    describe_selection,
)

PAGE = PageTemplate("ptuning.reporting", "report.html", ("report.css",), "report.js")
RELOAD_S = 20  # Reload interval of the page while the run continues.
SAMPLES_SHOWN = 4  # Samples per task that are visible; the others are in a closed <details>.
SAMPLES_MAX = 24  # Samples per task in the page.
# Maximum number of drop reasons per task in the page; also the maximum number of task verdicts in
# the verdict card.
REASONS_SHOWN = 5
# Length limit of an answer with marked differences. The limit is below TEXT_MAX, so that the note
# about omitted characters is not truncated.
MARKED_MAX = TEXT_MAX - 50
VALUE_MAX = 80  # A longer field value becomes @FILE in the `preamble generate` command of the page.
STATE_CLASSES = {"running": "", "finished": "good", "stopped early": "good", "interrupted": "warn"}

FactList = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Tile:
    """A named number in the verdict card."""

    name: str
    value: str
    hint: str | None = None


@dataclass(frozen=True)
class VerdictCard:
    """The card at the top of the page."""

    css_class: str  # "good", "bad" or empty.
    sentences: Sequence[tuple[str, str]]  # Pairs (task name or empty, sentence).
    note: str | None
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class CurveFigure:
    """A curve with its SVG element."""

    curve: Curve
    svg: Markup


@dataclass(frozen=True)
class MeasureCell:
    """A value in a table of measures."""

    text: str
    margin: str | None = None  # The confidence margin; None: the value has none.
    bar_percent: float | None = None  # Length of the bar below the value; None: no bar.


@dataclass(frozen=True)
class MeasureRow:
    """A row of a table of measures: an evaluated variant, or a task."""

    name: str
    cells: Sequence[MeasureCell]
    is_adapter: bool = False  # Whether this is the row of the adapter, which is highlighted.


@dataclass(frozen=True)
class MeasureTable:
    """A table of measures with an explanation below it."""

    columns: Sequence[str]
    rows: Sequence[MeasureRow]
    hint: str | None = None


@dataclass(frozen=True)
class Answer:
    """A generated answer, compared with the expected answer."""

    title: str
    is_right: bool
    pieces: Sequence[tuple[str, bool]]  # Pairs (text, whether it differs from `expected`).
    is_cut: bool  # Whether the answer reached the length limit.


@dataclass(frozen=True)
class SampleArticle:
    """A held-out record with its expected answer and the generated answers."""

    inputs: Mapping[str, str]
    expected: str
    answers: Sequence[Answer]


@dataclass(frozen=True)
class ServeSection:
    """Commands that serve the artifact and call it."""

    commands: str  # One command per line.
    note: str | None


@dataclass(frozen=True)
class Histogram:
    """Histogram of the lengths of the training examples, in tokens."""

    svg: Markup
    low: int  # Minimum length.
    high: int  # Maximum length.


@dataclass(frozen=True)
class DataSection:
    """Facts of a task's records."""

    facts: FactList
    drop_reasons: Sequence[str]
    lengths: Histogram | None  # None: all lengths are equal.


@dataclass(frozen=True)
class CardSection:
    """The adapter's card."""

    facts: FactList
    json: str  # The full card as JSON.


@dataclass(frozen=True)
class TaskSection:
    """All sections of one task."""

    name: str
    task: str  # Purpose of the adapter in a few words.
    results: MeasureTable | None
    samples: Sequence[SampleArticle]
    serve: ServeSection | None
    data: DataSection
    card: CardSection | None


@dataclass(frozen=True)
class ReportView:
    """All texts and figures of the page, in the order of the page."""

    name: str
    subtitle: str
    state: str
    state_class: str
    reload_s: int | None  # Reload interval; None: the run has ended.
    artifact: str  # "adapter" or "tuned model".
    verdict: VerdictCard
    warnings: Sequence[str]
    figures: Sequence[CurveFigure]
    overview: MeasureTable | None  # Table of all tasks; None: the run has one task.
    tasks: Sequence[TaskSection]
    samples_shown: int
    model_facts: FactList
    changed_settings: FactList  # Settings that differ from their defaults.
    settings_json: str


def render_report(run: RunFacts, written_at: datetime | None = None) -> str:
    """Render report.html."""
    return PAGE.render(_report_view(run), written_at)


def _report_view(run: RunFacts) -> ReportView:
    return ReportView(
        name=run.name,
        subtitle=_subtitle(run),
        state=run.state.capitalize(),
        state_class=STATE_CLASSES[run.state],
        reload_s=RELOAD_S if run.state == "running" else None,
        artifact=artifact_name(run),
        verdict=_verdict_card(run),
        warnings=[*run_warnings(run), *run.notes],
        figures=[CurveFigure(curve, draw_chart(curve.chart)) for curve in select_curves(run)],
        overview=_overview(run) if len(run.tasks) > 1 else None,
        tasks=[_task_section(task, run) for task in run.tasks],
        samples_shown=SAMPLES_SHOWN,
        model_facts=_fact_list(run.model),
        changed_settings=_fact_list(_changed_settings(run)),
        settings_json=_json(dict(run.config), 2),
    )


def _subtitle(run: RunFacts) -> str:
    model = str(run.config.get("model", ""))
    parts = [f"tuned on {Path(model).name}" if model else "", str(run.config.get("method", ""))]
    if len(run.tasks) > 1:
        parts.append(f"{len(run.tasks)} tasks")
    elif run.tasks and run.tasks[0].task:
        parts.append(run.tasks[0].task)
    return " · ".join(filter(None, parts))


def _verdict_card(run: RunFacts) -> VerdictCard:
    verdicts = [(task, task_verdict(task, run)) for task in run.tasks]
    ratings = {verdict.is_good for _, verdict in verdicts}
    sentences = [("", verdict.sentence) for _, verdict in verdicts]
    note = None
    if len(set(sentences)) == 1:
        sentences = sentences[:1]  # All tasks have the same verdict.
    elif len(verdicts) > 1:
        sentences = [(task.name, verdict.sentence) for task, verdict in verdicts[:REASONS_SHOWN]]
        if len(verdicts) > REASONS_SHOWN:
            note = f"{len(verdicts) - REASONS_SHOWN} more tasks are in the table."
    return VerdictCard(
        "bad" if False in ratings else "good" if ratings == {True} else "",
        sentences,
        note,
        list(_figure_tiles(run)),
    )


def _figure_tiles(run: RunFacts) -> Iterator[Tile]:
    """Yield the tiles of the verdict card."""
    if len(run.tasks) == 1:
        measures = task_measures(run.tasks[0], run)
        measure = headline_measure(measures, str(run.config.get("monitor", "")))
        if measure is not None and is_share(measure):
            no_prompt_measure = run.tasks[0].metrics_by_variant.get(NO_PROMPT, {}).get(measure)
            gain = (
                100 * (measures[measure] - no_prompt_measure)
                if no_prompt_measure is not None
                else 0.0
            )
            hint = f"{gain:+.1f} points over no prompt" if no_prompt_measure is not None else None
            yield Tile(label(measure), format_measure(measure, measures[measure]), hint)
    if not run.progress:
        return
    last_step = run.progress[-1]
    losses = [step.loss for step in run.progress if math.isfinite(step.loss)]
    seconds = sum(step.seconds for step in run.progress)
    tokens = sum(step.text_tokens for step in run.progress)
    if losses:
        recent_loss = fmean(losses[-LAST_LOSS_STEPS:])
        yield Tile(
            "Loss",
            format_measure("loss", recent_loss),
            f"{format_measure('loss', losses[0])} at the start",
        )
    best_note = f"step {run.best_step} is the best" if run.best_step is not None else None
    yield Tile("Steps", f"{last_step.step:,} of {last_step.steps:,}", best_note)
    speed = f"{tokens / seconds:,.0f} text tokens/s" if seconds > 0 else None
    yield Tile("Time", format_duration(seconds), speed)
    virtual_tokens = sum(_int_or_zero(task.card.get("virtual_tokens")) for task in run.tasks)
    hidden_size = max((_int_or_zero(task.card.get("hidden_size")) for task in run.tasks), default=0)
    if virtual_tokens:
        hint = (
            f"{virtual_tokens * hidden_size * 4 / 1024:,.0f} KiB; the model is unchanged"
            if hidden_size
            else None
        )
        yield Tile("Virtual tokens", f"{virtual_tokens:,}", hint)


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def _overview(run: RunFacts) -> MeasureTable | None:
    """Build the table of all tasks, with one measure per task."""
    preferred = str(run.config.get("monitor", ""))
    variants = [
        name for name in VARIANTS if any(name in task.metrics_by_variant for task in run.tasks)
    ]
    if not variants:
        return None
    rows = []
    for task in run.tasks:
        measure = headline_measure(task_measures(task, run), preferred)
        cells = [MeasureCell(label(measure) if measure else "–")]
        cells += [_measure_cell(task, name, measure) for name in variants]
        rows.append(MeasureRow(task.name, cells))
    return MeasureTable(
        ("Task", "Measure", *(row_label(name, run) for name in variants)),
        rows,
    )


def _measure_cell(task: TaskFacts, name: str, measure: str | None) -> MeasureCell:
    value = task.metrics_by_variant.get(name, {}).get(measure or "")
    if value is None or measure is None:
        return MeasureCell("–")
    text = format_measure(measure, value)
    if not is_share(measure) or not 0 <= value <= 1:
        return MeasureCell(text)
    margin_points = 100 * confidence_margin(value, task.validation_examples)
    margin = f" ± {margin_points:.1f}" if margin_points else None
    return MeasureCell(text, margin, bar_percent=round(100 * value, 1))


def _task_section(task: TaskFacts, run: RunFacts) -> TaskSection:
    artifact = artifact_name(run)
    return TaskSection(
        task.name,
        task.task,
        _results_table(task, run),
        [_sample_article(sample, artifact) for sample in task.samples[:SAMPLES_MAX]],
        _serve_section(task, run),
        _data_section(task, run),
        _card_section(task),
    )


def _results_table(task: TaskFacts, run: RunFacts) -> MeasureTable | None:
    variants = [name for name in VARIANTS if task.metrics_by_variant.get(name)]
    if not variants:
        return None
    order = dict.fromkeys(measure for name in variants for measure in task.metrics_by_variant[name])
    measures = sorted(order, key=lambda measure: not is_share(measure))
    rows = [
        MeasureRow(
            row_label(name, run),
            [_measure_cell(task, name, measure) for measure in measures],
            is_adapter=name == ADAPTER,
        )
        for name in variants
    ]
    hint = _evaluation_hint(task.validation_examples, measures)
    return MeasureTable(("", *map(label, measures)), rows, hint)


def _evaluation_hint(examples: int, measures: Sequence[str]) -> str | None:
    if not examples:
        return None
    text = f"Evaluated on {examples:,} held-out records by greedy decoding."
    if any(is_share(measure) for measure in measures):
        text += " ±: 95 % confidence interval."
    explained = [name for name in measures if name in MEANINGS]
    explanations = ". ".join(f"{label(name)}: {MEANINGS[name]}" for name in explained)
    return f"{text} {explanations}." if explanations else text


def _sample_article(sample: Sample, artifact: str) -> SampleArticle:
    answers = (
        _answer(f"Without the {artifact}", sample.before, sample.expected),
        _answer(f"With the {artifact}", sample.after, sample.expected, is_cut=sample.cut),
    )
    return SampleArticle(sample.inputs, sample.expected, answers)


def _answer(title: str, answer: str, expected: str, *, is_cut: bool = False) -> Answer:
    is_right = bool(exact_match(answer, expected))
    pieces: Sequence[tuple[str, bool]] = [(answer, False)]
    if not answer.strip():
        pieces = []
    elif not is_right:
        pieces = _mark_differences(answer, expected)
    return Answer(title, is_right, pieces, is_cut)


def _mark_differences(answer: str, expected: str) -> Sequence[tuple[str, bool]]:
    """Split the answer into pairs (text, whether the text differs from the expected answer)."""
    answer_words = _split_words(clean_text(answer, MARKED_MAX))
    expected_words = _split_words(expected[:MARKED_MAX])
    if not {*filter(str.isalnum, answer_words)} & {*filter(str.isalnum, expected_words)}:
        # The texts have no common word, so marks would cover the whole answer.
        return [(answer, False)]
    matcher = SequenceMatcher(None, expected_words, answer_words, autojunk=False)
    return [
        ("".join(answer_words[start:end]), kind != "equal")
        for kind, _, _, start, end in matcher.get_opcodes()
        if end > start
    ]


def _split_words(text: str) -> list[str]:
    """Split a text into words and the separators between them."""
    return ["".join(run) for _, run in groupby(text, str.isalnum)]


def _serve_section(task: TaskFacts, run: RunFacts) -> ServeSection | None:
    config = run.config
    if not task.path:
        return None
    is_model = config.get("method") == "full"
    serve_command = [
        "preamble",
        "serve",
        task.path if is_model else str(config.get("model", "MODEL")),
    ]
    serve_command += [] if is_model else ["--adapters", str(Path(task.path).parent)]
    for name in ("tokenizer", "true_vocab_size", "config_json", "dtype"):
        if config.get(name) is not None:
            serve_command += [f"--{name.replace('_', '-')}", str(config[name])]
    if config.get("device", "cpu") != "cpu":
        serve_command += ["--device", str(config["device"])]
    generate_command = ["preamble", "generate", "--server", "localhost:9000", "--task", task.name]
    inputs = task.samples[0].inputs if task.samples else {}
    for name in task.fields or inputs:
        value = inputs.get(name, "")
        fits_command = value.isprintable() and 0 < len(value) <= VALUE_MAX and value[0] != "@"
        generate_command += ["--field", f"{name}={value if fits_command else '@FILE'}"]
    commands = "\n".join(
        map(shlex.join, (serve_command, [] if is_model else generate_command))
    ).rstrip()
    return ServeSection(commands, None if is_model else f"The adapter is {task.path}")


def _data_section(task: TaskFacts, run: RunFacts) -> DataSection:
    evaluated = describe_selection(
        task.validation_examples, task.validation_records, str(run.config.get("measure", ""))
    )
    facts: dict[str, object] = {
        "Training records": task.data,
        "Examples": f"{task.examples:,}",
        "Held-out records": task.validation or "none",
        "Evaluated": evaluated if task.validation else "",
        "Truncated": f"{task.truncated:,}",
        "Dropped": f"{len(task.dropped):,}",
    }
    if task.lengths:
        low, high = min(task.lengths), max(task.lengths)
        facts["Lengths"] = f"{low:,} to {high:,} tokens, median {median(task.lengths):.0f}"
    reasons = list(task.dropped[:REASONS_SHOWN])
    if len(task.dropped) > REASONS_SHOWN:
        reasons.append(f"{len(task.dropped) - REASONS_SHOWN:,} more")
    return DataSection(_fact_list(facts), reasons, _length_histogram(task.lengths))


def _length_histogram(lengths: Sequence[int]) -> Histogram | None:
    if len(lengths) < 2 or min(lengths) == max(lengths):
        return None
    low, high = min(lengths), max(lengths)
    aria_label = f"lengths of the examples, from {low} to {high} tokens"
    return Histogram(draw_histogram(lengths, aria_label), low, high)


def _fact_list(facts: Mapping[str, object]) -> FactList:
    return [
        (name, _format_fact(value))
        for name, value in facts.items()
        if value not in (None, "", (), [], {})
    ]


def _format_fact(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_format_fact(field)}" for name, field in value.items())
    return _json(value, None) if isinstance(value, Sequence) else str(value)


def _json(value: object, indent: int | None) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, indent=indent)


def _card_section(task: TaskFacts) -> CardSection | None:
    if not task.card:
        return None
    facts = {name.replace("_", " "): value for name, value in task.card.items()}
    facts["golden"] = (
        f"{len(task.card.get('golden') or ())} examples" if facts.get("golden") else ""
    )
    template = task.card.get("template")
    if isinstance(template, Mapping):
        facts["template"] = template.get("text", "")
    return CardSection(_fact_list(facts), _json(task.card, 2))


def _changed_settings(run: RunFacts) -> Mapping[str, object]:
    """Return the settings that differ from their defaults, without `tasks`."""
    defaults = {
        name: field.default
        for name, field in setting_fields(TuneConfig).items()
        if field.default is not MISSING
    }
    return {
        name: value
        for name, value in run.config.items()
        if name != "tasks" and (name not in defaults or value != defaults[name])
    }
