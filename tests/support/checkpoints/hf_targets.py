"""Megatron configurations that a Hugging Face family can express, and which family."""

from gpt.config import GPTConfig, RopeScaling

PLAIN = GPTConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    vocab_size=101,
    max_position_embeddings=128,
    ffn_hidden_size=80,
    hidden_dropout=0.05,
    attention_dropout=0.15,
)
ROTARY = PLAIN.with_fields(position_embedding_type="rope", rotary_base=1000.0, activation="gelu")
GATED = ROTARY.with_fields(
    normalization="RMSNorm",
    layernorm_epsilon=3e-6,
    activation="silu",
    gated=True,
    num_query_groups=2,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
)
SQUARED = ROTARY.with_fields(
    layernorm_zero_centered_gamma=True,
    activation="relu2",
    rotary_percent=0.5,
    num_query_groups=2,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    hidden_dropout=0.0,
)
EXPERTS = GATED.with_fields(num_experts=5, moe_ffn_hidden_size=56, moe_layers=(True,) * 3)
LLAMA3 = RopeScaling("llama3", 8.0, original_max_position_embeddings=32)

# What Megatron can train, and the family that it should be written as.
MODELS: dict[str, tuple[str, GPTConfig]] = {
    "classic": ("gpt2", PLAIN),
    "classic, erf, untied": (
        "gpt2",
        PLAIN.with_fields(activation="gelu", untie_embeddings_and_output_weights=True),
    ),
    "rotary, erf": ("gpt_neox", ROTARY.with_fields(untie_embeddings_and_output_weights=True)),
    "partly rotary, tanh, parallel": (
        "gpt_neox",
        ROTARY.with_fields(activation="gelu_tanh", rotary_percent=0.5, parallel_residual=True),
    ),
    "partly rotary, scaled": (
        "gpt_neox",
        ROTARY.with_fields(rotary_percent=0.5, rope_scaling=RopeScaling("linear", 2.0)),
    ),
    "rotary, tanh": ("starcoder2", ROTARY.with_fields(activation="gelu_tanh")),
    "rotary, squared, grouped, window": (
        "starcoder2",
        ROTARY.with_fields(activation="relu2", num_query_groups=2, window_size=9, kv_channels=20),
    ),
    "layernorm1p": ("nemotron", SQUARED),
    "layernorm1p, scaled, biases": (
        "nemotron",
        SQUARED.with_fields(qkv_bias=True, proj_bias=True, mlp_bias=True, rope_scaling=LLAMA3),
    ),
    "gated": ("llama", GATED),
    "gated, tanh GELU, tied, all biases, scaled": (
        "llama",
        GATED.with_fields(
            activation="gelu_tanh",
            untie_embeddings_and_output_weights=False,
            qkv_bias=True,
            proj_bias=True,
            mlp_bias=True,
            rope_scaling=RopeScaling("linear", 3.0),
            kv_channels=20,
        ),
    ),
    "gated, attention bias, llama3": (
        "llama",
        GATED.with_fields(qkv_bias=True, proj_bias=True, rope_scaling=LLAMA3, num_query_groups=1),
    ),
    "gated, window": ("mistral", GATED.with_fields(window_size=9)),
    "gated, heads that do not divide": (
        "mistral",
        GATED.with_fields(hidden_size=50, kv_channels=12, num_query_groups=4),
    ),
    "gated, qkv bias": ("qwen2", GATED.with_fields(qkv_bias=True, kv_channels=20)),
    "gated, qkv bias, window": ("qwen2", GATED.with_fields(qkv_bias=True, window_size=9)),
    "gated, qk norms": ("qwen3", GATED.with_fields(qk_layernorm=True, kv_channels=12)),
    "gated, qk norms, window, biases": (
        "qwen3",
        GATED.with_fields(qk_layernorm=True, window_size=9, qkv_bias=True, proj_bias=True),
    ),
    "experts": ("mixtral", EXPERTS),
    "experts, one of five, window": (
        "mixtral",
        EXPERTS.with_fields(moe_router_topk=1, window_size=9, kv_channels=20),
    ),
    "experts, qk norms, window, one dense layer": (
        "qwen3_moe",
        EXPERTS.with_fields(
            qk_layernorm=True,
            window_size=9,
            moe_layers=(True, False, True),
            moe_router_pre_softmax=True,
            kv_channels=20,
        ),
    ),
    "experts, shared experts with a gate": (
        "qwen2_moe",
        EXPERTS.with_fields(
            moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True, qkv_bias=True
        ),
    ),
    "experts, sigmoid scores, two shared experts": (
        "glm4_moe",
        EXPERTS.with_fields(
            moe_layers=(False, True, True),
            moe_router_score_function="sigmoid",
            moe_router_expert_bias=True,
            moe_router_topk_scaling_factor=2.5,
            moe_shared_expert_intermediate_size=112,
            rotary_percent=0.5,
            kv_channels=12,
        ),
    ),
}
