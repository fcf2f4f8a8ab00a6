"""All layers of a step in one call of the library in C: what gpt/model/layers.py does, row for row.

For few rows it costs more to ask for each product than to make it. A stretch is layers that the
library does by itself; of a layer of experts that is attention, the rest stays with the module.
Only models whose weights lie in panels are walked, by one tensor rank, over a pool of bf16.
"""

import ctypes

import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.attention.paged import SHORT_TOKENS, Shape, planned
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.cpu.kernels import (
    BRIEF_NUMBERS,
    INT,
    POINTER,
    WIDTH_MAX,
    Paged,
    Runs,
    attends_prompts,
    brief,
    library,
)
from gpt.cpu.packed_linear import Norm, NormRecord, Panels, Weight, number
from gpt.model.gpt_model import GPT, Block
from gpt.model.layers import MLP, ColumnLinear, Linear, Step, activation_of, rotation
from gpt.model.layers import Norm as NormLayer
from gpt.model.moe import Experts


class _Layer(ctypes.Structure):
    """As in gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        *(("norm", NormRecord), ("qkv", Weight), ("qkv_bias", POINTER)),
        *(("of_queries", NormRecord), ("of_keys", NormRecord)),
        *(("proj", Weight), ("proj_bias", POINTER)),
        *(("of_mlp", NormRecord), ("fc1", Weight), ("fc1_bias", POINTER)),
        *(("fc2", Weight), ("fc2_bias", POINTER), ("place", INT)),
    )


class _Stretch(ctypes.Structure):
    """As in gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        *((name, INT) for name in ("layers", "hidden", "groups", "queries", "width", "ffn")),
        *((name, INT) for name in ("activation", "parallel", "turned", "interleaved")),
        ("each", POINTER),
    )


class _Pass(ctypes.Structure):
    """As in gpt/cpu/src/decoder_layers.c."""

    _fields_ = (
        *(("rows", INT), ("threads", INT)),
        *((name, POINTER) for name in ("x", "memory", "cos", "sin", "blocks", "places")),
        *(("block_tokens", INT), ("pool", POINTER), ("layer_bytes", INT)),
        *(("singles", POINTER), ("runs", POINTER)),
        *(("asked", POINTER), ("count", INT)),
    )


