"""Attention over the paged pool by our own Triton kernels: cut into programs, and launched.

A piece of a batch (a single new token, or a run of some) and a KV head is a program. Where that is
too few to keep a GPU's memory busy, keys are shared out too, and a second kernel joins the parts.
In how many follows from the number of pieces, never from a context, so work that was recorded for a
batch of some size serves any contexts. The twins in torch: paged.py, fp8_kv_cache.py.
"""

from dataclasses import dataclass
from math import e, log2

import numpy as np
import torch
from torch import Tensor

from gpt.attention import triton_kernels as kernels
from gpt.attention.fp8_kv_cache import scales_of
from gpt.attention.paged import KV, ragged
from gpt.attention.varlen import rectangle
from gpt.batch import Batch

WIDTH_MAX = 256
DTYPES = (torch.bfloat16, torch.float32)
# Enough for four programs on each of an H200's 132 multiprocessors. A constant, for every GPU: it
# decides in which order a row's sums are taken.
PROGRAMS_MIN = 512
# Into how many parts keys are shared out. Each number is a kernel to compile, so there are few.
SEGMENTS = (1, 4, 32)
# A kernel keeps three tiles of keys and three of values in 227 KiB, and two kernels should fit.
TILE_BYTES = 16 << 10
# Of an accumulator in fp32: 64 registers of each of 128 threads.
TILE_NUMBERS = 8192
# Rows of queries at once. Of bf16 a warp group multiplies 64; fp32 goes over the CUDA cores.
ROWS_MAX = {torch.bfloat16: 128, torch.float32: 32}
ROWS_MIN = 16  # Of a matrix that is multiplied.
# Runs of so few new tokens have their keys shared out, too; for longer ones there is enough to do.
SHORT_TOKENS = 4


@dataclass(frozen=True)
class Placed:
    """A batch as the kernels read it: int32, on the device, for all layers of a step.

    A context of 0 sees nothing and gets zeros.
    """

    contexts: Tensor  # (B,) tokens that each sequence has after this step.
    starts: Tensor  # (B + 1,) the flat row of each one's first new token, and where the last ends.
    tables: Tensor  # (B, blocks)
    singles: Tensor  # (pieces, 2) sequences with one new token, each with a 0,
    runs: Tensor  # and pieces of the others: the sequence, and the first of some new tokens of it.
    run_tokens: int  # New tokens of such a piece at most.

    @classmethod
    def of(cls, batch: Batch, queries: int, like: Tensor) -> "Placed":
        """For so many queries `like` these of a KV head."""
        assert batch.tables is not None
        if batch.ends is None:
            return cls._counted(batch, queries, like)
        # Only the device knows: work that is recorded, each sequence with one new token.
        starts = torch.arange(len(batch.ends) + 1, dtype=torch.int32, device=like.device)
        singles = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], dim=1)
        return cls(batch.ends, starts, batch.tables.int(), singles, singles[:0], 1)

    @classmethod
    def _counted(cls, batch: Batch, queries: int, like: Tensor) -> "Placed":
        """From what the host knows, in one copy."""
        assert batch.tables is not None
        lengths, past = np.array(batch.lengths), np.array(batch.past)
        starts = np.concatenate([[0], lengths.cumsum()])
        longest = int(lengths.max())
        tokens = tokens_for(longest, queries, like)
        singles = np.flatnonzero(lengths == 1) if longest > 1 else np.arange(len(lengths))
        runs = np.flatnonzero(lengths > 1)
        counts = -(-lengths[runs] // tokens)
        owners = np.repeat(runs, counts)
        firsts = (np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)) * tokens
        # Those that see the most go first, or the last to begin would be the last to end.
        order = np.argsort(-(past[owners] + firsts), kind="stable")
        pieces = [(singles, np.zeros_like(singles)), (owners[order], firsts[order])]
        parts = [lengths + past, starts, *(np.stack(pair, 1).ravel() for pair in pieces)]
        packed = torch.from_numpy(np.concatenate(parts).astype(np.int32))
        contexts, begins, one, more = packed.to(batch.tables.device).split([len(x) for x in parts])
        return cls(contexts, begins, batch.tables.int(), one.view(-1, 2), more.view(-1, 2), tokens)


