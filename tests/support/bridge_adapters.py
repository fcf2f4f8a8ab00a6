"""Adapters as Megatron-Bridge and NeMo 2 save them: distributed checkpoints with their config.

The keys, chunks and fields are those that Megatron-Bridge 0.3.1, and the adapters of NeMo 2.1, 2.2
and 2.5, were seen to write with Megatron-Core 0.16.1 (test_bridge_oracle.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import split_key
from tests.support.checkpoints.distcp_writer import even_boxes, write_chunks

PART_MODULES = {"query": "q", "key": "k", "value": "v", "gate": "gate", "up": "up"}
# Which rows of linear_fc1 are saved as halves of a tensor rank's rows: all, those of a gated MLP
# (also of its gates alone), or none.
Halves = Literal["all", "gated", "none"]
BRIDGE_0_3: Halves = "all"  # Up to 0.5.0, and NeMo 2.2 to 2.7.
BRIDGE_0_6: Halves = "gated"  # From 0.5.1 on.
NEMO_2_1: Halves = "none"  # And NeMo 2.0.


def bridge_tensors(
    linears: Mapping[str, LinearAdapter], *, stacked: bool, prefix: str = ""
) -> dict[str, Tensor]:
    """The tensors by key; `stacked`: one key for all layers."""
    by_key: dict[str, list[Tensor]] = {}
    for key, change in linears.items():
        linear, part = split_key(key)
        _, _, layer, block, name = linear.split(".")
        number = "" if stacked else f"{layer}."
        module = f"{prefix}decoder.layers.{number}{block}.{name}.adapter."
        if part:
            module += f"adapter_{PART_MODULES[part]}."
        values = {"linear_in.weight": change.lora_a, "linear_out.weight": change.lora_b}
        values["weight_magnitude"] = change.magnitude
        for leaf, value in values.items():
            if value is not None:
                by_key.setdefault(module + leaf, []).append(value)
    return {key: torch.stack(values) if stacked else values[0] for key, values in by_key.items()}


def write_bridge_adapter(
    root: Path,
    tensors: Mapping[str, Tensor],
    config: GPTConfig,
    *,
    tp: int = 1,
    peft: Mapping[str, Any] | None = None,
    nemo2: bool = False,
    halves: Halves = BRIDGE_0_3,
    run: Mapping[str, Any] | None = None,
    cuts: Mapping[str, int] | None = None,
) -> Path:
    """Write a run's directory with an iteration, or a checkpoint of NeMo 2.

    `run`: more fields of run_config.yaml. `cuts`: other numbers of chunks along the rows, by key.
    """
    has_halves = halves == "all" or (halves == "gated" and config.gated)
    folder = root / ("weights" if nemo2 else "iter_0000007")
    folder.mkdir(parents=True)

    def boxes(key: str, value: Tensor) -> list[tuple[list[int], list[int]]]:
        counts = [1] * value.dim()
        is_row_parallel = "linear_proj" in key or "linear_fc2" in key
        if key.endswith("linear_in.weight"):
            counts[-1 if is_row_parallel else -2] = tp
        elif key.endswith("linear_out.weight"):
            counts[-2] = tp * (2 if has_halves and "linear_fc1" in key else 1)
        if cuts and key in cuts:
            counts[-2] = cuts[key]
        return even_boxes(value, counts)

    record: dict[str, Any] = {
        key: _saved_rows(key, tensor, config, tp, has_halves=has_halves)
        if "linear_fc1" in key and key.endswith("linear_out.weight")
        else tensor
        for key, tensor in tensors.items()
    }
    record["optimizer.state.exp_avg.x.adapter.y"] = torch.ones(3)
    record["decoder.layers.mlp.linear_fc1.adapter._extra_state/shard_0_4"] = [None]
    write_chunks(folder, record, boxes)
    settings = {
        "_target_": "megatron.bridge.peft.lora.LoRA",
        "canonical_mapping": {"linear_qkv": {"linear_q", "linear_k"}},
        "dim": 4,
        "alpha": 8,
        "lora_dtype": None,
        "params_to_save": set(tensors),
        **(peft or {}),
    }
    if nemo2:
        del settings["params_to_save"], settings["canonical_mapping"]
        (folder / "adapter_metadata.json").write_text("{}")
        (root / "context").mkdir()
        (root / "context" / "io.json").write_text(json.dumps(_fiddle_graph(settings, tp)))
    else:
        fields = {"model": {"tensor_model_parallel_size": tp}, "peft": settings, **(run or {})}
        (folder / "run_config.yaml").write_text(yaml.safe_dump(fields))
        (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def _saved_rows(key: str, rows: Tensor, config: GPTConfig, tp: int, *, has_halves: bool) -> Tensor:
    """The rows of linear_fc1's B, or of its gates or ups, in the order of the saved tensor."""
    ranks = rows.chunk(tp, -2)
    if config.gated and "adapter_" not in key:
        gates, ups = rows.chunk(2, -2)
        pairs = zip(gates.chunk(tp, -2), ups.chunk(tp, -2), strict=True)
        ranks = tuple(torch.cat(pair, -2) for pair in pairs)
    if not has_halves:
        return torch.cat(ranks, -2)
    halves = [rank.chunk(2, -2) for rank in ranks]
    return torch.cat([pair[0] for pair in halves] + [pair[1] for pair in halves], -2)


def _fiddle_graph(settings: Mapping[str, Any], tp: int) -> dict[str, Any]:
    def record(target: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        module, _, name = target.rpartition(".")
        return {
            "type": {"module": module, "name": name},
            "items": [
                [f"Attr(name='{field}')", {"type": "leaf", "value": value}]
                for field, value in fields.items()
            ],
        }

    fields = {key: value for key, value in settings.items() if key != "_target_"}
    strategy = record("nemo.lightning.MegatronStrategy", {"tensor_model_parallel_size": tp})
    return {"objects": {"peft_1": record(settings["_target_"], fields), "strategy_1": strategy}}
