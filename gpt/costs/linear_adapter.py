"""Costs of adapters (LoRA, aLoRA, DoRA, IA3, bottlenecks): numbers, bytes, FLOPs, activations.

All sizes are computed from the table of adaptable linears, by which adapters are also sharded
(`gpt.parallel.adapter_sharding`), so they equal those of the tensors. The module does not import
torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, prod
from typing import Literal

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.linear_parts import split_key
from gpt.parallel.adaptable_linears import (
    ADAPTABLE_LINEARS,
    AdaptableLinear,
    adaptable_linears,
    aligned_bytes,
)
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import RankInStage, layer_number
from gpt.settings import suggest_nearest

LinearMethod = Literal["lora", "alora", "dora", "ia3", "bottleneck"]
METHODS: tuple[LinearMethod, ...] = ("lora", "alora", "dora", "ia3", "bottleneck")
RANK_MAX = 512
BOTTLENECK_LINEARS = ("linear_proj", "linear_fc2")
# The dtype in which an adapter is trained and stored: fp32.
VALUE_BYTES = 4


@dataclass(frozen=True)
class LinearAdapterSpec:
    """The adapter weights that `preamble tune` trains with these settings."""

    method: LinearMethod = "lora"
    # Of the low-rank product of each linear, or of each part; or the size of a bottleneck. IA3 has
    # none.
    rank: int = 16
    # The linears, or parts of fused linears, such as linear_qkv.query or experts.linear_fc1; empty:
    # all linears except those of experts. Bottlenecks are behind attention and behind dense MLPs.
    targets: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()  # Numbered from 0; empty: all layers.

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}; {suggest_nearest(self.method, METHODS)}")
        if not 1 <= self.rank <= RANK_MAX:
            raise ConfigError(f"rank is {self.rank}; it must be from 1 to {RANK_MAX}")


@dataclass(frozen=True)
class LinearAdapterCost:
    """The costs of an adapter's changes in some layers, on one tensor rank."""

    trained: int = 0  # Trained numbers.
    # The trained numbers that all tensor ranks hold, and whose gradients are summed over them: A of
    # column-parallel and B of row-parallel linears.
    replicated: int = 0
    stored: int = 0  # Numbers in the adapter file; with DoRA, the norms of the weights too.
    flops_per_token: int = 0  # Of the low-rank products in a forward pass.
    # FLOPs and bytes of a training step, besides those of its tokens: the norms of the changed
    # weights, which are read in 16 bits, and written and read in fp32.
    step_flops: int = 0
    step_bytes: int = 0
    # Bytes that the low-rank products and the scales read and write per token of 16-bit
    # activations.
    forward_bytes_per_token: int = 0
    backward_bytes_per_token: int = 0
    # Numbers that training keeps for the backward pass per token: the inputs of the linears, the
    # low-rank activations, and the outputs before a scale.
    activations_per_token: int = 0
    # Those of them that are the outputs of attention, which flash attention keeps anyway.
    attention_outputs_per_token: int = 0

    def __add__(self, other: "LinearAdapterCost") -> "LinearAdapterCost":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return LinearAdapterCost(**sums)


