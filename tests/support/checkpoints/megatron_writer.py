"""Writes Megatron-LM's `torch` checkpoints in the simplest way: cut tensors, name them, save dicts.

It shares no code with the reader: parts are chunks, names are literal, and each layout of attention
rows is a view and a transposition, as the versions of Megatron had it in memory.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig, RopeScaling
from tests.support.models import CLASSIC, EXPERTS, MODERN, ODD, lively

Tensors = Mapping[str, Tensor]

DENSE = CLASSIC.with_fields(num_layers=4, moe_layers=())
GATED = MODERN.with_fields(num_layers=4, moe_layers=())
BIASED = {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}
ROTARY = ODD.with_fields(
    parallel_residual=False,
    qk_layernorm=False,
    rotary_interleaved=False,
    num_query_groups=2,
    rope_scaling=RopeScaling("linear", 4.0),
)
MIXED = EXPERTS.with_fields(num_experts=4, activation="silu", moe_layers=(True, False) * 2)
GROUPED = MIXED.with_fields(qkv_bias=True, proj_bias=False, mlp_bias=False)
GROUPED = GROUPED.with_fields(moe_router_score_function="sigmoid", moe_router_expert_bias=True)
MIXED = MIXED.with_fields(**BIASED)


# Generations of names: (layer norm 1, layer norm 2, attention, qkv, proj, fc1, fc2).
LEGACY = {
    "2020": ("input_layernorm", "post_attention_layernorm", "attention", "final_layernorm"),
    "2021": ("input_layernorm", "post_attention_layernorm", "self_attention", "final_layernorm"),
    "2023": ("input_norm", "post_attention_norm", "self_attention", "final_norm"),
}


@dataclass(frozen=True)
class Layout:
    """How to cut and name a model."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    names: str = "te"  # "te", "local", "full te", "2020", "2021" or "2023".
    version: float | None = 3.0  # None: absent from the file.
    experts: str = "sequential"  # "sequential", "te grouped" or "grouped".
    stages: list[list[int]] | None = None  # Layers of [chunk][stage].
    args: bool = True
    prefix: str = ""  # Data-parallel wrappers put one before all names.
    iteration: int | None = 100  # None: a release.
    zipped: bool = True
    hybrid: bool = False  # As a HybridModel; `stages` then counts its layers.
    changes: Mapping[str, Any] = field(default_factory=dict)  # Of args.


def saved(config: GPTConfig, layout: Layout, root: Path, dtype: str = "float32") -> Checkpoint:
    """Write a random model; return the tensors that were cut."""
    source = lively(config).in_dtype(getattr(torch, dtype))
    write(source.config, {name: source.read(name) for name in source.tensors}, root, layout)
    return source


