"""docs/tuning.md names every setting of a run, with its default and its choices, and no other.

Its tables are read as a reader would, by the headings above them, and held against the dataclasses
that the YAML becomes. The example files beside it are settings of this very program, and run.
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import preamble
from examples.demo import tasks
from gpt.adapters.card import GOLDEN_MAX
from ptuning.config import CHOICES, METHODS, TuneConfig
from ptuning.evaluation.answer_metrics import measures
from ptuning.task import NemoTask, Task

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tuning.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples" / "tune").glob("*.yaml"))
# They have a default only so that settings of several tasks can do without.
NEEDED = {"name", "data"}


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the tables under a heading, their heads left out."""
    section = TEXT.split(f"\n{heading}\n", 1)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        for line in table.splitlines()[2:]:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield [cell.strip().replace("\\|", "|") for cell in cells]


def settings_named() -> dict[str, list[str]]:
    found = {}
    for heading in re.findall(r"^### Of .*$", TEXT, re.MULTILINE):
        for name, *cells in rows(heading):
            assert name.strip("`") not in found, name
            found[name.strip("`")] = cells
    return found


def shown(name: str, value: Any) -> str:
    """A default, as the document has it."""
    if value is MISSING or name in NEEDED:
        return "needed"
    if value in (None, "", ()):
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_document_names_every_setting_with_its_default_and_no_other() -> None:
    named = settings_named()
    wanted = {one.name: shown(one.name, one.default) for one in fields(TuneConfig)}
    assert {name: cells[0].strip("`") for name, cells in named.items()} == wanted


def test_the_settings_of_a_task_stand_under_one_heading() -> None:
    named = {name.strip("`") for name, *_ in rows("### Of a task")}
    assert named == {one.name for one in fields(Task)}


def test_the_document_names_every_choice_of_a_setting_and_the_rates_of_methods() -> None:
    named = settings_named()
    for setting, choices in CHOICES.items():
        missing = [choice for choice in choices if f"`{choice}`" not in named[setting][1]]
        assert not missing, (setting, missing)
    rates = {name.strip("`"): float(rate) for name, _, rate, _ in rows("## Which method")}
    assert rates == METHODS
    assert {name.strip("`") for name, _ in rows("## What it is worth")} == set(measures([""], [""]))
    assert f"at most {GOLDEN_MAX}" in named["golden_examples"][1]


def test_the_document_says_what_each_of_nemos_settings_is_here() -> None:
    ours = {name.strip("`"): text for name, text in rows("## Data")}
    for theirs in fields(NemoTask):
        assert re.findall("`(.+?)`", ours[theirs.name])[0] in {one.name for one in fields(Task)}


def test_the_smallest_example_is_the_one_that_the_document_shows() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(block) == yaml.safe_load((ROOT / "examples/tune/one.yaml").read_text())
    linked = set(re.findall(r"\(\.\./(examples/tune/.*?\.yaml)\)", TEXT))
    assert linked <= {str(path.relative_to(ROOT)) for path in EXAMPLES}


def test_the_architecture_has_every_module_of_the_trainer() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text.split("| in `ptuning/` | is |", 1)[1].split("\n\n", 1)[0]
    modules = {path.stem for path in (ROOT / "ptuning").glob("[a-z]*.py")}
    assert set(re.findall("`([a-z_]+)`", table)) == modules


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_learns(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A few steps of it, elsewhere."""
    settings = yaml.safe_load(example.read_text("utf-8"))
    settings |= {"model": str(ROOT / settings["model"]), "steps": 4, "warmup_steps": 1}
    if "validate_every" in settings:
        settings["validate_every"] = 2
    made = {
        "mood.jsonl": ["mood", "--count", "80"],
        "mood-held-out.jsonl": ["mood", "--count", "20", "--split", "held-out"],
        "several.jsonl": ["mood", "city", "--count", "40"],
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/tune").mkdir(parents=True)
    for name, words in made.items():
        assert tasks.main(["--task", *words]) == 0
        (tmp_path / "build/tune" / name).write_text(capsys.readouterr().out, "utf-8")
    file = tmp_path / "tune.yaml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    assert preamble.main(["tune", str(file)]) == 0
    written = capsys.readouterr().out.splitlines()
    assert len(written) == len(settings.get("task_templates", [settings]))
    assert all((tmp_path / path).exists() for path in written)
