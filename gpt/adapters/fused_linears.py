"""Conversions between changes of a fused linear and changes of its parts, and row norms of DoRA.

Libraries differ in the linears that they fuse. Each conversion is exact: no value is rounded,
except where a low-rank product has parts with different scales (`join_parts`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import join_key, split_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import merge_parts, part_rows

OUTPUT_TENSORS = ("lora_b", "magnitude", "weight_norm", "output_scale")


def linear_groups(
    linears: Mapping[str, LinearAdapter], config: GPTConfig
) -> Iterator[tuple[AdaptableLinear, dict[str, LinearAdapter]]]:
    """Yield each changed linear of the model, and its changes by part, in forward-pass order."""
    model_linears = adaptable_linears(config)
    order = {name: number for number, name in enumerate(model_linears)}
    keys = sorted(linears, key=lambda key: order[split_key(key)[0]])
    for name, group in groupby(keys, key=lambda key: split_key(key)[0]):
        changes = {split_key(key)[1]: linears[key] for key in group}
        parts = ("", *model_linears[name].parts)
        yield model_linears[name], {part: changes[part] for part in parts if part in changes}


def select_outputs(adapter: LinearAdapter, rows: Tensor) -> LinearAdapter:
    """Return the change of some outputs of a linear, in the order of `rows`."""
    selected: dict[str, Any] = {
        name: tensor[rows] for name, tensor in adapter.tensors() if name in OUTPUT_TENSORS
    }
    return replace(adapter, **selected)


def scatter_outputs(adapter: LinearAdapter, rows: Tensor) -> LinearAdapter:
    """Undo `select_outputs` with all rows: output n becomes output `rows[n]`."""
    return select_outputs(adapter, torch.argsort(rows))


def split_into_parts(
    adapter: LinearAdapter, linear: AdaptableLinear, config: GPTConfig
) -> dict[str, LinearAdapter]:
    """Return the changes of a fused linear's parts: A for each part, and the part's rows of B."""
    return {part: select_outputs(adapter, part_rows(linear, part, config)) for part in linear.parts}


def fold_equal_parts(
    parts: Mapping[str, LinearAdapter], linear: AdaptableLinear, config: GPTConfig
) -> dict[str, LinearAdapter]:
    """Return one change of the whole linear if all parts have the same A, or none; else the parts.

    Libraries that have no fused linears store A once for each part.
    """
    changes = list(parts.values())
    first = changes[0]
    names = {tuple(name for name, _ in change.tensors()) for change in changes}
    is_foldable = (
        set(parts) == set(linear.parts)
        and len(names) == 1
        and first.input_scale is None
        and all(change.scale == first.scale and _has_equal_a(change, first) for change in changes)
    )
    return {"": _merge_outputs(parts, linear, config, first)} if is_foldable else dict(parts)


def fold_linears(
    linears: Mapping[str, LinearAdapter], config: GPTConfig
) -> dict[str, LinearAdapter]:
    """Fold the parts of each linear with `fold_equal_parts`."""
    folded = {}
    for linear, parts in linear_groups(linears, config):
        changes = parts if "" in parts else fold_equal_parts(parts, linear, config)
        for part, change in changes.items():
            folded[join_key(linear.name, part)] = change
    return folded


def _has_equal_a(change: LinearAdapter, other: LinearAdapter) -> bool:
    if change.lora_a is None or other.lora_a is None:
        return change.lora_a is other.lora_a
    return torch.equal(change.lora_a, other.lora_a)


def _merge_outputs(
    parts: Mapping[str, LinearAdapter],
    linear: AdaptableLinear,
    config: GPTConfig,
    first: LinearAdapter,
) -> LinearAdapter:
    merged: dict[str, Any] = {}
    for name in OUTPUT_TENSORS:
        tensors = {
            part: tensor
            for part, change in parts.items()
            if (tensor := getattr(change, name)) is not None
        }
        if tensors:
            merged[name] = merge_parts(tensors, linear, config, 1.0)
    return replace(first, **merged)


def join_parts(
    name: str, parts: Mapping[str, LinearAdapter], linear: AdaptableLinear, config: GPTConfig
) -> LinearAdapter:
    """Return one change of the whole linear with the effect of the changes of its parts.

    The low-rank products are placed side by side: A has the ranks of all parts, and B is zero in
    the rows of other parts. `name`: the adapter's name, for messages.
    """
    folded = fold_equal_parts(parts, linear, config)
    if "" in folded:
        return folded[""]
    has_magnitude = [change.magnitude is not None for change in parts.values()]
    if any(has_magnitude) and not (all(has_magnitude) and set(parts) == set(linear.parts)):
        raise AdapterError(
            f"adapter {name!r} has magnitudes of some parts of {linear.name}, which cannot be "
            "written as one linear; train it on all parts, or on the whole linear"
        )
    if any(change.input_scale is not None for change in parts.values()):
        raise AdapterError(
            f"adapter {name!r} has an input scale of a part of {linear.name}, which cannot be "
            "written as one linear; train it on the whole linear"
        )
    merged = _merge_outputs(
        {part: replace(change, lora_b=None) for part, change in parts.items()},
        linear,
        config,
        LinearAdapter(),
    )
    low_rank = {part: change for part, change in parts.items() if change.lora_b is not None}
    if not low_rank:
        return merged
    scale = next(iter(low_rank.values())).scale
    rank, columns = sum(change.rank for change in low_rank.values()), 0
    lora_b = torch.zeros(linear.out_features, rank)
    for part, change in low_rank.items():
        assert change.lora_b is not None
        rows = part_rows(linear, part, config)
        factor = 1.0 if change.scale == scale else change.scale / scale
        lora_b[rows, columns : columns + change.rank] = change.lora_b * factor
        columns += change.rank
    lora_a = torch.cat([change.lora_a for change in low_rank.values() if change.lora_a is not None])
    return replace(merged, lora_a=lora_a, lora_b=lora_b, scale=scale)


def product_rows(adapter: LinearAdapter) -> Tensor:
    """Return scale * B A in fp32: what a low-rank product adds to the weight."""
    assert adapter.lora_a is not None and adapter.lora_b is not None
    return adapter.scale * (adapter.lora_b.float() @ adapter.lora_a.float())


def with_weight_norms(
    linears: Mapping[str, LinearAdapter], base: Checkpoint
) -> dict[str, LinearAdapter]:
    """Set the weight norm of each change that has a magnitude, from the weights of the base."""
    complete = dict(linears)
    for key, change in linears.items():
        if change.magnitude is None:
            continue
        name, part = split_key(key)
        linear = adaptable_linears(base.config)[name]
        weight = base.tensors[f"{name}.weight"].read()
        if part:
            weight = weight[part_rows(linear, part, base.config)]
        norms = torch.linalg.norm(weight.float() + product_rows(change), dim=1)
        complete[key] = replace(change, weight_norm=norms)
    return complete
