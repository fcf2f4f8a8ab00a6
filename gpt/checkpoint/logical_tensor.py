"""Logical tensors and resharding: whole, unpadded tensors mapped onto slices of stored tensors.

A logical checkpoint maps canonical parameter names to logical tensors. A logical tensor is a list
of slices. Each slice maps a box of rows and columns of the logical tensor to a box of a stored
tensor, which usually is a view of a memory-mapped file. A read copies the requested rows or columns
directly to their destination, so no weight is in memory twice. Resharding needs no other code: each
rank reads its own shard. The module is independent of the checkpoint formats; each format's reader
builds the slices.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPE_NAMES, FLOAT_DTYPES
from gpt.errors import CheckpointError
from gpt.parallel.weight_sharding import ShardSpec, parameter_specs

# Suffixes of the names of tokenizer files; the names may have any prefix.
TOKENIZER_FILE_SUFFIXES = ("tokenizer.json", ".model", "vocab.json", "null.json")

# Default size of the blocks of `LogicalTensor.iter_blocks`; a block has at least one row.
BLOCK_BYTES = 4 << 20


class StoredTensor(Protocol):
    """A tensor in the form in which a file stores it, such as one rank's padded shard."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def location(self) -> str:
        """The file and the key, for error messages."""
        ...

    def tensor(self) -> Tensor:
        """Return a tensor that must not be written: usually a view of the mapped file."""
        ...


@dataclass(frozen=True, slots=True)
class InMemoryTensor:
    """A stored tensor that exists as a torch tensor, in memory or mapped by torch."""

    torch_tensor: Tensor
    location: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.torch_tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.torch_tensor.dtype

    def tensor(self) -> Tensor:
        return self.torch_tensor.detach()


class ComputedTensor(ABC):
    """A stored tensor whose elements are computed or fetched when they are read.

    For example, quantized weights are dequantized.
    """

    dtype: torch.dtype  # Of the computed elements.

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def location(self) -> str: ...

    @property
    @abstractmethod
    def stored_dtype_name(self) -> str:
        """The form of the elements in the file, such as float8_e4m3fn."""

    @property
    def block_bytes(self) -> int:
        """The size, in fp32, of the elements that a read computes at once."""
        return BLOCK_BYTES

    @abstractmethod
    def compute_box(self, *box: slice) -> Tensor:
        """Compute the elements in a box; `box` has one slice per dimension."""

    def tensor(self) -> Tensor:
        return self.compute_box(*(slice(0, size) for size in self.shape))


def block_bytes_of(stored: StoredTensor) -> int:
    """Return the `block_bytes` of a tensor from which another one is computed."""
    return stored.block_bytes if isinstance(stored, ComputedTensor) else BLOCK_BYTES


