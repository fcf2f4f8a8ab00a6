"""NeMo 1 export: LoRA, IA3 and bottlenecks as the files of a .nemo archive, at any tensor split.

NeMo has one rank and one alpha for all linears, and the same layers for each kind of linear.
Smaller ranks and missing changes are filled with zeros, which have no effect. An adapter that
changes parts of fused projections becomes NeMo's variant "canonical", others its variant "nemo".
"""

import io
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.export_nemo_bottlenecks import (
    bottleneck_state,
    bottleneck_tuning,
    has_bottlenecks,
    uniform_bottlenecks,
)
from gpt.adapters.export_peft import AdapterExport, lost_field_notes
from gpt.adapters.fused_linears import join_parts, linear_groups, split_into_parts
from gpt.adapters.import_nemo_linears import BOTTLENECK, IA3, IA3_MODULES, LORA, LORA_MODULES
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.nemo.archive import CONFIG_FILE
from gpt.formats.nemo.reader import WEIGHTS_FILE
from gpt.linear_adapter import LinearAdapter
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import part_rows, shard_linear_adapter
from gpt.parallel.weight_sharding import LAYERS_PREFIX, layer_number

TARGET_MODULES = {
    "self_attention.linear_qkv": "attention_qkv",
    "self_attention.linear_proj": "attention_dense",
    "mlp.linear_fc1": "mlp_fc1",
    "mlp.linear_fc2": "mlp_fc2",
}


@dataclass(frozen=True)
class LinearChange:
    """The change of a linear or part."""

    linear: AdaptableLinear
    part: str
    change: LinearAdapter

    @property
    def layer(self) -> int:
        layer = layer_number(self.linear.name)
        assert layer is not None
        return layer

    @property
    def kind(self) -> str:
        """The linear without its layer, for example `mlp.linear_fc1`."""
        return self.linear.name.removeprefix(f"{LAYERS_PREFIX}{self.layer}.")


def convert_linears_to_nemo(
    adapter: Adapter,
    base: Checkpoint | None,
    model_config: Mapping[str, Any],
    base_name: str | None,
    tp: int,
) -> AdapterExport:
    """Convert the adapter weights for `tp` tensor ranks.

    `model_config` has NeMo's config fields of the base model, and `base_name` is the path from
    which NeMo will load the base model.
    """
    refuse_unsupported(adapter, "a .nemo file of NeMo 1", supports_bottlenecks=True)
    if base is None:
        raise AdapterError(
            f"adapter {adapter.card.name!r} changes linears, and NeMo's file describes the base "
            "model; give the base model with --model"
        )
    config = base.config
    if config.num_query_groups % tp:
        raise AdapterError(
            f"NeMo cannot divide the model's {config.num_query_groups} KV heads among {tp} tensor "
            "ranks; choose a smaller --tp"
        )
    if has_bottlenecks(adapter):
        scheme = BOTTLENECK
        bottlenecks = uniform_bottlenecks(adapter, config, tp)
        layers = {layer for layer, _ in bottlenecks}
        tuning = bottleneck_tuning(bottlenecks)
        states = [dict(bottleneck_state(bottlenecks, rank, tp)) for rank in range(tp)]
    else:
        scheme = LORA if adapter.rank else IA3
        is_lora = scheme == LORA
        changes = uniform_changes(adapter, config, tp) if is_lora else _ia3_changes(adapter, config)
        layers = {change.layer for change in changes}
        tuning = _lora_tuning(changes) if is_lora else {}
        states = [dict(_rank_state(changes, config, rank, tp)) for rank in range(tp)]
    tuning["layer_selection"] = _layer_selection(layers, config)
    record = {
        **model_config,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "restore_from_path": base_name,
        "peft": {"peft_scheme": scheme, "restore_from_path": None, f"{scheme}_tuning": tuning},
    }
    files = {CONFIG_FILE: yaml.safe_dump(record, sort_keys=False).encode()}
    for rank, state in enumerate(states):
        content = io.BytesIO()
        torch.save(state, content)
        folder = f"mp_rank_{rank:02}/" if tp > 1 else ""
        files[f"{folder}{WEIGHTS_FILE}"] = content.getvalue()
    notes = [*lost_field_notes(adapter)]
    if base_name is None:
        notes.append("the .nemo does not record the base model: set restore_from_path in NeMo")
    notes.append("the file was tested only with Preamble's reader, not with NeMo")
    return AdapterExport(files, tuple(notes))