class TritonAttention:
    """What a model attends by (`attend`) and fills its pool by (`store`).

    `scales`, (layers of the pool, 2) in fp32: what stored keys and values are multiplied by; None:
    they are stored as they are.
    """

    name = "triton"
    captured = True  # Recorded once, it serves other contexts: what it reads is on the device.

    def __init__(self, scales: Tensor | None = None) -> None:
        self._scales = scales
        self._ready: set[object] = set()

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots; a row whose block is < 0 has none."""
        assert batch.slots is not None
        blocks, places = batch.slots
        tokens, groups, width = k.shape
        k, v = _inner(k), _inner(v)
        most = int(torch.finfo(kv.dtype).max) if kv.dtype != k.dtype else 0
        with torch.cuda.device_of(k):
            kernels.append[(tokens, groups)](
                *(k, v, kv, blocks, places, scales_of(self._scales, kv)),
                *(*k.stride()[:2], *v.stride()[:2]),
                GROUPS=groups,
                D=width,
                WIDTH=power_of_two(width),
                BLOCK=kv.shape[3],
                MOST=most,
                SCALED=self._scales is not None,
                num_warps=1,
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        """As gpt.attention.paged.ragged does."""
        if kv is None:
            return ragged(q, k, v, batch, kv, window)
        first = not any(batch.past) and min(batch.lengths) > 1
        if first and window is None and q.dtype == kv.dtype == torch.bfloat16:
            # All that is seen came in with the batch, and the library's kernels are faster at it.
            return rectangle(q, k, v, batch, window)
        queries = q.shape[1] // kv.shape[2]
        placed = batch.kept.get(Placed)
        if placed is None:
            placed = Placed.of(batch, queries, q)
            batch.kept[Placed] = placed
        assert isinstance(placed, Placed)
        if q.is_cuda:
            self.prepare(q, kv, window)
        q, out = _inner(q), torch.empty_like(q, memory_format=torch.contiguous_format)
        layer = _Layer(q, kv, placed, window or 0, scales_of(self._scales, kv), out)
        with torch.cuda.device_of(q):
            if len(placed.singles):
                layer.attend(placed.singles, 1)
            if len(placed.runs):
                layer.attend(placed.runs, placed.run_tokens)
        return out

    def prepare(self, q: Tensor, kv: KV, window: int | None) -> None:
        """Once for such a layer: have all compiled that any step may ask for.

        It takes seconds, which a step among others does not have. What is computed is nothing.
        """
        kind = (*q.shape[1:], q.dtype, *kv.shape[2:], kv.dtype, window)
        if kind in self._ready:
            return
        self._ready.add(kind)
        heads, groups = q.shape[1], kv.shape[2]
        queries = heads // groups
        lengths = {tokens_for(n, queries, q) for n in (SHORT_TOKENS, *range(16, 129, 16))}
        for tokens in (1, *sorted(lengths)):
            for segments in SEGMENTS if tokens <= SHORT_TOKENS else (1,):
                count = -(-PROGRAMS_MIN // (groups * segments))
                order = torch.arange(count + 1, dtype=torch.int32, device=q.device)
                blank = torch.zeros_like(order[1:])
                pieces = torch.stack([order[:-1], blank], dim=1)
                placed = Placed(blank, order * tokens, blank.unsqueeze(1), pieces, pieces, tokens)
                asked = q.new_zeros(count * tokens, *q.shape[1:])
                scales = scales_of(self._scales, kv)
                with torch.cuda.device_of(q):
                    layer = _Layer(asked, kv, placed, window or 0, scales, torch.empty_like(asked))
                    layer.attend(pieces, tokens)


@dataclass(frozen=True)
class _Layer:
    """A layer of a step: what all its programs read and write."""

    q: Tensor
    kv: KV
    placed: Placed
    window: int
    scales: Tensor | None
    out: Tensor

    def attend(self, pieces: Tensor, tokens: int) -> None:
        """Fill the rows of these pieces, of at most so many new tokens each."""
        q, kv, placed = self.q, self.kv, self.placed
        _, heads, d = q.shape
        groups, width, scaled = kv.shape[2], max(ROWS_MIN, power_of_two(d)), self.scales is not None
        queries = heads // groups
        rows = rows_for(tokens, queries, q)
        segments = segments_for(len(pieces) * groups) if tokens <= SHORT_TOKENS else 1
        room = len(pieces) * tokens * heads * segments if segments > 1 else 0
        partial = torch.empty(room * width, dtype=torch.float32, device=q.device)
        sums = torch.empty(room * 2, dtype=torch.float32, device=q.device)
        read = (q, kv, placed.tables, placed.contexts, placed.starts, pieces)
        made = (self.out, partial, sums, self.scales)
        # Exponentials are of 2, which is what the hardware has.
        strides, factor = (*q.stride()[:2], placed.tables.stride(0)), log2(e) * d**-0.5
        shape = {"GROUPS": groups, "WINDOW": self.window, "BLOCK": kv.shape[3]}
        shape |= {"D": d, "WIDTH": width, "SEGMENTS": segments, "SCALED": scaled}
        if tokens == queries == 1:
            kernels.attend_single[len(pieces), groups, segments](
                *(*read, *made, *strides, factor),
                **shape,
                TILE=tile_keys(width, kv),
                STAGES=3,
                num_warps=4,
            )
        else:
            kernels.attend_tile[len(pieces), groups, segments](
                *(*read, *made, *strides, factor),
                **shape,
                QUERIES=queries,
                TOKENS=tokens,
                ROWS=rows,
                TILE=min(64, tile_keys(width, q)),
                num_warps=8 if rows > 64 or q.dtype == torch.float32 else 4,
                num_stages=3 if q.dtype == torch.bfloat16 else 2,
            )
        if segments > 1:
            kernels.merge[len(pieces) * tokens, heads](
                *(placed.starts, pieces, *made),
                HEADS=heads,
                D=d,
                WIDTH=width,
                TOKENS=tokens,
                SEGMENTS=segments,
                SCALED=scaled,
                num_warps=4,
            )


def segments_for(programs: int) -> int:
    """In how many parts each one's keys are shared out, to have enough programs."""
    enough = (one for one in SEGMENTS if programs * one >= PROGRAMS_MIN)
    return next(enough, SEGMENTS[-1])


def tokens_for(longest: int, queries: int, like: Tensor) -> int:
    """New tokens of a piece at most, where a sequence has so many: one of few numbers."""
    if longest <= SHORT_TOKENS:
        return min(SHORT_TOKENS, rows_for(SHORT_TOKENS, queries, like) // queries)
    return rows_for(longest, queries, like) // queries


def rows_for(tokens: int, queries: int, like: Tensor) -> int:
    """Rows of a piece of at most so many new tokens, with so many queries each."""
    most = ROWS_MAX[like.dtype] if like.shape[-1] <= 128 else ROWS_MAX[like.dtype] // 2
    # All queries of a token are in one piece, however many there are.
    most = max(most, power_of_two(queries))
    return min(most, max(ROWS_MIN, power_of_two(tokens * queries)))


def tile_keys(width: int, like: Tensor) -> int:
    """How many keys of such numbers are read at once."""
    fit = min(TILE_NUMBERS // width, TILE_BYTES // (width * like.element_size()))
    return max(16, min(128, fit))


def power_of_two(count: int) -> int:
    """The least that is no less."""
    return 1 << (count - 1).bit_length()


def _inner(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
