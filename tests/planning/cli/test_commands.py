"""`preamble plan`: what its subcommands print, as text and as JSON, and how they refuse."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from planning.__main__ import COMMANDS, main
from planning.cli.specification import FLAGS, SECTIONS, near_divisors
from planning.hardware import Cluster, find_device
from planning.model_presets import find_preset, presets
from planning.output.files import read_plan
from planning.training.estimate import TrainingJob, TrainingSplit, estimate_training
from tests.support.servers import ROOT

MEMORY = {
    *("weights", "gradients", "optimizer", "activations_first_stage", "kv", "workspace", "total"),
}
SELECTIVE = (
    "gpt3-22b --gpu a100-80g --gpus 8 --tp 8 --micro-batch 4 --global-batch 4 "
    "--recompute selective --sequence-parallel"
)

ODD = "--layers 3 --hidden 8 --heads 2 --vocab 5 --seq 1"


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *line.split()])
    said = capsys.readouterr()
    return code, said.out, said.err


def values(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, _ = run(f"{line} --json", capsys)
    assert code == 0
    found = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return found


def test_an_estimate_of_training_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(f"estimate {SELECTIVE}", capsys)
    assert {
        *("parameters", "flops_per_iteration", "iteration_s", "tflops_per_gpu", "mfu", "hfu"),
        *("bubble_fraction", "memory_bytes", "fits"),
    } <= set(found)
    memory = found["memory_bytes"]
    assert set(memory) >= MEMORY
    assert memory["total"] == sum(memory[name] for name in MEMORY - {"total"})
    assert found["fits"] is True and found["trust"]["source"] == "spec-sheet"
    # 34 s b h L / t, arXiv 2205.05198, table 2.
    assert memory["activations_first_stage"] == 34 * 2048 * 4 * 6144 * 48 // 8


def test_an_estimate_by_sizes_is_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    split = "--gpu a100-80g --gpus 8 --tp 8 --micro-batch 4 --global-batch 4"
    sizes = "--layers 48 --hidden 6144 --heads 64 --seq 2048 --vocab 51200"
    by_sizes = values(f"estimate {sizes} {split}", capsys)
    assert by_sizes == values(f"estimate 22b {split}", capsys)
    assert by_sizes == values(f"estimate --model gpt3-22b {split}", capsys)
    h, s, v, layers = 6144, 2048, 51200, 48
    forms = 72 * 4 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert by_sizes["flops_per_iteration"] == pytest.approx(forms, rel=5e-3)
    assert by_sizes["parameters"] == pytest.approx(22.07e9, rel=1e-3)


def test_what_gpus_are_left_are_copies(capsys: pytest.CaptureFixture[str]) -> None:
    line = "estimate 5b --gpu a100-80g --gpus 16 --tp 2 --pp 2 --micro-batch 2 --global-batch 64"
    split = TrainingSplit(2, 2, 4, micro_batch=2)
    job = TrainingJob(find_preset("5b"), 2048, 64)
    wanted = estimate_training(job, split, Cluster(find_device("a100-80g"), 16))
    assert values(line, capsys)["iteration_s"] == wanted.iteration_s
    assert values(f"{line} --dp 4", capsys)["iteration_s"] == wanted.iteration_s


def test_a_frozen_estimate_is_smaller_and_quicker(capsys: pytest.CaptureFixture[str]) -> None:
    line = "estimate llama2-7b --gpu h100 --gpus 8 --global-batch 32"
    whole = values(line, capsys)
    frozen = values(f"{line} --trainable adapter --virtual-tokens 20", capsys)
    assert frozen["memory_bytes"]["total"] < whole["memory_bytes"]["total"] / 2
    assert frozen["iteration_s"] < whole["iteration_s"]


def test_an_estimate_of_a_static_batch(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "estimate gpt3-20b --gpu a100-80g --infer --input-tokens 60 --output-tokens 20 --batch 64"
    )
    one, two = values(line, capsys), values(f"{line} --tp 2", capsys)
    assert {"prefill_ms", "decode_ms_per_token", "request_ms", "tokens_per_s"} <= set(one)
    assert set(one["memory_bytes"]) >= MEMORY and one["fits"] is True
    # FasterTransformer, as published: 1,352 and 887 ms.
    assert one["request_ms"] == pytest.approx(1352, rel=0.15)
    assert two["request_ms"] == pytest.approx(887, rel=0.15)
    assert one["tokens_per_s"] == pytest.approx(64 * 20 / one["request_ms"] * 1000, rel=1e-6)


def test_what_did_not_fit_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    line = "estimate 20b --gpu a100-80g --infer --input-tokens 200 --output-tokens 200 --batch 128"
    assert values(line, capsys)["fits"] is False
    code, out, _ = run(line, capsys)
    assert code == 0 and "it does not fit" in out


def test_an_estimate_of_our_server(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "estimate llama3-8b --gpu h100 --infer --continuous --input-tokens 600 --output-tokens 200"
    )
    found = values(f"{line} --concurrency 8", capsys)
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p95"] < found["request_ms"]["p95"]
    assert found["tokens_per_s"] > 0
    drowned = values(f"{line} --request-rate 1e6", capsys)
    assert drowned["ttft_ms"]["p95"] is None
    assert "times as many come" in run(f"{line} --request-rate 1e6", capsys)[1]


def test_a_plan_is_told_written_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan"
    line = "train 5b --gpu a100-80g --gpus 8 --global-batch 64 --micro-batch 1"
    code, out, _ = run(f"{line} --output {folder}", capsys)
    assert code == 0
    for word in ("recommended", "binding", "why not", "worth knowing", "tokens take"):
        assert word in out
    assert {"candidates.csv", "plan.json", "report.md"} <= {one.name for one in folder.iterdir()}
    found = values(line, capsys)
    record = json.loads((folder / "plan.json").read_text())
    assert found["best"] == record["best"] and found["counts"] == record["counts"]
    assert len(found["rows"]) == 100 and found["rows"] == record["rows"][:100]
    assert found["best"]["name"] in out
    assert len(read_plan(folder).rows) == sum(found["counts"].values())
    drawn = values(f"plot {folder} --output {tmp_path / 'again'}", capsys)
    assert drawn["paths"] and all(Path(path).exists() for path in drawn["paths"])


def test_a_plan_is_made_at_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Within seconds, for primes, for tokens alone, and for more GPUs than there are."""
    for line in ("5b --gpus 999999937 --tp 1 --pp 1 --recompute none", f"{ODD} --gpus 1000"):
        code, out, err = run(f"train {line} --gpu a100", capsys)
        assert code == 0 and "recommended    TP1" in out and not err
    assert near_divisors(999_999_937, 1000) == "1 and 999999937"


