"""Tiny random transformers models of each family, one per trait that a reader must get right.

Transformers is the oracle: it saves the files that the readers open, and its logits are the truth.
Weights are lively, so that a forgotten bias or a wrong norm shows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, POSITIONS = 101, 128

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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}

# What each case is of: the family, and the fields that make it one.
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
}

HEADED = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def random_model(family: str, fields: dict[str, Any]) -> "PreTrainedModel":
    """The family's model with a head, as its own configuration class makes it of the fields."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    configuration, model = (getattr(transformers, name) for name in HEADED[family])
    config: PreTrainedConfig = configuration(**fields)
    made: PreTrainedModel = model(config)
    return made


@torch.no_grad()
def model_of(case: str, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Random biases and norms, and logits with a standard deviation of five and more."""
    family, fields = CASES[case]
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    model = random_model(family, {**sizes, **fields})
    model.train(False)
    generator = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        random = torch.randn(value.shape, generator=generator)
        if value.dim() == 1:
            norm = name.endswith("weight")
            value.copy_(random * 0.2 + float(norm))
        elif "wte" in name or "embed_tokens" in name or "lm_head" in name:
            value.copy_(random)
        else:
            value.copy_(random * value.shape[-1] ** -0.5)
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


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
