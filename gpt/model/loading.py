"""Fills a GPT from a checkpoint, each rank with its own part and nothing else.

The model is allocated empty at its final size, dtype and device; then every parameter is read
straight into place from the mapped files. So no rank holds what it does not own, and nothing is
held twice. All that headers can tell is checked before the first byte is allocated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.dtypes import FLOATS
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import check_split, parameters, part, stage_layers


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    config: GPTConfig | Mapping[str, Any] | None = None,
) -> GPT:
    """The whole model, on one device; `dtype` is as stored unless given, `config` overrides."""
    mesh = Mesh.single(device_of(device))
    check_dtype(dtype)
    return load_model(open_checkpoint(path, config), mesh, dtype=dtype)


def load_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    layers: range | None = None,
    **options: Any,
) -> GPT:
    """This rank's part of the model: its tensor part of `layers`, by default its stage's.

    `options` go to the model as they are. The weights need no gradient.
    """
    config = checkpoint.config
    check_split(config, mesh.tp, mesh.pp)
    if layers is None:
        layers = stage_layers(config.num_layers, mesh.pp)[mesh.pp_rank][0]
    check_dtype(dtype)
    if isinstance(dtype, str):
        dtype = FLOATS[dtype]
    device = mesh.device if device is None else device
    model = GPT(config, mesh, layers=layers, dtype=dtype, device=device, **options)
    fill(model, checkpoint)
    return model.requires_grad_(False)


def device_of(name: torch.device | str) -> torch.device:
    """The device of this name, if it is one that the model runs on, and is there."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {str(name)!r}; known are: cpu, cuda, cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device {str(name)!r} cannot be used ({reason}); cpu always can"
        ) from None
    return device


def check_dtype(dtype: torch.dtype | str | None) -> None:
    """Refuse what the model cannot compute in; None is as stored."""
    if dtype is not None and dtype not in FLOATS and dtype not in FLOATS.values():
        raise ConfigError(f"dtype is {str(dtype)!r}; known are: {', '.join(FLOATS)}")


def fill(model: GPT, checkpoint: Checkpoint) -> None:
    """Read this rank's part of every parameter that the model has, in place."""
    mesh, table = model.mesh, parameters(checkpoint.config)
    for name, value in model.named_parameters():
        held = part(table[name], checkpoint.config, mesh.tp_rank, mesh.tp)
        checkpoint.read(name, held, out=value.detach())
        if not _finite(value.detach()):
            raise CheckpointError(
                f"{checkpoint.path}: {name} holds values that are not finite, and the model would "
                "answer nonsense; the training that wrote it diverged, or the file is damaged: "
                "take an earlier checkpoint, or copy it again"
            )


def _finite(value: torch.Tensor) -> bool:
    """Whether all of it is: both extremes are NaN if any element is. Memory speed, and no room."""
    return all(bool(extreme.isfinite()) for extreme in value.aminmax())
