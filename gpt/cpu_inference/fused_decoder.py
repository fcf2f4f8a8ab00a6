"""Fused CPU decoder: all layers of a model in one call of the C library per step.

With few rows, the overhead of one call per GEMM would exceed the time of the GEMMs. The decoder
supports models with packed weights on one tensor rank, with a bf16 KV pool. Layers may be mixtures
of experts, and may differ in windows, rotary embeddings and KV groups. Sequences with bottleneck
adapters are computed by the layers of gpt/model, apart from the others of the step. Tests compare
the decoder with these layers.
"""

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.attention.paged import DECODE_TOKENS_MAX, AttentionShape, cached_plan
from gpt.batch import Batch
from gpt.config import GPTConfig, RopeConfig
from gpt.cpu.kernels import (
    HEAD_DIM_MAX,
    INT,
    KEEP_GIL_ELEMENTS_MAX,
    POINTER,
    PrefillAttention,
    has_prefill_attention,
    library,
    library_keeping_gil,
)
from gpt.cpu.packed_adapter import PackedTerms, adapter_of_each_row, pack_adapter
from gpt.cpu.packed_linear import (
    AdaptedLinear,
    CpuNorm,
    NormArgs,
    PackedWeight,
    activation_code,
)
from gpt.cpu_inference.batch_split import select_sequences, sequences_of_rows
from gpt.linear import cpu_experts
from gpt.linear.cpu_linear import CpuLinear, make_norm
from gpt.linear_adapter import AdaptedRows, HostAllocator, LinearTerm, ModelAdapter
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.model.activation import packed_activation_name
from gpt.model.adapted_linear import has_bottleneck
from gpt.model.attention_layer import PrefixKV
from gpt.model.decoder import DecoderLayer
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear
from gpt.model.mlp import MLP
from gpt.model.moe import MoELayer
from gpt.model.norm import Norm
from gpt.model.rotary_embedding import compute_rotary_cos_sin


class _LayerRecord(ctypes.Structure):
    """The struct DecoderLayer of gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        ("norm", NormArgs),
        ("qkv", PackedWeight),
        ("qkv_bias", POINTER),
        ("q_norm", NormArgs),
        ("k_norm", NormArgs),
        ("proj", PackedWeight),
        ("proj_bias", POINTER),
        ("mlp_norm", NormArgs),
        ("moe", POINTER),
        ("first_expert_linear", INT),
        ("fc1", PackedWeight),
        ("fc1_bias", POINTER),
        ("fc2", PackedWeight),
        ("fc2_bias", POINTER),
        ("sinks", POINTER),
    )


class _LayerRangeRecord(ctypes.Structure):
    """The struct LayerRange of gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        *((name, INT) for name in ("layers", "hidden", "groups", "queries", "width", "ffn")),
        *((name, INT) for name in ("activation", "parallel_residual")),
        ("alibi_slopes", POINTER),
        ("layer_array", POINTER),
    )


class LayerKind(ctypes.Structure):
    """The struct LayerKind of gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        *((name, INT) for name in ("rotary_dim", "interleaved")),
        *((name, POINTER) for name in ("cos", "sin", "blocks", "decode", "prefill")),
    )


class _StepArgs(ctypes.Structure):
    """The struct StepArgs of gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        ("rows", INT),
        ("threads", INT),
        *((name, POINTER) for name in ("x", "memory", "kinds", "layer_kinds", "layer_pools")),
        ("offsets", POINTER),
        ("block_tokens", INT),
        ("output_rows", POINTER),
        ("output_count", INT),
        ("adapter_count", INT),
        *((name, POINTER) for name in ("adapters", "row_adapters", "output_row_adapters")),
        ("expert_adapters", POINTER),
    )


class _RangeLinears(NamedTuple):
    """The linears of a layer range, in the orders in which the library has an adapter's terms."""

    dense: Sequence[Linear | None]  # Those of `_linears`, of each layer.
    experts: Sequence[Linear]

    def by_name(self) -> dict[str, Linear]:
        linears = [linear for linear in self.dense if linear is not None]
        return {linear.name: linear for linear in (*linears, *self.experts)}


