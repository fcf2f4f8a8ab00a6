"""Published training runs, layer times and activation sizes, as jobs and splits to predict.

`planning/published/training.yaml` contains the numbers; this module converts them into arguments of
a prediction. A speed in TFLOP/s is converted into seconds with the FLOPs formula of its source.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpt.config import GPTConfig
from gpt.costs.training import forward_flops, recompute_flops, step_flops
from planning.hardware import Cluster, find_device
from planning.training.estimate import TrainingJob, TrainingSplit

RUNS_FILE = Path(__file__).with_name("training.yaml")


@dataclass(frozen=True)
class PublishedRun:
    """A published run and the duration of its steps."""

    name: str
    job: TrainingJob
    split: TrainingSplit
    cluster: Cluster
    seconds: float
    noise: float  # Expected relative difference between two runs of this configuration.
    mfu: float | None = None  # Published MFU in percent; None: not published.
    hfu: float | None = None  # Published HFU in percent; None: not published.


@dataclass(frozen=True)
class PublishedTable:
    """A table of published runs."""

    name: str
    source: str
    # "runs" (speeds in numbers), "trend" (speeds read from a plot), or "zero3" (runs with ZeRO-3,
    # which Preamble does not have).
    kind: str
    runs: Sequence[PublishedRun]

    @property
    def device(self) -> str:
        return self.runs[0].cluster.device.name


@dataclass(frozen=True)
class PublishedLayer:
    """A published time of a single layer."""

    name: str
    job: TrainingJob
    split: TrainingSplit
    cluster: Cluster
    forward_ms: float
    backward_ms: float
    noise: float  # As in `PublishedRun`.


@dataclass(frozen=True)
class PublishedActivations:
    """Published memory of the first pipeline stage of a model."""

    name: str
    job: TrainingJob
    splits: Mapping[str, TrainingSplit]  # The split of each of ACTIVATION_ROWS, by its name.
    activation_gib: Sequence[float]  # Activation memory of each split.
    percent: Sequence[float]  # 100 x activation memory / activation memory of the first split.
    states_gib: float  # Parameters, gradients and optimizer state.


@dataclass(frozen=True)
class PublishedChoice:
    """A split that another planner chose, with unknown speed."""

    name: str
    job: TrainingJob
    split: TrainingSplit
    cluster: Cluster
    recompute: tuple[str, ...]  # Recompute modes that the other planner tried; empty: all modes.


# The configurations in the figures of K22 (see training.yaml), as fields of a TrainingSplit.
ACTIVATION_ROWS: Mapping[str, Mapping[str, Any]] = {
    "TP": {},
    "TP, SP": {"sequence_parallel": True},
    "TP, selective": {"recompute": "selective"},
    "TP, SP, selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}


@cache
def _read_yaml() -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.safe_load(RUNS_FILE.read_text())
    return content


@cache
def run_tables() -> Sequence[PublishedTable]:
    tables = []
    for table in _read_yaml()["tables"]:
        rows = [_make_run({**table, **row}) for row in table["rows"]]
        tables.append(
            PublishedTable(table["name"], table["source"], table.get("kind", "runs"), rows)
        )
    return tables


@cache
def published_choices() -> Sequence[PublishedChoice]:
    """Return the published choices of other planners."""
    table = _read_yaml()["chosen"]
    choices = []
    for row in table["rows"]:
        fields_of_row = {**table, **row}
        job, split = _make_job(fields_of_row), _make_split(fields_of_row)
        # The planner of 2022 had no distributed optimizer.
        job = replace(job, distributed_optimizer=row["year"] > 2022)
        cluster = Cluster(find_device(fields_of_row["gpu"]), split.gpus)
        name = f"{row['year']}: {_run_name(fields_of_row, split)}"
        choices.append(PublishedChoice(name, job, split, cluster, tuple(row.get("tried", ()))))
    return choices


@cache
def layer_times() -> Sequence[PublishedLayer]:
    table = _read_yaml()["layers"]
    return [
        PublishedLayer(
            name=f"{row['recompute']}{', SP' if row.get('sequence_parallel') else ''}",
            job=_make_job({"batch": table["micro_batch"], **table}),
            split=_make_split({**table, **row}),
            cluster=Cluster(find_device(table["gpu"]), table["tp"]),
            forward_ms=row["forward_ms"],
            backward_ms=row["backward_ms"],
            noise=table["noise"],
        )
        for row in table["rows"]
    ]


@cache
def published_activations() -> Sequence[PublishedActivations]:
    return list(_read_activations())


def _read_activations() -> Iterator[PublishedActivations]:
    table = _read_yaml()["activations"]
    for row in table["rows"]:
        fields_of_row = {**table, **row}
        splits = {
            name: _make_split({**fields_of_row, **split_fields})
            for name, split_fields in ACTIVATION_ROWS.items()
        }
        yield PublishedActivations(
            row["model"],
            _make_job(fields_of_row),
            splits,
            row["gib"],
            row["percent"],
            row["states_gib"],
        )


def _make_run(row: Mapping[str, Any]) -> PublishedRun:
    job, split = _make_job(row), _make_split(row)
    return PublishedRun(
        name=_run_name(row, split),
        job=job,
        split=split,
        cluster=Cluster(find_device(row["gpu"]), split.gpus),
        seconds=_step_s(row, job, split),
        noise=row.get("noise", 0.05),
        mfu=row.get("mfu"),
        hfu=row.get("hfu"),
    )


def _make_job(row: Mapping[str, Any]) -> TrainingJob:
    model = _read_yaml()["models"][row["model"]]
    config = GPTConfig(
        num_layers=model["layers"],
        hidden_size=model["hidden"],
        num_attention_heads=model["heads"],
        vocab_size=model.get("vocab", row.get("vocab")),
        max_position_embeddings=row["sequence"],
        ffn_hidden_size=model.get("ffn", 0),
        num_query_groups=model.get("kv_heads", 0),
        gated=model.get("gated", False),
        untie_embeddings_and_output_weights=model.get("untied", False),
    )
    return TrainingJob(
        config,
        sequence=row["sequence"],
        global_batch=row["batch"],
        trainable=row.get("trainable", "all"),
        dtype=row.get("dtype", "bfloat16"),
    )


def _make_split(row: Mapping[str, Any]) -> TrainingSplit:
    return TrainingSplit(
        tp=row.get("tp", 1),
        pp=row.get("pp", 1),
        dp=row.get("dp", 1),
        vpp=row.get("vpp", 1),
        micro_batch=row.get("micro_batch", 1),
        recompute=row.get("recompute", "none"),
        sequence_parallel=row.get("sequence_parallel", False),
    )


def _run_name(row: Mapping[str, Any], split: TrainingSplit) -> str:
    parts = [row["model"], f"{split.gpus} GPUs", f"t{split.tp} p{split.pp} d{split.dp}"]
    if split.vpp > 1:
        parts[-1] += f" v{split.vpp}"
    parts.append(f"B{row['batch']} b{split.micro_batch}")
    if split.recompute != "none":
        parts.append(split.recompute)
    if split.sequence_parallel and split.tp > 1:
        parts.append("SP")
    if row.get("trainable") == "adapter":
        parts.append("frozen")
    return " ".join(parts)


def _step_s(row: Mapping[str, Any], job: TrainingJob, split: TrainingSplit) -> float:
    if "seconds" in row and "tflops" not in row:
        return float(row["seconds"])
    if "tflops" in row:
        flops = forward_flops(job.model, job.global_batch, job.sequence)
        executed_flops = step_flops(flops, job.trainable) + recompute_flops(flops, split.recompute)
        return executed_flops / (split.gpus * float(row["tflops"]) * 1e12)
    tokens_per_s = row["tokens"] if "tokens" in row else row["tokens_gpu"] * split.gpus
    return float(job.global_batch * job.sequence / tokens_per_s)
