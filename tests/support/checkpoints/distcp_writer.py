"""Writes `torch_dist` checkpoints with PyTorch's own distributed checkpointing, in one process.

It shares no code with the reader: whole tensors are stacked and named, a planner cuts them into
the chunks that ranks would have, and torch's FileSystemWriter lays them out and indexes them.
"""

import io
import json
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from tests.support.checkpoints.megatron_writer import Layout, args_of, hybrid_tensors
from tests.support.models import lively


@dataclass(frozen=True)
class Form:
    """How a model's tensors are named and cut."""

    tp: int = 1
    stacked: bool = True  # One key for all layers.
    lump: bool = False  # One chunk for each key.
    singleton: bool = False  # Gates, ups and experts under keys of their own.
    prefix: str = ""
    local: bool = False  # An expert layer's norm is named as a dense one's.
    folded: bool = False  # Arguments inside the checkpoint, as since 0.19.
    args: bool = True
    hybrid: bool = False  # As a HybridModel, whose layers all have keys of their own.
    changes: Mapping[str, Any] = field(default_factory=dict)  # Of args.


def saved(config: GPTConfig, form: Form, root: Path, dtype: str = "float32") -> Checkpoint:
    """Write a random model to an iteration under `root`; return the tensors that were cut."""
    source = lively(config).in_dtype(getattr(torch, dtype))
    tensors = {name: source.read(name) for name in source.tensors}
    rows = -(-config.vocab_size // 16) * 16
    for table in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if table in tensors:
            filler = torch.full((rows - config.vocab_size, config.hidden_size), 7.0)
            tensors[table] = torch.cat([tensors[table], filler.to(tensors[table])])
    folder = root / "iter_0000100"
    folder.mkdir(parents=True)
    args = Namespace(**args_of(config, tensors, Layout(tp=form.tp, hybrid=form.hybrid)))
    args = Namespace(**{**vars(args), **form.changes})
    if form.hybrid:
        tensors = hybrid_tensors(tensors)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 100}
    record: dict[str, Any] = dict(_keyed(config, tensors, form))
    name = f"{form.prefix}decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"
    record[name] = [None]
    record["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(3)
    if form.args and form.folded:
        record["common_state/shard_0_1"] = [common]
    elif form.args:
        torch.save(common, folder / "common.pt")
    write_chunks(folder, record, lambda key, value: _boxes(config, form, key, value))
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return source


def write_chunks(folder: Path, record: dict[str, Any], boxes: "Boxes") -> None:
    """Write tensors in the chunks that `boxes` returns, and pickled objects."""
    writer = FileSystemWriter(folder, thread_count=2)
    with warnings.catch_warnings(action="ignore"):  # Torch warns that one process writes alone.
        save(record, storage_writer=writer, planner=_Cutter(boxes), no_dist=True)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))


def even_boxes(value: Tensor, counts: list[int]) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of equal chunks; `counts` has their number in each dimension."""
    sizes = [size // count for size, count in zip(value.shape, counts, strict=True)]
    return [
        ([index * size for index, size in zip(position, sizes, strict=True)], sizes)
        for position in product(*map(range, counts))
    ]


def _keyed(config: GPTConfig, tensors: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    if form.local:
        tensors = {
            name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): value
            for name, value in tensors.items()
        }
    if form.singleton:
        tensors = _singletons(config, tensors)
    else:
        tensors = _stacked(tensors, r"\.local_experts\.\d+\.", ".experts.")
    if form.stacked and not form.hybrid:
        tensors = _stacked(tensors, r"^decoder\.layers\.\d+\.", "decoder.layers.")
    return {f"{form.prefix}{name}": value for name, value in tensors.items()}


def _stacked(tensors: dict[str, Tensor], number: str, without: str) -> dict[str, Tensor]:
    groups: dict[str, list[Tensor]] = {}
    for name, value in tensors.items():
        groups.setdefault(re.sub(number, without, name), []).append(value)
    return {
        name: torch.stack(values) if name not in tensors else values[0]
        for name, values in groups.items()
    }


def _singletons(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    split_tensors = {}
    for name, value in tensors.items():
        name = name.replace(".local_experts.", ".experts.")
        if config.gated and re.search(r"linear_fc1\.(weight|bias)$", name):
            split_tensors[f"{name}_w"], split_tensors[f"{name}_v"] = value.chunk(2)
        else:
            split_tensors[name] = value
    return split_tensors


class _Cutter(DefaultSavePlanner):
    """Plans a write for every chunk, as all ranks' plans together would."""

    def __init__(self, boxes: "Boxes") -> None:
        super().__init__(flatten_state_dict=False)
        self.boxes = boxes

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            for number, (offsets, sizes) in enumerate(self.boxes(key, value)):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                properties = TensorProperties.create_from_tensor(value)
                items.append(
                    WriteItem(
                        MetadataIndex(key, offsets, number),
                        WriteItemType.SHARD,
                        tensor_data=TensorWriteData(chunk, properties, value.size()),
                    )
                )
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self.state_dict[write_item.index.fqn]
        if write_item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(value, stream)
            return stream
        chunk: Tensor = value
        box = write_item.tensor_data.chunk
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            chunk = chunk.narrow(dim, offset, size)
        return chunk.clone()


Boxes = Callable[[str, Tensor], list[tuple[list[int], list[int]]]]


def _boxes(
    config: GPTConfig, form: Form, key: str, value: Tensor
) -> list[tuple[list[int], list[int]]]:
    if form.lump or key.startswith("optimizer."):
        return [([0] * value.dim(), list(value.shape))]
    bias = key.endswith(("bias", "bias_w", "bias_v"))
    matrix = not bias and "norm" not in key
    leading = value.dim() - (2 if matrix and "expert_bias" not in key else 1)
    counts = [*value.shape[:leading]] + [1] * (value.dim() - leading)
    fc1 = re.search(r"linear_fc1\.(weight|bias)(_[wv])?$", key)
    if fc1:
        joined = config.gated and not fc1[2]
        counts[leading] = form.tp * (2 if joined else 1)
    elif re.search(r"linear_qkv\.(weight|bias)$|word_embeddings|output_layer", key):
        counts[leading] = form.tp
    elif re.search(r"linear_(proj|fc2)\.weight$", key):
        counts[leading + 1] = form.tp
    return even_boxes(value, counts)
