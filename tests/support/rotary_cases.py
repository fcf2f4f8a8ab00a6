"""Random steps of the kernel for qk-norm, RoPE and the KV store: it must agree with the reference.

As a program it draws cases for Triton's interpreter, which must be enabled before Triton is
loaded: TRITON_INTERPRET=1 python -m tests.support.rotary_cases FIRST COUNT
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.attention.backend import (
    AttentionBackend,
    NormWeights,
    QKTransform,
    QKTransformBackend,
    TorchAttention,
)
from gpt.attention.fp8_kv_cache import Fp8KVAttention, quantize_fp8
from gpt.attention.kv_cache import FP8_DTYPE, KVPool
from gpt.attention.paged import store_kv
from gpt.batch import Batch
from gpt.config import GPTConfig, RopeScaling
from gpt.model.norm import normalize
from gpt.model.rotary_embedding import (
    apply_rotary_embedding,
    build_rotary_table,
    compute_rotary_cos_sin,
)
from gpt.parallel.mesh import Mesh
from tests.support.attention_cases import FAR_MAX, SCALES, patch_interpreter
from tests.support.models import MODERN, ODD, build
from tests.support.paged_steps import case

RotaryMake = Callable[[Tensor | None], QKTransformBackend]


@dataclass(frozen=True)
class RotaryCase:
    sizes: tuple[tuple[int, int], ...]  # Per sequence: new tokens, past tokens.
    heads: tuple[int, int, int]  # KV heads, queries per KV head, channels.
    config: GPTConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scaled: bool

    @classmethod
    def draw(cls, seed: int) -> "RotaryCase":
        draw = random.Random(seed)
        heads = groups, queries, channels = (
            draw.choice([1, 2, 3]),
            draw.choice([1, 1, 4, 5, 9, 48]),
            draw.choice([6, 64, 80, 128, 256]),
        )
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        config = GPTConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=groups * queries,
            num_query_groups=groups,
            kv_channels=channels,
            vocab_size=8,
            max_position_embeddings=512,
            position_embedding_type="rope",
            # Of 6 channels, 4 are rotated; of 80, 40.
            rotary_percent=draw.choice([1.0, 1.0, 0.5 if channels > 6 else 0.7]),
            rotary_interleaved=draw.random() < 0.4,
            rope_scaling=draw.choice(
                [None, RopeScaling("linear", 4.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 64)]
            ),
            normalization=draw.choice(["LayerNorm", "RMSNorm"]),
            layernorm_zero_centered_gamma=draw.random() < 0.3,
            qk_layernorm=draw.random() < 0.6,
        )
        kv_dtype = draw.choice([dtype, dtype, FP8_DTYPE])
        sizes = tuple(
            (draw.choice([1, 1, 3]), draw.choice([0, 1, 15, 300]))
            for _ in range(draw.randint(1, 3))
        )
        return cls(sizes, heads, config, dtype, kv_dtype, draw.random() < 0.5)


def make_rotary_table(config: GPTConfig, device: torch.device) -> Tensor:
    """Return the table of all positions of a model whose layers have the same rotary embedding."""
    return build_rotary_table(
        config.rope, config.kv_channels, config.max_position_embeddings, device
    )


def reference_transform(
    qkv: Tensor, transform: QKTransform, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as the model computes them in torch."""
    config = transform.config
    q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    if transform.norms is not None:
        q, k = (
            normalize(x, norm.weight, norm.bias, config)
            for x, norm in zip((q, k), transform.norms, strict=True)
        )
    # The angles in fp32, as in the table.
    cos, sin = compute_rotary_cos_sin(transform.rope, config.kv_channels, positions, torch.float32)
    q, k = (
        apply_rotary_embedding(x, (cos.to(qkv.dtype), sin.to(qkv.dtype)), config.rotary_interleaved)
        for x in (q, k)
    )
    return q, k, v


def _draw_norms(config: GPTConfig, dtype: torch.dtype) -> tuple[NormWeights, NormWeights] | None:
    if not config.qk_layernorm:
        return None
    generator = torch.Generator().manual_seed(config.kv_channels)
    weights = torch.randn(2, 2, config.kv_channels, generator=generator).to(dtype)
    q_norm, k_norm = (
        NormWeights(weight, bias if config.normalization == "LayerNorm" else None)
        for weight, bias in weights
    )
    return q_norm, k_norm


def _to(norm: NormWeights, target: torch.device | torch.dtype) -> NormWeights:
    return NormWeights(norm.weight.to(target), None if norm.bias is None else norm.bias.to(target))


