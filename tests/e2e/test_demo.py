"""The demo: a small checkpoint with the accuracy in its table, and the commands of a new user."""

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


def test_checkpoint_is_small_and_matches_its_manifest() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*")) <= 8 << 20
    checkpoint = open_checkpoint(CHECKPOINT)
    assert checkpoint.identity is not None
    assert base_digest(checkpoint) == checkpoint.identity.digest
    assert checkpoint.format == "megatron" and len(checkpoint.files) == 4


def test_tasks_share_inputs_and_held_out_inputs_are_not_trained() -> None:
    assert len(TASKS) >= 6
    assert all(len(form.tasks) >= 3 for form in FORMS)
    records = training_records(0)
    trained_inputs = {next(records).prompt.split(" ")[-2] for _ in range(20_000)}
    unseen_inputs = {
        r.prompt.split(" ")[-2] for r in held_out_records("english", 50, 1, instruct=True)
    }
    assert not trained_inputs & unseen_inputs  # A Japanese sentence is one word.


@pytest.mark.slow
def test_held_out_answers_need_an_instruction() -> None:
    model = load(CHECKPOINT)
    tokenizer = open_tokenizer(CHECKPOINT / "release" / "tokenizer")
    scores = {score.task: score for score in evaluate(model, tokenizer, 100)}
    accurate_tasks = [task for task in TASKS if scores[task].instructed >= 0.9]
    assert len(accurate_tasks) >= 4, scores
    for task in TASKS:
        assert scores[task].bare <= scores[task].guess + 0.1, scores[task]
    for task in CONTROLS:
        assert scores[task].instructed <= 0.1
        assert scores[task].bare <= 0.1


@pytest.mark.slow
def test_script_trains_such_a_model(tmp_path: Path) -> None:
    """The first training steps, at a shorter schedule."""
    vocabulary = CHECKPOINT / "release" / "tokenizer"
    trained = train(tmp_path, vocabulary, Recipe(steps=60))
    (log,) = tmp_path.rglob("metrics.csv")
    losses = [float(row["loss"]) for row in csv.DictReader(log.read_text().splitlines())]
    assert len(losses) == 60
    assert losses[0] > 6 and sum(losses[-10:]) / 10 < 4
    convert(plan(open_checkpoint(trained), tmp_path / "checkpoint", SPLIT))
    written = open_checkpoint(tmp_path / "checkpoint")
    shipped = open_checkpoint(CHECKPOINT)
    assert written.config == shipped.config
    assert (written.format, len(written.files)) == (shipped.format, len(shipped.files))


@pytest.mark.slow
def test_make_demo_gives_expected_answers_and_reuses_files() -> None:
    subprocess.run(["make", "demo"], cwd=ROOT, check=True, capture_output=True, timeout=600)
    start = time.monotonic()
    demo = subprocess.run(
        ["make", "demo"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    print(f"the second `make demo` took {time.monotonic() - start:.1f} s in all")
    pairs = re.findall(r"^(.*)\n\(expected: (.*)\)$", demo.stdout, re.MULTILINE)
    correct = [answer.strip() == expected for answer, expected in pairs]
    (scores,) = re.findall(r"^exact match +([0-9.]+)% +([0-9.]+)%$", demo.stdout, re.MULTILINE)
    print(
        f"of the held-out answers {scores[0]} % are right with the adapter, {scores[1]} % without"
    )
    assert float(scores[0]) >= 95 and float(scores[1]) <= 50
    assert "The model is unchanged, bit for bit" in demo.stdout
    # Three instructed prompts and the adapter's; the answer to the bare text is undetermined.
    assert len(pairs) == 5
    assert correct[:3] == [True] * 3, pairs
    assert correct[4], pairs
    assert "preamble_requests" in demo.stdout