class _FusedAdapter(Mapping[str, Sequence[LinearTerm]]):
    """An adapter with the C library's arguments for the linears of a layer range."""

    def __init__(
        self,
        terms: Mapping[str, PackedTerms],
        bottlenecks: Mapping[str, Sequence[LinearTerm]],
        linears: _RangeLinears,
    ) -> None:
        """`bottlenecks`: terms that the library does not compute."""
        self._terms = {name: [packed] for name, packed in terms.items()}
        self._bottlenecks = bottlenecks
        self._experts = linears.experts
        self.has_bottlenecks = bool(bottlenecks)
        self.args = cpu_experts.adapted_linears(linears.dense, self._terms)

    # Not before a step needs them: an adapter of many experts is written in many pieces.
    @cached_property
    def expert_args(self) -> "ctypes.Array[AdaptedLinear] | None":
        """The arguments for the linears of experts; None: the adapter changes none."""
        if not any(LOCAL_EXPERTS in name for name in self._terms):
            return None
        return cpu_experts.adapted_linears(self._experts, self._terms)

    def __getitem__(self, linear: str) -> Sequence[LinearTerm]:
        bottlenecks = self._bottlenecks.get(linear)
        return self._terms[linear] if bottlenecks is None else bottlenecks

    def __iter__(self) -> Iterator[str]:
        yield from self._terms
        yield from self._bottlenecks

    def __len__(self) -> int:
        return len(self._terms) + len(self._bottlenecks)


def _has_bottlenecks(adapter: ModelAdapter) -> bool:
    if isinstance(adapter, _FusedAdapter):
        return adapter.has_bottlenecks
    return any(has_bottleneck(adapter, linear) for linear in adapter)


class _StepAdapters:
    """The adapters of a step, for the C library."""

    def __init__(
        self,
        adapters: Sequence[_FusedAdapter],
        adapted_rows: Sequence[AdaptedRows],
        rows: int,
        unchanged_experts: "ctypes.Array[AdaptedLinear]",
    ) -> None:
        """`unchanged_experts`: the experts' linears of an adapter that does not change them."""
        self._adapters = adapters
        self.pointers = (POINTER * len(adapters))(
            *(ctypes.addressof(adapter.args) for adapter in adapters)
        )
        self.row_adapters = adapter_of_each_row([x.rows for x in adapted_rows], rows)
        self._output_row_adapters: Tensor | None = None
        self._expert_pointers: ctypes.Array[ctypes.c_void_p] | None = None
        if any(adapter.expert_args is not None for adapter in adapters):
            self._expert_pointers = (POINTER * len(adapters))(
                *(
                    ctypes.addressof(adapter.expert_args or unchanged_experts)
                    for adapter in adapters
                )
            )

    def set_args(self, args: _StepArgs, output_rows: Tensor | None) -> None:
        """Set the fields of `args`, which are valid only while this object exists."""
        args.adapter_count = len(self._adapters)
        args.adapters = ctypes.addressof(self.pointers)
        args.row_adapters = self.row_adapters.data_ptr()
        if self._expert_pointers is not None:
            args.expert_adapters = ctypes.addressof(self._expert_pointers)
        if output_rows is not None:
            self._output_row_adapters = self.row_adapters[output_rows]
            args.output_row_adapters = self._output_row_adapters.data_ptr()


class _PoolLayers:
    """The layers of a KV pool for the library.

    `kinds`: the different (window, rotary embedding, KV group) of the layers.
    """

    def __init__(self, config: GPTConfig, layers: range, kv: KVPool) -> None:
        keys = [
            (config.layers[layer].window_size, config.layers[layer].rope, kv.group(layer))
            for layer in layers
        ]
        self.kinds = list(dict.fromkeys(keys))
        self.layer_kinds = (INT * len(keys))(*map(self.kinds.index, keys))
        addresses = (kv.layer(layer).data_ptr() for layer in layers)
        self.layer_pools = (POINTER * len(keys))(*addresses)
        self._kv = weakref.ref(kv)

    def belong_to(self, kv: KVPool) -> bool:
        return self._kv() is kv


