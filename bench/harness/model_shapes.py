"""Model shapes for comparisons with other engines: transformers configs with random weights.

The duration of a forward pass does not depend on the values of the weights, so nothing is
downloaded. transformers builds and saves a model from these configs; every engine loads that
checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class ModelShape:
    """A model architecture, described by the arguments of its transformers config."""

    title: str
    model_class: str  # Name of the model class in transformers.
    settings: Mapping[str, Any]  # Arguments of the config class.

    def build_random(self, dtype: str, **overrides: float | None) -> Any:
        """Build the transformers model with random weights; `overrides` replace config values."""
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, self.model_class)
        return (
            model(model.config_class(**{**self.settings, **overrides}))
            .to(getattr(torch, dtype))
            .eval()
        )

    def save_random(self, folder: Path, **overrides: float | None) -> None:
        transformers_logging: Any = import_module("transformers.utils.logging")
        transformers_logging.disable_progress_bar()
        self.build_random("bfloat16", **overrides).save_pretrained(folder)


# With random weights an end token could appear at any step, so the models have none.
NO_END_TOKENS = {"bos_token_id": None, "eos_token_id": None}
GPT2 = ModelShape(
    "GPT-2 small (12 x 768, V 50304)",
    "GPT2LMHeadModel",
    {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50304,
        "n_positions": 1024,
        **NO_END_TOKENS,
    },
)
# Like current small Llama models: four query heads per KV head, and an untied LM head.
LLAMA = ModelShape(
    "Llama-shaped 350M (24 x 1024, 16 heads, 4 KV heads, feed-forward 2816, V 32000)",
    "LlamaForCausalLM",
    {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **NO_END_TOKENS,
    },
)
# The size of GPT-2 small, with separate projections, gated MLP and RMSNorm.
SMALL_LLAMA = ModelShape(
    "Llama-shaped 124M (12 x 768, 12 heads, feed-forward 2048, V 50304)",
    "LlamaForCausalLM",
    {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 50304,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **NO_END_TOKENS,
    },
)
# A small Qwen3-MoE: every layer has experts.
QWEN3_MOE = ModelShape(
    "Qwen3-MoE-shaped (12 x 1024, 16 heads, 4 KV heads, 64 experts of 384, top-8, V 32000)",
    "Qwen3MoeForCausalLM",
    {
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 384,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        **NO_END_TOKENS,
    },
)
