"""report.html: what a run did and what came of it, on one page that needs nothing else.

Made from the run's facts alone, again after each validation, so that a browser can watch. It loads
nothing and asks nothing of others, and forbids that to itself; all but reading values off the
curves works without its script. Knows no files but its own style and script, and no model.
"""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from ptuning.config import TuneConfig
from ptuning.evaluation.answer_metrics import exact_match
from ptuning.reporting.curves import figures, spread
from ptuning.reporting.markup import TEXT_MAX, Child, Html, cleaned, joined, tag
from ptuning.reporting.progress_bar import duration
from ptuning.reporting.verdict import (
    LAST_STEPS,
    MEANINGS,
    headline,
    is_share,
    label,
    learned,
    margin,
    measured,
    row,
    shown,
    verdict,
    warnings,
)
from ptuning.run_facts import ADAPTER, BASELINES, NO_PROMPT, RunFacts, Sample, TaskFacts

RELOAD_S = 20  # While the run goes on.
SAMPLES_SHOWN = 4  # Of a task; the others open at a click.
SAMPLES_MAX = 24
REASONS_SHOWN = 5
MARKED_MAX = TEXT_MAX - 50  # Characters of an answer with marks; what is cut off is told besides.
JSON_MAX = 20_000  # Characters of a card or of settings.
VALUE_MAX = 80  # Of a field in the command that asks for an answer.
PILLS = {"running": "", "finished": "good", "stopped early": "good", "interrupted": "warn"}

ICON = Html(
    '<svg viewBox="0 0 32 32" width="28" height="28" aria-hidden="true">'
    '<rect width="32" height="32" rx="7" fill="#0f6b5c"/><g fill="#fff">'
    '<rect x="7" y="9" width="4" height="14" rx="2"/>'
    '<rect x="14" y="9" width="4" height="14" rx="2" opacity=".75"/>'
    '<rect x="21" y="9" width="4" height="14" rx="2" opacity=".4"/></g></svg>'
)


