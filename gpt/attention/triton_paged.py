"""Triton paged-attention backend: splits a batch into work items and launches the kernels.

A work item is a decode token, or a run of prefill tokens. A program computes one segment of the
keys of one work item, for one KV head. A kernel lists the segments of a step on the device, from
the context lengths. It splits long contexts, so that a step with few sequences saturates the GPU's
memory bandwidth, and a long context does not delay the other sequences. The partial outputs are
merged by the program that finishes the last segment of a work item, or, with several queries per KV
head, by another kernel. The grid of a launch depends on the
numbers of work items and KV heads, not on context lengths, so a CUDA graph captured for a batch
size serves all context lengths. Another kernel applies qk-norm and the rotary embedding, and stores
keys and values. The reference implementations are gpt/attention/paged.py and, for fp8 pools,
gpt/attention/fp8_kv_cache.py; of the rotary embedding, gpt/model/rotary_embedding.py.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import e, log2
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.attention import triton_kernels as kernels
from gpt.attention.backend import NormWeights, QKTransform, QKTransformBackend
from gpt.attention.fp8_kv_cache import layer_scales
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import KV, ragged_attention
from gpt.attention.varlen import padded_sdpa
from gpt.batch import Batch
from gpt.device_transfers import to_device
from gpt.fp8_rows import Fp8Rows
from gpt.triton_runtime import launcher
from gpt.triton_runtime.block_sizes import next_power_of_two

# A launch has at most this number more programs than work items x KV heads. An H200 runs two to
# four programs at once on each of its 132 multiprocessors. With several times as many programs,
# none of them takes much longer than the others together. All GPUs use the same number, because the
# segments determine the order of the sums over keys, and a different order gives slightly different
# results.
EXTRA_PROGRAMS = 512
# Fewer keys than this are not split: the merge would take longer than it saves.
SEGMENT_KEYS_MIN = 128
# The number of keys of a segment is a multiple of this number, which is the size of most tiles.
SEGMENT_ALIGNMENT = 64
SEGMENTS_MAX = 32  # Maximum number of segments of a work item.
SEGMENT_FIELDS = 8  # Numbers per segment in the list (gpt/attention/triton_kernels.py).
LISTED_ITEMS = 128  # Number of work items that `list_segments` reads at once.
# Maximum bytes of a tile of keys or values. 2 programs x 3 pipeline stages x 2 tiles (keys and
# values) x 16 KiB = 192 KiB fit into the 227 KiB of shared memory of a multiprocessor.
TILE_BYTES_MAX = 16 << 10
# Maximum keys x channels of a tile. The fp32 accumulator of `attend_single` has as many elements as
# a tile. At the maximum, it takes 32 registers per thread (a program has 128 threads), and four
# programs fit into a multiprocessor.
SINGLE_ELEMENTS_MAX = 4096
TILE_ELEMENTS_MAX = 8192  # Of `attend_tile`. Its accumulator does not grow with the tile of keys.
# Maximum number of query rows of a tile, for heads of at most 128 channels; for wider heads, half
# of this number. A query row is one query head of one token. In bf16 and fp16, each of two warp
# groups computes 64 rows. fp32 runs on the CUDA cores, with smaller tiles.
ROWS_MAX = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
HALF_DTYPES = (torch.bfloat16, torch.float16)
ROWS_MIN = 16  # tl.dot needs at least this number of rows and of channels.
# Keys are split into segments only if work items have at most this number of new tokens. Longer
# prefills usually give enough programs without a split.
SPLIT_KEYS_TOKENS_MAX = 4
# Maximum rows x channels that a program of `transform_and_append` computes, and the number of
# elements per warp. A thread then computes 16 elements of fp32, with four intermediate tensors.
TRANSFORM_ELEMENTS_MAX = 2048
TRANSFORM_ELEMENTS_PER_WARP = 512
QUANTIZED_BLOCK_SIZE_MAX = 4096  # Channels of an output row that are quantized at once.


@dataclass(frozen=True)
class SegmentList:
    """A list of key segments on the device, which the kernels of all layers of a step read."""

    segments: Tensor  # (1 + capacity, SEGMENT_FIELDS)
    first_segments: Tensor  # (work items, SEGMENT_FIELDS)
    # (capacity x KV heads,) the number of finished segments of each work item and KV head, or of
    # finished heads of each row; 0 between layers. Empty if keys are not split.
    arrivals: Tensor
    capacity: int  # Maximum number of segments.


class KernelVariant(NamedTuple):
    """The constants of the attention kernels that differ between the layers of a model."""

    window: int  # 0: no window.
    has_sinks: bool
    has_alibi: bool

    @classmethod
    def of(cls, options: AttentionOptions) -> "KernelVariant":
        return cls(options.window or 0, options.sinks is not None, options.alibi_slopes is not None)


@dataclass(frozen=True)
class WorkItems:
    """Work items of a step, on the device, which one launch per layer computes."""

    # (work items, 2): the index of a sequence, and the index of the work item's first token among
    # the new tokens of the sequence.
    indices: Tensor
    tokens_max: int  # Maximum number of new tokens of a work item.
    # The first layer with a kernel variant prepares the launch, and the later layers reuse it.
    launches: dict["KernelVariant", "PreparedLaunch"] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def is_split(self) -> bool:
        """Whether the keys of a work item may be split into segments."""
        return self.tokens_max <= SPLIT_KEYS_TOKENS_MAX


@dataclass(frozen=True)
class TritonMetadata:
    """The batch as int32 device tensors, which the kernels of all layers of a step read.

    B is the number of sequences. A sequence with a context length of 0 gets an output of zeros.
    """

    context_lengths: Tensor  # (B,) the number of tokens of each sequence after this step.
    # (B + 1,) the flat row of each sequence's first new token, then the number of rows.
    query_starts: Tensor
    block_tables: Tensor  # (B, blocks)
    # Of sequences with one new token; with 2 to SPLIT_KEYS_TOKENS_MAX new tokens, such as the
    # verification of draft tokens; with more new tokens.
    decode_items: WorkItems
    short_items: WorkItems
    prefill_items: WorkItems

    @cached_property
    def work_items(self) -> tuple[WorkItems, ...]:
        """The work items that need a launch."""
        all_items = (self.decode_items, self.short_items, self.prefill_items)
        return tuple(items for items in all_items if len(items))

    @classmethod
    def from_batch(cls, batch: Batch, queries_per_kv_head: int, like: Tensor) -> "TritonMetadata":
        """Return the metadata of a batch.

        `like` has the dtype and the number of channels of the queries.
        """
        assert batch.block_tables is not None
        if batch.device_context_lengths is None:
            return cls._from_host_lengths(batch, queries_per_kv_head, like)
        # CUDA graph capture: lengths are on the device only, and each sequence has one new token.
        query_starts = torch.arange(
            len(batch.device_context_lengths) + 1, dtype=torch.int32, device=like.device
        )
        decode_items = torch.stack([query_starts[:-1], torch.zeros_like(query_starts[:-1])], dim=1)
        return cls(
            batch.device_context_lengths,
            query_starts,
            batch.block_tables.int(),
            WorkItems(decode_items, 1),
            WorkItems(decode_items[:0], 1),
            WorkItems(decode_items[:0], 1),
        )

    @classmethod
    def _from_host_lengths(
        cls, batch: Batch, queries_per_kv_head: int, like: Tensor
    ) -> "TritonMetadata":
        """Compute the metadata on the host and copy it to the device in one transfer."""
        assert batch.block_tables is not None
        lengths, past_lengths = np.array(batch.query_lengths), np.array(batch.past_lengths)
        query_starts = np.concatenate([[0], lengths.cumsum()])
        # Short sequences have work items of their own. In the larger tiles of long prefills, most
        # of their rows would be empty, and their keys would not be split into segments.
        is_short = (lengths > 1) & (lengths <= SPLIT_KEYS_TOKENS_MAX)
        short_tokens, prefill_tokens = (
            work_item_tokens_max(longest, queries_per_kv_head, like)
            for longest in (SPLIT_KEYS_TOKENS_MAX, int(lengths.max()))
        )
        work_items = [
            _build_work_items(sequences, tokens, lengths, past_lengths)
            for sequences, tokens in (
                (np.flatnonzero(lengths == 1), 1),
                (np.flatnonzero(is_short), short_tokens),
                (np.flatnonzero(lengths > SPLIT_KEYS_TOKENS_MAX), prefill_tokens),
            )
        ]
        arrays = [lengths + past_lengths, query_starts, *work_items]
        packed = to_device(np.concatenate(arrays).astype(np.int32), batch.block_tables.device)
        context_lengths, device_starts, decode_items, short_items, prefill_items = packed.split(
            [len(x) for x in arrays]
        )
        return cls(
            context_lengths,
            device_starts,
            batch.block_tables.int(),
            WorkItems(decode_items.view(-1, 2), 1),
            WorkItems(short_items.view(-1, 2), short_tokens),
            WorkItems(prefill_items.view(-1, 2), prefill_tokens),
        )


class TritonAttention(QKTransformBackend):
    """Attention and KV-pool writes with the Triton kernels of this package.

    `scales`: the key scale and the value scale of each layer of an fp8 pool, an fp32 tensor of
    shape (layers of the pool, 2). None: all scales are 1.
    """

    name = "triton"
    is_capturable = True

    def __init__(self, scales: Tensor | None = None) -> None:
        self._scales = scales
        self._compiled: set[object] = set()

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots; skip tokens with a negative block."""
        assert batch.slot_mapping is not None
        blocks, offsets = batch.slot_mapping
        tokens, kv_heads, head_dim = k.shape
        k, v = _contiguous_rows(k), _contiguous_rows(v)
        launcher.launch(
            kernels.append_kv,
            (tokens, kv_heads),
            k,
            v,
            kv,
            blocks,
            offsets,
            layer_scales(self._scales, kv),
            *k.stride()[:2],
            *v.stride()[:2],
            GROUPS=kv_heads,
            D=head_dim,
            WIDTH=next_power_of_two(head_dim),
            BLOCK=kv.shape[3],
            DTYPE_MAX=_dtype_max(k, kv),
            SCALED=self._scales is not None,
            num_warps=1,
        )

    def transform_and_store(
        self, qkv: Tensor, transform: QKTransform, batch: Batch, kv: KV
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run qk-norm, rotary embedding and `store` in one kernel.

        The kernel computes in fp32, and rounds only its results to the dtype of `qkv`.
        """
        assert batch.slot_mapping is not None
        blocks, offsets = batch.slot_mapping
        qkv = qkv.contiguous()
        tokens, kv_heads, members, head_dim = qkv.shape
        queries = members - 2
        heads = kv_heads * queries
        out = qkv.new_empty(tokens, heads + kv_heads, head_dim)
        config = transform.config
        q_norm, k_norm = transform.norms or (NormWeights(qkv, None),) * 2
        width = next_power_of_two(head_dim)
        rows = min(next_power_of_two(members), max(1, TRANSFORM_ELEMENTS_MAX // width))
        launcher.launch(
            kernels.transform_and_append,
            (tokens, kv_heads, -(-members // rows)),
            qkv,
            transform.rotary_table,
            q_norm.weight,
            k_norm.weight,
            q_norm.bias,
            k_norm.bias,
            out,
            kv,
            batch.positions,
            blocks,
            offsets,
            layer_scales(self._scales, kv),
            config.layernorm_epsilon,
            GROUPS=kv_heads,
            QUERIES=queries,
            BLOCK=kv.shape[3],
            D=head_dim,
            WIDTH=width,
            ROWS=rows,
            ROTARY=transform.rope.rotary_dim(head_dim),
            INTERLEAVED=transform.rope.interleaved,
            NORMED=transform.norms is not None,
            CENTERED=config.normalization == "LayerNorm",
            GAMMA_OFFSET=float(config.layernorm_zero_centered_gamma),
            BIASED=q_norm.bias is not None,
            DTYPE_MAX=_dtype_max(qkv, kv),
            SCALED=self._scales is not None,
            num_warps=max(1, rows * width // TRANSFORM_ELEMENTS_PER_WARP),
        )
        return out[:, :heads], out[:, heads:], qkv[:, :, -1]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute the same attention as gpt.attention.paged.ragged_attention."""
        return self._attend(q, k, v, batch, kv, options, quantizes=False)[0]

    def attend_and_quantize(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> tuple[Tensor, Fp8Rows | None]:
        """Also quantize the output rows of a decode-only step with several queries per KV head.

        The kernel that merges the segments does it. Other steps have no such kernel.
        """
        return self._attend(q, k, v, batch, kv, options, quantizes=True)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
        *,
        quantizes: bool,
    ) -> tuple[Tensor, Fp8Rows | None]:
        if kv is None:
            return ragged_attention(q, k, v, batch, kv, options), None
        variant = KernelVariant.of(options)
        is_half = q.dtype == kv.dtype in HALF_DTYPES
        if batch.is_first_prefill and variant == KernelVariant(0, False, False) and is_half:
            # No sequence has past tokens, so all visible keys are in `k`, and torch's fused kernels
            # are faster than a kernel that reads the pool.
            return padded_sdpa(q, k, v, batch, options), None
        queries_per_kv_head = q.shape[1] // kv.shape[2]
        metadata = batch.attention_metadata.get(TritonMetadata)
        if metadata is None:
            metadata = TritonMetadata.from_batch(batch, queries_per_kv_head, q)
            batch.attention_metadata[TritonMetadata] = metadata
        assert isinstance(metadata, TritonMetadata)
        q, out = _contiguous_rows(q), torch.empty_like(q, memory_format=torch.contiguous_format)
        fp8_rows = None
        is_decode_only = len(metadata.decode_items) == q.shape[0]
        if quantizes and is_decode_only and queries_per_kv_head > 1:
            fp8_rows = Fp8Rows.allocate(q.shape[0], q.shape[1] * q.shape[2], q.device)
        scales = layer_scales(self._scales, kv)
        for work_items in metadata.work_items:
            launch = work_items.launches.get(variant)
            if launch is None:
                if q.is_cuda:
                    self.compile_kernels(q, kv, options, quantizes=quantizes)
                launch = PreparedLaunch.make(work_items, metadata, q, kv, variant)
                work_items.launches[variant] = launch
            launch.run(q, kv, metadata.block_tables, scales, options, out=out, fp8_rows=fp8_rows)
        return out, fp8_rows

    def compile_kernels(
        self, q: Tensor, kv: KV, options: AttentionOptions, *, quantizes: bool = False
    ) -> None:
        """Compile all kernel variants that later steps may need.

        Compilation takes seconds, too long for a step that serves requests. The method launches
        each variant on dummy sequences with a context length of 0. It does this once for each
        combination of the layers' shapes, dtypes and kinds of options. With `quantizes`, it also
        launches the variant that quantizes the output.
        """
        q = _contiguous_rows(q)
        # Triton also specializes the kernels on whether the strides are multiples of 16.
        stride_alignment = tuple(stride % 16 == 0 for stride in q.stride()[:2])
        layout = (*q.shape[1:], stride_alignment, q.dtype, *kv.shape[2:], kv.dtype)
        signature = (*layout, KernelVariant.of(options))
        if signature not in self._compiled:
            self._compiled.add(signature)
            for tokens in work_item_sizes(q, kv):
                self._compile_variant(q, kv, options, tokens)
        if quantizes and (signature, "fp8") not in self._compiled:
            self._compiled.add((signature, "fp8"))
            self._compile_variant(q, kv, options, 1, quantizes=True)

    def _compile_variant(
        self,
        q: Tensor,
        kv: KV,
        options: AttentionOptions,
        tokens: int,
        *,
        quantizes: bool = False,
    ) -> None:
        """Launch the kernels once, for a sequence with `tokens` new tokens and no context."""
        zeros = torch.zeros(1, 2, dtype=torch.int32, device=q.device)
        items = WorkItems(zeros, tokens)
        starts = torch.arange(2, dtype=torch.int32, device=q.device) * tokens
        metadata = TritonMetadata(zeros[0, :1], starts, zeros, items, items, items)
        shape = tokens, *q.shape[1:]
        rows = q.new_zeros(shape[0], max(q.stride(0), shape[1] * q.stride(1)))
        dummy_q = rows.as_strided(shape, (rows.shape[1], q.stride(1), 1))
        out = torch.empty_like(dummy_q, memory_format=torch.contiguous_format)
        fp8_rows = None
        if quantizes:
            fp8_rows = Fp8Rows.allocate(tokens, shape[1] * shape[2], q.device)
        launch = PreparedLaunch.make(items, metadata, dummy_q, kv, KernelVariant.of(options))
        scales = layer_scales(self._scales, kv)
        launch.run(dummy_q, kv, metadata.block_tables, scales, options, out=out, fp8_rows=fp8_rows)


@dataclass(frozen=True)
class PreparedLaunch:
    """What the launches of all layers with the same kernel variant have in common, in a step."""

    kernel: Any  # `attend_single` or `attend_tile`.
    grid: tuple[int, int]
    softmax_scale: float
    constants: dict[str, object]
    merge_grid: tuple[int, int] | None  # Of `merge_tiles`; None: it is not launched.
    merge_constants: dict[str, object]
    segment_list: SegmentList
    # Partial outputs of the segments and their softmax statistics. The layers use the memory one
    # after another.
    partial_out: Tensor
    softmax_stats: Tensor

    @classmethod
    def make(
        cls,
        work_items: WorkItems,
        metadata: TritonMetadata,
        q: Tensor,
        kv: KV,
        variant: KernelVariant,
    ) -> "PreparedLaunch":
        """Prepare the launches for layers with the shapes and dtypes of `q` and `kv`."""
        heads, head_dim = q.shape[1:]
        kv_heads = kv.shape[2]
        padded_head_dim = max(ROWS_MIN, next_power_of_two(head_dim))
        queries_per_kv_head = heads // kv_heads
        tokens, is_split = work_items.tokens_max, work_items.is_split
        segment_list = list_segments(work_items, metadata, variant.window, kv_heads)
        partial_rows = segment_list.capacity * tokens * heads if is_split else 0
        # The programs of the longest segments start first. The work items of a prefill share keys,
        # so those of one KV head start together.
        capacity = segment_list.capacity
        constants: dict[str, object] = {
            "D": head_dim,
            "WIDTH": padded_head_dim,
            "SEGMENTS_MAX": SEGMENTS_MAX if is_split else 1,
            "FIELDS": SEGMENT_FIELDS,
            "ALIGNMENT": SEGMENT_ALIGNMENT,
            "SINKS": variant.has_sinks,
        }
        has_single_query = tokens == queries_per_kv_head == 1
        return cls(
            kernels.attend_single if has_single_query else kernels.attend_tile,
            (kv_heads, capacity) if is_split else (capacity, kv_heads),
            # The kernels compute exp(x) as exp2(x * log2(e)); the GPU has an instruction for exp2.
            log2(e) * head_dim**-0.5,
            constants
            | {"GROUPS": kv_heads, "WINDOW": variant.window, "BLOCK": kv.shape[3]}
            | {"ALIBI": variant.has_alibi}
            | (
                _single_constants(padded_head_dim, kv)
                if has_single_query
                else _tile_constants(queries_per_kv_head, tokens, padded_head_dim, q)
            ),
            (len(work_items) * tokens, heads) if is_split and not has_single_query else None,
            constants | {"HEADS": heads, "TOKENS": tokens, "num_warps": 4},
            segment_list,
            q.new_empty(partial_rows * padded_head_dim, dtype=torch.float32),
            q.new_empty(partial_rows * 2, dtype=torch.float32),
        )

    def run(
        self,
        q: Tensor,
        kv: KV,
        block_tables: Tensor,
        scales: Tensor | None,
        options: AttentionOptions,
        *,
        out: Tensor,
        fp8_rows: Fp8Rows | None,
    ) -> None:
        """Compute the output rows of the work items in one layer.

        `fp8_rows`: the output in e4m3, in memory for at least one row; None: it is not quantized.
        """
        segment_list = self.segment_list
        inputs = [q, kv, block_tables, segment_list.segments]
        if self.kernel is kernels.attend_single:
            inputs.append(segment_list.arrivals)
        outputs = (out, self.partial_out, self.softmax_stats, scales, options.sinks)
        launcher.launch(
            self.kernel,
            self.grid,
            *inputs,
            *outputs,
            options.alibi_slopes,
            *q.stride()[:2],
            block_tables.stride(0),
            self.softmax_scale,
            **self.constants,
            SCALED=scales is not None,
        )
        if self.merge_grid is None:
            return
        fp8_width = 0 if fp8_rows is None else fp8_rows.values.shape[1]
        launcher.launch(
            kernels.merge_tiles,
            self.merge_grid,
            segment_list.first_segments,
            segment_list.arrivals,
            *outputs,
            None if fp8_rows is None else fp8_rows.values,
            None if fp8_rows is None else fp8_rows.scales,
            **self.merge_constants,
            SCALED=scales is not None,
            QUANTIZE=fp8_rows is not None,
            FP8_WIDTH=fp8_width,
            BLOCK_SIZE=min(max(next_power_of_two(fp8_width), ROWS_MIN), QUANTIZED_BLOCK_SIZE_MAX),
        )


def _single_constants(padded_head_dim: int, kv: KV) -> dict[str, object]:
    """Return the constants and options of `attend_single` only."""
    return {
        "TILE": tile_keys(padded_head_dim, kv, SINGLE_ELEMENTS_MAX),
        "STAGES": 3,
        "num_warps": 4,
    }


def _tile_constants(
    queries_per_kv_head: int, tokens: int, padded_head_dim: int, q: Tensor
) -> dict[str, object]:
    """Return the constants and options of `attend_tile` only."""
    rows = work_item_rows(tokens, queries_per_kv_head, q)
    return {
        "QUERIES": queries_per_kv_head,
        "TOKENS": tokens,
        "ROWS": rows,
        "TILE": min(64, tile_keys(padded_head_dim, q, TILE_ELEMENTS_MAX)),
        "num_warps": 8 if rows > 64 or q.dtype == torch.float32 else 4,
        "num_stages": 3 if q.dtype in HALF_DTYPES else 2,
    }


def list_segments(
    work_items: WorkItems, metadata: TritonMetadata, window: int, kv_heads: int
) -> SegmentList:
    """Launch the kernel that lists the segments of the work items for a window."""
    indices, is_split = work_items.indices, work_items.is_split
    extra = max(1, EXTRA_PROGRAMS // kv_heads) if is_split else 0
    capacity = len(indices) + extra
    segments = indices.new_empty(1 + capacity, SEGMENT_FIELDS)
    first_segments = indices.new_empty(len(indices), SEGMENT_FIELDS)
    launcher.launch(
        kernels.list_segments,
        (1,),
        indices,
        metadata.context_lengths,
        metadata.query_starts,
        segments,
        first_segments,
        len(indices),
        work_items.tokens_max,
        window,
        max(1, extra),
        SEGMENT_KEYS_MIN if is_split else torch.iinfo(torch.int32).max // 2,
        SEGMENTS_MAX=SEGMENTS_MAX,
        ALIGNMENT=SEGMENT_ALIGNMENT,
        FIELDS=SEGMENT_FIELDS,
        ITEMS=LISTED_ITEMS,
        num_warps=4,
    )
    arrivals = indices.new_zeros(capacity * kv_heads if is_split else 0)
    return SegmentList(segments, first_segments, arrivals, capacity)


def work_item_sizes(q: Tensor, kv: KV) -> list[int]:
    """Return each number that `WorkItems.tokens_max` of a step may be, ascending."""
    longest_runs = range(SPLIT_KEYS_TOKENS_MAX, max(ROWS_MAX.values()) + 1)
    queries_per_kv_head = q.shape[1] // kv.shape[2]
    return sorted({1, *(work_item_tokens_max(n, queries_per_kv_head, q) for n in longest_runs)})


def work_item_tokens_max(longest: int, queries_per_kv_head: int, like: Tensor) -> int:
    """Return the maximum number of new tokens per work item.

    `longest` is the largest number of new tokens of a sequence in the batch. The function returns
    only a few different numbers, because each is a kernel variant to compile.
    """
    if longest <= SPLIT_KEYS_TOKENS_MAX:
        return min(
            SPLIT_KEYS_TOKENS_MAX,
            work_item_rows(SPLIT_KEYS_TOKENS_MAX, queries_per_kv_head, like) // queries_per_kv_head,
        )
    return work_item_rows(longest, queries_per_kv_head, like) // queries_per_kv_head


def work_item_rows(tokens: int, queries_per_kv_head: int, like: Tensor) -> int:
    """Return the number of query rows of a tile for work items of at most `tokens` new tokens."""
    rows_max = ROWS_MAX[like.dtype] if like.shape[-1] <= 128 else ROWS_MAX[like.dtype] // 2
    # A tile contains, for each of its tokens, all query heads of one KV head, even if their number
    # is greater than ROWS_MAX.
    rows_max = max(rows_max, next_power_of_two(queries_per_kv_head))
    return min(rows_max, max(ROWS_MIN, next_power_of_two(tokens * queries_per_kv_head)))


def tile_keys(head_dim: int, like: Tensor, elements_max: int) -> int:
    """Return the number of keys (16 to 128) in a tile whose elements have the dtype of `like`."""
    keys_max = min(elements_max // head_dim, TILE_BYTES_MAX // (head_dim * like.element_size()))
    return max(16, min(128, keys_max))


def _build_work_items(
    sequences: NDArray[np.int64],
    tokens: int,
    lengths: NDArray[np.int64],
    past_lengths: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the work items of at most `tokens` new tokens of these sequences, flattened.

    `lengths` and `past_lengths` are of all sequences of the batch. The work items with the most
    keys are the slowest, so they are first, and start first.
    """
    counts = -(-lengths[sequences] // tokens)
    item_sequences = np.repeat(sequences, counts)
    item_indices = np.arange(len(item_sequences)) - np.repeat(counts.cumsum() - counts, counts)
    first_tokens = item_indices * tokens
    order = np.argsort(-(past_lengths[item_sequences] + first_tokens), kind="stable")
    return np.stack([item_sequences[order], first_tokens[order]], axis=1).ravel()


def _dtype_max(x: Tensor, kv: KV) -> int:
    """Return the largest number of the pool's dtype; 0 if `x` has the same dtype."""
    return int(torch.finfo(kv.dtype).max) if kv.dtype != x.dtype else 0


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
