"""NeMo 1 import: LoRA, IA3 and Houlsby adapters from .nemo files and directories, at any split.

The tensors of each rank are the shards of NeMo's parallel linears. Those of all tensor ranks are
joined here, and the layers of all pipeline stages get their global numbers. In a distributed
checkpoint (`model_weights/`) the tensors are whole. Both variants of LoRA
are read: one low-rank product of a fused projection ("nemo"), and one of each of its parts
("canonical"). The rows of a fused projection are in Megatron's order already. A Houlsby adapter
(`peft_scheme: adapter`) is a bottleneck of the linear whose output it changes
(gpt/bottleneck_adapter.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.card import Adapter, Card, build_adapter, card_name
from gpt.adapters.distributed_tensors import DTYPES, layer_tensors
from gpt.adapters.fused_linears import fold_linears
from gpt.adapters.linear_check import LINEARS_BYTES_MAX, SCALE_MAX, has_effect, is_scale
from gpt.checkpoint.files.file_tree import FileTree
from gpt.checkpoint.files.torch_dcp import read_index
from gpt.checkpoint.files.torch_file import read_torch_span
from gpt.checkpoint.files.torch_save import is_dense
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.mappings.nemo_yaml import NemoConfig
from gpt.formats.megatron.rank_files import RankCoordinates
from gpt.formats.megatron.torch_dist import TRAINING_STATE_KEYS
from gpt.formats.nemo.reader import DISTRIBUTED_FOLDER, WEIGHTS_FILE, assign_ranks
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import join_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import part_rows
from gpt.parallel.weight_sharding import LAYERS_PREFIX
from gpt.settings import short_repr

LORA, IA3, BOTTLENECK = "lora", "ia3", "adapter"
# NeMo's modules under `adapter_layer`, and the linear or part that they change.
LORA_MODULES = {
    "self_attention.lora_kqv_adapter": ("self_attention.linear_qkv", ""),
    "self_attention.lora_unfused_kqv_adapter.q_adapter": ("self_attention.linear_qkv", "query"),
    "self_attention.lora_unfused_kqv_adapter.k_adapter": ("self_attention.linear_qkv", "key"),
    "self_attention.lora_unfused_kqv_adapter.v_adapter": ("self_attention.linear_qkv", "value"),
    "self_attention.lora_dense_attention_adapter": ("self_attention.linear_proj", ""),
    "mlp.lora_hto4h_adapter": ("mlp.linear_fc1", ""),
    "mlp.lora_unfused_hto4h_adapter.gate_adapter": ("mlp.linear_fc1", "gate"),
    "mlp.lora_unfused_hto4h_adapter.up_adapter": ("mlp.linear_fc1", "up"),
    "mlp.lora_4htoh_adapter": ("mlp.linear_fc2", ""),
}
IA3_MODULES = {
    "self_attention.key_infused_adapter": ("self_attention.linear_qkv", "key"),
    "self_attention.value_infused_adapter": ("self_attention.linear_qkv", "value"),
    "mlp.mlp_infused_adapter": ("mlp.linear_fc2", ""),
}
BOTTLENECK_MODULES = {
    "adapter_1": ("self_attention.linear_proj", ""),
    "adapter_2": ("mlp.linear_fc2", ""),
}
MODULES = {LORA: LORA_MODULES, IA3: IA3_MODULES, BOTTLENECK: BOTTLENECK_MODULES}
# The tensors of NeMo's modules, and their names in `LinearAdapter`. Of the norm's, the name depends
# on its position.
LEAVES = {
    LORA: {"linear_in.weight": "lora_a", "linear_out.weight": "lora_b"},
    IA3: {"scalers": "scalers"},
    BOTTLENECK: {
        "linear_in.weight": "bottleneck_down",
        "linear_out.weight": "bottleneck_up",
        "layer_norm.weight": "norm_weight",
        "layer_norm.bias": "norm_bias",
    },
}
VECTORS = ("scalers", "norm_weight", "norm_bias")
NORM_POSITIONS = ("pre", "post")
NORM_TYPES = ("mixedfusedlayernorm", "layernorm")  # Both are LayerNorms with one epsilon.
# The layers of Megatron-Core, and of NeMo's models before it.
KEY = re.compile(
    r"(?:model_?(?P<chunk>\d{1,4})\.)?(?:model\.)?(?:module\.)?"
    r"(?:decoder|language_model\.encoder)\.layers\.(?:(?P<layer>\d{1,5})\.)?"
    r"(?:(?P<block>self_attention|mlp)\.)?adapter_layer\.(?P<module>[\w.]+)"
)


@dataclass(frozen=True)
class _Site:
    """A tensor of a change: its layer, its linear or part, and its name in `LinearAdapter`."""

    layer: int
    linear: str  # Without the layer.
    part: str
    tensor_name: str


def is_nemo_linears(fields: NemoConfig) -> bool:
    """Tell whether the config is of an adapter other than a prompt; it may be unsupported."""
    return fields.section("peft").text("peft_scheme", "ptuning") not in ("ptuning", "None", "none")


def open_nemo_linears(
    path: Path, tree: FileTree, fields: NemoConfig, base: Checkpoint | None
) -> Adapter:
    """Open a LoRA, IA3 or Houlsby adapter."""
    peft = fields.section("peft")
    scheme = peft.text("peft_scheme")
    if scheme not in MODULES:
        raise AdapterError(
            f"{fields.location} has peft_scheme {scheme[:40]!r}; only lora, ia3, adapter and "
            "ptuning are supported: train one of these"
        )
    if base is None:
        raise AdapterError(
            f"{path} is an adapter that changes linears, whose shapes depend on the base model; "
            "give the base model with --model"
        )
    tuning = peft.section(f"{scheme}_tuning")
    _refuse_options(tuning)
    distributed = tree.subtree(DISTRIBUTED_FOLDER)
    if distributed.spans:
        tp = _gate_shards(fields)
        shards = _read_distributed(distributed, base.config, scheme)
    else:
        shards = _join_stages(path, tree, fields, base.config, scheme)
        tp = len(next(iter(shards.values())))
    _check_layers(path, shards, tuning, base.config)
    if scheme == BOTTLENECK:
        linears = without_zeros(_build_bottlenecks(path, shards, tuning, base.config))
    else:
        linears = _build_changes(path, shards, base.config, tp)
    if scheme == LORA:
        linears = without_zeros(_with_scales(linears, tuning))
    card = Card(
        card_name(path.with_suffix("")),
        method="bottleneck" if scheme == BOTTLENECK else scheme,
        kind="linears",
        hidden_size=base.config.hidden_size,
        notes=(f"imported from NeMo's {scheme}",),
    )
    return build_adapter(card, None, fold_linears(linears, base.config))


def _refuse_options(tuning: NemoConfig) -> None:
    """Refuse the options that change the computation of an adapter."""
    for name in ("weight_tying", "position_embedding_strategy"):
        value = tuning.get(name)
        if value not in (None, False):
            raise AdapterError(
                f"{tuning.location} has {name} {short_repr(value)}, which is not supported; train "
                "the adapter without weight tying and position embeddings"
            )


def _gate_shards(fields: NemoConfig) -> int:
    """Return the number of tensor ranks, whose gates and ups are side by side in fc1's rows."""
    tp = fields.get("tensor_model_parallel_size", 1)
    if type(tp) is not int or tp < 1:
        raise AdapterError(
            f"{fields.location} has tensor_model_parallel_size {short_repr(tp)}; it must be a "
            "whole number: copy the archive again"
        )
    return tp


