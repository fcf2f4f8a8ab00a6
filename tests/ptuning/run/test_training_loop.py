"""Tuning, from a YAML file to an adapter that is served: what is learned, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gpt
from clients.client import Options
from gpt.adapters.adapter_file import open_adapter
from gpt.adapters.prompt_encoders import encode
from gpt.checkpoint.digest import identify
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.generation.generate import generate
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import open_tokenizer
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.reporting.observer import Nobody
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import Learning, load_trainer
from ptuning.run.training_state import common_state, latest_state, save_state
from ptuning.run.validation import Measuring
from ptuning.run_facts import Progress, Validation
from tests.support.ranks import ranks
from tests.support.servers import ROOT, WAIT_S, command, serving, write_checkpoint
from tests.support.tuning_settings import ANSWER, Keeping, records, write_settings, write_validation


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ptuning"))


def test_an_adapter_is_learned_written_and_served(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = identify(open_checkpoint(checkpoint))

    assert main(["tune", str(write_settings(tmp_path, checkpoint))]) == 0

    written = Path(capsys.readouterr().out.strip())
    assert written == tmp_path / "adapters" / "answer@1.safetensors"
    assert identify(open_checkpoint(checkpoint)) == before
    adapter = open_adapter(written)
    assert adapter.card.base_digest == before.digest
    assert adapter.card.metrics["loss"] < 0.1 * adapter.card.metrics["first_loss"]
    model = gpt.load(checkpoint, dtype="float64")
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    rule = Sampling(max_new_tokens=20, stop_token_ids=tokenizer.stop_ids)
    settings = tmp_path / "serve.yaml"
    with (
        serving(checkpoint, settings, adapters=str(written.parent)) as server,
        server.client() as client,
    ):
        right = 0
        for prompt in (record["prompt"] for record in records(9)):
            ids = [*range(640, 656), *tokenizer.encode(prompt)]
            expected = generate(model, [ids], rule, table=adapter.table)[0]
            answer = client.generate({"prompt": prompt}, Options(adapter="answer"))
            assert answer.token_ids == expected.token_ids
            right += answer.text == ANSWER and answer.finish_reason == "stop"
            without = client.generate(prompt, Options(max_new_tokens=20))
            assert without.text != ANSWER
        assert right >= 6

    assert main(["tune", str(write_settings(tmp_path, checkpoint, steps=1))]) == 0
    assert capsys.readouterr().out.strip().endswith("answer@2.safetensors")


LONG = {"prompt": "a", "completion": "b c d e f g h i j k"}
TWO_TASKS = "\n".join(
    json.dumps({"prompt": "a", "completion": "b", "taskname": name}) for name in "ab"
)
BAD: dict[str, tuple[dict[str, object], str | None, str]] = {
    "unknown key": ({"learning_rte": 1}, None, "did you mean 'learning_rate'"),
    "wrong type": ({"steps": "many"}, None, "steps is 'many'; it must be a whole number"),
    "out of range": ({"steps": 0}, None, "steps is 0"),
    "no room": ({"tokens_max": 0}, None, "tokens_max is 0; it must be more than 0"),
    "no answer": ({"max_new_tokens": 0}, None, "max_new_tokens is 0; it must be more than 0"),
    "no rate": ({"learning_rate": float("inf")}, None, "learning_rate is inf; it must be more"),
    "a negative seed": ({"seed": -1}, None, "seed is -1; it must not be negative"),
    "a large seed": ({"seed": 2**63}, None, "seed is 9223372036854775808; it must fit into 64"),
    "a large decay": ({"weight_decay": 1e30}, None, "weight_decay is 1e+30; it must be less"),
    "too many rows": ({"virtual_tokens": 10**7}, None, "virtual_tokens is 10000000; this model"),
    "an empty stop": ({"stop": ["a", ""]}, None, "a stop of 0 bytes; each needs 1 to 256"),
    "a long stop": ({"stop": ["x" * 257]}, None, "a stop of 257 bytes"),
    "half a character": ({"task": "\ud800"}, None, "half a character"),
    "half a text": ({"initial_text": "\ud800"}, None, "initial_text: "),
    "half a path": ({"data": "\ud800"}, None, "data is '\\ud800'; it must be a path"),
    "an end in a path": ({"model": "a\0b"}, None, "model is 'a\\x00b'; it must be a path"),
    "no output": ({"output": ""}, None, "output is ''; it must be a path"),
    "a file above": ({"output": "README.md/a"}, None, "cannot take an adapter: Not a directory"),
    "a closed directory": ({"output": "/proc/self"}, None, "output: /proc/self cannot take an"),
    "a device": ({"device": "nope"}, None, "device 'nope' cannot be used"),
    "no device": ({"device": "meta"}, None, "device is 'meta'; known are"),
    "a device that is absent": ({"device": "cuda:99"}, None, "device 'cuda:99' cannot be used"),
    "splits": ({"splits": [1, 2]}, None, "must sum to virtual_tokens"),
    "no directory": ({"output": "README.md"}, None, "README.md is not a directory"),
    "a version": ({"name": "a@2"}, None, "leave the version out"),
    "a path": ({"name": "../a"}, None, "no adapter's name"),
    "no data": ({"data": "nothing.jsonl"}, None, "nothing.jsonl cannot be read"),
    "empty data": ({}, "", "no usable example"),
    "not JSON": ({}, '{"prompt": "a", "completion": "b"}\n{', "line 2: not JSON"),
    "no object": ({}, "[1]", "line 1: a list"),
    "a missing field": ({}, '{"prompt": "a"}', "line 1: no field 'completion'"),
    "a deep line": ({}, "[" * 100_000, "line 1: nested too deeply"),
    "a long line": ({}, json.dumps({"prompt": ["a" * 10**6] * 9}), "'prompt' is ['aaa"),
    "half a line": ({}, '{"prompt": "\\ud800", "completion": "b"}', "no usable example"),
    "a number": ({}, '{"prompt": "a", "completion": 3}', "'completion' is 3"),
    "too long": ({"tokens_max": 6}, '{"prompt": "a", "completion": "b c d e"}', "over the limit"),
    "a long answer": ({"tokens_max": 20}, json.dumps(LONG), "line 1: prompt and answer have"),
    "how long it is": ({"tokens_max": 20}, json.dumps(LONG), "the answer alone has"),
    "two tasks": ({}, TWO_TASKS, "line 2: the taskname is 'b', and 'a' above it"),
    "no validation": ({"validation": "none.csv"}, None, "none.csv cannot be read"),
    "a key of NeMo": ({"task_templates": [{"template": "a"}]}, None, "did you mean 'prompt_temp"),
    "a dtype": ({"dtype": "float8"}, None, "dtype is 'float8'"),
    "a template": ({"template": "{prompt}{completion}"}, None, "virtual prompts"),
    "no model": ({"model": "nowhere"}, None, "does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(
    case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, lines, words = BAD[case]
    file = write_settings(tmp_path, checkpoint, **changes)
    if lines is not None:
        (tmp_path / "examples.jsonl").write_text(lines)

    for extra in ([], ["--check"]):
        assert main(["tune", str(file), *extra]) == 1

        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert len(err) < 600
        assert words in err
    assert list((tmp_path / "adapters").iterdir()) == []


def test_a_number_without_a_dot_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text("model: m\ndata: d\nname: n\nlearning_rate: 1e-3\n")
    assert TuneConfig.read(str(file)).learning_rate == 0.001


def test_check_shows_examples_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(write_settings(tmp_path, checkpoint)), "--check"]) == 0

    shown = capsys.readouterr().out
    assert "prompt (17 tokens): '<16 virtual>the'" in shown
    assert f"{ANSWER!r}" in shown
    assert "40 examples" in shown
    assert list((tmp_path / "adapters").iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_run_has_no_adapter_and_goes_on(checkpoint: Path, tmp_path: Path) -> None:
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
    assert "the same command goes on from there" in err
    assert list((tmp_path / "adapters").iterdir()) == []
    (state,) = (tmp_path / "runs" / "answer" / "1").glob("state-*")
    assert latest_state(state.parent) is not None


def losses(file: Path, *, ends_after: int | None = None) -> list[float]:
    """Those of a run's steps, in this process; another run may have begun it."""
    prepared = prepare(TuneConfig.read(str(file)))
    audience = Keeping(ends_after)
    with suppress(EOFError):
        Learning(prepared, load_trainer(prepared, Mesh.single()), audience).run()
    return audience.losses


