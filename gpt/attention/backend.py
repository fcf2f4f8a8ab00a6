"""Attention backend: the interface for attention and KV-pool writes, and its torch implementation.

gpt/attention/selector.py chooses a backend when the model is loaded; the backend is an argument of
the model's constructor.
"""

from abc import abstractmethod
from typing import Protocol

from torch import Tensor

from gpt.attention.paged import KV, ragged_attention, store_kv
from gpt.batch import Batch


class AttentionBackend(Protocol):
    """Base class of attention backends: attention and KV-pool writes of all layers of a model."""

    name: str = "torch"
    # Whether a CUDA graph may capture the backend's calls: they read no lengths on the host.
    is_capturable: bool = False
    # Whether autograd saves only queries, keys and values, so that activation checkpointing of the
    # attention core would save no memory.
    saves_only_inputs: bool = False

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        """Return the attention over the layer's KV blocks `kv`; None: over the batch's tokens."""

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""


class TorchAttention(AttentionBackend):
    """Default backend: attention in torch, or on a CPU with the C kernels of gpt/cpu/kernels.py."""

    saves_only_inputs = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        return ragged_attention(q, k, v, batch, kv, window)

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        store_kv(k, v, batch, kv)
