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
    """Base class of attention backends; one object serves all layers of a model."""

    name: str = "torch"
    # Whether a CUDA graph can capture the calls of `attend` and `store`. If True, both methods must
    # read sequence lengths from device tensors only.
    is_capturable: bool = False
    # Whether the backward pass recomputes the attention probabilities instead of saving them. If
    # True, selective activation checkpointing does not checkpoint the attention core, because that
    # would save little memory.
    saves_only_inputs: bool = False

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        """Return the attention output (tokens, query heads, channels) of one layer.

        `kv`: the layer's KV blocks, into which `store` has already written `k` and `v`. None: the
        batch has no KV pool, so `k` and `v` contain every key and value that the queries attend to.
        """

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""


class TorchAttention(AttentionBackend):
    """Backend "torch": torch operations, or the C kernels of gpt/cpu where they are available."""

    saves_only_inputs = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor:
        return ragged_attention(q, k, v, batch, kv, window)

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        store_kv(k, v, batch, kv)