@dataclass(frozen=True)
class _AdaptedPart:
    """A changed linear, or a changed part of it ("": the whole linear)."""

    linear: AdaptableLinear
    part: str

    def shapes(
        self, spec: LinearAdapterSpec, config: GPTConfig, tp: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors on a tensor rank, by the fields of LinearAdapter."""
        inputs = self.linear.local_inputs(config, tp)
        outputs = self.linear.local_outputs(self.part, config, tp)
        if spec.method == "bottleneck":
            return {
                "bottleneck_down": (spec.rank, outputs),
                "bottleneck_up": (outputs, spec.rank),
                "bottleneck_pre_norm_weight": (outputs,),
                "bottleneck_pre_norm_bias": (outputs,),
            }
        if spec.method == "ia3":
            if self.linear.module == "linear_fc2":
                return {"input_scale": (inputs,)}
            return {"output_scale": (outputs,)}
        shapes: dict[str, tuple[int, ...]] = {
            "lora_a": (spec.rank, inputs),
            "lora_b": (outputs, spec.rank),
        }
        if spec.method == "dora":
            shapes |= {"magnitude": (outputs,), "weight_norm": (outputs,)}
        return shapes

    def cost(self, spec: LinearAdapterSpec, config: GPTConfig, tp: int) -> LinearAdapterCost:
        shapes = self.shapes(spec, config, tp)
        if spec.method == "bottleneck":
            return self._bottleneck_cost(spec.rank, shapes, tp)
        inputs = self.linear.local_inputs(config, tp)
        outputs = self.linear.local_outputs(self.part, config, tp)
        numbers = {name: prod(shape) for name, shape in shapes.items()}
        low_rank = numbers.get("lora_a", 0) + numbers.get("lora_b", 0)
        rank = spec.rank if low_rank else 0
        replicated = numbers.get("lora_b" if self.linear.is_row_parallel else "lora_a", 0)
        # The forward pass of a low-rank product reads x, and reads and writes y; the backward pass
        # reads dy twice and x, and reads and writes dx. A scale of y reads and writes it, and its
        # gradient reads dy and y.
        scaled = outputs if spec.method == "dora" or "output_scale" in shapes else 0
        scaled += inputs if "input_scale" in shapes else 0
        has_low_rank, has_norm = bool(low_rank), spec.method == "dora"
        return LinearAdapterCost(
            trained=sum(numbers.values()) - numbers.get("weight_norm", 0),
            replicated=replicated if tp > 1 else 0,
            stored=sum(numbers.values()),
            flops_per_token=2 * low_rank,
            step_flops=has_norm * 2 * rank * (inputs * outputs + rank * (inputs + outputs)),
            step_bytes=has_norm * 10 * inputs * outputs,
            forward_bytes_per_token=2 * (has_low_rank * (inputs + 2 * outputs) + 2 * scaled),
            backward_bytes_per_token=2 * (has_low_rank * (3 * inputs + 2 * outputs) + 4 * scaled),
            activations_per_token=rank,
        )

    def _bottleneck_cost(
        self, size: int, shapes: Mapping[str, tuple[int, ...]], tp: int
    ) -> LinearAdapterCost:
        """Return the cost of a network, which each tensor rank has whole.

        Without sequence parallelism each rank computes all tokens, and no gradient is summed over
        the ranks; with it, a rank computes its own tokens. The cost is that of either without the
        other's saving.
        """
        numbers, hidden = sum(map(prod, shapes.values())), self.linear.out_features
        # The forward pass reads y twice and the normed y, writes that, the output of `up` and the
        # sum, and reads the output of `up`.
        forward_bytes = 2 * (7 * hidden + 4 * size)
        return LinearAdapterCost(
            trained=numbers,
            replicated=numbers if tp > 1 else 0,
            stored=numbers,
            flops_per_token=4 * size * hidden,
            forward_bytes_per_token=forward_bytes,
            backward_bytes_per_token=2 * forward_bytes,
            activations_per_token=2 * (hidden + size),
        )


def _adapted_parts(config: GPTConfig, spec: LinearAdapterSpec) -> Iterator[_AdaptedPart]:
    layers = set(spec.layers or range(config.num_layers))
    for linear in adaptable_linears(config).values():
        if layer_number(linear.name) not in layers:
            continue
        if spec.method == "bottleneck" and not linear.ends_block:
            continue
        # All experts of a layer have equal costs.
        if not linear.expert:
            for part in linear.selected_parts(spec.targets):
                yield _AdaptedPart(linear, part)


def check_spec(config: GPTConfig, spec: LinearAdapterSpec) -> None:
    """Raise ConfigError if the model does not have the linears or layers of the adapter."""
    last_layer = max(spec.layers, default=0)
    if last_layer >= config.num_layers:
        raise ConfigError(
            f"the adapter changes layer {last_layer}, but the model has {config.num_layers} "
            "layers, numbered from 0"
        )
    linears = adaptable_linears(config).values()
    target_choices = {linear.target for linear in linears}
    target_choices |= {f"{linear.target}.{part}" for linear in linears for part in linear.parts}
    for target in spec.targets:
        if target not in target_choices:
            raise ConfigError(
                f"the adapter changes {target}, which this model does not have; choose among: "
                f"{', '.join(sorted(target_choices))}"
            )
    for target in spec.targets:
        linear, part = split_key(target)
        if part and linear in spec.targets:
            raise ConfigError(
                f"the adapter changes {linear} and its part {target}; remove one of them"
            )
        if spec.method == "bottleneck" and target not in BOTTLENECK_LINEARS:
            raise ConfigError(
                f"the adapter has a bottleneck of {target}; it must be one of "
                f"{', '.join(BOTTLENECK_LINEARS)}"
            )
    if not any(_adapted_parts(config, spec)):
        raise ConfigError(
            "the adapter changes no linear of this model: its layers have none of the targets"
        )


@lru_cache(maxsize=64)
def _layer_costs(
    config: GPTConfig, spec: LinearAdapterSpec, tp: int, ep: int = 1
) -> Mapping[int, LinearAdapterCost]:
    """Return the costs by layer; layers that are not changed are absent."""
    expert_tp = RankInStage(0, tp, ep).expert_tp
    costs: dict[int, LinearAdapterCost] = {}
    parts: dict[str, list[_AdaptedPart]] = {}
    for part in _adapted_parts(config, spec):
        parts.setdefault(part.linear.name, []).append(part)
    for name, linear_parts in parts.items():
        layer = layer_number(name)
        assert layer is not None
        linear = linear_parts[0].linear
        ranks = tp if linear.expert is None else expert_tp
        cost = _activation_cost(linear, spec, config, ranks)
        cost = sum((part.cost(spec, config, ranks) for part in linear_parts), cost)
        if linear.expert is not None:
            cost = _cost_of_experts(cost, config, ep)
        costs[layer] = costs.get(layer, LinearAdapterCost()) + cost
    return costs


def _cost_of_experts(cost: LinearAdapterCost, config: GPTConfig, ep: int) -> LinearAdapterCost:
    """Return the costs of all experts of a layer on a rank, from those of one expert.

    A token is computed by some experts only; on average, each rank has an equal share of them.
    """
    experts = config.num_experts // ep
    factors = {
        name: Fraction(config.moe_router_topk, ep) if name.endswith("_per_token") else experts
        for name in vars(cost)
    }
    return LinearAdapterCost(
        **{name: ceil(value * factors[name]) for name, value in vars(cost).items()}
    )


def _activation_cost(
    linear: AdaptableLinear, spec: LinearAdapterSpec, config: GPTConfig, tp: int
) -> LinearAdapterCost:
    """Return what training keeps once for a linear, however many of its parts are changed."""
    if spec.method == "bottleneck":
        return LinearAdapterCost()
    inputs, outputs = linear.local_inputs(config, tp), linear.local_outputs("", config, tp)
    has_input = spec.method != "ia3" or linear.module == "linear_fc2"
    has_output = spec.method == "dora" or not has_input
    return LinearAdapterCost(
        activations_per_token=has_input * inputs + has_output * outputs,
        attention_outputs_per_token=inputs if has_input and linear.module == "linear_proj" else 0,
    )


def linear_adapter_cost(
    config: GPTConfig,
    spec: LinearAdapterSpec,
    layers: Iterable[int] | None = None,
    *,
    tp: int = 1,
    ep: int = 1,
) -> LinearAdapterCost:
    """Return the costs on a tensor rank in these layers; None: in all layers.

    All ranks have equal costs.
    """
    by_layer = _layer_costs(config, spec, tp, ep)
    chosen = by_layer if layers is None else [layer for layer in layers if layer in by_layer]
    return sum((by_layer[layer] for layer in chosen), LinearAdapterCost())


def lowest_layer(config: GPTConfig, spec: LinearAdapterSpec) -> int:
    """Return the lowest changed layer; training computes nothing backward below it."""
    return min(_layer_costs(config, spec, 1))


@lru_cache(maxsize=256)
def stage_costs(
    config: GPTConfig, spec: LinearAdapterSpec, tp: int, pp: int, vpp: int = 1, ep: int = 1
) -> tuple[LinearAdapterCost, ...]:
    """Return the costs on a tensor rank of each pipeline stage."""
    return tuple(
        linear_adapter_cost(
            config, spec, [layer for chunk in chunks for layer in chunk], tp=tp, ep=ep
        )
        for chunks in stage_layers(config.num_layers, pp, vpp=vpp)
    )


@lru_cache(maxsize=256)
def served_bytes(
    config: GPTConfig, spec: LinearAdapterSpec, tp: int, pp: int, itemsize: int, ep: int = 1
) -> int:
    """Return the bytes of an adapter in the adapter memory of the rank that needs the most.

    `itemsize`: the bytes of an element in memory. Of a magnitude and a norm, a server keeps the
    quotient.
    """
    layer_bytes: dict[int, int] = {}
    expert_tp = RankInStage(0, tp, ep).expert_tp
    for part in _adapted_parts(config, spec):
        layer = layer_number(part.linear.name)
        assert layer is not None
        is_expert = part.linear.expert is not None
        shapes = part.shapes(spec, config, expert_tp if is_expert else tp)
        part_bytes = sum(
            aligned_bytes(prod(shape) * itemsize)
            for name, shape in shapes.items()
            if name != "weight_norm"
        )
        count = config.num_experts // ep if is_expert else 1
        layer_bytes[layer] = layer_bytes.get(layer, 0) + count * part_bytes
    stages = stage_layers(config.num_layers, pp)
    return max(
        sum(layer_bytes.get(layer, 0) for chunk in chunks for layer in chunk) for chunks in stages
    )


def describe_spec(spec: LinearAdapterSpec) -> str:
    """Return the method, rank and targets as text, such as "LoRA of rank 16 on all linears"."""
    if spec.method == "bottleneck":
        blocks = " and ".join(spec.targets or BOTTLENECK_LINEARS)
        layers = f" of {len(spec.layers)} layers" if spec.layers else ""
        return f"bottlenecks of size {spec.rank} behind {blocks}{layers}"
    name = {"lora": "LoRA", "alora": "activated LoRA", "dora": "DoRA", "ia3": "IA3"}[spec.method]
    rank = "" if spec.method == "ia3" else f" of rank {spec.rank}"
    is_everything = not spec.targets or set(spec.targets) == set(ADAPTABLE_LINEARS)
    targets = "all linears" if is_everything else ", ".join(spec.targets)
    layers = f" of {len(spec.layers)} layers" if spec.layers else ""
    return f"{name}{rank} on {targets}{layers}"
