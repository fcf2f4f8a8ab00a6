"""Model loading: allocates a GPT and reads each rank's shard of the weights from a checkpoint.

The model is allocated without values, in its final dtype and on its final device. Then the values
are copied from the memory-mapped files directly into the parameters, so a rank stores only its own
shards, and each shard once. The file headers are checked when the checkpoint is opened,
before a parameter is allocated.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES, is_finite
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import check_split, parameter_specs


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    config: GPTConfig | Mapping[str, Any] | None = None,
) -> GPT:
    """Load the whole model on one device.

    `dtype` is by default the dtype of the stored weights. A GPTConfig as `config` replaces the
    checkpoint's configuration; a mapping replaces only the fields that it contains.
    """
    mesh = Mesh.single(parse_device(device))
    check_dtype(dtype)
    return load_model(open_checkpoint(path, config), mesh, dtype=dtype)


def load_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    layers: range | None = None,
    report_progress: Callable[[int, int], None] = lambda *_: None,
    **options: Any,
) -> GPT:
    """Load this rank's part of the model: its tensor-parallel shard of `layers`.

    The defaults of `layers`, `device` and `dtype` are the layers of the rank's pipeline stage, the
    mesh's device and the dtype of the stored weights. `options` are passed to the constructor of
    GPT. `report_progress` is called with the numbers of loaded and of all bytes of the parameters.
    The parameters do not require gradients.
    """
    config = checkpoint.config
    check_split(config, mesh.tp, mesh.pp, ep=mesh.ep)
    if layers is None:
        layers = stage_layers(config.num_layers, mesh.pp)[mesh.pp_rank][0]
    check_dtype(dtype)
    if isinstance(dtype, str):
        dtype = FLOAT_DTYPES[dtype]
    device = mesh.device if device is None else device
    model = GPT(config, mesh, layers=layers, dtype=dtype, device=device, **options)
    load_weights(model, checkpoint, report_progress)
    return model.requires_grad_(False)


def parse_device(name: torch.device | str) -> torch.device:
    """Return the device of this name; raise ConfigError if it is unsupported or unavailable."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {str(name)!r}; choose one of: cpu, cuda, cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"device {str(name)!r} is unavailable ({reason}); use cpu") from None
    return device


def check_dtype(dtype: torch.dtype | str | None) -> None:
    """Raise ConfigError if the model does not support this dtype.

    None is valid, and means the dtype of the stored weights.
    """
    if dtype is not None and dtype not in FLOAT_DTYPES and dtype not in FLOAT_DTYPES.values():
        raise ConfigError(f"dtype is {str(dtype)!r}; choose one of: {', '.join(FLOAT_DTYPES)}")


def load_weights(
    model: GPT,
    checkpoint: Checkpoint,
    report_progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Read this rank's shard of each parameter from the checkpoint into the model.

    Raise CheckpointError if a value is not finite. `load_model` explains `report_progress`.
    """
    mesh, parameter_table = model.mesh, parameter_specs(checkpoint.config)
    loaded_bytes, total_bytes = 0, sum(parameter.nbytes for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        shard = mesh.in_stage.shard(parameter_table[name], checkpoint.config)
        assert shard is not None, "the model has only this rank's experts"
        checkpoint.read(name, shard, out=parameter.detach())
        if not is_finite(parameter.detach()):
            raise CheckpointError(
                f"{checkpoint.path}: {name} holds values that are not finite; the training "
                "diverged or the file is damaged: use an earlier checkpoint, or copy the file again"
            )
        loaded_bytes += parameter.nbytes
        report_progress(loaded_bytes, total_bytes)
