"""Rotary embedding (RoPE): angles by position, frequency scaling, rotation of queries and keys."""

import torch
from torch import Tensor

from gpt.config import GPTConfig, RopeScaling


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
    config: GPTConfig, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each position's rotary angles, each (T, rotary channels / 2).

    The angles are computed in at least fp32; cos and sin are returned in `dtype`.
    """
    compute_dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, config.rotary_dim, 2, device=positions.device).to(compute_dtype)
    frequencies = config.rotary_base ** -(exponents / config.rotary_dim)
    if config.rope_scaling is not None:
        frequencies = scale_rotary_frequencies(frequencies, config.rope_scaling)
    angles = torch.outer(positions.to(compute_dtype), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def build_rotary_table(config: GPTConfig, device: torch.device) -> Tensor:
    """Return cos and sin of the rotary angles of all positions of the model, in fp32.

    The shape is (positions, 2, rotary channels / 2); in dimension 1, index 0 is cos and index 1 is
    sin. A kernel that reads the table needs no cos and sin of the step's positions.
    """
    positions = torch.arange(config.max_position_embeddings, device=device)
    return torch.stack(compute_rotary_cos_sin(config, positions, torch.float32), dim=1)


def scale_rotary_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the rotary frequencies scaled as `RopeScaling` describes."""
    scaled = frequencies / scaling.factor
    if scaling.kind == "linear":
        return scaled
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth_factor = ((rotations - low) / (high - low)).clamp(0, 1)
    return scaled + (frequencies - scaled) * smooth_factor
