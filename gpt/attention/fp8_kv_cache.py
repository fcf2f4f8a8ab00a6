"""FP8 (e4m3) KV cache: stores quantized keys and values, and computes attention over them in torch.

An fp8 pool has half of the bytes of a bf16 pool, so decode also reads half of the bytes. A stored
number has four significant bits. Magnitudes above 448, the e4m3 maximum, are clamped to 448,
because a cast without the clamp can give NaN. With an fp8 pool, the attention backend "torch" is
this module; it is also the reference implementation for the GPU kernels. It dequantizes the blocks
that a step reads, and calls `ragged_attention`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gpt.attention.backend import AttentionBackend
from gpt.attention.kv_cache import FP8_DTYPE
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import KV, ragged_attention, store_kv
from gpt.batch import Batch


class Fp8KVAttention(AttentionBackend):
    """Attention over an fp8 KV pool in torch.

    A key or value is the stored fp8 number times its scale.

    `scales`: the key scale and the value scale of each layer of an fp8 pool, an fp32 tensor of
    shape (layers of the pool, 2). None: all scales are 1.
    """

    def __init__(self, scales: Tensor | None = None) -> None:
        self._scales = scales

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""
        if kv.dtype != FP8_DTYPE:  # FlashInferAttention also passes pools of other dtypes.
            store_kv(k, v, batch, kv)
            return
        assert batch.slot_mapping is not None
        block, offset = batch.slot_mapping
        kv_bytes = kv.view(torch.uint8)  # torch does not index fp8 tensors.
        for key_or_value, x in enumerate(self._quantize(k, v, kv)):
            kv_bytes[block, key_or_value, :, offset] = x

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Run `ragged_attention` on a dequantized copy of the blocks that the step reads."""
        if kv is None or kv.dtype != FP8_DTYPE:
            return ragged_attention(q, k, v, batch, kv, options)
        assert batch.block_tables is not None
        blocks = batch.block_tables.flatten()
        gathered_batch = batch.attention_metadata.get(Fp8KVAttention)
        if gathered_batch is None:
            # Block i of `gathered_kv` is a copy of the block in entry i of the flattened tables.
            gathered_tables = torch.arange(len(blocks), device=blocks.device).view_as(
                batch.block_tables
            )
            gathered_batch = batch.attention_metadata[Fp8KVAttention] = replace(
                batch, block_tables=gathered_tables, attention_metadata={}
            )
        assert isinstance(gathered_batch, Batch)
        gathered_kv = self._dequantize(kv.view(torch.uint8).index_select(0, blocks), kv, q.dtype)
        # Round the new keys and values to fp8 too, so that this step computes with the numbers that
        # later steps read.
        new_kv = torch.stack(self._quantize(k, v, kv), dim=1)
        k, v = self._dequantize(new_kv, kv, q.dtype).unbind(1)
        return ragged_attention(q, k, v, gathered_batch, gathered_kv, options)

    def _quantize(self, k: Tensor, v: Tensor, kv: KV) -> tuple[Tensor, Tensor]:
        scales = layer_scales(self._scales, kv)
        if scales is not None:
            # In fp32, as in the Triton kernel: a bf16 tensor divided by a scalar tensor is bf16.
            k, v = k.float() / scales[0], v.float() / scales[1]
        return quantize_fp8(k), quantize_fp8(v)

    def _dequantize(self, x: Tensor, kv: KV, dtype: torch.dtype) -> Tensor:
        """Return the fp8 bytes `x` as numbers of `dtype`, multiplied by their scales.

        In dimension 1 of `x`, index 0 is keys and index 1 is values.
        """
        scales = layer_scales(self._scales, kv)
        values = x.view(FP8_DTYPE).to(dtype)
        return values if scales is None else values * scales.to(dtype).view(2, *[1] * (x.dim() - 2))


def quantize_fp8(x: Tensor) -> Tensor:
    """Return the e4m3 bytes of `x`, after a clamp of `x` to the finite range of e4m3."""
    fp8_max = torch.finfo(FP8_DTYPE).max
    clamp_dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(clamp_dtype).clamp(-fp8_max, fp8_max).to(FP8_DTYPE).view(torch.uint8)


def layer_scales(scales: Tensor | None, kv: KV) -> Tensor | None:
    """Return the key scale and the value scale of the layer whose KV blocks are `kv`.

    `scales`: the scales of all layers of the pool, (layers, 2); None: all scales are 1. `kv` is a
    view of the pool, so the storage offset of `kv` gives the layer's index in the pool.
    """
    return None if scales is None else scales[kv.storage_offset() // kv.numel()]
