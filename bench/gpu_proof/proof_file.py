"""Proof file: the machine's facts and the stages of a proof, as JSON and as a Markdown table.

The file is replaced atomically after every change, so a run that is killed leaves a valid file. A
further run of the same commit in the same folder replaces only the stages that it runs. A
stage has its status from the beginning: before it runs it counts as skipped, and while it runs as
failed. The module does not know what a stage measures, and does not import torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from gpt.errors import ConfigError
from gpt.files.atomic_files import write_atomic

FORMAT_VERSION = 1
TABLE_FIGURE = "table"  # A figure of this name has "columns" and "lines" of texts.
FACTS_STAGE = "facts"  # The figures of this stage are the facts of the machine.
JSON_NAME = "gpu_proof.json"
TABLE_NAME = "gpu_proof.md"
# Facts and their values with which a file proves nothing about GPUs.
REHEARSAL_FACTS = {"device": "cpu", "collectives": "gloo"}
CELL_CHARACTERS_MAX = 300

Status = Literal["passed", "failed", "skipped", "timed out"]


@dataclass
class StageResult:
    """The status of a stage, with the reason if it did not pass, its seconds and its figures."""

    name: str
    title: str
    status: Status = "skipped"
    reason: str = "the run ended before this stage"
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProofFile:
    """The proof of one run; `write` replaces both files of `folder`."""

    folder: Path
    commit: str
    begun: str
    stages: list[StageResult] = field(default_factory=list)

    @classmethod
    def continued(cls, folder: Path, commit: str, device: str, begun: str) -> Self:
        """Return a proof with the stages of an earlier run in this folder.

        Runs belong together if they have the same commit, without other changes, and ran on the
        same type of device (cuda, cpu).
        """
        proof = cls(folder, commit, begun)
        try:
            document = read_proof(proof.path)
        except ConfigError:
            return proof
        earlier_device = str(document["facts"].get("device")).partition(":")[0]
        if (document["commit"], earlier_device) == (commit, device) and _is_exact(commit):
            proof.begun = document["begun"]
            proof.stages = [StageResult(**stage) for stage in document["stages"]]
        return proof

    @property
    def path(self) -> Path:
        return self.folder / JSON_NAME

    def add_stages(self, stages: Sequence[StageResult]) -> None:
        """Add stages that will run. They replace the stages of the same names."""
        names = {stage.name for stage in stages}
        self.stages = [*(stage for stage in self.stages if stage.name not in names), *stages]

    @property
    def document(self) -> dict[str, Any]:
        facts = {stage.name: stage.figures for stage in self.stages}.get(FACTS_STAGE, {})
        return {
            "version": FORMAT_VERSION,
            "commit": self.commit,
            "begun": self.begun,
            "facts": facts,
            "stages": [asdict(stage) for stage in self.stages],
        }

    def write(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            document = self.document
            text = json.dumps(document, indent=1, allow_nan=False) + "\n"
            write_atomic(self.path, text.encode())
            write_atomic(self.folder / TABLE_NAME, format_tables(document).encode())
        except OSError as error:
            raise ConfigError(
                f"cannot write the proof to {self.folder} ({error.strerror}); "
                "choose a writable folder with --out"
            ) from None


def read_proof(path: Path) -> dict[str, Any]:
    """Read a proof file; raise ConfigError if it is none, or of another format version."""
    try:
        document = json.loads(path.read_text("utf-8"))
        version = document["version"]
        if version == FORMAT_VERSION:
            _ = document["commit"], document["begun"], document["facts"].items()
            _ = [StageResult(**stage) for stage in document["stages"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a proof file ({error!r})") from None
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {version}; only version {FORMAT_VERSION} is supported"
        )
    return dict(document)


def check_source(document: Mapping[str, Any]) -> None:
    """Raise ConfigError if a document must not be generated from this proof."""
    facts, commit = document["facts"], str(document["commit"])
    for name, rehearsal_value in REHEARSAL_FACTS.items():
        if facts.get(name) is None:
            raise ConfigError(f"the proof has no fact {name!r}; the stage {FACTS_STAGE!r} failed")
        if str(facts[name]).partition(":")[0] == rehearsal_value:
            raise ConfigError(
                f"the proof is a rehearsal: its {name} is {facts[name]}; run it on a GPU"
            )
    if not _is_exact(commit):
        raise ConfigError(
            f"the commit of the proof is {commit!r}; run it in a checkout without changes, or name "
            "the commit with --commit"
        )


def _is_exact(commit: str) -> bool:
    """Whether the tree of the proof was this commit, without other changes."""
    return commit != "none" and not commit.endswith("+")


def format_tables(document: Mapping[str, Any]) -> str:
    """Return the stages, the target rows of all stages, and the stages' tables, as Markdown."""
    lines = ["| stage | status | seconds | figures |", "|---|---|---|---|"]
    rows: list[Mapping[str, Any]] = []
    for stage in document["stages"]:
        rows += stage["figures"].get("rows", {}).values()
        status = stage["status"] + (f": {stage['reason']}" if stage["reason"] else "")
        cells = [stage["title"], status, f"{stage['seconds']:.0f}", _figures_text(stage["figures"])]
        lines.append(_table_line(cells))
    if rows:
        lines += ["", "| row | figure | target | verdict |", "|---|---|---|---|"]
    for row in rows:
        sign = "≤" if row["at_most"] else "≥"
        target = f"{sign} {row['target']:g} {row['unit']}"
        figure = row.get("told") or row.get("missing", "")
        cells = [row["what"], figure, target, row["verdict"]]
        lines.append(_table_line(cells))
    for stage in document["stages"]:
        if (table := stage["figures"].get(TABLE_FIGURE)) is not None:
            columns = table["columns"]
            lines += [
                "",
                f"{stage['title']}:",
                "",
                _table_line(columns),
                "|---" * len(columns) + "|",
            ]
            lines += map(_table_line, table["lines"])
    return "\n".join(lines) + "\n"


def _table_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _figures_text(figures: Mapping[str, Any]) -> str:
    """Return the plain figures; rows have a table of their own, and lists are only in the JSON."""
    plain = {name: value for name, value in figures.items() if isinstance(value, str | int | float)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in plain.items()
    )


def _cell(text: str) -> str:
    line = " ".join(text.replace("|", "\\|").split())
    return line if len(line) <= CELL_CHARACTERS_MAX else line[: CELL_CHARACTERS_MAX - 1] + "…"
