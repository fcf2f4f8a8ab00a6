"""What is written in C, for CPUs: the library beside this file, if it was built.

`gpt/cpu/` has attention over the paged pool, for single new tokens and for runs of them, and
products with bf16 weights. This is the way in: it finds the library, says once why there is none,
and hands it addresses. Whoever asks must be ready to hear that it does not serve; the same in torch
is in gpt/attention/paged.py and gpt/backends/cpu_packing.py.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libkernels.so")
ABI = 14
DTYPES = (torch.bfloat16, torch.float32)
WIDTH_MAX = 512
# What the machine can do best, as the library counts it.
MACHINES = ("plain", "avx2", "avx512_bf16")
# Queries of a prompt that are worked on at once, and keys: as in gpt/cpu/src/packed_weight.h and
# gpt/cpu/src/vectors.h.
TILE = 12
SEGMENT = 256

# Work of so many rows, with a weight of so many numbers, is over before it is worth letting go.
BRIEF_ROWS = 16
BRIEF_NUMBERS = 1 << 24

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    """As in gpt/cpu/src/decode_attention.c."""

    _fields_ = (
        *((name, INT) for name in ("rows", "groups", "queries", "width")),
        *((name, INT) for name in ("block_tokens", "table_width", "window", "bf16", "threads")),
        ("scale", ctypes.c_double),
        *((name, POINTER) for name in ("row", "sequence", "context", "tables")),
    )


class _Runs(ctypes.Structure):
    """As in gpt/cpu/src/prefill_attention.c."""

    _fields_ = (
        *((name, INT) for name in ("pieces", "groups", "queries", "width")),
        *((name, INT) for name in ("block_tokens", "table_width", "window", "threads")),
        ("scale", ctypes.c_double),
        *((name, POINTER) for name in ("row", "past", "sequence", "tables")),
        *((name, POINTER) for name in ("parts", "begins", "shared", "desks")),
    )


# What each function takes, in order: p is an address, i a number. Those that answer say whether
# they failed; some are there only where the compiler knows AVX-512.
_TAKES = {
    "preamble_attend": "p p i i p p",
    "preamble_store": "ppp ii pp iiii",
    "preamble_attend_runs": "p p i i p p",
    "preamble_piece_queries": "i",
    "preamble_multiply": "p pi p i p p i p",
    "preamble_best": "p iii p i",
    "preamble_best_of": "pp i pp i",
    "preamble_multiply_by": "p iii p i p i ppp i p",
    "preamble_before_activation": "ppp iii",
    "preamble_attend_families": "pp",
    "preamble_layers": "pp",
    "preamble_layers_numbers": "pi",
    "preamble_multiplies_int8": "",
    "preamble_shortlist": "ppp i p i",
}
_ANSWERS = (
    *("preamble_attend", "preamble_attend_runs", "preamble_best_of"),
    *("preamble_piece_queries", "preamble_attend_families", "preamble_layers"),
    "preamble_multiplies_int8",
)
_ANSWERS_LONG = ("preamble_layers_numbers", "preamble_shortlist")


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    for name, kinds in _TAKES.items():
        function = getattr(found, name, None)
        if function is not None:
            function.argtypes = [POINTER if one == "p" else INT for one in kinds if one != " "]
            function.restype = ctypes.c_int if name in _ANSWERS else None
            if name in _ANSWERS_LONG:
                function.restype = INT
    return found


@cache
def brief() -> ctypes.CDLL:
    """The same, called without letting other Python threads in: they may keep the lock for long."""
    found = library()
    assert found is not None, "ask `library` first"
    # What is open already, and not what may lie at its path by now.
    return _typed(ctypes.PyDLL(str(LIBRARY), handle=found._handle))


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None and a line in the log."""
    try:
        # It shares OpenMP's threads with torch, since torch was loaded first.
        found = _typed(ctypes.CDLL(str(LIBRARY)))
        if found.preamble_abi() != ABI:
            raise OSError(f"{LIBRARY} is of another version; build it again: make kernels")
    except (OSError, AttributeError) as error:
        reason = str(error) if LIBRARY.exists() else f"{LIBRARY.name} was not built: make kernels"
        log.info("event=kernels_missing reason=%r", reason)
        return None
    found.preamble_choose(-1)
    log.info("event=kernels_loaded machine=%s", MACHINES[found.preamble_machine()])
    return found