def page(run: RunFacts, written: datetime | None = None) -> str:
    """The whole of report.html."""
    style, script = _asset("report.css"), _asset("report.js")
    # Hashes, so that nothing else could run here even if a text were taken for markup.
    rules = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    running = run.state == "running"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=rules),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="refresh", content=RELOAD_S) if running else None,
        tag("title", f"{run.name}: tuning report"),
        tag("style", style),
    )
    several = len(run.tasks) > 1
    main = tag(
        "main",
        _verdict(run),
        _notices(run),
        figures(run),
        _overview(run) if several else None,
        *(_task(task, run, several) for task in run.tasks),
        _settings(run),
    )
    when = (written or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    footer = tag(
        "footer",
        f"Written by preamble tune on {when}. This file is complete: it loads nothing.",
        f" It is loaded again every {RELOAD_S} seconds while the run goes on." if running else None,
    )
    body = tag("body", _header(run), main, footer, tag("script", script))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


@cache
def _asset(name: str) -> Html:
    return Html(files("ptuning.reporting").joinpath(name).read_text("utf-8"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _header(run: RunFacts) -> Html:
    model = str(run.config.get("model", ""))
    about = [f"tuned on {Path(model).name}" if model else "", str(run.config.get("method", ""))]
    if len(run.tasks) > 1:
        about.append(f"{len(run.tasks)} tasks")
    elif run.tasks and run.tasks[0].task:
        about.append(run.tasks[0].task)
    said = " · ".join(filter(None, about))
    names = tag("div", tag("h1", _isolated(run.name)), tag("p", _isolated(said), class_="hint"))
    state = tag("p", run.state.capitalize(), class_=f"pill {PILLS[run.state]}".strip())
    return tag("header", ICON, names, state)


def _isolated(text: str) -> Html:
    """Letters that are written from the right stay on their side."""
    return tag("bdi", text)


def _verdict(run: RunFacts) -> Html:
    made = [(task, verdict(task, run)) for task in run.tasks]
    opinions = {one.good for _, one in made}
    kind = "bad" if False in opinions else "good" if opinions == {True} else ""
    if len(made) > 1:
        said = [
            tag("p", tag("b", _isolated(task.name)), f": {one.sentence}")
            for task, one in made[:REASONS_SHOWN]
        ]
        if len({one.sentence for _, one in made}) == 1:  # They have one thing to say.
            said = [tag("p", made[0][1].sentence)]
        elif len(made) > REASONS_SHOWN:
            said.append(tag("p", f"{len(made) - REASONS_SHOWN} more tasks stand in the table."))
    else:
        said = [tag("p", one.sentence) for _, one in made]
    return tag(
        "section",
        *said,
        tag("dl", *_figures(run), class_="figures"),
        class_=f"card verdict {kind}".strip(),
        aria_label="Verdict",
    )


def _figures(run: RunFacts) -> Iterator[Html]:
    if len(run.tasks) == 1:
        made = measured(run.tasks[0], run)
        measure = headline(made, str(run.config.get("measure", "")))
        if measure is not None and is_share(measure):
            plain = run.tasks[0].baselines.get(NO_PROMPT, {}).get(measure)
            gain = 100 * (made[measure] - plain) if plain is not None else 0.0
            hint = f"{gain:+.1f} points over no prompt" if plain is not None else None
            yield _tile(label(measure), shown(measure, made[measure]), hint)
    if not run.progress:
        return
    last = run.progress[-1]
    losses = [one.loss for one in run.progress if math.isfinite(one.loss)]
    seconds = sum(one.seconds for one in run.progress)
    tokens = sum(one.text_tokens for one in run.progress)
    if losses:
        now = fmean(losses[-LAST_STEPS:])
        yield _tile("Loss", shown("loss", now), f"{shown('loss', losses[0])} at the start")
    kept = f"the state of step {run.best_step} is kept" if run.best_step is not None else None
    yield _tile("Steps", f"{last.step:,} of {last.steps:,}", kept)
    speed = f"{tokens / seconds:,.0f} text tokens/s" if seconds > 0 else None
    yield _tile("Time", duration(seconds), speed)
    rows = sum(_number(task.card.get("virtual_tokens")) for task in run.tasks)
    size = max((_number(task.card.get("hidden_size")) for task in run.tasks), default=0)
    if rows:
        hint = f"{rows * size * 4 / 1024:,.0f} KiB; the model is unchanged" if size else None
        yield _tile("Virtual tokens", f"{rows:,}", hint)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _tile(name: str, value: str, hint: str | None) -> Html:
    more = tag("dd", hint, class_="hint") if hint else None
    return tag("div", tag("dt", name), tag("dd", value), more)


def _notices(run: RunFacts) -> Html | None:
    said = [*warnings(run), *run.notes]
    if not said:
        return None
    points = (tag("li", _isolated(one)) for one in said)
    return tag("section", tag("h2", "To know"), tag("ul", *points), class_="card notices")


def _overview(run: RunFacts) -> Html | None:
    """All tasks in one table, by one measure each."""
    wanted = str(run.config.get("measure", ""))
    kinds = [name for name in BASELINES if any(name in task.baselines for task in run.tasks)]
    if not kinds:
        return None
    rows = []
    for task in run.tasks:
        measure = headline(measured(task, run), wanted)
        cells = [_cell(task, name, measure) for name in kinds]
        head = tag("th", _isolated(task.name), scope="row")
        rows.append(tag("tr", head, tag("td", label(measure) if measure else "–"), *cells))
    names = ("Task", "Measure", *(row(name, run) for name in kinds))
    return tag("section", tag("h2", "Tasks"), _table(names, rows), class_="card")


def _table(names: Sequence[str], rows: Sequence[Html]) -> Html:
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))
    return tag("div", tag("table", head, tag("tbody", *rows)), class_="wide")


def _cell(task: TaskFacts, name: str, measure: str | None) -> Html:
    value = task.baselines.get(name, {}).get(measure or "")
    if value is None or measure is None:
        return tag("td", "–")
    if not is_share(measure) or not 0 <= value <= 1:
        return tag("td", shown(measure, value))
    within = 100 * margin(value, task.validation_examples)
    hint = tag("span", f" ± {within:.1f}", class_="hint") if within else None
    bar = (
        '<svg class="bar" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="100" height="4"/><rect width="{100 * value:.1f}" height="4"/></svg>'
    )
    return tag("td", shown(measure, value), hint, Html(bar))


def _task(task: TaskFacts, run: RunFacts, several: bool) -> Html:
    parts = (
        _comparison(task, run),
        _samples(task, learned(run)),
        _serving(task, run),
        tag("div", _records(task), _card(task), class_="pair"),
    )
    if not several:
        return joined(*parts)
    name = tag("h2", _isolated(task.name), f" · {task.task}" if task.task else None)
    return tag("section", name, *parts, class_="task", aria_label=task.name)


def _comparison(task: TaskFacts, run: RunFacts) -> Html | None:
    kinds = [name for name in BASELINES if task.baselines.get(name)]
    if not kinds:
        return None
    order = dict.fromkeys(measure for name in kinds for measure in task.baselines[name])
    measures = sorted(order, key=lambda one: not is_share(one))
    rows = [
        tag(
            "tr",
            tag("th", row(name, run), scope="row"),
            *(_cell(task, name, measure) for measure in measures),
            class_="ours" if name == ADAPTER else None,
        )
        for name in kinds
    ]
    count = task.validation_examples
    hint = None
    if count:
        text = f"Measured on {count:,} held-out records, by answers that the model wrote greedily."
        if any(is_share(measure) for measure in measures):
            text += " ±: where the share on other such records would lie, 95 times in 100."
        known = [name for name in measures if name in MEANINGS]
        said = ". ".join(f"{label(name)}: {MEANINGS[name]}" for name in known)
        hint = tag("p", f"{text} {said}." if said else text, class_="hint")
    table = _table(("", *map(label, measures)), rows)
    return tag(
        "section", tag("h2", f"What the {learned(run)} is worth"), table, hint, class_="card"
    )


def _samples(task: TaskFacts, made_by: str) -> Html | None:
    if not task.samples:
        return None
    made = [_sample(sample, made_by) for sample in task.samples[:SAMPLES_MAX]]
    more = made[SAMPLES_SHOWN:]
    return tag(
        "section",
        tag("h2", "Held-out answers, before and after"),
        *made[:SAMPLES_SHOWN],
        tag("details", tag("summary", f"{len(more)} more"), *more) if more else None,
        class_="card samples",
    )


def _sample(sample: Sample, made_by: str) -> Html:
    asked = [
        joined(
            tag("h3", _isolated(name)) if len(sample.inputs) > 1 else None,
            tag("div", text, class_="text", dir="auto"),
        )
        for name, text in sample.inputs.items()
    ]
    right = tag("div", tag("h3", "Right answer"), _text(sample.expected))
    answers = (
        right,
        _answer(f"Without the {made_by}", sample.before, sample.expected),
        _answer(f"With the {made_by}", sample.after, sample.expected, cut=sample.cut),
    )
    return tag(
        "article",
        tag("div", *asked, class_="asked"),
        tag("div", *answers, class_="answers"),
        class_="sample",
    )


def _text(*children: Child) -> Html:
    return tag("div", *children, class_="text", dir="auto")


def _answer(title: str, answer: str, expected: str, *, cut: bool = False) -> Html:
    right = bool(exact_match(answer, expected))
    word = "✓ right" if right else "✗ wrong"
    said: Child = answer if right else _marked(answer, expected)
    if not answer.strip():
        said = tag("i", "nothing")
    tail = tag("i", " (cut at max_new_tokens)") if cut else None
    head = tag("h3", f"{title} ", tag("b", word))
    return tag("div", head, _text(said, tail), class_="right" if right else "wrong")


def _marked(answer: str, expected: str) -> Html:
    """With the words marked that the right answer does not have there."""
    words, wanted = _words(cleaned(answer, MARKED_MAX)), _words(expected[:MARKED_MAX])
    if not {*filter(str.isalnum, words)} & {*filter(str.isalnum, wanted)}:
        return joined(answer)  # All of it is another answer; marks would only be in the way.
    matcher = SequenceMatcher(None, wanted, words, autojunk=False)
    return joined(
        *(
            "".join(words[start:end]) if kind == "equal" else tag("mark", "".join(words[start:end]))
            for kind, _, _, start, end in matcher.get_opcodes()
            if end > start
        )
    )


def _words(text: str) -> list[str]:
    """Words, and what stands between them."""
    return ["".join(run) for _, run in groupby(text, str.isalnum)]


def _serving(task: TaskFacts, run: RunFacts) -> Html | None:
    config = run.config
    if not task.path:
        return None
    full = config.get("method") == "full"
    serve = ["preamble", "serve", task.path if full else str(config.get("model", "MODEL"))]
    serve += [] if full else ["--adapters", str(Path(task.path).parent)]
    for name in ("tokenizer", "true_vocab_size", "config_json", "dtype"):
        if config.get(name) is not None:
            serve += [f"--{name.replace('_', '-')}", str(config[name])]
    if config.get("device", "cpu") != "cpu":
        serve += ["--device", str(config["device"])]
    ask = ["preamble", "generate", "--server", "localhost:9000", "--task", task.name]
    inputs = task.samples[0].inputs if task.samples else {}
    for name in task.fields or inputs:
        value = inputs.get(name, "")
        known = value.isprintable() and 0 < len(value) <= VALUE_MAX and value[0] != "@"
        ask += ["--field", f"{name}={value if known else '@FILE'}"]
    commands = "\n".join(map(shlex.join, (serve, [] if full else ask))).rstrip()
    return tag(
        "section",
        tag("h2", "Serve it"),
        _pre(commands),
        None if full else tag("p", f"The adapter is {task.path}", class_="hint"),
        class_="card",
    )


def _records(task: TaskFacts) -> Html:
    facts: dict[str, object] = {
        "Learned from": task.data,
        "Examples": f"{task.examples:,}",
        "Held out": task.validation or "nothing",
        "Measured": f"{task.validation_examples:,}" if task.validation else "",
        "Cut to fit": f"{task.truncated:,}",
        "Left out": f"{len(task.dropped):,}",
    }
    if task.lengths:
        low, high = min(task.lengths), max(task.lengths)
        middle = f"half of them up to {median(task.lengths):.0f}"
        facts["Lengths"] = f"{low:,} to {high:,} tokens, {middle}"
    reasons = [tag("li", _isolated(one)) for one in task.dropped[:REASONS_SHOWN]]
    if len(task.dropped) > REASONS_SHOWN:
        reasons.append(tag("li", f"{len(task.dropped) - REASONS_SHOWN:,} more"))
    return tag(
        "section",
        tag("h2", "Data"),
        _facts(facts),
        tag("ul", *reasons, class_="dropped") if reasons else None,
        spread(task.lengths),
        class_="card",
    )


def _facts(facts: Mapping[str, object]) -> Html:
    pairs = (
        joined(tag("dt", name), tag("dd", _isolated(_said(value))))
        for name, value in facts.items()
        if value not in (None, "", (), [], {})
    )
    return tag("dl", *pairs, class_="facts")


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_said(one)}" for name, one in value.items())
    return _json(value, None) if isinstance(value, Sequence) else str(value)


