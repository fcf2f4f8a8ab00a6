"""The subcommands of `preamble plan`: output as text and JSON, flags, and errors."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from planning.__main__ import COMMANDS, main
from planning.cli.specification import FLAG_OF_FIELD, SECTIONS, nearest_divisors
from planning.hardware import Cluster, find_device
from planning.model_presets import find_preset, presets
from planning.output.plan_writer import read_plan
from planning.training.estimate import TrainingJob, TrainingSplit, estimate_training
from tests.support.servers import ROOT

MEMORY = {
    *("weights", "gradients", "optimizer", "activations_first_stage", "kv", "adapters"),
    *("workspace", "total"),
}
SELECTIVE = (
    "gpt3-22b --gpu a100-80g --gpus 8 --tp 8 --micro-batch 4 --global-batch 4 "
    "--recompute selective --sequence-parallel"
)

ODD = "--layers 3 --hidden 8 --heads 2 --vocab 5 --seq 1"


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *line.split()])
    output = capsys.readouterr()
    return code, output.out, output.err


def values(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, _ = run(f"{line} --json", capsys)
    assert code == 0
    printed = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(printed, dict)
    return printed


def test_training_estimate_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = values(f"estimate {SELECTIVE}", capsys)
    assert {
        *("parameters", "flops_per_iteration", "iteration_s", "tflops_per_gpu", "mfu", "hfu"),
        *("bubble_fraction", "memory_bytes", "fits"),
    } <= set(estimate)
    memory = estimate["memory_bytes"]
    assert set(memory) >= MEMORY
    assert memory["total"] == sum(memory[name] for name in MEMORY - {"total"})
    assert estimate["fits"] is True and estimate["trust"]["source"] == "spec-sheet"
    # 34 s b h L / t, arXiv 2205.05198, table 2.
    assert memory["activations_first_stage"] == 34 * 2048 * 4 * 6144 * 48 // 8


def test_estimate_by_sizes_equals_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    split = "--gpu a100-80g --gpus 8 --tp 8 --micro-batch 4 --global-batch 4"
    sizes = "--layers 48 --hidden 6144 --heads 64 --seq 2048 --vocab 51200"
    from_sizes = values(f"estimate {sizes} {split}", capsys)
    assert from_sizes == values(f"estimate 22b {split}", capsys)
    assert from_sizes == values(f"estimate --model gpt3-22b {split}", capsys)
    h = 6144
    s = 2048
    v = 51200
    layers = 48
    forms = 72 * 4 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert from_sizes["flops_per_iteration"] == pytest.approx(forms, rel=5e-3)
    assert from_sizes["parameters"] == pytest.approx(22.07e9, rel=1e-3)


def test_dp_defaults_to_the_remaining_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    line = "estimate 5b --gpu a100-80g --gpus 16 --tp 2 --pp 2 --micro-batch 2 --global-batch 64"
    split = TrainingSplit(2, 2, 4, micro_batch=2)
    job = TrainingJob(find_preset("5b"), 2048, 64)
    expected = estimate_training(job, split, Cluster(find_device("a100-80g"), 16))
    assert values(line, capsys)["iteration_s"] == expected.iteration_s
    assert values(f"{line} --dp 4", capsys)["iteration_s"] == expected.iteration_s


def test_adapter_estimate_needs_less_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    line = "estimate llama2-7b --gpu h100 --gpus 8 --global-batch 32"
    full_training = values(line, capsys)
    frozen = values(f"{line} --trainable adapter --virtual-tokens 20", capsys)
    assert frozen["memory_bytes"]["total"] < full_training["memory_bytes"]["total"] / 2
    assert frozen["iteration_s"] < full_training["iteration_s"]


def test_estimate_of_a_static_batch(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "estimate gpt3-20b --gpu a100-80g --infer --input-tokens 60 --output-tokens 20 --batch 64"
    )
    estimate = values(line, capsys)
    two = values(f"{line} --tp 2", capsys)
    assert {"prefill_ms", "decode_ms_per_token", "request_ms", "tokens_per_s"} <= set(estimate)
    assert set(estimate["memory_bytes"]) >= MEMORY and estimate["fits"] is True
    # FasterTransformer, as published: 1,352 and 887 ms.
    assert estimate["request_ms"] == pytest.approx(1352, rel=0.15)
    assert two["request_ms"] == pytest.approx(887, rel=0.15)
    assert estimate["tokens_per_s"] == pytest.approx(
        64 * 20 / estimate["request_ms"] * 1000, rel=1e-6
    )


def test_published_out_of_memory_batch_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    line = "estimate 20b --gpu a100-80g --infer --input-tokens 200 --output-tokens 200 --batch 128"
    assert values(line, capsys)["fits"] is False
    code, out, _ = run(line, capsys)
    assert code == 0 and "it does not fit" in out


def test_estimate_of_a_continuous_batching_server(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "estimate llama3-8b --gpu h100 --infer --continuous --input-tokens 600 --output-tokens 200"
    )
    estimate = values(f"{line} --concurrency 8", capsys)
    assert estimate["ttft_ms"]["p50"] <= estimate["ttft_ms"]["p95"] < estimate["request_ms"]["p95"]
    assert estimate["tokens_per_s"] > 0
    drowned = values(f"{line} --request-rate 1e6", capsys)
    assert drowned["ttft_ms"]["p95"] is None
    assert "times that rate" in run(f"{line} --request-rate 1e6", capsys)[1]


def test_plan_is_printed_written_and_redrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan"
    line = "train 5b --gpu a100-80g --gpus 8 --global-batch 64 --micro-batch 1"
    code, out, _ = run(f"{line} --output {folder}", capsys)
    assert code == 0
    for section in ("recommended", "binding", "why not", "notes", "tokens take"):
        assert section in out
    assert {"candidates.csv", "plan.json", "report.md"} <= {path.name for path in folder.iterdir()}
    plan_json = values(line, capsys)
    record = json.loads((folder / "plan.json").read_text())
    assert plan_json["best"] == record["best"] and plan_json["counts"] == record["counts"]
    assert len(plan_json["rows"]) == 100 and plan_json["rows"] == record["rows"][:100]
    assert plan_json["best"]["name"] in out
    assert len(read_plan(folder).rows) == sum(plan_json["counts"].values())
    redrawn = values(f"plot {folder} --output {tmp_path / 'again'}", capsys)
    assert redrawn["paths"] and all(Path(path).exists() for path in redrawn["paths"])


def test_plans_work_for_unusual_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Prime numbers of GPUs, a model of minimal size, and more GPUs than it can use."""
    for line in ("5b --gpus 999999937 --tp 1 --pp 1 --recompute none", f"{ODD} --gpus 1000"):
        code, out, err = run(f"train {line} --gpu a100", capsys)
        assert code == 0 and "recommended    TP1" in out and not err
    assert nearest_divisors(999_999_937, 1000) == "1 and 999999937"


