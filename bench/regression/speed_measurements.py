"""Speed measurements of one checkout: start, generation, conversion, front end, adapters, tuning.

Each measurement runs the checkout's own code in new child processes and returns one figure per row.
Nothing is compared with other engines.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from bench.harness.checkouts import Checkout, CheckoutError, this_checkout
from bench.harness.model_shapes import GPT2, LLAMA, ModelShape
from bench.harness.server_process import ServerProcess
from bench.regression.speed_verdict import SpeedRow
from bench.suites.conversion import drop_page_cache, process_memory_kib
from clients.load.generator import LengthSampler, LoadSpec, ServerEndpoint, run_load
from clients.load.report import LoadReport
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter

SAMPLE_S = 0.02  # Interval of memory samples.
Figures = Mapping[str, float]  # Maps the name of a row to its figure.
# The engine settings of the profile `throughput`, and a fixed size of the KV cache. `--profile
# throughput` is not used: its settings can come from a plan that `preamble plan` saved on this
# machine, and would then differ between machines.
THROUGHPUT: Mapping[str, Any] = {
    "running_requests_max": 256,
    "queue_requests_max": 4096,
    "step_tokens_max": 2048,
    "prefill_stall_ms_max": 1000.0,
    "kv_tokens_max": 1 << 16,
}


@dataclass(frozen=True)
class InputSizes:
    """Sizes of models and loads; a test uses smaller ones."""

    gpt2: Mapping[str, Any] = field(default_factory=dict)  # Overrides of the shape's config.
    llama: Mapping[str, Any] = field(default_factory=dict)
    requests: Sequence[int] = (8, 32)
    prompt_tokens: int = 128
    new_tokens: int = 128
    long_prompt_tokens: int = 960
    adapters: int = 64
    first_token_requests: int = 50
    streams: int = 64
    steps: int = 12  # Steps of a tuning run; the first two are not counted.
    text_tokens: int = 128
    long_text_tokens: int = 256


class BenchInputs:
    """Models and files for both checkouts; each is created at its first use."""

    def __init__(self, folder: Path, sizes: InputSizes = InputSizes(), seed: int = 0) -> None:
        self.folder = folder
        self.sizes = sizes
        self.random = random.Random(seed)

    def model(self, shape: ModelShape) -> Path:
        name, settings = ("gpt2", self.sizes.gpt2) if shape is GPT2 else ("llama", self.sizes.llama)
        path = self.folder / name
        if not path.exists():
            shape.save_random(path, **settings)
        return path

    def vocabulary(self, shape: ModelShape) -> int:
        settings = self.sizes.gpt2 if shape is GPT2 else self.sizes.llama
        return int({**shape.settings, **settings}["vocab_size"])

    def split_checkpoint(self) -> Path:
        """Return the source of the conversions: a Megatron checkpoint at TP4 x PP2."""
        path = self.folder / "split"
        if not path.exists():
            arguments: list[str | Path] = ["preamble", "convert", self.model(LLAMA), path]
            arguments += ["--to", "megatron", "--tp", "4", "--pp", "2"]
            this_checkout().command(arguments, self.folder)
        return path

    def adapters(self) -> Path:
        path = self.folder / "adapters"
        if not path.exists():
            path.mkdir()
            hidden = {**GPT2.settings, **self.sizes.gpt2}["n_embd"]
            generator = torch.Generator().manual_seed(0)
            for index in range(self.sizes.adapters):
                table = torch.randn(20, hidden, generator=generator) * 0.02
                adapter = build_adapter(Card(f"task{index}"), table)
                save_adapter(adapter, path / f"task{index}@1.safetensors")
        return path

    def records(self, low: int, high: int) -> Path:
        """Return a file of training records of `low` to `high` tokens.

        The texts are token ids, because the model has no tokenizer.
        """
        path = self.folder / f"records-{low}-{high}.jsonl"
        if not path.exists():
            draw, vocabulary = random.Random(0), self.vocabulary(GPT2)
            lines = []
            for _ in range(64):
                ids = [str(draw.randrange(vocabulary)) for _ in range(draw.randint(low, high))]
                record = {"prompt": " ".join(ids[:-8]), "completion": " ".join(ids[-8:])}
                lines.append(json.dumps(record))
            path.write_text("".join(f"{line}\n" for line in lines))
        return path


# Programs of child processes. GENERATE and ADAPTERS use only the documented Python API. Each
# workload has a warm-up.
GENERATE = """
import json, random, sys, time
import serving
from serving.config import ServerConfig
from serving.request import Ask
work = json.loads(sys.stdin.readline())
draw = random.Random(work["seed"])
def duration(engine, requests, prompt, new):
    asks = [
        Ask(
            prompt=tuple(draw.choices(range(work["vocabulary"]), k=prompt)),
            max_new_tokens=new, ignore_ends=True, service="throughput",
        )
        for _ in range(requests)
    ]
    started = time.perf_counter()
    completions = list(engine.generate(asks))
    seconds = time.perf_counter() - started
    counts = [len(answer.token_ids) for answer in completions]
    if counts != [new] * requests:
        sys.exit(f"{requests} requests of {new} tokens generated {counts}")
    return seconds
