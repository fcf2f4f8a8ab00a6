"""User-visible surface, part 2: the files that commands write, from runs with tiny inputs.

A layout maps file names to the keys of the files and their types; values are not recorded. A star
replaces the variable parts of a name (a date, a process id, a digest).
"""

import csv
import json
import os
import re
import signal
import tarfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from tests.support.surface_command import run

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "demo" / "checkpoint"
WAIT_S = 120.0
RECORDS = (
    {"prompt": "I am glad", "completion": "good"},
    {"prompt": "It rains", "completion": "bad"},
)
TUNE = {
    "model": str(CHECKPOINT),
    "virtual_tokens": 2,
    "batch_examples": 2,
    "steps": 1,
    "dtype": "float32",
}
FORMATS = ("native", "megatron", "megatron-dist", "nemo", "hf")
# The part of a file's name that differs from one run to the next.
VARIABLE = re.compile(
    r"\d{8}T\d{6}Z-\d+-[0-9a-f]+|(?<=tfevents\.)\d+|(?<=state-)\d{8}|[0-9a-f]{16,}"
)
NUMBER = re.compile(r"(?<![a-zA-Z0-9])\d+(?![a-zA-Z0-9])")
KEY = re.compile(r"[\w.@/<>|:-]*( [\w.-]+)?")


# ------------------------------------------------------------------------------------- file layouts


def layout(folder: Path) -> dict[str, Any]:
    """Return the keys of every file below a folder, by the file's path."""
    files: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        files[VARIABLE.sub("*", str(path.relative_to(folder)))] = describe(path)
    return files


def describe(path: Path) -> Any:
    """Return the keys of a file, or nothing for a file type without keys."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".safetensors": _safetensors,
        ".json": lambda file: keys(json.loads(file.read_text())),
        ".current": lambda file: keys(json.loads(file.read_text())),
        ".jsonl": lambda file: keys(list(map(json.loads, file.read_text().splitlines()))),
        ".yaml": lambda file: keys(yaml.safe_load(file.read_text())),
        ".csv": lambda file: next(csv.reader(file.read_text().splitlines())),
        ".pt": _torch_save,
        ".nemo": _archive,
    }
    reader = readers.get(path.suffix)
    return reader(path) if reader is not None else []


def keys(value: Any, path: str = "") -> list[str]:
    """Return a line for each key of a JSON value, with the types of the key's values."""
    lines: dict[str, set[str]] = {}
    for key_path, kind in _leaves(value, path):
        lines.setdefault(key_path, set()).add(kind)
    return [
        f"{key_path}: {' or '.join(sorted(kinds))}" for key_path, kinds in sorted(lines.items())
    ]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            # A key that is a sentence or a generated token is replaced by a star.
            is_counter = path.endswith("logprobs.top_logprobs[]") and "token" not in value
            is_token = is_counter or path == "model.vocab"  # The latter in tokenizer.json.
            is_name = KEY.fullmatch(str(key)) is not None and not is_token
            name = NUMBER.sub("N", str(key)) if is_name else "*"
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            yield from _leaves(inner, f"{path}[]")
    else:
        yield path, _kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, bool):
        return "switch"
    names: dict[type, str] = {int: "number", float: "number", str: "text", type(None): "null"}
    names |= {list: "list", tuple: "list", dict: "mapping"}
    return names.get(type(value), "other")


def _safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        metadata = {key: _parse(text) for key, text in (file.metadata() or {}).items()}
        names = list(file.keys())
        tensors = {name: file.get_slice(name).get_dtype() for name in names}
    shown = {f"{NUMBER.sub('N', name)}: {dtype}" for name, dtype in tensors.items()}
    return {"metadata": keys(metadata) if metadata else [], "tensors": sorted(shown)}


def _parse(text: str) -> Any:
    try:
        return json.loads(text) if text[:1] in "{[" else text
    except ValueError:
        return text


def _torch_save(path: Path) -> list[str]:
    # This process wrote the file, so unpickling runs no foreign code.
    return keys(torch.load(path, weights_only=False, map_location="cpu"))


def _archive(path: Path) -> dict[str, Any]:
    members: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            name = VARIABLE.sub("*", member.name.removeprefix("./"))
            content = archive.extractfile(member)
            is_yaml = name.endswith(".yaml") and content is not None
            members[name] = keys(yaml.safe_load(content.read())) if is_yaml and content else []
    return members


# --------------------------------------------------------------------------- files from commands


