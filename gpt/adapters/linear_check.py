"""Checks of an adapter's weights: against themselves, and against a model.

The checks refuse a change that cannot be applied, and one that has no effect.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from gpt.bottleneck_adapter import TENSOR_PREFIX, Bottleneck
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import split_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import part_rows

RANK_MAX = 512  # Of a low-rank product; also the largest size of a bottleneck.
BOTTLENECK_LINEARS = (".self_attention.linear_proj", ".mlp.linear_fc2")
SCALE_MAX = 1e9  # Of a scale, and of an alpha.
LINEARS_BYTES_MAX = 8 << 30  # Size of all tensors in fp32.
# Limit of changed linears and parts. 128 experts in each of 80 layers have 30,720 of them.
LINEARS_MAX = 32768
TENSORS_MAX = 4 * LINEARS_MAX  # Of DoRA.
NUMPY_DTYPES = (torch.float16, torch.float32, torch.float64)  # Dtypes that numpy has, too.


def copy_linears(name: str, linears: Mapping[str, LinearAdapter]) -> dict[str, LinearAdapter]:
    """Return fp32 copies of the changes of an adapter, sorted by key; refuse inconsistent ones."""
    if len(linears) > LINEARS_MAX:
        raise AdapterError(
            f"adapter {name!r} changes {len(linears)} linears; at most {LINEARS_MAX} are allowed"
        )
    for key, linear in linears.items():
        _check_shapes(name, key, linear)
    tensor_bytes = sum(
        4 * tensor.numel() for linear in linears.values() for _, tensor in linear.tensors()
    )
    if tensor_bytes > LINEARS_BYTES_MAX:
        raise AdapterError(
            f"adapter {name!r} has {tensor_bytes} bytes of adapter weights, over the limit of "
            f"{LINEARS_BYTES_MAX}; train it with a smaller rank"
        )
    _check_parts(name, linears)
    return {key: _fp32_copy(name, key, linears[key]) for key in sorted(linears)}


def _check_shapes(name: str, key: str, linear: LinearAdapter) -> None:
    shapes = {tensor_name: tuple(tensor.shape) for tensor_name, tensor in linear.tensors()}
    a, b = linear.lora_a, linear.lora_b
    if not shapes:
        raise AdapterError(f"adapter {name!r} has no tensor for {key}; export the adapter again")
    if any(tensor_name.startswith(TENSOR_PREFIX) for tensor_name in shapes):
        _check_bottleneck_shapes(name, key, shapes)
        return
    if (a is None) != (b is None) or (linear.magnitude is None) != (linear.weight_norm is None):
        raise AdapterError(
            f"adapter {name!r} has only {', '.join(shapes)} of {key}; lora_a belongs to lora_b, "
            "and magnitude to weight_norm: export the adapter again"
        )
    if a is not None and b is not None:
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.numel() * b.numel():
            raise AdapterError(
                f"adapter {name!r} has lora_a {shapes['lora_a']} and lora_b {shapes['lora_b']} of "
                f"{key}; they must be (rank, inputs) and (outputs, rank)"
            )
        if len(a) > RANK_MAX:
            raise AdapterError(
                f"adapter {name!r} has rank {len(a)} in {key}; the largest rank is {RANK_MAX}"
            )
    elif linear.magnitude is not None:
        raise AdapterError(f"adapter {name!r} has a magnitude of {key}, but no lora_a and lora_b")
    if linear.input_scale is not None and linear.rank:
        raise AdapterError(
            f"adapter {name!r} has an input scale and a low-rank product for {key}, which cannot "
            "be combined"
        )
    if linear.input_scale is not None and split_key(key)[1]:
        raise AdapterError(
            f"adapter {name!r} has an input scale of {key}, but the parts of a linear have one "
            "input; scale the input of the whole linear"
        )
    widths = {shape[0] for field, shape in shapes.items() if field not in ("lora_a", "input_scale")}
    vectors = [shape for field, shape in shapes.items() if not field.startswith("lora_")]
    if len(widths) > 1 or any(len(shape) != 1 for shape in vectors):
        raise AdapterError(
            f"adapter {name!r} has tensors of the shapes {shapes} for {key}, which do not belong "
            "together; export the adapter again"
        )
    if not math.isfinite(linear.scale):
        raise AdapterError(
            f"adapter {name!r} has the scale {linear.scale} for {key}; it must be finite"
        )


def _check_bottleneck_shapes(name: str, key: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not key.endswith(BOTTLENECK_LINEARS):
        raise AdapterError(
            f"adapter {name!r} has a bottleneck of {key}; a bottleneck is behind attention "
            "(linear_proj) or behind the MLP (linear_fc2)"
        )
    shapes = {field.removeprefix(TENSOR_PREFIX): shape for field, shape in shapes.items()}
    size, hidden = (*shapes.get("down", ()), 0, 0)[:2]
    if size > RANK_MAX:
        raise AdapterError(
            f"adapter {name!r} has a bottleneck of size {size} in {key}; the largest size is "
            f"{RANK_MAX}"
        )
    expected: dict[str, tuple[int, ...]] = {"down": (size, hidden), "up": (hidden, size)}
    for norm in ("pre_norm", "post_norm"):
        if f"{norm}_weight" in shapes or f"{norm}_bias" in shapes:
            expected |= {f"{norm}_weight": (hidden,), f"{norm}_bias": (hidden,)}
    if shapes != expected or not size * hidden:
        raise AdapterError(
            f"adapter {name!r} has tensors of a bottleneck of {key} with the shapes {shapes}; it "
            "must have down (size, hidden), up (hidden, size), and the weight and the bias of a "
            "norm, and no other change of the linear"
        )


def _check_parts(name: str, linears: Mapping[str, LinearAdapter]) -> None:
    for key in linears:
        linear, part = split_key(key)
        if part and linear in linears:
            raise AdapterError(
                f"adapter {name!r} changes both {linear} and its part {part!r}; give one of them"
            )


def _fp32_copy(name: str, key: str, linear: LinearAdapter) -> LinearAdapter:
    copies: dict[str, Any] = {}
    for tensor_name, tensor in linear.tensors():
        if not tensor.is_floating_point():
            raise AdapterError(
                f"adapter {name!r} has {tensor_name} of {key} in {tensor.dtype}; it must be "
                "floating-point"
            )
        copy = copy_as_fp32(tensor.detach())
        if not all_finite(copy):
            raise AdapterError(
                f"adapter {name!r} has values in {tensor_name} of {key} that are not finite, "
                "probably because training diverged; give an adapter that was saved earlier"
            )
        copies[tensor_name] = copy
    weight_norm = copies.get("weight_norm")
    if weight_norm is not None and not bool((weight_norm > 0).all()):
        raise AdapterError(f"adapter {name!r} has a weight norm of {key} that is not positive")
    return replace(linear, **copies)


def copy_as_fp32(x: Tensor) -> Tensor:
    """Return a contiguous copy in fp32; values beyond fp32 become infinite."""
    # A thread reads adapters while a step computes on all cores. An operation of torch would be
    # divided among as many threads, and each part would wait for a core; numpy uses this thread.
    if x.device.type == "cpu" and x.dtype in NUMPY_DTYPES:
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(x.numpy().astype(np.float32, order="C"))
    return torch.empty(x.shape, dtype=torch.float32).copy_(x)


def all_finite(x: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    values = x.numpy()  # In this thread, as above.
    # Both limits are NaN if any element is. `isfinite` would allocate an array of the same shape.
    return not values.size or (math.isfinite(values.min()) and math.isfinite(values.max()))


def check_linears(name: str, linears: Mapping[str, LinearAdapter], config: GPTConfig) -> None:
    """Refuse changes that do not fit the linears of a model, or that all have no effect."""
    if not linears:
        return
    model_linears = adaptable_linears(config)
    for key, linear in linears.items():
        model_linear = model_linears.get(split_key(key)[0])
        if model_linear is None:
            raise AdapterError(_missing_linear_text(name, key, config))
        _check_fit(name, key, linear, model_linear, config)
        _check_overflow(name, key, linear, config)
    if not any(map(has_effect, linears.values())):
        raise AdapterError(
            f"adapter {name!r} has no effect: all its products are zero and all its scales are "
            "one; it was probably saved before training: give a trained adapter"
        )


def is_scale(value: object) -> TypeGuard[float]:
    """Tell whether a value of a file is a number that is usable in a scale."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < SCALE_MAX  # Refuses NaN too.