def _json(value: object, indent: int | None) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, indent=indent)


def _card(task: TaskFacts) -> Html | None:
    if not task.card:
        return None
    facts = {name.replace("_", " "): value for name, value in task.card.items()}
    facts["golden"] = (
        f"{len(task.card.get('golden') or ())} examples" if facts.get("golden") else ""
    )
    template = task.card.get("template")
    if isinstance(template, Mapping):
        facts["template"] = template.get("text", "")
    return tag(
        "section",
        tag("h2", "The card"),
        _facts(facts),
        tag("details", tag("summary", "As JSON"), _pre(_json(task.card, 2))),
        class_="card facts-card",
    )


def _pre(text: str) -> Html:
    """What is longer than a text may be, which is cut piece by piece: to a length of its own."""
    text = cleaned(text, JSON_MAX)
    pieces = (text[start : start + TEXT_MAX] for start in range(0, len(text), TEXT_MAX))
    return tag("pre", *pieces, tabindex=0)


def _settings(run: RunFacts) -> Html:
    usual = {one.name: one.default for one in fields(TuneConfig) if one.default is not MISSING}
    chosen = {
        name: value
        for name, value in run.config.items()
        if name != "tasks" and (name not in usual or value != usual[name])
    }
    model = tag("section", tag("h2", "Model"), _facts(run.model), class_="card")
    settings = tag(
        "section",
        tag("h2", "Settings"),
        _facts(chosen),
        tag(
            "details",
            tag("summary", "All of them"),
            _pre(_json(dict(run.config), 2)),
        ),
        class_="card",
    )
    return tag("div", model if run.model else None, settings, class_="pair")
