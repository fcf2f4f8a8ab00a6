"""Decoder: the transformer layers of one pipeline stage, and the interface of decoder backends.

`LayerwiseDecoder` runs the layers one after another. It is the default backend, and the reference
with which tests compare the other decoder backends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from gpt.attention.kv_cache import KVPool
from gpt.attention.paged import KV
from gpt.batch import Batch
from gpt.config import GPTConfig, RopeConfig
from gpt.linear_adapter import HostAllocator, ModelAdapter
from gpt.model.activation_checkpointing import RecomputePolicy, checkpointed
from gpt.model.attention_layer import Attention, ForwardContext, PrefixKV
from gpt.model.build_context import BuildContext
from gpt.model.linear import Linear
from gpt.model.mlp import MLP
from gpt.model.moe import MoELayer
from gpt.model.norm import Norm
from gpt.model.residual_dropout import Residual, apply_hidden_dropout
from gpt.model.rotary_embedding import compute_rotary_cos_sin, rope_configs
from gpt.parallel.mesh import Mesh


class DecoderBackend(Protocol):
    """Runs all layers of a stage."""

    def forward(
        self, x: Tensor, batch: Batch, kv: KVPool | None, prefix: PrefixKV | None
    ) -> Tensor:
        """Return the hidden states after the layers; the input `x` may be overwritten.

        The last layer of the model may compute only the rows in `batch.logit_rows`, because the LM
        head reads no other rows. The result then contains:

        - without a KV pool: only the rows in `logit_rows`.
        - with a KV pool: all rows, but only the values of the rows in `logit_rows` are defined.
        """

    def prepare_adapter(
        self, adapter: ModelAdapter, prepared: ModelAdapter, allocate: HostAllocator | None
    ) -> ModelAdapter:
        """Return a copy of an adapter that `forward` reads fastest.

        `prepared`: other linears of the adapter, which were prepared before; the result has them.
        `allocate` may be used for the copies, once.
        """


class DecoderLayer(nn.Module):
    """Attention and an MLP (dense or mixture of experts), each with a residual connection."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = build.config
        self.mesh = build.mesh
        self.self_attention = Attention(build, layer)
        self.pre_mlp_layernorm: Norm | None = None
        self.mlp: MLP | MoELayer
        if build.config.layers[layer].has_experts:
            self.pre_mlp_layernorm = Norm(build, f"decoder.layers.{layer}.pre_mlp_layernorm")
            self.mlp = MoELayer(build, layer)
        else:
            self.mlp = MLP(build, f"decoder.layers.{layer}.mlp")

    def forward(self, x: Tensor, context: ForwardContext, kv: KV | None) -> Tensor:
        residual = x if context.output_rows is None else x.index_select(0, context.output_rows)
        after_attention = cast(
            Tensor, self.self_attention(x, context, kv, self._residual(residual, context, 1))
        )
        return self.forward_mlp(
            residual if self.config.parallel_residual else after_attention, after_attention, context
        )

    def forward_mlp(self, x: Tensor, residual: Tensor, context: ForwardContext) -> Tensor:
        """Run the MLP sublayer: return the MLP output of `x`, added to `residual`."""
        if self.pre_mlp_layernorm is not None:
            x = self.pre_mlp_layernorm(x)
        mlp_residual = self._residual(residual, context, 2)
        tokens, adapters = context.batch.tokens, context.output_adapters
        return cast(Tensor, self.mlp(x, tokens, mlp_residual, adapters))

    def _residual(self, x: Tensor, context: ForwardContext, sublayer: int) -> Residual:
        """Return the residual connection of a sublayer: 1 is attention, 2 is the MLP."""
        multiplier = self.config.residual_multiplier
        if context.batch.dropout is None:
            return Residual(x, None, multiplier)
        site = (self.layer, sublayer)
        return Residual(
            x,
            lambda y: apply_hidden_dropout(y, self.config, self.mesh, context.batch, site),
            multiplier,
        )