rates = {}
with serving.open_engine(ServerConfig(**work["config"])) as engine:
    for name, requests, prompt, new in work["workloads"]:
        duration(engine, requests, prompt, min(new, 8))
        seconds = duration(engine, requests, prompt, new)
        if requests == 1 and new > 1:
            first = min(duration(engine, 1, prompt, 1) for _ in range(3))
            rates[name] = (new - 1) / (seconds - first)
        else:
            rates[name] = requests * (new if new > 1 else prompt) / seconds
print(json.dumps(rates))
"""
ADAPTERS = """
import json, random, statistics, sys, time
import serving
from serving.config import ServerConfig
from serving.request import Ask
work = json.loads(sys.stdin.readline())
draw = random.Random(work["seed"])
def request_for(adapter, new):
    ids = tuple(draw.choices(range(work["vocabulary"]), k=work["text"]))
    return Ask(prompt=ids, adapters=(adapter,), max_new_tokens=new, ignore_ends=True)
def duration(engine, asks):
    started = time.perf_counter()
    for answer in engine.generate(asks):
        if answer.error is not None:
            raise answer.error
    return time.perf_counter() - started
names = work["names"]
with serving.open_engine(ServerConfig(**work["config"])) as engine:
    duration(engine, [request_for(name, 1) for name in names])
    mixed = statistics.median(
        duration(engine, [request_for(name, work["new"]) for name in names]) for _ in range(3)
    )
    firsts = [duration(engine, [request_for(names[0], 1)]) for _ in range(work["first_tokens"])]
rates = {
    "adapters/mixed": len(names) * work["new"] / mixed,
    "adapters/first": 1e3 * statistics.median(firsts),
}
print(json.dumps(rates))
"""
# CONVERT starts with a dry run, so that the measurement does not include imports.
CONVERT = """
import json, os, sys, time
import preamble
arguments = json.loads(sys.stdin.readline())
if preamble.main([*arguments, "--dry-run"]) != 0:
    sys.exit("the conversion cannot be planned")