def _lora_tuning(changes: Sequence[LinearChange]) -> dict[str, Any]:
    """Return the fields of NeMo's `lora_tuning`."""
    first = changes[0].change
    return {
        "variant": "canonical" if any(change.part for change in changes) else "nemo",
        "target_modules": list(dict.fromkeys(TARGET_MODULES[c.kind] for c in changes)),
        "adapter_dim": first.rank,
        "alpha": _yaml_number(first.scale * first.rank),
        "adapter_dropout": 0.0,
        "dropout_position": "pre",
        "column_init_method": "xavier",
        "row_init_method": "zero",
        "weight_tying": False,
        "position_embedding_strategy": None,
    }


def refuse_unsupported(
    adapter: Adapter, format_name: str, *, supports_bottlenecks: bool = False
) -> None:
    """Refuse an adapter with more than low-rank products or scales of linears.

    `supports_bottlenecks`: an adapter of bottlenecks is not refused.
    """
    name, changes = adapter.card.name, adapter.linears.values()
    problem = None
    if len(adapter.table):
        problem = "virtual tokens and adapter weights"
    elif any("experts." in key for key in adapter.linears):
        problem = "changes of experts"
    elif adapter.card.invocation:
        problem = "an invocation (activated LoRA)"
    elif has_bottlenecks(adapter):
        if supports_bottlenecks:
            return
        problem = "bottlenecks (a Houlsby adapter)"
    elif any(change.magnitude is not None for change in changes):
        problem = "magnitudes (DoRA)"
    elif adapter.rank and any(
        not change.rank or change.output_scale is not None for change in changes
    ):
        problem = "low-rank products and scales"
    if problem is not None:
        raise AdapterError(
            f"adapter {name!r} has {problem}, which {format_name} cannot express; export it with "
            f"{'--to nemo' if 'Houlsby' in problem else '--to peft'}, or train LoRA"
        )


