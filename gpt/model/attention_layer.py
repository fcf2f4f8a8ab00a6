"""Attention layer: QKV projection, rotary embedding, attention core, output projection.

The attention backend (gpt/attention) computes the attention core and stores keys and values. In
training with prefix tuning, learned keys and values replace the keys and values that the layer
computes for virtual tokens (`PrefixKV`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpt.attention.backend import NormWeights, QKTransform, QKTransformBackend
from gpt.attention.options import AttentionOptions, alibi_slopes
from gpt.attention.paged import KV
from gpt.attention.varlen import AttentionDropout, unfused_attention
from gpt.batch import Batch
from gpt.config import LayerConfig, RopeConfig
from gpt.cpu import training_kernels
from gpt.dropout import Dropout
from gpt.linear_adapter import BatchAdapters
from gpt.model.activation_checkpointing import checkpointed
from gpt.model.adapted_linear import select_adapters
from gpt.model.build_context import BuildContext
from gpt.model.linear import ColumnParallelLinear, RowParallelLinear
from gpt.model.norm import AllHeadsNorm, Norm
from gpt.model.residual_dropout import Residual
from gpt.model.rotary_embedding import apply_rotary_embedding
from gpt.parallel.weight_sharding import local_kv_heads


@dataclass(frozen=True)
class PrefixKV:
    """Learned keys and values of virtual tokens (prefix tuning), for training only.

    Attention uses these keys and values unchanged, without norm and rotary embedding, like keys and
    values from a KV cache. A server does not use this class: it writes the keys and values to the
    KV pool before the first step of a sequence.
    """

    # Keys and values by global layer number. Each tensor has the shape (virtual tokens, 2, G, D):
    # this rank has G KV heads of D channels.
    kv_by_layer: Mapping[int, Tensor]
    batch_rows: Tensor  # The rows of the batch that are virtual tokens.
    # For each of `batch_rows`, the index of its virtual token in the tensors of `kv_by_layer`.
    prefix_rows: Tensor

    def replace_kv(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        prefix_kv = self.kv_by_layer[layer].index_select(0, self.prefix_rows).to(k.dtype)
        keys, values = prefix_kv.unbind(1)
        return k.index_copy(0, self.batch_rows, keys), v.index_copy(0, self.batch_rows, values)


@dataclass(frozen=True)
class ForwardContext:
    """The data that all layers of one forward pass share."""

    batch: Batch
    # For each rotary embedding of the model's layers, cos and sin of the step's positions, each
    # (T, rotary channels / 2). Empty: the model has no RoPE, or `rotary_tables` is set.
    rotary_cos_sin: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # The rows that a layer computes after its attention core; set for the last layer of the model
    # only. None: all rows.
    output_rows: Tensor | None = None
    # The adapters of these rows. None: those of all rows, `batch.adapters`.
    adapted_output_rows: BatchAdapters | None = None
    prefix: PrefixKV | None = None
    # cos and sin of all positions. If not empty, the attention backend transforms queries and keys,
    # and the step has a KV pool and no prefix.
    rotary_tables: Mapping[RopeConfig, Tensor] = field(default_factory=dict)
    # The factor of each token's query, which depends on its position. None: no factors.
    query_factors: Tensor | None = None

    @property
    def output_adapters(self) -> BatchAdapters:
        """The adapters of the rows that a layer computes after its attention core."""
        if self.adapted_output_rows is not None:
            return self.adapted_output_rows
        return self.batch.adapters

    def with_output_rows(self, rows: Tensor | None) -> "ForwardContext":
        """Return the context of a layer that computes only `rows` after its attention core."""
        if rows is None:
            return self
        adapted_rows = select_adapters(self.batch.adapters, rows)
        return replace(self, output_rows=rows, adapted_output_rows=adapted_rows)


class CoreAttention(nn.Module):
    """The options and parameters of the attention core of a layer, for the heads of this rank."""

    softmax_offset: Tensor  # (query heads,) the sinks, if the layer has them.

    def __init__(self, build: BuildContext, layer_config: LayerConfig, name: str) -> None:
        super().__init__()
        config, mesh = build.config, build.mesh
        slopes = None
        if config.position_embedding_type == "alibi":
            all_slopes = alibi_slopes(config.num_attention_heads)
            first, heads = mesh.tp_rank * len(all_slopes) // mesh.tp, len(all_slopes) // mesh.tp
            own_slopes = all_slopes[first : first + heads]
            slopes = torch.tensor(own_slopes, dtype=torch.float32, device=build.device)
        self._options = AttentionOptions(layer_config.window_size, alibi_slopes=slopes)
        self._has_sinks = layer_config.attention_sinks
        if self._has_sinks:
            build.allocate_parameters(self, name)

    @property
    def options(self) -> AttentionOptions:
        return (
            replace(self._options, sinks=self.softmax_offset) if self._has_sinks else self._options
        )


class Attention(nn.Module):
    """Self-attention over the heads of this rank."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        name = f"decoder.layers.{layer}.self_attention"
        self.layer = layer
        self.config = build.config
        self.layer_config = build.config.layers[layer]
        self.mesh = build.mesh
        self.backend = build.attention_backend
        self.recompute = build.recompute
        self.groups = local_kv_heads(build.config, build.mesh.tp)
        self.linear_qkv = ColumnParallelLinear(build, f"{name}.linear_qkv")
        self.linear_proj = RowParallelLinear(build, f"{name}.linear_proj")
        # The factor of the queries that gives the scores their scale. The attention backends scale
        # the scores by 1 / sqrt(D).
        self.query_factor = build.config.softmax_scale * build.config.kv_channels**0.5 or 1.0
        if build.config.qk_layernorm:
            self._add_qk_norms(build, name)
        self.core_attention = CoreAttention(build, self.layer_config, f"{name}.core_attention")

    def _add_qk_norms(self, build: BuildContext, name: str) -> None:
        self.q_layernorm: Norm | AllHeadsNorm
        self.k_layernorm: Norm | AllHeadsNorm
        if self.config.qk_layernorm_scope == "head":
            self.q_layernorm = Norm(build, f"{name}.q_layernorm")
            self.k_layernorm = Norm(build, f"{name}.k_layernorm")
            return
        copies = self.groups * self.mesh.tp // self.config.num_query_groups
        self.q_layernorm = AllHeadsNorm(build, f"{name}.q_layernorm", copies=1)
        self.k_layernorm = AllHeadsNorm(build, f"{name}.k_layernorm", copies=copies)

    def forward(
        self, x: Tensor, context: ForwardContext, kv: KV | None, residual: Residual | None = None
    ) -> Tensor:
        batch, d = context.batch, self.config.kv_channels
        qkv = self.linear_qkv(x, batch.tokens, None, batch.adapters)
        qkv = qkv.view(batch.tokens, self.groups, -1, d)
        transform = self._qk_transform(context)
        if transform is not None:
            assert kv is not None and isinstance(self.backend, QKTransformBackend)
            q, k, v = self.backend.transform_and_store(qkv, transform, batch, kv)
        else:
            q, k, v = self._transform_qkv(qkv, context)
            if kv is not None:
                self.backend.store(k, v, batch, kv)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if context.query_factors is not None:
            q = q * context.query_factors
        if self.linear_proj.backend.accepts_fp8_rows:
            y, fp8_rows = self.backend.attend_and_quantize(
                q, k, v, batch, kv, self.core_attention.options
            )
        else:
            y, fp8_rows = self._core_attention(q, k, v, batch, kv), None
        if context.output_rows is not None:
            y, fp8_rows = y.index_select(0, context.output_rows), None
        rows = y.flatten(1)
        if fp8_rows is not None:
            self.linear_proj.backend.store_fp8_rows(rows, fp8_rows)
        return cast(Tensor, self.linear_proj(rows, residual, context.output_adapters))

    def _qk_transform(self, context: ForwardContext) -> QKTransform | None:
        """Return the transform that the attention backend computes; None: torch computes it."""
        rope = self.layer_config.rope
        if not context.rotary_tables or rope is None:
            return None
        table = context.rotary_tables[rope]
        if not self.config.qk_layernorm:
            return QKTransform(self.config, rope, table)
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        assert isinstance(q_norm, Norm) and isinstance(k_norm, Norm)
        norms = NormWeights(q_norm.weight, q_norm.bias), NormWeights(k_norm.weight, k_norm.bias)
        return QKTransform(self.config, rope, table, norms)

    def _transform_qkv(
        self, grouped_qkv: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the queries, keys and values; apply qk-norm, rotary embedding and the prefix.

        In training, the keys and values of a frozen context follow those of the batch.
        """
        rope = self.layer_config.rope
        cos_sin = None if rope is None else context.rotary_cos_sin[rope]
        is_rotated_by_split = False
        if training_kernels.supports_split_qkv(grouped_qkv):
            is_rotated_by_split = (
                rope is not None and not rope.interleaved and not self.config.qk_layernorm
            )
            q, k, v = training_kernels.split_qkv(
                grouped_qkv, cos_sin if is_rotated_by_split else None
            )
        else:
            q, k, v = _split_qkv(grouped_qkv)
        if self.config.qk_layernorm:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rope is not None and cos_sin is not None and not is_rotated_by_split:
            q, k = (apply_rotary_embedding(y, cos_sin, rope.interleaved) for y in (q, k))
        if context.prefix is not None:
            k, v = context.prefix.replace_kv(k, v, self.layer)
        if context.batch.recorded_kv is not None:
            context.batch.recorded_kv[self.layer] = k, v
        if context.batch.context is not None:
            earlier_k, earlier_v = context.batch.context.kv_by_layer[self.layer]
            k, v = torch.cat([k, earlier_k]), torch.cat([v, earlier_v])
        return q, k, v

    def _core_attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None
    ) -> Tensor:
        options, p = self.core_attention.options, self.config.attention_dropout
        attend = self.backend.attend
        saves_only_inputs = self.backend.saves_only_inputs
        if batch.dropout is not None and p:
            saves_only_inputs = False
            attend = partial(
                unfused_attention,
                dropout=AttentionDropout(p, partial(self._attention_dropout_mask, batch.dropout)),
            )
        if self.recompute.recomputes_core_attention and not saves_only_inputs:
            return checkpointed(attend, q, k, v, batch, kv, options)
        return attend(q, k, v, batch, kv, options)

    def _attention_dropout_mask(
        self, dropout: Dropout, sequence: int, shape: tuple[int, int], like: Tensor
    ) -> Tensor:
        """Return the dropout masks (heads, queries, keys) of this rank's heads.

        The global number of a head selects its mask, so the masks do not depend on the number of
        tensor ranks.
        """
        heads = self.config.num_attention_heads // self.mesh.tp
        first_head = self.mesh.tp_rank * heads
        p = self.config.attention_dropout
        return torch.stack(
            [
                dropout.keep_mask(shape, p, (self.layer, 3, sequence, first_head + head), like)
                for head in range(heads)
            ]
        )


def _split_qkv(grouped_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split (T, G, H / G + 2, D) into queries (T, H, D), keys (T, G, D) and values (T, G, D).

    This rank has H query heads and G KV heads. In training the three outputs are copies instead of
    views, so that autograd can free each one before the others.
    """
    if grouped_qkv.requires_grad and torch.is_grad_enabled():
        qkv = _SplitQkv.apply(grouped_qkv)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor, Tensor], qkv)
    tokens, d = len(grouped_qkv), grouped_qkv.shape[-1]
    queries = grouped_qkv[:, :, :-2].reshape(tokens, -1, d)
    return queries, grouped_qkv[:, :, -2], grouped_qkv[:, :, -1]


class _SplitQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, d = len(grouped_qkv), grouped_qkv.shape[-1]
        views = grouped_qkv[:, :, :-2], grouped_qkv[:, :, -2], grouped_qkv[:, :, -1]
        q, k, v = (view.clone(memory_format=torch.contiguous_format) for view in views)
        return q.view(tokens, -1, d), k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        dq, dk, dv = grads
        dq = dq.reshape(len(dk), dk.shape[1], -1, dk.shape[-1])
        return torch.cat([dq, dk.unsqueeze(2), dv.unsqueeze(2)], dim=2)
