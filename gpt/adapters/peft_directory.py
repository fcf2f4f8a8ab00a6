"""The files of a PEFT adapter: adapter_config.json, and the weights beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.adapters.linear_check import LINEARS_MAX, TENSORS_MAX
from gpt.checkpoint.files.safetensors_file import open_safetensors
from gpt.checkpoint.files.torch_save import open_state_dict
from gpt.checkpoint.logical_tensor import StoredTensor
from gpt.errors import AdapterError
from gpt.files.regular_files import read_regular_file

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG_BYTES_MAX = 1 << 20
# Two tensors with long names for each linear.
HEADER_BYTES_MAX = LINEARS_MAX * 1024


def find_weights(folder: Path) -> Path:
    """Return the file of an adapter's weights."""
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if weights is None:
        has_config = (folder / CONFIG_FILE).is_file()
        problem = f"{CONFIG_FILE} but no weights" if has_config else "no adapter"
        raise AdapterError(
            f"{folder} has {problem}; give a PEFT directory with adapter_model.safetensors, or a "
            "TGIS directory with decoder.pt"
        )
    return weights


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ValueError(f"over {CONFIG_BYTES_MAX} bytes")
        config = json.loads(read_regular_file(path))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read ({error}); save the adapter again") from None
    return config


def open_tensors(path: Path) -> Mapping[str, StoredTensor]:
    """Open the weights by key, without reading them."""
    if path.suffix == ".safetensors":
        return open_safetensors(path, header_bytes_max=HEADER_BYTES_MAX, tensors_max=TENSORS_MAX)
    # The file is not memory-mapped, because another process may truncate it during use.
    return open_state_dict(path, mmap=False)
