"""Megatron-DeepSpeed reader: pipeline saves, the training format of BLOOM.

Such a save has a file for each layer of the model and tensor rank, and files without weights, whose
`args` describe the model. The layers are numbered over all pipeline stages, so the pipeline size
has no effect on the files. This module gives the tensors the names of Megatron-LM's older classes;
`reader` joins the tensor ranks. Norms and biases that each rank stores can differ between the ranks
(BLOOM's do): they are averaged, as transformers' converter for BLOOM does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.checkpoint.files.torch_file import read_torch_file
from gpt.checkpoint.logical_tensor import Checkpoint, summarize_names
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.files.regular_files import open_regular_file
from gpt.formats.mappings.megatron_args import (
    MegatronArgs,
    PartialConfig,
    WeightShapes,
    config_from_gpt_args,
)
from gpt.formats.megatron.rank_files import (
    TEXT_BYTES_MAX,
    ParallelSizes,
    RankCoordinates,
    RankFile,
    RankFiles,
)
from gpt.formats.megatron.reader import find_tokenizer_near, join_ranks

FORMAT = "megatron_deepspeed"
TRACKER_FILE = "latest"
STEP_FOLDER = re.compile(r"global_step[0-9]{1,12}")
LAYER_FILE = re.compile(r"layer_(\d{2,4})-model_(\d{2,4})-model_states\.pt")
LAYER_FILES = "layer_*-model_*-model_states.pt"
ARGS_FILE = "mp_rank_00_model_states.pt"

# The members of `megatron.enums.PositionEmbeddingType`, by value and by name, as the value of the
# arg in Megatron-LM. ALiBi is set afterwards: Megatron-LM does not have it.
ALIBI = "alibi"
POSITION_TYPES: Mapping[object, str] = {
    1: "rope",
    2: "learned_absolute",
    3: ALIBI,
    "rotary": "rope",
    "rope": "rope",
    "absolute": "learned_absolute",
    "learned_absolute": "learned_absolute",
    "alibi": ALIBI,
}

# Ends of the names of tensors that each tensor rank stores, and whose copies can differ.
AVERAGED = (
    "norm.weight",
    "norm.bias",
    "attention.dense.bias",
    "mlp.dense_4h_to_h.bias",
)

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class LayerFiles:
    """The paths of all layer files, by layer number and tensor rank."""

    paths: Mapping[tuple[int, int], Path]

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.paths})

    @property
    def tp(self) -> int:
        return 1 + max(rank for _, rank in self.paths)


def find_deepspeed(path: Path) -> Path | None:
    """Return the directory that contains the layer files; None if there is none.

    `path` is this directory, one of its files, or a root whose file `latest` names the directory.
    """
    if LAYER_FILE.fullmatch(path.name) or (path.name == ARGS_FILE and path.is_file()):
        path = path.parent
    if not path.is_dir():
        return None
    if any(path.glob(LAYER_FILES)):
        return path
    if not (path / TRACKER_FILE).is_file() or not any(path.glob("global_step*")):
        return None
    with open_regular_file(path / TRACKER_FILE) as file:
        name = file.read(TEXT_BYTES_MAX).decode("utf-8", "replace").strip()
    if not STEP_FOLDER.fullmatch(name) or not (path / name).is_dir():
        raise CheckpointError(
            f"{path / TRACKER_FILE} names {name[:40]!r}, which is no directory global_step<N> in "
            f"{path}; copy the missing directory, or give the path of an existing one"
        )
    return path / name if any((path / name).glob(LAYER_FILES)) else None


def open_deepspeed(
    path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a pipeline save of Megatron-DeepSpeed. `overrides` replaces fields of GPTConfig."""
    folder = find_deepspeed(path)
    if folder is None:
        raise CheckpointError(
            f"{path} has no files such as layer_01-model_00-model_states.pt; give the directory "
            "global_step<N> that contains them, or its parent with the file latest"
        )
    files = _find_layer_files(folder)
    args, version, iteration = _read_args(folder / ARGS_FILE)
    saved_tp = MegatronArgs(args, str(folder / ARGS_FILE)).integer("tensor_model_parallel_size", 1)
    if saved_tp != files.tp:
        raise CheckpointError(
            f"{folder} has the files of {files.tp} tensor ranks, but args."
            f"tensor_model_parallel_size is {saved_tp}; copy the files of all ranks from the "
            "training run"
        )
    states, drifted = _average_copies(_read_tensors(files, folder))
    ranks = RankFiles(
        ParallelSizes(files.tp, 1, 1),
        {
            RankCoordinates(rank, 0, 0): RankFile(
                folder / f"layer_*-model_{rank:02}-model_states.pt",
                args,
                version,
                iteration,
                {0: state},
            )
            for rank, state in enumerate(states)
        },
    )

    def infer_config(weights: WeightShapes) -> PartialConfig:
        return _config_from_args(MegatronArgs(args, str(folder / ARGS_FILE)), weights)

    checkpoint = join_ranks(ranks, folder, overrides or {}, infer_config)
    notes = checkpoint.notes
    if drifted:
        notes += (
            f"the copies of {summarize_names(drifted)} differ between the tensor ranks; their "
            "average is read, as transformers' converter for BLOOM does",
        )
    return replace(
        checkpoint,
        format=FORMAT,
        files=(*files.paths.values(), folder / ARGS_FILE),
        tokenizer=find_tokenizer_near(folder),
        notes=notes,
    )