print("idle", flush=True)
sys.stdin.readline()
started = time.perf_counter()
code = preamble.main(arguments)
os.sync()
print(json.dumps({"code": code, "seconds": time.perf_counter() - started}))
"""


# The rows of batches are named after the default numbers of requests in `InputSizes.requests`.
BATCH_ROW_NAMES = ("8", "32")


def generation_measurement(shape: ModelShape, weights: str, table: str) -> "Measurement":
    """Return a measurement of our engine on the workloads of one table of the suite `peers`."""

    def measure(checkout: Checkout, inputs: BenchInputs) -> Figures:
        sizes = inputs.sizes
        # A workload is (row name, number of requests, prompt tokens, new tokens). Row names contain
        # the default numbers of requests, even if a test sends fewer.
        workloads: list[tuple[str, int, int, int]] = []
        if table != "llama":
            workloads.append(("1", 1, sizes.prompt_tokens, sizes.new_tokens))
        for name, count in zip(BATCH_ROW_NAMES, sizes.requests, strict=True):
            workloads.append((name, count, sizes.prompt_tokens, sizes.new_tokens))
        if table == "gpt2":
            workloads.append(("960", 1, sizes.long_prompt_tokens, 1))
        config: dict[str, Any] = {"model": str(inputs.model(shape)), **THROUGHPUT}
        if weights != "auto":
            config["weights"] = weights
        work = {"config": config, "workloads": workloads, "vocabulary": inputs.vocabulary(shape)}
        figures = checkout.call(
            GENERATE, work | {"seed": inputs.random.randrange(1 << 30)}, inputs.folder
        )
        return {f"peers/{table}/{name}": figure for name, figure in figures.items()}

    return measure


def measure_adapters(checkout: Checkout, inputs: BenchInputs) -> Figures:
    sizes = inputs.sizes
    work = {
        "config": {
            "model": str(inputs.model(GPT2)),
            "adapters": str(inputs.adapters()),
            "kv_tokens_max": 1 << 16,
        },
        "names": [f"task{index}" for index in range(sizes.adapters)],
        "vocabulary": inputs.vocabulary(GPT2),
        "seed": inputs.random.randrange(1 << 30),
        "text": min(44, sizes.prompt_tokens),
        "new": min(32, sizes.new_tokens),
        "first_tokens": sizes.first_token_requests,
    }
    return checkout.call(ADAPTERS, work, inputs.folder)


def measure_startup(checkout: Checkout, inputs: BenchInputs) -> Figures:
    """Time two runs of `preamble serve` from process start.

    The first run has the path of a missing model, and is timed until the process exits. The second
    run has a model, and is timed until the server is ready.
    """
    model = inputs.model(GPT2)
    arguments = ["-m", "preamble", "serve", str(inputs.folder / "absent")]
    started = time.perf_counter()
    with checkout.started(arguments, inputs.folder) as (process, _):
        if process.wait(300) != 1:
            raise CheckoutError(f"{checkout.name}: a path that does not exist was not refused")
    refused = time.perf_counter() - started
    started = time.perf_counter()
    with checkout.server([model], inputs.folder):
        ready = time.perf_counter() - started
    return {"start/refusal": refused, "start/ready": ready}


CONVERSION_TARGETS: Mapping[str, Sequence[str]] = {
    "tp2": ("--to", "megatron", "--tp", "2"),
    "hf": ("--to", "hf"),
    "native": ("--to", "native"),
    "torch-dist": ("--to", "megatron-dist"),
}


def measure_conversion(checkout: Checkout, inputs: BenchInputs) -> Figures:
    source = inputs.split_checkpoint()
    figures = dict[str, float]()
    peak = 0
    for target, flags in CONVERSION_TARGETS.items():
        with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
            arguments = ["convert", str(source), f"{folder}/target", *flags]
            with checkout.started(["-c", CONVERT], Path(folder), with_input=True) as (process, log):
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(arguments) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                while line not in ("", "idle\n"):  # The dry run prints the conversion plan.
                    line = process.stdout.readline()
                if not line:
                    raise CheckoutError(
                        f"{checkout.name}: the dry run of convert {' '.join(flags)} failed: "
                        f"{log.read_text()[-300:]}"
                    )
                idle = process_memory_kib(process.pid)
                drop_page_cache(source)
                process.stdin.write("\n")
                process.stdin.flush()
                while process.poll() is None:
                    peak = max(peak, process_memory_kib(process.pid) - idle)
                    time.sleep(SAMPLE_S)
                reply = json.loads(process.stdout.read().splitlines()[-1])
            if reply["code"] != 0:
                raise CheckoutError(f"{checkout.name}: convert {' '.join(flags)} failed")
            figures[f"convert/{target}"] = reply["seconds"]
    return figures | {"convert/memory": peak / 1024}


def measure_server(checkout: Checkout, inputs: BenchInputs) -> Figures:
    """Send a closed-loop load from this process to a server, once under each profile."""
    sizes = inputs.sizes
    figures = dict[str, float]()
    lengths = LengthSampler("fixed", min(32, sizes.prompt_tokens), min(32, sizes.prompt_tokens))
    new = min(64, sizes.new_tokens)
    spec = LoadSpec(
        concurrency=sizes.streams,
        requests_max=2 * sizes.streams,
        warmup_requests=0,
        prompt_length=lengths,
        output_length=LengthSampler("fixed", new, new),
    )
    limits = inputs.folder / "limits.yaml"
    limits.write_text(yaml.safe_dump({"prove": False, "kv_tokens_max": 1 << 16}))
    for profile in ("throughput", "latency"):
        arguments: list[str | Path] = [inputs.model(GPT2), "--profile", profile, "--config", limits]
        with checkout.server(arguments, inputs.folder) as server:
            process = ServerProcess(server.pid, server.grpc)
            before = process.cpu_time
            report = LoadReport.from_run(run_load(ServerEndpoint(server.grpc), spec))
            spent = process.cpu_time.since(before)
        if report.ok < report.sent or report.itl_ms is None:
            raise CheckoutError(
                f"{checkout.name}: only {report.ok} of {report.sent} requests succeeded with the "
                f"profile {profile}"
            )
        if profile == "throughput":
            figures["front/share"] = 1e6 * spent.frontend_s / report.tokens
            figures["front/throughput"] = report.tokens_per_s
        else:
            figures["front/latency"] = report.itl_ms.p95
    return figures


def measure_frontend(checkout: Checkout, inputs: BenchInputs) -> Figures:
    """Run the checkout's own benchmark of its front end, with the null engine."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        arguments = ["bench", "--only", "front", "--parts", "tokens"]
        checkout.command(arguments, Path(folder))
        (path,) = (Path(folder) / "build" / "bench").glob("*.json")
        rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    return {"front/tokens": float(rows["front/tokens"]["value"])}


