"""Published inference measurements: latency and memory of static batches, one case per number.

`planning/published/inference.yaml` contains the numbers; this module creates the job of each
number. A configuration that ran out of memory is also a case, without a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from gpt.config import GPTConfig
from planning.hardware import Cluster, find_device
from planning.published.faster_transformer import FITTED, FittedConstants
from planning.published.static_batch import StaticJob, estimate_static

CASES_FILE = Path(__file__).with_name("inference.yaml")
DEFAULT_GPU = "a100-80g"
GPUS_PER_NODE = 8
VOCABULARY = 51200  # Vocabulary size of all published models.
POSITIONS = 2048  # Assumed maximum number of positions of all published models.

Figure = Literal["request_ms", "prefill_ms", "decode_ms_per_token", "memory_gb"]
TIMES: tuple[Figure, ...] = ("request_ms", "prefill_ms", "decode_ms_per_token")


@dataclass(frozen=True)
class PublishedCase:
    """One published number. GB are 1e9 bytes."""

    table: str
    source: str
    model: str
    gpu: str
    job: StaticJob
    figure: Figure
    published: float | None  # None: out of memory.

    @property
    def name(self) -> str:
        job = self.job
        split = f"TP{job.tp}" + (f" PP{job.pp}" if job.pp > 1 else "")
        return f"{self.model} {split} {job.input_tokens}/{job.output_tokens} batch {job.batch}"

    @property
    def cluster(self) -> Cluster:
        ranks = self.job.tp * self.job.pp
        return Cluster(find_device(self.gpu), max(ranks, GPUS_PER_NODE), GPUS_PER_NODE)

    def predict(self, constants: FittedConstants = FITTED) -> float:
        estimate = estimate_static(self.job, self.cluster, constants)
        if self.figure == "memory_gb":
            return estimate.memory.total / 1e9
        return float(getattr(estimate, self.figure))

    def error(self, constants: FittedConstants = FITTED) -> float:
        """Return the signed relative error: 0.05 means that the prediction is 5 % too high."""
        assert self.published is not None, "an out-of-memory case has no number"
        return self.predict(constants) / self.published - 1


def latency_cases() -> list[PublishedCase]:
    return [case for case in cases() if case.figure in TIMES and case.published is not None]


def memory_cases() -> list[PublishedCase]:
    return [case for case in cases() if case.figure == "memory_gb"]


def out_of_memory_cases() -> list[PublishedCase]:
    return [case for case in cases() if case.published is None]


@cache
def cases() -> tuple[PublishedCase, ...]:
    file = yaml.safe_load(CASES_FILE.read_text("utf-8"))
    models = {name: _make_config(widths) for name, widths in file["models"].items()}
    return tuple(
        case
        for table in file["tables"]
        for row in table["rows"]
        for case in _cases_of_row(table, row, models)
    )


def _make_config(widths: Mapping[str, int]) -> GPTConfig:
    return GPTConfig(
        num_layers=widths["layers"],
        hidden_size=widths["hidden"],
        num_attention_heads=widths["heads"],
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
    )


def _cases_of_row(
    table: Mapping[str, Any], row: Mapping[str, Any], models: Mapping[str, GPTConfig]
) -> Iterator[PublishedCase]:
    for figure in get_args(Figure):
        if figure not in row:
            continue
        for batch, number in zip(table["batch"], row[figure], strict=True):
            if number is None:
                continue
            yield PublishedCase(
                table=table["name"],
                source=table["source"],
                model=table["model"],
                gpu=table.get("gpu", DEFAULT_GPU),
                job=StaticJob(
                    model=models[table["model"]],
                    input_tokens=row["input"],
                    output_tokens=row["output"],
                    batch=batch,
                    tp=row["tp"],
                    pp=row.get("pp", 1),
                ),
                figure=figure,
                published=None if number == "oom" else float(number),
            )