class FusedDecoder:
    """Decoder backend that runs the layers of a model with packed weights in the C library.

    Batches without a KV pool, and batches that the library does not support, are passed to
    `LayerwiseDecoder`.
    """

    def __init__(self, model: GPT) -> None:
        self.config = model.config
        self._layerwise = model.layerwise_decoder()
        self._layers = model.layers
        self._linears = _RangeLinears(
            [linear for layer in model.decoder_layers for linear in _linears(layer)],
            [
                linear
                for layer in model.decoder_layers
                if isinstance(layer.mlp, MoELayer)
                for linear in cpu_experts.expert_linears(layer.mlp.local_experts)
            ],
        )
        self._linears_by_name = self._linears.by_name()
        self._unchanged_experts = (AdaptedLinear * len(self._linears.experts))()
        self._is_last_stage = model.is_last_stage
        # The objects whose addresses are in the ctypes structs. These references keep the memory of
        # the objects allocated.
        self._references: list[object] = []
        self._scratch = torch.empty(0, dtype=torch.bfloat16)
        self._alibi_slopes: Tensor | None = None
        self._pool_layers: _PoolLayers | None = None  # Of the pool of the last step.
        self._weight_elements = 0  # Number of elements of all packed weights.
        self._expert_linears = 0  # Number of linears of the experts of the layers so far.
        self._layer_range = self._make_layer_range(
            [self._make_layer(layer) for layer in model.decoder_layers]
        )

    @staticmethod
    def supports_config(config: GPTConfig) -> bool:
        """Return whether the library supports the layers of a model with this configuration."""
        unsupported_width = config.kv_channels % 2 or config.kv_channels > HEAD_DIM_MAX
        unsupported_router = config.num_experts and config.hidden_size % 2
        # The library has norms in front of the linears only.
        has_common_layers = (
            config.norm_placement == "pre"
            and not (config.qk_layernorm and config.qk_layernorm_scope != "head")
            and not config.softmax_scale
            and not config.query_scaling_beta
            and config.residual_multiplier == 1.0
            and packed_activation_name(config) is not None
        )
        return not unsupported_width and not unsupported_router and has_common_layers

    def forward(
        self, x: Tensor, batch: Batch, kv: KVPool | None, prefix: PrefixKV | None
    ) -> Tensor:
        """Return the hidden states (T, hidden) after the layers; the input `x` is overwritten.

        `DecoderBackend.forward` says which rows are valid.
        """
        if kv is None or not self._supports_batch(batch):
            return self._layerwise.forward(x, batch, kv, prefix)
        assert prefix is None, "with a KV pool, a prefix is in the pool, not in a PrefixKV"
        bottlenecks = self._sequences_with_bottlenecks(batch) if batch.adapted_rows else set()
        if bottlenecks:
            return self._run_apart(x, batch, kv, bottlenecks)
        return self._run(x, batch, kv)

    def prepare_adapter(
        self, adapter: ModelAdapter, prepared: ModelAdapter, allocate: HostAllocator | None
    ) -> ModelAdapter:
        return self._fused_adapter(dict(prepared) | dict(adapter), allocate)

    def _fused_adapter(
        self, adapter: ModelAdapter, allocate: HostAllocator | None = None
    ) -> _FusedAdapter:
        if isinstance(adapter, _FusedAdapter):
            return adapter
        bottlenecks = {
            name: _packed_linear(self._linears_by_name[name]).prepare_terms(terms, torch.bfloat16)
            for name, terms in adapter.items()
            if terms[0].bottleneck is not None
        }
        products = {
            name: (terms, _packed_linear(self._linears_by_name[name]).packed.weight_args)
            for name, terms in adapter.items()
            if name not in bottlenecks
        }
        return _FusedAdapter(pack_adapter(products, allocate), bottlenecks, self._linears)

    def _sequences_with_bottlenecks(self, batch: Batch) -> set[int]:
        return {
            sequence
            for adapted in batch.adapted_rows
            if _has_bottlenecks(adapted.adapter)
            for sequence in sequences_of_rows(batch, adapted.rows)
        }

    def _run_apart(self, x: Tensor, batch: Batch, kv: KVPool, bottlenecks: set[int]) -> Tensor:
        """Run the layers of gpt/model for some sequences, and the library for the others.

        The others then have the same values, bit for bit, as in a step of their own.
        """
        prepared = (
            replace(adapted, adapter=self._fused_adapter(adapted.adapter))
            for adapted in batch.adapted_rows
        )
        batch = replace(batch, adapted_rows=tuple(prepared))
        others = [n for n in range(len(batch.query_lengths)) if n not in bottlenecks]
        if not others:
            return self._layerwise.forward(x, batch, kv, None)
        own_batch, rows = select_sequences(batch, sorted(bottlenecks))
        y = self._layerwise.forward(x[rows], own_batch, kv, None)
        other_batch, other_rows = select_sequences(batch, others)
        other_y = self._run(x[other_rows], other_batch, kv)
        return x.index_copy(0, rows, y).index_copy_(0, other_rows, other_y)

    def _supports_batch(self, batch: Batch) -> bool:
        """Return whether the library has the attention kernel for the batch's query lengths."""
        # Without the prefill kernel, which needs AVX512-bf16, the decode kernel must compute the
        # batch. gpt/attention/paged.py plans the decode kernel only for sequences of at most
        # DECODE_TOKENS_MAX new tokens.
        return has_prefill_attention() or max(batch.query_lengths) <= DECODE_TOKENS_MAX

    def _run(self, x: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        x = x.contiguous()
        assert kv.layer(self._layers[0]).dtype == x.dtype
        if self._pool_layers is None or not self._pool_layers.belong_to(kv):
            self._pool_layers = _PoolLayers(self.config, self._layers, kv)
        pool_layers = self._pool_layers
        kinds, _references = self._layer_kinds(pool_layers, x, batch, kv)
        lib = (
            library_keeping_gil()
            if self._weight_elements * batch.tokens <= KEEP_GIL_ELEMENTS_MAX
            else library()
        )
        assert lib is not None and batch.slot_mapping is not None
        block_offsets = batch.slot_mapping[1].contiguous()
        step_args = _StepArgs(
            rows=batch.tokens,
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            kinds=ctypes.addressof(kinds),
            layer_kinds=ctypes.addressof(pool_layers.layer_kinds),
            layer_pools=ctypes.addressof(pool_layers.layer_pools),
            offsets=block_offsets.data_ptr(),
            block_tokens=kv.block_tokens,
        )
        output_rows = batch.logit_rows if self._is_last_stage else None
        if output_rows is not None and len(output_rows) < batch.tokens:
            output_rows = output_rows.contiguous()
            step_args.output_rows = output_rows.data_ptr()
            step_args.output_count = len(output_rows)
        step_args.memory = self._scratch_address(lib, batch.tokens)
        if batch.adapted_rows:
            adapters = [self._fused_adapter(adapted.adapter) for adapted in batch.adapted_rows]
            step_adapters = _StepAdapters(
                adapters, batch.adapted_rows, batch.tokens, self._unchanged_experts
            )
            step_adapters.set_args(step_args, output_rows)
        if lib.preamble_decoder_layers(ctypes.byref(self._layer_range), ctypes.byref(step_args)):
            raise RuntimeError("the C library does not support the number of channels per head")
        return x

    def _layer_kinds(
        self, pool_layers: _PoolLayers, x: Tensor, batch: Batch, kv: KVPool
    ) -> tuple["ctypes.Array[LayerKind]", list[object]]:
        """Return the step's arguments by kind of layer, and the objects that keep them valid."""
        config, layer_kv = self.config, kv.layer(self._layers[0])
        cos_sin: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        kinds = (LayerKind * len(pool_layers.kinds))()
        references: list[object] = [cos_sin]
        for kind, (window, rope, group) in zip(kinds, pool_layers.kinds, strict=True):
            group_batch = batch.in_group(group) if batch.other_groups else batch
            shape = AttentionShape(
                config.num_attention_heads,
                config.num_query_groups,
                kv.block_tokens,
                window,
                config.position_embedding_type == "alibi",
            )
            plan = cached_plan(group_batch, shape, x[:, : config.kv_channels], layer_kv)
            assert group_batch.slot_mapping is not None and not plan.groups
            blocks = group_batch.slot_mapping[0].contiguous()
            references += [plan, blocks]
            kind.blocks = blocks.data_ptr()
            for kernel in plan.native:
                address = ctypes.addressof(kernel.ctypes_args(config.num_attention_heads, layer_kv))
                if isinstance(kernel, PrefillAttention):
                    kind.prefill = address
                else:
                    kind.decode = address
            if rope is None:
                continue
            if rope not in cos_sin:
                cos_sin[rope] = compute_rotary_cos_sin(
                    rope, config.kv_channels, batch.positions, torch.float32
                )
            kind.rotary_dim = rope.rotary_dim(config.kv_channels)
            kind.interleaved = rope.interleaved
            kind.cos, kind.sin = (tensor.data_ptr() for tensor in cos_sin[rope])
        return kinds, references

    def _scratch_address(self, lib: ctypes.CDLL, rows: int) -> int:
        elements = lib.preamble_decoder_scratch_numel(ctypes.byref(self._layer_range), rows)
        if len(self._scratch) < elements:
            self._scratch = torch.empty(elements, dtype=torch.bfloat16)
        return self._scratch.data_ptr()

    def _make_layer_range(self, records: list[_LayerRecord]) -> _LayerRangeRecord:
        config = self.config
        record_array = (_LayerRecord * len(records))(*records)
        self._references.append(record_array)
        return _LayerRangeRecord(
            layers=len(records),
            hidden=config.hidden_size,
            groups=config.num_query_groups,
            queries=config.num_attention_heads // config.num_query_groups,
            width=config.kv_channels,
            ffn=config.ffn_hidden_size,
            activation=activation_code(packed_activation_name(config), gated=config.gated),
            parallel_residual=config.parallel_residual,
            alibi_slopes=self._float_pointer(self._alibi_slopes),
            layer_array=ctypes.addressof(record_array),
        )

    def _make_layer(self, layer: DecoderLayer) -> _LayerRecord:
        attention = layer.self_attention
        options = attention.core_attention.options
        self._alibi_slopes = options.alibi_slopes  # Equal in all layers.
        record = _LayerRecord(sinks=self._float_pointer(options.sinks))
        record.norm = self._norm_record(_packed_linear(attention.linear_qkv).norm)
        record.qkv, record.qkv_bias = self._weight_record(attention.linear_qkv)
        if self.config.qk_layernorm:
            q_norm, k_norm = attention.q_layernorm, attention.k_layernorm
            assert isinstance(q_norm, Norm) and isinstance(k_norm, Norm)
            record.q_norm = self._norm_record(make_norm(q_norm))
            record.k_norm = self._norm_record(make_norm(k_norm))
        record.proj, record.proj_bias = self._weight_record(attention.linear_proj)
        if isinstance(layer.mlp, MLP):
            record.mlp_norm = self._norm_record(_packed_linear(layer.mlp.linear_fc1).norm)
            record.fc1, record.fc1_bias = self._weight_record(layer.mlp.linear_fc1)
            record.fc2, record.fc2_bias = self._weight_record(layer.mlp.linear_fc2)
        else:
            assert layer.pre_mlp_layernorm is not None
            record.mlp_norm = self._norm_record(make_norm(layer.pre_mlp_layernorm))
            record.moe = self._moe_pointer(layer.mlp)
            record.first_expert_linear = self._expert_linears
            self._expert_linears += 2 * len(layer.mlp.local_experts)
        return record

    def _moe_pointer(self, layer: MoELayer) -> int:
        """Return the address of the layer's arguments, which live as long as this object."""
        args, references = cpu_experts.layer_args(layer)
        self._references += [args, *references]
        linears = (module for module in layer.modules() if isinstance(module, Linear))
        self._weight_elements += sum(_packed_linear(linear).packed.numel for linear in linears)
        return ctypes.addressof(args)

    def _float_pointer(self, x: Tensor | None) -> int | None:
        """Return the address of an fp32 copy of `x`, which lives as long as this object."""
        if x is None:
            return None
        copy = x.detach().float().contiguous()
        self._references.append(copy)
        return copy.data_ptr()

    def _norm_record(self, norm: CpuNorm | None) -> NormArgs:
        assert norm is not None, "the linear has no norm in front"
        self._references.append(norm)
        return norm.norm_args

    def _weight_record(self, linear: Linear) -> tuple[PackedWeight, int | None]:
        packed = _packed_linear(linear).packed
        self._references.append(packed)
        self._weight_elements += packed.numel
        return packed.weight_args, None if linear.bias is None else linear.bias.data_ptr()


def _linears(layer: DecoderLayer) -> list[Linear | None]:
    """Return the linears in the order of the enum LayerLinear in C; without those of experts."""
    attention = [layer.self_attention.linear_qkv, layer.self_attention.linear_proj]
    mlp = layer.mlp if isinstance(layer.mlp, MLP) else layer.mlp.shared_experts
    return [*attention, *((None, None) if mlp is None else (mlp.linear_fc1, mlp.linear_fc2))]


def _packed_linear(linear: Linear) -> CpuLinear:
    assert isinstance(linear.backend, CpuLinear), "the weights are not packed"
    return linear.backend