def measure_tuning(checkout: Checkout, inputs: BenchInputs) -> Figures:
    """Run `preamble tune`; return its peak memory and the text tokens per second of metrics.csv."""
    sizes = inputs.sizes
    figures = dict[str, float]()
    for name, virtual, low, high in (
        ("20", 20, sizes.text_tokens, sizes.text_tokens),
        ("100", 100, sizes.text_tokens, sizes.text_tokens),
        ("mixed", 20, 16, sizes.long_text_tokens),
    ):
        with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
            settings = {
                "model": str(inputs.model(GPT2)),
                "name": "speed",
                "data": str(inputs.records(low, high)),
                "template": "<|VIRTUAL_PROMPT_0|>{prompt} {completion}",
                "output": "out",
                "run": "run",
                "virtual_tokens": virtual,
                "steps": sizes.steps,
                "batch_examples": 8,
            }
            path = Path(folder) / "speed.yaml"
            path.write_text(yaml.safe_dump(settings))
            peak = 0
            arguments = ["-m", "preamble", "tune", str(path)]
            with checkout.started(arguments, Path(folder)) as (process, log):
                while process.poll() is None:
                    peak = max(peak, process_memory_kib(process.pid))
                    time.sleep(SAMPLE_S)
                if process.returncode:
                    raise CheckoutError(
                        f"{checkout.name}: preamble tune failed: {log.read_text()[-300:]}"
                    )
            (metrics,) = (Path(folder) / "run").rglob("metrics.csv")
            figures[f"tuning/speed-{name}"] = tokens_per_s(metrics.read_text())
            figures[f"tuning/memory-{name}"] = peak / 1024
    return figures


def tokens_per_s(metrics: str) -> float:
    """Return the text tokens per second of a metrics.csv, without the first two steps."""
    head, *lines = (line.split(",") for line in metrics.splitlines())
    rows = [dict(zip(head, line, strict=True)) for line in lines][2:]
    seconds = sum(float(row["seconds"]) for row in rows)
    return sum(float(row["text_tokens"]) for row in rows) / seconds


Measurement = Callable[[Checkout, BenchInputs], Figures]


