"""Linear adapters as PEFT saves them, and logits of our model with an adapter."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.batch import Batch
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.linear_adapter import AdaptedRows
from gpt.model.loading import load_model
from gpt.parallel.adapter_sharding import shard_adapter
from gpt.parallel.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INVOCATION = (7, 8, 9)
# By model_type: IA3's targets, and those of them whose inputs are scaled.
IA3_TARGETS = {
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "gpt_neox": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "bloom": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "phi3": (["qkv_proj", "gate_up_proj", "down_proj"], ["down_proj"]),
}
LLAMA_IA3_TARGETS = (["k_proj", "v_proj", "down_proj"], ["down_proj"])


def peft_config(method: str, model_type: str, **fields: Any) -> Any:
    """The config of an adapter of `method`; by default it targets all linears."""
    import peft

    if method == "ia3":
        targets, feedforward = IA3_TARGETS.get(model_type, LLAMA_IA3_TARGETS)
        ia3_fields = {"target_modules": targets, "feedforward_modules": feedforward}
        return peft.IA3Config(**{"task_type": "CAUSAL_LM", **ia3_fields, **fields})
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    if method == "dora":
        defaults["use_dora"] = True
    if method == "alora":
        defaults["alora_invocation_tokens"] = list(INVOCATION)
    return peft.LoraConfig(**{**defaults, **fields})


@torch.no_grad()
def random_peft_model(hf_model: "PreTrainedModel", config: Any) -> Any:
    """The model with an adapter whose tensors are all far from their start."""
    import peft

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model: Any = peft.get_peft_model(hf_model, config).eval()
    for name, value in peft_model.named_parameters():
        if "lora_A" in name:
            value.copy_(torch.randn(value.shape) * value.shape[1] ** -0.5)
        elif "lora_B" in name:
            value.copy_(torch.randn(value.shape) * 0.4)
        elif "lora_magnitude" in name or "ia3_l" in name:
            value.mul_(1 + 0.3 * torch.randn(value.shape))
    return peft_model


@torch.no_grad()
def adapted_logits(
    checkpoint: Checkpoint, adapter: Adapter | None, tokens: Tensor, starts: Sequence[int] = ()
) -> Tensor:
    """Our logits; the adapter acts on each sequence from its index in `starts` on."""
    model = load_model(checkpoint, Mesh.single())
    adapted: tuple[AdaptedRows, ...] = ()
    if adapter is not None:
        terms = shard_adapter(adapter.linears, checkpoint.config, model.layers)
        rows = None
        if starts:
            number = torch.arange(tokens.shape[1])
            rows = torch.cat([number[start:] + n * len(number) for n, start in enumerate(starts)])
        adapted = (AdaptedRows(terms, rows),)
    batch = replace(Batch.unpaged((tokens.shape[1],) * len(tokens)), adapted_rows=adapted)
    logits: Tensor = model(tokens.flatten(), batch)
    return logits.view(*tokens.shape, -1)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def peft_tensors(folder: Path) -> dict[str, Tensor]:
    import safetensors.torch

    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def write_peft_adapter(
    folder: Path, config: Mapping[str, Any] | str, tensors: Mapping[str, Tensor]
) -> Path:
    """Write the files of an adapter, as any program could."""
    import safetensors.torch

    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, folder / "adapter_model.safetensors")
    return folder
