"""Python bindings of the C kernel library: paged attention, KV cache writes and GEMM on CPUs.

The library has attention over the paged KV cache, for decode and prefill, and GEMM with bf16 and
int8 weights. This module loads the library, declares the signatures of all functions, and binds
attention and KV cache writes; the other modules of gpt/cpu bind GEMM, argmax and training. The
bindings pass addresses of tensors. If the library is missing, callers must use the torch versions
of these computations, which are in gpt/attention/paged.py and gpt/model/linear.py.
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
ABI = 27  # Must equal ABI in gpt/cpu/src/vectors.h.
DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIM_MAX = 512
# The instruction sets (ISA levels). A level's index in this tuple is its number in the library.
ISA_LEVELS = ("plain", "avx2", "avx512_bf16")
TILE = 12  # Queries of a prefill tile. Must equal TILE in gpt/cpu/src/packed_weight.h.
# Keys per segment. The kernels compute attention over a sequence's keys segment by segment.
# Sequences with a common prefix can share the work (`PrefillTask`) only for full segments. Must
# equal SEGMENT in gpt/cpu/src/vectors.h.
SEGMENT = 256

# A short call keeps the GIL, because releasing and reacquiring the GIL would slow the call down.
# With these limits the bindings decide whether a call is short.
KEEP_GIL_ROWS_MAX = 16  # Rows of the batch.
# Elements of weights or of the KV cache that the call reads. Some bindings compare the product of
# these elements and the rows with this limit.
KEEP_GIL_ELEMENTS_MAX = 1 << 24

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class _DecodeArgs(ctypes.Structure):
    """The struct DecodeArgs in gpt/cpu/src/decode_attention.c."""

    _fields_ = (
        *((name, INT) for name in ("rows", "groups", "queries", "width")),
        *((name, INT) for name in ("block_tokens", "table_width", "window", "bf16", "threads")),
        ("scale", ctypes.c_double),
        *((name, POINTER) for name in ("row", "sequence", "context", "block_tables")),
    )


class _PrefillArgs(ctypes.Structure):
    """The struct PrefillArgs in gpt/cpu/src/prefill_attention.c."""

    _fields_ = (
        *((name, INT) for name in ("tasks", "groups", "queries", "width")),
        *((name, INT) for name in ("block_tokens", "table_width", "window", "threads")),
        ("scale", ctypes.c_double),
        *((name, POINTER) for name in ("row", "past", "sequence", "block_tables")),
        *((name, POINTER) for name in ("parts", "part_starts", "shared_keys", "scratch")),
    )


# The argument types of each function: p is an address, i an int64; spaces are ignored. The
# functions in _RETURN_INT return 0 on success. The exception is `preamble_has_int8_gemm`, which
# returns 1 if the machine has an int8 GEMM, else 0. Some functions exist only in a library for
# x86-64. A test compares these tables and the structures with the C source.
_ARGUMENT_KINDS = {
    "preamble_decode_attention": "p p i i pp p p",
    "preamble_store_kv": "ppp ii pp iiii",
    "preamble_prefill_attention": "p p i i pp p p",
    "preamble_prefill_scratch_bytes": "",
    "preamble_prefill_task_queries": "i",
    "preamble_gemm": "p pi p i p p i pp",
    "preamble_pack_low_rank": "pii",
    "preamble_experts": "p p i ppi p i p",
    "preamble_choose_experts": "pp i pp i",
    "preamble_argmax": "p iii p i",
    "preamble_gemm_argmax": "pp i pp i",
    "preamble_gemm_unpacked": "p iii pp i p p i p",
    "preamble_low_rank_gradient": "ppp iiii p i",
    "preamble_activation_backward": "ppp iii",
    "preamble_activation": "pp iii",
    "preamble_gated_silu": "pppp iii",
    "preamble_gated_silu_backward": "pppppp iii",
    "preamble_scale_backward": "pppp i pp iii",
    "preamble_rms_norm": "pppp iii",
    "preamble_rms_norm_backward": "ppppp iii",
    "preamble_split_qkv": "p",
    "preamble_split_qkv_backward": "p",
    "preamble_varlen_attention": "pp",
    "preamble_decoder_layers": "pp",
    "preamble_decoder_scratch_numel": "pi",
    "preamble_has_int8_gemm": "",
    "preamble_screened_argmax": "ppp i p i",
}
_RETURN_INT = (
    "preamble_decode_attention",
    "preamble_prefill_attention",
    "preamble_gemm_argmax",
    "preamble_varlen_attention",
    "preamble_decoder_layers",
    "preamble_has_int8_gemm",
)
_RETURN_INT64 = (
    "preamble_decoder_scratch_numel",
    "preamble_prefill_scratch_bytes",
    "preamble_prefill_task_queries",
    "preamble_screened_argmax",
)


def _declare_signatures(lib: ctypes.CDLL) -> ctypes.CDLL:
    for name, kinds in _ARGUMENT_KINDS.items():
        function = getattr(lib, name, None)
        if function is not None:
            function.argtypes = [POINTER if kind == "p" else INT for kind in kinds if kind != " "]
            function.restype = ctypes.c_int if name in _RETURN_INT else None
            if name in _RETURN_INT64:
                function.restype = INT
    return lib


@cache
def library_keeping_gil() -> ctypes.CDLL:
    """Return the library with functions that keep the GIL during a call, for very short calls."""
    lib = library()
    assert lib is not None, "call library() first"
    # Use the open handle, because the file may have been replaced after `library` opened it.
    return _declare_signatures(ctypes.PyDLL(str(LIBRARY), handle=lib._handle))


@cache
def library() -> ctypes.CDLL | None:
    """Return the C library. If it is missing or has the wrong ABI, log this and return None."""
    try:
        lib = _declare_signatures(ctypes.CDLL(str(LIBRARY)))
        abi = lib.preamble_abi()
        if abi != ABI:
            raise OSError(f"{LIBRARY} has ABI {abi}, not {ABI}; rebuild it with make kernels")
    except (OSError, AttributeError) as error:
        reason = f"{LIBRARY.name} was not built; build it with make kernels"
        if LIBRARY.exists():
            reason = str(error)
        log.info("event=kernels_missing reason=%r", reason)
        return None
    lib.preamble_set_isa_level(-1)
    log.info("event=kernels_loaded machine=%s", ISA_LEVELS[lib.preamble_isa_level()])
    return lib


def isa_level() -> str | None:
    """Return the instruction set that the library uses; None without the library."""
    lib = library()
    return None if lib is None else ISA_LEVELS[lib.preamble_isa_level()]


def force_isa_level(name: str | None) -> None:
    """Limit the library to an instruction set, for tests; None selects this machine's highest."""
    lib = library()
    if lib is not None:
        lib.preamble_set_isa_level(-1 if name is None else ISA_LEVELS.index(name))