@dataclass(frozen=True)
class MeasurementGroup:
    """Rows that one measurement returns together."""

    suite: str  # The name that --only takes.
    part: str  # The name that --parts takes; empty: the group runs with any --parts.
    measure: Measurement
    rows: Sequence[SpeedRow]


def _tokens_per_s(name: str, title: str) -> SpeedRow:
    return SpeedRow(name, title, "tokens/s")


GROUPS = (
    MeasurementGroup(
        "start",
        "",
        measure_startup,
        (
            SpeedRow("start/refusal", "time to refuse a missing path", "s"),
            SpeedRow("start/ready", "time to ready, GPT-2 small", "s"),
        ),
    ),
    MeasurementGroup(
        "peers",
        "gpt2",
        generation_measurement(GPT2, "auto", "gpt2"),
        (
            _tokens_per_s("peers/gpt2/1", "GPT-2 small, one request, decoding"),
            _tokens_per_s("peers/gpt2/8", "GPT-2 small, 8 requests of 128 + 128"),
            _tokens_per_s("peers/gpt2/32", "GPT-2 small, 32 requests of 128 + 128"),
            _tokens_per_s("peers/gpt2/960", "GPT-2 small, a prompt of 960"),
        ),
    ),
    MeasurementGroup(
        "peers",
        "int8",
        generation_measurement(GPT2, "int8", "int8"),
        (
            _tokens_per_s("peers/int8/1", "GPT-2 small int8, one request, decoding"),
            _tokens_per_s("peers/int8/8", "GPT-2 small int8, 8 requests"),
            _tokens_per_s("peers/int8/32", "GPT-2 small int8, 32 requests"),
        ),
    ),
    MeasurementGroup(
        "peers",
        "llama",
        generation_measurement(LLAMA, "auto", "llama"),
        (
            _tokens_per_s("peers/llama/8", "Llama-shaped 350M, 8 requests"),
            _tokens_per_s("peers/llama/32", "Llama-shaped 350M, 32 requests"),
        ),
    ),
    MeasurementGroup(
        "convert",
        "",
        measure_conversion,
        (
            *(
                SpeedRow(f"convert/{target}", f"350M, TP4 x PP2 to {target}", "s")
                for target in CONVERSION_TARGETS
            ),
            SpeedRow("convert/memory", "memory to convert, above idle", "MiB"),
        ),
    ),
    MeasurementGroup(
        "front",
        "tokens",
        measure_frontend,
        (_tokens_per_s("front/tokens", "streamed tokens per CPU second"),),
    ),
    MeasurementGroup(
        "front",
        "share",
        measure_server,
        (
            SpeedRow("front/share", "front end's CPU per token", "us"),
            _tokens_per_s("front/throughput", "closed loop, profile throughput"),
            SpeedRow("front/latency", "p95 inter-token latency, profile latency", "ms"),
        ),
    ),
    MeasurementGroup(
        "adapters",
        "",
        measure_adapters,
        (
            _tokens_per_s("adapters/mixed", "64 adapters of 20 rows in a batch"),
            SpeedRow("adapters/first", "first token, loaded adapter of 20 rows", "ms"),
        ),
    ),
    MeasurementGroup(
        "tuning",
        "",
        measure_tuning,
        (
            _tokens_per_s("tuning/speed-20", "tuning 20 virtual tokens"),
            _tokens_per_s("tuning/speed-100", "tuning 100 virtual tokens"),
            _tokens_per_s("tuning/speed-mixed", "tuning 20, mixed lengths"),
            SpeedRow("tuning/memory-20", "memory, 20 virtual tokens", "MiB"),
            SpeedRow("tuning/memory-100", "memory, 100 virtual tokens", "MiB"),
            SpeedRow("tuning/memory-mixed", "memory, mixed lengths", "MiB"),
        ),
    ),
)
SUITES = tuple(dict.fromkeys(group.suite for group in GROUPS))


def select_groups(suite: str | None, parts: Sequence[str]) -> list[MeasurementGroup]:
    """Return the groups that --only and --parts select."""
    return [
        group
        for group in GROUPS
        if suite in (None, group.suite) and (not parts or not group.part or group.part in parts)
    ]