def test_as_few_gpus_as_can_be_is_not_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = values("serve 5b --gpu a100 --gpus 2 --objective gpus", capsys)
    best = found["best"]["settings"]
    assert best["tp"] * best["pp"] * best["replicas"] == 1


def test_a_crowd_waits_and_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """More at once make no more tokens, and wait longer by Little's law."""
    load = "--input-tokens 200 --output-tokens 60"
    found = [
        values(f"estimate 5b --gpu a100 --continuous {load} --concurrency {clients}", capsys)
        for clients in (900, 100_000)
    ]
    assert found[1]["tokens_per_s"] == pytest.approx(found[0]["tokens_per_s"], rel=0.02)
    for one, clients in zip(found, (900, 100_000), strict=True):
        inside = one["requests_per_s"] * one["request_ms"]["mean"] / 1e3
        assert inside == pytest.approx(clients, rel=0.02)


def test_what_does_not_fit_is_a_failure_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("train 40b --gpu a100-80g --gpus 2 --global-batch 8", capsys)
    assert code == 1 and not err
    assert "what would fit" in out and "GPUs hold it" in out
    code, out, _ = run("train 40b --gpu a100-80g --gpus 2 --global-batch 8 --json", capsys)
    assert code == 1 and json.loads(out)["best"] is None


def test_a_file_of_wishes_does_what_flags_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: gpt3-5b\nhardware: {gpu: a100-80g, gpus: 8}\ntraining: {global_batch: 64}\n"
    )
    by_file = values(f"train --spec {path} --micro-batch 1", capsys)
    line = "train 5b --gpu a100-80g --gpus 8 --global-batch 64 --micro-batch 1"
    assert by_file["best"] == values(line, capsys)["best"]


