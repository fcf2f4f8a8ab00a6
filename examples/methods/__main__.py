"""`python -m examples.methods`: six tuning methods on three tasks of a small real model.

The model is that of `make real-model`, SmolLM2-135M-Instruct, which must have been run before. Each
task has 3,000 training records from a package of PyPI. For each task and method, `preamble tune`
learns an adapter with the method's default settings, and `preamble tune --evaluate` scores it on
held-out records; then one server answers requests of all adapters. The results of finished parts
are kept in build/methods, so the same command continues an interrupted run.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

import serving
from examples.methods.records import TASKS, Task, write_records
from gpt.adapters.adapter_file import latest_adapter
from serving.config import ServerConfig
from serving.request import Ask

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = Path("examples/methods")
BUILD = Path("build/methods")
MODEL = Path("build/real_model/megatron")
STEPS = 300
VIRTUAL_TOKENS = 20
# The settings of each method beside the defaults.
METHODS: Mapping[str, Mapping[str, object]] = {
    "prompt-tuning": {"virtual_tokens": VIRTUAL_TOKENS},
    "mlp": {"virtual_tokens": VIRTUAL_TOKENS},
    "prefix": {"virtual_tokens": VIRTUAL_TOKENS},
    "ia3": {},
    "lora": {},
    "alora": {},
}
TITLES = {"mlp": "p-tuning (`mlp`)", "alora": "activated LoRA"}
SERVED_REQUESTS = 8
SERVED_TOKENS = 64
SERVED_ROUNDS = 5


@dataclass(frozen=True)
class Result:
    """The figures of a method on a task."""

    task: str
    method: str
    accuracy: float  # In percent, on held-out records.
    base_accuracy: float  # Of the model without the adapter.
    minutes: float  # Of training.
    file_bytes: int


def settings_of(task: Task, method: str) -> dict[str, object]:
    template = task.template
    if "virtual_tokens" in METHODS[method]:
        template = f"<|VIRTUAL_PROMPT_0|>{template}"
    settings = {
        "model": str(MODEL),
        "name": adapter_name(task.name, method),
        "method": method,
        "data": str(BUILD / task.name / "train.jsonl"),
        "validation": str(BUILD / task.name / "validation.jsonl"),
        "template": template,
        "output": str(BUILD / "adapters"),
        "steps": STEPS,
        **METHODS[method],
    }
    return settings | ({"invocation": task.answer_text} if method == "alora" else {})


def adapter_name(task: str, method: str) -> str:
    return f"{task}-{method}"


def download(packages: Path) -> None:
    """Download the packages and check their digests."""
    if len(list(packages.glob("*.whl"))) < len(TASKS):
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
        flags = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        files = ["-d", str(packages), "-r", str(EXAMPLE / "packages.txt")]
        subprocess.run([*command, *flags, *files], check=True)


def measure(task: Task, method: str) -> Result:
    """Train and score an adapter."""
    settings = BUILD / f"{adapter_name(task.name, method)}.yaml"
    settings.write_text(yaml.safe_dump(settings_of(task, method)), "utf-8")
    start = time.monotonic()
    run_preamble("tune", str(settings))
    minutes = (time.monotonic() - start) / 60
    latest = latest_adapter(BUILD / "adapters", adapter_name(task.name, method))
    if latest is None:
        raise SystemExit(f"{BUILD / 'adapters'} has no adapter of {settings}")
    held_out_file = BUILD / task.name / "held-out.jsonl"
    evaluated = str(latest[0]), str(held_out_file)
    output = run_preamble("tune", "--evaluate", *evaluated, "--model", str(MODEL))
    ((accuracy, base_accuracy),) = re.findall(
        r"^accuracy +([0-9.]+)% +([0-9.]+)%$", output, re.MULTILINE
    )
    size = latest[0].stat().st_size
    return Result(task.name, method, float(accuracy), float(base_accuracy), minutes, size)


def run_preamble(*words: str) -> str:
    """Run a `preamble` command, print its output and return it."""
    print(f"$ preamble {' '.join(words)}", flush=True)
    process = subprocess.run(
        [sys.executable, "-m", "preamble", *words], capture_output=True, text=True, check=False
    )
    print(process.stdout, flush=True)
    if process.returncode:
        raise SystemExit(f"the command ended with {process.returncode}: {process.stderr}")
    return process.stdout


def served_tokens_per_s(task: Task) -> dict[str, float]:
    """Return the median speed of a batch of requests, by method; "": the base model."""
    config = ServerConfig(str(MODEL), adapters=str(BUILD / "adapters"))
    lines = (BUILD / task.name / "held-out.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)[task.fields[0]] for line in lines[:SERVED_REQUESTS]]
    speeds: dict[str, list[float]] = {}
    with serving.open_engine(config) as engine:
        for _ in range(1 + SERVED_ROUNDS):
            for method in ("", *METHODS):
                asks = [
                    Ask(
                        f"{task.input_text}{text}{task.answer_text}",
                        adapters=(adapter_name(task.name, method),) if method else (),
                        max_new_tokens=SERVED_TOKENS,
                        ignore_ends=True,
                    )
                    for text in texts
                ]
                start = time.perf_counter()
                completions = engine.generate(asks)
                seconds = time.perf_counter() - start
                tokens = sum(len(completion.token_ids) for completion in completions)
                speeds.setdefault(method, []).append(tokens / seconds)
    return {method: statistics.median(samples[1:]) for method, samples in speeds.items()}


def table(results: Sequence[Result], speeds: Mapping[str, float]) -> str:
    """Return the results as a Markdown table: a row for each method."""
    tasks = list(dict.fromkeys(result.task for result in results))
    header = ["method", *(f"{task}, %" for task in tasks), "minutes", "file, kB", "tokens/s served"]
    by_cell = {(result.method, result.task): result for result in results}
    base = [by_cell["lora", task].base_accuracy for task in tasks]
    rows = [["none", *(f"{value:.1f}" for value in base), "", "", f"{speeds['']:.0f}"]]
    for method in METHODS:
        cells = [by_cell[method, task] for task in tasks]
        minutes = ", ".join(f"{cell.minutes:.1f}" for cell in cells)
        size = max(cell.file_bytes for cell in cells) / 1000
        accuracies = [f"{cell.accuracy:.1f}" for cell in cells]
        title = TITLES.get(method, method)
        rows.append([title, *accuracies, minutes, f"{size:,.0f}", f"{speeds[method]:.0f}"])
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.methods", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    flags = parser.parse_args(argv)
    os.chdir(ROOT)  # All paths are relative to it.
    if not MODEL.exists():
        print(f"{MODEL} does not exist; run `make real-model` first", file=sys.stderr)
        return 1
    packages = BUILD / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    download(packages)
    results = []
    for task in (TASKS[name] for name in flags.tasks):
        write_records(task, packages, BUILD / task.name)
        for method in flags.methods:
            file = BUILD / f"{adapter_name(task.name, method)}.json"
            if not file.exists():
                file.write_text(json.dumps(asdict(measure(task, method))), "utf-8")
            results.append(Result(**json.loads(file.read_text("utf-8"))))
            print(results[-1], flush=True)
    if flags.tasks == list(TASKS) and flags.methods == list(METHODS):
        page = table(results, served_tokens_per_s(TASKS["sentiment"]))
        (BUILD / "table.md").write_text(page + "\n", "utf-8")
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
