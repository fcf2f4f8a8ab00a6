"""Target layout: every file's size, literal bytes and tensor placements, planned before writing.

A target file has a fixed size, literal bytes that are already known in the plan (headers, small
files), and placements. A placement is a part of a logical (unsharded) tensor at a byte offset.
All sizes and offsets are fixed. Therefore several workers can write parts of the files in any
order, and a resumed run can write a part again at the same offset. The CRCs inside zip files depend
on the tensors' bytes, so the CRCs are written after the tensors, at offsets that the layout lists
as patches. The module reads no weights and writes no files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.vocabulary_padding import (
    VOCABULARY_MULTIPLE,
    local_vocab_range,
    padded_vocab_size,
)
from gpt.parallel.weight_sharding import ParameterSpec, ShardRule, ShardSpec, shard_spec

VOCABULARY_MULTIPLE_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Placement:
    """A part of a logical tensor at a byte offset of a file.

    The part is a selection of rows (`part.dim` 0) or of columns (`part.dim` 1), in the order of
    `part.ranges`. With `transposed`, the matrix of the selected rows is stored transposed. If
    `part.size` exceeds the number of selected rows (in a padded vocabulary), rows of zeros follow.
    """

    name: str
    part: ShardSpec
    offset: int
    dtype: torch.dtype
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class LiteralBytes:
    """Bytes of a file that are known before any weight is read."""

    offset: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CrcPatch:
    """The offset of the four bytes where a file stores the CRC-32 of a placement's bytes.

    The CRC is little-endian. It is written when all bytes of the placement are known.
    """

    offset: int
    placement_index: int  # Index in TargetFile.placements.


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file of the target; `path` is relative to the target directory, with slashes."""

    path: str
    size: int
    literals: tuple[LiteralBytes, ...] = ()
    placements: tuple[Placement, ...] = ()
    patches: tuple[CrcPatch, ...] = ()


def literal_file(path: str, content: bytes) -> TargetFile:
    """Plan a file that has only literal bytes."""
    return TargetFile(path, len(content), (LiteralBytes(0, content),))


@dataclass(frozen=True)
class ParallelSplit:
    """Parallel sizes of a target."""

    tp: int = 1  # Tensor parallel.
    pp: int = 1  # Pipeline parallel.
    vpp: int = 1  # Virtual stages per pipeline rank.
    ep: int = 1  # Expert parallel.


@dataclass(frozen=True)
class Layout:
    """All files of a target.

    `last_files` are the files by which other software recognizes the format. They are written after
    all other files, so that no software reads an incomplete target as a checkpoint.
    """

    format: str  # The format's name in `gpt.formats.registry`.
    files: tuple[TargetFile, ...]
    # Directory of the weights and the manifest, relative to the target; empty: the target itself.
    folder: str = ""
    last_files: tuple[TargetFile, ...] = ()
    notes: tuple[str, ...] = ()  # Hints for the user, such as flags needed to load the target.
    padded_vocab_size: int | None = None  # None: the format does not pad the vocabulary.
    # Whether `files` contains the tokenizer's files; False: the conversion copies them.
    includes_tokenizer: bool = False
    is_single_file: bool = False  # The target is a file, not a directory, and has no manifest.

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in (*self.files, *self.last_files))


def saved_part(
    parameter: ParameterSpec, config: GPTConfig, rank: int, tp: int, vocab_rows: int
) -> ShardSpec:
    """Return the part of a parameter that is in the file of tensor rank `rank`.

    `tp` is the number of tensor ranks, and `vocab_rows` is the padded vocabulary size. In files,
    the QKV matrix is always split into equal parts. A loaded model differs from its files if there
    are more ranks than query groups: its ranks then replicate KV heads (see `shard_spec`).
    """
    if parameter.shard_rule is ShardRule.QKV:
        size = parameter.shape[0] // tp
        return ShardSpec(0, ((rank * size, (rank + 1) * size),), size)
    if parameter.shard_rule is ShardRule.VOCAB:
        size = vocab_rows // tp
        return ShardSpec(0, (local_vocab_range(parameter.shape[0], size, rank),), size)
    return shard_spec(parameter, config, rank, tp)


def stored_vocab_rows(config: GPTConfig, tp: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Return the number of embedding rows in Megatron's files, padding included."""
    if multiple > VOCABULARY_MULTIPLE_MAX:
        raise ConfigError(
            f"--make-vocab-size-divisible-by {multiple} is too large: most vocabulary rows would "
            f"be padding; give at most {VOCABULARY_MULTIPLE_MAX}"
        )
    return padded_vocab_size(config.vocab_size, tp, multiple)


def check_expert_parallel(config: GPTConfig, ep: int) -> None:
    """Refuse an expert-parallel size that does not divide the number of experts."""
    if ep < 1 or (ep > 1 and (not any(config.moe_layers) or config.num_experts % ep)):
        divisors = [n for n in range(1, config.num_experts + 1) if config.num_experts % n == 0]
        choices = (
            ", ".join(map(str, divisors))
            if any(config.moe_layers)
            else "1, since the model has no experts"
        )
        raise ConfigError(
            f"expert parallel {ep} is not possible for this model; --ep can be {choices}"
        )


def placements_by_tensor(files: Iterable[TargetFile]) -> dict[str, list[tuple[int, int]]]:
    """Return the (file index, placement index) pairs of each logical tensor."""
    placements: dict[str, list[tuple[int, int]]] = {}
    for file_index, file in enumerate(files):
        for placement_index, placement in enumerate(file.placements):
            placements.setdefault(placement.name, []).append((file_index, placement_index))
    return placements


def unplaced_tensors(checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """Return the names of tensors that are in no file of the layout; empty for a correct layout."""
    placements = placements_by_tensor(layout.files)
    return [name for name in checkpoint.tensors if name not in placements]