def read_box(stored: StoredTensor, *box: slice) -> Tensor:
    """Return a box of a stored tensor, which must not be written; only the box is computed."""
    if isinstance(stored, ComputedTensor):
        return stored.compute_box(*box)
    return stored.tensor()[box]


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """A box of a logical tensor, and the position in a stored tensor where the box starts.

    A vector counts as a matrix of one column. With `transposed` the stored tensor is transposed
    first, so `source_row` and `source_column` index the transposed tensor.
    """

    source: StoredTensor
    rows: tuple[int, int]  # Logical rows: [start, stop).
    columns: tuple[int, int] | None = None  # Logical columns: [start, stop); None: all columns.
    source_row: int = 0
    # Distance, in stored rows, between consecutive logical rows. The stride is above 1 for old
    # Megatron files, which interleave the rows of queries, keys and values.
    row_stride: int = 1
    source_column: int = 0
    transposed: bool = False

    def view(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Return the given logical rows and columns, which must be inside this slice.

        The result is a view of the stored tensor; of a computed tensor, a new tensor.
        """
        row_start = self.source_row + (rows[0] - self.rows[0]) * self.row_stride
        row_stop = row_start + (rows[1] - rows[0] - 1) * self.row_stride + 1
        column_start = self.source_column + columns[0] - (self.columns[0] if self.columns else 0)
        row_box = slice(row_start, row_stop, self.row_stride)
        column_box = slice(column_start, column_start + columns[1] - columns[0])
        if isinstance(self.source, ComputedTensor):
            if self.transposed:
                return self.source.compute_box(column_box, row_box).T
            if len(self.source.shape) == 1:
                return self.source.compute_box(row_box).unsqueeze(1)[:, column_box]
            return self.source.compute_box(row_box, column_box)
        stored = _as_matrix(self.source.tensor())
        return (stored.T if self.transposed else stored)[row_box, column_box]

    def required_shape(self, width: int) -> tuple[int, int]:
        """Return the smallest (rows, columns) of a stored tensor that contains this slice.

        With `transposed`, this is the shape of the transposed stored tensor. `width` is the number
        of columns of the logical tensor.
        """
        row_count = self.rows[1] - self.rows[0]
        columns = self.columns or (0, width)
        stored_rows = self.source_row + (row_count - 1) * self.row_stride + 1
        stored_columns = self.source_column + columns[1] - columns[0]
        return stored_rows, stored_columns


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One whole tensor of the model; `dtype` is the dtype of a read without an `out` tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[SourceSlice, ...]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self._columns * self.dtype.itemsize

    @property
    def _columns(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @torch.no_grad()
    def read(self, shard: ShardSpec | None = None, out: Tensor | None = None) -> Tensor:
        """Copy a shard into `out` and convert it to the dtype of `out`; return `out`.

        Without `shard` the whole tensor is read. Without `out` a tensor of `dtype` is allocated.
        Rows of `out` after those of `shard.ranges` are vocabulary padding and are set to zero.
        """
        shard = shard or ShardSpec(0, ((0, self.shape[0]),), self.shape[0])
        shape = shard.local_shape(self.shape)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        assert tuple(out.shape) == shape, f"a shard of {shape} does not fit {tuple(out.shape)}"
        out_matrix = _as_matrix(out)
        offset = 0
        for start, stop in shard.ranges:
            window = out_matrix.narrow(shard.dim, offset, stop - start)
            if shard.dim == 0:
                self._copy_overlaps((start, stop), (0, self._columns), window)
            else:
                self._copy_overlaps((0, self.shape[0]), (start, stop), window)
            offset += stop - start
        out_matrix.narrow(shard.dim, offset, shard.size - offset).zero_()
        return out

    @torch.no_grad()
    def read_sample(self, first_row: int, rows_max: int, columns_max: int) -> Tensor:
        """Read up to `rows_max` rows from `first_row` on, in the first `columns_max` columns."""
        row_count = min(rows_max, self.shape[0] - first_row)
        column_count = min(columns_max, self._columns)
        out = torch.empty(row_count, column_count, dtype=self.dtype)
        self._copy_overlaps((first_row, first_row + row_count), (0, column_count), out)
        return out

    @torch.no_grad()
    def read_rows(self, start: int, stop: int, scratch: Tensor) -> Tensor:
        """Return complete rows: a view of the file if possible, else a copy in `scratch`."""
        if (mapped_rows := self._mapped_view()) is not None:
            return mapped_rows[start:stop]
        out = scratch[: (stop - start) * self.row_bytes].view(self.dtype)
        out = out.view(stop - start, *self.shape[1:])
        return self.read(ShardSpec(0, ((start, stop),), stop - start), out)

    def iter_blocks(self, scratch: Tensor | None = None) -> Iterator[memoryview]:
        """Iterate over the tensor's bytes in row order; a block is valid until the next iteration.

        `scratch` is a uint8 tensor, into which blocks are copied if they cannot be views of the
        file. A caller that streams many tensors passes the same scratch for all of them, because
        repeated allocation of large blocks fragments the heap.
        """
        if scratch is None or scratch.numel() < self.row_bytes:
            scratch = allocate_scratch(self.row_bytes)
        rows_per_block = scratch.numel() // self.row_bytes
        for start in range(0, self.shape[0], rows_per_block):
            yield as_bytes(
                self.read_rows(start, min(self.shape[0], start + rows_per_block), scratch)
            )

    @property
    def row_bytes(self) -> int:
        return max(1, self._columns * self.dtype.itemsize)

    def _mapped_view(self) -> Tensor | None:
        """Return the whole logical tensor as a view of the file.

        Returns None if the file does not store the tensor contiguously in `dtype`.
        """
        if len(self.slices) != 1 or self.slices[0].source.dtype != self.dtype:
            return None
        if isinstance(self.slices[0].source, ComputedTensor):
            return None
        view = self.slices[0].view((0, self.shape[0]), (0, self._columns))
        # is_contiguous() ignores the stride of a dimension of size 1, but view(dtype) checks it.
        is_viewable = view.is_contiguous() and view.stride(-1) == 1 and view.device.type == "cpu"
        return view if is_viewable else None

    def _copy_overlaps(self, rows: tuple[int, int], columns: tuple[int, int], out: Tensor) -> None:
        for source_slice in self.slices:
            slice_columns = source_slice.columns or (0, self._columns)
            top, bottom = max(rows[0], source_slice.rows[0]), min(rows[1], source_slice.rows[1])
            left, right = max(columns[0], slice_columns[0]), min(columns[1], slice_columns[1])
            if top >= bottom or left >= right:
                continue
            target = out[top - rows[0] : bottom - rows[0], left - columns[0] :]
            target = target.narrow(1, 0, right - left)
            rows_per_copy = bottom - top
            if isinstance(source_slice.source, ComputedTensor):
                # The elements are computed in fp32, a block of a few MB at a time.
                block_bytes = source_slice.source.block_bytes
                rows_per_copy = max(1, block_bytes // (4 * (right - left)))
            for first in range(top, bottom, rows_per_copy):
                stop = min(bottom, first + rows_per_copy)
                overlap = source_slice.view((first, stop), (left, right))
                target[first - top : stop - top].copy_(overlap)

    def mapping_error(self) -> str | None:
        """Describe the first error of the mapping onto stored tensors; None if there is none.

        The stored tensors must have float dtypes and contain their slices, and the slices must
        cover each element of the logical tensor exactly once.
        """
        for source_slice in self.slices:
            if source_slice.source.dtype not in FLOAT_DTYPE_NAMES:
                supported_dtypes = ", ".join(FLOAT_DTYPES)
                return (
                    f"{source_slice.source.location} is {source_slice.source.dtype}, not one of "
                    f"{supported_dtypes}, so it may be quantized"
                )
            padded_shape = (*source_slice.source.shape, 1)[:2]
            stored_shape = padded_shape[::-1] if source_slice.transposed else padded_shape
            required_shape = source_slice.required_shape(self._columns)
            if (
                required_shape[0] > stored_shape[0]
                or required_shape[1] > stored_shape[1]
                or len(source_slice.source.shape) > 2
            ):
                actual = tuple(source_slice.source.shape)
                return (
                    f"{source_slice.source.location} has shape {actual}, which does not contain "
                    "the slice that is mapped to it"
                )
        # The slices of each row range must cover all columns, and the row ranges all rows.
        columns_by_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source_slice in self.slices:
            columns_by_rows.setdefault(source_slice.rows, []).append(
                source_slice.columns or (0, self._columns)
            )
        for rows, columns in columns_by_rows.items():
            if not _covers_exactly(columns, self._columns):
                return f"some elements of rows {rows[0]} to {rows[1]} are missing or stored twice"
        return (
            None
            if _covers_exactly(list(columns_by_rows), self.shape[0])
            else "some rows are missing or stored twice"
        )


def allocate_scratch(bytes_min: int = 0) -> Tensor:
    """Allocate scratch memory for `LogicalTensor.iter_blocks`: at least `BLOCK_BYTES`."""
    return torch.empty(max(bytes_min, BLOCK_BYTES), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def concat_rows(
    row_runs: Iterable[tuple[StoredTensor, int, int]], *, transposed: bool = False
) -> LogicalTensor:
    """Concatenate runs of rows, each (stored tensor, first row, row count), to a logical tensor."""
    slices = []
    row = 0
    for source, first_row, count in row_runs:
        source_slice = SourceSlice(
            source, (row, row + count), source_row=first_row, transposed=transposed
        )
        slices.append(source_slice)
        row += count
    first_shape = slices[0].source.shape
    columns = first_shape[:1] if transposed else first_shape[1:]
    dtype = slices[0].source.dtype
    for source_slice in slices[1:]:
        if source_slice.source.dtype in FLOAT_DTYPE_NAMES and dtype in FLOAT_DTYPE_NAMES:
            # If slices have different dtypes, use the dtype that represents all values exactly.
            dtype = torch.promote_types(dtype, source_slice.source.dtype)
    return LogicalTensor((row, *columns), dtype, tuple(slices))


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _covers_exactly(spans: list[tuple[int, int]], size: int) -> bool:
    """Tell whether non-empty spans [start, stop) cover 0 to `size` without gap or overlap."""
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop <= start:
            return False
        end = stop
    return end == size


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model, independent of the format of its files.

    If the files contain weights in a converted dtype, `digest` and `fingerprint` still identify the
    original weights.
    """

    digest: str  # Base digest of the original weights; empty if not computed yet.
    fingerprint: str  # Fingerprint of the original weights.
    note: str = ""  # The dtype conversions; empty if there was none.
    sampled: str = ""  # Fingerprint of the tensors in the checkpoint's files.
    stored: str = ""  # Base digest of the tensors in the files; empty if it equals `digest`.


@dataclass(frozen=True, slots=True)
class ReplicaPair:
    """Two stored copies of a tensor, such as a norm weight of two ranks; the model reads `primary`.

    The checkpoint tools compare both.
    """

    name: str
    primary: StoredTensor
    replica: StoredTensor


@dataclass(frozen=True)
class Checkpoint:
    """A logical checkpoint: the architecture, the logical tensors, and the tokenizer's path."""

    path: Path
    format: str
    config: GPTConfig
    tensors: Mapping[str, LogicalTensor]
    files: tuple[Path, ...] = ()  # The weight files; empty if the weights are in memory.
    tokenizer: Path | None = None  # A file or a directory.
    notes: tuple[str, ...] = ()  # For the user: assumptions of the reader, ignored files.
    identity: ModelIdentity | None = None  # From the manifest; None if there is no manifest.
    split: Mapping[str, int] = field(default_factory=dict)  # tp, pp, vpp, ep of the training run.
    copies: tuple[ReplicaPair, ...] = ()  # Each stored duplicate with the tensor that is read.
    # Megatron's pattern of the layers (`*-*E`) if the files store a HybridModel, else empty.
    hybrid_layers: str = ""

    def read(self, name: str, shard: ShardSpec | None = None, out: Tensor | None = None) -> Tensor:
        return self.tensors[name].read(shard, out)

    def in_dtype(self, dtype: torch.dtype) -> "Checkpoint":
        """Return a checkpoint whose reads convert to `dtype`.

        The expert biases of routers keep their dtype, because rounding could change the choice of
        experts.
        """
        tensors = {
            name: logical if name.endswith(".expert_bias") else replace(logical, dtype=dtype)
            for name, logical in self.tensors.items()
        }
        config = self.config.with_fields(dtype=FLOAT_DTYPE_NAMES[dtype])
        return replace(self, config=config, tensors=tensors)

    def check(self) -> None:
        """Check that every parameter of the config is mapped completely and has its shape."""
        expected_parameters = parameter_specs(self.config)
        missing = [name for name in expected_parameters if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {summarize_names(missing)}; the config does not fit the "
                "weights, or files are missing: take the config and all files from one checkpoint"
            )
        refuse_unexpected_weights(
            self.path, [name for name in self.tensors if name not in expected_parameters]
        )
        for name, parameter in expected_parameters.items():
            logical = self.tensors[name]
            if logical.shape != parameter.shape:
                raise CheckpointError(
                    f"{name} in {self.path}: found shape {logical.shape}, but the config requires "
                    f"{parameter.shape}; the config does not fit the weights: take the config and "
                    "the weights from the same model"
                )
            error = logical.mapping_error()
            if error:
                raise CheckpointError(
                    f"{name} in {self.path}: {error}; take all files from one checkpoint that is "
                    "complete and not quantized"
                )


def checkpoint_from_tensors(
    config: GPTConfig, tensors: Mapping[str, Tensor], tokenizer: Path | None = None
) -> Checkpoint:
    """Make a checkpoint of torch tensors; the config gets the dtype of most elements."""
    logical_tensors = {
        name: concat_rows([(InMemoryTensor(tensor, name), 0, tensor.shape[0])])
        for name, tensor in tensors.items()
    }
    dtype = majority_dtype(tensor.slices[0].source for tensor in logical_tensors.values())
    if dtype is not None:
        config = config.with_fields(dtype=FLOAT_DTYPE_NAMES[dtype])
    return Checkpoint(Path("memory"), "memory", config, logical_tensors, tokenizer=tokenizer)


def apply_overrides(
    config: GPTConfig, overrides: GPTConfig | Mapping[str, Any] | None
) -> GPTConfig:
    """Return `overrides` if it is a config, else `config` with the fields of `overrides`."""
    if isinstance(overrides, GPTConfig):
        return overrides
    return GPTConfig.from_dict({**config.to_dict(), **overrides}) if overrides else config


def majority_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """Return the float dtype that most elements have; None if no tensor has a float dtype."""
    elements_by_dtype: Counter[torch.dtype] = Counter()
    for stored in tensors:
        if stored.dtype in FLOAT_DTYPE_NAMES:
            elements_by_dtype[stored.dtype] += torch.Size(stored.shape).numel()
    return (
        max(elements_by_dtype, key=lambda dtype: elements_by_dtype[dtype])
        if elements_by_dtype
        else None
    )


def find_tokenizer(*folders: Path) -> Path | None:
    """Return the first of `folders` that contains a tokenizer file, or None."""
    for folder in folders:
        for suffix in TOKENIZER_FILE_SUFFIXES:
            if any(file.is_file() for file in folder.glob(f"*{suffix}")):
                return folder
    return None


def samples_equal(left: Sequence[StoredTensor], right: Sequence[StoredTensor]) -> bool:
    """Compare pairs of tensors by their first, middle and last rows.

    If all these rows are equal, the tensors are copies: two tensors that were trained separately
    would have different rows.
    """
    if len(left) != len(right):
        return False
    for left_tensor, right_tensor in zip(left, right, strict=True):
        if tuple(left_tensor.shape) != tuple(right_tensor.shape):
            return False
        if left_tensor.shape and left_tensor.shape[0]:
            rows = [0, left_tensor.shape[0] // 2, left_tensor.shape[0] - 1]
            if not torch.equal(left_tensor.tensor()[rows], right_tensor.tensor()[rows]):
                return False
        elif not torch.equal(left_tensor.tensor(), right_tensor.tensor()):
            return False
    return True


def refuse_untied_head(
    path: Path, head: Sequence[StoredTensor], embedding: Sequence[StoredTensor], remedy: str
) -> None:
    """Refuse a tied model whose files contain an LM head that is not a copy of the embedding.

    `head` and `embedding` are the stored tensors of all tensor ranks. `remedy` is the end of
    the error message.
    """
    if not samples_equal(head, embedding):
        head_part, embedding_part = head[0], embedding[0]
        for pair in zip(head, embedding, strict=False):
            if not samples_equal(pair[:1], pair[1:]):
                head_part, embedding_part = pair
                break
        raise CheckpointError(
            f"{path}: the config ties the head to the embedding, but {head_part.location} is "
            f"not equal to {embedding_part.location}; if the model was trained with an untied "
            f"head, {remedy}"
        )


def refuse_unexpected_weights(path: Path, names: Iterable[str]) -> None:
    unexpected_names = list(names)
    if unexpected_names:
        raise CheckpointError(
            f"{path}: the config has no parameter for {len(unexpected_names)} of the weights: "
            f"{summarize_names(unexpected_names)}; without these weights the outputs would be "
            "wrong: take the config and the weights from the same model"
        )


def summarize_names(names: Sequence[str]) -> str:
    """Return the first three names and the count of the others, for an error message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
