"""Attention backend: the interface for attention and KV-pool writes, and its torch implementation.

gpt/attention/selector.py chooses a backend when the model is loaded; the backend is an argument of
the model's constructor.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from gpt.attention.options import AttentionOptions
from gpt.attention.paged import KV, ragged_attention, store_kv
from gpt.batch import Batch
from gpt.config import GPTConfig, RopeConfig
from gpt.fp8_rows import Fp8Rows


class NormWeights(NamedTuple):
    """The parameters of a norm over the channels of a head."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class QKTransform:
    """The operations on the queries and keys of a layer: qk-norm (optional), rotary embedding.

    The norm is the one of `config`, as in gpt/model/norm.py. `rotary_table` is the table of
    gpt/model/rotary_embedding.py: (positions, 2, rotary channels / 2), cos and sin in fp32.
    """

    config: GPTConfig
    rope: RopeConfig
    rotary_table: Tensor
    # The norm weights of the queries and of the keys. None: the model has no qk-norm.
    norms: tuple[NormWeights, NormWeights] | None = None


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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Return the attention output (tokens, query heads, channels) of one layer.

        `kv`: the layer's KV blocks, into which `store` has already written `k` and `v`. None: the
        batch has no KV pool, so `k` and `v` contain every key and value that the queries attend to.
        """

    def attend_and_quantize(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> tuple[Tensor, Fp8Rows | None]:
        """Return the output of `attend`, and its rows (tokens, query heads * channels) in e4m3.

        The rows are None if the backend does not quantize the output of this step.
        """
        return self.attend(q, k, v, batch, kv, options), None

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        """Write this step's keys and values into their slots of the pool."""


class QKTransformBackend(AttentionBackend):
    """Base class of attention backends that also compute qk-norm and rotary embedding.

    With a KV pool, a model with RoPE calls `transform_and_store` instead of `store`. Without a
    pool, it computes qk-norm and rotary embedding in torch.
    """

    @abstractmethod
    def transform_and_store(
        self, qkv: Tensor, transform: QKTransform, batch: Batch, kv: KV
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Transform this step's queries and keys, and store the keys and values in the pool.

        `qkv` is the output of the QKV projection, (T, G, H / G + 2, D) for T tokens, G KV heads, H
        query heads and D channels per head. Each KV head has its queries, its key and its value.
        The method returns queries (T, H, D), keys (T, G, D) and values (T, G, D) for `attend`.
        """


class TorchAttention(AttentionBackend):
    """Backend "torch": torch operations, or the C kernels of gpt/cpu where they are available."""

    saves_only_inputs = True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> Tensor:
        return ragged_attention(q, k, v, batch, kv, options)

    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
        store_kv(k, v, batch, kv)
