"""Random adapter weights, and models whose weights contain them."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import AdaptedRows, LinearAdapter
from gpt.linear_parts import split_key
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import linear_keys, part_rows, shard_adapter

METHODS = ("lora", "dora", "ia3")
# Bottlenecks with a norm in front, behind, and without a norm.
BOTTLENECKS = ("bottleneck", "bottleneck-post", "bottleneck-plain")
DENSE_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EXPERT_TARGETS = ("experts.linear_fc1", "experts.linear_fc2")
# A Llama-like network, for adapters of NeMo and Megatron-Bridge.
GATED = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=48,
    vocab_size=96,
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    dtype="float32",
)


def random_linears(
    config: GPTConfig,
    method: str = "lora",
    *,
    rank: int = 3,
    seed: int = 0,
    targets: Sequence[str] = (*DENSE_TARGETS, *EXPERT_TARGETS),
    by_parts: bool = False,
    strength: float = 1.0,
) -> dict[str, LinearAdapter]:
    """Changes of all linears that `targets` name, about as large as the weights.

    Bottlenecks, of the size `rank`, are of linear_proj and linear_fc2 alone.

    `by_parts`: the parts of fused linears are changed separately, the first with a larger rank, and
    the last not at all.
    """
    changes = {}
    for linear in adaptable_linears(config).values():
        if linear.target not in targets:
            continue
        if method in BOTTLENECKS and not linear.ends_block:
            continue
        keys: tuple[str, ...] = (linear.name,)
        if by_parts and linear.parts:
            keys = linear_keys(linear)[:-1]
        for index, key in enumerate(keys):
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
            outputs = len(part_rows(linear, split_key(key)[1], config))
            key_rank = rank + (1 if by_parts and index == 0 else 0)
            changes[key] = _random_change(linear, outputs, method, key_rank, strength, draw)
    return changes


def mixed_expert_rows(model: GPT, rows: int) -> tuple[AdaptedRows, ...]:
    """Adapters of experts on parts of the rows; the last rows have none."""
    owned = torch.arange(rows) * 4 // max(rows, 1)
    mixed = []
    for owner, (method, by_parts) in enumerate((("lora", True), ("dora", False), ("ia3", False))):
        linears = random_linears(
            model.config, method, seed=owner, targets=EXPERT_TARGETS, by_parts=by_parts
        )
        adapter = shard_adapter(linears, model.config, model.layers, dtype=model.dtype)
        mixed.append(AdaptedRows(adapter, (owned == owner).nonzero().flatten()))
    return tuple(adapted for adapted in mixed if adapted.rows is not None and len(adapted.rows))


def _random_change(
    linear: AdaptableLinear,
    outputs: int,
    method: str,
    rank: int,
    strength: float,
    draw: torch.Generator,
) -> LinearAdapter:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    if method in BOTTLENECKS:
        tensors = {
            "bottleneck_down": normal(rank, outputs) / outputs**0.5,
            "bottleneck_up": strength * normal(outputs, rank),
        }
        position = {"bottleneck": "pre", "bottleneck-post": "post"}.get(method)
        if position is not None:
            tensors[f"bottleneck_{position}_norm_weight"] = 1 + 0.3 * normal(outputs)
            tensors[f"bottleneck_{position}_norm_bias"] = 0.3 * normal(outputs)
        return LinearAdapter(**tensors)
    if method == "ia3":
        if linear.is_row_parallel and linear.name.endswith("linear_fc2"):
            return LinearAdapter(input_scale=1 + 0.3 * strength * normal(linear.in_features))
        return LinearAdapter(output_scale=1 + 0.3 * strength * normal(outputs))
    a = normal(rank, linear.in_features) / linear.in_features**0.5
    b = strength * normal(outputs, rank)
    if method == "lora":
        return LinearAdapter(a, b, scale=0.4)
    # Any positive norm will do: only the quotient of magnitude and norm counts.
    norm = 1 + normal(outputs).abs()
    magnitude = norm * (1 + 0.2 * normal(outputs))
    return LinearAdapter(a, b, 0.4, magnitude, norm)


@torch.no_grad()
def merge_into(model: GPT, changes: Mapping[str, LinearAdapter]) -> GPT:
    """Change the weights and biases of a model on one rank as the adapter changes its linears."""
    config, linears = model.config, adaptable_linears(model.config)
    for key, change in changes.items():
        name, part = split_key(key)
        module = model.get_submodule(name)
        assert isinstance(module, Linear)
        weight, bias = module.weight, module.bias
        rows = part_rows(linears[name], part, config)
        merged = weight[rows].double()
        if change.input_scale is not None:
            merged = merged * change.input_scale
        if change.lora_a is not None and change.lora_b is not None:
            merged = merged + change.scale * change.lora_b.double() @ change.lora_a.double()
        if change.output_factor is not None:
            merged = merged * change.output_factor.unsqueeze(1)
        if change.output_scale is not None:
            merged = merged * change.output_scale.unsqueeze(1)
            if bias is not None:
                bias[rows] *= change.output_scale
        weight[rows] = merged.to(weight.dtype)
    return model
