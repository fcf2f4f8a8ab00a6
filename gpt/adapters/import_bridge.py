"""Import of LoRA and DoRA from distributed checkpoints of Megatron-Bridge and NeMo 2.

A key names a linear of the model and one factor of its change; the tensor is whole, whatever the
parallel sizes of the training were. The rank and alpha are in run_config.yaml, and for NeMo 2 in
the context of the run. Each change acts as LoRA, with these exceptions:

- Megatron-Bridge computes the magnitudes of DoRA as PEFT does only for one tensor rank and
  projections without biases.
- The order of a B's rows in linear_fc1 depends on the tensor ranks that trained it (`_fc1_rows`).
- NeMo 2 and Megatron-Bridge up to 0.2 add the separate changes of queries, keys and values to other
  rows of linear_qkv (`_with_trained_rows`).

The number of tensor ranks is known from the chunks: A of a column-parallel linear is cut by rank.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.card import Adapter, Card, build_adapter, card_name
from gpt.adapters.distributed_tensors import (
    count_cuts,
    halves_to_ranks,
    layer_tensors,
    ranks_to_halves,
)
from gpt.adapters.fused_linears import (
    fold_linears,
    join_parts,
    linear_groups,
    select_outputs,
    with_weight_norms,
)
from gpt.adapters.import_nemo_linears import without_zeros
from gpt.adapters.linear_check import RANK_MAX, SCALE_MAX, is_scale
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
# A field of run_config.yaml since Megatron-Bridge 0.3, which has pull request 1818.
FIELD_SINCE_0_3 = "optimizer_config_override_provider"
CONFIG_CLASS = "megatron.bridge.training.config.ConfigContainer"
BLOCKS_NOTE = (
    "NeMo 2 and Megatron-Bridge up to 0.2 added its changes of queries, keys and values to rows of "
    "other heads; they are added to the same rows here"
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
    has_blocks: bool  # Changes of queries, keys and values are added as `_with_trained_rows` says.

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
    tp = _tensor_ranks(folder, index.tensors)
    changes = _read_changes(folder, index.tensors, settings, base.config, tp)
    notes = ["imported from a distributed checkpoint of Megatron-Bridge or NeMo 2"]
    if any(key.endswith(".query") for key in changes):
        _check_groups(settings, base.config, tp)
        if settings.has_blocks:
            placed = _with_trained_rows(changes, base.config, tp)
            notes += [] if placed.keys() == changes.keys() else [BLOCKS_NOTE]
            changes = placed
    if settings.method == "dora":
        _check_dora(settings, base.config)
        # A magnitude can have an effect without a product, which its weight norm shows.
        linears = with_weight_norms(fold_linears(changes, base.config), base)
        linears = without_zeros(linears)
    else:
        linears = fold_linears(without_zeros(changes), base.config)
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
            is_old = fields.get("_target_") == CONFIG_CLASS and FIELD_SINCE_0_3 not in fields.record
            record, source = fields.section("peft").record, directory / RUN_CONFIG
            return _check_settings(record, tp, source, has_blocks=is_old)
        if (directory / CONTEXT_GRAPH).is_file():
            span = scan_folder_recursive(directory / "context").spans["io.json"]
            records = read_fiddle_graph(span)
            peft_records = [record for record in records if _class_name(record) in METHODS]
            sizes = [record.get("tensor_model_parallel_size") for record in records]
            tp = next((size for size in sizes if type(size) is int), 0)
            if len(peft_records) == 1:
                source = directory / CONTEXT_GRAPH
                return _check_settings(peft_records[0], tp, source, has_blocks=True)
    raise AdapterError(
        f"{folder} has no {RUN_CONFIG} with a peft section and no {CONTEXT_GRAPH} with a LoRA "
        "beside it, so the adapter's alpha is unknown; copy the file from the training run"
    )


def _class_name(record: Mapping[str, Any]) -> str:
    return str(record.get("_target_", "")).rpartition(".")[2]


def _check_settings(
    record: Mapping[str, Any], tp: object, source: Path, *, has_blocks: bool
) -> _Settings:
    name = _class_name(record)
    if name not in METHODS:
        raise AdapterError(
            f"{source} has the adapter {name[:60]!r}; only {', '.join(METHODS)} are supported: "
            "train one of these"
        )
    rank, alpha = record.get("dim", 32), record.get("alpha", 64 if name == "DoRA" else 32)
    is_rank = type(rank) is int and 1 <= rank <= RANK_MAX
    if not is_rank or not is_scale(alpha):
        raise AdapterError(
            f"{source} has dim {short_repr(rank)} and alpha {short_repr(alpha)}; dim must be from "
            f"1 to {RANK_MAX}, and alpha a number below {SCALE_MAX:g}: copy the file from the "
            "training run"
        )
    tp = tp if type(tp) is int else 0
    return _Settings(METHODS[name], rank, alpha, tp, source, has_blocks)


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


def _tensor_ranks(folder: Path, tensors: Mapping[str, ChunkedTensor]) -> int:
    """Return the number of tensor ranks that saved the checkpoint; 1 if it makes no difference."""
    cuts = {
        count_cuts(entry, -2)
        for key, entry in tensors.items()
        if key.endswith("linear_in.weight") and re.search("linear_(qkv|fc1)", key)
    }
    if len(cuts - {0}) != len(cuts) or len(cuts) > 1:
        raise AdapterError(
            f"{folder} has chunks that are not of one number of tensor ranks; copy the checkpoint "
            "again"
        )
    return next(iter(cuts), 1)


def _check_groups(settings: _Settings, config: GPTConfig, tp: int) -> None:
    """Refuse separate changes of queries, keys and values with a part of a KV head on each rank."""
    if config.num_query_groups % tp:
        raise AdapterError(
            f"{settings.source} has a CanonicalLoRA that {tp} tensor ranks trained on a model with "
            f"{config.num_query_groups} KV heads: Megatron-Bridge then adds changes of one token "
            "to others; train it with fewer tensor ranks, or train LoRA"
        )


def _with_trained_rows(
    changes: Mapping[str, LinearAdapter], config: GPTConfig, tp: int
) -> dict[str, LinearAdapter]:
    """Return changes of whole linears instead of the changes of queries, keys and values.

    Each tensor rank's rows of linear_qkv are those of each KV head: its queries, its key and value.
    The training run added the changes of all its queries to the rank's first rows, those of all
    keys to the next, and those of all values to the last.
    """
    placed: dict[str, LinearAdapter] = {}
    for linear, parts in linear_groups(changes, config):
        if "query" not in parts:
            placed.update((join_key(linear.name, part), parts[part]) for part in parts)
            continue
        blocks = [part_rows(linear, part, config).view(tp, -1) for part in linear.parts]
        rows = torch.cat(blocks, 1).flatten()
        if torch.equal(rows, torch.arange(len(rows))):
            placed.update((join_key(linear.name, part), parts[part]) for part in parts)
        else:
            joined = join_parts("", parts, linear, config)
            placed[linear.name] = select_outputs(joined, rows)
    return placed


def _read_changes(
    folder: Path,
    tensors: Mapping[str, ChunkedTensor],
    settings: _Settings,
    config: GPTConfig,
    tp: int,
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
            if leaf == "lora_b" and match["linear"] == "mlp.linear_fc1":
                tensor = _fc1_rows(folder, entry, tensor, tp, is_gated=config.gated and not part)
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


def _fc1_rows(
    folder: Path, entry: ChunkedTensor, rows: Tensor, tp: int, *, is_gated: bool
) -> Tensor:
    """Return the rows of a B of linear_fc1 in the model's order.

    `is_gated`: these are gates and ups together. Megatron-Bridge up to 0.5.0 and NeMo 2.2 to 2.7
    save halves of a tensor rank's rows also of an MLP without gates, and all versions also of
    CanonicalLoRA's gates, and of its ups. NeMo 2.0 and 2.1 save no halves, also of gated MLPs.
    """
    cuts = count_cuts(entry, -2)
    if cuts not in (tp, 2 * tp):
        raise AdapterError(
            f"{folder} has {entry.key[:200]!r} in chunks that do not belong to {tp} tensor ranks; "
            "copy the checkpoint again"
        )
    has_halves = cuts == 2 * tp
    if tp == 1 or has_halves == is_gated:
        return rows
    return halves_to_ranks(rows, tp) if has_halves else ranks_to_halves(rows, tp)


def _check_shape(
    folder: Path, key: str, leaf: str, tensor: Tensor, settings: _Settings, config: GPTConfig
) -> None:
    linear = adaptable_linears(config).get(key)
    part = ""
    if linear is None:
        name, _, part = key.rpartition(".")
        linear = adaptable_linears(config).get(name)
    if linear is not None and part in ("gate", "up") and not config.gated:
        raise AdapterError(
            f"{folder} changes gates and ups, but this model has no gated MLPs; train LoRA, or "
            "CanonicalLoRA without linear_fc1_up and linear_fc1_gate"
        )
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