def _find_layer_files(folder: Path) -> LayerFiles:
    paths = {}
    for path in sorted(folder.glob(LAYER_FILES)):
        match = LAYER_FILE.fullmatch(path.name)
        if match:
            paths[int(match[1]), int(match[2])] = path
    if not paths:
        raise CheckpointError(f"{folder} has no layer files; copy it from the training run again")
    files = LayerFiles(paths)
    missing = [
        f"layer_{layer:02}-model_{rank:02}-model_states.pt"
        for layer in files.layers
        for rank in range(min(files.tp, len(paths) + 1))
        if (layer, rank) not in paths
    ]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {summarize_names(missing)}; copy the files of all tensor ranks and "
            "layers from all nodes of the cluster"
        )
    return files


def _read_args(path: Path) -> tuple[dict[str, Any], float, int | None]:
    """Return the args, the checkpoint_version and the iteration."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist, but its args describe the model; copy it from the training run"
        )
    record = read_torch_file(path)
    args = record.get("args") if isinstance(record, dict) else None
    args = args.fields if isinstance(args, Stub) else args
    if not isinstance(args, dict) or not args:
        raise CheckpointError(
            f"{path} has no args of Megatron-DeepSpeed, which describe the model; give a save of "
            "Megatron-DeepSpeed"
        )
    version, iteration = record.get("checkpoint_version", 3.0), record.get("iteration")
    if type(version) not in (int, float) or not 2 <= version < 100:
        raise CheckpointError(
            f"{path} has an unsupported checkpoint_version; give a save with the version 2 or 3"
        )
    return args, float(version), iteration if type(iteration) is int else None


def _read_tensors(files: LayerFiles, folder: Path) -> list[dict[str, Any]]:
    """Return the tensors of each tensor rank, by the names of Megatron-LM's older classes."""
    states: list[dict[str, Any]] = [{} for _ in range(files.tp)]
    blocks: list[int] = []
    for layer in files.layers:
        for rank, state in enumerate(states):
            path = files.paths[layer, rank]
            record = read_torch_file(path)
            if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
                raise CheckpointError(f"{path} is not a dict of tensors; copy it again")
            if "input_layernorm.weight" in record and layer not in blocks:
                blocks.append(layer)
            for key, value in record.items():
                name = _older_name(key, len(blocks) - 1)
                if name in state:
                    raise CheckpointError(
                        f"{path} has {key}, which an earlier layer has too; two checkpoints are "
                        "mixed: take all files from the same checkpoint"
                    )
                state[name] = value
    if blocks and blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        raise CheckpointError(
            f"{folder} lacks files of layers between layer_{blocks[0]:02} and "
            f"layer_{blocks[-1]:02}; copy them from all nodes of the cluster"
        )
    return states


def _older_name(key: str, layer: int) -> str:
    """Return the name of a layer's tensor in Megatron-LM's older classes."""
    if key.startswith("word_embeddings.norm."):
        return f"embedding.word_embeddings_layernorm.{key.rpartition('.')[2]}"
    if key.startswith(("word_embeddings.", "position_embeddings.")):
        return f"embedding.{key}"
    if key in ("weight", "bias"):  # The final norm is a layer of its own.
        return f"encoder.final_layernorm.{key}"
    if key == "lm_head.weight":
        return "output_layer.weight"
    return f"encoder.layers.{layer}.{key}"


def _average_copies(states: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Replace copies that differ by their average; return their names too.

    The sum has the dtype of the copies, as in transformers' converter for BLOOM, so the values are
    those of the published models.
    """
    drifted = []
    for name in states[0]:
        copies = [state.get(name) for state in states]
        tensors = [copy for copy in copies if isinstance(copy, Tensor)]
        shapes = {(tensor.shape, tensor.dtype) for tensor in tensors}
        if not name.endswith(AVERAGED) or len(tensors) < len(copies) or len(shapes) > 1:
            continue
        if all(torch.equal(tensors[0], tensor) for tensor in tensors[1:]):
            continue
        average = tensors[0].detach().clone()
        for tensor in tensors[1:]:
            average += tensor
        average /= len(tensors)
        for state in states:
            state[name] = average
        drifted.append(name)
    return states, drifted


def _config_from_args(args: MegatronArgs, weights: WeightShapes) -> PartialConfig:
    position_type = _position_type(args)
    values = {
        **args.values,
        "position_embedding_type": "none" if position_type == ALIBI else position_type,
    }
    partial_config = config_from_gpt_args(MegatronArgs(values, args.location), weights)
    if position_type == ALIBI:
        partial_config.fields["position_embedding_type"] = ALIBI
    partial_config.fields["embedding_layernorm"] = weights.has_tensor(
        "word_embeddings_layernorm.weight"
    )
    return partial_config


def _position_type(args: MegatronArgs) -> str:
    """Return the position type; the arg is an enum member, which is read as a stand-in."""
    value = args.get("position_embedding_type", "absolute")
    if isinstance(value, Stub) and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, int | str) or value not in POSITION_TYPES:
        raise args.unsupported_arg_error("position_embedding_type")
    return POSITION_TYPES[value]
