"""Serving trial: runs a candidate's server under the planned load and measures its figures.

Requests have the planned lengths. Their prompts are random, so only the virtual tokens of an
adapter are a common prefix. One replica runs, with its share of the load; the measured rates are
multiplied by the number of replicas.
"""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from gpt.errors import ConfigError
from planning.inference.estimate import Workload
from planning.inference.model_split import ModelSplit
from planning.inference.plan import finalize_plan, server_settings
from planning.inference.requirements import Requirements
from planning.inference.service_levels import score, violated_limit
from planning.measurement.child_command import ChildError, remove_run_folder, run_child, run_server
from planning.measurement.rounds import TrialError
from planning.plan import Plan, Row
from serving.profiles import describe_machine

DATASET_LINES_MAX = 20_000
REQUESTS_PER_CLIENT_MIN = 4  # With fewer requests per client, the load does not become steady.
LOAD_S_MAX = 600.0  # Upper bound of the duration of a load.
REQUEST_TIMEOUT_S_MIN = 60.0  # Lower bound of the time-out of a request.
RATES = ("tokens_per_s", "requests_per_s")
# Standard deviation of the virtual token vectors of random adapters, as in a usual embedding.
ADAPTER_ROW_STD = 0.02


def check_machine(requirements: Requirements) -> None:
    """Raise ConfigError if the plan is for GPUs (no calibration), but this machine has no GPU."""
    import torch

    if (
        requirements.calibration is None
        and requirements.device == "cuda"
        and not torch.cuda.is_available()
    ):
        raise ConfigError(
            "--measure runs candidates on this machine, which has no CUDA device; to plan for its "
            "CPU, run `preamble plan calibrate`, and set --calibration to the written file"
        )


