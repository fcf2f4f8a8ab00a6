"""Writes NeMo's checkpoints: `.nemo` archives and directories, Lightning, NeMo 2, Megatron-Bridge.

Weights are cut by the writers of Megatron's own formats; here they get NeMo's names, containers and
configs. No code is shared with the readers.
"""

import io
import json
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from tests.support.checkpoints import distcp_writer, megatron_writer
from tests.support.checkpoints.distcp_writer import Form
from tests.support.checkpoints.megatron_writer import GATED, Layout

# What NeMo's classes before Megatron-Core can express: no grouped-query attention.
LEGACY_GATED = GATED.with_fields(
    num_query_groups=8, qk_layernorm=False, window_size=None, qkv_bias=False
)
NAMES = {"mcore": "te", "legacy": "2021", "imported": "2020", "full te": "full te"}


@dataclass(frozen=True)
class Nemo:
    """How a model is named, cut and packed."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    names: str = "mcore"  # "mcore", "legacy", "imported" (from old Megatron) or "full te".
    pair: bool = False  # Gate and up projections are separate matrices.
    prefix: str = "model."
    bare_positions: bool = False
    form: Form | None = None  # A distributed checkpoint instead of rank files.
    pack: str = "tar"  # "tar", "gz" or "dir".
    dot: str = "./"  # Before members' names.
    changes: Mapping[str, Any] = field(default_factory=dict)  # Of the config.
    artifacts: Mapping[str, bytes] = field(default_factory=dict)


def saved(config: GPTConfig, nemo: Nemo, folder: Path, dtype: str = "float32") -> Checkpoint:
    """Write a random model as `gpt.nemo` in the folder; return the tensors that were cut."""
    plain = folder / "plain"
    source = unpacked(config, nemo, plain, dtype)
    if nemo.pack == "dir":
        plain.rename(folder / "gpt.nemo")
        return source
    with tarfile.open(folder / "gpt.nemo", "w:gz" if nemo.pack == "gz" else "w") as archive:
        for file in sorted(path for path in plain.rglob("*") if path.is_file()):
            archive.add(file, f"{nemo.dot}{file.relative_to(plain).as_posix()}")
            file.unlink()
    return source


def unpacked(config: GPTConfig, nemo: Nemo, plain: Path, dtype: str = "float32") -> Checkpoint:
    plain.mkdir()
    work = plain.parent / "work"
    if nemo.form:
        source = distcp_writer.saved(config, nemo.form, work, dtype)
        (work / "iter_0000100").rename(plain / "model_weights")
    else:
        source, files = ranks(config, nemo, work, dtype)
        for name, (model,) in files.items():
            single = nemo.tp * nemo.pp == 1
            target = plain / ("" if single else name) / "model_weights.ckpt"
            target.parent.mkdir(exist_ok=True)
            torch.save(model, target)
    record = {**config_of(source.config, nemo), **nemo.changes}
    (plain / "model_config.yaml").write_text(yaml.safe_dump(record))
    for name, text in nemo.artifacts.items():
        (plain / name).write_bytes(text)
    return source


def ranks(
    config: GPTConfig, nemo: Nemo, work: Path, dtype: str = "float32"
) -> tuple[Checkpoint, dict[str, list[dict[str, Tensor]]]]:
    """Every rank's chunks under NeMo's names, by the rank's directory."""
    version = None if nemo.names == "imported" else 3.0
    layout = Layout(nemo.tp, nemo.pp, nemo.vpp, names=NAMES[nemo.names], version=version)
    source = megatron_writer.saved(config, layout, work, dtype)
    files = {}
    for t in range(nemo.tp):
        for p in range(nemo.pp):
            old = f"mp_rank_{t:02d}" + (f"_{p:03d}" if nemo.pp > 1 else "")
            new = f"tp_rank_{t:02d}_pp_rank_{p:03d}" if nemo.pp > 1 else old
            path = work / "iter_0000100" / old / "model_optim_rng.pt"
            record = torch.load(path, weights_only=False)
            keys = [f"model{v}" for v in range(nemo.vpp)] if nemo.vpp > 1 else ["model"]
            files[new] = [_named(record[key], nemo) for key in keys]
    return source, files


