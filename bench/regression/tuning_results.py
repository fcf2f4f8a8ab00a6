"""Comparison of tuning runs: every file that `preamble tune` writes in two checkouts."""

import csv
import io
import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.harness.checkouts import Checkout, CheckoutError
from bench.regression.checkout_pair import CheckoutPair, ComparedRow, Results, compare, read_tree

COMMON_SETTINGS: Mapping[str, Any] = {
    "steps": 6,
    "batch_examples": 4,
    "virtual_tokens": 4,
    "warmup_steps": 2,
}
# The date in an adapter's card, which is JSON text.
CREATED = re.compile(r'("created": ?)"[^"]*"')
# Maps the name of a run to its settings besides COMMON_SETTINGS.
RUNS: Mapping[str, Mapping[str, Any]] = {
    "prompt-tuning": {"method": "prompt-tuning", "validate_every": 3, "golden_examples": 2},
    "p-tuning-mlp": {"method": "mlp", "encoder_hidden": 32},
    "p-tuning-lstm": {"method": "lstm", "encoder_hidden": 32, "micro_batch_examples": 2},
    "p-tuning-tpmlp": {"method": "tpmlp", "tp": 2, "sequence_parallel": True},
    "prompt-pipeline": {"method": "prompt-tuning", "pp": 2, "micro_batch_examples": 2},
    "prompt-adafactor": {"method": "prompt-tuning", "optimizer": "adafactor", "dtype": "bfloat16"},
    "prefix": {"method": "prefix", "validate_every": 3},
    "prefix-split": {"method": "prefix", "tp": 2, "pp": 2, "micro_batch_examples": 2},
    "full": {"method": "full", "steps": 3, "template": "{prompt} {completion}"},
}


def tune_settings(
    model: Path, records: Path, name: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a run.

    Output paths are relative: written files may contain them, and must be equal in both checkouts.
    """
    paths = {
        "model": str(model),
        "name": name,
        "data": str(records),
        "template": "<|VIRTUAL_PROMPT_0|>{prompt} {completion}",
        "output": "out",
        "run": f"runs/{name}",
        "dtype": "float32",
    }
    settings = {**paths, **COMMON_SETTINGS, **overrides}
    if "validate_every" in settings:
        settings |= {"validation": str(records), "validation_examples": 4, "max_new_tokens": 4}
    return settings


def run_tune(checkout: Checkout, folder: Path, settings: Mapping[str, Any]) -> None:
    """Run `preamble tune` with these settings in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{settings['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(settings)))
    checkout.command(["preamble", "tune", path], folder)
    path.unlink()


def compare_tuning(pair: CheckoutPair) -> Iterator[ComparedRow]:
    """Compare every file of every run except report.html, which shows times."""
    records = pair.records()
    for name, overrides in RUNS.items():
        settings = tune_settings(pair.model, records, name, overrides)

        def run_files(
            checkout: Checkout, name: str = name, settings: Mapping[str, Any] = settings
        ) -> Results:
            folder = pair.folder_of(checkout) / f"tune-{name}"
            run_tune(checkout, folder, settings)
            return {
                f"{name}: {path}": without_times(path, content)
                for path, content in read_tree(folder).items()
                if not path.endswith("report.html")
            }

        this, other = pair.run(run_files)
        if not any(path.endswith("metrics.csv") for path in this):
            raise CheckoutError(f"{name}: the run wrote no metrics.csv")
        yield from compare("tuning", this, other)
        pair.log(f"tuning {name}: {len(this)} files")


def without_times(path: str, content: bytes) -> bytes:
    """Return a file's content without durations and dates, and with its metadata sorted."""
    if path.endswith(".csv"):
        rows = list(csv.DictReader(io.StringIO(content.decode())))
        return json.dumps(
            [{column: text for column, text in row.items() if column != "seconds"} for row in rows]
        ).encode()
    if path.endswith(".safetensors"):
        return _sort_metadata(content)
    return content


def _sort_metadata(content: bytes) -> bytes:
    """Return the content of a safetensors file with sorted metadata and without the card's date."""
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header_end = 8 + header_bytes
    header = json.loads(content[8:header_end])
    metadata = {key: header["__metadata__"][key] for key in sorted(header.get("__metadata__", {}))}
    for key, text in metadata.items():
        metadata[key] = CREATED.sub(r"\1", text)
    return json.dumps([metadata, header | {"__metadata__": None}]).encode() + content[header_end:]
