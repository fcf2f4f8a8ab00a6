"""Hypothesis strategies for models that Megatron's arguments can describe."""

from typing import Any

from hypothesis import strategies as st

from gpt.config import GPTConfig, RopeScaling, yarn_attention_factor
from tests.support.models import EXPERTS

SPARSE = EXPERTS.with_fields(
    num_experts=4, activation="silu", proj_bias=False, mlp_bias=False, qkv_bias=True
)


@st.composite
def expressible(draw: st.DrawFn) -> GPTConfig:
    """Any GPT that Megatron can express; fields without an effect have their defaults."""
    layers = draw(st.integers(1, 6))
    groups = draw(st.sampled_from([1, 2, 4]))
    share = draw(st.sampled_from([1, 2]))
    sparse = draw(st.booleans())
    biases = "none" if sparse else draw(st.sampled_from(["all", "none"]))
    qkv = biases == "all" or draw(st.booleans())
    kinds = ["silu", "gelu", "relu2"] + (["gelu_tanh"] if biases == "all" else [])
    activation = draw(st.sampled_from(kinds))
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 8 * draw(st.integers(1, 4)),
        "num_attention_heads": groups * share,
        "num_query_groups": groups,
        "kv_channels": draw(st.sampled_from([4, 8, 12])),
        "ffn_hidden_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(1, 300)),
        "max_position_embeddings": draw(st.integers(1, 64)),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        "layernorm_epsilon": draw(st.sampled_from([1e-5, 1e-6, 0.25])),
        "activation": activation,
        "gated": activation == "silu",
        "qkv_bias": qkv,
        "proj_bias": biases == "all",
        "mlp_bias": biases == "all",
        "window_size": draw(st.none() | st.integers(1, 50)),
        "hidden_dropout": draw(st.sampled_from([0.0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    }
    for name in (
        "layernorm_zero_centered_gamma",
        "untie_embeddings_and_output_weights",
        "qk_layernorm",
    ):
        fields[name] = draw(st.booleans())
    fields |= draw(positions())
    return GPTConfig(**fields, **(draw(experts(layers)) if sparse else {}))


@st.composite
def expressible_by_layer(draw: st.DrawFn) -> GPTConfig:
    """Also settings that differ between layers, and those of GPT-OSS. NeMo lacks them."""
    config = draw(expressible())
    flags = st.lists(st.booleans(), min_size=config.num_layers, max_size=config.num_layers)
    changes: dict[str, Any] = {
        "softmax_scale": draw(st.sampled_from([0.0, 0.25])),
        "attention_sinks": draw(st.booleans()),
    }
    if config.window_size is not None:
        changes["window_layers"] = tuple(draw(flags))
    if config.uses_rope:
        changes["rope_layers"] = tuple(draw(flags))
        changes["rope_scaling"] = draw(st.just(config.rope_scaling) | yarn())
    if config.gated:
        changes |= {
            "activation": draw(st.sampled_from(["silu", "quick_gelu"])),
            "activation_func_clamp_value": draw(st.sampled_from([0.0, 7.0])),
            "glu_linear_offset": draw(st.sampled_from([0.0, 1.0])),
        }
    if any(config.moe_layers) and draw(st.booleans()):
        changes |= dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "moe_router_bias"), True)
    return config.with_fields(**changes)


@st.composite
def yarn(draw: st.DrawFn) -> RopeScaling:
    factor = draw(st.sampled_from([4.0, 32.0]))
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=draw(st.integers(1, 64)),
        beta_fast=draw(st.sampled_from([32.0, 8.0])),
        truncate=draw(st.booleans()),
        attention_factor=draw(st.sampled_from([1.0, yarn_attention_factor(factor)])),
    )


@st.composite
def positions(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["learned_absolute", "rope", "none"]))
    if kind != "rope":
        return {"position_embedding_type": kind}
    linear = st.builds(RopeScaling, st.just("linear"), st.sampled_from([2.0, 1.5, 8.0]))
    llama3 = st.builds(RopeScaling, st.just("llama3"), st.sampled_from([8.0, 32.0]))
    return {
        "position_embedding_type": "rope",
        "rotary_percent": draw(st.sampled_from([1.0, 0.5])),
        "rotary_base": draw(st.sampled_from([10000.0, 500000.0, 1234.5])),
        "rotary_interleaved": draw(st.booleans()),
        "rope_scaling": draw(st.none() | linear | llama3),
    }


@st.composite
def experts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    count = draw(st.integers(2, 8))
    moe_layers = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))
    sigmoid = draw(st.booleans())
    dense_first = draw(st.booleans())
    shared = draw(st.sampled_from([0, 12]))
    return {
        "num_experts": count,
        "moe_layers": tuple(moe_layers),
        "moe_router_topk": draw(st.integers(1 if sigmoid or dense_first else 2, count)),
        "moe_ffn_hidden_size": draw(st.integers(1, 40)),
        "moe_router_pre_softmax": dense_first,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_expert_bias": sigmoid and draw(st.booleans()),
        "moe_router_topk_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": bool(shared) and draw(st.booleans()),
    }
