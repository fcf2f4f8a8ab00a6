"""Plan writer: writes CSV, JSON, HTML, PNG, report and settings, and reads a plan back.

Each file is written atomically, and plan.json is written last. candidates.csv contains all data of
the candidates, so the plots can be redrawn from it, also after a user has edited it. The axes of a
redrawn plot come from plan.json or from flags.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpt.errors import ConfigError
from gpt.files.atomic_files import write_atomic
from gpt.json_output import nonfinite_to_none
from gpt.settings import short_repr, suggest_nearest
from planning.figures import count_by_feasibility, label, rejections
from planning.output.csv_table import BYTES_MAX, format_csv, read_rows
from planning.output.html_page import render_html
from planning.output.markdown import render_markdown
from planning.output.pareto import pareto_fronts
from planning.output.png_plot import render_png, why_unavailable
from planning.plan import SETTINGS_FILES, Axis, Plan, Row

FORMAT = "preamble.plan.1"
CANDIDATES_NAME, PLAN_NAME = "candidates.csv", "plan.json"
# plan.json states for the figures of its two axes whether higher or lower is better. For any other
# figure, higher is better if the figure's name contains one of these words; otherwise, lower is
# better.
HIGHER_IS_BETTER = ("per_s", "mfu", "hfu", "tflops", "throughput")


@dataclass(frozen=True)
class WrittenPlan:
    paths: Sequence[Path]
    plan: Plan  # Its command contains the path of the written settings file, if there is one.
    notes: Sequence[str] = ()  # Files that could not be written, and why.

    def summary(self) -> str:
        folder = self.paths[0].parent
        return f"written to {folder}: {', '.join(path.name for path in self.paths)}"


def write_plan(plan: Plan, folder: Path) -> WrittenPlan:
    """Write all files of a plan into a folder, which is created if necessary."""
    plan = with_settings_path(plan, folder)
    texts = {
        CANDIDATES_NAME: format_csv(plan.rows),
        "failed.csv": format_csv(
            [row for row in plan.rows if row.feasibility == "failed"], plan.rows
        ),
        **_pareto_texts(plan),
        "report.md": render_markdown(plan),
    }
    if plan.settings_yaml:
        texts[settings_file_name(plan)] = plan.settings_yaml
    texts[PLAN_NAME] = json.dumps(plan_record(plan), ensure_ascii=False) + "\n"
    return _write_files(plan, folder, texts)


def redraw(source: Path, folder: Path | None = None, *, x: str = "", y: str = "") -> WrittenPlan:
    """Rewrite pareto.csv, pareto.html and pareto.png from a candidates.csv.

    `source` is the file or its folder. `folder` receives the plots; it defaults to the folder of
    the file. `x` and `y` are the figures of the axes, and default to the figures in plan.json.
    """
    plan = read_plan(source, x=x, y=y)
    target_folder = folder or (source if source.is_dir() else source.parent)
    return _write_files(plan, target_folder, _pareto_texts(plan))


def with_settings_path(plan: Plan, folder: Path) -> Plan:
    """Return the plan with the path of its settings file in its command."""
    name = settings_file_name(plan)
    path = shlex.quote(str(folder / name))
    command_words = [
        path if command_word == name else command_word for command_word in plan.command.split(" ")
    ]
    return replace(plan, command=" ".join(command_words))


def settings_file_name(plan: Plan) -> str:
    return SETTINGS_FILES.get(plan.title, "settings.yaml")


def _pareto_texts(plan: Plan) -> dict[str, str]:
    front_rows = [row for rows in pareto_fronts(plan).values() for row in rows]
    return {"pareto.csv": format_csv(front_rows, plan.rows), "pareto.html": render_html(plan)}


def _write_files(plan: Plan, folder: Path, texts: Mapping[str, str]) -> WrittenPlan:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # plan.json must not lie beside files of another plan: delete it first, write it last.
        if PLAN_NAME in texts:
            (folder / PLAN_NAME).unlink(missing_ok=True)
        paths = []
        png_path = folder / "pareto.png"
        note = why_unavailable()
        if note:
            png_path.unlink(missing_ok=True)  # An existing PNG shows older data.
        else:
            paths.append(write_atomic(png_path, render_png(plan), durable=False))
        paths += [
            write_atomic(folder / name, text.encode(), durable=False)
            for name, text in texts.items()
        ]
    except OSError as error:
        raise ConfigError(
            f"cannot write the plan to {folder}: {error.strerror}; give another folder"
        ) from None
    return WrittenPlan(paths, plan, (note,) if note else ())


# ------------------------------------------------------------------------------------------ record


def plan_record(plan: Plan) -> dict[str, object]:
    """Return the plan as JSON values; figures that are not finite become null."""
    best = plan.best
    return {
        "format": FORMAT,
        "title": plan.title,
        "asked": list(plan.request),
        "objective": plan.objective,
        "feasible": best is not None,
        "best": _row_record(best) if best is not None else None,
        "binding": list(plan.binding),
        "why_not": list(plan.why_not),
        "advice": list(plan.advice),
        "command": plan.command,
        "settings_yaml": plan.settings_yaml,
        "axes": {"x": asdict(plan.x), "y": asdict(plan.y)},
        "counts": dict(count_by_feasibility(plan)),
        # Rejected candidates are grouped by reason; candidates.csv lists each of them.
        "rejections": [asdict(rejection) for rejection in rejections(plan.rows)],
        "rows": [_row_record(row) for row in plan.rows if row.feasibility != "rejected"],
    }


def _row_record(row: Row) -> dict[str, object]:
    memory = None
    if row.memory is not None:
        memory = asdict(row.memory) | {"total": row.memory.total, "verdict": row.memory.verdict}
    return {
        "name": row.name,
        "standing": row.feasibility,
        "group": row.group,
        "settings": dict(row.settings),
        "figures": nonfinite_to_none(row.figures),
        "measured": nonfinite_to_none(row.measured),
        "trust": asdict(row.confidence) if row.confidence is not None else None,
        "memory_bytes": memory,
        "reason": row.reason,
    }


# ----------------------------------------------------------------------------------------- reading


def read_plan(source: Path, *, x: str = "", y: str = "") -> Plan:
    """Read a plan: candidates from candidates.csv, texts and axes from plan.json if it exists.

    Both files are in the same folder. `x` and `y` override the figures of the axes.
    """
    path = source / CANDIDATES_NAME if source.is_dir() else source
    rows = list(read_rows(path))
    if not rows:
        raise ConfigError(f"{path} has no candidates; give the candidates.csv of a plan")
    figures = list(dict.fromkeys(name for row in rows for name in (*row.figures, *row.measured)))
    saved_record = _read_plan_json(path.with_name(PLAN_NAME))
    axes = [
        _make_axis(name, saved_record.get("axes", {}).get(axis_name, {}), figures, f"--{axis_name}")
        for axis_name, name in (("x", x), ("y", y))
    ]
    return Plan(
        title=str(saved_record.get("title", path.stem)),
        request=_text_list(saved_record, "asked"),
        objective=str(saved_record.get("objective", "")),
        rows=rows,
        x=axes[0],
        y=axes[1],
        binding=_text_list(saved_record, "binding"),
        why_not=_text_list(saved_record, "why_not"),
        advice=_text_list(saved_record, "advice"),
        command=str(saved_record.get("command", "")),
        settings_yaml=str(saved_record.get("settings_yaml", "")),
    )


def _text_list(record: Mapping[str, Any], name: str) -> list[str]:
    texts = record.get(name)
    return [str(text) for text in texts] if isinstance(texts, list) else []


def _read_plan_json(path: Path) -> Mapping[str, Any]:
    """Return the record in plan.json, or an empty record if the file is missing or invalid."""
    try:
        if path.stat().st_size > BYTES_MAX:
            return {}
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    is_plan_record = isinstance(record, dict) and record.get("format") == FORMAT
    return record if is_plan_record and isinstance(record.get("axes"), dict) else {}


def _make_axis(name: str, saved_axis: object, figures: Sequence[str], flag: str) -> Axis:
    """Return the axis of the figure `name`, or the axis of plan.json if `name` is empty."""
    record = saved_axis if isinstance(saved_axis, dict) else {}
    saved_figure = str(record.get("figure", ""))
    if not (name or saved_figure):
        raise ConfigError(
            f"the axis is unknown, since there is no valid plan.json beside the CSV; set {flag} to "
            f"one of: {', '.join(figures)}"
        )
    figure = name or saved_figure
    if name and name not in figures:
        raise ConfigError(f"{flag} is {short_repr(figure)}; {suggest_nearest(figure, figures)}")
    if figure == saved_figure:
        limit = record.get("limit")
        better: Literal["low", "high"] = "high" if record.get("better") == "high" else "low"
        axis_label = str(record.get("label", saved_figure))
        return Axis(
            saved_figure, axis_label, better, limit if isinstance(limit, int | float) else None
        )
    is_higher_better = any(word in figure for word in HIGHER_IS_BETTER)
    return Axis(figure, label(figure), "high" if is_higher_better else "low")