def has_effect(linear: LinearAdapter) -> bool:
    """Tell whether the output of a linear with this change can differ from the base model's."""
    a, b = linear.lora_a, linear.lora_b
    if a is not None and b is not None and linear.scale and bool(a.any()) and bool(b.any()):
        return True
    if linear.bottleneck is not None:
        return _bottleneck_has_effect(linear.bottleneck)
    factors = (linear.output_factor, linear.output_scale, linear.input_scale)
    return any(factor is not None and bool((factor != 1).any()) for factor in factors)


def _bottleneck_has_effect(bottleneck: Bottleneck) -> bool:
    acts = bool(bottleneck.down.any()) and bool(bottleneck.up.any())
    weight, bias = bottleneck.post_norm_weight, bottleneck.post_norm_bias
    if weight is None or bias is None:
        return acts
    return (acts and bool(weight.any())) or bool(bias.any())


def _missing_linear_text(name: str, key: str, config: GPTConfig) -> str:
    experts = f" and {config.num_experts} experts" if config.num_experts else ""
    return (
        f"adapter {name!r} changes {key[:200]}, which is no linear of this model with "
        f"{config.num_layers} layers{experts}; use it with the model that it was trained on"
    )


def _check_fit(
    name: str, key: str, linear: LinearAdapter, model_linear: AdaptableLinear, config: GPTConfig
) -> None:
    part = split_key(key)[1]
    if part and part not in model_linear.parts:
        raise AdapterError(
            f"adapter {name!r} changes {key}, but {model_linear.name} of this model has no part "
            f"{part!r}; use it with the model that it was trained on"
        )
    if linear.bottleneck is not None:
        _check_bottleneck_fit(name, key, linear.bottleneck, config)
        return
    outputs = len(part_rows(model_linear, part, config))
    for tensor_name, tensor in linear.tensors():
        dimension = 1 if tensor_name == "lora_a" else 0
        is_input = tensor_name in ("lora_a", "input_scale")
        expected = model_linear.in_features if is_input else outputs
        if tensor.shape[dimension] != expected:
            raise AdapterError(
                f"adapter {name!r} has {tensor_name} of {key} with the shape "
                f"{tuple(tensor.shape)}, but the model has {expected} "
                f"{'inputs' if is_input else 'outputs'} there; use it with the model that it was "
                "trained on"
            )


def _check_bottleneck_fit(name: str, key: str, bottleneck: Bottleneck, config: GPTConfig) -> None:
    hidden = len(bottleneck.up)
    if hidden != config.hidden_size:
        raise AdapterError(
            f"adapter {name!r} has a bottleneck of {key} for the hidden size {hidden}, but the "
            f"model has {config.hidden_size}; use it with the model that it was trained on"
        )
    if config.norm_placement != "pre":
        raise AdapterError(
            f"adapter {name!r} has bottlenecks, which are not supported in a model with a norm "
            f"behind {key}; train LoRA instead"
        )


def _check_overflow(name: str, key: str, linear: LinearAdapter, config: GPTConfig) -> None:
    dtype = FLOAT_DTYPES[config.dtype]
    if dtype != torch.float16:  # bfloat16 has the range of fp32.
        return
    for tensor_name, tensor in linear.tensors():
        if not bool(tensor.to(dtype).isfinite().all()):
            raise AdapterError(
                f"adapter {name!r} has values up to {_absmax(tensor):.3g} in {tensor_name} of "
                f"{key}, which overflow in {config.dtype}; serve the model in bfloat16 or float32"
            )


def _absmax(tensor: Tensor) -> float:
    return float(tensor.abs().max())