@pytest.mark.parametrize("line", ["estimate", "train", "serve", "calibrate", "validate", "plot"])
def test_help_has_examples(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", line, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n\n  preamble plan {line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("estimate 22b --gpu a100-80g --tp 7", "--tp can be 1, 2, 4, 8"),
        ("estimate 22b --gpu a100-80g --tp 8 --gpus 12", "the nearest --gpus is 8 or 16"),
        ("estimate 22b --gpu a100-80g --gpus 8 --dp 4", "leave out --dp or --gpus"),
        ("estimate 22b --gpu a100-80g --micro-batch 0", "must be at least 1"),
        ("estimate 22b --gpu a100-80g --pp -2", "must be at least 1"),
        ("estimate 22b --gpu a100 --recompute-layers 3", "is for --recompute block"),
        ("estimate 22b --gpu a10", "a100-40g"),
        ("estimate 22b", "no GPU is named"),
        (
            "estimate --layers 2 --hidden 100 --heads 3 --gpu a100",
            "the nearest that do are 2 and 4",
        ),
        ("estimate 22b --gpu a100 --infer", "give --input-tokens and --output-tokens"),
        ("estimate 22b --gpu a100 --infer --input-tokens -3 --output-tokens 3", "more than 0"),
        (
            "estimate 22b --gpu a100 --continuous --input-tokens 3 --output-tokens 3",
            "--concurrency",
        ),
        ("train 22b --gpu a100", "give --gpus N or --nodes N"),
        ("train 22b --gpu a100 --gpus 8 --tp 0", "--tp has 0"),
        ("train 22b --gpu a100 --gpus 8 --dtype fp8", "has no fp8"),
        ("train 22b --gpu a100 --gpus 8 --measure 2", "give its settings file with --tune"),
        ("train 5b --gpu a100 --gpus 9223372036854775807", "1,000,000,000 at most"),
        ("estimate 5b --gpu a100 --infer --input-tokens 5 --output-tokens 5 --tp 0", "--tp is 0"),
        (
            "estimate 5b --gpu a100 --continuous --gpus 2 --tp 4 --concurrency 1 "
            "--input-tokens 5 --output-tokens 5",
            "take 4 GPUs, and there are 2; --gpus 4",
        ),
        (f"estimate {'x' * 5000} --gpu a100", "no model 'xxx"),
        ("calibrate --output .", "name a file in it"),
        ("plot /dev/zero", "that is no plan's"),
        ("serve 22b --gpu a100 --gpus 8 --objective fast", "known are: throughput, latency, gpus"),
        ("serve 22b --gpu a100 --gpus 8 --dtype int8", "does not compute in int8"),
    ],
)
def test_what_cannot_be_is_one_sentence_with_what_can(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(line, capsys)
    assert code == 1 and not out
    assert err.startswith(f"preamble plan {line.split()[0]}: ") and err.count("\n") == 1
    assert words in err


def test_talk_never_gets_into_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where stderr is closed."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["plan", "estimate", "22b"]) == 1
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["estimate 22b --recompute blok", "train --gpus many", "train --tokens many", "plot"]
)
def test_misuse_is_told_with_the_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *line.split()])
    assert ended.value.code == 2
    assert "usage: preamble plan" in capsys.readouterr().err


def test_an_unknown_word_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian", capsys)[::2] == (
        2,
        "preamble plan: no command 'trian'; did you mean 'train'?\n",
    )
    assert run("", capsys)[0] == 2
    code, out, _ = run("--help", capsys)
    assert code == 0 and all(word in out for word in COMMANDS)


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for word, command in COMMANDS.items():
        module: Any = import_module(f"planning.cli.{command.module}")
        yield word, module.make_parser()


def test_flags_are_alike_in_all_subcommands() -> None:
    """The same name fills the same field, and every one of them can write JSON."""
    seen: dict[str, set[str]] = {}
    for word, parser in parsers():
        options = {
            flag: action.dest for action in parser._actions for flag in action.option_strings
        }
        assert "--json" in options, word
        for flag, dest in options.items():
            seen.setdefault(flag, set()).add(dest)
    assert all(len(dests) == 1 for dests in seen.values())


def test_every_field_of_a_specification_has_its_flag() -> None:
    known = {action.dest for _, parser in parsers() for action in parser._actions}
    for name, section in SECTIONS.items():
        for field in fields(section):
            if field.name != "quality":  # A list that only a file has.
                assert FLAGS.get((name, field.name), field.name) in known, field.name


def test_an_estimate_needs_no_torch_and_no_second() -> None:
    program = (
        "import sys, time; from planning.__main__ import main; "
        "import planning.cli.estimate; start = time.process_time(); "
        "code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules or time.process_time() - start > 1)"
    )
    words = ["plan", "estimate", *SELECTIVE.replace("22b", "1t").split()]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_model_can_be_a_checkpoints_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.servers import write_checkpoint

    path = write_checkpoint(tmp_path)
    found = values(f"estimate {path} --gpu a100-80g --seq 64", capsys)
    assert 0 < found["parameters"] < 10**6
    code, _, err = run(f"estimate {tmp_path / 'none'} --gpu a100-80g", capsys)
    assert code == 1 and "does not exist" in err


def test_presets_are_named_in_the_help() -> None:
    (parser,) = [parser for word, parser in parsers() if word == "estimate"]
    said = " ".join(parser.format_help().split())
    sizes = [name.removeprefix("gpt3-") for name in presets() if name.startswith("gpt3-")]
    assert all(size in said for size in sizes)


def test_the_architecture_has_every_module_of_planning() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text.split("| in `planning/` ", 1)[1].split("\n\n", 1)[0]
    modules = {path.stem for path in (ROOT / "planning").glob("*.py")} - {"__init__"}
    assert set(re.findall("`([a-z_]+)`", table.split("|---|---|")[1])) >= modules
