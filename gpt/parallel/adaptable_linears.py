"""Linears that an adapter can change: their shapes, parts, and sizes on a tensor rank.

Derived from the sharding table (`gpt.parallel.weight_sharding`). `gpt.parallel.adapter_sharding`
shards adapters by it, and `gpt.costs.linear_adapter` counts their sizes. The module does not import
torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from gpt.config import GPTConfig
from gpt.linear_parts import GATED_PARTS, QKV_PARTS, split_key
from gpt.parallel.weight_sharding import (
    ParameterSpec,
    ShardRule,
    ShardSpec,
    expert_number,
    layer_number,
    local_kv_heads,
    parameter_specs,
    shard_spec,
)

ADAPTABLE_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# The name of the linears of all experts of a layer is this prefix and their module.
EXPERTS_PREFIX = "experts."
# Alignment of the tensors of an adapter in the memory of a server.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class AdaptableLinear:
    """A linear of the model that an adapter can change."""

    name: str
    out_features: int
    in_features: int
    rule: ShardRule

    @property
    def module(self) -> str:
        """The last part of the name: one of ADAPTABLE_LINEARS."""
        return self.name.rpartition(".")[2]

    @property
    def expert(self) -> int | None:
        """The number of the expert; None for other linears, also for those of a shared expert."""
        return expert_number(self.name)

    @property
    def target(self) -> str:
        """The name by which settings select this linear: `linear_fc1`, `experts.linear_fc1`.

        The linears of dense MLPs and of shared experts have the same name.
        """
        return self.module if self.expert is None else EXPERTS_PREFIX + self.module

    def selected_parts(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return the parts that `targets` select ("": the whole linear); empty: none.

        Without targets, all linears but those of experts are selected.
        """
        if not targets:
            return ("",) if self.expert is None else ()
        return tuple(part for name, part in map(split_key, targets) if name == self.target)

    @property
    def is_row_parallel(self) -> bool:
        return self.rule is ShardRule.COLUMNS

    @property
    def ends_block(self) -> bool:
        """Whether its output is that of attention or of a dense MLP: the place of a bottleneck."""
        return self.is_row_parallel and "experts." not in self.name

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that an adapter can change separately; empty for a linear that is not fused."""
        return {ShardRule.QKV: QKV_PARTS, ShardRule.GATED: GATED_PARTS}.get(self.rule, ())

    @property
    def _weight(self) -> ParameterSpec:
        shape = (self.out_features, self.in_features)
        return ParameterSpec(f"{self.name}.weight", shape, self.rule)

    def shard(self, config: GPTConfig, rank: int, tp: int) -> ShardSpec:
        """Return the base weight's shard on rank `rank` of the `tp` ranks that share the linear."""
        return shard_spec(self._weight, config, rank, tp)

    def local_inputs(self, config: GPTConfig, tp: int) -> int:
        """Return the number of input channels that a tensor rank multiplies."""
        return self.shard(config, 0, tp).size if self.is_row_parallel else self.in_features

    def local_outputs(self, part: str, config: GPTConfig, tp: int) -> int:
        """Return the number of output columns of a part ("": of the linear) on a tensor rank."""
        if self.is_row_parallel:
            return self.out_features
        columns = self.shard(config, 0, tp).size
        if not part:
            return columns
        if self.rule is ShardRule.GATED:
            return columns // 2
        keys = local_kv_heads(config, tp) * config.kv_channels
        return columns - 2 * keys if part == "query" else keys


# A model may have tens of thousands of experts' linears.
@lru_cache(maxsize=16)
def adaptable_linears(config: GPTConfig) -> Mapping[str, AdaptableLinear]:
    """Return the linears that an adapter can change, by name, in forward-pass order."""
    linears = {}
    for parameter in parameter_specs(config).values():
        name, _, leaf = parameter.name.rpartition(".")
        is_adaptable = layer_number(name) is not None and name.endswith(ADAPTABLE_LINEARS)
        if leaf == "weight" and is_adaptable:
            out_features, in_features = parameter.shape
            linears[name] = AdaptableLinear(name, out_features, in_features, parameter.shard_rule)
    return MappingProxyType(linears)


def aligned_bytes(nbytes: int) -> int:
    """Return `nbytes`, rounded up to the alignment of tensors in a server's memory."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
