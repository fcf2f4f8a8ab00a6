"""The layers of a GPT, each holding this rank's part and named as checkpoints name it.

A module is written for any split: what enters a column-split linear and what leaves a row-split one
goes through `gpt.parallel.mesh`, which knows whether rows are shared out. Parameters are allocated
by the table in `gpt.parallel.sharding` and filled by `gpt.model.loading`; nothing here has an
initial value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.attention.paged import KV, Attend, Store, ragged, store
from gpt.attention.varlen import Drop, unfused
from gpt.batch import Batch, Dropout
from gpt.config import GPTConfig, RopeScaling
from gpt.cpu import training_kernels
from gpt.cpu.packed_linear import GATED
from gpt.model.activation_checkpointing import Recompute, again, from_inputs
from gpt.parallel.mesh import Mesh, enter, leave, linear_of_gathered, scatter_rows, total
from gpt.parallel.sharding import Parameter, kept_dtype, local_groups, parameters, part

# A product of rows with a weight that was brought into another form: rows, bias, the name of an
# activation, what to add at the end. See gpt/backends/cpu_packing.py.
Product = Callable[[Tensor, Tensor | None, str | None, Tensor | None], Tensor]
Normed = Callable[[Tensor, str | None], Tensor]  # With the norm and the bias: rows, an activation.
Ending = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # A sum, the bias, what both add to.

PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


def _gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


# What a linear can end with. A gate multiplies its own half of the columns.
ACTIVATIONS = PLAIN_ACTIVATIONS | {
    f"{GATED}{name}": partial(from_inputs, partial(_gated, activation))
    for name, activation in PLAIN_ACTIVATIONS.items()
}


@dataclass(frozen=True)
class Build:
    """What every layer needs to be made: the network, this rank's place, and how to allocate."""

    config: GPTConfig
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    attend: Attend
    recompute: Recompute
    store: Store = store

    @cached_property
    def table(self) -> dict[str, list[Parameter]]:
        """The model's parameters by the module that holds them."""
        table: dict[str, list[Parameter]] = {}
        for name, parameter in parameters(self.config).items():
            table.setdefault(name.rpartition(".")[0], []).append(parameter)
        return table

    def fill(self, module: nn.Module, name: str) -> None:
        """Give `module` the parameters that the table lists under its name, this rank's part."""
        for parameter in self.table[name]:
            leaf = parameter.name.rpartition(".")[2]
            held = part(parameter, self.config, self.mesh.tp_rank, self.mesh.tp)
            dtype = kept_dtype(parameter.name, str(self.dtype).removeprefix("torch."))
            shape = held.shape(parameter.shape)
            memory = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            module.register_parameter(leaf, nn.Parameter(memory))


@dataclass(frozen=True)
class Prefix:
    """Keys and values that are learned, instead of those that virtual tokens would have.

    They are as a cache would hold them: no norm and no rotation comes after. Training only; when
    they are served they lie in the pool before anything is computed.
    """

    layers: Mapping[int, Tensor]  # Of each layer, (virtual tokens, 2, G, D): this rank's groups.
    places: Tensor  # Flat rows of the batch that are virtual tokens,
    rows: Tensor  # and which of the learned ones each is.

    def instead(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        learned = self.layers[layer].index_select(0, self.rows).to(k.dtype)
        keys, values = learned.unbind(1)
        return k.index_copy(0, self.places, keys), v.index_copy(0, self.places, values)


@dataclass(frozen=True)
class Step:
    """What all layers of one pass share: the batch, and the rotation of its positions."""

    batch: Batch
    rotation: tuple[Tensor, Tensor] | None  # cos and sin, (T, rotary channels / 2)
    rows: Tensor | None = None  # Of the last layer: whose output is read; None: everybody's.
    prefix: Prefix | None = None


@dataclass(frozen=True)
class Onto:
    """What half a block adds its output to, and the dropout before that."""

    x: Tensor
    drop: Callable[[Tensor], Tensor] | None

    def add(self, y: Tensor) -> Tensor:
        return self.x + (y if self.drop is None else self.drop(y))


class Norm(nn.Module):
    """LayerNorm or RMSNorm, computed in at least fp32."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        self.config = build.config
        build.fill(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.config)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, config: GPTConfig) -> Tensor:
    """Torch computes in fp32 within; only a scale beside one needs more digits than bf16 has."""
    if config.layernorm_zero_centered_gamma:
        return from_inputs(partial(_normalize_around_one, config=config), x, weight, bias)
    if config.normalization == "RMSNorm":
        # On a CPU autograd would keep what lies between, in fp32.
        return from_inputs(partial(_normalize, config=config), x, weight, bias)
    return _normalize(x, weight, bias, config)


def _normalize_around_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: GPTConfig
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(wide)
    return _normalize(x.to(wide), weight.to(wide) + 1, shift, config).to(x.dtype)


def _normalize(x: Tensor, scale: Tensor, shift: Tensor | None, config: GPTConfig) -> Tensor:
    shape, epsilon = (x.shape[-1],), config.layernorm_epsilon
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, shape, scale, epsilon)
    return F.layer_norm(x, shape, scale, shift, epsilon)


class Linear(nn.Module):
    """A weight and perhaps a bias; the product may be another's, who holds the weight then."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        self.product: Product | None = None

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if self.product is not None:
            return self.product(x, bias, activation, residual)
        known = activation in training_kernels.ACTIVATIONS
        if known and training_kernels.multiplies(x, self.weight):
            return training_kernels.multiply(x, self.weight, bias, activation, residual)
        y = F.linear(x, self.weight, bias)
        if activation is not None:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else residual + y


class ColumnLinear(Linear):
    """Rows of the weight are shared out: each rank makes its own columns of the output.

    If the checkpoint fuses a norm in front of it, that norm is this module's first step.
    """

    layer_norm_weight: Tensor | None
    layer_norm_bias: Tensor | None

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        for absent in ("layer_norm_weight", "layer_norm_bias"):
            self.register_parameter(absent, None)
        self.whole: Normed | None = None
        self.config, self.mesh = build.config, build.mesh
        build.fill(self, name)

    def forward(self, x: Tensor, tokens: int, activation: str | None = None) -> Tensor:
        if self.whole is not None:
            return self.whole(x, activation)
        if self.layer_norm_weight is not None:
            x = normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config)
        learns = torch.is_grad_enabled() and self.product is None  # Else there is no weight here.
        if learns and self.mesh.sequence_parallel and self.weight.requires_grad:
            y = linear_of_gathered(x, self.weight, self.bias, self.mesh, tokens)
            return y if activation is None else ACTIVATIONS[activation](y)
        return self.split(enter(x, self.mesh, tokens), activation)

    def split(self, x: Tensor, activation: str | None = None) -> Tensor:
        """The linear alone, of rows that have entered already."""
        return self.multiply(x, self.bias, activation)


