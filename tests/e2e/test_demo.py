"""The demo: small enough to ship, as good as its table says, and it runs as a newcomer runs it."""

import csv
import re
import subprocess
import time
from pathlib import Path

import pytest

from checkpoints_tools.conversion.convert import convert, plan
from examples.demo.evaluate import evaluate
from examples.demo.tasks import CONTROLS, FORMS, TASKS, held_out_records, training_records
from examples.demo.train import SPLIT, Recipe, train
from gpt.checkpoint.digest import base_digest
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load
from gpt.tokenizers.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
CHECKPOINT = DEMO / "checkpoint"


def test_the_checkpoint_is_small_and_the_one_that_its_manifest_names() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*")) <= 8 << 20
    checkpoint = open_checkpoint(CHECKPOINT)
    assert checkpoint.identity is not None
    assert base_digest(checkpoint) == checkpoint.identity.digest
    assert checkpoint.format == "megatron" and len(checkpoint.files) == 4


def test_tasks_share_their_forms_and_no_held_out_input_is_taught() -> None:
    assert len(TASKS) >= 6
    assert all(len(form.tasks) >= 3 for form in FORMS)
    records = training_records(0)
    taught = {next(records).prompt.split(" ")[-2] for _ in range(20_000)}
    asked = {r.prompt.split(" ")[-2] for r in held_out_records("english", 50, 1, instruct=True)}
    assert not taught & asked  # A Japanese sentence is one word.


@pytest.mark.slow
def test_held_out_answers_are_right_with_an_instruction_and_guesses_without() -> None:
    model, tokenizer = load(CHECKPOINT), open_tokenizer(CHECKPOINT / "release" / "tokenizer")
    scores = {score.task: score for score in evaluate(model, tokenizer, 100)}
    good = [task for task in TASKS if scores[task].instructed >= 0.9]
    assert len(good) >= 4, scores
    for task in TASKS:
        assert scores[task].bare <= scores[task].guess + 0.1, scores[task]
    for task in CONTROLS:
        assert scores[task].instructed <= 0.1
        assert scores[task].bare <= 0.1


@pytest.mark.slow
def test_the_script_makes_such_a_model_by_the_trainer(tmp_path: Path) -> None:
    """The first of its steps, at a shorter schedule."""
    vocabulary = CHECKPOINT / "release" / "tokenizer"
    trained = train(tmp_path, vocabulary, Recipe(steps=60))
    (log,) = tmp_path.rglob("metrics.csv")
    losses = [float(row["loss"]) for row in csv.DictReader(log.read_text().splitlines())]
    assert len(losses) == 60
    assert losses[0] > 6 and sum(losses[-10:]) / 10 < 4
    convert(plan(open_checkpoint(trained), tmp_path / "checkpoint", SPLIT))
    made, ours = open_checkpoint(tmp_path / "checkpoint"), open_checkpoint(CHECKPOINT)
    assert made.config == ours.config
    assert (made.format, len(made.files)) == (ours.format, len(ours.files))


@pytest.mark.slow
def test_make_demo_answers_as_expected_and_a_second_run_starts_at_once() -> None:
    subprocess.run(["make", "demo"], cwd=ROOT, check=True, capture_output=True, timeout=600)
    start = time.monotonic()
    demo = subprocess.run(
        ["make", "demo"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    print(f"the second `make demo` took {time.monotonic() - start:.1f} s in all")
    pairs = re.findall(r"^(.*)\n\(expected: (.*)\)$", demo.stdout, re.MULTILINE)
    right = [answer.strip() == expected for answer, expected in pairs]
    (worth,) = re.findall(r"^exact match +([0-9.]+)% +([0-9.]+)%$", demo.stdout, re.MULTILINE)
    print(f"of the held-out answers {worth[0]} % are right with the adapter, {worth[1]} % without")
    assert float(worth[0]) >= 95 and float(worth[1]) <= 50
    assert "The model is unchanged, bit for bit" in demo.stdout
    # Three instructed prompts and the adapter's; the bare text before it is anybody's guess.
    assert len(pairs) == 5
    assert right[:3] == [True] * 3, pairs
    assert right[4], pairs
    assert "preamble_requests" in demo.stdout
