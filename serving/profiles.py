"""Profiles: preset or planned server settings for low latency or high throughput.

A profile that `preamble plan serve` has saved for a model on this machine takes precedence over the
preset of that name. This module defines the path of a saved profile; `planning` computes its
settings. A saved profile is for a model shape, so all models that are tuned from one base share it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import ConfigError, PreambleError
from gpt.host_limits import usable_cores
from gpt.settings import read_yaml

PROFILES = ("latency", "throughput")
# The presets are at the same path relative to this file in a checkout and in an installation.
PRESETS_FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "config"

# The settings that a saved profile (a plan) may contain. The KV cache capacity is not among them:
# the server derives it from the free memory, which may differ at each start.
PLANNED_SETTINGS = (
    "tp",
    "pp",
    "ep",
    "running_requests_max",
    "step_tokens_max",
    "prefill_stall_ms_max",
    "queue_requests_max",
    "gather_ms",
)
DEFAULT_SPLIT = {"tp": 1, "pp": 1, "ep": 1}


@dataclass(frozen=True)
class Profile:
    """The settings of a profile, and where they come from."""

    settings: Mapping[str, Any]
    note: str  # Log line that names the source of the settings.


def find_profile(name: str, settings: Mapping[str, Any]) -> Profile:
    """Return the profile that is saved for a model, or else the preset.

    `settings`: the values of the YAML file and the flags, with the model and its split (tp, pp,
    ep). A saved profile for a different split is not used.
    """
    preset = read_yaml(PRESETS_FOLDER / f"{name}.yaml")
    try:
        plan_path = _plan_file_for(name, settings)
    except PreambleError:  # The model cannot be opened; the server reports that error later.
        return Profile(preset, f"event=profile name={name} from=preset")
    command_flags = f"{settings.get('model', 'MODEL')} --calibration FILE --objective {name}"
    plan_command = f"`preamble plan serve {command_flags}`"
    if not plan_path.exists():
        reason = f"no plan is saved for this model shape and machine; {plan_command} makes one"
        return Profile(preset, f"event=profile name={name} from=preset note={reason!r}")
    try:
        plan_settings = read_yaml(plan_path)
    except ConfigError:
        reason = f"{plan_path} cannot be read; {plan_command} replaces it"
        return Profile(preset, f"event=profile name={name} from=preset note={reason!r}")
    planned = {key: plan_settings[key] for key in PLANNED_SETTINGS if key in plan_settings}
    split_conflicts = []
    for key, default in DEFAULT_SPLIT.items():
        ranks = settings.get(key)
        if ranks is not None and ranks != planned.get(key, default):
            split_conflicts.append(f"{key} {ranks}")
    if split_conflicts:
        reason = f"the saved plan is for a different split, not for {' and '.join(split_conflicts)}"
        return Profile(preset, f"event=profile name={name} from=preset note={reason!r}")
    return Profile(
        {**preset, **planned}, f"event=profile name={name} from=plan file={str(plan_path)!r}"
    )


def _plan_file_for(name: str, settings: Mapping[str, Any]) -> Path:
    from gpt.formats.overrides import open_with_overrides, read_overrides

    texts = [settings.get(key) for key in ("model", "dtype", "device", "config_json")]
    vocab_size = settings.get("true_vocab_size")
    if not all(isinstance(text, str | None) for text in texts) or not isinstance(
        vocab_size, int | None
    ):
        raise ConfigError("invalid types")  # `ServerConfig.read` reports which setting is wrong.
    model, dtype, device, overrides_path = texts
    config = open_with_overrides(model or "", read_overrides(overrides_path, vocab_size)).config
    return plan_file(config, dtype or config.dtype, device or "cpu", name)


def plan_file(config: GPTConfig, dtype: str, device: str, name: str) -> Path:
    """Return the path of the saved profile `name` for a model shape, a dtype and this machine."""
    from gpt.checkpoint.digest import digest_cache_folder, functional_config

    key_parts = [functional_config(config), dtype, describe_machine(device)]
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()
    return digest_cache_folder().parent / "plans" / key / f"{name}.yaml"


def describe_machine(device: str) -> str:
    """Return a text that names this machine's GPUs or CPU cores, for the key of `plan_file`."""
    if device.startswith("cuda"):
        import torch

        information_files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        gpu_names = {_read_field(file, "Model") for file in information_files}
        # torch gets the count from the driver without a CUDA context, which would use memory.
        return f"{torch.cuda.device_count()} x {', '.join(sorted(gpu_names)) or 'CUDA device'}"
    cores = usable_cores(within_quota=False)
    return f"{cores} cores of {_read_field(Path('/proc/cpuinfo'), 'model name') or 'a CPU'}"


def _read_field(file: Path, name: str) -> str:
    """Return the value of the first line `name: value` in `file`, or an empty text."""
    with suppress(OSError):
        match = re.search(rf"^{name}\s*:\s*(.+?)\s*$", file.read_text("utf-8", "replace"), re.M)
        return match[1] if match else ""
    return ""
