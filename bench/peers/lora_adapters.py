"""Random LoRA adapters in PEFT's format for the comparison of engines."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def save_random_adapters(model: Path, folder: Path, count: int) -> None:
    """Save adapters of rank `RANK` on all linears of a Llama checkpoint to `folder`/0, 1, ..."""
    config = json.loads((model / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    widths = dict.fromkeys((*ATTENTION, *MLP), (hidden, hidden))
    widths |= {"k_proj": (hidden, kv_width), "v_proj": (hidden, kv_width)}
    widths |= {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (inputs, outputs) in widths.items():
                module = "self_attn" if name in ATTENTION else "mlp"
                key = f"base_model.model.model.layers.{layer}.{module}.{name}"
                a = torch.randn(RANK, inputs, generator=draw) / inputs**0.5
                tensors[f"{key}.lora_A.weight"] = a
                tensors[f"{key}.lora_B.weight"] = 0.02 * torch.randn(outputs, RANK, generator=draw)
        target = folder / str(index)
        target.mkdir(parents=True)
        save_file(tensors, target / "adapter_model.safetensors")
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model),
            "r": RANK,
            "lora_alpha": RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [*ATTENTION, *MLP],
        }
        (target / "adapter_config.json").write_text(json.dumps(settings))