def _yaml_number(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _layer_selection(layers: Set[int], config: GPTConfig) -> list[int] | None:
    """Return NeMo's numbers of the changed layers, which count from 1; None: all layers."""
    return None if len(layers) == config.num_layers else [layer + 1 for layer in sorted(layers)]


def uniform_changes(
    adapter: Adapter, config: GPTConfig, tp: int, *, all_layers: bool = False
) -> list[LinearChange]:
    """Return the changes of all targets in all changed layers, with one rank and one scale.

    The rank is a multiple of `tp`. `all_layers`: in layers that are not changed, too.
    """
    groups = list(linear_groups(adapter.linears, config))
    is_canonical = any("" not in parts for _, parts in groups)
    by_linear = {}
    for linear, parts in groups:
        if is_canonical and linear.parts and "" in parts:
            parts = split_into_parts(parts[""], linear, config)
        elif not is_canonical and "" not in parts:
            parts = {"": join_parts(adapter.card.name, parts, linear, config)}
        by_linear[linear.name] = parts
    rank = -(-max(c.rank for parts in by_linear.values() for c in parts.values()) // tp) * tp
    scale = next((change.scale for change in adapter.linears.values() if change.scale), 1.0)
    layers = {layer_number(name) for name in by_linear}
    kinds = {_kind(name) for name in by_linear}
    changes = []
    for linear in adaptable_linears(config).values():
        if not all_layers and layer_number(linear.name) not in layers:
            continue
        if _kind(linear.name) not in kinds:
            continue
        parts = by_linear.get(linear.name, {})
        for part in linear.parts if is_canonical and linear.parts else ("",):
            outputs = len(part_rows(linear, part, config))
            change = _with_rank(parts.get(part), rank, scale, linear.in_features, outputs)
            changes.append(LinearChange(linear, part, change))
    return changes


def _kind(name: str) -> str:
    return name.split(".", 3)[3]


def _with_rank(
    change: LinearAdapter | None, rank: int, scale: float, inputs: int, outputs: int
) -> LinearAdapter:
    """Return a low-rank product with this rank and scale; zeros have no effect."""
    lora_a, lora_b = torch.zeros(rank, inputs), torch.zeros(outputs, rank)
    if change is not None and change.lora_a is not None and change.lora_b is not None:
        factor = 1.0 if change.scale == scale else change.scale / scale
        lora_a[: change.rank] = change.lora_a
        lora_b[:, : change.rank] = change.lora_b * factor
    return LinearAdapter(lora_a, lora_b, scale)


def _ia3_changes(adapter: Adapter, config: GPTConfig) -> list[LinearChange]:
    """Return NeMo's scales of keys, of values and of fc2's input, in all changed layers."""
    groups = {
        linear.name: (linear, parts) for linear, parts in linear_groups(adapter.linears, config)
    }
    layers = {layer_number(name) for name in groups}
    changes = []
    for linear in adaptable_linears(config).values():
        if layer_number(linear.name) not in layers:
            continue
        parts = groups.get(linear.name, (linear, {}))[1]
        if "" in parts and linear.parts and parts[""].input_scale is None:
            parts = split_into_parts(parts[""], linear, config)
        targets = [part for kind, part in IA3_MODULES.values() if kind == _kind(linear.name)]
        for part, change in parts.items():
            scales = change.output_scale if part in targets and part else change.input_scale
            values = dict(change.tensors())
            if part not in targets and all(bool((value == 1).all()) for value in values.values()):
                continue
            if part not in targets or scales is None or len(values) != 1:
                raise AdapterError(
                    f"adapter {adapter.card.name!r} scales {linear.name}{part and '.'}{part}, but "
                    "NeMo's IA3 scales only keys, values and the input of fc2; export it with --to "
                    "peft"
                )
        for part in targets:
            size = len(part_rows(linear, part, config)) if part else linear.in_features
            name = "output_scale" if part else "input_scale"
            ones = LinearAdapter(**{name: torch.ones(size)})  # type: ignore[arg-type]
            changes.append(LinearChange(linear, part, parts.get(part, ones)))
    return changes


def _rank_state(
    changes: list[LinearChange], config: GPTConfig, rank: int, tp: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys and shards of a tensor rank."""
    lora_modules = {site: module for module, site in LORA_MODULES.items()}
    ia3_modules = {site: module for module, site in IA3_MODULES.items()}
    for change in changes:
        linear, part = change.linear, change.part
        site = (change.kind, part)
        module = (lora_modules if change.change.rank else ia3_modules)[site]
        block, _, name = module.partition(".")
        prefix = f"model.{LAYERS_PREFIX}{change.layer}.{block}.adapter_layer.{name}"
        term = shard_linear_adapter(change.change, linear, part, config, rank=rank, tp=tp)
        if term.lora_a is None or term.lora_b is None:
            scalers = term.output_scale if term.input_scale is None else term.input_scale
            assert scalers is not None
            yield f"{prefix}.scalers", scalers.clone()
            continue
        # NeMo shards the factor that Preamble keeps whole: A of a column-parallel linear by rank,
        # B of a row-parallel linear by output.
        lora_a, lora_b = term.lora_a, term.lora_b
        if linear.is_row_parallel:
            lora_b = lora_b.chunk(tp)[rank]
        else:
            lora_a = lora_a.chunk(tp)[rank]
        yield f"{prefix}.linear_in.weight", lora_a.clone()
        yield f"{prefix}.linear_out.weight", lora_b.clone()
