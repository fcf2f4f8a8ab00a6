"""A checkpoint as the rest of Preamble sees it: canonical names and whole, unpadded tensors.

A logical tensor is a map of pieces: each says which box of it lies in which box of a stored tensor,
and stored tensors are mapped files. Reading copies the boxes asked for straight to where they are
wanted, so resharding is only which part one reads, and nothing is ever held twice.
It knows no format; a reader is whatever makes such a map.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES, FLOATS
from gpt.errors import CheckpointError
from gpt.parallel.sharding import Part, parameters

# How the names of a tokenizer's files end; files of one vocabulary may have any prefix.
TOKENIZER_FILES = ("tokenizer.json", ".model", "vocab.json", "null.json")

# How much of a tensor is in flight when one streams through it.
BLOCK_BYTES = 4 << 20


class Stored(Protocol):
    """A tensor as it lies in a file, of one dimension or two."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def where(self) -> str:
        """The file and the key, for messages."""
        ...

    def tensor(self) -> Tensor:
        """A view of the mapped file; read only."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor that has no file of its own."""

    value: Tensor
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def tensor(self) -> Tensor:
        return self.value.detach()


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor, and where in a stored one it starts.

    A vector counts as one column. With `transposed` the stored tensor is turned first, so that
    `source_row` and `source_column` count in the logical tensor's own directions.
    """

    source: Stored
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None  # None: all of them.
    source_row: int = 0
    row_step: int = 1  # Old Megatron files interleave the rows of queries, keys and values.
    source_column: int = 0
    transposed: bool = False

    def box(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """A view of the stored tensor: the given logical rows and columns, all in this piece."""
        stored = _matrix(self.source.tensor())
        stored = stored.T if self.transposed else stored
        first = self.source_row + (rows[0] - self.rows[0]) * self.row_step
        stop = first + (rows[1] - rows[0] - 1) * self.row_step + 1
        left = self.source_column + columns[0] - (self.columns[0] if self.columns else 0)
        return stored[first : stop : self.row_step, left : left + columns[1] - columns[0]]

    def extent(self, width: int) -> tuple[int, int]:
        """Rows and columns that the stored tensor must have at least, seen in our directions."""
        count = self.rows[1] - self.rows[0]
        columns = self.columns or (0, width)
        last = self.source_row + (count - 1) * self.row_step + 1
        return last, self.source_column + columns[1] - columns[0]


@dataclass(frozen=True, slots=True)
class Logical:
    """One whole tensor of the model; `dtype` is what reading gives unless told otherwise."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self._width * self.dtype.itemsize

    @property
    def _width(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @torch.no_grad()
    def read(self, part: Part | None = None, out: Tensor | None = None) -> Tensor:
        """What a rank holds of it, copied into `out` and converted to its dtype on the way.

        Rows or columns of the part beyond its ranges, a padded vocabulary's, become zero.
        """
        part = part or Part(0, ((0, self.shape[0]),), self.shape[0])
        shape = part.shape(self.shape)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        assert tuple(out.shape) == shape, f"a part of {shape} does not fit {tuple(out.shape)}"
        target, filled = _matrix(out), 0
        for start, stop in part.ranges:
            window = target.narrow(part.dim, filled, stop - start)
            if part.dim == 0:
                self._copy((start, stop), (0, self._width), window)
            else:
                self._copy((0, self.shape[0]), (start, stop), window)
            filled += stop - start
        target.narrow(part.dim, filled, part.size - filled).zero_()
        return out

    @torch.no_grad()
    def corner(self, row: int, rows: int, columns: int) -> Tensor:
        """The first columns of a few rows: a cheap sample."""
        height, width = min(rows, self.shape[0] - row), min(columns, self._width)
        out = torch.empty(height, width, dtype=self.dtype)
        self._copy((row, row + height), (0, width), out)
        return out

    @torch.no_grad()
    def rows(self, start: int, stop: int, room: Tensor) -> Tensor:
        """Whole rows: a view of the file where its bytes are ours already, else made in `room`."""
        if (direct := self._direct()) is not None:
            return direct[start:stop]
        made = room[: (stop - start) * self.row_bytes].view(self.dtype)
        made = made.view(stop - start, *self.shape[1:])
        return self.read(Part(0, ((start, stop),), stop - start), made)

    def blocks(self, room: Tensor | None = None) -> Iterator[memoryview]:
        """Its bytes in order; each block is valid only until the next is asked for.

        `room`, of bytes, is where blocks are made if they have to be. Whoever streams many tensors
        brings one for all: freeing and taking large blocks by turns leaves holes in the heap.
        """
        if room is None or room.numel() < self.row_bytes:
            room = make_room(self.row_bytes)
        step = room.numel() // self.row_bytes
        for start in range(0, self.shape[0], step):
            yield as_bytes(self.rows(start, min(self.shape[0], start + step), room))

    @property
    def row_bytes(self) -> int:
        return max(1, self._width * self.dtype.itemsize)

    def _direct(self) -> Tensor | None:
        """The stored tensor itself, if its bytes are ours."""
        if len(self.pieces) != 1 or self.pieces[0].source.dtype != self.dtype:
            return None
        view = self.pieces[0].box((0, self.shape[0]), (0, self._width))
        # A tensor of one element counts as contiguous whatever its stride; torch's views mind it.
        plain = view.is_contiguous() and view.stride(-1) == 1 and view.device.type == "cpu"
        return view if plain else None

    def _copy(self, rows: tuple[int, int], columns: tuple[int, int], out: Tensor) -> None:
        for piece in self.pieces:
            its = piece.columns or (0, self._width)
            top, bottom = max(rows[0], piece.rows[0]), min(rows[1], piece.rows[1])
            left, right = max(columns[0], its[0]), min(columns[1], its[1])
            if top < bottom and left < right:
                target = out[top - rows[0] : bottom - rows[0], left - columns[0] :]
                box = piece.box((top, bottom), (left, right))
                target.narrow(1, 0, right - left).copy_(box)

    def fault(self) -> str | None:
        """Why the pieces do not make up the tensor; None if they do, each element once."""
        for piece in self.pieces:
            if piece.source.dtype not in FLOAT_NAMES:
                known = ", ".join(FLOATS)
                return f"{piece.source.where} is {piece.source.dtype}, not one of {known}"
            stored = (*piece.source.shape, 1)[:2]
            have = stored[::-1] if piece.transposed else stored
            need = piece.extent(self._width)
            if need[0] > have[0] or need[1] > have[1] or len(piece.source.shape) > 2:
                found = tuple(piece.source.shape)
                return f"{piece.source.where} has shape {found}, too small for what is mapped on it"
        bands: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for piece in self.pieces:
            bands.setdefault(piece.rows, []).append(piece.columns or (0, self._width))
        for rows, columns in bands.items():
            if not _tiles(columns, self._width):
                return f"rows {rows[0]} to {rows[1]} are not covered exactly once"
        return None if _tiles(list(bands), self.shape[0]) else "its rows are not covered once each"


def make_room(bytes_min: int = 0) -> Tensor:
    """Scratch memory for `Logical.blocks`."""
    return torch.empty(max(bytes_min, BLOCK_BYTES), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's bytes, where they are."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def stack(runs: Iterable[tuple[Stored, int, int]], *, transposed: bool = False) -> Logical:
    """Runs of rows, one under the other: (stored tensor, its first row, how many rows)."""
    pieces, row = [], 0
    for source, first, count in runs:
        piece = Piece(source, (row, row + count), source_row=first, transposed=transposed)
        pieces.append(piece)
        row += count
    first_shape = pieces[0].source.shape
    columns = first_shape[:1] if transposed else first_shape[1:]
    dtype = pieces[0].source.dtype
    for piece in pieces[1:]:
        if piece.source.dtype in FLOAT_NAMES and dtype in FLOAT_NAMES:
            # Where pieces differ in precision, the whole has one that holds all of them exactly.
            dtype = torch.promote_types(dtype, piece.source.dtype)
    return Logical((row, *columns), dtype, tuple(pieces))


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _tiles(spans: list[tuple[int, int]], size: int) -> bool:
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop <= start:
            return False
        end = stop
    return end == size


@dataclass(frozen=True)
class Identity:
    """Which model this is, whatever form its files have.

    `sampled` is the fingerprint of the tensors as these very files hold them; it differs from
    `fingerprint`, the origin's, once the dtype was changed, and then `note` says so.
    """

    digest: str
    fingerprint: str
    note: str = ""
    sampled: str = ""
    stored: str = ""  # The digest of these very files, where it is not the origin's.


@dataclass(frozen=True, slots=True)
class Copy:
    """What files hold twice, as ranks do that share a norm: the one that is read, and another."""

    name: str
    kept: Stored
    other: Stored


@dataclass(frozen=True)
class Checkpoint:
    """What a reader found: an architecture, a map of every tensor, and what lies beside them."""

    path: Path
    format: str
    config: GPTConfig
    tensors: Mapping[str, Logical]
    files: tuple[Path, ...] = ()  # The weights'; empty if they are in memory.
    tokenizer: Path | None = None  # A file or a directory.
    notes: tuple[str, ...] = ()
    identity: Identity | None = None  # As recorded; None where the format does not say.
    split: Mapping[str, int] = field(default_factory=dict)  # The writer's: tp, pp, vpp, ep.
    copies: tuple[Copy, ...] = ()  # Compared by who reads everything.

    def read(self, name: str, part: Part | None = None, out: Tensor | None = None) -> Tensor:
        return self.tensors[name].read(part, out)

    def in_dtype(self, dtype: torch.dtype) -> "Checkpoint":
        """The same, converted as it is read; but the choice among experts stays exact."""
        tensors = {
            name: logical if name.endswith(".expert_bias") else replace(logical, dtype=dtype)
            for name, logical in self.tensors.items()
        }
        config = self.config.with_fields(dtype=FLOAT_NAMES[dtype])
        return replace(self, config=config, tensors=tensors)

    def check(self) -> None:
        """Hold the map against the config: every tensor is there, whole, and of its shape."""
        needed = parameters(self.config)
        missing = [name for name in needed if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {some(missing)}; the config and the weights disagree, or "
                f"files are lost: take both from the same, whole checkpoint"
            )
        refuse_leftover(self.path, [name for name in self.tensors if name not in needed])
        for name, parameter in needed.items():
            logical = self.tensors[name]
            if logical.shape != parameter.shape:
                raise CheckpointError(
                    f"{name} in {self.path}: found {logical.shape}, need {parameter.shape} by the "
                    f"config; the config and the weights disagree: take both from the same model"
                )
            fault = logical.fault()
            if fault:
                raise CheckpointError(
                    f"{name} in {self.path}: {fault}; files are missing or do not belong together"
                )


def in_memory(
    config: GPTConfig, tensors: Mapping[str, Tensor], tokenizer: Path | None = None
) -> Checkpoint:
    """A checkpoint of tensors that are not in files."""
    logical = {
        name: stack([(InMemory(value, name), 0, value.shape[0])]) for name, value in tensors.items()
    }
    dtype = common_dtype(tensor.pieces[0].source for tensor in logical.values())
    if dtype is not None:
        config = config.with_fields(dtype=FLOAT_NAMES[dtype])
    return Checkpoint(Path("memory"), "memory", config, logical, tokenizer=tokenizer)


def overridden(config: GPTConfig, changes: GPTConfig | Mapping[str, Any] | None) -> GPTConfig:
    """A reader's config, with what the user knows better: all of it, or some fields."""
    if isinstance(changes, GPTConfig):
        return changes
    return GPTConfig.from_dict({**config.to_dict(), **changes}) if changes else config


def common_dtype(tensors: Iterable[Stored]) -> torch.dtype | None:
    """The floating dtype that most of the weights have; None if none is one we know."""
    weights: Counter[torch.dtype] = Counter()
    for stored in tensors:
        if stored.dtype in FLOAT_NAMES:
            weights[stored.dtype] += torch.Size(stored.shape).numel()
    return max(weights, key=lambda dtype: weights[dtype]) if weights else None


def find_tokenizer(*folders: Path) -> Path | None:
    """The first of the directories that holds a file of a tokenizer."""
    for folder in folders:
        for ending in TOKENIZER_FILES:
            if any(file.is_file() for file in folder.glob(f"*{ending}")):
                return folder
    return None


def alike(left: Sequence[Stored], right: Sequence[Stored]) -> bool:
    """Whether tensors are copies of others: a few rows tell that from what was trained apart."""
    if len(left) != len(right):
        return False
    for mine, its in zip(left, right, strict=True):
        if tuple(mine.shape) != tuple(its.shape):
            return False
        if mine.shape and mine.shape[0]:
            rows = [0, mine.shape[0] // 2, mine.shape[0] - 1]
            if not torch.equal(mine.tensor()[rows], its.tensor()[rows]):
                return False
        elif not torch.equal(mine.tensor(), its.tensor()):
            return False
    return True


def refuse_untied(
    path: Path, head: Sequence[Stored], embedding: Sequence[Stored], remedy: str
) -> None:
    """A tied model's files may repeat the embedding as the head, but no head of its own.

    Both are given as the parts that files hold of them.
    """
    if not alike(head, embedding):
        pairs = zip(head, embedding, strict=False)
        differing = next((p for p in pairs if not alike(p[:1], p[1:])), (head[0], embedding[0]))
        raise CheckpointError(
            f"{path}: the config ties the head to the embedding, but {differing[0].where} is not "
            f"equal to {differing[1].where}; if they were trained apart, {remedy}"
        )


def refuse_larger_vocabulary(path: Path, config: GPTConfig, rows: int) -> None:
    """Rows of padding can be left out; rows that are not there cannot be made."""
    if config.vocab_size > rows:
        raise CheckpointError(
            f"{path}: vocab_size is overridden with {config.vocab_size}, but the embedding has "
            f"{rows} rows; the true size can only be smaller: give at most {rows}"
        )


def refuse_leftover(path: Path, names: Iterable[str]) -> None:
    left = list(names)
    if left:
        raise CheckpointError(
            f"{path}: the config has no place for {len(left)} of the weights: {some(left)}; they "
            "would change the result, so the model is not read: take both from the same model"
        )


def some(names: Sequence[str]) -> str:
    """A few of many names, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
