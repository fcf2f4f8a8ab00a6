"""NeMo 1 export of bottleneck adapters: Houlsby's `adapter_1` and `adapter_2` of each layer.

NeMo has one size and one position of the norm for all of them, and both adapters in each layer that
has one. Smaller sizes and missing adapters are filled with zeros, which have no effect.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.import_nemo_linears import BOTTLENECK_MODULES, NORM_POSITIONS, NORM_TYPES
from gpt.bottleneck_adapter import Bottleneck
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.parallel.weight_sharding import LAYERS_PREFIX, layer_number

# By layer and NeMo's module.
NemoBottlenecks = Mapping[tuple[int, str], Bottleneck]


def has_bottlenecks(adapter: Adapter) -> bool:
    return any(linear.bottleneck is not None for linear in adapter.linears.values())


def uniform_bottlenecks(adapter: Adapter, config: GPTConfig, tp: int) -> NemoBottlenecks:
    """Return both adapters of all changed layers, of one size that is a multiple of `tp`."""
    name = adapter.card.name
    by_key = {
        key: linear.bottleneck
        for key, linear in adapter.linears.items()
        if linear.bottleneck is not None
    }
    positions = {tuple(_norm_positions(bottleneck)) for bottleneck in by_key.values()}
    if len(by_key) < len(adapter.linears) or len(positions) > 1 or len(min(positions)) > 1:
        raise AdapterError(
            f"adapter {name!r} has bottlenecks and other changes, or norms at different positions, "
            "which a .nemo file of NeMo 1 cannot express; train bottlenecks alone"
        )
    layers = sorted({layer_number(key) or 0 for key in by_key})
    with_experts = next((layer for layer in layers if config.layers[layer].has_experts), None)
    if with_experts is not None:
        raise AdapterError(
            f"adapter {name!r} has a bottleneck in layer {with_experts}, which has experts, and "
            "NeMo has one behind the experts too; serve it with Preamble"
        )
    first = next(iter(by_key.values()))
    size = -(-max(len(bottleneck.down) for bottleneck in by_key.values()) // tp) * tp
    no_effect = _without_effect(first)
    return {
        (layer, module): _with_size(by_key.get(f"{LAYERS_PREFIX}{layer}.{linear}", no_effect), size)
        for layer in layers
        for module, (linear, _) in BOTTLENECK_MODULES.items()
    }


def _norm_positions(bottleneck: Bottleneck) -> Iterator[str]:
    for position in NORM_POSITIONS:
        if getattr(bottleneck, f"{position}_norm_weight") is not None:
            yield position


def _without_effect(like: Bottleneck) -> Bottleneck:
    tensors: dict[str, Any] = {
        name: torch.ones_like(value) if name.endswith("norm_weight") else torch.zeros_like(value)
        for name, value in vars(like).items()
        if isinstance(value, Tensor)
    }
    return Bottleneck(**tensors)


def _with_size(bottleneck: Bottleneck, size: int) -> Bottleneck:
    """Return the bottleneck with zeros up to this size."""
    padding = size - len(bottleneck.down)
    tensors = dict(vars(bottleneck))
    tensors["down"] = F.pad(bottleneck.down, (0, 0, 0, padding))
    tensors["up"] = F.pad(bottleneck.up, (0, padding))
    return Bottleneck(**tensors)


def bottleneck_tuning(bottlenecks: NemoBottlenecks) -> dict[str, Any]:
    """Return the fields of NeMo's `adapter_tuning`."""
    first = next(iter(bottlenecks.values()))
    return {
        "type": "parallel_adapter",
        "adapter_dim": len(first.down),
        "adapter_dropout": 0.0,
        "norm_position": next(_norm_positions(first), None),
        "norm_type": NORM_TYPES[0],
        "column_init_method": "xavier",
        "row_init_method": "zero",
        "weight_tying": False,
        "position_embedding_strategy": None,
    }


def bottleneck_state(
    bottlenecks: NemoBottlenecks, rank: int, tp: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys and shards of a tensor rank, each with a part of the inner channels."""
    for (layer, module), bottleneck in bottlenecks.items():
        prefix = f"model.{LAYERS_PREFIX}{layer}.adapter_layer.{module}"
        yield f"{prefix}.linear_in.weight", bottleneck.down.chunk(tp)[rank].clone()
        yield f"{prefix}.linear_out.weight", bottleneck.up.chunk(tp, 1)[rank].clone()
        for position in _norm_positions(bottleneck):
            for leaf in ("weight", "bias"):
                norm = getattr(bottleneck, f"{position}_norm_{leaf}")
                yield f"{prefix}.layer_norm.{leaf}", norm.clone()
