"""Command checks of a GPU proof: `preamble generate`, `tune` and `serve` on the device.

The commands use the demo checkpoint. Greedy text must equal the CPU's, in fp32. The tuning run has
a few steps; the server loads its adapter, and gets one request with the adapter and one without.
"""

import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_proof.stage_context import StageContext, StageFailure
from gpt.child_processes import ChildProcess, module_command

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo" / "checkpoint"
PROMPT = "Write the sentence backwards: Anna from Delhi buys a white ring and is proud =>"
NEW_TOKENS = 24
TASK = "mood"
DTYPE = "float32"
# The modules that the commands need; the stubs are generated from the protos (`make protos`).
MODULES = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "aiohttp",
    "jinja2",
    "prometheus_client",
    "protos.preamble.v1.generation_pb2",
)
COMMAND_S_MAX = 60.0
REPLAYED_STEPS = "preamble_engine_replayed_steps_total"
TUNING_SETTINGS = {
    "model": str(MODEL),
    "name": TASK,
    "template": "<|VIRTUAL_PROMPT_0|>{prompt} {completion}",
    "virtual_tokens": 10,
    "steps": 10,
    "batch_examples": 8,
    "dtype": DTYPE,
}


def check_commands(stage: StageContext) -> None:
    """Run the commands on the device, and compare the text with the CPU's."""
    missing = [name for name in MODULES if not _is_importable(name)]
    if missing:
        stage.figures.skip(f"the commands need {', '.join(missing)}")
        return
    flags = ["--model", MODEL, "--dtype", DTYPE, "--max-new-tokens", NEW_TOKENS, PROMPT]
    cpu_text = _run(stage, "generate", "--device", "cpu", *flags).strip()
    text = _run(stage, "generate", "--device", stage.device, *flags).strip()
    if text != cpu_text:
        raise StageFailure(f"preamble generate: the text is {text!r}, the CPU's is {cpu_text!r}")
    with tempfile.TemporaryDirectory() as folder:
        adapters = Path(folder) / "adapters"
        _tune(stage, Path(folder), adapters)
        with _running_server(stage, Path(folder), adapters) as address:
            served_text = _complete(address, model="")
            if served_text.strip() != cpu_text:
                raise StageFailure(f"preamble serve: {served_text!r}, the CPU's is {cpu_text!r}")
            _complete(address, model=TASK)
            replayed = _read_metric(address, REPLAYED_STEPS)
    stage.figures.add("replayed steps of the server", replayed)
    if stage.on_gpu and not replayed:
        raise StageFailure("preamble serve: no step was replayed")


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # Of a parent package.
        return False


def _run(stage: StageContext, subcommand: str, *words: object) -> str:
    """Run a command, and return its output; record its seconds."""
    command = module_command(["preamble", subcommand, *map(str, words)])
    start = time.perf_counter()
    try:
        process = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=True
        )
    except subprocess.CalledProcessError as error:
        raise StageFailure(f"preamble {subcommand}: {_last_line(error.stderr)}") from None
    except subprocess.TimeoutExpired:
        raise StageFailure(f"preamble {subcommand}: no end after {COMMAND_S_MAX:g} s") from None
    device = words[1] if words[0] == "--device" else stage.device
    stage.figures.add(f"{subcommand} on {device}, s", round(time.perf_counter() - start, 2))
    return process.stdout


def _tune(stage: StageContext, folder: Path, adapters: Path) -> None:
    """Train an adapter for a few steps."""
    data, settings_path = folder / "data.jsonl", folder / "tune.yaml"
    command = module_command(["examples.demo.tasks", "--task", TASK, "--count", "64"])
    with data.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, timeout=COMMAND_S_MAX, check=True)
    settings = TUNING_SETTINGS | {
        "data": str(data),
        "output": str(adapters),
        "device": stage.device,
    }
    settings_path.write_text(json.dumps(settings))  # JSON is YAML.
    run = json.loads(_run(stage, "tune", settings_path, "--json"))
    stage.figures.add("loss of the last tuning step", round(run["last_loss"], 4))


@contextmanager
def _running_server(stage: StageContext, folder: Path, adapters: Path) -> Iterator[str]:
    """Start a server; yield its HTTP address. The server must end after SIGTERM."""
    words: list[str | Path] = [MODEL, "--adapters", adapters, "--device", stage.device]
    words += ["--dtype", DTYPE, "--port", "0", "--http-port", "0"]
    log = folder / "server.log"
    start = time.perf_counter()
    with log.open("w") as file:
        server = ChildProcess(
            module_command(["preamble", "serve", *words]), stdout=subprocess.PIPE, stderr=file
        )
        try:
            ready = server.read_line(COMMAND_S_MAX)
            addresses = dict(word.split("=", 1) for word in ready.split() if "=" in word)
            if "http" not in addresses:
                raise StageFailure(f"preamble serve: {_last_line(log.read_text())}")
            stage.figures.add("server ready, s", round(time.perf_counter() - start, 2))
            yield addresses["http"]
            server.terminate()
            if code := server.wait(COMMAND_S_MAX):
                raise StageFailure(f"preamble serve: exit code {code} after SIGTERM")
        except subprocess.TimeoutExpired:
            raise StageFailure(f"preamble serve: {_last_line(log.read_text())}") from None
        finally:
            server.stop(timeout_s=0)


def _complete(address: str, model: str) -> str:
    """Return the text of a greedy completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=COMMAND_S_MAX) as response:
        completion: Any = json.load(response)
    return str(completion["choices"][0]["text"])


def _read_metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=COMMAND_S_MAX) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.partition("{")[0].split()[0] == name
    )


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