@dataclass(frozen=True)
class ServingTrial:
    """Trials of a serving plan."""

    requirements: Requirements
    checkpoint: Path
    efforts: Sequence[int] = (10, 30, 60)  # Seconds of load in each round.
    start_timeout_s: float = 1800.0

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        requirements = self.requirements
        return {
            "of": "serving",
            "model": str(self.checkpoint.resolve()),
            "dtype": requirements.dtype,
            "machine": describe_machine(self.requirements.device),
            "workload": asdict(requirements.workload),
            "full": requirements.saturate,
        }

    def score(self, figures: Mapping[str, float]) -> float:
        return score(self.requirements.objective, self._nominal_workload, figures)

    def violated_limit(self, figures: Mapping[str, float]) -> str:
        return violated_limit(self.requirements.limits, self._nominal_workload, figures)

    @property
    def _nominal_workload(self) -> Workload:
        """The workload for `score` and `violated_limit`, which use only its request rate."""
        return self.requirements.workload_for(1, 1)

    def finalize_plan(self, plan: Plan, best: Row | None) -> Plan:
        return finalize_plan(plan, self.requirements, str(self.checkpoint))

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        name = hashlib.sha256(json.dumps(dict(row.settings)).encode()).hexdigest()[:12]
        run_folder = folder / "runs" / name
        run_folder.mkdir(parents=True, exist_ok=True)
        try:
            replica_figures = self._measure_replica(row, float(effort), run_folder)
        except ChildError as error:
            raise TrialError(f"{error} (see {run_folder})") from None
        remove_run_folder(run_folder)
        gpus = ModelSplit.of_settings(row.settings).ranks * int(row.settings["replicas"])
        total_rates = {
            name: replica_figures[name] * int(row.settings["replicas"]) for name in RATES
        }
        per_gpu = total_rates["tokens_per_s"] / gpus
        return {**replica_figures, **total_rates, "tokens_per_s_per_gpu": per_gpu}

    def _measure_replica(self, row: Row, effort_s: float, run_folder: Path) -> dict[str, float]:
        load_job = self._load_job(row, effort_s, run_folder)
        settings = server_settings(row, self.requirements, str(self.checkpoint))
        if self.requirements.workload.adapters:
            settings["adapters"] = str(self._write_adapters(run_folder))
        settings_file = run_folder / "serve.yaml"
        settings_file.write_text(yaml.safe_dump(settings))
        server_args: list[str | Path] = ["--config", settings_file, "--no-page"]
        with run_server(server_args, run_folder / "serve.log", self.start_timeout_s) as (
            server_command,
            address,
        ):
            job_text = json.dumps({**load_job, "address": address})
            with run_child(
                ["planning.measurement.steady_load"], run_folder / "load.log", job_text
            ) as load_command:
                try:
                    load_output = load_command.read_output(
                        load_job["duration_s"] + load_job["timeout_s"] + REQUEST_TIMEOUT_S_MIN
                    )
                except ChildError as error:
                    # If the server failed, its log has the reason of the failure.
                    server_reason = server_command.failure_reason()
                    server_failed = (
                        server_command.process.poll() is not None
                        or server_reason.startswith("out of memory")
                    )
                    raise ChildError(server_reason if server_failed else str(error)) from None
        figures: dict[str, float] = json.loads(load_output)
        return figures

    def _load_job(self, row: Row, effort_s: float, run_folder: Path) -> dict[str, Any]:
        """Return the load of one replica as `planning.measurement.steady_load` expects it."""
        replicas = int(row.settings["replicas"])
        workload = self.requirements.workload_for(
            int(row.settings["running_requests_max"]), replicas
        )
        request_s = row.figures.get("request_ms_p95", 0.0) / 1000
        duration_s = min(LOAD_S_MAX, max(effort_s, REQUESTS_PER_CLIENT_MIN * request_s))
        expected_requests = row.figures.get("requests_per_s", 0.0) / replicas * duration_s
        concurrency = None
        if workload.concurrency is not None:
            concurrency = max(1, round(workload.concurrency / replicas))
        # Enough prompts for a server that is three times as fast as predicted.
        prompt_count = min(
            DATASET_LINES_MAX, 3 * math.ceil(expected_requests) + 8 * (concurrency or 8)
        )
        return {
            "dataset": str(self._write_dataset(prompt_count, run_folder)),
            "rate": None if workload.request_rate is None else workload.request_rate / replicas,
            "concurrency": concurrency,
            "duration_s": duration_s,
            "timeout_s": max(REQUEST_TIMEOUT_S_MIN, 10 * request_s),
        }

    def _write_dataset(self, count: int, run_folder: Path) -> Path:
        """Write random prompts, with the same seeds for all candidates."""
        workload, rng = self.requirements.workload, random.Random(0)
        context = self.requirements.model.max_position_embeddings
        inputs = workload.input_tokens.sample_lengths(count, 11)
        outputs = workload.output_tokens.sample_lengths(count, 12)
        dataset_path = run_folder / "prompts.jsonl"
        with dataset_path.open("w") as dataset_file:
            for number, (prompt_tokens, new_tokens) in enumerate(zip(inputs, outputs, strict=True)):
                # Samples may exceed the context length.
                new_tokens = min(new_tokens, max(1, context // 2))
                tokens_max = context - workload.virtual_tokens - new_tokens
                prompt_tokens = max(1, min(prompt_tokens, tokens_max))
                line: dict[str, Any] = {
                    "prompt": rng.choices(
                        range(self.requirements.model.vocab_size), k=prompt_tokens
                    ),
                    "new_tokens": new_tokens,
                }
                if workload.adapters:
                    line["adapter"] = f"plan-{number % workload.adapters}"
                dataset_file.write(json.dumps(line) + "\n")
        return dataset_path

    def _write_adapters(self, run_folder: Path) -> Path:
        """Write the planned number of adapters, with random rows."""
        import torch

        from gpt.adapters.adapter_file import Card, build_adapter, save_adapter

        folder, workload = run_folder / "adapters", self.requirements.workload
        folder.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, workload.virtual_tokens), self.requirements.model.hidden_size)
        for number in range(workload.adapters):
            rows = ADAPTER_ROW_STD * torch.randn(shape, generator=generator)
            card = Card(f"plan-{number}")
            save_adapter(build_adapter(card, rows), folder / f"{card.name}.safetensors")
        return folder