class _State(OrderedDict[str, Tensor]):
    """A state_dict() as torch returns it: an OrderedDict with the modules' versions."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"_metadata": {"": {"version": 1}}}, None, iter(self.items())


def _named(model: Mapping[str, Any], nemo: Nemo) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = _State()
    for name, value in _flat(model).items():
        name = name.replace("word_embeddings_for_head", "word_embeddings")
        if nemo.bare_positions:
            name = name.replace("position_embeddings.weight", "position_embeddings")
        if nemo.pair and ".dense_h_to_4h." in name:
            tensors[f"{nemo.prefix}{name}"], up = (half.clone() for half in value.chunk(2))
            tensors[f"{nemo.prefix}{name}".replace("dense_h_to_4h", "dense_h_to_4h_2")] = up
        else:
            tensors[f"{nemo.prefix}{name}"] = value
    if nemo.names == "mcore":
        tensors[f"{nemo.prefix}decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(
            0, dtype=torch.uint8
        )
    return tensors


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    flat_record: dict[str, Tensor] = {}
    for key, value in record.items():
        nested_record = (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
        flat_record.update(nested_record)
    return flat_record


def config_of(config: GPTConfig, nemo: Nemo) -> dict[str, Any]:
    """In the layout of megatron_gpt_config.yaml."""
    norm = "rmsnorm" if config.normalization == "RMSNorm" else "layernorm"
    norm += "1p" if config.layernorm_zero_centered_gamma else ""
    if config.gated:
        activation = "swiglu" if config.activation == "silu" else "geglu"
        activation = activation if nemo.pair else f"fast-{activation}"
    else:
        activation = "squared-relu" if config.activation == "relu2" else "gelu"
    grouped = config.num_query_groups != config.num_attention_heads
    rotary = config.position_embedding_type == "rope"
    return {
        "mcore_gpt": nemo.names == "mcore",
        "megatron_legacy": nemo.names == "imported",
        "transformer_engine": nemo.names == "full te",
        "tensor_model_parallel_size": nemo.form.tp if nemo.form else nemo.tp,
        "pipeline_model_parallel_size": nemo.pp,
        "virtual_pipeline_model_parallel_size": nemo.vpp if nemo.vpp > 1 else None,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups if grouped else None,
        "kv_channels": config.kv_channels,
        "encoder_seq_length": config.max_position_embeddings,
        "max_position_embeddings": "${.encoder_seq_length}",
        "normalization": norm,
        "layernorm_epsilon": config.layernorm_epsilon,
        "bias": config.mlp_bias,
        "qkv_bias": config.qkv_bias and not config.mlp_bias,
        "activation": activation,
        "bias_activation_fusion": config.activation == "gelu_tanh",
        "position_embedding_type": "rope" if rotary else "learned_absolute",
        "rotary_percentage": config.rotary_percent,
        "rotary_base": int(config.rotary_base),
        "share_embeddings_and_output_weights": not config.untie_embeddings_and_output_weights,
        "make_vocab_size_divisible_by": 8,
        "override_vocab_size": config.vocab_size,
        "transformer_block_type": "pre_ln",
        "normalize_attention_scores": True,
        "headscale": False,
        "window_size": [config.window_size - 1, 0] if config.window_size else None,
        "qk_layernorm": config.qk_layernorm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": config.num_experts or None,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_pre_softmax": config.moe_router_pre_softmax,
        "moe_router_score_function": config.moe_router_score_function,
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": config.moe_router_expert_bias,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size if config.num_experts else None,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or None,
        "precision": "bf16",
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPT",
        "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer", "model": None},
    }


def transformer_of(config: GPTConfig) -> dict[str, Any]:
    """TransformerConfig's fields and the model's own, as NeMo 2 and the Bridge write them."""
    function = {"silu": "silu", "relu2": "squared_relu"}.get(config.activation, "gelu")
    module = "megatron.core.activations" if function == "squared_relu" else "torch.nn.functional"
    return {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaConfig",
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "seq_length": config.max_position_embeddings,
        "normalization": config.normalization,
        "layernorm_epsilon": config.layernorm_epsilon,
        "layernorm_zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias and not config.mlp_bias,
        "gated_linear_unit": config.gated,
        "activation_func": {"_target_": f"{module}.{function}", "_partial_": True},
        "bias_activation_fusion": config.activation == "gelu_tanh",
        "position_embedding_type": config.position_embedding_type,
        "rotary_base": int(config.rotary_base),
        "rotary_percent": config.rotary_percent,
        "seq_len_interpolation_factor": None,
        "share_embeddings_and_output_weights": not config.untie_embeddings_and_output_weights,
        "make_vocab_size_divisible_by": 8,
        "vocab_size": config.vocab_size,
        "qk_layernorm": config.qk_layernorm,
        "window_size": [config.window_size - 1, 0] if config.window_size else None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": config.num_experts or None,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_pre_softmax": config.moe_router_pre_softmax,
        "moe_router_score_function": config.moe_router_score_function,
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": config.moe_router_expert_bias,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size if config.num_experts else None,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or None,
        "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    }


def graph_of(record: Mapping[str, Any]) -> str:
    """A TransformerConfig as a node of fiddle's JSON; functions are references to names."""
    module, _, name = str(record["_target_"]).rpartition(".")
    items: list[list[Any]] = []
    objects: dict[str, Any] = {}
    for key, value in record.items():
        if key == "_target_":
            continue
        node: dict[str, Any] = {"type": "leaf", "value": value}
        if isinstance(value, list):
            leaves = [
                [f"Index(index={i})", {"type": "leaf", "value": v}] for i, v in enumerate(value)
            ]
            objects[f"tuple_{key}"] = {
                "type": {"type": "pyref", "module": "builtins", "name": "tuple"},
                "items": leaves,
            }
            node = {"type": "ref", "key": f"tuple_{key}"}
        elif isinstance(value, dict):
            before, _, leaf = value["_target_"].rpartition(".")
            node = {"type": "pyref", "module": before, "name": leaf}
        items.append([f"Attr(name='{key}')", node])
    # fiddle's own class stands for all classes; the built class is in its metadata.
    fiddle = {"type": "pyref", "module": "fiddle._src.config", "name": "Config"}
    metadata = {**fiddle, "name": "BuildableTraverserMetadata"}
    for key, class_module, class_name, entries in (
        ("config_1", module, name, items),
        ("model_1", "nemo", "GPTModel", [["Attr(name='config')", _ref("config_1")]]),
    ):
        class_reference = {"type": "pyref", "module": class_module, "name": class_name}
        objects[f"about_{key}"] = {
            "type": metadata,
            "items": [["Attr(name='fn_or_cls')", class_reference]],
            "metadata": metadata,
        }
        objects[key] = {"type": fiddle, "items": entries, "metadata": _ref(f"about_{key}")}
    return json.dumps({"root": _ref("model_1"), "objects": objects})


