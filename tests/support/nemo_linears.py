"""LoRA, IA3 and Houlsby adapters as NeMo 1 saves them: each rank's shards, at any split.

The keys and shards of LoRA and IA3 are those that the adapters of NeMo 1 in NeMo 2.0.0 were seen to
write with Megatron-Core 0.16.1, at TP x PP x VPP; their logits were equal to ours within 2e-6.
"""

import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import split_key
from tests.support import houlsby_adapters
from tests.support.checkpoints.distcp_writer import even_boxes, write_chunks

MODULES = {
    ("self_attention", "linear_qkv", ""): "lora_kqv_adapter",
    ("self_attention", "linear_qkv", "query"): "lora_unfused_kqv_adapter.q_adapter",
    ("self_attention", "linear_qkv", "key"): "lora_unfused_kqv_adapter.k_adapter",
    ("self_attention", "linear_qkv", "value"): "lora_unfused_kqv_adapter.v_adapter",
    ("self_attention", "linear_proj", ""): "lora_dense_attention_adapter",
    ("mlp", "linear_fc1", ""): "lora_hto4h_adapter",
    ("mlp", "linear_fc1", "gate"): "lora_unfused_hto4h_adapter.gate_adapter",
    ("mlp", "linear_fc1", "up"): "lora_unfused_hto4h_adapter.up_adapter",
    ("mlp", "linear_fc2", ""): "lora_4htoh_adapter",
}
SCALERS = {
    "key": "key_infused_adapter",
    "value": "value_infused_adapter",
    "": "mlp_infused_adapter",
}


def rank_state(
    linears: Mapping[str, LinearAdapter],
    config: GPTConfig,
    *,
    tp: int,
    tp_rank: int,
    layers: Mapping[int, str],
    prefix: str = "model.decoder.",
) -> dict[str, Tensor]:
    """The state of one rank. `layers`: the name of each of its layers in the keys."""
    if any(change.bottleneck is not None for change in linears.values()):
        return houlsby_adapters.rank_state(
            linears, tp=tp, tp_rank=tp_rank, layers=layers, prefix=prefix
        )
    state = {}
    for key, change in linears.items():
        linear, part = split_key(key)
        _, _, layer, block, name = linear.split(".")
        if int(layer) not in layers:
            continue
        start = f"{prefix}layers.{layers[int(layer)]}.{block}.adapter_layer."
        if change.lora_a is None or change.lora_b is None:
            scales = change.output_scale if part else change.input_scale
            assert scales is not None
            state[f"{start}{SCALERS[part]}.scalers"] = scales.chunk(tp)[tp_rank].clone()
            continue
        is_row_parallel = name in ("linear_proj", "linear_fc2")
        lora_a = change.lora_a.chunk(tp, 1 if is_row_parallel else 0)[tp_rank]
        lora_b = change.lora_b.chunk(tp)[tp_rank]
        if name == "linear_fc1" and not part and config.gated:
            gates, ups = change.lora_b.chunk(2)
            lora_b = torch.cat([gates.chunk(tp)[tp_rank], ups.chunk(tp)[tp_rank]])
        start += MODULES[block, name, part]
        state[f"{start}.linear_in.weight"] = lora_a.clone()
        state[f"{start}.linear_out.weight"] = lora_b.clone()
    return state


def write_nemo_linears(
    path: Path,
    linears: Mapping[str, LinearAdapter],
    config: GPTConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    scheme: str = "lora",
    tuning: Mapping[str, Any] | None = None,
    prefix: str = "model.decoder.",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an archive, or a directory if the path does not end in .nemo."""
    folder = path.with_suffix("")
    for stage in range(pp):
        for rank in range(tp):
            state: dict[str, Any] = {}
            chunk_layers = config.num_layers // (pp * vpp)
            for chunk in range(vpp):
                first = (chunk * pp + stage) * chunk_layers
                names = {first + local: str(local) for local in range(chunk_layers)}
                chunk_state = rank_state(
                    linears, config, tp=tp, tp_rank=rank, layers=names, prefix=prefix
                )
                typed = {key: tensor.to(dtype) for key, tensor in chunk_state.items()}
                state |= typed if vpp == 1 else {f"model_{chunk}": typed}
            rank_folder = (
                f"tp_rank_{rank:02}_pp_rank_{stage:03}" if pp > 1 else f"mp_rank_{rank:02}"
            )
            target = folder / rank_folder if tp * pp > 1 else folder
            target.mkdir(parents=True, exist_ok=True)
            torch.save(state, target / "model_weights.ckpt")
    record = {
        "num_layers": config.num_layers,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "peft": {"peft_scheme": scheme, f"{scheme}_tuning": dict(tuning or {})},
    }
    (folder / "model_config.yaml").write_text(yaml.safe_dump(record))
    if path.suffix == ".nemo":
        with tarfile.open(path, "w") as archive:
            archive.add(folder, ".")
    return path


def write_nemo_distributed(
    path: Path,
    linears: Mapping[str, LinearAdapter],
    config: GPTConfig,
    *,
    tp: int = 1,
    stacked: bool = True,
    scheme: str = "lora",
    tuning: Mapping[str, Any] | None = None,
) -> Path:
    """Write an archive whose weights are a distributed checkpoint of `tp` tensor ranks."""
    names = {layer: str(layer) for layer in range(config.num_layers)}
    states = [rank_state(linears, config, tp=tp, tp_rank=rank, layers=names) for rank in range(tp)]
    by_key: dict[str, list[Tensor]] = {}
    cuts: dict[str, int | None] = {}
    for key in states[0]:
        is_row_input = "linear_in" in key and ("dense_attention" in key or "4htoh" in key)
        is_row_input |= "linear_out" in key and bool(re.search(r"\.adapter_[12]\.", key))
        is_norm = "layer_norm" in key
        shards = [state[key] for state in states]
        tensor = shards[0] if is_norm else torch.cat(shards, 1 if is_row_input else 0)
        name = re.sub(r"layers\.\d+\.", "layers.", key) if stacked else key
        by_key.setdefault(name, []).append(tensor)
        cuts[name] = None if is_norm else -1 if is_row_input else -2
    tensors = {key: torch.stack(v) if stacked else v[0] for key, v in by_key.items()}

    def boxes(key: str, value: Tensor) -> list[tuple[list[int], list[int]]]:
        counts = [1] * value.dim()
        cut = cuts[key]
        if cut is not None:
            counts[cut] = tp
        return even_boxes(value, counts)

    folder = path.with_suffix("")
    (folder / "model_weights").mkdir(parents=True)
    write_chunks(folder / "model_weights", dict(tensors), boxes)
    record = {
        "num_layers": config.num_layers,
        "tensor_model_parallel_size": tp,
        "peft": {"peft_scheme": scheme, f"{scheme}_tuning": dict(tuning or {})},
    }
    (folder / "model_config.yaml").write_text(yaml.safe_dump(record))
    with tarfile.open(path, "w") as archive:
        archive.add(folder, ".")
    return path
