"""Merge of a linear adapter into the weights of a checkpoint.

The weight of a linear becomes output_scale * c * (W * input_scale + scale * B A), and its bias is
multiplied by the output scale. The weights are computed in fp64 when they are read, a block of rows
at a time, and are rounded once, to the dtype of the target. The merged model is a model of its own:
it has a new digest, and adapters of the base model do not fit it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gpt.adapters.adapter_file import Adapter, check_adapter, open_adapter
from gpt.adapters.fused_linears import linear_groups
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    ComputedTensor,
    InMemoryTensor,
    LogicalTensor,
    SourceSlice,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import AdapterError, CheckpointError
from gpt.linear_adapter import LinearAdapter
from gpt.parallel.adaptable_linears import AdaptableLinear
from gpt.parallel.adapter_sharding import part_rows
from gpt.parallel.weight_sharding import ShardSpec

# Rows are computed in aligned blocks, so that an element has the same value in every read: a
# product of other sizes may be summed in another order.
BLOCK_ROWS = 64
CHECKED_ROWS = 256  # Per linear.


def open_merge_adapter(path: Path, source: Checkpoint) -> Adapter:
    """Open the adapter of `--merge`; refuse one that does not fit, or that weights cannot hold."""
    adapter = open_adapter(path, base=source)
    if len(adapter.table) or not adapter.linears:
        raise AdapterError(
            f"{path} has {len(adapter.table)} virtual tokens, which weights cannot express; merge "
            "an adapter that only changes linears, or serve this one as an adapter"
        )
    if adapter.card.invocation:
        raise AdapterError(
            f"{path} is an activated LoRA: it acts only from its invocation on, which weights "
            "cannot express; serve it as an adapter, or merge a LoRA"
        )
    if any(linear.bottleneck is not None for linear in adapter.linears.values()):
        raise AdapterError(
            f"{path} has bottlenecks (a Houlsby adapter), networks that weights cannot express; "
            "serve it as an adapter, or merge a LoRA"
        )
    check_adapter(adapter, source.config, identify(source))
    return adapter


def merge_adapter(
    source: Checkpoint, adapter: Adapter, path: Path, dtype_name: str | None = None
) -> Checkpoint:
    """Return the merged checkpoint in the dtype of the target; `path` is the adapter's path."""
    target = source if dtype_name is None else source.in_dtype(FLOAT_DTYPES[dtype_name])
    tensors = dict(target.tensors)
    for linear, parts in linear_groups(adapter.linears, source.config):
        name = f"{linear.name}.weight"
        changes = _row_changes(linear, parts, source.config)
        weight = _MergedWeight(source.tensors[name], changes)
        tensors[name] = _as_logical(weight, target.tensors[name].dtype)
        bias = f"{linear.name}.bias"
        if bias in tensors:
            tensors[bias] = _merge_bias(source.tensors[bias], changes, target.tensors[bias].dtype)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return replace(
        target,
        tensors=tensors,
        identity=None,
        copies=(),
        files=(*source.files, *files),
        notes=(*source.notes, f"merged with {adapter.card.name!r}, digest {adapter.digest[:12]}"),
    )


@dataclass(frozen=True)
class _RowChange:
    """A change, and the rows of the whole linear that it changes."""

    rows: Tensor
    change: LinearAdapter


def _row_changes(
    linear: AdaptableLinear, parts: Mapping[str, LinearAdapter], config: GPTConfig
) -> tuple[_RowChange, ...]:
    return tuple(
        _RowChange(part_rows(linear, part, config), change) for part, change in parts.items()
    )


def _as_logical(stored: ComputedTensor | InMemoryTensor, dtype: torch.dtype) -> LogicalTensor:
    return LogicalTensor(stored.shape, dtype, (SourceSlice(stored, (0, stored.shape[0])),))


