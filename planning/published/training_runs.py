"""Published runs of training as jobs and splits, ready to be predicted.

The numbers are `published/training.yaml`; here they only become what a prediction takes. A source
that gives speed gives seconds by the operations that it counts.
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

DATA = Path(__file__).with_name("training.yaml")


@dataclass(frozen=True)
class Run:
    """A row: what ran, and how long a step took."""

    name: str
    job: TrainingJob
    split: TrainingSplit
    cluster: Cluster
    seconds: float
    noise: float
    mfu: float | None = None  # Published, in percent.
    hfu: float | None = None


@dataclass(frozen=True)
class Runs:
    """A table."""

    name: str
    source: str
    kind: str  # "runs"; "trend": read off a figure; "zero3": no split of ours.
    runs: Sequence[Run]

    @property
    def device(self) -> str:
        return self.runs[0].cluster.device.name


@dataclass(frozen=True)
class Layer:
    """A layer of a model, timed alone."""

    name: str
    job: TrainingJob
    split: TrainingSplit
    cluster: Cluster
    forward_ms: float
    backward_ms: float
    noise: float


@dataclass(frozen=True)
class Kept:
    """GiB of the first stage's results by row of `ROWS`, and of parameters with their states."""

    name: str
    job: TrainingJob
    splits: Mapping[str, TrainingSplit]
    gib: Sequence[float]
    percent: Sequence[float]
    states_gib: float


@dataclass(frozen=True)
class Choice:
    """A split that somebody's search took, whose speed is not known."""

    name: str
    job: TrainingJob
    split: TrainingSplit
    cluster: Cluster
    recompute: tuple[str, ...]  # What that search could try; empty: anything.


# As the figures of K22 have them.
ROWS: Mapping[str, Mapping[str, Any]] = {
    "TP": {},
    "TP, SP": {"sequence_parallel": True},
    "TP, selective": {"recompute": "selective"},
    "TP, SP, selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = yaml.safe_load(DATA.read_text())
    return data


@cache
def runs() -> Sequence[Runs]:
    tables = []
    for table in _data()["tables"]:
        rows = [_run({**table, **row}) for row in table["rows"]]
        tables.append(Runs(table["name"], table["source"], table.get("kind", "runs"), rows))
    return tables


@cache
def chosen() -> Sequence[Choice]:
    """What a search settled on."""
    table = _data()["chosen"]
    found = []
    for row in table["rows"]:
        whole = {**table, **row}
        job, split = _job(whole), _split(whole)
        job = replace(job, distributed_optimizer=row["year"] > 2022)
        cluster = Cluster(find_device(whole["gpu"]), split.gpus)
        name = f"{row['year']}: {_name(whole, split)}"
        found.append(Choice(name, job, split, cluster, tuple(row.get("tried", ()))))
    return found


@cache
def layers() -> Sequence[Layer]:
    table = _data()["layers"]
    return [
        Layer(
            name=f"{row['recompute']}{', SP' if row.get('sequence_parallel') else ''}",
            job=_job({"batch": table["micro_batch"], **table}),
            split=_split({**table, **row}),
            cluster=Cluster(find_device(table["gpu"]), table["tp"]),
            forward_ms=row["forward_ms"],
            backward_ms=row["backward_ms"],
            noise=table["noise"],
        )
        for row in table["rows"]
    ]


@cache
def kept() -> Sequence[Kept]:
    return list(_kept())


def _kept() -> Iterator[Kept]:
    table = _data()["activations"]
    for row in table["rows"]:
        whole = {**table, **row}
        splits = {name: _split({**whole, **how}) for name, how in ROWS.items()}
        yield Kept(row["model"], _job(whole), splits, row["gib"], row["percent"], row["states_gib"])


def _run(row: Mapping[str, Any]) -> Run:
    job, split = _job(row), _split(row)
    return Run(
        name=_name(row, split),
        job=job,
        split=split,
        cluster=Cluster(find_device(row["gpu"]), split.gpus),
        seconds=_step_s(row, job, split),
        noise=row.get("noise", 0.05),
        mfu=row.get("mfu"),
        hfu=row.get("hfu"),
    )


def _job(row: Mapping[str, Any]) -> TrainingJob:
    model = _data()["models"][row["model"]]
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


def _split(row: Mapping[str, Any]) -> TrainingSplit:
    return TrainingSplit(
        tp=row.get("tp", 1),
        pp=row.get("pp", 1),
        dp=row.get("dp", 1),
        vpp=row.get("vpp", 1),
        micro_batch=row.get("micro_batch", 1),
        recompute=row.get("recompute", "none"),
        sequence_parallel=row.get("sequence_parallel", False),
    )


def _name(row: Mapping[str, Any], split: TrainingSplit) -> str:
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
        executed = step_flops(flops, job.trainable) + recompute_flops(flops, split.recompute)
        return executed / (split.gpus * float(row["tflops"]) * 1e12)
    speed = row["tokens"] if "tokens" in row else row["tokens_gpu"] * split.gpus
    return float(job.global_batch * job.sequence / speed)