def test_objective_gpus_does_not_use_all_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    plan_json = values("serve 5b --gpu a100 --gpus 2 --objective gpus", capsys)
    best = plan_json["best"]["settings"]
    assert best["tp"] * best["pp"] * best["replicas"] == 1


def test_high_concurrency_queues_without_losing_throughput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beyond saturation, throughput stays and waiting grows by Little's law."""
    load = "--input-tokens 200 --output-tokens 60"
    estimates = [
        values(f"estimate 5b --gpu a100 --continuous {load} --concurrency {clients}", capsys)
        for clients in (900, 100_000)
    ]
    assert estimates[1]["tokens_per_s"] == pytest.approx(estimates[0]["tokens_per_s"], rel=0.02)
    for estimate, clients in zip(estimates, (900, 100_000), strict=True):
        concurrent_requests = estimate["requests_per_s"] * estimate["request_ms"]["mean"] / 1e3
        assert concurrent_requests == pytest.approx(clients, rel=0.02)


def test_infeasible_plan_exits_1_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("train 40b --gpu a100-80g --gpus 2 --global-batch 8", capsys)
    assert code == 1 and not err
    assert "what would fit" in out and "GPUs are enough" in out
    code, out, _ = run("train 40b --gpu a100-80g --gpus 2 --global-batch 8 --json", capsys)
    assert code == 1 and json.loads(out)["best"] is None


def test_specification_file_equals_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: gpt3-5b\nhardware: {gpu: a100-80g, gpus: 8}\ntraining: {global_batch: 64}\n"
    )
    from_file = values(f"train --spec {path} --micro-batch 1", capsys)
    line = "train 5b --gpu a100-80g --gpus 8 --global-batch 64 --micro-batch 1"
    assert from_file["best"] == values(line, capsys)["best"]


