"""Training loop: from a YAML file to a served adapter, resumed runs, and refused settings."""

import csv
import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpt
from clients.client import Options
from gpt.adapters.adapter_file import open_adapter
from gpt.adapters.prompt_encoder_networks import run_encoder
from gpt.checkpoint.digest import identify
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.generation.generate import generate
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from gpt.settings import read_yaml
from gpt.tokenizers.tokenizer import open_tokenizer
from ptuning.__main__ import main
from ptuning.activity import LOADING
from ptuning.config import TuneConfig
from ptuning.reporting.observer import NullObserver
from ptuning.run.preparation import prepare
from ptuning.run.resumed_settings import resumed_settings
from ptuning.run.training_loop import TrainingLoop, load_trainer
from ptuning.run.training_state import common_state, latest_state, save_state
from ptuning.run.validation import Validator
from ptuning.run_facts import NO_PROMPT, StepMetrics, Validation
from tests.support.ranks import ranks
from tests.support.servers import ROOT, WAIT_S, command, serving, write_checkpoint
from tests.support.tuning_settings import (
    ANSWER,
    LossRecorder,
    records,
    write_settings,
    write_validation,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ptuning"))


def test_adapter_is_trained_written_and_served(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity_before = identify(open_checkpoint(checkpoint))

    assert main(["tune", str(write_settings(tmp_path, checkpoint))]) == 0

    written = Path(capsys.readouterr().out.strip())
    assert written == tmp_path / "adapters" / "answer@1.safetensors"
    assert identify(open_checkpoint(checkpoint)) == identity_before
    adapter = open_adapter(written)
    assert adapter.card.base_digest == identity_before.digest
    assert adapter.card.metrics["loss"] < 0.1 * adapter.card.metrics["first_loss"]
    model = gpt.load(checkpoint, dtype="float64")
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    rule = SamplingParams(max_new_tokens=20, stop_token_ids=tokenizer.stop_ids)
    settings = tmp_path / "serve.yaml"
    with (
        serving(checkpoint, settings, adapters=str(written.parent)) as server,
        server.client() as client,
    ):
        correct = 0
        for prompt in (record["prompt"] for record in records(9)):
            ids = [*range(640, 656), *tokenizer.encode(prompt)]
            expected = generate(model, [ids], rule, adapter_table=adapter.table)[0]
            completion = client.generate({"prompt": prompt}, Options(adapter="answer"))
            assert completion.token_ids == expected.token_ids
            correct += completion.text == ANSWER and completion.finish_reason == "stop"
            without_adapter = client.generate(prompt, Options(max_new_tokens=20))
            assert without_adapter.text != ANSWER
        assert correct >= 6

    assert main(["tune", str(write_settings(tmp_path, checkpoint, steps=1))]) == 0
    assert capsys.readouterr().out.strip().endswith("answer@2.safetensors")


LONG = {"prompt": "a", "completion": "b c d e f g h i j k"}
TWO_TASKS = "\n".join(
    json.dumps({"prompt": "a", "completion": "b", "taskname": name}) for name in "ab"
)
INVALID: dict[str, tuple[dict[str, object], str | None, str]] = {
    "unknown key": ({"learning_rte": 1}, None, "did you mean 'learning_rate'"),
    "wrong type": ({"steps": "many"}, None, "steps is 'many'; it must be a whole number"),
    "out of range": ({"steps": 0}, None, "steps is 0"),
    "no tokens": ({"tokens_max": 0}, None, "tokens_max is 0; it must be at least 1 and"),
    "no answer": ({"max_new_tokens": 0}, None, "max_new_tokens is 0; it must be at least 1 and"),
    "no rate": ({"learning_rate": float("inf")}, None, "learning_rate is inf; it must be more"),
    "a huge rate": (
        {"learning_rate": 1e30},
        None,
        "learning_rate is 1e+30; it must be more than 0 and at most 10",
    ),
    "a rate that is no number": ({"learning_rate": float("nan")}, None, "learning_rate is nan; it"),
    "a product of rates": (
        {"learning_rate": 1.0, "weight_decay": 1.5},
        None,
        "learning_rate x weight_decay is 1.5; it must be less than 1",
    ),
    "many steps": ({"steps": 2**62}, None, "and at most 100,000,000"),
    "a negative seed": ({"seed": -1}, None, "seed is -1; it must be at least 0 and"),
    "a large seed": ({"seed": 2**63}, None, "seed is 9223372036854775808; it must fit into 64"),
    "a large decay": (
        {"weight_decay": 1e30},
        None,
        "weight_decay is 1e+30; it must be at least 0 and at most 10",
    ),
    "no measuring": (
        {"measure": "none", "monitor": "f1"},
        None,
        "monitor is f1, but measure is none, so no answers are generated",
    ),
    "no field at the end": (
        {"template": "<|VIRTUAL_PROMPT_0|>{prompt}."},
        None,
        "answer_field is missing, and the template",
    ),
    "too many rows": (
        {"virtual_tokens": 10**7},
        None,
        "virtual_tokens is 10000000; the maximum for this",
    ),
    "an empty stop": (
        {"stop": ["a", ""]},
        None,
        "a stop string of 0 bytes; each stop string must have 1 to 256",
    ),
    "a long stop": ({"stop": ["x" * 257]}, None, "a stop string of 257 bytes"),
    "half a character": ({"task": "\ud800"}, None, "a lone surrogate"),
    "half a text": ({"initial_text": "\ud800"}, None, "'initial_text' has a text with"),
    "half a path": ({"data": "\ud800"}, None, "'data' has a text with a NUL"),
    "an end in a path": ({"model": "a\0b"}, None, "'model' has a text with a NUL"),
    "no output": ({"output": ""}, None, "output is ''; it must be a path"),
    "a file above": ({"output": "README.md/a"}, None, "cannot be written to: Not a directory"),
    "a closed directory": (
        {"output": "/proc/self"},
        None,
        "output: /proc/self cannot be written to",
    ),
    "a device": ({"device": "nope"}, None, "device 'nope' is unavailable"),
    "no device": ({"device": "meta"}, None, "device is 'meta'; choose one of"),
    "a device that is absent": ({"device": "cuda:99"}, None, "device 'cuda:99' is unavailable"),
    "splits": ({"splits": [1, 2]}, None, "must sum to virtual_tokens"),
    "no directory": ({"output": "README.md"}, None, "README.md is not a directory"),
    "a version": ({"name": "a@2"}, None, "remove the version"),
    "a path": ({"name": "../a"}, None, "not an adapter name"),
    "no data": ({"data": "nothing.jsonl"}, None, "nothing.jsonl cannot be read"),
    "empty data": ({}, "", "no usable example"),
    "not JSON": ({}, '{"prompt": "a", "completion": "b"}\n{', "line 2: the line is not JSON"),
    "no object": ({}, "[1]", "line 1: the JSON is of the type list"),
    "a missing field": ({}, '{"prompt": "a"}', "line 1: the record has no field 'completion'"),
    "a deep line": ({}, "[" * 100_000, "line 1: the JSON is nested too deeply"),
    "a long line": ({}, json.dumps({"prompt": ["a" * 10**6] * 9}), "'prompt' is ['aaa"),
    "half a line": ({}, '{"prompt": "\\ud800", "completion": "b"}', "no usable example"),
    "a number": ({}, '{"prompt": "a", "completion": 3}', "'completion' is 3"),
    "too long": ({"tokens_max": 6}, '{"prompt": "a", "completion": "b c d e"}', "over the limit"),
    "a long answer": ({"tokens_max": 20}, json.dumps(LONG), "line 1: prompt and answer have"),
    "how long it is": ({"tokens_max": 20}, json.dumps(LONG), "the answer alone has"),
    "two tasks": ({}, TWO_TASKS, "line 2: the taskname is 'b', but it is 'a' in earlier records"),
    "no validation": ({"validation": "none.csv"}, None, "none.csv cannot be read"),
    "a key of NeMo": ({"task_templates": [{"template": "a"}]}, None, "did you mean 'prompt_temp"),
    "a dtype": ({"dtype": "float8"}, None, "dtype is 'float8'"),
    "a template": ({"template": "{prompt}{completion}"}, None, "the template has the markers"),
    "no model": ({"model": "nowhere"}, None, "does not exist"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_settings_and_records_are_errors_and_write_nothing(
    case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, lines, message_words = INVALID[case]
    file = write_settings(tmp_path, checkpoint, **changes)
    if lines is not None:
        (tmp_path / "examples.jsonl").write_text(lines)

    for extra in ([], ["--check"]):
        assert main(["tune", str(file), *extra]) == 1

        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert len(err) < 600
        assert message_words in err
    assert list((tmp_path / "adapters").iterdir()) == []


def test_yaml_number_without_a_dot_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text("model: m\ndata: d\nname: n\nlearning_rate: 1e-3\n")
    assert TuneConfig.from_yaml(str(file)).training_config.learning_rate == 0.001


def test_check_shows_examples_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(write_settings(tmp_path, checkpoint)), "--check"]) == 0

    output = capsys.readouterr().out
    assert "prompt (17 tokens): '<16 virtual>the'" in output
    assert f"{ANSWER!r}" in output
    assert "40 examples" in output
    assert list((tmp_path / "adapters").iterdir()) == []


@pytest.mark.slow
def test_interrupted_run_writes_no_adapter_and_resumes(checkpoint: Path, tmp_path: Path) -> None:
    file = write_settings(tmp_path, checkpoint, steps=100_000)
    process = subprocess.Popen(
        command("tune", file),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "tuning" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "the same command resumes from there" in err
    assert list((tmp_path / "adapters").iterdir()) == []
    (state,) = (tmp_path / "runs" / "answer" / "1").glob("state-*")
    assert latest_state(state.parent) is not None


def losses(file: Path, *, ends_after: int | None = None) -> list[float]:
    """Losses of a run in this process; the run may resume an earlier one."""
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    audience = LossRecorder(ends_after)
    with suppress(EOFError):
        TrainingLoop(prepared, load_trainer(prepared, Mesh.single()), audience).run()
    return audience.losses


@pytest.mark.parametrize("method", ["prompt-tuning", "lstm", "prefix"])
def test_killed_run_resumes_to_the_same_losses_and_adapter(
    method: str, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"steps": 12, "save_every": 4, "method": method, "dtype": None}
    if method == "lstm":
        settings |= {"encoder_dropout": 0.2, "learning_rate": 0.01}
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    uninterrupted_losses = losses(write_settings(tmp_path / "whole", checkpoint, **settings))
    file = write_settings(tmp_path / "halves", checkpoint, **settings)
    first_losses = losses(file, ends_after=7)
    second_losses = losses(file, ends_after=11)
    third = losses(file)
    assert first_losses == uninterrupted_losses[:6]
    assert second_losses == uninterrupted_losses[4:10]
    assert third == uninterrupted_losses[8:]
    tables = [
        open_adapter(tmp_path / name / "adapters" / "answer@1.safetensors").table
        for name in ("whole", "halves")
    ]
    assert torch.equal(*tables)


class FolderRemover(LossRecorder):
    """An observer that removes the run's folders during the run."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(None)
        self._folders = folders

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        if metrics.step == 2:
            for folder in self._folders:
                shutil.rmtree(folder)


def test_run_recreates_removed_folders(checkpoint: Path, tmp_path: Path) -> None:
    file = write_settings(tmp_path, checkpoint, steps=4, save_every=1, method="mlp")
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    audience = FolderRemover([tmp_path / "runs", tmp_path / "adapters"])

    TrainingLoop(prepared, load_trainer(prepared, Mesh.single()), audience).run()

    assert open_adapter(tmp_path / "adapters" / "answer@1.safetensors").card.name == "answer"
    assert (tmp_path / "runs" / "answer" / "1" / "encoder.safetensors").exists()


CHANGED: dict[str, tuple[dict[str, object], str]] = {
    "a setting": (
        {"learning_rate": 0.25},
        "had learning_rate 0.5, now learning_rate is 0.25; set learning_rate back",
    ),
    "the records": ({"template": "<|VIRTUAL_PROMPT_0|>{prompt} {completion}"}, "had template"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_run_does_not_resume_with_changed_inputs(
    case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message_words = CHANGED[case]
    losses(write_settings(tmp_path, checkpoint, steps=3, save_every=1), ends_after=2)
    file = write_settings(tmp_path, checkpoint, steps=3, save_every=1, **changes)

    assert main(["tune", str(file)]) == 1
    err = capsys.readouterr().err
    assert message_words in err
    assert err.count("\n") == 1

    assert main(["tune", str(file), "--restart"]) == 0


def test_settings_that_the_file_does_not_set_keep_the_values_of_the_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same happens if another release of Preamble has other defaults."""
    first = losses(write_settings(tmp_path, checkpoint, steps=4, save_every=1), ends_after=3)
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    expected = losses(write_settings(uninterrupted, checkpoint, steps=4))
    (state,) = (tmp_path / "runs" / "answer" / "1").glob("state-*")
    facts = json.loads((state / "facts.json").read_text())
    # `seed` is missing, as if it was added after the run began; `beta1` had another default.
    del facts["origin"]["settings"]["seed"]
    facts["origin"]["settings"]["beta1"] = 0.8
    (state / "facts.json").write_text(json.dumps(facts))

    assert main(["tune", str(write_settings(tmp_path, checkpoint, steps=4))]) == 0

    assert "keeps settings that the file does not set: beta1: 0.8" in capsys.readouterr().err
    with (tmp_path / "runs" / "answer" / "1" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["3", "4"]
    assert first == expected[:2]


class LossPerValidation(LossRecorder):
    """Records the held-out loss by step, and the length limit of the answers."""

    def __init__(self, ends_after: int | None) -> None:
        super().__init__(ends_after)
        self.validation_losses: dict[int, float | None] = {}
        self.answer_tokens_max = 0

    def on_validation(
        self, validation: Validation, measuring: Validator, best_step: int | None
    ) -> None:
        self.validation_losses[validation.step] = validation.loss
        self.answer_tokens_max = measuring.tasks["answer"].answer_tokens_max


def validation_losses(file: Path, *, ends_after: int | None = None) -> LossPerValidation:
    config = TuneConfig.from_yaml(str(file))
    prepared = prepare(config.with_fields(**resumed_settings(config, read_yaml(file))))
    recorder = LossPerValidation(ends_after)
    with suppress(EOFError):
        TrainingLoop(prepared, load_trainer(prepared, Mesh.single()), recorder).run()
    return recorder


def test_a_run_of_version_0_1_keeps_its_validation_records(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It evaluated the first records; its best score is not comparable with scores of others."""
    settings = {"steps": 8, "save_every": 1, "patience": 6}
    file = write_settings(tmp_path, checkpoint, **settings, **write_validation(tmp_path, 9))
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    first_records = write_validation(uninterrupted, 4)
    expected = validation_losses(
        write_settings(uninterrupted, checkpoint, **settings, **first_records)
    ).validation_losses
    sampled = validation_losses(file, ends_after=3).validation_losses
    assert sampled[2] != expected[2]
    (state,) = (tmp_path / "runs" / "answer" / "1").glob("state-*")
    facts = json.loads((state / "facts.json").read_text())
    del facts["origin"]["settings"]["monitor"]
    facts["origin"]["settings"]["measure"] = "loss"
    (state / "facts.json").write_text(json.dumps(facts))

    resumed = validation_losses(file, ends_after=5)
    resumed_again = validation_losses(file)

    assert resumed.validation_losses == {4: expected[4]}
    assert resumed_again.validation_losses == {6: expected[6], 8: expected[8]}
    assert resumed_again.answer_tokens_max == 20  # `max_new_tokens`, as in version 0.1.


def test_changed_training_records_refuse_the_resume(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, steps=3, save_every=1)
    losses(file, ends_after=2)
    with (tmp_path / "examples.jsonl").open("a") as records_file:
        records_file.write('\n{"prompt": "the fox", "completion": "b"}\n')
    assert main(["tune", str(file)]) == 1
    assert "the records have changed since" in capsys.readouterr().err


def find_state(rank: int, folders: list[Path]) -> str:
    try:
        state = common_state(folders[rank], Mesh.create(2, 1))
    except ConfigError as error:
        return str(error)
    return "nothing" if state is None else str(state.facts["step"])


def test_ranks_with_different_states_all_end(tmp_path: Path) -> None:
    with_state = tmp_path / "here"
    without_state = tmp_path / "there"
    for folder in (with_state, without_state):
        folder.mkdir()
    assert ranks(2, find_state, [with_state, without_state]) == ["nothing", "nothing"]
    assert save_state(with_state, Mesh.single(), 4, {}, {}) is None
    assert ranks(2, find_state, [with_state, with_state]) == ["4", "4"]
    for messages in ranks(2, find_state, [with_state, without_state]):
        assert "not every rank finds the state of step 4" in messages


def test_changed_validation_records_refuse_the_resume(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation_settings = write_validation(tmp_path, 4)
    file = write_settings(tmp_path, checkpoint, steps=3, save_every=1, **validation_settings)
    losses(file, ends_after=2)
    write_validation(tmp_path, 3)
    assert main(["tune", str(file)]) == 1
    assert "the records have changed since" in capsys.readouterr().err


def test_full_run_writes_and_evaluates_the_last_step(checkpoint: Path, tmp_path: Path) -> None:
    changes = {"method": "full", "steps": 4, "learning_rate": 1e-5, "max_new_tokens": 2}
    file = write_settings(tmp_path, checkpoint, **changes, **write_validation(tmp_path, 4))
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    audience = ValidationRecorder(None)
    run_outcome = TrainingLoop(prepared, load_trainer(prepared, Mesh.single()), audience).run()
    assert run_outcome.best_step is None
    assert audience.validations == [(0, None), (2, None), (4, None), (4, None)]


def test_written_encoder_produces_the_written_adapter(checkpoint: Path, tmp_path: Path) -> None:
    """The encoder of the best step is written, not the last one; also after a resume."""
    other_record = {"prompt": "the quick", "completion": " fox jumps over the lazy brown fox"}
    changes = write_validation(tmp_path, 1) | {"method": "mlp", "steps": 12, "save_every": 1}
    changes |= {"validate_every": 4, "warmup_steps": 0, "schedule": "constant", "max_new_tokens": 1}
    (tmp_path / "validation.jsonl").write_text(json.dumps(other_record))
    file = write_settings(tmp_path, checkpoint, **changes)
    losses(file, ends_after=7)
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    trainer = load_trainer(prepared, Mesh.single())
    run_outcome = TrainingLoop(prepared, trainer, NullObserver()).run()
    assert run_outcome.best_step == 4  # At this rate the loss rises afterwards.
    written = load_file(run_outcome.folder / "encoder.safetensors")
    network = {
        name.removeprefix("network."): tensor for name, tensor in written.items() if name != "rows"
    }
    table = open_adapter(run_outcome.paths[0]).table
    torch.testing.assert_close(run_encoder(written["rows"], network).float(), table)
    now = trainer.current_table()
    assert now is not None and not torch.allclose(now.float(), table)


def finish_without_removing_the_state(file: Path) -> Path:
    """Run to the end, but keep the state, as if the run was killed after it wrote its adapter."""
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    trainer = load_trainer(prepared, Mesh.single())
    loop = TrainingLoop(prepared, trainer, NullObserver(), keeps_final_state=True)
    (path,) = loop.run().paths
    return path


@pytest.mark.parametrize("rounding", [False, True])
def test_run_that_was_killed_after_it_wrote_its_adapter_writes_no_second_version(
    rounding: bool, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, steps=3, **write_validation(tmp_path, 3))
    path = finish_without_removing_the_state(file)
    digest = open_adapter(path).digest
    # Another run publishes the next version before the killed run resumes.
    other_settings = {"run": str(tmp_path / "other"), "seed": 5}
    assert main(["tune", str(write_settings(tmp_path, checkpoint, steps=1, **other_settings))]) == 0
    write_settings(tmp_path, checkpoint, steps=3, **write_validation(tmp_path, 3))
    capsys.readouterr()
    if rounding:
        # The resumed run computes another table, as GPUs may.
        (state_file,) = (tmp_path / "runs" / "answer" / "1").glob("state-*/*.safetensors")
        tensors = {name: value + 1e-6 for name, value in load_file(state_file).items()}
        save_file(tensors, state_file)

    assert main(["tune", str(file)]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == str(path) and "resuming from step 3 of 3" in output.err
    assert open_adapter(path).digest == digest
    names = ["answer@1.safetensors", "answer@2.safetensors"]
    assert sorted(adapter.name for adapter in path.parent.iterdir()) == names
    assert latest_state(tmp_path / "runs" / "answer" / "1") is None

    assert main(["tune", str(file)]) == 0
    assert capsys.readouterr().out.strip().endswith("answer@3.safetensors")


def test_measuring_uses_a_fixed_sample_and_says_its_size(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**write_validation(tmp_path, 9), "steps": 2}
    for measure, line, evaluated in (
        ("sample", "measuring on a sample of 4 of 9 validation records, answers of at most", 4),
        ("first", "measuring on the first 4 of 9 validation records, answers of at most 20 ", 4),
        ("all", "measuring on all 9 validation records", 9),
        ("none", "computing only the loss on a sample of 4 of 9 validation records\n", 4),
    ):
        if measure == "all":
            del changes["validation_examples"]
        file = write_settings(tmp_path, checkpoint, **{**changes, "measure": measure})
        assert main(["tune", str(file), "--json", "--restart"]) == 0
        output = capsys.readouterr()
        (task,) = json.loads(output.out)["tasks"]
        assert line in output.err
        assert (task["validation_examples"], task["validation_records"]) == (evaluated, 9)
        assert set(task["measures"]) == (set() if measure == "none" else {"no prompt", "adapter"})
        changes["validation_examples"] = 4


def test_answers_end_at_the_longest_expected_answer_and_a_margin(
    checkpoint: Path, tmp_path: Path
) -> None:
    changes = {**write_validation(tmp_path, 3), "max_new_tokens": None}
    prepared = prepare(TuneConfig.from_yaml(str(write_settings(tmp_path, checkpoint, **changes))))
    (task,) = prepared.tasks
    longest = max(len(example.ids) - example.answer_start for example in task.examples.examples)
    validator = Validator(prepared, load_trainer(prepared, Mesh.single()))
    validator.measure_baselines()
    (measured,) = validator.tasks.values()
    assert measured.answer_tokens_max == longest + 4
    assert all(len(answer.token_ids) <= longest + 4 for answer in measured.answers[NO_PROMPT])


def test_measuring_reports_its_progress(checkpoint: Path, tmp_path: Path) -> None:
    class ActivityRecorder(NullObserver):
        def __init__(self) -> None:
            self.ends: list[tuple[str, int]] = []

        def on_activity(self, activity: str, completed: int, total: int) -> None:
            if completed == total:
                self.ends.append((activity, total))

    file = write_settings(tmp_path, checkpoint, steps=2, **write_validation(tmp_path, 3))
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    recorder = ActivityRecorder()
    trainer = load_trainer(prepared, Mesh.single(), recorder.on_activity)
    TrainingLoop(prepared, trainer, recorder).run()
    assert recorder.ends[0][0] == LOADING
    loss = ("computing the held-out loss", 3)
    assert list(dict.fromkeys(recorder.ends[1:])) == [
        ("measuring without the adapter", 3),
        loss,
        ("measuring with the adapter", 3),
    ]
    assert recorder.ends.count(loss) == 2  # Before step 1 and after step 2; not again at the end.


def test_adapter_with_a_loss_that_is_not_finite_is_not_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    class RowOverflow(NullObserver):
        def on_step(self, metrics: StepMetrics) -> None:
            with torch.no_grad():
                for parameter in trainer.encoder.parameters():  # type: ignore[union-attr]
                    parameter.fill_(torch.nan)

    file = write_settings(tmp_path, checkpoint, steps=1, **write_validation(tmp_path, 2))
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    trainer = load_trainer(prepared, Mesh.single())
    with pytest.raises(ConfigError, match="the held-out loss is nan at step 1, so nothing was wr"):
        TrainingLoop(prepared, trainer, RowOverflow()).run()
    assert list((tmp_path / "adapters").iterdir()) == []


class ValidationRecorder(LossRecorder):
    """Records the validated steps and the best step at each validation."""

    def __init__(self, ends_after: int | None) -> None:
        super().__init__(ends_after)
        self.validations: list[tuple[int, int | None]] = []

    def on_validation(
        self, validation: Validation, measuring: Validator, best_step: int | None
    ) -> None:
        self.validations.append((validation.step, best_step))


def test_validation_prompts_are_truncated_as_in_serving(checkpoint: Path, tmp_path: Path) -> None:
    """Prompts leave space for any answer, not only for the expected one."""
    changes: dict[str, object] = {"truncate_field": "prompt", "max_new_tokens": 5}
    file = write_settings(tmp_path, checkpoint, **changes, **write_validation(tmp_path, 1))
    config = TuneConfig.from_yaml(str(file))
    long_record = {"prompt": "dog " * 5000, "completion": ANSWER}
    Path(config.data_config.validation).write_text(json.dumps(long_record))
    prepared = prepare(config)
    (task_data,) = prepared.tasks
    context = prepared.checkpoint.config.max_position_embeddings
    measuring = Validator(prepared, load_trainer(prepared, Mesh.single()))

    assert task_data.validation is not None
    (example,) = task_data.validation.examples
    (prompt,) = measuring.render_prompts(task_data.template, task_data.validation, 5)
    assert prompt is not None
    assert len(example.ids) == context and len(prompt) == context - 5
    assert prompt == list(example.ids[: len(prompt)])
