"""Keys and values in eight bits (e4m3): attention over such a pool in plain torch.

A pool holds half as much of what decoding reads most. Numbers are kept with four significant bits
and are at most 448: what is larger is stored as that, never as NaN. This is the twin of what the
kernels for GPUs do, and serves where they cannot: the blocks of a step are widened, then attended.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gpt.attention.kv_cache import NARROW
from gpt.attention.paged import KV, ragged, store
from gpt.batch import Batch


class EightBits:
    """What a model attends by (`attend`) and fills its pool by (`store`).

    `scales`, (layers of the pool, 2) in fp32: what stored keys and values are multiplied by; None:
    they are stored as they are.
    """

    name = "torch"

    def __init__(self, scales: Tensor | None = None) -> None:
        self._scales = scales

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""
        if kv.dtype != NARROW:  # Of the plain loop.
            store(k, v, batch, kv)
            return
        assert batch.slots is not None
        block, place = batch.slots
        memory = kv.view(torch.uint8)  # In which torch can index.
        for kind, x in enumerate(self._narrowed(k, v, kv)):
            memory[block, kind, :, place] = x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        """As gpt.attention.paged.ragged does, of a copy of the blocks that the step reads."""
        if kv is None or kv.dtype != NARROW:
            return ragged(q, k, v, batch, kv, window)
        assert batch.tables is not None
        blocks = batch.tables.flatten()
        near = batch.kept.get(EightBits)
        if near is None:
            places = torch.arange(len(blocks), device=blocks.device).view_as(batch.tables)
            near = batch.kept[EightBits] = replace(batch, tables=places, kept={})
        assert isinstance(near, Batch)
        read = self._widened(kv.view(torch.uint8).index_select(0, blocks), kv, q.dtype)
        # What came in with the step is seen as later steps will see it.
        news = torch.stack(self._narrowed(k, v, kv), dim=1)
        k, v = self._widened(news, kv, q.dtype).unbind(1)
        return ragged(q, k, v, near, read, window)

    def _narrowed(self, k: Tensor, v: Tensor, kv: KV) -> tuple[Tensor, Tensor]:
        scales = scales_of(self._scales, kv)
        if scales is not None:
            k, v = k / scales[0], v / scales[1]
        return narrowed(k), narrowed(v)

    def _widened(self, x: Tensor, kv: KV, dtype: torch.dtype) -> Tensor:
        """Bytes of keys and values (..., 2, ...), the second dimension, as numbers."""
        scales = scales_of(self._scales, kv)
        wide = x.view(NARROW).to(dtype)
        return wide if scales is None else wide * scales.to(dtype).view(2, *[1] * (x.dim() - 2))


def narrowed(x: Tensor) -> Tensor:
    """The bytes of these numbers; what is too large is the largest there is."""
    most = torch.finfo(NARROW).max
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).clamp(-most, most).to(NARROW).view(torch.uint8)


def scales_of(scales: Tensor | None, kv: KV) -> Tensor | None:
    """Those of a layer. A pool's layers lie one after another, so where it begins says which."""
    return None if scales is None else scales[kv.storage_offset() // kv.numel()]
