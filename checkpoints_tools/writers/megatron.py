"""Megatron-LM's `torch` format, planned: a file for each rank, with what that rank's model holds.

Layers and experts are numbered within their own file, chunks of a virtual pipeline stand apart,
ranks that share out experts repeat all else, and the last stage has a copy of a tied embedding.
Only parts of logical tensors are named here; bytes, and the form of a file, are known elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints_tools.layout.layout import (
    VOCABULARY_MULTIPLE,
    Division,
    File,
    Layout,
    padded_vocabulary,
    saved_part,
    text_file,
)
from checkpoints_tools.layout.torch_save import Promise, archive
from checkpoints_tools.writers.megatron_args import Spec, arguments, check, notes, stages
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.formats.mappings.megatron_names import EMBEDDING, EXPERT, HEAD, renumbered
from gpt.formats.megatron.rank_files import TRACKER, WEIGHTS, Place, Split
from gpt.parallel.sharding import LAYERS, Parameter, layer_of, on_stage, parameters

FOLDER = "release"  # Weights alone: no iteration, no optimizer.
VERSION = 3.0  # Of the order of rows in attention.

# In layers of Megatron-Core's own, norms stand before what they norm for.
LOCAL_NAMES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Modules of Transformer Engine, which may keep scales for FP8.
WITH_STATE = ("linear_qkv.", "linear_proj.", "linear_fc1.", "linear_fc2.")
STATE = "_extra_state"


@dataclass(frozen=True)
class _Held:
    """A parameter in a chunk, and its name there; the experts' are still to be dealt out."""

    parameter: Parameter
    dtype: torch.dtype
    name: str
    expert: int | None


@dataclass(frozen=True)
class _Plan:
    """What all ranks share."""

    config: GPTConfig
    division: Division
    rows: int  # Of the padded vocabulary.
    spec: Spec


def layout(
    checkpoint: Checkpoint,
    division: Division,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    spec: Spec = "te",
) -> Layout:
    """`checkpoint` is in the dtype that is to be stored."""
    config = checkpoint.config
    check(config, division)
    rows = padded_vocabulary(config, division.tp, vocabulary_multiple)
    args = arguments(
        config,
        division,
        vocabulary_multiple=vocabulary_multiple,
        spec=spec,
        tokenizer=checkpoint.tokenizer,
    )
    split = Split(division.tp, division.pp, division.ep)
    files = []
    for place, models in rank_models(checkpoint, division, rows, spec):
        record: dict[str, Any] = {"args": args, "checkpoint_version": VERSION, "iteration": 0}
        for number, model in enumerate(models):
            record[f"model{number}" if division.vpp > 1 else "model"] = model
        made = archive(record)
        path = f"{FOLDER}/{split.folder(place)}/{WEIGHTS[0]}"
        files.append(File(path, made.size, made.texts, made.placements, made.patches))
    last = (text_file(TRACKER, FOLDER.encode()),)
    found = tuple(notes(config, division, spec))
    return Layout("megatron", tuple(files), FOLDER, last, found, vocabulary_rows=rows)


def rank_models(
    checkpoint: Checkpoint, division: Division, rows: int, spec: Spec = "te"
) -> Iterator[tuple[Place, list[dict[str, Promise | None]]]]:
    """Every rank's state dicts, one for each of its chunks, with `rows` of padded vocabulary."""
    config = checkpoint.config
    plan = _Plan(config, division, rows, spec)
    table = _table(checkpoint)
    chunks = [
        [_held(table, layers, config, spec) for layers in stage]
        for stage in stages(config, division).layers
    ]
    for place in Split(division.tp, division.pp, division.ep).places():
        yield place, [_model(plan, held, place) for held in chunks[place.stage]]


def _table(checkpoint: Checkpoint) -> list[tuple[Parameter, torch.dtype]]:
    return [
        # Whatever the weights are, the choice among experts is kept exact.
        (
            parameter,
            torch.float32 if name.endswith(".expert_bias") else checkpoint.tensors[name].dtype,
        )
        for name, parameter in parameters(checkpoint.config).items()
    ]


def _held(
    table: list[tuple[Parameter, torch.dtype]], layers: range, config: GPTConfig, spec: Spec
) -> list[_Held]:
    """A chunk's parameters under its own numbers."""
    found = []
    first, last = layers.start == 0, layers.stop == config.num_layers
    tied = not config.untie_embeddings_and_output_weights
    for parameter, dtype in table:
        name = parameter.name
        if not on_stage(config, name, layers):
            continue
        match = EXPERT.search(name)
        own = renumbered(name, -layers.start, 0)
        if spec == "local" and layer_of(name) is not None:
            for fused, apart in LOCAL_NAMES.items():
                own = own.replace(fused, apart)
        if name != EMBEDDING or first:
            found.append(_Held(parameter, dtype, own, int(match[1]) if match else None))
        if name == EMBEDDING and last and tied and not first:
            found.append(_Held(parameter, dtype, HEAD, None))
    return found


def _model(plan: _Plan, held: list[_Held], place: Place) -> dict[str, Promise | None]:
    """One chunk's state dict on one rank."""
    config, division = plan.config, plan.division
    own = config.num_experts // division.ep  # How many experts a rank has.
    experts = range(place.expert * own, (place.expert + 1) * own)
    model: dict[str, Promise | None] = {}
    for one in held:
        name, parameter = one.name, one.parameter
        if one.expert is not None:
            if one.expert not in experts:
                continue
            name = renumbered(name, 0, -experts.start)
        piece = saved_part(parameter, config, place.tensor, division.tp, plan.rows)
        model[name] = Promise(parameter.name, piece, parameter.shape, one.dtype)
    if plan.spec == "te":
        model.update(dict.fromkeys(_states(model)))
    return model


def _states(model: Mapping[str, object]) -> Iterator[str]:
    """What older versions, which load strictly, want of Transformer Engine's modules."""
    for name in model:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{module}.".endswith(WITH_STATE):
            yield f"{module}.{STATE}"
            if name.startswith(LAYERS) and name.endswith("linear_qkv.weight"):
                yield f"{module.removesuffix('linear_qkv')}core_attention.{STATE}"
