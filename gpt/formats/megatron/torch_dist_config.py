"""Architecture of a torch_dist checkpoint: from Megatron args, NeMo or Bridge config, or shapes.

Megatron stores its args in the checkpoint; NeMo and Megatron-Bridge write config files. If there
are neither args nor a config file, the sizes are inferred from the tensor shapes. Shapes do not
determine the number of heads, the norm's epsilon, the activation and the position embedding. These
fields are not guessed, because a wrong guess would give wrong logits without an error. Instead, an
error message lists all fields that the user must give.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.file_tree import file_span
from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.checkpoint.files.torch_dcp import DcpIndex
from gpt.checkpoint.files.torch_file import read_torch_file, read_torch_span
from gpt.checkpoint.logical_tensor import find_tokenizer
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_args import config_from_args
from gpt.formats.mappings.megatron_args import (
    FIELDS_HINT,
    MegatronArgs,
    PartialConfig,
    WeightShapes,
    config_from_shapes,
    list_fields_with_hints,
)
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD
from gpt.formats.mappings.nemo_args import (
    bridge_model_fields,
    config_from_nemo1,
    config_from_transformer,
    matching_vocab_size,
)
from gpt.formats.mappings.nemo_yaml import NemoConfig, read_config, read_fiddle_graph
from gpt.tokenizers.tokenizer import open_tokenizer

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"  # Replaces COMMON_FILE in Megatron-Core 0.19 and newer.
ARGS_KEY = "args"  # The args alone, in fsdp_dtensor.

REQUIRED_FIELDS = (
    "num_attention_heads",
    "num_query_groups",
    "activation",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
)
ROTARY_FIELDS = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "max_position_embeddings",
)
MOE_FIELDS = ("moe_router_topk", "moe_router_pre_softmax")


def infer_dist_config(
    index: DcpIndex, weights: WeightShapes, overrides: GPTConfig | Mapping[str, Any]
) -> PartialConfig:
    """Infer the architecture from a config file or args beside the index, else from the shapes.

    `overrides` has the fields that the user gives. Some of them are required if the architecture is
    inferred from the shapes.
    """
    folder = index.folder
    context_folder, bridge_config = folder.parent / "context", folder / "run_config.yaml"
    if context_folder.is_dir() and (fields := _read_nemo2_config(context_folder)) is not None:
        partial_config = config_from_transformer(fields, weights)
        _fill_vocab_size(context_folder, fields, weights, partial_config)
        return partial_config
    if bridge_config.is_file():
        root_fields = NemoConfig(read_config(file_span(bridge_config)), str(bridge_config))
        return config_from_transformer(bridge_model_fields(root_fields), weights)
    args = None if context_folder.is_dir() else read_common_args(index)
    if args is not None:
        return config_from_args(MegatronArgs(args, str(folder)), weights)
    for run_folder in (folder.parent, folder.parent.parent):
        # A NeMo 1 training run writes its config one or two directories above the checkpoint.
        if (run_folder / "hparams.yaml").is_file():
            root_fields = NemoConfig(
                read_config(file_span(run_folder / "hparams.yaml")), "hparams.yaml"
            )
            model_fields = root_fields.section("cfg") if "cfg" in root_fields else root_fields
            if "num_layers" in model_fields:
                return config_from_nemo1(
                    NemoConfig(model_fields.record, str(run_folder / "hparams.yaml")), weights
                )
    return infer_from_shapes(
        weights, {} if isinstance(overrides, GPTConfig) else overrides, str(folder)
    )


def _read_nemo2_config(folder: Path) -> NemoConfig | None:
    """Read NeMo 2's model config: model.yaml, or the fiddle graph io.json of beta versions."""
    if (folder / "model.yaml").is_file():
        root_fields = NemoConfig(
            read_config(file_span(folder / "model.yaml")), str(folder / "model.yaml")
        )
        return root_fields.section("config") if "config" in root_fields else root_fields
    if (folder / "io.json").is_file():
        for record in read_fiddle_graph(file_span(folder / "io.json")):
            if "num_layers" in record and "hidden_size" in record:
                return NemoConfig(record, str(folder / "io.json"))
    return None


