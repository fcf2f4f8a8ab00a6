"""Profiles: settings that belong together, for short waits or for many tokens.

One that `preamble plan serve` has made for such a model on this machine goes before the preset that
comes along. Where those are kept is said here alone; how they are made is not known here. A model
is known by its shape, so what was planned for one holds for all that were tuned from it.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import ConfigError, PreambleError
from gpt.settings import read_yaml

PROFILES = ("latency", "throughput")
# An installed preamble has them at the same place.
PROFILE_FILES = Path(__file__).resolve().parent.parent / "deploy" / "config"

# What a plan says of a server. How much memory there is for keys and values it finds itself: at
# another start there may be less.
PLANNED = (
    *("tp", "pp", "running_requests_max", "step_tokens_max", "prefill_stall_ms_max"),
    *("queue_requests_max", "gather_ms"),
)
SPLIT = {"tp": 1, "pp": 1}


@dataclass(frozen=True)
class Profile:
    values: Mapping[str, Any]
    note: str  # For the log: where they come from.


def find_profile(name: str, given: Mapping[str, Any]) -> Profile:
    """`given`: what the settings file and the flags say; of which model, and how it is split."""
    preset = read_yaml(PROFILE_FILES / f"{name}.yaml")
    try:
        file = _kept(name, given)
    except PreambleError:  # There is no such model: whoever opens it next says so.
        return Profile(preset, f"event=profile name={name} from=preset")
    words = f"{given.get('model', 'MODEL')} --calibration FILE --objective {name}"
    way = f"`preamble plan serve {words}`"
    if not file.exists():
        why = f"no plan is known for such a model on this machine; {way} makes one"
        return Profile(preset, f"event=profile name={name} from=preset note={why!r}")
    try:
        found = read_yaml(file)
    except ConfigError:
        why = f"{file} cannot be read; {way} makes it anew"
        return Profile(preset, f"event=profile name={name} from=preset note={why!r}")
    planned = {key: found[key] for key in PLANNED if key in found}
    other = [
        f"{key} {value}"
        for key, usual in SPLIT.items()
        if (value := given.get(key)) not in (None, planned.get(key, usual))
    ]
    if other:
        why = f"what is planned is for another split than {' and '.join(other)}"
        return Profile(preset, f"event=profile name={name} from=preset note={why!r}")
    return Profile({**preset, **planned}, f"event=profile name={name} from=plan file={str(file)!r}")


def _kept(name: str, given: Mapping[str, Any]) -> Path:
    from gpt.formats.overrides import open_overridden, read_overrides

    words = [given.get(key) for key in ("model", "dtype", "device", "config_json")]
    size = given.get("true_vocab_size")
    if not all(isinstance(word, str | None) for word in words) or not isinstance(size, int | None):
        raise ConfigError("not settings")  # Of which kind each must be is said where they are read.
    model, dtype, device, changes = words
    config = open_overridden(model or "", read_overrides(changes, size)).config
    return plan_file(config, dtype or config.dtype, device or "cpu", name)


def plan_file(config: GPTConfig, dtype: str, device: str, name: str) -> Path:
    """Where a plan is kept that was made here for such a model."""
    from gpt.checkpoint.digest import cache_folder, function

    facts = [function(config), dtype, machine(device)]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_folder().parent / "plans" / key / f"{name}.yaml"


def machine(device: str) -> str:
    """What there is to compute on, in words that differ where a plan would."""
    if device.startswith("cuda"):
        import torch

        found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        kinds = {_line_of(file, "Model") for file in found}
        # Asked of the driver; a context would take memory of the device.
        return f"{torch.cuda.device_count()} x {', '.join(sorted(kinds)) or 'CUDA device'}"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {_line_of(Path('/proc/cpuinfo'), 'model name') or 'a CPU'}"


def _line_of(file: Path, name: str) -> str:
    """The value of the first line `name: value`."""
    with suppress(OSError):
        match = re.search(rf"^{name}\s*:\s*(.+?)\s*$", file.read_text("utf-8", "replace"), re.M)
        return match[1] if match else ""
    return ""
