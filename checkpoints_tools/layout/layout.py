"""What a target will look like on the disk, settled before a byte of it is written.

A file has a fixed size, texts that are known at once (headers, small files), and placements: parts
of logical tensors at their offsets. So files can be written in any order, by several workers, and
again after a kill. A zip's checksums depend on the bytes that went by, and are patched at the end.
It reads no weight and writes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.sharding import Parameter, Part, Split, part

# Megatron pads the vocabulary to a multiple of this, times the tensor ranks.
VOCABULARY_MULTIPLE, MULTIPLE_MAX = 128, 1 << 16


@dataclass(frozen=True, slots=True)
class Placement:
    """A part of a logical tensor, and where its first byte goes in a file.

    The part lies there in rows, one range after the other; with `transposed` it is turned first.
    Rows of a part beyond its ranges, a padded vocabulary's, are zeros.
    """

    name: str
    part: Part
    offset: int
    dtype: torch.dtype
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes that are known before any weight is read."""

    offset: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Patch:
    """Where the CRC-32 of a placement's bytes is noted: four bytes, little-endian."""

    offset: int
    placement: int  # Its number in the file.


@dataclass(frozen=True, slots=True)
class File:
    """One file of the target; `path` is relative to it, with slashes."""

    path: str
    size: int
    texts: tuple[Text, ...] = ()
    placements: tuple[Placement, ...] = ()
    patches: tuple[Patch, ...] = ()


def text_file(path: str, content: bytes) -> File:
    return File(path, len(content), (Text(0, content),))


@dataclass(frozen=True)
class Division:
    """How a target is divided: tensor, pipeline and expert ranks, and virtual stages."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Layout:
    """All of a target. Its manifest goes to `folder`, which is where a reader finds the weights.

    `last` makes the target one that its own software recognises; it is written after all else.
    """

    format: str  # As its reader calls it.
    files: tuple[File, ...]
    folder: str = ""
    last: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()  # What a user should know of this form of the model.
    vocabulary_rows: int | None = None  # With those that pad it.
    alone: bool = False  # The one file is the target, and there is no place for a manifest.

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in (*self.files, *self.last))


def saved_part(parameter: Parameter, config: GPTConfig, rank: int, tp: int, rows: int) -> Part:
    """What tensor rank `rank` of `tp` has of a parameter in a file.

    Unlike in a running engine, keys and values are never held twice: with fewer query groups than
    ranks the matrix is still cut in equal runs. `rows` is the padded vocabulary's.
    """
    if parameter.split is Split.QKV:
        size = parameter.shape[0] // tp
        return Part(0, ((rank * size, (rank + 1) * size),), size)
    if parameter.split is Split.VOCAB:
        size, held = rows // tp, parameter.shape[0]
        return Part(0, ((min(held, rank * size), min(held, (rank + 1) * size)),), size)
    return part(parameter, config, rank, tp)


def padded_vocabulary(config: GPTConfig, tp: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows of the embedding in Megatron's files."""
    step = multiple * tp
    if multiple > MULTIPLE_MAX:
        raise ConfigError(
            f"--make-vocab-size-divisible-by is {multiple}, and most of the vocabulary would be "
            f"padding; give at most {MULTIPLE_MAX}"
        )
    return -(-config.vocab_size // step) * step


def check_experts(config: GPTConfig, ep: int) -> None:
    """Refuse a number of expert ranks that the experts cannot be shared among."""
    if ep < 1 or (ep > 1 and (not any(config.moe_layers) or config.num_experts % ep)):
        works = [n for n in range(1, config.num_experts + 1) if config.num_experts % n == 0]
        can = ", ".join(map(str, works)) if any(config.moe_layers) else "1: it has no experts"
        raise ConfigError(f"expert parallel {ep} does not divide the model; --ep can be {can}")


def placed(files: Iterable[File]) -> dict[str, list[tuple[int, int]]]:
    """For each logical tensor, the (file, placement) numbers of where it goes."""
    places: dict[str, list[tuple[int, int]]] = {}
    for number, file in enumerate(files):
        for place, placement in enumerate(file.placements):
            places.setdefault(placement.name, []).append((number, place))
    return places


def unplaced(checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """Tensors that the target would lose; a layout that has any is broken."""
    places = placed(layout.files)
    return [name for name in checkpoint.tensors if name not in places]
