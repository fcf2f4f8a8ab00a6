"""Megatron-Bridge export: LoRA as a distributed checkpoint (`torch_dist`) with its run_config.yaml.

The tensors are whole, so Megatron loads them at any split, except the rows of linear_fc1 that
Megatron-Bridge takes for gates and ups of each tensor rank (`_split_notes`). A key stacks all
layers, as in Megatron-Bridge's own checkpoints. Megatron-Bridge has one rank and one alpha for all
linears, and either LoRA of fused linears or CanonicalLoRA of their parts, as NeMo 1 has; smaller
ranks and missing layers are filled with zeros.
"""

import io
import json
import tempfile
import warnings
from pathlib import Path

import torch
import yaml
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.export_nemo_linears import LinearChange, refuse_unsupported, uniform_changes
from gpt.adapters.export_peft import BRIDGE_FILES, AdapterExport, lost_field_notes
from gpt.adapters.import_bridge import PARTS
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.megatron.torch_dist import BACKEND_FILE
from gpt.formats.megatron.torch_dist_config import COMMON_FILE
from gpt.parallel.weight_sharding import LAYERS_PREFIX

WEIGHTS_FILE, METADATA_FILE, CONFIG_FILE = "__0_0.distcp", ".metadata", "run_config.yaml"
LORA_CLASS = "megatron.bridge.peft.lora.LoRA"
CANONICAL_CLASS = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"


def convert_linears_to_bridge(adapter: Adapter, base: Checkpoint | None) -> AdapterExport:
    """Convert the low-rank adapter weights."""
    if not adapter.linears:
        raise AdapterError(
            f"adapter {adapter.card.name!r} changes no linear, so it is no LoRA of "
            "Megatron-Bridge; export it with --to peft or --to nemo"
        )
    refuse_unsupported(adapter, "Megatron-Bridge's LoRA")
    if adapter.rank == 0:
        raise AdapterError(
            f"adapter {adapter.card.name!r} has scales (IA3), which Megatron-Bridge does not "
            "support; export it with --to peft"
        )
    if base is None:
        raise AdapterError(
            f"adapter {adapter.card.name!r} changes linears, whose layers depend on the base "
            "model; give the base model with --model"
        )
    changes = uniform_changes(adapter, base.config, 1, all_layers=True)
    is_canonical = any(change.part for change in changes)
    first = changes[0].change
    settings = {
        "_target_": CANONICAL_CLASS if is_canonical else LORA_CLASS,
        "target_modules": _target_modules(changes, is_canonical=is_canonical),
        "dim": first.rank,
        "alpha": first.scale * first.rank,
        "dropout": 0.0,
        "dropout_position": "pre",
    }
    common = io.BytesIO()
    torch.save({}, common)
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    files = {
        **_distributed_files(_stacked_tensors(changes, base.config.num_layers)),
        CONFIG_FILE: yaml.safe_dump({"peft": settings}, sort_keys=False).encode(),
        COMMON_FILE: common.getvalue(),
        BACKEND_FILE: json.dumps(backend).encode(),
    }
    assert files.keys() == set(BRIDGE_FILES)
    notes = (*lost_field_notes(adapter), *_split_notes(changes, base.config))
    return AdapterExport(files, notes)


def _target_modules(changes: list[LinearChange], *, is_canonical: bool) -> list[str]:
    """Return Megatron-Bridge's names of the targets."""
    part_names = {part: letter for letter, part in PARTS.items()}
    names = []
    for change in changes:
        module = change.kind.rpartition(".")[2]
        if is_canonical and change.part:
            letter = part_names[change.part]
            module = f"linear_{letter}" if module == "linear_qkv" else f"{module}_{letter}"
        names.append(module)
    return list(dict.fromkeys(names))


def _split_notes(changes: list[LinearChange], config: GPTConfig) -> list[str]:
    """Return a note if Megatron-Bridge loads rows in another order at several tensor ranks."""
    parts = {change.part for change in changes if change.kind == "mlp.linear_fc1"}
    if not parts or (config.gated and parts == {""}):
        return []
    versions = "Megatron-Bridge" if config.gated else "Megatron-Bridge up to 0.5.0"
    return [
        f"{versions} must load the directory with tensor_model_parallel_size 1: with more, it "
        "reorders the rows of linear_fc1"
    ]


def _stacked_tensors(changes: list[LinearChange], num_layers: int) -> dict[str, object]:
    """Return the tensors and, as Megatron-Core saves it and wants it, no state of each module."""
    part_names = {part: letter for letter, part in PARTS.items()}
    by_key: dict[str, list[Tensor]] = {}
    for change in changes:
        module = f"{LAYERS_PREFIX}{change.kind}.adapter."
        if change.part:
            module += f"adapter_{part_names[change.part]}."
        lora_a, lora_b = change.change.lora_a, change.change.lora_b
        assert lora_a is not None and lora_b is not None
        by_key.setdefault(f"{module}linear_in.weight", []).append(lora_a)
        by_key.setdefault(f"{module}linear_out.weight", []).append(lora_b)
    values: dict[str, object] = {key: torch.stack(tensors) for key, tensors in by_key.items()}
    for key in by_key:
        state = key.removesuffix("weight") + "_extra_state"
        values |= {f"{state}/shard_{layer}_{num_layers}": [None] for layer in range(num_layers)}
    return values


def _distributed_files(values: dict[str, object]) -> dict[str, bytes]:
    """Return the weights and their index, as torch's distributed checkpoint writes them."""
    # Imported here because the import takes long, and only this export needs it.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch warns that one process writes alone.
        save(values, storage_writer=FileSystemWriter(folder), no_dist=True)
        return {name: (Path(folder) / name).read_bytes() for name in (METADATA_FILE, WEIGHTS_FILE)}
