"""The architecture of a distributed checkpoint, from whichever config lies beside it.

Megatron keeps its args inside; NeMo and the Bridge write configs. Where there is none, shapes tell
all sizes, but the heads, the norm's epsilon, the activation and the positions cannot be seen in
them, and a wrong guess would give wrong logits in silence, so all are asked for at once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.file_tree import whole_file
from gpt.checkpoint.files.restricted_unpickle import Stub, read_pickle
from gpt.checkpoint.files.torch_dcp import Index
from gpt.checkpoint.logical_tensor import find_tokenizer
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import (
    AS_FIELDS,
    Answer,
    Args,
    Weights,
    describe,
    infer,
    questions,
)
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD
from gpt.formats.mappings.nemo_args import describe_nemo_1, describe_transformer, tokens_of
from gpt.formats.mappings.nemo_yaml import Fields, read_config, read_graph
from gpt.tokenizers.tokenizer import open_tokenizer

COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"  # Since core 0.19, instead of the file.

ALWAYS = (
    *("num_attention_heads", "num_query_groups", "activation", "layernorm_epsilon"),
    "layernorm_zero_centered_gamma",
)
ROTARY = ("position_embedding_type", "rotary_base", "rotary_percent", "max_position_embeddings")
EXPERTS = ("moe_router_topk", "moe_router_pre_softmax")


def ask(index: Index, weights: Weights, changes: GPTConfig | Mapping[str, Any]) -> Answer:
    """The architecture from what lies beside the index, or from the shapes and the user."""
    folder = index.folder
    context, bridge = folder.parent / "context", folder / "run_config.yaml"
    if context.is_dir() and (fields := _context(context)) is not None:
        answer = describe_transformer(fields, weights)
        _count_tokens(context, fields, weights, answer)
        return answer
    if bridge.is_file():
        whole = Fields(read_config(whole_file(bridge)), str(bridge))
        return describe_transformer(whole.under("model"), weights)
    args = None if context.is_dir() else arguments(index)
    if args is not None:
        return describe(Args(args, str(folder)), weights)
    for beside in (folder.parent, folder.parent.parent):
        # A training run of NeMo 1 keeps its config some way above.
        if (beside / "hparams.yaml").is_file():
            whole = Fields(read_config(whole_file(beside / "hparams.yaml")), "hparams.yaml")
            own = whole.under("cfg") if "cfg" in whole else whole
            if "num_layers" in own:
                return describe_nemo_1(Fields(own.record, str(beside / "hparams.yaml")), weights)
    return from_shapes(weights, {} if isinstance(changes, GPTConfig) else changes, str(folder))


def _context(folder: Path) -> Fields | None:
    """NeMo 2's config of the model: a tree, or the graph that betas wrote."""
    if (folder / "model.yaml").is_file():
        whole = Fields(read_config(whole_file(folder / "model.yaml")), str(folder / "model.yaml"))
        return whole.under("config") if "config" in whole else whole
    if (folder / "io.json").is_file():
        for made in read_graph(whole_file(folder / "io.json")):
            if "num_layers" in made and "hidden_size" in made:
                return Fields(made, str(folder / "io.json"))
    return None


def _count_tokens(context: Path, fields: Fields, weights: Weights, answer: Answer) -> None:
    """Where the config has no vocabulary, NeMo padded that of the tokenizer it kept."""
    found = find_tokenizer(context / "nemo_tokenizer", context)
    if "vocab_size" not in answer.notes or found is None:
        return
    try:
        tokens = open_tokenizer(found).vocab_size
    except CheckpointError:
        return
    if own := tokens_of(fields, tokens, weights.rows(EMBEDDING)):
        answer.fields["vocab_size"] = own
        del answer.notes["vocab_size"]


def arguments(index: Index) -> dict[str, Any] | None:
    """`args` of the training run; None where there are none."""
    path = index.folder / COMMON
    if path.is_file():
        record = read_pickle(path)
    elif COMMON_KEY in index.objects:
        blob = index.objects[COMMON_KEY]
        path = blob.path
        record = read_pickle(blob.file.path, (blob.offset, blob.length))
        record = record[0] if isinstance(record, list) and len(record) == 1 else record
    else:
        return None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} holds a {type(record).__name__}, not a run's common state")
    args = record.get("args")
    args = args.fields if isinstance(args, Stub) else args
    if not isinstance(args, dict | None):
        raise CheckpointError(f"{path} has args that are none; copy it again")
    return args or None


def from_shapes(weights: Weights, changes: Mapping[str, Any], where: str) -> Answer:
    """What shapes tell; what they do not must stand in `changes`, or is asked for by name."""
    asked: tuple[str, ...] = ALWAYS if weights.positions else (*ALWAYS, *ROTARY)
    sparse = any(weights.moe_layers)
    asked += EXPERTS if sparse else ()
    if changes.get("position_embedding_type") == "none":
        asked = tuple(name for name in asked if "rotary" not in name)
    if missing := [name for name in asked if name not in changes]:
        raise CheckpointError(
            f"{where} keeps no Megatron args beside its weights and does not say "
            f"{questions(missing)}; look them up in the config that it was trained with, and give "
            f"them {AS_FIELDS}"
        )
    answer = infer(weights)
    answer.unknown = []
    answer.fields["untie_embeddings_and_output_weights"] = HEAD in weights.parts
    for note in ("activation", "layernorm_epsilon"):
        answer.notes.pop(note, None)
    if not {"window_size", "rope_scaling", "rotary_interleaved"} & set(changes):
        answer.notes["unseen"] = (
            "no args say whether attention has a window or positions are scaled or interleaved; "
            "taken as not, give window_size, rope_scaling or rotary_interleaved if they were"
        )
    if sparse:
        _experts(weights, answer.fields)
    return answer


def _experts(weights: Weights, fields: dict[str, Any]) -> None:
    first = weights.moe_layers.index(True)
    mlp = f"decoder.layers.{first}.mlp."
    expert = f"{mlp}experts.local_experts.0."
    fc1, fc2 = (
        weights.rows(f"{expert}linear_fc1.weight"),
        weights.columns(f"{expert}linear_fc2.weight"),
    )
    fields["num_experts"] = weights.rows(f"{mlp}router.weight")
    fields["moe_layers"] = weights.moe_layers
    fields["moe_ffn_hidden_size"] = fc2
    fields["gated"] = fc1 == 2 * fc2
    fields["mlp_bias"] = f"{expert}linear_fc2.bias" in weights.parts
    fields["moe_router_expert_bias"] = weights.has("router.expert_bias")
    shared = weights.columns(f"{mlp}shared_experts.linear_fc2.weight")
    fields["moe_shared_expert_intermediate_size"] = shared
    fields["moe_shared_expert_gate"] = weights.has("shared_experts.gate_weight")
    fields["ffn_hidden_size"] = fields["ffn_hidden_size"] or fc2
