"""Import of LoRA and DoRA from distributed checkpoints of Megatron-Bridge and NeMo 2.

A key names a linear of the model and one factor of its change; the tensor is whole, whatever the
parallel sizes of the training were. The rank and alpha are in run_config.yaml, and for NeMo 2 in
the context of the run. Each change acts as LoRA, except the magnitudes of DoRA: Megatron-Bridge
computes them as PEFT does only for one tensor rank and projections without biases.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.adapters.card import Adapter, Card, build_adapter, card_name
from gpt.adapters.distributed_tensors import layer_tensors
from gpt.adapters.fused_linears import fold_linears, with_weight_norms
from gpt.adapters.import_nemo_linears import without_zeros
from gpt.adapters.linear_check import RANK_MAX
from gpt.checkpoint.files.file_tree import scan_folder, scan_folder_recursive
from gpt.checkpoint.files.torch_dcp import ChunkedTensor, read_index
from gpt.checkpoint.logical_tensor import Checkpoint, summarize_names
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.mappings.nemo_yaml import NemoConfig, read_config, read_fiddle_graph
from gpt.formats.megatron.torch_dist import TRAINING_STATE_KEYS, find_torch_dist
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import join_key
from gpt.parallel.adaptable_linears import adaptable_linears
from gpt.parallel.adapter_sharding import part_rows
from gpt.parallel.weight_sharding import LAYERS_PREFIX
from gpt.settings import short_repr

RUN_CONFIG = "run_config.yaml"
CONTEXT_GRAPH = "context/io.json"
METHODS = {"LoRA": "lora", "CanonicalLoRA": "lora", "DoRA": "dora"}
PARTS = {"q": "query", "k": "key", "v": "value", "gate": "gate", "up": "up"}
LEAVES = {
    "linear_in.weight": "lora_a",
    "linear_out.weight": "lora_b",
    "weight_magnitude": "magnitude",
}
# Pull request 1818 of Megatron-Bridge.
CANONICAL_NOTE = (
    "its queries, keys and values have separate matrices; Megatron-Bridge up to 0.2 trained these "
    "for the wrong heads on models with grouped queries: compare the answers with the training run"
)
KEY = re.compile(
    r"(?:module\.)*decoder\.layers\.(?:(?P<layer>\d{1,5})\.)?"
    r"(?P<linear>self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])\.adapter\."
    r"(?:adapter_(?P<part>q|k|v|gate|up)\.)?"
    r"(?P<leaf>linear_in\.weight|linear_out\.weight|weight_magnitude)"
)


@dataclass(frozen=True)
class _Settings:
    """What the run's config says of the adapter."""

    method: str
    rank: int
    alpha: float
    tp: int
    source: Path

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def find_bridge_adapter(path: Path) -> Path | None:
    """Return the folder of a distributed checkpoint; None if there is none."""
    return find_torch_dist(path) if path.is_dir() else None


def open_bridge(path: Path, folder: Path, base: Checkpoint | None) -> Adapter:
    """Open the adapter in the distributed checkpoint `folder`, which was found under `path`."""
    index = read_index(scan_folder(folder), _is_adapter_key)
    if not index.tensors:
        raise AdapterError(
            f"{folder} is a distributed checkpoint without tensors of an adapter; give the "
            "checkpoint of a LoRA or DoRA run, or a soft prompt or PEFT directory"
        )
    if base is None:
        raise AdapterError(
            f"{path} is an adapter that changes linears, whose shapes depend on the base model; "
            "give the base model with --model"
        )
    settings = _read_settings(folder)
    changes = _read_changes(folder, index.tensors, settings, base.config)
    linears = fold_linears(without_zeros(changes), base.config)
    if settings.method == "dora":
        _check_dora(settings, base.config)
        linears = with_weight_norms(linears, base)
    notes = ["imported from a distributed checkpoint of Megatron-Bridge or NeMo 2"]
    if any(".adapter_q." in key for key in index.tensors):
        notes.append(CANONICAL_NOTE)
    card = Card(
        card_name(path),
        method=settings.method,
        kind="linears",
        hidden_size=base.config.hidden_size,
        notes=tuple(notes),
    )
    return build_adapter(card, None, linears)


def _is_adapter_key(key: str) -> bool:
    is_state = TRAINING_STATE_KEYS.match(key) or "_extra_state" in key
    return ".adapter." in key and not is_state


