"""Reads `torch_dist` checkpoints with PyTorch's own distributed checkpointing, in one process."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def load_with_torch(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """Everything that torch's own reader loads from a directory, in one process."""
    reader = FileSystemReader(folder)
    index = reader.read_metadata()
    record: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else [None]
        for key, entry in index.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(record, storage_reader=reader, planner=planner, no_dist=True)
    return index, record