def supports_tensors(x: Tensor, kv: Tensor) -> bool:
    """Return whether the library is available and supports attention over these tensors."""
    return (
        x.dtype in DTYPES
        and kv.dtype == x.dtype
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and x.requires_grad)
        and x.shape[-1] <= HEAD_DIM_MAX
        and kv.is_contiguous()
        and library() is not None
    )


class DecodeAttention:
    """Attention of a step's decode tokens over the KV pool; one object serves all layers."""

    def __init__(
        self,
        rows: Sequence[int],
        sequences: Sequence[int],
        context_lengths: Sequence[int],
        block_tables: Tensor,
        *,
        window: int | None,
    ) -> None:
        """Describe the decode tokens; each list has one entry per token.

        `rows`: the token's row in the batch. `sequences`: its sequence's row in `block_tables`.
        `context_lengths`: the number of keys up to and including the token's key; keys outside the
        window count too.
        """
        self._window = window or 0
        self._context_tokens = sum(context_lengths)
        # This object keeps the tensors allocated, because the library gets their addresses.
        self._block_tables = block_tables.long().contiguous()
        self._index_arrays = torch.from_numpy(
            np.array([rows, sequences, context_lengths], np.int64)
        )
        self._args: _DecodeArgs | None = None

    def ctypes_args(self, heads: int, kv: Tensor) -> ctypes.Structure:
        """Return the arguments for the library, made at the first call.

        The structure contains addresses, so it is valid only while this object exists.
        """
        if self._args is None:
            _, _, kv_heads, block_tokens, head_dim = kv.shape
            self._args = _DecodeArgs(
                self._index_arrays.shape[1],
                kv_heads,
                heads // kv_heads,
                head_dim,
                block_tokens,
                self._block_tables.shape[1],
                self._window,
                kv.dtype == torch.bfloat16,
                torch.get_num_threads(),
                head_dim**-0.5,
                *(array.data_ptr() for array in self._index_arrays),
                self._block_tables.data_ptr(),
            )
        return self._args

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Write the attention output of these tokens to their rows of `out`.

        `q` and `out`: (tokens of the batch, query heads, channels). `sinks` and `alibi_slopes`:
        (query heads,), as in gpt/attention/options.py.
        """
        keeps_gil = self._context_tokens * kv[0, :, :, 0].numel() <= KEEP_GIL_ELEMENTS_MAX
        lib = library_keeping_gil() if keeps_gil else library()
        assert lib is not None
        args = self.ctypes_args(q.shape[1], kv)
        attend = lib.preamble_decode_attention
        _call_attention(attend, args, q, kv, out, sinks=sinks, alibi_slopes=alibi_slopes)


def has_prefill_attention() -> bool:
    """Return whether the library supports `PrefillAttention` on this machine."""
    return isa_level() == ISA_LEVELS[-1]


def supports_prefill(x: Tensor) -> bool:
    """Return whether prefill attention supports `x`; `supports_tensors` must be true for `x`."""
    has_even_head_dim = x.shape[-1] % 2 == 0
    return has_even_head_dim and x.dtype == torch.bfloat16 and has_prefill_attention()


class PrefillAttention:
    """Attention of a step's prefill runs over the KV pool; one object serves all layers.

    A run is the new tokens of one sequence, which are adjacent rows of the batch.
    """

    def __init__(
        self,
        rows: Sequence[int],
        sequences: Sequence[int],
        lengths: Sequence[int],
        past_lengths: Sequence[int],
        block_tables: Tensor,
        *,
        window: int | None,
    ) -> None:
        """Describe the prefill runs; each list has one entry per run.

        `rows`: the row of the run's first token in the batch. `sequences`: the sequence's row in
        `block_tables`. `lengths`: the number of tokens of the run. `past_lengths`: the number of
        the sequence's earlier tokens, which are in the KV pool.
        """
        self._window = window or 0
        self._lengths = lengths
        self._block_tables = block_tables.long().contiguous()
        self._index_arrays = torch.tensor([rows, past_lengths, sequences])
        self._args: _PrefillArgs | None = None

    def ctypes_args(self, heads: int, kv: Tensor) -> ctypes.Structure:
        """Return the arguments for the library, made at the first call.

        The structure contains addresses, so it is valid only while this object exists.
        """
        if self._args is None:
            lib = library()
            assert lib is not None
            _, _, kv_heads, block_tokens, head_dim = kv.shape
            threads, queries_per_kv_head = torch.get_num_threads(), heads // kv_heads
            scratch_bytes = threads * lib.preamble_prefill_scratch_bytes()
            self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
            _, past_lengths, sequences = self._index_arrays.tolist()
            tasks = plan_prefill_tasks(
                [length * queries_per_kv_head for length in self._lengths],
                past_lengths,
                self._block_tables.numpy()[sequences],
                block_tokens,
                queries_max=lib.preamble_prefill_task_queries(head_dim),
                # To balance the load, runs may share tasks only if at least two (task, KV head)
                # pairs per thread remain.
                runs_max=len(past_lengths) * kv_heads // (2 * threads),
            )
            part_starts = accumulate((len(task.parts) for task in tasks), initial=0)
            self._task_arrays = (
                torch.tensor([part for task in tasks for part in task.parts]),
                torch.tensor(list(part_starts)),
                torch.tensor([task.shared_keys for task in tasks]),
            )
            self._args = _PrefillArgs(
                len(tasks),
                kv_heads,
                queries_per_kv_head,
                head_dim,
                block_tokens,
                self._block_tables.shape[1],
                self._window,
                threads,
                head_dim**-0.5,
                *(array.data_ptr() for array in self._index_arrays),
                self._block_tables.data_ptr(),
                *(array.data_ptr() for array in self._task_arrays),
                self._scratch.data_ptr(),
            )
        return self._args

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Write the attention output of these runs to their rows of `out`.

        `q` and `out`: (tokens of the batch, query heads, channels). `sinks` and `alibi_slopes`:
        (query heads,), as in gpt/attention/options.py.
        """
        lib = library()
        assert lib is not None
        args = self.ctypes_args(q.shape[1], kv)
        attend = lib.preamble_prefill_attention
        _call_attention(attend, args, q, kv, out, sinks=sinks, alibi_slopes=alibi_slopes)