def edit(root: Path, folders: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of some ranks' files."""
    paths = sorted(root.glob(f"*/{folders}/model_optim_rng.pt"))
    assert paths, folders
    for path in paths:
        record = torch.load(path, weights_only=False)
        change(record)
        path.unlink()
        torch.save(record, path)


def write(config: GPTConfig, tensors: Tensors, root: Path, layout: Layout) -> Path:
    """All rank files and the tracker under `root`; returns the iteration's directory."""
    name = "release" if layout.iteration is None else f"iter_{layout.iteration:07d}"
    plan = layout.stages or even_stages(config.num_layers * (1 + layout.hybrid), layout)
    padded = hybrid_tensors(tensors) if layout.hybrid else dict(tensors)
    multiple = 8 * layout.tp
    rows = -(-config.vocab_size // multiple) * multiple
    for table in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if table in padded:
            filler = torch.full((rows - config.vocab_size, config.hidden_size), 7.0)
            padded[table] = torch.cat([padded[table], filler.to(padded[table])])
    for t in range(layout.tp):
        for p in range(layout.pp):
            for e in range(layout.ep):
                folder = f"mp_rank_{t:02d}"
                folder += f"_{p:03d}" if layout.pp > 1 else ""
                folder += f"_{e:03d}" if layout.ep > 1 else ""
                record = _record(config, padded, layout, plan, (t, p, e))
                (root / name / folder).mkdir(parents=True)
                path = root / name / folder / "model_optim_rng.pt"
                torch.save(record, path, _use_new_zipfile_serialization=layout.zipped)
    tracker = "release" if layout.iteration is None else str(layout.iteration)
    (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    return root / name


def hybrid_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Attention and MLPs as layers of their own, under the names of Megatron's HybridModel."""
    renamed = {}
    for name, value in tensors.items():
        parts = name.replace("final_layernorm", "final_norm").split(".")
        if parts[1] == "layers":
            parts[2] = str(2 * int(parts[2]) + (parts[3] != "self_attention"))
        renamed[".".join(parts)] = value
    return renamed


def hybrid_pattern(config: GPTConfig) -> str:
    return "".join("*E" if has_experts else "*-" for has_experts in config.moe_layers)


def even_stages(layers: int, layout: Layout) -> list[list[int]]:
    size = layers // (layout.pp * layout.vpp)
    assert size * layout.pp * layout.vpp == layers, "give stages"
    return [[size] * layout.pp for _ in range(layout.vpp)]


def _record(
    config: GPTConfig,
    tensors: Tensors,
    layout: Layout,
    plan: list[list[int]],
    position: tuple[int, int, int],
) -> dict[str, Any]:
    t, p, e = position
    record: dict[str, Any] = {"iteration": layout.iteration or 0}
    if layout.version is not None:
        record["checkpoint_version"] = layout.version
    if layout.args:
        args = args_of(config, tensors, layout)
        record["args"] = Namespace(**{**args, **layout.changes, "rank": t + layout.tp * p})
    for v in range(layout.vpp):
        first_layer = sum(sum(chunk) for chunk in plan[:v]) + sum(plan[v][:p])
        layers = range(first_layer, first_layer + plan[v][p])
        key = f"model{v}" if layout.vpp > 1 else "model"
        is_first = p == v == 0
        is_last = (p, v) == (layout.pp - 1, layout.vpp - 1)
        model = _chunk(config, tensors, layout, layers, (t, e, is_first, is_last))
        if layout.names in LEGACY or layout.names == "full te":
            record[key] = _nested(model, layout)
        else:
            record[key] = {f"{layout.prefix}{name}": value for name, value in model.items()}
    record["optimizer"] = {"state": {0: torch.zeros(3)}}
    return record


def _chunk(
    config: GPTConfig,
    tensors: Tensors,
    layout: Layout,
    layers: range,
    position: tuple[int, int, bool, bool],
) -> dict[str, Tensor]:
    """One rank's tensors of one chunk by canonical names; layers and experts are counted from 0."""
    t, e, is_first, is_last = position
    model = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if name.startswith("embedding.") and not is_first:
            continue
        last_stage = ("output_layer.", "decoder.final_layernorm.", "decoder.final_norm.")
        if name.startswith(last_stage) and not is_last:
            continue
        if parts[1] == "layers":
            if int(parts[2]) not in layers:
                continue
            parts[2] = str(int(parts[2]) - layers.start)
            if "local_experts" in parts:
                expert_index = parts.index("local_experts") + 1
                owner, number = divmod(int(parts[expert_index]), config.num_experts // layout.ep)
                parts[expert_index] = str(number)
                if owner != e:
                    continue
        model[".".join(parts)] = cut(config, name, tensor, layout, t)
    if is_last and layout.pp > 1 and not config.untie_embeddings_and_output_weights:
        embedding = "embedding.word_embeddings.weight"
        model["output_layer.weight"] = cut(config, embedding, tensors[embedding], layout, t)
    if layout.names == "local":
        model = _local_norms(model)
    return _experts(model, layout) if layout.experts != "sequential" else model


def cut(config: GPTConfig, name: str, tensor: Tensor, layout: Layout, t: int) -> Tensor:
    leaf = ".".join(name.split(".")[-2:])
    tp = layout.tp
    if leaf in ("linear_qkv.weight", "linear_qkv.bias"):
        part = tensor.chunk(tp)[t]
        heads = config.num_attention_heads // tp
        d = config.kv_channels
        if layout.version is None:  # (3, heads, channels)
            part = part.view(heads, 3, d, -1).transpose(0, 1).reshape(part.shape)
        elif layout.version == 1.0:  # (heads, channels, 3)
            part = part.view(heads, 3, d, -1).transpose(1, 2).reshape(part.shape)
        return part.clone()
    if leaf in ("linear_fc1.weight", "linear_fc1.bias"):
        if config.gated:
            gate, up = tensor.chunk(2)
            return torch.cat([gate.chunk(tp)[t], up.chunk(tp)[t]])
        return tensor.chunk(tp)[t].clone()
    if leaf in ("linear_proj.weight", "linear_fc2.weight"):
        return tensor.chunk(tp, dim=1)[t].clone()
    if leaf in ("word_embeddings.weight", "output_layer.weight"):
        return tensor.chunk(tp)[t].clone()
    return tensor.clone()


def _local_norms(model: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, value in model.items():
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        renamed[name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")] = value
    return renamed


def _experts(model: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Experts in the layout of grouped kernels."""
    grouped: dict[str, Tensor] = {}
    groups: dict[str, list[Tensor]] = {}
    for name, value in model.items():
        if ".local_experts." not in name:
            grouped[name] = value
            continue
        prefix, suffix = name.split("local_experts.")
        number, linear, leaf = suffix.split(".")
        if layout.experts == "te grouped":
            grouped[f"{prefix}{linear}.{leaf}{number}"] = value
        else:
            groups.setdefault(f"{prefix}weight{linear[-1]}", []).append(value.t())
    for name, values in groups.items():
        stacked = torch.stack(values)  # (experts, in, out)
        hidden_first = name.endswith("weight1")
        grouped[name] = stacked.reshape(
            (stacked.shape[1], -1) if hidden_first else (-1, stacked.shape[2])
        )
    return grouped


def _nested(model: dict[str, Tensor], layout: Layout) -> dict[str, Any]:
    """The nesting of `state_dict_for_save_checkpoint`."""
    old = LEGACY.get(layout.names, LEGACY["2023"])
    stack: dict[str, Tensor] = {}
    language: dict[str, Any] = {}
    checkpoint: dict[str, Any] = {"language_model": language}
    for name, value in model.items():
        if name.startswith("embedding."):
            _, table, leaf = name.split(".")
            language.setdefault("embedding", {})[table] = {leaf: value}
        elif name == "output_layer.weight":
            tied = "embedding.word_embeddings.weight" not in model or layout.pp > 1
            if tied and not layout.changes.get("untie_embeddings_and_output_weights"):
                checkpoint["word_embeddings_for_head"] = {"weight": value}
            else:
                language["output_layer"] = {"weight": value}
        else:
            stack[_old_name(name, old, full_te=layout.names == "full te")] = value
    language["transformer" if layout.names == "2020" else "encoder"] = stack
    return {layout.prefix.rstrip("."): checkpoint} if layout.prefix else checkpoint


def _old_name(name: str, old: tuple[str, str, str, str], *, full_te: bool) -> str:
    name = name.removeprefix("decoder.")
    if full_te:
        for new, old_part in (
            ("self_attention.linear_qkv.", "self_attention.layernorm_qkv."),
            ("self_attention.linear_proj.", "self_attention.proj."),
            ("mlp.linear_fc1.layer_norm", "layernorm_mlp.layer_norm"),
            ("mlp.linear_fc1.", "layernorm_mlp.fc1_"),
            ("mlp.linear_fc2.", "layernorm_mlp.fc2_"),
            ("final_layernorm", "final_norm"),
        ):
            name = name.replace(new, old_part)
        return name
    for new, old_part in (
        ("self_attention.linear_qkv.layer_norm_", f"{old[0]}."),
        ("mlp.linear_fc1.layer_norm_", f"{old[1]}."),
        ("self_attention.linear_qkv", f"{old[2]}.query_key_value"),
        ("self_attention.linear_proj", f"{old[2]}.dense"),
        ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
        ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
        ("final_layernorm", old[3]),
    ):
        name = name.replace(new, old_part)
    return name


def args_of(config: GPTConfig, tensors: Tensors, layout: Layout) -> dict[str, Any]:
    """The arguments of a current training run; `changes` make older ones."""
    scaling = config.rope_scaling
    positions = config.position_embedding_type
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "kv_channels": config.kv_channels,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "num_query_groups": config.num_query_groups
        if config.num_query_groups != config.num_attention_heads
        else 1,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "position_embedding_type": "rope" if positions.endswith("rope") else positions,
        "rotary_percent": config.rotary_percent,
        "rotary_base": int(config.rotary_base),
        "rotary_interleaved": config.rotary_interleaved,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling else 8.0,
        "rotary_seq_len_interpolation_factor": scaling.factor
        if scaling and scaling.kind == "linear"
        else None,
        "normalization": config.normalization,
        "layernorm_epsilon": config.layernorm_epsilon,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "swiglu": config.gated,
        "squared_relu": config.activation == "relu2",
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias and not config.mlp_bias,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "qk_layernorm": config.qk_layernorm,
        "window_size": (config.window_size - 1, 0) if config.window_size else None,
        "num_experts": config.num_experts or None,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_pre_softmax": config.moe_router_pre_softmax,
        "moe_router_score_function": config.moe_router_score_function,
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": config.moe_router_expert_bias,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size if config.num_experts else None,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "padded_vocab_size": tensors["embedding.word_embeddings.weight"].shape[0],
        "make_vocab_size_divisible_by": 8,
        "vocab_size": config.vocab_size,
        "tokenizer_type": "GPT2BPETokenizer",
        "params_dtype": torch.float32,
        "spec": None,
        **(_hybrid_args(config) if layout.hybrid else {}),
    }


def _hybrid_args(config: GPTConfig) -> dict[str, Any]:
    return {
        "num_layers": 2 * config.num_layers,
        "hybrid_layer_pattern": hybrid_pattern(config),
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    }
