"""FlashInfer attention backend over the paged KV cache.

Only `attention_backend: flashinfer` selects this backend. FlashInfer's host code plans a step once
for all layers. One kind of FlashInfer wrapper computes decode (sequences with one new token),
another one computes prefill. FlashInfer compiles its kernels when a wrapper is first planned, so
`compile_kernels` plans and runs a small batch while the model is loaded. The KV pool has
FlashInfer's layout (HND). Two operations are done by other modules: `Fp8KVAttention.store` writes
to the pool (an fp8 pool or one of another dtype), and `ragged_attention` computes batches without a
KV pool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.attention.backend import AttentionBackend
from gpt.attention.fp8_kv_cache import Fp8KVAttention, layer_scales
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import KV, ragged_attention
from gpt.batch import Batch
from gpt.device_transfers import record_event, to_device

WORKSPACE_BYTES = 128 << 20  # The size that FlashInfer's documentation recommends.
# The smallest number of query heads per KV head at which decode uses tensor cores. With fewer query
# heads, CUDA cores are faster.
TENSOR_CORE_QUERIES_MIN = 4


@dataclass(frozen=True)
class _WrapperCall:
    """A planned wrapper, and the rows of the flat batch that it computes (None: all rows)."""

    wrapper: Any
    rows: Tensor | None


class _AlternatingWrappers:
    """Two wrappers of one kind that take turns.

    plan() writes to a pinned buffer of its wrapper, and queues a copy of the buffer to the device.
    The next plan() of the same wrapper must not overwrite the buffer before the copy is complete.
    Because the wrappers take turns, this copy belongs to the step before the previous one, so the
    wait is usually short.
    """

    def __init__(self, make_wrapper: Callable[[], Any], device: torch.device) -> None:
        self._device = device
        self._turns = cycle([make_wrapper(), make_wrapper()])
        self._wait_for_copies: dict[int, Callable[[], None]] = {}  # By the wrapper's id.

    def plan(self, *args: Any, **options: Any) -> Any:
        """Plan the next wrapper, and return it."""
        wrapper = next(self._turns)
        if id(wrapper) in self._wait_for_copies:
            self._wait_for_copies[id(wrapper)]()
        wrapper.plan(*args, **options)
        self._wait_for_copies[id(wrapper)] = record_event(self._device)
        return wrapper


class FlashInferAttention(AttentionBackend):
    """Attention by FlashInfer's kernels.

    `scales`: the key scale and the value scale of each layer of an fp8 pool, an fp32 tensor of
    shape (layers of the pool, 2). None: all scales are 1.
    """

    name = "flashinfer"

    def __init__(
        self, device: torch.device, *, queries_per_kv_head: int, scales: Tensor | None = None
    ) -> None:
        flashinfer = import_module("flashinfer")
        # All wrappers share the workspace, because their kernels run one after the other.
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._queries_per_kv_head = queries_per_kv_head
        self._decode_wrappers = _AlternatingWrappers(
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                kv_layout="HND",
                use_tensor_cores=queries_per_kv_head >= TENSOR_CORE_QUERIES_MIN,
            ),
            device,
        )
        self._prefill_wrappers = _AlternatingWrappers(
            lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND"),
            device,
        )
        self._fp8_attention = Fp8KVAttention(scales)
        # On the host, because run() takes the scales as Python floats.
        self._scales = None if scales is None else scales.cpu()
        self._calls: list[_WrapperCall] = []  # The calls of the latest plan.

    def compile_kernels(
        self, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, window: int | None
    ) -> None:
        """Compile the kernels for these dtypes, this head size and this window, and run them once.

        The compilation can take minutes. FlashInfer keeps the compiled kernels in a folder, or
        loads them from the package flashinfer-jit-cache.
        """
        block_tokens = 16
        tables = torch.tensor([[0], [1]], device=self._device)
        # A decode sequence and a prefill sequence, each with one block.
        batch = Batch.paged([1, 2], [0, 0], tables, block_tokens)
        kv = torch.zeros(2, 2, 1, block_tokens, head_dim, device=self._device).to(kv_dtype)
        rows = torch.zeros(3, 1, head_dim, dtype=dtype, device=self._device)
        q = rows.expand(-1, self._queries_per_kv_head, -1).contiguous()
        # The copy waits for the kernels, so that their errors are raised here.
        self.attend(q, rows, rows, batch, kv, AttentionOptions(window)).cpu()

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""
        self._fp8_attention.store(k, v, batch, kv)

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
        if kv is None:
            return ragged_attention(q, k, v, batch, kv, options)
        assert options.has_plain_softmax, "the selector refuses models with sinks or ALiBi"
        # A wrapper stores only its latest plan. If another batch was planned after this batch, this
        # batch is planned again.
        calls = batch.attention_metadata.get(FlashInferAttention)
        if calls is None or calls is not self._calls:
            calls = self._calls = self._plan_wrappers(batch, q, kv, options.window)
            batch.attention_metadata[FlashInferAttention] = calls
        assert isinstance(calls, list)
        kv_scales = {}
        scales = layer_scales(self._scales, kv)
        if scales is not None:
            kv_scales = {"k_scale": float(scales[0]), "v_scale": float(scales[1])}
        if len(calls) == 1:
            output: Tensor = calls[0].wrapper.run(q.contiguous(), kv, **kv_scales)
            return output
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        for call in calls:
            y[call.rows] = call.wrapper.run(q.index_select(0, call.rows), kv, **kv_scales)
        return y

    def _plan_wrappers(
        self, batch: Batch, q: Tensor, kv: KV, window: int | None
    ) -> list[_WrapperCall]:
        """Plan a decode and a prefill wrapper for this batch; skip one without sequences."""
        lengths = np.array(batch.query_lengths)
        wrapper_masks = [
            (self._decode_wrappers, lengths == 1),
            (self._prefill_wrappers, lengths > 1),
        ]
        calls = []
        for wrappers, mask in wrapper_masks:
            if not mask.any():
                continue
            rows = None
            if not mask.all():
                rows = to_device(np.flatnonzero(np.repeat(mask, lengths)), q.device)
            is_prefill = wrappers is self._prefill_wrappers
            sequences = np.flatnonzero(mask)
            wrapper = _plan_wrapper(
                wrappers, batch, sequences, q, kv, is_prefill=is_prefill, window=window
            )
            calls.append(_WrapperCall(wrapper, rows))
        return calls


def _plan_wrapper(
    wrappers: _AlternatingWrappers,
    batch: Batch,
    sequences: np.ndarray,
    q: Tensor,
    kv: KV,
    *,
    is_prefill: bool,
    window: int | None,
) -> Any:
    """Call plan() of a wrapper, and return the wrapper.

    `sequences`: the indices of the sequences that the wrapper computes.

    plan() reads the lengths and offsets on the host, so they are host tensors; to read a device
    tensor, plan() would have to wait for the GPU. Only the kernels read the block numbers
    (`block_indices`), so these are a device tensor.
    """
    assert batch.block_tables is not None
    _, _, kv_heads, block_tokens, head_dim = kv.shape
    context_lengths = np.array(batch.context_lengths)[sequences]
    block_counts = -(-context_lengths // block_tokens)
    kv_indptr = np.concatenate([[0], block_counts.cumsum()])
    block_sequences = np.repeat(sequences, block_counts)
    table_columns = np.arange(len(block_sequences)) - np.repeat(kv_indptr[:-1], block_counts)
    table_indices = to_device(
        block_sequences * batch.block_tables.shape[1] + table_columns, batch.block_tables.device
    )
    block_indices = batch.block_tables.flatten().index_select(0, table_indices).int()
    last_block_lengths = context_lengths - (block_counts - 1) * block_tokens
    # A decode sequence has one query, so plan() of the decode wrapper takes neither query offsets
    # nor the option `causal`.
    query_offsets: list[Tensor] = []
    options: dict[str, bool] = {}
    if is_prefill:
        query_lengths = np.array(batch.query_lengths)[sequences]
        query_offsets = [_host_int32(np.concatenate([[0], query_lengths.cumsum()]))]
        options = {"causal": True}
    return wrappers.plan(
        *query_offsets,
        _host_int32(kv_indptr),
        block_indices,
        _host_int32(last_block_lengths),
        q.shape[1],
        kv_heads,
        head_dim,
        block_tokens,
        **options,
        pos_encoding_mode="NONE",
        window_left=-1 if window is None else window - 1,
        q_data_type=q.dtype,
        kv_data_type=kv.dtype,
        sm_scale=head_dim**-0.5,
    )


def _host_int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