def _ref(key: str) -> dict[str, str]:
    return {"type": "ref", "key": key}


def nemo_2(config: GPTConfig, root: Path, form: Form, *, graph: bool = False) -> Checkpoint:
    """`context/` and `weights/`; the config as a tree, or as the graph of the betas."""
    form = Form(**{**form.__dict__, "args": False, "prefix": "module."})
    source = distcp_writer.saved(config, form, root / "work")
    (root / "work" / "iter_0000100").rename(root / "weights")
    (root / "context").mkdir()
    record = transformer_of(config)
    if graph:
        (root / "context" / "io.json").write_text(graph_of(record))
    else:
        config_tree = {"_target_": "nemo.collections.llm.gpt.model.base.GPTModel", "config": record}
        (root / "context" / "model.yaml").write_text(yaml.safe_dump(config_tree))
    return source


def bridge(config: GPTConfig, root: Path, form: Form, step: object) -> Checkpoint:
    """A root of Megatron-Bridge, whose own tracker alone names the step."""
    source = distcp_writer.saved(config, Form(**{**form.__dict__, "args": False}), root)
    (root / "latest_checkpointed_iteration.txt").unlink()
    torch.save({"step": step}, root / "latest_train_state.pt")
    run_config = {"model": transformer_of(config), "train": {"_target_": "x.TrainConfig"}}
    (root / "iter_0000100" / "run_config.yaml").write_text(yaml.safe_dump(run_config))
    return source


def write_archive(path: Path, lay: Callable[[tarfile.TarFile], object], mode: str = "w") -> Path:
    """An archive with the members that `lay` adds."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        lay(archive)
    return path


def member(archive: tarfile.TarFile, name: str, text: bytes = b"", **attributes: Any) -> None:
    tar_info = tarfile.TarInfo(name)
    tar_info.size = len(text)
    for key, value in attributes.items():
        setattr(tar_info, key, value)
    archive.addfile(tar_info, io.BytesIO(text))