class RowLinear(Linear):
    """Columns of the weight are shared out: the ranks' outputs add up."""

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        self.ending: Ending | None = None
        self.mesh = build.mesh
        build.fill(self, name)

    def forward(self, x: Tensor, onto: Onto | None = None) -> Tensor:
        if self.ending is not None and onto is not None and onto.drop is None:
            return self.ending(leave(self.partial(x), self.mesh), self.bias, onto.x)
        if self.mesh.tp == 1:
            if onto is None or onto.drop is None:
                return self.multiply(x, self.bias, residual=None if onto is None else onto.x)
            return onto.add(self.multiply(x, self.bias))
        y = leave(self.partial(x), self.mesh)
        y = y if self.bias is None else y + self.bias
        return y if onto is None else onto.add(y)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's summand, without the bias."""
        return self.multiply(x)


class Embedding(nn.Module):
    """Token ids to hidden states; ids at or above the vocabulary are rows of an adapter's table.

    This is the one seam where virtual tokens enter. They get positions like any token.
    """

    def __init__(self, build: Build, *, positions: bool) -> None:
        super().__init__()
        self.config, self.mesh = build.config, build.mesh
        self.word_embeddings = nn.Module()
        build.fill(self.word_embeddings, "embedding.word_embeddings")
        self.position_embeddings: nn.Module | None = None
        if positions and self.config.learned_positions:
            self.position_embeddings = nn.Module()
            build.fill(self.position_embeddings, "embedding.position_embeddings")

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the embedding matrix, which a tied head reads too."""
        return cast(Tensor, self.word_embeddings.weight)

    def forward(self, ids: Tensor, batch: Batch, table: Tensor | None) -> Tensor:
        x = self.words(ids, table)
        if self.position_embeddings is not None:
            x = x + F.embedding(batch.positions, cast(Tensor, self.position_embeddings.weight))
        x = scatter_rows(x, self.mesh)
        return drop_hidden(x, self.config, self.mesh, batch, (0, 0))

    def words(self, ids: Tensor, table: Tensor | None = None) -> Tensor:
        """Without positions, all rows."""
        if table is None and self.mesh.tp == 1:
            return F.embedding(ids, self.rows)
        virtual = ids >= self.config.vocab_size
        start = self.mesh.tp_rank * self.rows.shape[0]
        local = ids - start
        elsewhere = (local < 0) | (local >= self.rows.shape[0]) | virtual
        x = F.embedding(local.masked_fill(elsewhere, 0), self.rows)
        x = total(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.mesh)
        if table is not None and torch.is_grad_enabled():
            places = virtual.nonzero().squeeze(-1)
            x = x.index_put((places,), table[ids[places] - self.config.vocab_size].to(x.dtype))
        elif table is not None:  # To count them would wait for the device.
            rows = table.index_select(0, (ids - self.config.vocab_size).clamp_min(0))
            x = torch.where(virtual.unsqueeze(-1), rows.to(x.dtype), x)
        return x


class Attention(nn.Module):
    """Queries of this rank's heads over the keys and values of its groups."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        name = f"decoder.layers.{layer}.self_attention"
        self.layer = layer
        self.config, self.mesh = build.config, build.mesh
        self.attend, self.store = build.attend, build.store
        self.recompute = build.recompute
        self.groups = local_groups(build.config, build.mesh.tp)
        self.linear_qkv = ColumnLinear(build, f"{name}.linear_qkv")
        self.linear_proj = RowLinear(build, f"{name}.linear_proj")
        if build.config.qk_layernorm:
            self.q_layernorm = Norm(build, f"{name}.q_layernorm")
            self.k_layernorm = Norm(build, f"{name}.k_layernorm")

    def forward(self, x: Tensor, step: Step, kv: KV | None, onto: Onto | None = None) -> Tensor:
        batch, d = step.batch, self.config.kv_channels
        qkv = self.linear_qkv(x, batch.tokens)
        grouped = qkv.view(batch.tokens, self.groups, -1, d)  # (T, G, queries + 2, D)
        q, k, v = _apart(grouped)
        if self.config.qk_layernorm:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if step.rotation is not None:
            q, k = (rotate(y, step.rotation, self.config.rotary_interleaved) for y in (q, k))
        if step.prefix is not None:
            k, v = step.prefix.instead(k, v, self.layer)
        if kv is not None:
            self.store(k, v, batch, kv)
        y = self._core(q, k, v, batch, kv)
        if step.rows is not None:
            y = y.index_select(0, step.rows)
        return cast(Tensor, self.linear_proj(y.flatten(1), onto))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None) -> Tensor:
        window, p = self.config.window_size, self.config.attention_dropout
        attend = self.attend
        if batch.dropout is not None and p:
            attend = partial(unfused, drop=Drop(p, partial(self._keep, batch.dropout)))
        if self.recompute.core and attend is not ragged:  # Which keeps no more than this would.
            return again(attend, q, k, v, batch, kv, window)
        return attend(q, k, v, batch, kv, window)

    def _keep(
        self, dropout: Dropout, sequence: int, shape: tuple[int, int], like: Tensor
    ) -> Tensor:
        """Masks of probabilities (heads, queries, keys), drawn head by head by global number."""
        heads = self.config.num_attention_heads // self.mesh.tp
        first = self.mesh.tp_rank * heads
        p = self.config.attention_dropout
        return torch.stack(
            [
                dropout.keep(shape, p, (self.layer, 3, sequence, first + head), like)
                for head in range(heads)
            ]
        )


