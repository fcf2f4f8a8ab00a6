"""Tiny random transformers models of each family, one per property that a reader must get right.

Transformers is the oracle: it saves the files that the readers open, and its logits are the truth.
Weights are random, so that a forgotten bias or a wrong norm shows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.parallel.weight_sharding import XIELU_PARAMETERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 101
POSITIONS = 128

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX_SIZES = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
QWEN_MOE_SIZES = SIZES | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 56}
QWEN2_MOE_SIZES = QWEN_MOE_SIZES | {"shared_expert_intermediate_size": 40}
GLM4_MOE_SIZES = SIZES | {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 56,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
}
GEMMA3_SIZES = SIZES | {"head_dim": 20, "sliding_window": 9}
GPT_OSS_SIZES = SIZES | {
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 24,
}
# The lists are for heads of 12 channels.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
}
MINISTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.35,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def partial(percent: float, kind: str = "default", **scaling: float) -> dict[str, Any]:
    """The rotary fields for a share of a head's channels."""
    rope = {"rope_type": kind, "rope_theta": 1000.0, "partial_rotary_factor": percent}
    return {"rope_parameters": rope | scaling}


WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}

# Each case: the family, and the config fields.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, untied, wide, erf": (
        "gpt2",
        {"n_inner": 112, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "llama, multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama, tied, all biases, wide heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    ),
    "llama, llama3 positions, one group": (
        "llama",
        {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
    ),
    "llama, linear positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, no window, narrow heads": ("mistral", {"sliding_window": None, "head_dim": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, window": ("qwen2", {"tie_word_embeddings": True, **WINDOW}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 20}),
    "qwen3, attention bias, window": ("qwen3", {"attention_bias": True, "head_dim": 12, **WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral, tied, window, three experts of four, wide heads": (
        "mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "sliding_window": 9,
        },
    ),
    "mixtral, one expert of three": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen2_moe, one dense layer": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "qwen2_moe, renormalized, no bias, tied, every other layer dense": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe, renormalized, wide heads": ("qwen3_moe", {"norm_topk_prob": True, "head_dim": 20}),
    "qwen3_moe, attention bias, window, one dense layer": (
        "qwen3_moe",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "mlp_only_layers": [0],
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, query norms, biases, two shared experts, scaled, partly rotary": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 2,
            "head_dim": 24,
            **partial(0.75),
        },
    ),
    "glm4_moe, one expert, all layers with experts": (
        "glm4_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, untied, no biases, window": (
        "starcoder2",
        {"tie_word_embeddings": False, "use_bias": False, "sliding_window": 9},
    ),
    "starcoder2, one group, wide heads, llama3 positions": (
        "starcoder2",
        {"num_key_value_heads": 1, "head_dim": 20, "rope_parameters": LLAMA3},
    ),
    "nemotron": ("nemotron", {}),
    "nemotron, tied, all biases, wide heads": (
        "nemotron",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 20,
            **partial(0.3),
        },
    ),
    "nemotron, linear positions, erf": (
        "nemotron",
        {"hidden_act": "gelu", **partial(0.5, "linear", factor=3.0)},
    ),
    "gpt_neox, parallel residual": ("gpt_neox", partial(0.5)),
    "gpt_neox, sequential, full positions, tanh": (
        "gpt_neox",
        {"use_parallel_residual": False, "hidden_act": "gelu_new", **partial(1.0)},
    ),
    "gpt_neox, tied, no attention bias, linear positions": (
        "gpt_neox",
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "num_attention_heads": 6,
            **partial(0.25, "linear", factor=3.0),
        },
    ),
}

SLIDING_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CASES |= {
    "gemma3_text, windows in two layers of three": ("gemma3_text", {"layer_types": SLIDING_TYPES}),
    "gemma3_text, scaled positions, biases, untied, one pattern": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "attention_bias": True,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 12,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2, biases, multi-head, tied": (
        "olmo2",
        {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "olmo3, windows in three layers of four, yarn": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.2079,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "smollm3, windows in the layers without positions, biases, tied": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3, longrope, beyond the original length": (
        "phi3",
        {"original_max_position_embeddings": 8, "rope_parameters": LONGROPE | {"factor": 4.0}},
    ),
    "phi3, window, partly rotary, tied": (
        "phi3",
        {"sliding_window": 9, "tie_word_embeddings": True, **partial(0.5)},
    ),
    "granite, biases, tied": (
        "granite",
        {
            **GRANITE_FACTORS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    # The default scale of the attention scores is 1.
    "granitemoe": ("granitemoe", GRANITE_FACTORS | {"attention_multiplier": 1.0}),
    "apertus, biases, tied": (
        "apertus",
        {"rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "ministral3, window": (
        "ministral3",
        {"sliding_window": 9, "rope_parameters": MINISTRAL_YARN},
    ),
    "opt": ("opt", {}),
    "opt, untied, no biases, tanh": (
        "opt",
        {"tie_word_embeddings": False, "enable_bias": False, "activation_function": "gelu_new"},
    ),
    "bloom": ("bloom", {}),
    "bloom, untied, six heads": ("bloom", {"tie_word_embeddings": False, "n_head": 6}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 6}),
    "minimax_m2, three experts of five, full rotary, tied": (
        "minimax_m2",
        {"num_experts_per_tok": 3, "tie_word_embeddings": True, **partial(1.0)},
    ),
    "gpt_oss": ("gpt_oss", {"rope_parameters": GPT_OSS_YARN}),
    "gpt_oss, every layer full, one expert": (
        "gpt_oss",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "layer_types": ["full_attention"] * 3,
            "num_experts_per_tok": 1,
            "swiglu_limit": 1.0,
        },
    ),
    "gpt_oss, a single expert": ("gpt_oss", {"num_local_experts": 1, "num_experts_per_tok": 1}),
}

HEADED = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "bloom": ("BloomConfig", "BloomForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "apertus": ("ApertusConfig", "ApertusForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
}


def sizes_of(family: str) -> dict[str, Any]:
    """The sizes that all cases of a family share."""
    sizes = {
        "gpt2": GPT2_SIZES,
        "gpt_neox": NEOX_SIZES,
        "qwen2_moe": QWEN2_MOE_SIZES,
        "qwen3_moe": QWEN_MOE_SIZES,
        "glm4_moe": GLM4_MOE_SIZES,
        "gemma3_text": GEMMA3_SIZES,
        "phi3": SIZES | {"pad_token_id": 0},
        "smollm3": SIZES | {"pad_token_id": 0},
        "gpt_oss": GPT_OSS_SIZES,
        "opt": NEOX_SIZES | {"ffn_dim": 80, "pad_token_id": 0},
        "bloom": {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 3, "n_head": 4},
        "ministral3": SIZES | {"head_dim": 12},
        "granitemoe": SIZES | {"num_local_experts": 5},
        "minimax_m2": SIZES | {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2},
    }
    return sizes.get(family, SIZES)


def random_model(family: str, fields: dict[str, Any]) -> "PreTrainedModel":
    """The family's model with a head, built by its own configuration class."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    configuration, model = (getattr(transformers, name) for name in HEADED[family])
    config: PreTrainedConfig = configuration(**fields)
    random_model_: PreTrainedModel = model(config)
    return random_model_


EMBEDDING_WORDS = ("wte", "embed_tokens", "embed_in", "word_embeddings.", "lm_head")


@torch.no_grad()
def model_of(case: str, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Random biases and norms, and logits with a standard deviation of five and more."""
    family, fields = CASES[case]
    model = random_model(family, {**sizes_of(family), **fields})
    model.train(False)
    generator = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        random = torch.randn(value.shape, generator=generator)
        if value.dim() == 1:
            # The norms of these families add one to the stored weight.
            scale = name.endswith("weight") and family not in ("nemotron", "gemma3_text")
            value.copy_(random * 0.2 + float(scale))
        elif any(word in name for word in EMBEDDING_WORDS):
            value.copy_(random)
        else:
            value.copy_(random * value.shape[-1] ** -0.5)
        if name.endswith("embed_positions.weight"):
            value[:2] = 0.0  # OPT does not use these rows, so the writer has no values for them.
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # Float32 in models of every dtype.
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
        if name.endswith(("act_fn.beta", "act_fn.eps")):  # Visibly different from 0.5 and -1e-6.
            buffer.sub_(torch.rand(buffer.shape, generator=generator) * 0.3 + 0.1)
            buffer.data = buffer.to(dtype)
    for value in model.parameters():
        value.data = value.to(dtype)
    return model


def ids(rows: int = 2, length: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


@torch.no_grad()
def logits_of(model: "PreTrainedModel", tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens).logits
    return logits


# Modules with one counterpart: the canonical name, and transformers' name; `{n}` is the layer.
LLAMA_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "self_attention.linear_qkv.layer_norm_": "model.layers.{n}.input_layernorm",
    "self_attention.q_layernorm": "model.layers.{n}.self_attn.q_norm",
    "self_attention.k_layernorm": "model.layers.{n}.self_attn.k_norm",
    "self_attention.linear_proj": "model.layers.{n}.self_attn.o_proj",
    "mlp.linear_fc1.layer_norm_": "model.layers.{n}.post_attention_layernorm",
    "mlp.linear_fc2": "model.layers.{n}.mlp.down_proj",
}
MOE_NAMES = {
    **LLAMA_NAMES,
    "pre_mlp_layernorm": "model.layers.{n}.post_attention_layernorm",
    "mlp.router": "model.layers.{n}.mlp.gate",
}
OLMO_NAMES = {
    **{name: key for name, key in LLAMA_NAMES.items() if not name.endswith("layer_norm_")},
    "self_attention.linear_proj.post_layernorm": "model.layers.{n}.post_attention_layernorm",
    "mlp.linear_fc2.post_layernorm": "model.layers.{n}.post_feedforward_layernorm",
}
NAMES: dict[str, dict[str, str]] = {
    "gemma3_text": {
        **LLAMA_NAMES,
        **OLMO_NAMES,
        "mlp.linear_fc1.layer_norm_": "model.layers.{n}.pre_feedforward_layernorm",
    },
    "olmo2": OLMO_NAMES,
    "minimax_m2": MOE_NAMES,
    "opt": {
        "embedding.word_embeddings": "model.decoder.embed_tokens",
        "embedding.position_embeddings": "model.decoder.embed_positions",
        "decoder.final_layernorm": "model.decoder.final_layer_norm",
        "output_layer": "lm_head",
        "self_attention.linear_qkv.layer_norm_": "model.decoder.layers.{n}.self_attn_layer_norm",
        "self_attention.linear_proj": "model.decoder.layers.{n}.self_attn.out_proj",
        "mlp.linear_fc1.layer_norm_": "model.decoder.layers.{n}.final_layer_norm",
        "mlp.linear_fc1": "model.decoder.layers.{n}.fc1",
        "mlp.linear_fc2": "model.decoder.layers.{n}.fc2",
    },
    "bloom": {
        "embedding.word_embeddings": "transformer.word_embeddings",
        "embedding.word_embeddings_layernorm": "transformer.word_embeddings_layernorm",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
        "self_attention.linear_qkv.layer_norm_": "transformer.h.{n}.input_layernorm",
        "self_attention.linear_qkv": "transformer.h.{n}.self_attention.query_key_value",
        "self_attention.linear_proj": "transformer.h.{n}.self_attention.dense",
        "mlp.linear_fc1.layer_norm_": "transformer.h.{n}.post_attention_layernorm",
        "mlp.linear_fc1": "transformer.h.{n}.mlp.dense_h_to_4h",
        "mlp.linear_fc2": "transformer.h.{n}.mlp.dense_4h_to_h",
    },
    "granitemoe": {**MOE_NAMES, "mlp.router": "model.layers.{n}.block_sparse_moe.router"},
    "apertus": {
        **LLAMA_NAMES,
        "self_attention.linear_qkv.layer_norm_": "model.layers.{n}.attention_layernorm",
        "mlp.linear_fc1.layer_norm_": "model.layers.{n}.feedforward_layernorm",
        "mlp.linear_fc1": "model.layers.{n}.mlp.up_proj",
    },
    "gpt_oss": {**MOE_NAMES, "mlp.router": "model.layers.{n}.mlp.router"},
    "olmo3": OLMO_NAMES,
    "phi3": {**LLAMA_NAMES, "mlp.linear_fc1": "model.layers.{n}.mlp.gate_up_proj"},
    "gpt2": {
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
        "self_attention.linear_qkv.layer_norm_": "transformer.h.{n}.ln_1",
        "self_attention.linear_proj": "transformer.h.{n}.attn.c_proj",
        "mlp.linear_fc1.layer_norm_": "transformer.h.{n}.ln_2",
        "mlp.linear_fc1": "transformer.h.{n}.mlp.c_fc",
        "mlp.linear_fc2": "transformer.h.{n}.mlp.c_proj",
    },
    "mixtral": MOE_NAMES,
    "qwen2_moe": {
        **MOE_NAMES,
        "mlp.shared_experts.linear_fc2": "model.layers.{n}.mlp.shared_expert.down_proj",
    },
    "qwen3_moe": MOE_NAMES,
    "glm4_moe": {
        **MOE_NAMES,
        "mlp.shared_experts.linear_fc2": "model.layers.{n}.mlp.shared_experts.down_proj",
    },
    "starcoder2": {
        **LLAMA_NAMES,
        "mlp.linear_fc1": "model.layers.{n}.mlp.c_fc",
        "mlp.linear_fc2": "model.layers.{n}.mlp.c_proj",
    },
    "nemotron": {**LLAMA_NAMES, "mlp.linear_fc1": "model.layers.{n}.mlp.up_proj"},
    "gpt_neox": {
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "decoder.final_layernorm": "gpt_neox.final_layer_norm",
        "output_layer": "lm_head",
        "self_attention.linear_qkv.layer_norm_": "gpt_neox.layers.{n}.input_layernorm",
        "self_attention.linear_qkv": "gpt_neox.layers.{n}.attention.query_key_value",
        "self_attention.linear_proj": "gpt_neox.layers.{n}.attention.dense",
        "mlp.linear_fc1.layer_norm_": "gpt_neox.layers.{n}.post_attention_layernorm",
        "mlp.linear_fc1": "gpt_neox.layers.{n}.mlp.dense_h_to_4h",
        "mlp.linear_fc2": "gpt_neox.layers.{n}.mlp.dense_4h_to_h",
    },
}


def packed(model: Any, config: GPTConfig) -> dict[str, Tensor]:
    """The slow reference: build each canonical tensor from a state dict with views and cats."""
    family = model.config.model_type
    weights = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, key in NAMES.get(family, LLAMA_NAMES).items():
        layers = range(config.num_layers) if "{n}" in key else (None,)
        for n in layers:
            # The norm before the MLP has another canonical name in layers with experts.
            if n is not None and name == (
                "mlp.linear_fc1.layer_norm_" if config.moe_layers[n] else "pre_mlp_layernorm"
            ):
                continue
            canonical = name if n is None else f"decoder.layers.{n}.{name}"
            for kind in ("weight", "bias"):
                value = weights.get(f"{key.format(n=n)}.{kind}")
                if value is None or (name == "output_layer" and model.config.tie_word_embeddings):
                    continue
                transposed = family == "gpt2" and value.dim() == 2 and n is not None
                full = canonical + kind if canonical.endswith("_") else f"{canonical}.{kind}"
                if family == "opt" and "position" in name:
                    value = value[2:]
                tensors[full] = value.T if transposed else value
    for n in range(config.num_layers):
        tensors |= _joined(weights, config, n)
    return tensors


def _joined(weights: dict[str, Tensor], config: GPTConfig, n: int) -> dict[str, Tensor]:
    """Tensors that are split by head or by expert on one side, joined on the other."""
    canonical_prefix = f"decoder.layers.{n}."
    hf_prefix = f"model.layers.{n}."
    tensors: dict[str, Tensor] = {}

    def group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = (config.num_query_groups, -1, config.kv_channels)
        return torch.cat([t.view(*sizes, *t.shape[1:]) for t in (q, k, v)], dim=1).flatten(0, 2)

    for kind in ("weight", "bias"):
        decoder_prefix = hf_prefix.replace("model.", "model.decoder.")  # OPT.
        keys = [
            f"{prefix}self_attn.{letter}_proj.{kind}"
            for prefix in (hf_prefix, decoder_prefix)
            for letter in "qkv"
        ]
        three = [weights[key] for key in keys if key in weights]
        fused = weights.get(f"transformer.h.{n}.attn.c_attn.{kind}")
        if fused is not None:
            three = list(fused.T.chunk(3, dim=0))
        joined = weights.get(f"{hf_prefix}self_attn.qkv_proj.{kind}")
        if joined is not None:
            q_rows, kv_rows = (
                heads * config.kv_channels
                for heads in (config.num_attention_heads, config.num_query_groups)
            )
            three = list(joined.split([q_rows, kv_rows, kv_rows]))
        if three:
            tensors[f"{canonical_prefix}self_attention.linear_qkv.{kind}"] = group(*three)
        gate = weights.get(f"{hf_prefix}mlp.gate_proj.{kind}")
        if gate is not None:
            gate_and_up = (gate, weights[f"{hf_prefix}mlp.up_proj.{kind}"])
            tensors[f"{canonical_prefix}mlp.linear_fc1.{kind}"] = torch.cat(gate_and_up)
    for expert in range(config.num_experts * config.moe_layers[n]):
        expert_prefix = f"{canonical_prefix}mlp.experts.local_experts.{expert}."
        if config.moe_router_bias:
            tensors |= _gpt_oss_expert(weights, hf_prefix, expert_prefix, expert)
            continue
        in_memory = f"{hf_prefix}mlp.experts."
        if f"{in_memory}down_proj" not in weights:
            in_memory = f"{hf_prefix}block_sparse_moe.experts."
        for number, key in ((1, "gate_up_proj"), (2, "down_proj")):
            stacked = weights[f"{in_memory}{key}"]
            tensors[f"{expert_prefix}linear_fc{number}.weight"] = stacked[expert]
    mlp_prefix = f"{canonical_prefix}mlp."
    for shared in ("shared_expert", "shared_experts"):
        prefix = f"{hf_prefix}mlp.{shared}"
        if f"{prefix}.gate_proj.weight" in weights:
            gate_and_up = (
                weights[f"{prefix}.gate_proj.weight"],
                weights[f"{prefix}.up_proj.weight"],
            )
            tensors[f"{mlp_prefix}shared_experts.linear_fc1.weight"] = torch.cat(gate_and_up)
    other_keys = {
        **{f"activation_func.{leaf}": f"act_fn.{leaf}" for leaf in XIELU_PARAMETERS},
        "shared_experts.gate_weight": "shared_expert_gate.weight",
        "router.expert_bias": "gate.e_score_correction_bias",
    }
    if (bias := weights.get(f"{hf_prefix}mlp.e_score_correction_bias")) is not None:
        tensors[f"{mlp_prefix}router.expert_bias"] = bias
    if (sinks := weights.get(f"{hf_prefix}self_attn.sinks")) is not None:
        tensors[f"{canonical_prefix}self_attention.core_attention.softmax_offset"] = sinks
    for name, key in other_keys.items():
        if (value := weights.get(f"{hf_prefix}mlp.{key}")) is not None:
            tensors[f"{mlp_prefix}{name}"] = value if value.dim() else value.view(1)
    return tensors


def _gpt_oss_expert(
    weights: dict[str, Tensor], hf_prefix: str, canonical_prefix: str, expert: int
) -> dict[str, Tensor]:
    """The columns of gate and up alternate, and the matrices are (in, out)."""
    tensors: dict[str, Tensor] = {}
    for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
        weight = weights[f"{hf_prefix}mlp.experts.{name}"][expert].T
        bias = weights[f"{hf_prefix}mlp.experts.{name}_bias"][expert]
        if number == 1:
            weight = torch.cat([weight[0::2], weight[1::2]])
            bias = torch.cat([bias[0::2], bias[1::2]])
        tensors[f"{canonical_prefix}linear_fc{number}.weight"] = weight
        tensors[f"{canonical_prefix}linear_fc{number}.bias"] = bias
    return tensors


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
