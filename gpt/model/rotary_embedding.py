"""Rotary embedding (RoPE): angles by position, frequency scaling, rotation of queries and keys."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gpt.config import GPTConfig, RopeConfig, RopeScaling


def apply_rotary_embedding(x: Tensor, cos_sin: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Return queries or keys (T, heads, D) with the first channels of each head rotated.

    `cos_sin` has the cos and the sin of each token's angles, each (T, rotary channels / 2).
    """
    cos, sin = (values.unsqueeze(1).to(x.dtype) for values in cos_sin)
    rotary_channels = 2 * cos.shape[-1]
    rotated, unrotated = x[..., :rotary_channels], x[..., rotary_channels:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack(
            [first * cos - second * sin, second * cos + first * sin], dim=-1
        ).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated, unrotated], dim=-1) if unrotated.shape[-1] else rotated


def compute_rotary_cos_sin(
    rope: RopeConfig, head_width: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each position's rotary angles, each (T, rotary channels / 2).

    The angles are computed in at least fp32; cos and sin are returned in `dtype`.
    """
    compute_dtype = torch.promote_types(dtype, torch.float32)
    rotary_dim = rope.rotary_dim(head_width)
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device).to(compute_dtype)
    frequencies = rope.base ** -(exponents / rotary_dim)
    attention_factor = 1.0
    if rope.scaling is not None:
        frequencies = scale_rotary_frequencies(frequencies, rope.scaling, rope.base)
        attention_factor = rope.scaling.attention_factor
    angles = torch.outer(positions.to(compute_dtype), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return cos.to(dtype), sin.to(dtype)


def rope_configs(config: GPTConfig, layers: Iterable[int]) -> list[RopeConfig]:
    """Return the different rotary embeddings of these layers, in the order of the layers."""
    ropes = [config.layers[layer].rope for layer in layers]
    return list(dict.fromkeys(rope for rope in ropes if rope is not None))


def build_rotary_table(
    rope: RopeConfig, head_width: int, position_count: int, device: torch.device
) -> Tensor:
    """Return cos and sin of the rotary angles of the first positions, in fp32.

    The shape is (positions, 2, rotary channels / 2); in dimension 1, index 0 is cos and index 1 is
    sin. A kernel that reads the table needs no cos and sin of the step's positions.
    """
    positions = torch.arange(position_count, device=device)
    return torch.stack(compute_rotary_cos_sin(rope, head_width, positions, torch.float32), dim=1)


def scale_rotary_frequencies(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Return the rotary frequencies scaled as `RopeScaling` describes."""
    if scaling.kind == "longrope":
        return frequencies / torch.tensor(scaling.frequency_factors).to(frequencies)
    scaled = frequencies / scaling.factor
    if scaling.kind == "linear":
        return scaled
    if scaling.kind == "yarn":
        unscaled_share = 1 - _yarn_ramp(len(frequencies), scaling, base).to(frequencies)
    else:
        rotations = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled_share = ((rotations - low) / (high - low)).clamp(0, 1)
    return scaled + (frequencies - scaled) * unscaled_share


def _yarn_ramp(count: int, scaling: RopeScaling, base: float) -> Tensor:
    """Return for each of the `count` frequencies the share of its scaled value.

    The share is 0 up to the frequency that gives `beta_fast` rotations, 1 from the frequency that
    gives `beta_slow` rotations on, and linear in the index of the frequency between them.
    """
    limits = [
        count
        * math.log(scaling.original_max_position_embeddings / (2 * math.pi * rotations))
        / math.log(base)
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = (math.floor(limits[0]), math.ceil(limits[1])) if scaling.truncate else limits
    # The bounds are those of the authors' code: the upper bound counts channels, of which two are
    # rotated together, and a ramp of length 0 is made longer.
    low, high = max(low, 0), min(high, 2 * count - 1)
    length = high - low or 0.001
    return ((torch.arange(count, dtype=torch.float64) - low) / length).clamp(0, 1)