class LayerwiseDecoder:
    """Decoder backend that runs the layers one after another, in training and in inference.

    `rotary_tables`: cos and sin of all positions (gpt/model/rotary_embedding.py) for each rotary
    embedding of the stage's layers, for an attention backend that transforms queries and keys.
    Empty: the layers apply the rotary embedding in torch.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        recompute: RecomputePolicy,
        *,
        is_last_stage: bool,
        rotary_tables: Mapping[RopeConfig, Tensor],
    ) -> None:
        self._layers = layers
        self._config = config
        self._mesh = mesh
        self._dtype = dtype
        self._recompute = recompute
        self._is_last_stage = is_last_stage
        self._rotary_tables = rotary_tables
        self._ropes = rope_configs(config, [layer.layer for layer in layers])

    def forward(
        self, x: Tensor, batch: Batch, kv: KVPool | None, prefix: PrefixKV | None
    ) -> Tensor:
        context = self._forward_context(batch, kv, prefix)
        for index, layer in enumerate(self._layers):
            layer_kv = None if kv is None else kv.layer(layer.layer)
            if kv is not None and batch.other_groups:
                context = replace(context, batch=batch.in_group(kv.group(layer.layer)))
            if index == len(self._layers) - 1 and self._selects_rows_early(batch, kv):
                context = context.with_output_rows(batch.logit_rows)
            y = (
                checkpointed(layer, x, context, layer_kv)
                if self._recompute.recomputes_layer(index)
                else layer(x, context, layer_kv)
            )
            keeps_other_rows = context.output_rows is not None and kv is not None
            x = x.index_copy(0, cast(Tensor, context.output_rows), y) if keeps_other_rows else y
        return x

    def prepare_adapter(
        self, adapter: ModelAdapter, prepared: ModelAdapter, allocate: HostAllocator | None
    ) -> ModelAdapter:
        linears = {
            module.name: module
            for layer in self._layers
            for module in layer.modules()
            if isinstance(module, Linear)
        }
        return dict(prepared) | {
            name: linears[name].backend.prepare_terms(terms, self._dtype)
            for name, terms in adapter.items()
        }

    def _forward_context(
        self, batch: Batch, kv: KVPool | None, prefix: PrefixKV | None
    ) -> ForwardContext:
        tables, query_factors = self._rotary_tables, self._query_factors(batch.positions)
        # The backend stores the transformed keys in the KV pool, so it cannot replace keys by those
        # of a prefix. It must not read beyond the end of a table.
        is_transformable = kv is not None and prefix is None
        if tables and is_transformable:
            position_count = min(map(len, tables.values()))
            if max(batch.context_lengths) <= position_count:
                return ForwardContext(batch, rotary_tables=tables, query_factors=query_factors)
        cos_sin = {
            rope: compute_rotary_cos_sin(
                rope, self._config.kv_channels, batch.positions, self._dtype
            )
            for rope in self._ropes
        }
        return ForwardContext(batch, cos_sin, prefix=prefix, query_factors=query_factors)

    def _query_factors(self, positions: Tensor) -> Tensor | None:
        """Return the factor of each token's query, (T, 1, 1); None if the model has no factors."""
        beta, length = self._config.query_scaling_beta, self._config.query_scaling_length
        if not beta:
            return None
        compute_dtype = torch.promote_types(self._dtype, torch.float32)
        factors = 1 + beta * torch.log1p((positions // length).to(compute_dtype))
        return factors.to(self._dtype).view(-1, 1, 1)

    def _selects_rows_early(self, batch: Batch, kv: KVPool | None) -> bool:
        """Return whether the last layer computes only `logit_rows` after its attention core."""
        # Sequence parallelism splits all rows, and dropout masks are drawn for all rows.
        needs_all_rows = self._mesh.sequence_parallel or batch.dropout is not None
        # In fp16 the last layer's keys can overflow although its inputs are finite. The server
        # checks the output of every row for such an overflow, before other sequences can read the
        # row's KV block, so no row may be left out.
        may_overflow = kv is not None and self._dtype == torch.float16
        # How many of the rows have a bottleneck is not known without a wait for the device.
        kernels = batch.adapter_kernels
        needs_all_rows |= kernels is not None and bool(kernels.bottlenecks)
        is_subset = batch.logit_rows is not None and len(batch.logit_rows) < batch.tokens
        return self._is_last_stage and is_subset and not needs_all_rows and not may_overflow