def _fill_vocab_size(
    context_folder: Path, fields: NemoConfig, weights: WeightShapes, partial_config: PartialConfig
) -> None:
    """Set vocab_size from the bundled tokenizer if the config does not record vocab_size."""
    tokenizer_path = find_tokenizer(context_folder / "nemo_tokenizer", context_folder)
    if "vocab_size" not in partial_config.notes or tokenizer_path is None:
        return
    try:
        tokenizer_vocab_size = open_tokenizer(tokenizer_path).vocab_size
    except CheckpointError:
        return
    if vocab_size := matching_vocab_size(fields, tokenizer_vocab_size, weights.rows(EMBEDDING)):
        partial_config.fields["vocab_size"] = vocab_size
        del partial_config.notes["vocab_size"]


def read_common_args(index: DcpIndex) -> dict[str, Any] | None:
    """Read the training run's `args`; None if the checkpoint has no args."""
    path = index.folder / COMMON_FILE
    if path.is_file():
        record = read_torch_file(path)
    elif COMMON_KEY in index.object_spans:
        span = index.object_spans[COMMON_KEY]
        path = span.path
        record = read_torch_span(span)
        record = record[0] if isinstance(record, list) and len(record) == 1 else record
    elif ARGS_KEY in index.object_spans:
        span = index.object_spans[ARGS_KEY]
        path = span.path
        record = {"args": read_torch_span(span)}
    else:
        return None
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{path} contains a {type(record).__name__}, not the dict of a run's common state; "
            "copy it again"
        )
    args = record.get("args")
    args = args.fields if isinstance(args, Stub) else args
    if not isinstance(args, dict | None):
        raise CheckpointError(f"{path} has args that are not a dict; copy it again")
    return args or None


def infer_from_shapes(
    weights: WeightShapes, overrides: Mapping[str, Any], location: str
) -> PartialConfig:
    """Infer a config from the shapes.

    Fields that shapes do not determine must be in `overrides`; an error lists the missing fields.
    """
    required_fields: tuple[str, ...] = (
        REQUIRED_FIELDS if weights.position_rows else (*REQUIRED_FIELDS, *ROTARY_FIELDS)
    )
    has_experts = any(weights.moe_layers)
    required_fields += MOE_FIELDS if has_experts else ()
    if overrides.get("position_embedding_type") == "none":
        required_fields = tuple(name for name in required_fields if "rotary" not in name)
    if missing := [name for name in required_fields if name not in overrides]:
        raise CheckpointError(
            f"{location} has no Megatron args beside its weights and does not record "
            f"{list_fields_with_hints(missing)}; look them up in the training config, and give "
            f"them {FIELDS_HINT}"
        )
    partial_config = config_from_shapes(weights)
    partial_config.undetermined_fields = []
    partial_config.fields["untie_embeddings_and_output_weights"] = HEAD in weights.rank_shapes
    for note in ("activation", "layernorm_epsilon"):
        partial_config.notes.pop(note, None)
    if not {"window_size", "rope_scaling", "rotary_interleaved"} & set(overrides):
        partial_config.notes["unseen"] = (
            "the files have no args, so the model is assumed to have neither an attention window "
            "nor scaled or interleaved RoPE; for a model with one of these, give window_size, "
            "rope_scaling or rotary_interleaved"
        )
    if has_experts:
        _set_moe_fields(weights, partial_config.fields)
    return partial_config


def _set_moe_fields(weights: WeightShapes, fields: dict[str, Any]) -> None:
    first_moe_layer = weights.moe_layers.index(True)
    mlp = f"decoder.layers.{first_moe_layer}.mlp."
    expert = f"{mlp}experts.local_experts.0."
    fc1 = weights.rows(f"{expert}linear_fc1.weight")
    fc2 = weights.columns(f"{expert}linear_fc2.weight")
    fields["num_experts"] = weights.rows(f"{mlp}router.weight")
    fields["moe_layers"] = weights.moe_layers
    fields["moe_ffn_hidden_size"] = fc2
    fields["gated"] = fc1 == 2 * fc2
    fields["mlp_bias"] = f"{expert}linear_fc2.bias" in weights.rank_shapes
    fields["moe_router_expert_bias"] = weights.has_tensor("router.expert_bias")
    shared = weights.columns(f"{mlp}shared_experts.linear_fc2.weight")
    fields["moe_shared_expert_intermediate_size"] = shared
    fields["moe_shared_expert_gate"] = weights.has_tensor("shared_experts.gate_weight")
    fields["ffn_hidden_size"] = fields["ffn_hidden_size"] or fc2