@pytest.mark.parametrize("line", ["estimate", "train", "serve", "calibrate", "validate", "plot"])
def test_help_has_examples(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_error:
        main(["plan", line, "--help"])
    assert exit_error.value.code == 0
    assert f"examples:\n\n  preamble plan {line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("estimate 22b --gpu a100-80g --tp 7", "--tp can be 1, 2, 4, 8"),
        ("estimate 22b --gpu a100-80g --tp 8 --gpus 12", "the nearest --gpus is 8 or 16"),
        ("estimate 22b --gpu a100-80g --gpus 8 --dp 4", "remove --dp or --gpus"),
        ("estimate 22b --gpu a100-80g --micro-batch 0", "must be at least 1"),
        ("estimate 22b --gpu a100-80g --pp -2", "must be at least 1"),
        ("estimate 22b --gpu a100 --recompute-layers 3", "set --recompute block"),
        ("estimate 22b --gpu a10", "a100-40g"),
        ("estimate 22b", "no GPU is given"),
        (
            "estimate --layers 2 --hidden 100 --heads 3 --gpu a100",
            "the nearest numbers of heads are 2 and 4",
        ),
        ("estimate 22b --gpu a100 --infer", "give --input-tokens and --output-tokens"),
        ("estimate 22b --gpu a100 --infer --input-tokens -3 --output-tokens 3", "more than 0"),
        (
            "estimate 22b --gpu a100 --continuous --input-tokens 3 --output-tokens 3",
            "--concurrency",
        ),
        ("train 22b --gpu a100", "set --gpus N or --nodes N"),
        ("train 22b --gpu a100 --gpus 8 --tp 0", "--tp contains 0"),
        ("train 22b --gpu a100 --gpus 8 --dtype fp8", "does not support fp8"),
        (
            "train 22b --gpu a100 --gpus 8 --measure 2",
            "needs its settings file; give the file with --tune",
        ),
        ("train 5b --gpu a100 --gpus 9223372036854775807", "at most 1,000,000,000"),
        ("estimate 5b --gpu a100 --infer --input-tokens 5 --output-tokens 5 --tp 0", "--tp is 0"),
        (
            "estimate 5b --gpu a100 --continuous --gpus 2 --tp 4 --concurrency 1 "
            "--input-tokens 5 --output-tokens 5",
            "needs 4 GPUs, and there are 2; set --gpus 4",
        ),
        (f"estimate {'x' * 5000} --gpu a100", "' is neither a preset nor the path of a checkpoint"),
        ("calibrate --output .", "name a file in it"),
        ("plot /dev/zero", "give the candidates.csv of a plan"),
        (
            "serve 22b --gpu a100 --gpus 8 --objective fast",
            "choose one of: throughput, latency, gpus",
        ),
        ("serve 22b --gpu a100 --gpus 8 --dtype int8", "does not support dtype int8"),
        (
            "train 22b --gpu a100 --gpus 8 --trainable all --lora-rank 8",
            "all parameters and an adapter (LoRA of rank 8 on all linears)",
        ),
        (
            "train 22b --gpu a100 --gpus 8 --method dora --virtual-tokens 8",
            "8 virtual tokens and one that changes linears (DoRA of rank 16",
        ),
        ("train 22b --gpu a100 --gpus 8 --lora-rank 513", "rank is 513; it must be from 1 to 512"),
        ("train 22b --gpu a100 --gpus 8 --method ia3 --lora-rank 4", "method ia3 has no rank"),
        (
            "train 22b --gpu a100 --gpus 8 --lora-targets linear_fc1.up",
            "changes linear_fc1.up, which this model does not have",
        ),
        ("train 22b --gpu a100 --gpus 8 --lora-layers 48", "changes layer 48, but the model has"),
        ("train 22b --gpu a100 --gpus 8 --lora-layers -1", "layers are numbered from 0"),
        (
            "train 22b --gpu a100 --gpus 8 --method lora --context-tokens 8",
            "only method alora has tokens without a backward pass",
        ),
        (
            "serve 22b --gpu a100 --gpus 8 --distinct-adapters 8",
            "applies only to adapters that change linears",
        ),
    ],
)
def test_errors_are_one_sentence_with_a_remedy(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(line, capsys)
    assert code == 1 and not out
    assert err.startswith(f"preamble plan {line.split()[0]}: ") and err.count("\n") == 1
    assert message in err


def test_estimates_of_adapters_of_linears(capsys: pytest.CaptureFixture[str]) -> None:
    train = "estimate llama3-8b --gpu h100 --seq 4096"
    frozen = values(f"{train} --trainable adapter", capsys)
    trained = values(f"{train} --lora-rank 64 --lora-targets linear_qkv,linear_proj", capsys)
    numbers = 32 * 64 * (4096 + 6144 + 2 * 4096)
    assert trained["memory_bytes"]["optimizer"] == 8 * numbers
    assert trained["seconds"]["low_rank"] > 0 == frozen["seconds"]["low_rank"]
    code, out, _ = run(f"{train} --method alora --context-tokens 3600", capsys)
    assert code == 0 and "activated LoRA of rank 16 on all linears" in out

    serve = (
        "estimate llama3-8b --gpu h100 --continuous --input-tokens 60 --output-tokens 20 "
        "--concurrency 32 --running-requests-max 32"
    )
    base = values(serve, capsys)
    served = values(f"{serve} --adapters 1000 --lora-rank 16", capsys)
    few = values(f"{serve} --adapters 1000 --lora-rank 16 --distinct-adapters 2", capsys)
    assert served["adapter_bytes"] == pytest.approx(71.3e6, rel=1e-3)
    assert served["resident_adapters"] == 32
    assert served["adapter_memory_mb"] == pytest.approx(32 * 71.3, rel=1e-3)
    assert few["adapter_memory_mb"] == 256
    assert served["tokens_per_s"] < few["tokens_per_s"] < base["tokens_per_s"]
    assert "adapter_bytes" not in base


def test_a_specification_describes_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        "model: llama3-8b\nhardware: {gpu: h100}\n"
        "adapter: {method: dora, rank: 8, targets: [linear_qkv.query], layers: [30, 31]}\n"
    )
    code, out, err = run(f"estimate --spec {file} --seq 512", capsys)
    assert code == 0, err
    assert "DoRA of rank 8 on linear_qkv.query of 2 layers" in out