class Walk:
    """The layers of a packed model, for `GPT.hidden` to call."""

    def __init__(self, model: GPT) -> None:
        self.config, self._layers, self._last = model.config, model.layers, model.last
        self._kept: list[object] = []  # Numbers whose addresses the library is given.
        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self._numbers = 0  # Of all weights.
        self._stretches: list[tuple[_Stretch, Block | None]] = []
        layers: list[_Layer] = []
        for place, block in enumerate(model.blocks):
            layers.append(self._layer(block, place))
            experts = isinstance(block.mlp, Experts)
            if experts or place == len(model.blocks) - 1:
                self._stretches.append((self._stretch(layers), block if experts else None))
                layers = []

    @staticmethod
    def fits(config: GPTConfig) -> bool:
        """Whether such layers can be walked, if their weights lie in panels."""
        odd = config.kv_channels % 2 or config.kv_channels > WIDTH_MAX
        apart = config.parallel_residual and config.num_experts  # Experts would read what is gone.
        return not odd and not apart

    def takes(self, batch: Batch) -> bool:
        """Whether the library can attend to all of a batch: to prompts not on every machine."""
        return attends_prompts() or max(batch.lengths) <= SHORT_TOKENS

    def __call__(self, x: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        """Hidden states (T, hidden) after all layers; those that come in are spoilt.

        In the last layer it saves what is not read, as `GPT.hidden` says.
        """
        config, x = self.config, x.contiguous()
        first = kv.layer(self._layers[0])
        layer_bytes = first.numel() * first.element_size()
        assert first.dtype == x.dtype
        assert kv.layer(self._layers[-1]).data_ptr() == first.data_ptr() + layer_bytes * (
            len(self._layers) - 1
        )
        shape = Shape(
            config.num_attention_heads, config.num_query_groups, kv.block_tokens, config.window_size
        )
        plan = planned(batch, shape, x[:, : config.kv_channels], first)
        assert batch.slots is not None and not plan.groups
        turns = [] if not config.rotary else rotation(config, batch.positions, torch.float32)
        found = brief() if self._numbers * batch.tokens <= BRIEF_NUMBERS else library()
        assert found is not None
        blocks, places = (one.contiguous() for one in batch.slots)
        records = {type(one): one.plan(config.num_attention_heads, first) for one in plan.native}
        singles, runs = (records.get(kind) for kind in (Paged, Runs))
        step = _Pass(
            rows=batch.tokens,
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            blocks=blocks.data_ptr(),
            places=places.data_ptr(),
            block_tokens=kv.block_tokens,
            pool=first.data_ptr(),
            layer_bytes=layer_bytes,
            singles=None if singles is None else ctypes.addressof(singles),
            runs=None if runs is None else ctypes.addressof(runs),
        )
        if config.rotary:
            step.cos, step.sin = (one.data_ptr() for one in turns)
        rows = batch.rows if self._last else None
        for stretch, block in self._stretches:
            ends = block is None and stretch is self._stretches[-1][0]
            if ends and rows is not None and len(rows) < batch.tokens:
                rows = rows.contiguous()
                step.asked, step.count = rows.data_ptr(), len(rows)
            step.memory = self._room(found, stretch, batch.tokens)
            if found.preamble_layers(ctypes.byref(stretch), ctypes.byref(step)):
                raise RuntimeError("the library was asked for heads that it does not serve")
            if block is not None:
                x = block.finish(x, x, Step(batch, None)).contiguous()
                step.x = x.data_ptr()
        return x

    def _room(self, found: ctypes.CDLL, stretch: _Stretch, rows: int) -> int:
        numbers = found.preamble_layers_numbers(ctypes.byref(stretch), rows)
        if len(self._memory) < numbers:
            self._memory = torch.empty(numbers, dtype=torch.bfloat16)
        return self._memory.data_ptr()

    def _stretch(self, layers: list[_Layer]) -> _Stretch:
        config = self.config
        each = (_Layer * len(layers))(*layers)
        self._kept.append(each)
        return _Stretch(
            layers=len(layers),
            hidden=config.hidden_size,
            groups=config.num_query_groups,
            queries=config.num_attention_heads // config.num_query_groups,
            width=config.kv_channels,
            ffn=config.ffn_hidden_size,
            activation=number(activation_of(config), gated=config.gated),
            parallel=config.parallel_residual,
            turned=config.rotary_channels if config.rotary else 0,
            interleaved=config.rotary_interleaved,
            each=ctypes.addressof(each),
        )

    def _layer(self, block: Block, place: int) -> _Layer:
        attention = block.self_attention
        layer = _Layer(place=place)
        layer.norm = self._norm(norm_before(attention.linear_qkv))
        layer.qkv, layer.qkv_bias = self._product(attention.linear_qkv)
        if self.config.qk_layernorm:
            layer.of_queries = self._norm(norm_of(attention.q_layernorm))
            layer.of_keys = self._norm(norm_of(attention.k_layernorm))
        layer.proj, layer.proj_bias = self._product(attention.linear_proj)
        if isinstance(block.mlp, MLP):
            layer.of_mlp = self._norm(norm_before(block.mlp.linear_fc1))
            layer.fc1, layer.fc1_bias = self._product(block.mlp.linear_fc1)
            layer.fc2, layer.fc2_bias = self._product(block.mlp.linear_fc2)
        return layer

    def _norm(self, norm: Norm | None) -> NormRecord:
        assert norm is not None, "in front of every dense linear stands a norm"
        self._kept.append(norm)
        return norm.record

    def _product(self, linear: Linear) -> tuple[Weight, int | None]:
        assert isinstance(linear.product, Panels)
        self._kept.append(linear.product)
        self._numbers += linear.product.numbers
        return linear.product.record, None if linear.bias is None else linear.bias.data_ptr()


def norm_before(module: ColumnLinear) -> Norm | None:
    """The norm that is a linear's first step."""
    scale, shift = module.layer_norm_weight, module.layer_norm_bias
    return None if scale is None else _norm(scale, shift, module.config)


def norm_of(module: NormLayer) -> Norm:
    return _norm(module.weight, module.bias, module.config)


def _norm(scale: Tensor, shift: Tensor | None, config: GPTConfig) -> Norm:
    if config.layernorm_zero_centered_gamma:
        scale = scale.float() + 1
    rms = config.normalization == "RMSNorm"
    return Norm(scale, None if rms else shift, config.layernorm_epsilon, rms=rms)