@dataclass(frozen=True)
class _MergedWeight(ComputedTensor):
    """The weight of a linear with its changes, in fp64."""

    base: LogicalTensor
    changes: Sequence[_RowChange]
    dtype: torch.dtype = torch.float64

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def location(self) -> str:
        return f"{self.base.slices[0].source.location} (merged)"

    @property
    def stored_dtype_name(self) -> str:
        return str(self.base.dtype).removeprefix("torch.")

    def compute_box(self, *box: slice) -> Tensor:
        row_range, columns = range(self.shape[0])[box[0]], box[1]
        first = row_range.start // BLOCK_ROWS * BLOCK_ROWS
        blocks = [
            self._compute_rows(start, min(start + BLOCK_ROWS, self.shape[0]))
            for start in range(first, row_range.stop, BLOCK_ROWS)
        ]
        rows = slice(row_range.start - first, row_range.stop - first, row_range.step)
        return torch.cat(blocks)[rows, columns]

    def _compute_rows(self, start: int, stop: int) -> Tensor:
        shape = (stop - start, self.shape[1])
        weight = torch.empty(shape, dtype=torch.float64)
        self.base.read(ShardSpec(0, ((start, stop),), stop - start), weight)
        for row_change in self.changes:
            # Positions in the change of its rows in this block.
            indices = ((row_change.rows >= start) & (row_change.rows < stop)).nonzero().flatten()
            local_rows = row_change.rows[indices] - start
            weight[local_rows] = _merge_rows(weight[local_rows], row_change.change, indices)
        return weight


def _merge_rows(weight: Tensor, change: LinearAdapter, rows: Tensor) -> Tensor:
    """Return rows of a weight with their change; `rows` are their positions in the change."""
    if change.input_scale is not None:
        weight = weight * change.input_scale.double()
    if change.lora_a is not None and change.lora_b is not None:
        product = change.lora_b[rows].double() @ change.lora_a.double()
        weight = weight + change.scale * product
    if change.output_factor is not None:  # In fp32, as a server computes it.
        weight = weight * change.output_factor[rows].double().unsqueeze(1)
    if change.output_scale is not None:
        weight = weight * change.output_scale[rows].double().unsqueeze(1)
    return weight


def _merge_bias(
    base: LogicalTensor, changes: Sequence[_RowChange], dtype: torch.dtype
) -> LogicalTensor:
    bias = base.read().double()
    for row_change in changes:
        if row_change.change.output_scale is not None:
            bias[row_change.rows] *= row_change.change.output_scale.double()
    return _as_logical(InMemoryTensor(bias, base.slices[0].source.location), dtype)


@dataclass(frozen=True)
class MergeCheck:
    """How well the merged weights represent the changes of an adapter."""

    checked_rows: int
    relative_error: float  # Rms of the error of merged - W, relative to the change's rms.


def check_merge(source: Checkpoint, merged: Checkpoint, adapter: Adapter) -> MergeCheck:
    """Compare merged - W of a written checkpoint with the change, in up to CHECKED_ROWS rows.

    An error above the rounding of the target's dtype is a CheckpointError.
    """
    checked_rows, error_square, change_square = 0, 0.0, 0.0
    for linear, parts in linear_groups(adapter.linears, source.config):
        name = f"{linear.name}.weight"
        before, after = source.tensors[name].read(), merged.tensors[name].read()
        epsilon = torch.finfo(after.dtype).eps
        for row_change in _row_changes(linear, parts, source.config):
            step = -(-len(row_change.rows) // CHECKED_ROWS)
            indices = torch.arange(0, len(row_change.rows), step)
            rows = row_change.rows[indices]
            expected = _merge_rows(before[rows].double(), row_change.change, indices)
            error = after[rows].double() - expected
            # Subnormal numbers of fp16 have an absolute error.
            bound = epsilon * expected.abs() + torch.finfo(after.dtype).smallest_normal * epsilon
            if not bool((error.abs() <= bound).all()):
                raise CheckpointError(
                    f"{merged.path}: the merged {name} differs from its base weight plus the "
                    f"adapter's change by {float(error.abs().max()):.3g}; the checkpoint is wrong: "
                    "remove it and report this error"
                )
            checked_rows += len(rows)
            error_square += float(error.square().sum())
            change_square += float((expected - before[rows].double()).square().sum())
    return MergeCheck(checked_rows, (error_square / max(change_square, 1e-300)) ** 0.5)