def test_messages_never_go_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even if stderr is closed."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["plan", "estimate", "22b"]) == 1
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["estimate 22b --recompute blok", "train --gpus many", "train --tokens many", "plot"]
)
def test_misuse_prints_the_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_error:
        main(["plan", *line.split()])
    assert exit_error.value.code == 2
    assert "usage: preamble plan" in capsys.readouterr().err


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian", capsys)[::2] == (
        2,
        "preamble plan: unknown command 'trian'; did you mean 'train'?\n",
    )
    assert run("", capsys)[0] == 2
    code, out, _ = run("--help", capsys)
    assert code == 0 and all(command in out for command in COMMANDS)


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for word, command in COMMANDS.items():
        module: Any = import_module(f"planning.cli.{command.module}")
        yield word, module.make_parser()


def test_flags_are_the_same_in_all_subcommands() -> None:
    """The same name fills the same field, and every one of them can write JSON."""
    kinds_by_flag: dict[str, set[str]] = {}
    for word, parser in parsers():
        options = {
            flag: action.dest for action in parser._actions for flag in action.option_strings
        }
        assert "--json" in options, word
        for flag, dest in options.items():
            kinds_by_flag.setdefault(flag, set()).add(dest)
    assert all(len(dests) == 1 for dests in kinds_by_flag.values())


def test_every_specification_field_has_a_flag() -> None:
    destinations = {action.dest for _, parser in parsers() for action in parser._actions}
    for name, section in SECTIONS.items():
        for field in fields(section):
            if field.name != "quality":  # A list that only a file can have.
                assert FLAG_OF_FIELD.get((name, field.name), field.name) in destinations, field.name


def test_estimate_command_is_fast_and_does_not_import_torch() -> None:
    program = (
        "import sys, time; from planning.__main__ import main; "
        "import planning.cli.estimate; start = time.process_time(); "
        "code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules or time.process_time() - start > 1)"
    )
    arguments = ["plan", "estimate", *SELECTIVE.replace("22b", "1t").split()]
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


def test_model_can_be_a_checkpoint_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.servers import write_checkpoint

    path = write_checkpoint(tmp_path)
    estimate = values(f"estimate {path} --gpu a100-80g --seq 64", capsys)
    assert 0 < estimate["parameters"] < 10**6
    code, _, err = run(f"estimate {tmp_path / 'none'} --gpu a100-80g", capsys)
    assert code == 1 and "does not exist" in err


def test_presets_are_named_in_the_help() -> None:
    (parser,) = [parser for word, parser in parsers() if word == "estimate"]
    help_text = " ".join(parser.format_help().split())
    sizes = [name.removeprefix("gpt3-") for name in presets() if name.startswith("gpt3-")]
    assert all(size in help_text for size in sizes)