def _read_settings(folder: Path) -> _Settings:
    """Read the adapter's settings beside the weights, or in the context of a NeMo 2 run."""
    for directory in (folder, folder.parent):
        if (directory / RUN_CONFIG).is_file():
            tree = scan_folder(directory)
            fields = NemoConfig(read_config(tree.spans[RUN_CONFIG]), str(directory / RUN_CONFIG))
            tp = fields.section("model").get("tensor_model_parallel_size", 0)
            return _check_settings(fields.section("peft").record, tp, directory / RUN_CONFIG)
        if (directory / CONTEXT_GRAPH).is_file():
            span = scan_folder_recursive(directory / "context").spans["io.json"]
            records = read_fiddle_graph(span)
            peft_records = [record for record in records if _class_name(record) in METHODS]
            sizes = [record.get("tensor_model_parallel_size") for record in records]
            tp = next((size for size in sizes if type(size) is int), 0)
            if len(peft_records) == 1:
                return _check_settings(peft_records[0], tp, directory / CONTEXT_GRAPH)
    raise AdapterError(
        f"{folder} has no {RUN_CONFIG} with a peft section and no {CONTEXT_GRAPH} with a LoRA "
        "beside it, so the adapter's alpha is unknown; copy the file from the training run"
    )


def _class_name(record: Mapping[str, Any]) -> str:
    return str(record.get("_target_", "")).rpartition(".")[2]


def _check_settings(record: Mapping[str, Any], tp: object, source: Path) -> _Settings:
    name = _class_name(record)
    if name not in METHODS:
        raise AdapterError(
            f"{source} has the adapter {name[:60]!r}; only {', '.join(METHODS)} are supported: "
            "train one of these"
        )
    rank, alpha = record.get("dim", 32), record.get("alpha", 64 if name == "DoRA" else 32)
    is_alpha = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    is_rank = type(rank) is int and 1 <= rank <= RANK_MAX
    if not is_rank or not is_alpha or not math.isfinite(alpha):
        raise AdapterError(
            f"{source} has dim {short_repr(rank)} and alpha {short_repr(alpha)}; dim must be from "
            f"1 to {RANK_MAX}, and alpha a number: copy the file from the training run"
        )
    return _Settings(METHODS[name], rank, alpha, tp if type(tp) is int else 0, source)


def _check_dora(settings: _Settings, config: GPTConfig) -> None:
    """Refuse magnitudes that Megatron-Bridge computes in another way than PEFT."""
    if settings.tp != 1:
        raise AdapterError(
            f"{settings.source} has DoRA with tensor_model_parallel_size {settings.tp}: "
            "Megatron-Bridge then computes norms over a part of the weights, and saves one rank's "
            "magnitudes; train it with 1 tensor rank, or train LoRA"
        )
    if config.qkv_bias:
        raise AdapterError(
            f"{settings.source} has DoRA on a model with biases of queries, keys and values, which "
            "Megatron-Bridge multiplies by the magnitudes too; train LoRA"
        )


def _read_changes(
    folder: Path, tensors: Mapping[str, ChunkedTensor], settings: _Settings, config: GPTConfig
) -> dict[str, LinearAdapter]:
    values: dict[str, dict[str, Tensor]] = {}
    for key, entry in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            problem = "an expert's linear" if "expert" in key else "no supported linear"
            raise AdapterError(
                f"{folder} has {key[:200]!r}, a change of {problem}; train the adapter on the "
                "linears of attention and of dense MLPs"
            )
        part = PARTS[match["part"]] if match["part"] else ""
        leaf = LEAVES[match["leaf"]]
        dimensions = 1 if leaf == "magnitude" else 2
        for layer, tensor in layer_tensors(entry, match["layer"], dimensions, config.num_layers):
            name = join_key(f"{LAYERS_PREFIX}{layer}.{match['linear']}", part)
            _check_shape(folder, name, leaf, tensor, settings, config)
            if leaf in values.setdefault(name, {}):
                raise AdapterError(f"{folder} has {leaf} of {name} twice; copy it again")
            values[name][leaf] = tensor
    expected = {"lora_a", "lora_b"} | ({"magnitude"} if settings.method == "dora" else set())
    for name, parts in values.items():
        if set(parts) != expected:
            raise AdapterError(
                f"{folder} has {summarize_names(sorted(parts))} of {name}, but a {settings.method} "
                f"adapter has {', '.join(sorted(expected))}; copy the checkpoint again"
            )
    return {
        name: replace(LinearAdapter(), **tensors_of, scale=settings.scale)
        for name, tensors_of in values.items()
    }


def _check_shape(
    folder: Path, key: str, leaf: str, tensor: Tensor, settings: _Settings, config: GPTConfig
) -> None:
    linear = adaptable_linears(config).get(key)
    part = ""
    if linear is None:
        name, _, part = key.rpartition(".")
        linear = adaptable_linears(config).get(name)
    if linear is None or (part and part not in linear.parts):
        raise AdapterError(
            f"{folder} changes {key}, which this model does not have; give the model that it was "
            "trained on"
        )
    outputs = len(part_rows(linear, part, config))
    shapes = {
        "lora_a": (settings.rank, linear.in_features),
        "lora_b": (outputs, settings.rank),
        "magnitude": (outputs,),
    }
    if tuple(tensor.shape) != shapes[leaf]:
        raise AdapterError(
            f"{folder} has {leaf} of {key} with the shape {tuple(tensor.shape)}; this model and "
            f"dim {settings.rank} of {settings.source.name} need {shapes[leaf]}: give the model "
            "that it was trained on"
        )