@pytest.mark.parametrize("method", ["prompt-tuning", "lstm", "prefix"])
def test_a_run_that_died_goes_on_to_the_same_losses_and_the_same_adapter(
    method: str, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"steps": 12, "save_every": 4, "method": method, "dtype": None}
    if method == "lstm":
        settings |= {"encoder_dropout": 0.2, "learning_rate": 0.01}
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    whole = losses(write_settings(tmp_path / "whole", checkpoint, **settings))
    file = write_settings(tmp_path / "halves", checkpoint, **settings)
    first = losses(file, ends_after=7)
    second = losses(file, ends_after=11)
    third = losses(file)
    assert first == whole[:6]
    assert second == whole[4:10]
    assert third == whole[8:]
    tables = [
        open_adapter(tmp_path / name / "adapters" / "answer@1.safetensors").table
        for name in ("whole", "halves")
    ]
    assert torch.equal(*tables)


class Removing(Keeping):
    """An audience that clears away, in the middle of a run, what the run writes into."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(None)
        self._folders = folders

    def step(self, made: Progress) -> None:
        super().step(made)
        if made.step == 2:
            for folder in self._folders:
                shutil.rmtree(folder)


def test_a_run_whose_folders_are_removed_makes_them_again_and_loses_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = write_settings(tmp_path, checkpoint, steps=4, save_every=1, method="mlp")
    prepared = prepare(TuneConfig.read(str(file)))
    audience = Removing([tmp_path / "runs", tmp_path / "adapters"])

    Learning(prepared, load_trainer(prepared, Mesh.single()), audience).run()

    assert open_adapter(tmp_path / "adapters" / "answer@1.safetensors").card.name == "answer"
    assert (tmp_path / "runs" / "answer" / "1" / "encoder.safetensors").exists()


CHANGED: dict[str, tuple[dict[str, object], str]] = {
    "a setting": ({"learning_rate": 0.25}, "had learning_rate 0.5, now it is 0.25; set it back"),
    "the records": ({"template": "<|VIRTUAL_PROMPT_0|>{prompt} {completion}"}, "had template"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_run_does_not_go_on_with_something_else(
    case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, words = CHANGED[case]
    losses(write_settings(tmp_path, checkpoint, steps=3, save_every=1), ends_after=2)
    file = write_settings(tmp_path, checkpoint, steps=3, save_every=1, **changes)

    assert main(["tune", str(file)]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1

    assert main(["tune", str(file), "--restart"]) == 0


def test_records_that_changed_end_a_run_that_would_go_on(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, steps=3, save_every=1)
    losses(file, ends_after=2)
    with (tmp_path / "examples.jsonl").open("a") as data:
        data.write('\n{"prompt": "the fox", "completion": "b"}\n')
    assert main(["tune", str(file)]) == 1
    assert "the records have changed since" in capsys.readouterr().err


def find_state(rank: int, folders: list[Path]) -> str:
    try:
        found = common_state(folders[rank], Mesh.create(2, 1))
    except ConfigError as error:
        return str(error)
    return "nothing" if found is None else str(found.facts["step"])


def test_ranks_that_see_different_disks_end_all_of_them_instead_of_waiting(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    assert ranks(2, find_state, [here, there]) == ["nothing", "nothing"]
    assert save_state(here, Mesh.single(), 4, {}, {}) is None
    assert ranks(2, find_state, [here, here]) == ["4", "4"]
    for said in ranks(2, find_state, [here, there]):
        assert "not every rank finds the state of step 4" in said


def test_so_do_records_that_only_measure_for_they_choose_the_best_table(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = write_validation(tmp_path, 4)
    file = write_settings(tmp_path, checkpoint, steps=3, save_every=1, **measured)
    losses(file, ends_after=2)
    write_validation(tmp_path, 3)
    assert main(["tune", str(file)]) == 1
    assert "the records have changed since" in capsys.readouterr().err


def test_of_a_whole_model_the_last_step_is_written_and_is_what_is_measured_last(
    checkpoint: Path, tmp_path: Path
) -> None:
    changes = {"method": "full", "steps": 4, "learning_rate": 1e-5, "max_new_tokens": 2}
    file = write_settings(tmp_path, checkpoint, **changes, **write_validation(tmp_path, 4))
    prepared = prepare(TuneConfig.read(str(file)))
    audience = Validated(None)
    outcome = Learning(prepared, load_trainer(prepared, Mesh.single()), audience).run()
    assert outcome.best_step is None
    assert audience.told == [(0, None), (2, None), (4, None), (4, None)]


def test_the_encoder_that_is_left_is_the_one_that_made_the_adapter(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Not the last one, where the best was earlier; also if the run went on in between."""
    other = {"prompt": "the quick", "completion": " fox jumps over the lazy brown fox"}
    changes = write_validation(tmp_path, 1) | {"method": "mlp", "steps": 12, "save_every": 1}
    changes |= {"validate_every": 4, "warmup_steps": 0, "schedule": "constant", "max_new_tokens": 1}
    (tmp_path / "validation.jsonl").write_text(json.dumps(other))
    file = write_settings(tmp_path, checkpoint, **changes)
    losses(file, ends_after=7)
    prepared = prepare(TuneConfig.read(str(file)))
    trainer = load_trainer(prepared, Mesh.single())
    outcome = Learning(prepared, trainer, Nobody()).run()
    assert outcome.best_step == 4  # At this rate it gets worse.
    left = load_file(outcome.folder / "encoder.safetensors")
    network = {name.removeprefix("network."): one for name, one in left.items() if name != "rows"}
    table = open_adapter(outcome.paths[0]).table
    torch.testing.assert_close(encode(left["rows"], network).float(), table)
    now = trainer.table()
    assert now is not None and not torch.allclose(now.float(), table)


