"""Adapters as Megatron-Bridge and NeMo 2 save them: distributed checkpoints with their config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import split_key
from tests.support.checkpoints.distcp_writer import even_boxes, write_chunks

PART_MODULES = {"query": "q", "key": "k", "value": "v", "gate": "gate", "up": "up"}


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
) -> Path:
    """Write a run's directory with an iteration, or a checkpoint of NeMo 2."""
    folder = root / ("weights" if nemo2 else "iter_0000007")
    folder.mkdir(parents=True)

    def boxes(key: str, value: Tensor) -> list[tuple[list[int], list[int]]]:
        counts = [1] * value.dim()
        is_row_parallel = "linear_proj" in key or "linear_fc2" in key
        if key.endswith("linear_in.weight"):
            counts[-1 if is_row_parallel else -2] = tp
        elif key.endswith("linear_out.weight"):
            halves = 2 if config.gated and "linear_fc1.adapter.linear_out" in key else 1
            counts[-2] = tp * halves
        return even_boxes(value, counts)

    record: dict[str, Any] = {**tensors, "optimizer.state.exp_avg.x.adapter.y": torch.ones(3)}
    record["decoder.layers.mlp.linear_fc1.adapter._extra_state/shard_0_4"] = [None]
    write_chunks(folder, record, boxes)
    settings = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 4, "alpha": 8, **(peft or {})}
    if nemo2:
        (folder / "adapter_metadata.json").write_text("{}")
        (root / "context").mkdir()
        (root / "context" / "io.json").write_text(json.dumps(_fiddle_graph(settings, tp)))
    else:
        run = {"model": {"tensor_model_parallel_size": tp}, "peft": settings}
        (folder / "run_config.yaml").write_text(yaml.safe_dump(run))
        (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


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