class PrefillTask(NamedTuple):
    """Queries of one KV head that one thread computes together, from one or several runs.

    A query is one query head of one token.
    """

    parts: list[tuple[int, int, int]]  # (run, first query in the run, number of queries)
    # Number of keys that all runs of the task share, rounded down to full segments. 0 for a task of
    # one run.
    shared_keys: int = 0


def plan_prefill_tasks(
    queries: Sequence[int],
    past_lengths: Sequence[int],
    block_tables: NDArray[np.int64],
    block_tokens: int,
    *,
    queries_max: int,
    runs_max: int,
) -> list[PrefillTask]:
    """Split prefill runs into tasks.

    A run of more than `queries_max` queries is split into tasks of about equal size; all of these
    tasks except the last consist of full tiles. Short runs (at most half of `queries_max`) whose
    block tables begin with the same cached blocks share a task.

    - `queries`: for each run, its number of queries (tokens x query heads per KV head).
    - `past_lengths`, `block_tables`: for each run, those of its sequence.
    - `queries_max`: the maximum number of queries of a task, with each run's queries rounded up to
      full tiles.
    - `runs_max`: the maximum number of runs of a task.
    """
    tasks: list[PrefillTask] = []
    cached_keys = [tokens // SEGMENT * SEGMENT for tokens in past_lengths]
    short_runs = [
        run
        for run, count in enumerate(queries)
        if cached_keys[run] and _round_up_to_tile(count) <= queries_max // 2 and runs_max > 1
    ]
    # Sorted by block table, so that runs with a long common prefix are adjacent.
    for run in sorted(short_runs, key=lambda run: block_tables[run].tobytes()):
        part = (run, 0, queries[run])
        if tasks:
            parts, shared_keys = tasks[-1]
            first_run = parts[0][0]
            shared_max = min(
                cached_keys[run], cached_keys[first_run] if len(parts) == 1 else shared_keys
            )
            equal_blocks = _common_prefix_blocks(
                block_tables[first_run], block_tables[run], -(-shared_max // block_tokens)
            )
            common_keys = min(shared_max, equal_blocks * block_tokens // SEGMENT * SEGMENT)
            fits = (
                sum(_round_up_to_tile(count) for _, _, count in parts) + _round_up_to_tile(part[2])
                <= queries_max
            )
            # A run joins a task of several runs only if it has all of their shared keys.
            if fits and len(parts) < runs_max and common_keys and common_keys >= shared_keys:
                tasks[-1] = PrefillTask([*parts, part], common_keys)
                continue
        tasks.append(PrefillTask([part]))
    for run in sorted(set(range(len(queries))) - set(short_runs)):
        count = queries[run]
        task_queries = _round_up_to_tile(-(-count // -(-count // queries_max)))
        starts = range(0, count, task_queries)
        tasks += [PrefillTask([(run, start, min(task_queries, count - start))]) for start in starts]
    return tasks


def _round_up_to_tile(queries: int) -> int:
    """Return the number of queries rounded up to full tiles."""
    return -(-queries // TILE) * TILE


def _common_prefix_blocks(first: NDArray[np.int64], second: NDArray[np.int64], blocks: int) -> int:
    """Return the number of equal blocks at the start of two block tables, at most `blocks`."""
    mismatches = np.flatnonzero(first[:blocks] != second[:blocks])
    return int(mismatches[0]) if len(mismatches) else blocks


def _call_attention(
    function: Callable[..., int],
    args: ctypes.Structure,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    *,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> None:
    if q.stride(-1) != 1:
        q = q.contiguous()
    row_stride, head_stride, _ = q.stride()
    # The variables keep the converted tensors allocated during the call.
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float().contiguous()
    if function(
        ctypes.byref(args),
        q.data_ptr(),
        row_stride,
        head_stride,
        None if sinks is None else sinks.data_ptr(),
        None if alibi_slopes is None else alibi_slopes.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
    ):
        raise RuntimeError("the C library does not support the number of channels per head")


def store_kv(k: Tensor, v: Tensor, slot_mapping: tuple[Tensor, Tensor], kv: Tensor) -> None:
    """Write keys and values (tokens, KV heads, channels) into their slots of the pool."""
    tokens, kv_heads, head_dim = k.shape
    lib = library_keeping_gil() if tokens <= KEEP_GIL_ROWS_MAX else library()
    assert lib is not None
    if k.stride(2) != 1 or v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    element_bytes, (token_stride, head_stride, _) = k.element_size(), k.stride()
    blocks, offsets = (x.contiguous() for x in slot_mapping)
    lib.preamble_store_kv(
        kv.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        token_stride * element_bytes,
        head_stride * element_bytes,
        blocks.data_ptr(),
        offsets.data_ptr(),
        tokens,
        kv_heads,
        kv.shape[3],
        head_dim * element_bytes,
    )