def checkpoints(folder: Path) -> dict[str, Any]:
    """Record the demo model in every format that `preamble convert` writes."""
    layouts = {}
    for form in FORMATS:
        target = folder / ("x.nemo" if form == "nemo" else form)
        prove = [] if form == "nemo" else ["--prove"]  # A .nemo file has no proof.
        _succeeded("convert", CHECKPOINT, target, "--to", form, *prove)
        layouts[form] = layout(target) if target.is_dir() else describe(target)
    return layouts


def tuning_runs(folder: Path, adapters: Path) -> dict[str, Any]:
    """Record three runs: one with all its files, one with prefix tuning, one that is interrupted.

    The runs write their adapters to `adapters`.
    """
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    records_path = str(folder / "records.jsonl")
    common = {**TUNE, "data": records_path, "output": str(adapters)}
    validation = {
        "validation": records_path,
        "validate_every": 1,
        "golden_examples": 1,
        "tensorboard": True,
    }
    runs: dict[str, dict[str, object]] = {"whole": validation, "prefix": {"method": "prefix"}}
    layouts: dict[str, Any] = {}
    for name, settings in runs.items():
        _settings(folder / f"{name}.yaml", {**common, **settings}, name)
        printed = _succeeded("tune", folder / f"{name}.yaml", "--json")
        layouts[name] = {"output": keys(json.loads(printed)), "files": layout(folder / name)}
    endless = {"method": "mlp", "steps": 10**6, "save_every": 1}
    _settings(folder / "x.yaml", {**common, **endless}, "x")
    stopped = threading.Event()
    interrupting = threading.Thread(target=_interrupt_at, args=(folder / "x", stopped))
    interrupting.start()
    ran = run("tune", folder / "x.yaml")
    stopped.set()
    interrupting.join()
    layouts["interrupted"] = {"exit code": ran.code, "files": layout(folder / "x")}
    return layouts


def _settings(path: Path, values: Mapping[str, object], name: str) -> None:
    settings = {**values, "name": name, "run": str(path.with_name(name))}
    path.write_text(yaml.safe_dump(settings))


def _interrupt_at(folder: Path, stopped: threading.Event) -> None:
    """Interrupt this process, as Ctrl-C does, as soon as a run has saved a state."""
    end = time.monotonic() + WAIT_S
    while not stopped.wait(0.01) and time.monotonic() < end:
        if list(folder.rglob("facts.json")):
            os.kill(os.getpid(), signal.SIGINT)
            return


def plans(folder: Path) -> dict[str, Any]:
    """Record the files that `preamble plan` writes and the JSON that it prints."""
    cluster = ["--gpu", "h100", "--gpus", "1"]
    load = ["--input-tokens", "600", "--output-tokens", "20"]
    lines: dict[str, list[str]] = {
        "serve": ["gpt3-5b", *cluster, *load, "--concurrency", "1", "--max-gpus", "1"],
        "train": ["gpt3-5b", "--gpu", "h100", "--gpus", "8", "--global-batch", "8"],
    }
    layouts: dict[str, Any] = {}
    for name, arguments in lines.items():
        printed = _succeeded("plan", name, *arguments, "--output", folder / name, "--json")
        layouts[f"plan {name}"] = {
            "output": keys(json.loads(printed)),
            "files": layout(folder / name),
        }
    train = [*lines["train"][:5], "--global-batch", "8"]
    continuous = ["--infer", "--continuous", *load, "--concurrency", "1"]
    for name, arguments in (
        ("of training", train),
        ("of a static batch", [*lines["serve"][:5], "--infer", *load, "--batch", "1"]),
        ("of a server", [*lines["serve"][:5], *continuous]),
    ):
        printed = _succeeded("plan", "estimate", *arguments, "--json")
        layouts[f"plan estimate {name}"] = {"output": keys(json.loads(printed))}
    return layouts


def reports(adapter: Path) -> dict[str, Any]:
    """Record the JSON output of the other commands."""
    outputs = {}
    for arguments in (("inspect", CHECKPOINT), ("verify", CHECKPOINT, CHECKPOINT)):
        outputs[arguments[0]] = keys(json.loads(_succeeded(*arguments, "--json")))
    outputs["adapters check"] = keys(json.loads(_succeeded("adapters", "check", adapter, "--json")))
    return outputs


def _succeeded(*arguments: str | Path) -> str:
    ran = run(*arguments)
    assert ran.code == 0, (
        f"preamble {' '.join(map(str, arguments))} exited with {ran.code}: {ran.error}"
    )
    return ran.out