def check_transform_and_store(
    rotary_case: RotaryCase, make: RotaryMake, device: torch.device
) -> None:
    """Queries and keys are close to fp64's; the pool has exactly the returned keys and values."""
    config, dtype = rotary_case.config, rotary_case.dtype
    lengths, past = ([size[column] for size in rotary_case.sizes] for column in (0, 1))
    groups, queries, channels = rotary_case.heads
    step = case(lengths, past, rotary_case.heads, 16, dtype)
    assert step.batch.block_tables is not None
    batch = Batch.paged(lengths, past, step.batch.block_tables.to(device), 16)
    is_fp8 = rotary_case.kv_dtype == FP8_DTYPE
    k = step.k * 300 if is_fp8 else step.k  # Some values are too large for FP8.
    parts = step.q.view(len(k), groups, queries, channels), k.unsqueeze(2), step.v.unsqueeze(2)
    qkv = torch.cat(parts, dim=2).to(device)
    # Infinite values stay infinite, and do not change other values.
    qkv[-1, 0, -1, 0] = float("inf")
    kv = (quantize_fp8(step.kv).view(FP8_DTYPE) if is_fp8 else step.kv).to(device)
    scales = torch.tensor(SCALES, device=device) if rotary_case.scaled and is_fp8 else None
    # The second layer of two, so that its scales differ from the first layer's.
    pools = [torch.stack([kv.view(torch.uint8)] * 2).view(kv.dtype)[1] for _ in range(2)]
    norms = _draw_norms(config, dtype)
    exact_norms = None
    if norms is not None:
        norms = _to(norms[0], device), _to(norms[1], device)
        exact_norms = _to(norms[0], torch.float64), _to(norms[1], torch.float64)
    table = make_rotary_table(config, device)
    transform = QKTransform(config, config.rope, table, norms)
    q, k, v = make(scales).transform_and_store(qkv, transform, batch, pools[1])
    assert torch.equal(v, qkv[:, :, -1])
    exact_transform = QKTransform(config, config.rope, table, exact_norms)
    exact_q, exact_k, _ = reference_transform(qkv.double(), exact_transform, batch.positions)
    for got, want in ((q, exact_q), (k, exact_k)):
        assert got.dtype == dtype and got.shape == want.shape
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < FAR_MAX[dtype], f"{float(error)} of the largest value away"
    (Fp8KVAttention(scales).store if is_fp8 else store_kv)(k, v, batch, pools[0])
    assert torch.equal(*(pool.view(torch.uint8) for pool in pools)), "stored otherwise"


def check_transformed_row_without_slot(make: RotaryMake, device: torch.device) -> None:
    """Check that the keys and values of a row without a slot are not stored."""
    rotary_case = RotaryCase.draw(0)
    step = case([1] * 3, [5, 6, 7], rotary_case.heads, 16, torch.float32)
    assert step.batch.slot_mapping is not None
    block, offset = (x.to(device) for x in step.batch.slot_mapping)
    block[1] = -1
    batch = Batch((1,) * 3, (5, 6, 7), step.batch.positions.to(device), (block, offset))
    kv = step.kv.to(device)
    want = kv.clone()
    groups, queries, channels = rotary_case.heads
    parts = step.q.view(3, groups, queries, channels), step.k.unsqueeze(2), step.v.unsqueeze(2)
    qkv = torch.cat(parts, dim=2).to(device)
    config = rotary_case.config
    transform = QKTransform(config, config.rope, make_rotary_table(config, device))
    _, k, v = make(None).transform_and_store(qkv, transform, batch, kv)
    for row in (0, 2):
        want[block[row], 0, :, offset[row]] = k[row]
        want[block[row], 1, :, offset[row]] = v[row]
    assert torch.equal(kv, want)


def chunked_logits(config: GPTConfig, backend: AttentionBackend, device: torch.device) -> Tensor:
    """Logits of a prompt in two chunks and of two decoded tokens, in fp32."""
    mesh = Mesh.single(device)
    model = build(config, mesh, dtype=torch.float32, attention_backend=backend)
    pool = KVPool(config, model.layers, 3, block_tokens=16, dtype=torch.float32, device=device)
    ids = torch.arange(19, device=device)
    tables = torch.tensor([[2, 1]], device=device)
    with torch.inference_mode():
        pieces = [
            model(ids[start:end], Batch.paged([end - start], [start], tables, 16), pool)
            for start, end in ((0, 8), (8, 17), (17, 18), (18, 19))
        ]
    return torch.cat(pieces).cpu()


def check_rotary_models(make: RotaryMake, device: torch.device) -> None:
    """Models with RoPE and qk-norm have the logits of the torch path."""
    for config in (MODERN, ODD):
        want = chunked_logits(config, TorchAttention(), device)
        assert (chunked_logits(config, make(None), device) - want).abs().max() < 1e-3


def main(first: int, count: int) -> None:
    from gpt.attention.triton_paged import TritonAttention

    torch.set_num_threads(1)
    patch_interpreter()
    device = torch.device("cpu")
    for seed in range(first, first + count):
        rotary_case = RotaryCase.draw(seed)
        try:
            check_transform_and_store(rotary_case, TritonAttention, device)
        except Exception:
            print(f"case {seed}: {rotary_case}")
            raise
    check_transformed_row_without_slot(TritonAttention, device)
    check_rotary_models(TritonAttention, device)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
