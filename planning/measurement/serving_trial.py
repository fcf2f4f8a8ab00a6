"""A candidate for serving, run for real: our server with its settings, under the planned load.

Requests have the lengths that were planned with, and no two prompts begin alike but for their
adapters' rows. One replica is run, with its share of the load; figures are told for all of them.
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
from planning.inference.objective import Wish
from planning.inference.plan import server_settings, settle
from planning.inference.service_levels import broken, score
from planning.measurement.child_command import ChildError, child, forget, server
from planning.measurement.rounds import TrialError
from planning.plan import Plan, Row
from serving.profiles import machine

LINES_MAX = 20_000
REQUESTS_MIN = 4  # Of each caller, one after another, or what is steady is too short to see.
LOAD_S_MAX = 600.0
CALL_S_MIN = 60.0  # What a call may take at least, before it counts as lost.
RATES = ("tokens_per_s", "requests_per_s")
ROW_SCALE = 0.02  # Of random adapters: as large as rows of embeddings are.


def check_machine(wish: Wish) -> None:
    """Refuse a wish for GPUs where there is none."""
    import torch

    if wish.costs is None and wish.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--measure runs candidates on this machine, and it has no CUDA device; calibrate the "
            "CPU (preamble plan calibrate) and plan with --calibration"
        )


@dataclass(frozen=True)
class ServingTrial:
    """`path`: the checkpoint. `efforts`: seconds of load in each round."""

    wish: Wish
    path: Path
    efforts: Sequence[int] = (10, 30, 60)
    start_s: float = 1800.0

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        wish = self.wish
        return {
            "of": "serving",
            "model": str(self.path.resolve()),
            "dtype": wish.dtype,
            "machine": machine(self.wish.device),
            "workload": asdict(wish.workload),
            "full": wish.fill,
        }

    def score(self, figures: Mapping[str, float]) -> float:
        return score(self.wish.objective, self._any_load, figures)

    def broken(self, figures: Mapping[str, float]) -> str:
        return broken(self.wish.limits, self._any_load, figures)

    @property
    def _any_load(self) -> Workload:
        """Of which it counts here only whether it has a rate."""
        return self.wish.load(1, 1)

    def settle(self, plan: Plan, best: Row | None) -> Plan:
        return settle(plan, self.wish, str(self.path))

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        name = hashlib.sha256(json.dumps(dict(row.settings)).encode()).hexdigest()[:12]
        place = folder / "runs" / name
        place.mkdir(parents=True, exist_ok=True)
        try:
            found = self._run(row, float(effort), place)
        except ChildError as error:
            raise TrialError(f"{error} (see {place})") from None
        forget(place)
        gpus = math.prod(int(row.settings[name]) for name in ("tp", "pp", "replicas"))
        many = {name: found[name] * int(row.settings["replicas"]) for name in RATES}
        per_gpu = many["tokens_per_s"] / gpus
        return {**found, **many, "tokens_per_s_per_gpu": per_gpu}

    def _run(self, row: Row, effort_s: float, place: Path) -> dict[str, float]:
        job = self._job(row, effort_s, place)
        settings = server_settings(row, self.wish, str(self.path))
        if self.wish.workload.adapters:
            settings["adapters"] = str(self._adapters(place))
        file = place / "serve.yaml"
        file.write_text(yaml.safe_dump(settings))
        words: list[str | Path] = ["--config", file, "--no-page"]
        with server(words, place / "serve.log", self.start_s) as (served, address):
            asked = json.dumps({**job, "address": address})
            with child(["planning.measurement.steady_load"], place / "load.log", asked) as load:
                try:
                    told = load.output(job["duration_s"] + job["timeout_s"] + CALL_S_MIN)
                except ChildError as error:
                    # Where the server is to blame, its own log says it better.
                    known = served.reason()
                    telling = served.process.poll() is not None or known.startswith("out of memory")
                    raise ChildError(known if telling else str(error)) from None
        found: dict[str, float] = json.loads(told)
        return found

    def _job(self, row: Row, effort_s: float, place: Path) -> dict[str, Any]:
        """The load of one replica, as `planning.measurement.steady_load` reads it."""
        replicas = int(row.settings["replicas"])
        load = self.wish.load(int(row.settings["running_requests_max"]), replicas)
        request_s = row.figures.get("request_ms_p95", 0.0) / 1000
        seconds = min(LOAD_S_MAX, max(effort_s, REQUESTS_MIN * request_s))
        expected = row.figures.get("requests_per_s", 0.0) / replicas * seconds
        callers = None
        if load.concurrency is not None:
            callers = max(1, round(load.concurrency / replicas))
        count = min(LINES_MAX, 3 * math.ceil(expected) + 8 * (callers or 8))
        return {
            "dataset": str(self._dataset(count, place)),
            "rate": None if load.request_rate is None else load.request_rate / replicas,
            "concurrency": callers,
            "duration_s": seconds,
            "timeout_s": max(CALL_S_MIN, 10 * request_s),
        }

    def _dataset(self, count: int, place: Path) -> Path:
        """Lines of random prompts; seeds are the same for all candidates."""
        workload, draw = self.wish.workload, random.Random(0)
        context = self.wish.model.max_position_embeddings
        inputs = workload.input_tokens.draw(count, 11)
        outputs = workload.output_tokens.draw(count, 12)
        file = place / "prompts.jsonl"
        with file.open("w") as out:
            for number, (prompt, new) in enumerate(zip(inputs, outputs, strict=True)):
                new = min(new, max(1, context // 2))
                length = max(1, min(prompt, context - workload.virtual_tokens - new))
                line: dict[str, Any] = {
                    "prompt": draw.choices(range(self.wish.model.vocab_size), k=length),
                    "new_tokens": new,
                }
                if workload.adapters:
                    line["adapter"] = f"plan-{number % workload.adapters}"
                out.write(json.dumps(line) + "\n")
        return file

    def _adapters(self, place: Path) -> Path:
        """As many as are planned for, of random rows: what they say does not matter."""
        import torch

        from gpt.adapters.adapter_file import Card, build_adapter, save_adapter

        folder, workload = place / "adapters", self.wish.workload
        folder.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, workload.virtual_tokens), self.wish.model.hidden_size)
        for number in range(workload.adapters):
            rows = ROW_SCALE * torch.randn(shape, generator=generator)
            card = Card(f"plan-{number}")
            save_adapter(build_adapter(card, rows), folder / f"{card.name}.safetensors")
        return folder
