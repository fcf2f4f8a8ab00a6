"""PEFT LoRA directories for a Llama-like model, written without PEFT."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from gpt.config import GPTConfig


def write_peft_lora(
    folder: Path,
    config: GPTConfig,
    *,
    seed: int = 0,
    rank: int = 4,
    layers: int | None = None,
    **fields: Any,
) -> Path:
    """Random changes of q_proj, v_proj and down_proj; `fields` are fields of the PEFT config.

    `layers`: another number of layers than the model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draws = torch.Generator().manual_seed(seed)
    hidden, kv_width = config.hidden_size, config.num_query_groups * config.kv_channels
    sizes = {
        "self_attn.q_proj": (hidden, config.num_attention_heads * config.kv_channels),
        "self_attn.v_proj": (hidden, kv_width),
        "mlp.down_proj": (config.ffn_hidden_size, hidden),
    }
    tensors = {}
    for layer in range(layers or config.num_layers):
        for module, (inputs, outputs) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(rank, inputs, generator=draws) / inputs**0.5
            tensors[f"{path}.lora_A.weight"] = a
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=draws)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module.partition(".")[2] for module in sizes],
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(record))
    return folder