class Validated(Keeping):
    """Keeps the steps that were measured, and the best one by then."""

    def __init__(self, ends_after: int | None) -> None:
        super().__init__(ends_after)
        self.told: list[tuple[int, int | None]] = []

    def validated(self, made: Validation, measuring: Measuring, best_step: int | None) -> None:
        self.told.append((made.step, best_step))


def test_prompts_that_measure_are_cut_as_a_servers_are(checkpoint: Path, tmp_path: Path) -> None:
    """To leave room for any answer, not for the right one."""
    changes: dict[str, object] = {"truncate_field": "prompt", "max_new_tokens": 5}
    file = write_settings(tmp_path, checkpoint, **changes, **write_validation(tmp_path, 1))
    config = TuneConfig.read(str(file))
    long = {"prompt": "dog " * 5000, "completion": ANSWER}
    Path(config.validation).write_text(json.dumps(long))
    prepared = prepare(config)
    (data,) = prepared.tasks
    context = prepared.checkpoint.config.max_position_embeddings
    measuring = Measuring(prepared, load_trainer(prepared, Mesh.single()))

    assert data.validation is not None
    (example,) = data.validation.examples
    (prompt,) = measuring.prompts(data.template, data.validation, 5)
    assert prompt is not None
    assert len(example.ids) == context and len(prompt) == context - 5
    assert prompt == list(example.ids[: len(prompt)])