def _read_distributed(tree: FileTree, config: GPTConfig, scheme: str) -> dict[_Site, list[Tensor]]:
    """Return the whole tensors of a distributed checkpoint."""
    index = read_index(tree, _is_adapter_key)
    if not index.tensors:
        raise AdapterError(f"{tree.path} has no tensors of an adapter; save it again")
    shards: dict[_Site, list[Tensor]] = {}
    for key, entry in index.tensors.items():
        site, _ = _parse_key(key, scheme, str(tree.path))
        number = None if site.layer < 0 else str(site.layer)
        dimensions = 1 if site.tensor_name in VECTORS else 2
        for layer, tensor in layer_tensors(entry, number, dimensions, config.num_layers):
            shards.setdefault(replace(site, layer=layer), []).append(tensor)
    return _complete_shards(tree.path, shards, 1)


def _is_adapter_key(key: str) -> bool:
    is_state = TRAINING_STATE_KEYS.match(key) or "_extra_state" in key
    return ".adapter_layer." in key and not is_state


def _join_stages(
    path: Path, tree: FileTree, fields: NemoConfig, config: GPTConfig, scheme: str
) -> dict[_Site, list[Tensor]]:
    """Return the shards of each tensor in order of tensor rank, with global layer numbers."""
    spans = {name: span for name, span in tree.spans.items() if name.endswith(WEIGHTS_FILE)}
    if not spans:
        raise AdapterError(f"{path} has no {WEIGHTS_FILE}; copy the archive again")
    by_folder = {f"mp_rank_00/{name}".split("/")[-2]: span for name, span in spans.items()}
    split, span_by_rank = assign_ranks(path, by_folder, fields)
    vpp = fields.get("virtual_pipeline_model_parallel_size", 1)
    chunks = vpp if type(vpp) is int and vpp > 1 else 1
    chunk_layers, remainder = divmod(config.num_layers, split.pp * chunks)
    if remainder:
        raise AdapterError(
            f"{path} has {split.pp} pipeline stages with {chunks} chunks, which do not divide the "
            f"model's {config.num_layers} layers; give the model that it was trained on"
        )
    shards: dict[_Site, list[Tensor]] = {}
    for rank, span in span_by_rank.items():
        source = f"{path}: {span.path.name} of tensor rank {rank.tensor}, stage {rank.stage}"
        for key, tensor in _flat_state(read_torch_span(span), source):
            site, chunk = _parse_key(key, scheme, source)
            if not 0 <= site.layer < chunk_layers or chunk >= chunks:
                raise AdapterError(
                    f"{source} has {key!r}, but a stage of this model has {chunk_layers} layers; "
                    "give the model that it was trained on"
                )
            first_layer = (chunk * split.pp + rank.stage) * chunk_layers
            site = replace(site, layer=first_layer + site.layer)
            _add_shard(shards, site, rank, _checked_tensor(tensor, f"{source}: {key}"), source)
    return _complete_shards(path, shards, split.tp)