def machine() -> str | None:
    """The kind of machine that the library works for; None: there is no library."""
    found = library()
    return None if found is None else MACHINES[found.preamble_machine()]


def choose_machine(name: str | None) -> None:
    """For tests: use what such a machine has, if this one has as much, or the best."""
    found = library()
    if found is not None:
        found.preamble_choose(-1 if name is None else MACHINES.index(name))


def rest() -> None:
    """Give back the threads that help this one; whoever runs the model next has its own.

    With more of OpenMP's threads than cores, none would wait awake for the next product.
    """
    found = library()
    if found is not None:
        found.preamble_rest()


def serves(x: Tensor, kv: Tensor) -> bool:
    """Whether the library is there and can work for these."""
    return (
        x.dtype in DTYPES
        and kv.dtype == x.dtype
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and x.requires_grad)
        and x.shape[-1] <= WIDTH_MAX
        and kv.is_contiguous()
        and library() is not None
    )


class Paged:
    """Single new tokens of a step, and what they see of the pool: the same for every layer."""

    def __init__(
        self,
        rows: Sequence[int],
        sequences: Sequence[int],
        contexts: Sequence[int],
        tables: Tensor,
        *,
        window: int | None,
    ) -> None:
        """Each row of the batch, its row of the tables, and how many keys it sees."""
        self._window, self._contexts = window or 0, sum(contexts)
        # Kept, since the library is given their addresses.
        self._tables = tables.long().contiguous()
        self._numbers = torch.from_numpy(np.array([rows, sequences, contexts], np.int64))
        self._plan: _Rows | None = None

    def plan(self, heads: int, kv: Tensor) -> ctypes.Structure:
        """The same for the library; it is good for as long as this is kept."""
        if self._plan is None:
            _, _, groups, block_tokens, width = kv.shape
            self._plan = _Rows(
                *(self._numbers.shape[1], groups, heads // groups, width),
                *(block_tokens, self._tables.shape[1], self._window),
                *(kv.dtype == torch.bfloat16, torch.get_num_threads()),
                width**-0.5,
                *(numbers.data_ptr() for numbers in self._numbers),
                self._tables.data_ptr(),
            )
        return self._plan

    def attend(self, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """Fill these rows of `out` with those of q; both are (T, H, D)."""
        short = self._contexts * kv[0, :, :, 0].numel() <= BRIEF_NUMBERS
        found = brief() if short else library()
        assert found is not None
        _attend(found.preamble_attend, self.plan(q.shape[1], kv), q, kv, out)


def attends_prompts() -> bool:
    """Whether the library has attention for `Runs` on this machine."""
    return machine() == MACHINES[-1]


def attends_runs(x: Tensor) -> bool:
    """Whether the library, which serves for such, attends to runs of them as well."""
    even = x.shape[-1] % 2 == 0
    return even and x.dtype == torch.bfloat16 and attends_prompts()


class Runs:
    """Runs of new tokens of a step, and what they see of the pool."""

    def __init__(
        self,
        rows: Sequence[int],
        sequences: Sequence[int],
        lengths: Sequence[int],
        past: Sequence[int],
        tables: Tensor,
        *,
        window: int | None,
    ) -> None:
        """Each run's first row of the batch, its row of the tables, and its tokens' places."""
        self._window, self._lengths = window or 0, lengths
        self._tables = tables.long().contiguous()
        self._numbers = torch.tensor([rows, past, sequences])
        self._plan: _Runs | None = None

    def plan(self, heads: int, kv: Tensor) -> ctypes.Structure:
        """The same for the library; it is good for as long as this is kept."""
        if self._plan is None:
            found = library()
            assert found is not None
            _, _, groups, block_tokens, width = kv.shape
            threads, queries = torch.get_num_threads(), heads // groups
            self._desks = torch.empty(threads * found.preamble_desk_bytes(), dtype=torch.uint8)
            _, past, sequences = self._numbers.tolist()
            pieces = cut(
                [length * queries for length in self._lengths],
                past,
                self._tables.numpy()[sequences],
                block_tokens,
                queries_max=found.preamble_piece_queries(width),
                # Each thread has some, so that none waits long for another.
                runs_max=len(past) * groups // (2 * threads),
            )
            ends = accumulate((len(piece.parts) for piece in pieces), initial=0)
            self._pieces = (
                torch.tensor([part for piece in pieces for part in piece.parts]),
                torch.tensor(list(ends)),
                torch.tensor([piece.shared for piece in pieces]),
            )
            self._plan = _Runs(
                *(len(pieces), groups, queries, width),
                *(block_tokens, self._tables.shape[1], self._window, threads),
                width**-0.5,
                *(numbers.data_ptr() for numbers in self._numbers),
                self._tables.data_ptr(),
                *(numbers.data_ptr() for numbers in self._pieces),
                self._desks.data_ptr(),
            )
        return self._plan

    def attend(self, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """Fill these rows of `out` with those of q; both are (T, H, D)."""
        found = library()
        assert found is not None
        _attend(found.preamble_attend_runs, self.plan(q.shape[1], kv), q, kv, out)


class Piece(NamedTuple):
    """Queries of a group that are worked on together, and how many keys their runs share."""

    parts: list[tuple[int, int, int]]  # A run, its first query, how many.
    shared: int = 0


def cut(
    queries: Sequence[int],
    past: Sequence[int],
    tables: NDArray[np.int64],
    block_tokens: int,
    *,
    queries_max: int,
    runs_max: int,
) -> list[Piece]:
    """Pieces of runs: a long run's about equal, and of whole tiles; short ones with equal blocks
    before them together. All three begin with one number or row for each run.
    """
    pieces: list[Piece] = []
    known = [one // SEGMENT * SEGMENT for one in past]
    short = [
        run
        for run, count in enumerate(queries)
        if known[run] and _tiled(count) <= queries_max // 2 and runs_max > 1
    ]
    # In this order those who share the most stand side by side.
    for run in sorted(short, key=lambda run: tables[run].tobytes()):
        part = (run, 0, queries[run])
        if pieces:
            parts, shared = pieces[-1]
            first = parts[0][0]
            most = min(known[run], known[first] if len(parts) == 1 else shared)
            alike = _alike(tables[first], tables[run], -(-most // block_tokens))
            common = min(most, alike * block_tokens // SEGMENT * SEGMENT)
            fits = sum(_tiled(count) for _, _, count in parts) + _tiled(part[2]) <= queries_max
            if fits and len(parts) < runs_max and common and common >= shared:
                pieces[-1] = Piece([*parts, part], common)
                continue
        pieces.append(Piece([part]))
    for run in sorted(set(range(len(queries))) - set(short)):
        count = queries[run]
        each = _tiled(-(-count // -(-count // queries_max)))
        starts = range(0, count, each)
        pieces += [Piece([(run, start, min(each, count - start))]) for start in starts]
    return pieces


def _tiled(queries: int) -> int:
    """The same in whole tiles."""
    return -(-queries // TILE) * TILE


def _alike(one: NDArray[np.int64], other: NDArray[np.int64], width: int) -> int:
    """How many of the first `width` blocks two tables have in common, from the start on."""
    different = np.flatnonzero(one[:width] != other[:width])
    return int(different[0]) if len(different) else width


def _attend(
    function: Callable[..., int], plan: ctypes.Structure, q: Tensor, kv: Tensor, out: Tensor
) -> None:
    if q.stride(-1) != 1:
        q = q.contiguous()
    row, head, _ = q.stride()
    if function(ctypes.byref(plan), q.data_ptr(), row, head, kv.data_ptr(), out.data_ptr()):
        raise RuntimeError("the library was asked for heads that it does not serve")


def store(k: Tensor, v: Tensor, slots: tuple[Tensor, Tensor], kv: Tensor) -> None:
    """Write keys and values (T, G, D) into their slots of the pool."""
    tokens, groups, width = k.shape
    found = brief() if tokens <= BRIEF_ROWS else library()
    assert found is not None
    if k.stride(2) != 1 or v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    size, (token, group, _) = k.element_size(), k.stride()
    blocks, places = (x.contiguous() for x in slots)
    found.preamble_store(
        *(kv.data_ptr(), k.data_ptr(), v.data_ptr(), token * size, group * size),
        *(blocks.data_ptr(), places.data_ptr()),
        *(tokens, groups, kv.shape[3], width * size),
    )