def _apart(grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each in its own memory where what is kept of them counts."""
    if grouped.requires_grad and torch.is_grad_enabled():
        parts = _Apart.apply(grouped)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor, Tensor], parts)
    tokens, d = len(grouped), grouped.shape[-1]
    return grouped[:, :, :-2].reshape(tokens, -1, d), grouped[:, :, -2], grouped[:, :, -1]


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, d = len(grouped), grouped.shape[-1]
        parts = grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]
        q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return q.view(tokens, -1, d), k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        dq, dk, dv = grads
        dq = dq.reshape(len(dk), dk.shape[1], -1, dk.shape[-1])
        return torch.cat([dq, dk.unsqueeze(2), dv.unsqueeze(2)], dim=2)


class MLP(nn.Module):
    """fc1, the activation (gating if the network does), fc2."""

    def __init__(self, build: Build, name: str) -> None:
        super().__init__()
        self.config = build.config
        self.linear_fc1 = ColumnLinear(build, f"{name}.linear_fc1")
        self.linear_fc2 = RowLinear(build, f"{name}.linear_fc2")

    def forward(self, x: Tensor, tokens: int, onto: Onto | None = None) -> Tensor:
        y = self.linear_fc1(x, tokens, activation_of(self.config))
        return cast(Tensor, self.linear_fc2(y, onto))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's summand for rows that have entered; as one of several experts."""
        y = self.linear_fc1.split(x, activation_of(self.config))
        return self.linear_fc2.partial(y)


def activation_of(config: GPTConfig) -> str:
    """The name of what fc1 ends with."""
    return GATED * config.gated + config.activation


def drop_hidden(
    x: Tensor, config: GPTConfig, mesh: Mesh, batch: Batch, site: tuple[int, int]
) -> Tensor:
    """Dropout on hidden states: the mask of all rows is drawn, then cut as the rows are."""
    p = config.hidden_dropout
    if batch.dropout is None or not p:
        return x
    keep = batch.dropout.keep((batch.tokens, x.shape[1]), p, site, x)
    return x * scatter_rows(keep, mesh) / (1 - p)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Turn the first channels of each head by their position's angles; x is (T, heads, D)."""
    cos, sin = (part.unsqueeze(1).to(x.dtype) for part in rotation)
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rotation(config: GPTConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, computed in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, config.rotary_channels, 2, device=positions.device).to(wide)
    frequencies = config.rotary_base ** -(exponents / config.rotary_channels)
    if config.rope_scaling is not None:
        frequencies = stretch(frequencies, config.rope_scaling)
    angles = torch.outer(positions.to(wide), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Lower the frequencies for a longer context: all alike, or by llama3's rule the low ones."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return slow + (frequencies - slow) * blend