def _flat_state(record: object, source: str) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of a state dict; the dicts of chunks are flattened."""
    if isinstance(record, dict) and isinstance(record.get("state_dict"), dict):
        record = record["state_dict"]
    if not isinstance(record, dict):
        raise AdapterError(
            f"{source} is a {type(record).__name__}, not a state dict; save the adapter again"
        )
    for key, value in record.items():
        if isinstance(value, dict):
            for inner_key, inner_value in value.items():
                yield f"{key}.{inner_key}", inner_value
        else:
            yield str(key), value


def _parse_key(key: str, scheme: str, source: str) -> tuple[_Site, int]:
    """Return the site of a key, with the layer's number in its chunk, and the chunk's number.

    The layer is -1 if the key has no number.
    """
    match = KEY.fullmatch(key)
    if match is not None:
        block = f"{match['block']}." if match["block"] else ""
        module, _, leaf = f"{block}{match['module']}".rpartition(".")
        if leaf in ("weight", "bias"):
            module, _, inner = module.rpartition(".")
            leaf = f"{inner}.{leaf}"
        tensor_name = LEAVES[scheme].get(leaf, "")
        if module in MODULES[scheme] and tensor_name:
            linear, part = MODULES[scheme][module]
            layer = int(match["layer"] or -1)
            return _Site(layer, linear, part, tensor_name), int(match["chunk"] or 0)
    raise AdapterError(f"{source} has {key[:200]!r}, {_unknown_key_reason(key)}")


def _unknown_key_reason(key: str) -> str:
    if re.search(r"adapter_layer\.adapter_[12]\.", key):
        return (
            "a tensor of a Houlsby adapter that is not supported here; train it as a "
            "parallel_adapter with the peft_scheme adapter, without weight tying"
        )
    if "local_experts" in key or "moe" in key:
        return "a change of an expert's linear, which is not supported; train attention's linears"
    return "which is no tensor of this kind of adapter; save the adapter again with NeMo"


def _checked_tensor(tensor: object, source: str) -> Tensor:
    is_usable = (
        isinstance(tensor, Tensor)
        and is_dense(tensor)
        and tensor.dtype in DTYPES
        and tensor.ndim in (1, 2)
        and 4 * tensor.numel() <= LINEARS_BYTES_MAX
    )
    if not isinstance(tensor, Tensor) or not is_usable:
        raise AdapterError(
            f"{source} is no dense matrix or vector of float32, bfloat16 or float16 of a usual "
            "size; save the adapter again"
        )
    return tensor.detach()


def _add_shard(
    shards: dict[_Site, list[Tensor]],
    site: _Site,
    rank: RankCoordinates,
    tensor: Tensor,
    source: str,
) -> None:
    site_shards = shards.setdefault(site, [])
    if len(site_shards) != rank.tensor:
        raise AdapterError(
            f"{source} has a tensor of {site.linear} in layer {site.layer} that another rank lacks "
            "or that it has twice; the files are of different adapters: copy the archive again"
        )
    site_shards.append(tensor)


def _complete_shards(
    path: Path, shards: dict[_Site, list[Tensor]], tp: int
) -> dict[_Site, list[Tensor]]:
    for site, site_shards in shards.items():
        if len(site_shards) != tp:
            raise AdapterError(
                f"{path} has {len(site_shards)} of the {tp} shards of {site.linear} in layer "
                f"{site.layer}; copy the archive again"
            )
    if not shards:
        raise AdapterError(f"{path} has no tensors of an adapter; save it again")
    return shards


def _check_layers(
    path: Path, shards: Mapping[_Site, object], tuning: NemoConfig, config: GPTConfig
) -> None:
    """Refuse an adapter without tensors in some of its layers. `layer_selection` counts from 1."""
    selection = tuning.get("layer_selection")
    expected = set(range(config.num_layers))
    if selection is not None:
        if not isinstance(selection, list) or not all(type(layer) is int for layer in selection):
            raise AdapterError(
                f"{tuning.location} has layer_selection {short_repr(selection)}; it must be a list "
                "of layer numbers: copy the archive again"
            )
        expected = {layer - 1 for layer in selection}
    by_tensor: dict[tuple[str, str, str], set[int]] = {}
    for site in shards:
        by_tensor.setdefault((site.linear, site.part, site.tensor_name), set()).add(site.layer)
    for (linear, part, tensor_name), layers in by_tensor.items():
        if layers != expected:
            different = min(layers ^ expected)
            raise AdapterError(
                f"{path} changes {join_key(linear, part)} in {len(layers)} layers, but its config "
                f"selects {len(expected)} layers (layer {different} differs, in {tensor_name}); "
                "copy the archive again, or give the model that it was trained on"
            )


def _build_bottlenecks(
    path: Path,
    shards: Mapping[_Site, Sequence[Tensor]],
    tuning: NemoConfig,
    config: GPTConfig,
) -> dict[str, LinearAdapter]:
    """Return the bottlenecks; NeMo shards their inner channels over the tensor ranks."""
    position, size = _norm_position(tuning), tuning.get("adapter_dim", 32)
    values: dict[str, dict[str, Any]] = {}
    for site, site_shards in shards.items():
        name = f"{LAYERS_PREFIX}{site.layer}.{site.linear}"
        if name not in adaptable_linears(config):
            raise AdapterError(
                f"{path} has an adapter behind the experts of layer {site.layer}, which is not "
                "supported; train LoRA of the attention linears"
            )
        typed = [shard.float() for shard in site_shards]
        tensor_name = site.tensor_name
        if tensor_name in VECTORS:
            if any(not torch.equal(shard, typed[0]) for shard in typed[1:]):
                raise AdapterError(
                    f"{path} has norms of {site.linear} in layer {site.layer} that differ between "
                    "tensor ranks, so its ranks compute different networks; train it without "
                    "sequence parallelism"
                )
            tensor, tensor_name = typed[0], f"bottleneck_{position}_{tensor_name}"
        else:
            tensor = _concat(path, site, typed, 1 if tensor_name == "bottleneck_up" else 0)
        values.setdefault(name, {})[tensor_name] = tensor
    expected = {"bottleneck_down", "bottleneck_up"}
    if position is not None:
        expected |= {f"bottleneck_{position}_norm_{leaf}" for leaf in ("weight", "bias")}
    for name, tensors in values.items():
        if tensors.keys() != expected or len(tensors["bottleneck_down"]) != size:
            shapes = ", ".join(f"{leaf} {tuple(value.shape)}" for leaf, value in tensors.items())
            raise AdapterError(
                f"{tuning.location} has adapter_dim {short_repr(size)} and norm_position "
                f"{short_repr(position)}, but {name} has {shapes}; copy the archive again"
            )
    return {key: LinearAdapter(**tensors) for key, tensors in values.items()}


def _norm_position(tuning: NemoConfig) -> str | None:
    """Return where the norm of each bottleneck is; None: it has none."""
    if "norm_position" in tuning and tuning.get("norm_position") is None:
        return None
    position = tuning.get("norm_position", "pre")
    norm_type = tuning.get("norm_type", NORM_TYPES[0])
    if position not in NORM_POSITIONS or norm_type not in NORM_TYPES:
        raise AdapterError(
            f"{tuning.location} has norm_position {short_repr(position)} and norm_type "
            f"{short_repr(norm_type)}, which NeMo does not have; they are one of "
            f"{', '.join(NORM_POSITIONS)}, null and one of {', '.join(NORM_TYPES)}: copy the "
            "archive again"
        )
    return str(position)


def _build_changes(
    path: Path, shards: Mapping[_Site, Sequence[Tensor]], config: GPTConfig, tp: int
) -> dict[str, LinearAdapter]:
    model_linears = adaptable_linears(config)
    values: dict[str, dict[str, Any]] = {}
    for site, site_shards in shards.items():
        name = f"{LAYERS_PREFIX}{site.layer}.{site.linear}"
        linear = model_linears.get(name)
        if linear is None or (site.part and site.part not in linear.parts):
            raise AdapterError(
                f"{path} changes {join_key(name, site.part)}, which this model does not have; give "
                "the model that it was trained on"
            )
        tensor = _join_shards(path, site, site_shards, linear, config, tp=tp)
        tensor_name = site.tensor_name
        if tensor_name == "scalers":
            tensor_name = "input_scale" if linear.is_row_parallel else "output_scale"
        values.setdefault(join_key(name, site.part), {})[tensor_name] = tensor
    return {key: LinearAdapter(**tensors) for key, tensors in values.items()}


def _join_shards(
    path: Path,
    site: _Site,
    shards: Sequence[Tensor],
    linear: AdaptableLinear,
    config: GPTConfig,
    *,
    tp: int,
) -> Tensor:
    """Return the whole tensor of all tensor ranks' shards, in fp32."""
    # The input of a row-parallel linear is sharded; the first factor of a column-parallel linear
    # is sharded by rank.
    by_columns = site.tensor_name == "lora_a" and linear.is_row_parallel
    joined = _concat(path, site, [shard.float() for shard in shards], 1 if by_columns else 0)
    if site.tensor_name == "lora_b" and not site.part and "gate" in linear.parts:
        joined = _regroup_gates(path, joined, tp)
    outputs = len(part_rows(linear, site.part, config))
    dimension, expected = -1, linear.in_features
    if site.tensor_name != "lora_a" and not (
        site.tensor_name == "scalers" and linear.is_row_parallel
    ):
        dimension, expected = 0, outputs
    ndim = 1 if site.tensor_name == "scalers" else 2
    if joined.ndim != ndim or joined.shape[dimension] != expected:
        raise AdapterError(
            f"{path} has {site.tensor_name} of {join_key(linear.name, site.part)} with the shape "
            f"{tuple(joined.shape)} over {len(shards)} tensor ranks; this model needs {expected} "
            f"in dimension {dimension}: give the model that it was trained on"
        )
    return joined


