"""Small models that make tests sharp, and slow reference computations.

Weights are random, biases and norms too (zeros and ones hide mistakes), and logits have a standard
deviation of five and more, so that ties do not decide.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.checkpoint.random_init import generated_checkpoint
from gpt.config import GPTConfig, RopeConfig, RopeScaling
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import ParameterSpec

# Arguments of transformers' GPT2Config.
TINY_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4}

# Where the two best logits are closer than this, fp32 rounding may decide between them.
MARGIN = 1e-4

CLASSIC = GPTConfig(
    num_layers=5,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=101,
    max_position_embeddings=64,
)
MODERN = GPTConfig(
    num_layers=5,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=6,
    ffn_hidden_size=44,
    vocab_size=103,
    max_position_embeddings=64,
    position_embedding_type="rope",
    rotary_percent=0.7,
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    proj_bias=False,
    mlp_bias=False,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=True,
    window_size=7,
)
ODD = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=1,
    vocab_size=97,
    max_position_embeddings=64,
    position_embedding_type="learned_absolute+rope",
    rotary_interleaved=True,
    rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=32),
    layernorm_zero_centered_gamma=True,
    activation="relu2",
    parallel_residual=True,
    qk_layernorm=True,
)
EXPERTS = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=100,
    max_position_embeddings=64,
    position_embedding_type="rope",
    activation="gelu",
    gated=True,
    qkv_bias=False,
    num_experts=5,
    moe_layers=(True, False, True, True),
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
SIGMOID_EXPERTS = EXPERTS.with_fields(
    moe_router_score_function="sigmoid",
    moe_router_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    mlp_bias=False,
)
# Experts that two and four ranks can divide.
EIGHT_EXPERTS = EXPERTS.with_fields(num_experts=8, moe_router_topk=3, moe_router_bias=True)
YARN = RopeScaling(
    "yarn",
    4.0,
    original_max_position_embeddings=16,
    beta_fast=8.0,
    truncate=False,
    attention_factor=1.2,
)
# As Gemma 3, with layers that differ in windows and rotary embeddings.
LAYERED = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=10,
    ffn_hidden_size=44,
    vocab_size=102,
    max_position_embeddings=64,
    position_embedding_type="rope",
    rotary_base=1000.0,
    rope_scaling=YARN,
    rope_layers=(True, True, False, True),
    window_rope=RopeConfig(base=100.0),
    window_size=7,
    window_layers=(True, False, True, True),
    normalization="RMSNorm",
    layernorm_zero_centered_gamma=True,
    norm_placement="pre_and_post",
    activation="gelu_tanh",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    qk_layernorm=True,
    softmax_scale=0.4,
    embedding_multiplier=1.5,
)
# As OLMo 3.
POST_NORMS = LAYERED.with_fields(
    layernorm_zero_centered_gamma=False,
    norm_placement="post",
    activation="silu",
    qk_layernorm_scope="all_heads",
    rope_layers=(),
    softmax_scale=0.0,
    embedding_multiplier=1.0,
    untie_embeddings_and_output_weights=True,
)
# As GPT-OSS.
SINKS = LAYERED.with_fields(
    window_layers=(True, False, True, False),
    window_rope=None,
    rope_layers=(),
    layernorm_zero_centered_gamma=False,
    norm_placement="pre",
    qk_layernorm=False,
    softmax_scale=0.0,
    embedding_multiplier=1.0,
    attention_sinks=True,
    activation="quick_gelu",
    activation_func_clamp_value=1.5,
    glu_linear_offset=1.0,
    qkv_bias=True,
    proj_bias=True,
    mlp_bias=True,
    num_experts=5,
    moe_layers=(True,) * 4,
    moe_ffn_hidden_size=24,
    moe_router_bias=True,
)
# As BLOOM, with a number of heads that is no power of two.
ALIBI = CLASSIC.with_fields(
    num_attention_heads=12,
    num_query_groups=12,
    kv_channels=4,
    position_embedding_type="alibi",
    embedding_layernorm=True,
)
# Three KV groups of two layers.
MIXED_WINDOWS = MODERN.with_fields(
    num_layers=6, moe_layers=(), window_layers=(True, True, False) * 2
)
CONFIGS = {
    "classic": CLASSIC,
    "modern": MODERN,
    "odd": ODD,
    "experts": EXPERTS,
    "sigmoid experts": SIGMOID_EXPERTS,
    "layered": LAYERED,
    "post norms": POST_NORMS,
    "sinks": SINKS,
    "ALiBi": ALIBI,
}
# Also configurations that only tests of serving use.
SERVED_CONFIGS = CONFIGS | {"mixed windows": MIXED_WINDOWS, "eight experts": EIGHT_EXPERTS}


def _random(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# The same small tensors are drawn tens of thousands of times.
_remembered = lru_cache(maxsize=4096)(_random)
REMEMBERED_VALUES_MAX = 4096


def lively(config: GPTConfig, seed: int = 0) -> Checkpoint:
    """A checkpoint whose values depend on each tensor's name and the seed alone."""

    def draw(parameter: ParameterSpec) -> Tensor:
        random = _remembered if math.prod(parameter.shape) <= REMEMBERED_VALUES_MAX else _random
        values = random(seed + zlib.crc32(parameter.name.encode()), parameter.shape)
        leaf = parameter.name.rpartition(".")[2]
        if "norm" in parameter.name and leaf.endswith("weight"):
            return values * 0.2 + (0.0 if config.layernorm_zero_centered_gamma else 1.0)
        if leaf.endswith("bias"):
            return values * 0.2
        if parameter.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return values.clone()  # The cached tensor must not change.
        return values / math.sqrt(parameter.shape[-1])

    return generated_checkpoint(config, draw)


def build(
    config: GPTConfig,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    stages: list[int] | None = None,
    trainable: bool = False,
    **options: Any,
) -> GPT:
    """This rank's share of a random model. It is drawn in fp64, so that every dtype rounds it."""
    mesh = mesh or Mesh.single()
    layers = stage_layers(config.num_layers, mesh.pp, stages)[mesh.pp_rank][0]
    checkpoint = lively(config.with_fields(dtype="float64"), seed)
    model = load_model(checkpoint, mesh, dtype=dtype, layers=layers, **options)
    return model.requires_grad_(trainable)


@dataclass(frozen=True)
class Greedy:
    """Tokens chosen by recomputing the whole sequence for each, and the margin of each choice."""

    tokens: list[int]
    margins: list[float]


@torch.inference_mode()
def recompute_greedy(
    model: GPT, prompt: Sequence[int], count: int, table: Tensor | None = None
) -> Greedy:
    """The slowest and plainest decoding: no KV cache, no batch."""
    ids = list(prompt)
    margins = []
    for _ in range(count):
        best = model.logits(torch.tensor([ids]), table)[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Greedy(ids[len(prompt) :], margins)


def first_tie(oracle: Greedy) -> int:
    """The number of leading tokens that must be equal in fp32: up to the first near-tie."""
    close = [position for position, margin in enumerate(oracle.margins) if margin < MARGIN]
    return close[0] if close else len(oracle.tokens)
