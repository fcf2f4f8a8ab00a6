"""Runs that change linears: from a YAML file to an adapter file that has the validated effect."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import gpt
from gpt.adapters.adapter_file import check_adapter, open_adapter
from gpt.adapters.golden_examples import replay_golden_examples
from gpt.checkpoint.digest import identify
from gpt.formats.registry import open_checkpoint
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import open_tokenizer
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import TrainingLoop, load_trainer
from tests.support.servers import write_checkpoint
from tests.support.tuning_settings import LossRecorder, write_settings, write_validation

TEMPLATE = "{prompt}<|INVOCATION|>{completion}"
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"learning_rate": 1e-2, "rank": 4, "dropout": 0.1},
    "dora": {"learning_rate": 1e-2, "rank": 4, "rslora": True},
    "ia3": {"learning_rate": 1e-1},
    "bottleneck": {"learning_rate": 1e-2, "rank": 8},
    "alora": {
        "learning_rate": 1e-2,
        "rank": 4,
        "template": TEMPLATE,
        "invocation": "lazy fox",
        "lora_plus_ratio": 2.0,
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ptuning"))


def tune(folder: Path, checkpoint: Path, *flags: str, **changes: object) -> Path:
    """The settings file of a run that has ended well."""
    write_validation(folder, 8)
    file = write_settings(folder, checkpoint, **changes)
    assert main(["tune", str(file), *flags]) == 0
    return file


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] if m == "bottleneck" else []) for m in METHODS],
)
def test_a_run_writes_an_adapter_with_the_effect_that_it_validated(
    checkpoint: Path, tmp_path: Path, method: str
) -> None:
    changes = {
        "method": method,
        "validation": str(tmp_path / "validation.jsonl"),
        "golden_examples": 2,
        **METHODS[method],
    }
    tune(tmp_path, checkpoint, **changes)
    base = open_checkpoint(checkpoint)
    adapter = open_adapter(tmp_path / "adapters" / "answer@1.safetensors")
    assert (adapter.card.kind, adapter.card.method) == ("linears", method)
    assert bool(adapter.card.invocation) == (method == "alora")
    assert adapter.card.template is not None and adapter.card.template.virtual_tokens == 0
    assert check_adapter(adapter, base.config, identify(base)) == ()
    assert adapter.card.metrics["loss"] < 0.3 * adapter.card.metrics["first_loss"]
    # The golden examples were generated with the values of the run, in the compute dtype.
    model = gpt.load(checkpoint)
    replay = replay_golden_examples(model, open_tokenizer(checkpoint / "tokenizer"), adapter)
    assert replay.checked == 2 and replay.passed, replay.mismatch_lines
    # Of eight answers, bottlenecks make six, and the others at least seven.
    least = 0.7 if method == "bottleneck" else 0.8
    assert adapter.card.metrics["validation"]["adapter"]["exact_match"] > least


def losses(file: Path, *, ends_after: int | None = None) -> list[float]:
    """Losses of a run in this process; the run may resume an earlier one."""
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    recorder = LossRecorder(ends_after)
    with suppress(EOFError):
        TrainingLoop(prepared, load_trainer(prepared, Mesh.single()), recorder).run()
    return recorder.losses


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_killed_run_resumes_to_the_same_losses_and_adapter(
    method: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Also with masks of dropout, and with the best values of a validation before the kill."""
    folders = [tmp_path / "whole", tmp_path / "killed"]
    files = []
    for folder in folders:
        folder.mkdir()
        changes = {"method": method, "steps": 12, "save_every": 4, **METHODS[method]}
        validation = write_validation(folder, 9)
        files.append(write_settings(folder, checkpoint, **{**changes, **validation}))
    expected = losses(files[0])
    first = losses(files[1], ends_after=7)
    assert first + losses(files[1])[2:] == expected[:6] + expected[6:]
    adapters = [open_adapter(folder / "adapters" / "answer@1.safetensors") for folder in folders]
    assert adapters[0].digest == adapters[1].digest


@pytest.mark.slow
def test_a_run_on_four_ranks_writes_the_adapters_of_one_rank(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Two tasks, tensor and pipeline ranks, and best values that the last stage must get."""
    written = {}
    for name, split in (("one", {}), ("four", {"tp": 2, "pp": 2, "sequence_parallel": True})):
        folder = tmp_path / name
        folder.mkdir()
        validation = write_validation(folder, 9)
        file = write_settings(folder, checkpoint, **validation)
        settings = yaml.safe_load(file.read_text())
        task_settings = {"max_new_tokens": settings.pop("max_new_tokens")}
        for misplaced in ("name", "virtual_tokens"):
            del settings[misplaced]
        tasks = [{"name": task, **task_settings} for task in ("first", "second")]
        records = [
            json.loads(line) | {"taskname": task}
            for task in ("first", "second")
            for line in (folder / "examples.jsonl").read_text().splitlines()
        ]
        (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, records)))
        (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, records[::7])))
        changes = {"method": "dora", "rank": 2, "learning_rate": 1e-2, "steps": 6, **split}
        file.write_text(yaml.safe_dump({**settings, **changes, "tasks": tasks}))
        assert main(["tune", str(file)]) == 0
        written[name] = [
            open_adapter(folder / "adapters" / f"{task}@1.safetensors").linears
            for task in ("first", "second")
        ]
    for single_rank, four_ranks in zip(written["one"], written["four"], strict=True):
        assert single_rank.keys() == four_ranks.keys()
        for key, linear in single_rank.items():
            for tensor, value in linear.tensors():
                torch.testing.assert_close(
                    getattr(four_ranks[key], tensor), value, rtol=1e-5, atol=1e-7
                )


def test_an_example_without_the_invocation_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, method="alora", invocation="quick brown", rank=2)
    assert main(["tune", str(file)]) == 1
    error = capsys.readouterr().err
    assert "examples.jsonl line 1: the prompt does not contain the invocation" in error
    assert "<|INVOCATION|>" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "alora"}, "invocation is missing"),
        ({"method": "lora", "invocation": "x"}, "invocation is set, but has an effect only if"),
        ({"rank": 4}, "rank is 4, but has an effect only if method is lora, alora, dora or bott"),
        ({"method": "bottleneck", "alpha": 2.0}, "alpha is 2.0, but has an effect only if"),
        (
            {"method": "bottleneck", "targets": ["linear_qkv"]},
            "a bottleneck is behind linear_proj or linear_fc2",
        ),
        ({"method": "ia3", "alpha": 2.0}, "alpha is 2.0, but has an effect only if"),
        ({"method": "dora", "dropout": 0.1}, "dropout is 0.1, but method dora"),
        ({"method": "lora", "targets": ["linear_q"]}, "targets has 'linear_q'; did you mean"),
        ({"method": "lora", "layers": [99]}, "layers has 99, but the model has"),
        (
            {"method": "lora", "targets": ["linear_qkv", "linear_qkv.key"]},
            "targets has linear_qkv and its part",
        ),
        ({"method": "alora", "invocation_ids": [100000]}, "does not contain the invocation"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    checkpoint: Path,
    tmp_path: Path,
    changes: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_settings(tmp_path, checkpoint, **changes)
    assert main(["tune", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_the_check_counts_no_virtual_tokens(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, **{"method": "alora", **METHODS["alora"]})
    assert main(["tune", str(file), "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tasks"][0]["virtual_tokens"] == 0
    assert report["step"]["tokens"] > 0
