"""Start-up benchmark: seconds until invalid arguments are refused and until a server is ready.

A refusal is timed in a process that has already imported serving, from the call of the command to
its return. The refusal figure is the largest median among several invalid arguments. Readiness is
timed from the start of the process, imports included; the time that another process needs to load
the weights is subtracted. Figures are medians of rounds.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.record import SuiteOutput
from bench.harness.server_process import running_server, saved_random_checkpoint
from bench.harness.targets import measured_row
from gpt.config import GPTConfig

WAIT_S = 120.0  # Time limit of a child process.


@dataclass(frozen=True)
class StartupSizes:
    """Number of rounds; tests use fewer."""

    rounds: int = 3


# The child reads its command-line arguments from standard input after its imports.
REFUSAL_SCRIPT = """
import json, sys, time
from serving import __main__ as command, server
arguments = json.loads(sys.stdin.readline())
started = time.perf_counter()
code = command.main(["serve", *arguments])
print(json.dumps([code, time.perf_counter() - started]), flush=True)
"""
LOADING_SCRIPT = """
import sys, time
from bench.harness.offline_engine import load_for_serving
from gpt.formats.registry import open_checkpoint
from serving.config import ServerConfig
started = time.perf_counter()
load_for_serving(open_checkpoint(sys.argv[1]), ServerConfig(sys.argv[1]))
print(time.perf_counter() - started)
"""


def run_suite(
    sizes: StartupSizes = StartupSizes(), network: GPTConfig = GPT2_SMALL
) -> Iterator[SuiteOutput]:
    with saved_random_checkpoint(network) as model, tempfile.TemporaryDirectory() as folder:
        yield from measure_refusals(model, Path(folder), sizes)
        yield from measure_readiness(model, sizes)


def measure_refusals(model: Path, folder: Path, sizes: StartupSizes) -> Iterator[SuiteOutput]:
    """Time the refusal of invalid paths, checkpoint files and settings."""
    seconds_by_fault: dict[str, list[float]] = {}
    for fault, arguments in invalid_arguments(model, folder).items():
        seconds_by_fault[fault] = [time_refusal_s(arguments) for _ in range(sizes.rounds)]
        yield f"  {fault}: refused in {1e3 * statistics.median(seconds_by_fault[fault]):.0f} ms"
    slowest = max(seconds_by_fault, key=lambda fault: statistics.median(seconds_by_fault[fault]))
    seconds = statistics.median(seconds_by_fault[slowest])
    yield measured_row(
        "start/refusal", seconds, f"{seconds:.2f} s ({slowest})", samples=seconds_by_fault
    )


def invalid_arguments(model: Path, folder: Path) -> dict[str, list[str]]:
    """Return arguments of `preamble serve` by the fault that they contain."""
    unknown_setting, truncated_model = folder / "unknown.yaml", folder / "cut"
    unknown_setting.write_text("runing_requests_max: 8\n")
    truncated_model.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        # The safetensors header stays intact and describes more data than the file has.
        (truncated_model / file.name).write_bytes(
            content[:-1000] if file.suffix == ".safetensors" else content
        )
    return {
        "no such path": [str(folder / "nowhere")],
        "an unknown setting": [str(model), "--config", str(unknown_setting)],
        "weights that are cut short": [str(truncated_model)],
        "heads that --tp does not divide": [str(model), "--tp", "5"],
        "an open address without a key": [str(model), "--host", "0.0.0.0"],
    }


def time_refusal_s(arguments: list[str]) -> float:
    completed = subprocess.run(
        [sys.executable, "-c", REFUSAL_SCRIPT],
        input=json.dumps([*arguments, "--port", "0", "--http-port", "0"]) + "\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    code, seconds = json.loads(completed.stdout.splitlines()[-1])
    assert code == 1, f"{arguments} was not refused"
    return float(seconds)


def measure_readiness(model: Path, sizes: StartupSizes) -> Iterator[SuiteOutput]:
    """Time the start of a server with default settings, with reference-logits check and warm-up."""
    ready_s, load_s = [], []
    for _ in range(sizes.rounds):
        command = [sys.executable, "-c", LOADING_SCRIPT, str(model)]
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        load_s.append(float(completed.stdout.splitlines()[-1]))
        started = time.perf_counter()
        with running_server(model):
            ready_s.append(time.perf_counter() - started)
    beyond_load_s = statistics.median(ready_s) - statistics.median(load_s)
    summary = f"{statistics.median(ready_s):.2f} s - {statistics.median(load_s):.2f} s of loading"
    samples = {"ready": ready_s, "load": load_s}
    yield measured_row(
        "start/ready", beyond_load_s, f"{beyond_load_s:.2f} s ({summary})", samples=samples
    )
