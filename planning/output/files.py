"""A plan as files: every candidate as CSV, the plan as JSON, a report, pictures, the settings file.

Each file is written whole or not at all, plan.json last. candidates.csv alone says all of each
candidate, so that who edits it, or has only it, draws it again. Knows no search and no layout.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpt.errors import ConfigError
from gpt.settings import nearest, shown
from planning.atomic_write import put
from planning.figures import counts, finite, label, rejections
from planning.output.csv_table import BYTES_MAX, read_rows, table
from planning.output.html_page import page
from planning.output.markdown import report
from planning.output.pareto import fronts
from planning.output.png_plot import drawn, missing
from planning.plan import SETTINGS_FILES, Axis, Plan, Row

FORMAT = "preamble.plan.1"
CANDIDATES, RECORD = "candidates.csv", "plan.json"
# Columns whose more is better, where nothing else says.
MORE = ("per_s", "mfu", "hfu", "tflops", "throughput")


@dataclass(frozen=True)
class Written:
    paths: Sequence[Path]
    plan: Plan  # Its command names the settings file where it now is.
    notes: Sequence[str] = ()  # What could not be written, and why.

    def said(self) -> str:
        where = self.paths[0].parent
        return f"written to {where}: {', '.join(path.name for path in self.paths)}"


def write_plan(plan: Plan, folder: Path) -> Written:
    """All of it, into a folder that is made if need be."""
    plan = located(plan, folder)
    texts = {
        CANDIDATES: table(plan.rows),
        "failed.csv": table([row for row in plan.rows if row.standing == "failed"], plan.rows),
        **_drawn(plan),
        "report.md": report(plan),
    }
    if plan.settings_yaml:
        texts[settings_file(plan)] = plan.settings_yaml
    texts[RECORD] = json.dumps(record_of(plan), ensure_ascii=False) + "\n"
    return _write(plan, folder, texts)


def redraw(source: Path, folder: Path | None = None, *, x: str = "", y: str = "") -> Written:
    """pareto.csv, .html and .png again, from candidates.csv or the folder that holds it."""
    plan = read_plan(source, x=x, y=y)
    place = folder or (source if source.is_dir() else source.parent)
    return _write(plan, place, _drawn(plan))


def located(plan: Plan, folder: Path) -> Plan:
    """With the settings file's whole path in the command that starts from it."""
    name = settings_file(plan)
    path = shlex.quote(str(folder / name))
    words = [path if word == name else word for word in plan.command.split(" ")]
    return replace(plan, command=" ".join(words))


def settings_file(plan: Plan) -> str:
    return SETTINGS_FILES.get(plan.title, "settings.yaml")


def _drawn(plan: Plan) -> dict[str, str]:
    ahead = [row for rows in fronts(plan).values() for row in rows]
    return {"pareto.csv": table(ahead, plan.rows), "pareto.html": page(plan)}


def _write(plan: Plan, folder: Path, texts: Mapping[str, str]) -> Written:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Until the record is there again, nothing says that the folder holds one plan.
        if RECORD in texts:
            (folder / RECORD).unlink(missing_ok=True)
        made = []
        picture, note = folder / "pareto.png", missing()
        if note:
            picture.unlink(missing_ok=True)  # It would be another plan's.
        else:
            made.append(put(picture, drawn(plan)))
        made += [put(folder / name, text.encode()) for name, text in texts.items()]
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be written into {folder} ({error.strerror}); name another folder"
        ) from None
    return Written(made, plan, (note,) if note else ())


# ------------------------------------------------------------------------------------------ record


def record_of(plan: Plan) -> dict[str, object]:
    """The plan as plain values; JSON has no word for what is not finite, so it is null."""
    best = plan.best
    return {
        "format": FORMAT,
        "title": plan.title,
        "asked": list(plan.asked),
        "objective": plan.objective,
        "feasible": best is not None,
        "best": _row_record(best) if best is not None else None,
        "binding": list(plan.binding),
        "why_not": list(plan.why_not),
        "advice": list(plan.advice),
        "command": plan.command,
        "settings_yaml": plan.settings_yaml,
        "axes": {"x": asdict(plan.x), "y": asdict(plan.y)},
        "counts": dict(counts(plan)),
        # Of thousands that cannot be, the reasons; candidates.csv has each.
        "rejections": [asdict(one) for one in rejections(plan.rows)],
        "rows": [_row_record(row) for row in plan.rows if row.standing != "rejected"],
    }


def _row_record(row: Row) -> dict[str, object]:
    memory = None
    if row.memory is not None:
        memory = asdict(row.memory) | {"total": row.memory.total, "verdict": row.memory.verdict}
    return {
        "name": row.name,
        "standing": row.standing,
        "group": row.group,
        "settings": dict(row.settings),
        "figures": finite(row.figures),
        "measured": finite(row.measured),
        "trust": asdict(row.trust) if row.trust is not None else None,
        "memory_bytes": memory,
        "reason": row.reason,
    }


# ----------------------------------------------------------------------------------------- reading


def read_plan(source: Path, *, x: str = "", y: str = "") -> Plan:
    """From candidates.csv; what else a plan says is in plan.json, if that lies beside it."""
    path = source / CANDIDATES if source.is_dir() else source
    rows = list(read_rows(path))
    if not rows:
        raise ConfigError(f"{path} has no candidates; give the candidates.csv of a plan")
    figures = list(dict.fromkeys(name for row in rows for name in (*row.figures, *row.measured)))
    beside = _beside(path.with_name(RECORD))
    axes = [
        _axis(name, beside.get("axes", {}).get(one, {}), figures, f"--{one}")
        for one, name in (("x", x), ("y", y))
    ]
    return Plan(
        title=str(beside.get("title", path.stem)),
        asked=_texts(beside, "asked"),
        objective=str(beside.get("objective", "")),
        rows=rows,
        x=axes[0],
        y=axes[1],
        binding=_texts(beside, "binding"),
        why_not=_texts(beside, "why_not"),
        advice=_texts(beside, "advice"),
        command=str(beside.get("command", "")),
        settings_yaml=str(beside.get("settings_yaml", "")),
    )


def _texts(record: Mapping[str, Any], name: str) -> list[str]:
    found = record.get(name)
    return [str(one) for one in found] if isinstance(found, list) else []


def _beside(path: Path) -> Mapping[str, Any]:
    """A record that is not there, or is none, has nothing to say."""
    try:
        if path.stat().st_size > BYTES_MAX:
            return {}
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    known = isinstance(found, dict) and found.get("format") == FORMAT
    return found if known and isinstance(found.get("axes"), dict) else {}


def _axis(name: str, known: object, figures: Sequence[str], flag: str) -> Axis:
    """The one that is asked for, else the plan's own."""
    record = known if isinstance(known, dict) else {}
    own = str(record.get("figure", ""))
    if not (name or own):
        raise ConfigError(
            f"no plan.json lies beside the CSV, to say what to draw; give {flag}, one of: "
            f"{', '.join(figures)}"
        )
    figure = name or own
    if name and name not in figures:
        raise ConfigError(f"{flag} is {shown(figure)}; {nearest(figure, figures)}")
    if figure == own:
        limit = record.get("limit")
        better: Literal["low", "high"] = "high" if record.get("better") == "high" else "low"
        said = str(record.get("label", own))
        return Axis(own, said, better, limit if isinstance(limit, int | float) else None)
    more = any(word in figure for word in MORE)
    return Axis(figure, label(figure), "high" if more else "low")