def _concat(path: Path, site: _Site, shards: list[Tensor], dimension: int) -> Tensor:
    if len({shard.shape for shard in shards}) > 1 or shards[0].ndim <= dimension:
        shapes = ", ".join(str(tuple(shard.shape)) for shard in shards[:4])
        raise AdapterError(
            f"{path} has shards of {site.linear} in layer {site.layer} with the shapes {shapes}, "
            "which do not belong together; copy the archive again"
        )
    return torch.cat(shards, dimension)


def _regroup_gates(path: Path, joined: Tensor, tp: int) -> Tensor:
    """Place all gates above all ups; each rank's shard has its own gates above its own ups."""
    if len(joined) % (2 * tp):
        raise AdapterError(
            f"{path} has linear_fc1 with {len(joined)} rows, which {tp} tensor ranks cannot hold "
            "with equal gates and ups; copy the archive again"
        )
    halves = joined.view(tp, 2, -1, joined.shape[1])
    return halves.transpose(0, 1).reshape(joined.shape)


def _with_scales(
    linears: Mapping[str, LinearAdapter], tuning: NemoConfig
) -> dict[str, LinearAdapter]:
    """Set the scales alpha / adapter_dim; alpha is adapter_dim if it is not set."""
    rank = tuning.get("adapter_dim", 32)
    alpha = tuning.get("alpha", rank)
    if type(rank) is not int or rank < 1 or not is_scale(alpha):
        raise AdapterError(
            f"{tuning.location} has adapter_dim {short_repr(rank)} and alpha {short_repr(alpha)}; "
            f"they must be numbers, and alpha below {SCALE_MAX:g}: copy the archive again"
        )
    for key, change in linears.items():
        if change.lora_a is None or change.lora_b is None or change.rank != rank:
            raise AdapterError(
                f"{tuning.location} has adapter_dim {rank}, but {key} has "
                f"{', '.join(f'{name} {tuple(value.shape)}' for name, value in change.tensors())}; "
                "copy the archive again"
            )
    return {key: replace(change, scale=alpha / rank) for key, change in linears.items()}


def without_zeros(linears: dict[str, LinearAdapter]) -> dict[str, LinearAdapter]:
    """Remove low-rank products of zeros: NeMo has the same targets in all layers."""
    changes = {key: change for key, change in linears.items() if has_effect(change)}
    return changes or linears
