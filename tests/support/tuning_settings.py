"""Settings, records and observers of small tuning runs."""

import json
from pathlib import Path

import yaml

from ptuning.reporting.observer import NullObserver
from ptuning.run_facts import StepMetrics

ANSWER = " dog"


def records(count: int) -> list[dict[str, str]]:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    return [
        {"prompt": " ".join(words[n % 9 : n % 9 + 1 + n % 4]), "completion": ANSWER}
        for n in range(count)
    ]


def write_settings(folder: Path, checkpoint: Path, **changes: object) -> Path:
    """Settings of a run that takes seconds, in its own folder."""
    adapters = folder / "adapters"
    adapters.mkdir(exist_ok=True)
    lines = [json.dumps(record) for record in records(40)]
    (folder / "examples.jsonl").write_text("\n".join(lines))
    settings: dict[str, object] = {
        "model": str(checkpoint),
        "data": str(folder / "examples.jsonl"),
        "name": "answer",
        "output": str(adapters),
        "virtual_tokens": 16,
        "steps": 80,
        "learning_rate": 0.5,
        "dtype": "float64",
        "max_new_tokens": 20,
    }
    file = folder / "tune.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


class LossRecorder(NullObserver):
    """An observer that records the losses, and can end the run in the middle of a step."""

    def __init__(self, ends_after: int | None) -> None:
        self.losses: list[float] = []
        self._ends_after = ends_after

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self._ends_after:
            raise EOFError
        self.losses.append(metrics.loss)


def write_validation(folder: Path, count: int) -> dict[str, object]:
    path = folder / "validation.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records(count)))
    return {"validation": str(path), "validate_every": 2, "validation_examples": 4}
