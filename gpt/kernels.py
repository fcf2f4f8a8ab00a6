"""Attention in C, for single new tokens on a CPU: the library beside this file, if it was built.

`gpt/kernels.c` reads keys and values where they lie in the pool, so nothing is gathered. This is
the way in: it finds the library, says once why there is none, and hands it addresses. Whoever asks
must be ready to hear that it does not serve; the same in torch is in gpt/attention.py.
"""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libkernels.so")
ABI = 1
DTYPES = (torch.bfloat16, torch.float32)
WIDTH_MAX = 512
# What the machine can do best, as the library counts it.
MACHINES = ("plain", "avx2", "avx512_bf16")

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    """As in kernels.c."""

    _fields_ = (
        *((name, _Int) for name in ("rows", "groups", "queries", "width")),
        *((name, _Int) for name in ("block_tokens", "table_width", "window", "bf16", "threads")),
        ("scale", ctypes.c_double),
        *((name, _Pointer) for name in ("row", "sequence", "context", "tables")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None and a line in the log."""
    try:
        # It shares OpenMP's threads with torch, since torch was loaded first.
        found = ctypes.CDLL(str(LIBRARY))
        if found.preamble_abi() != ABI:
            raise OSError(f"{LIBRARY} is of another version; build it again: make kernels")
    except (OSError, AttributeError) as error:
        reason = str(error) if LIBRARY.exists() else f"{LIBRARY.name} was not built: make kernels"
        log.info("event=kernels_missing reason=%r", reason)
        return None
    found.preamble_attend.argtypes = (_Pointer, _Pointer, _Int, _Int, _Pointer, _Pointer)
    found.preamble_store.argtypes = (_Pointer,) * 7
    found.preamble_store.restype = None
    log.info("event=kernels_loaded machine=%s", MACHINES[found.preamble_machine(-1)])
    return found


def choose_machine(name: str | None) -> str | None:
    """For tests: use what such a machine has, or the best (None); says what is used now."""
    found = library()
    if found is None:
        return None
    return MACHINES[found.preamble_machine(-1 if name is None else MACHINES.index(name))]


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
    """Rows of a step whose keys lie in the pool: the same for every layer."""

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
        self._count, self._window = len(rows), window or 0
        # Kept, since the library is given their addresses.
        self._tables = tables.contiguous()
        self._numbers = torch.tensor([rows, sequences, contexts])
        self._plan: _Rows | None = None

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """(rows, H, D) of the queries of these rows; q is (T, H, D) of the whole batch."""
        if q.stride(-1) != 1:
            q = q.contiguous()
        plan = self._plan
        if plan is None:
            plan = self._plan = self._planned(q, kv)
        out = q.new_empty(self._count, *q.shape[1:])
        found = library()
        assert found is not None
        row, head, _ = q.stride()
        failed = found.preamble_attend(
            ctypes.byref(plan), q.data_ptr(), row, head, kv.data_ptr(), out.data_ptr()
        )
        assert not failed, "the library was asked for heads that it does not serve"
        return out

    def _planned(self, q: Tensor, kv: Tensor) -> _Rows:
        _, _, groups, block_tokens, width = kv.shape
        addresses = [numbers.data_ptr() for numbers in self._numbers]
        return _Rows(
            *(self._count, groups, q.shape[1] // groups, width),
            *(block_tokens, self._tables.shape[1], self._window),
            *(q.dtype == torch.bfloat16, torch.get_num_threads()),
            width**-0.5,
            *addresses,
            self._tables.data_ptr(),
        )


def store(k: Tensor, v: Tensor, slots: tuple[Tensor, Tensor], kv: Tensor) -> None:
    """Write keys and values (T, G, D) into their slots of the pool."""
    found = library()
    assert found is not None
    tokens, groups, width = k.shape
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    size = k.element_size()
    strides = (_Int * 4)(*(size * n for x in (k, v) for n in x.stride()[:2]))
    shape = (_Int * 4)(tokens, groups, kv.shape[3], width * size)
    blocks, places = (x.contiguous() for x in slots)
    found.preamble_store(
        *(kv.data_ptr(), k.data_ptr(), v.data_ptr(), strides),
        *(blocks.data_ptr(), places.data_ptr(), shape),
    )
