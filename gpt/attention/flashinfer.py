"""Attention over the paged pool by FlashInfer, if it is installed and asked for.

Its kernels share out the work of a step by a plan, which its host code makes once for all layers:
one wrapper for sequences with a single new token, one for the others. The pool's layout is theirs
(HND). Keys and values are stored by our own code, and what has no pool goes to
gpt/attention/paged.py.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.attention.fp8_kv_cache import EightBits, scales_of
from gpt.attention.paged import KV, ragged
from gpt.batch import Batch

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 256)  # Channels of a head that its kernels are compiled for.
WORKSPACE_BYTES = 128 << 20  # As its documents ask for.
# So many queries of a KV head are better multiplied as a matrix.
MATRIX_QUERIES = 4


@dataclass(frozen=True)
class _Part:
    """Sequences that go to one wrapper, and their rows; None: all of the batch's, in order."""

    wrapper: Any
    rows: Tensor | None


class FlashInferAttention:
    """What a model attends by (`attend`) and fills its pool by (`store`).

    `scales`, (layers of the pool, 2) in fp32, as in gpt/attention/fp8_kv_cache.py; None: 1.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device, *, queries: int, scales: Tensor | None = None) -> None:
        """`queries` of each KV head."""
        library = import_module("flashinfer")
        room = (torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self._singles = library.BatchDecodeWithPagedKVCacheWrapper(
            next(room), kv_layout="HND", use_tensor_cores=queries >= MATRIX_QUERIES
        )
        self._runs = library.BatchPrefillWithPagedKVCacheWrapper(next(room), kv_layout="HND")
        self._eight_bits = EightBits(scales)
        # On the host: they are arguments of each call.
        self._scales = None if scales is None else scales.cpu()
        self._parts: list[_Part] = []  # The latest plan: the wrappers hold it.

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""
        self._eight_bits.store(k, v, batch, kv)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        """As gpt.attention.paged.ragged does."""
        if kv is None:
            return ragged(q, k, v, batch, kv, window)
        parts = batch.kept.get(FlashInferAttention)
        if parts is None or parts is not self._parts:
            parts = self._parts = self._plan(batch, q, kv, window)
            batch.kept[FlashInferAttention] = parts
        assert isinstance(parts, list)
        options = {}
        scales = scales_of(self._scales, kv)
        if scales is not None:
            options = {"k_scale": float(scales[0]), "v_scale": float(scales[1])}
        if len(parts) == 1:
            whole: Tensor = parts[0].wrapper.run(q.contiguous(), kv, **options)
            return whole
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            y[part.rows] = part.wrapper.run(q.index_select(0, part.rows), kv, **options)
        return y

    def _plan(self, batch: Batch, q: Tensor, kv: KV, window: int | None) -> list[_Part]:
        """Plan both wrappers for this batch: single tokens and runs, as there are some."""
        lengths = np.array(batch.lengths)
        some = [(self._singles, lengths == 1), (self._runs, lengths > 1)]
        parts = []
        for wrapper, mask in some:
            if not mask.any():
                continue
            rows = None
            if not mask.all():
                rows = torch.from_numpy(np.flatnonzero(np.repeat(mask, lengths))).to(q.device)
            _planned(wrapper, batch, np.flatnonzero(mask), q, kv, begins=wrapper is self._runs,
                     window=window)  # fmt: skip
            parts.append(_Part(wrapper, rows))
        return parts


def _planned(
    wrapper: Any,
    batch: Batch,
    sequences: np.ndarray,
    q: Tensor,
    kv: KV,
    *,
    begins: bool,
    window: int | None,
) -> None:
    """Tell a wrapper where these sequences' keys lie; `begins`: and where their queries do.

    Counts stay on the host, or it would wait for the device to have them back.
    """
    assert batch.tables is not None
    _, _, groups, size, width = kv.shape
    contexts = np.array(batch.contexts)[sequences]
    counts = -(-contexts // size)
    ends = np.concatenate([[0], counts.cumsum()])
    owners = np.repeat(sequences, counts)
    places = np.arange(len(owners)) - np.repeat(ends[:-1], counts)
    flat = torch.from_numpy(owners * batch.tables.shape[1] + places).to(batch.tables.device)
    indices = batch.tables.flatten().index_select(0, flat).int()
    parts = [ends, contexts - (counts - 1) * size]
    if begins:
        parts.insert(0, np.concatenate([[0], np.array(batch.lengths)[sequences].cumsum()]))
    numbers = [torch.from_numpy(part.astype(np.int32)) for part in parts]
    options = {} if not begins else {"causal": True}
    wrapper.plan(
        *(*numbers[:-1], indices, numbers[-1]),
        *(q.shape[1], groups, width, size),
        **options,
        pos_encoding_mode="NONE",
        window_left=-1 if window is None else window - 1,
        q_data_type=q.dtype,
        kv_data_type=kv.dtype,
        sm_scale=width**-0.5,
    )
