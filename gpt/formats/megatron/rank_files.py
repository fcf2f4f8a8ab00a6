"""Megatron-LM rank files (`mp_rank_XX`): finds all ranks, and checks that they belong together.

A checkpoint root has a tracker file that names an iteration. An iteration has a directory for each
combination of tensor, pipeline and expert rank. The directory names are ambiguous, so the parallel
sizes are read from the args in the files; for old files without args, the names are used. All ranks
must exist, with the same iteration and architecture. `reader` interprets the tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.checkpoint.files.torch_file import read_torch_file
from gpt.checkpoint.logical_tensor import summarize_names
from gpt.errors import CheckpointError
from gpt.files.regular_files import open_regular_file
from gpt.formats.mappings.megatron_args import ARCHITECTURE_ARGS, MegatronArgs
from gpt.settings import short_repr

TRACKER_FILE = "latest_checkpointed_iteration.txt"
BRIDGE_TRACKER_FILE = "latest_train_state.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
TEXT_BYTES_MAX = 1000
# Exclusive limit of checkpoint_version. Versions up to 3 exist; NaN and infinity are refused too.
VERSION_LIMIT = 100
# The second name was used in 2022 and 2023 if the distributed optimizer was in separate files.
WEIGHT_FILES = ("model_optim_rng.pt", "model_rng.pt")


@dataclass(frozen=True)
class RankCoordinates:
    """The tensor, pipeline and expert parallel rank of the process that wrote a file."""

    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True)
class ParallelSizes:
    """Tensor, pipeline and expert parallel sizes of a checkpoint."""

    tp: int
    pp: int
    ep: int

    def ranks(self) -> list[RankCoordinates]:
        """Return all ranks, ordered by stage, then expert rank, then tensor rank."""
        return [
            RankCoordinates(tensor_rank, stage, expert_rank)
            for stage in range(self.pp)
            for expert_rank in range(self.ep)
            for tensor_rank in range(self.tp)
        ]

    def folder_name(self, rank: RankCoordinates) -> str:
        """Return a rank's directory name.

        The name has the stage only if `pp` is above 1, and the expert rank only if `ep` is above 1.
        """
        stage = f"_{rank.stage:03}" if self.pp > 1 else ""
        expert = f"_{rank.expert:03}" if self.ep > 1 else ""
        return f"mp_rank_{rank.tensor:02}{stage}{expert}"


@dataclass(frozen=True)
class RankFile:
    """The content of one rank's file; it has several model chunks only with a virtual pipeline."""

    path: Path
    args: Mapping[str, Any] | None  # None in files of 2019 and 2020.
    version: float  # checkpoint_version, which defines the order of QKV rows; 0 if absent.
    iteration: int | None
    chunks: Mapping[int, Mapping[str, Any]]  # State dict of each model chunk, by chunk number.


@dataclass(frozen=True)
class RankFiles:
    """All files of one checkpoint."""

    parallel_sizes: ParallelSizes
    files: Mapping[RankCoordinates, RankFile]

    @property
    def chunks(self) -> int:
        """The number of model chunks per rank; a file may omit a chunk without layers."""
        return 1 + max(max(file.chunks, default=0) for file in self.files.values())


def find_iteration(path: Path) -> Path | None:
    """Return the directory that contains the rank directories; None if there are none.

    - If `path` is a rank directory or its weight file: the parent of the rank directory.
    - If `path` contains rank directories: `path`.
    - If `path` contains a tracker file: the iteration that the tracker file names.
    """
    if path.name in WEIGHT_FILES:
        path = path.parent
    if RANK_FOLDER.fullmatch(path.name):
        path = path.parent
    if _find_rank_files(path):
        return path
    if not (path / TRACKER_FILE).is_file():
        return None
    iteration = tracked_iteration(path)
    if not iteration.is_dir():
        available = ", ".join(_list_iterations(path)[-3:]) or "none"
        raise CheckpointError(
            f"{path / TRACKER_FILE} names {iteration.name}, which does not exist; found: "
            f"{available}; copy the missing directory, or give the path of an existing iteration"
        )
    return iteration if _find_rank_files(iteration) else None


def newer_iteration_notes(iteration: Path) -> list[str]:
    """Return a note if the tracker file names `iteration` but a newer iteration exists.

    The note tells the user that the save of the newer iteration may have failed. Without a newer
    iteration, the list is empty.
    """
    tracker = iteration.parent / TRACKER_FILE
    if not tracker.is_file() or tracked_iteration(iteration.parent) != iteration:
        return []
    newest = _list_iterations(iteration.parent)[-1]
    if "release" in (newest, iteration.name) or newest == iteration.name:
        return []
    return [
        f"{newest} is newer than {iteration.name}, which the tracker file names; the save of "
        f"{newest} may be incomplete: to read it anyway, give its directory"
    ]


def bridge_iteration(root: Path) -> tuple[Path, str] | None:
    """Return an iteration and a note for the user, from Megatron-Bridge's tracker file.

    - If the tracker file names a step: the step's iteration, and an empty note.
    - If the tracker file names no step: the newest iteration, and a note about this choice; None
      if there is no iteration.
    - If there is no tracker file: None.
    """
    tracker = root / BRIDGE_TRACKER_FILE
    if not tracker.is_file():
        return None
    state = read_torch_file(tracker)
    step = state.get("step") if isinstance(state, dict) else None
    step = _unwrap_number(step)
    if type(step) is int:
        iteration = root / f"iter_{step:07}"
        if not iteration.is_dir():
            available = ", ".join(_list_iterations(root)[-3:]) or "none"
            raise CheckpointError(
                f"{tracker} names {iteration.name}, which does not exist; found: {available}; "
                "copy the missing directory, or give the path of an existing iteration"
            )
        return iteration, ""
    names = _list_iterations(root)
    if not names:
        return None
    note = f"{tracker.name} names no step, so the newest iteration, {names[-1]}, was read"
    return root / names[-1], note


def open_rank_files(iteration: Path) -> RankFiles:
    """Open the file of each rank, memory-mapped, and check that the files belong together."""
    files = _find_rank_files(iteration)
    first = _open_rank_file(files[min(files)])
    sizes = _infer_parallel_sizes(first, files)
    expected_folders = {sizes.folder_name(rank): rank for rank in sizes.ranks()}
    missing = sorted(set(expected_folders) - set(files))
    origin = f"the args of {first.path.parent.name}" if first.args else "the directory names"
    sizes_with_origin = f"TP {sizes.tp} x PP {sizes.pp} x EP {sizes.ep} according to {origin}"
    if missing:
        raise CheckpointError(
            f"{iteration} lacks {summarize_names(missing)} of the {len(expected_folders)} ranks "
            f"({sizes_with_origin}); copy the missing directories from all nodes of the cluster: "
            "each node may have saved only its own ranks"
        )
    surplus = sorted(set(files) - set(expected_folders))
    if surplus:
        raise CheckpointError(
            f"{iteration} has {summarize_names(surplus)} beyond the {len(expected_folders)} ranks "
            f"({sizes_with_origin}); two checkpoints are mixed: remove the directories of the "
            "checkpoint that you do not need"
        )
    opened_files = {}
    for name, rank in expected_folders.items():
        opened_files[rank] = first if files[name] == first.path else _open_rank_file(files[name])
        _refuse_mixed(first, opened_files[rank])
    return RankFiles(sizes, opened_files)


def _unwrap_number(value: object) -> object:
    """Convert a one-element integer tensor to int; return any other value unchanged."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type != "cpu":
        return value
    return int(value) if value.dtype in (torch.int64, torch.int32) else value


def _find_rank_files(path: Path) -> dict[str, Path]:
    files = {}
    for folder in path.glob("mp_rank_*"):
        if RANK_FOLDER.fullmatch(folder.name):
            for name in WEIGHT_FILES:
                if (folder / name).is_file():
                    files[folder.name] = folder / name
                    break
    return files


def _list_iterations(path: Path) -> list[str]:
    """Return the names of the iteration directories: `release`, then from oldest to newest."""
    names = [child.name for child in path.iterdir() if child.is_dir()]
    names = [name for name in names if name == "release" or re.fullmatch(r"iter_\d{7,}", name)]
    return sorted(names, key=lambda name: (name != "release", len(name), name))


def tracked_iteration(path: Path) -> Path:
    """Return the iteration directory that the tracker file in `path` names.

    The directory may be absent.
    """
    with open_regular_file(path / TRACKER_FILE) as file:
        text = file.read(TEXT_BYTES_MAX).decode("utf-8", "replace").strip()
    if text == "release":
        return path / text
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise CheckpointError(
            f"{path / TRACKER_FILE} contains {text[:40]!r}, which is neither a number nor "
            "'release'; give the directory of an iteration"
        )
    return path / f"iter_{int(text):07}"


def _open_rank_file(path: Path) -> RankFile:
    record = read_torch_file(path)
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{path} contains a {type(record).__name__}, not a Megatron checkpoint; copy it again"
        )
    if record.get("modelopt_state") is not None:
        raise CheckpointError(
            f"{path} has modelopt_state: the model was quantized or pruned; give the original model"
        )
    chunks: dict[int, Mapping[str, Any]] = {}
    for key, value in record.items():
        match = re.fullmatch(r"model(\d{0,4})", key) if isinstance(key, str) else None
        if match and isinstance(value, dict):
            chunks[int(match[1] or 0)] = value
    if not chunks:
        keys = ", ".join(map(short_repr, list(record)[:5])) or "nothing"
        raise CheckpointError(
            f"{path} has no model among its keys ({keys}); it may be the file of an optimizer: "
            "give the file with the weights"
        )
    args, version = record.get("args"), record.get("checkpoint_version", 0)
    if isinstance(args, Stub):
        args = args.fields
    is_supported_version = type(version) in (int, float) and 0 <= version < VERSION_LIMIT
    if not isinstance(args, dict | None) or not is_supported_version:
        raise CheckpointError(
            f"{path} has args that are not a dict, or an invalid checkpoint_version; copy it again"
        )
    iteration = record.get("iteration", record.get("total_iters"))
    iteration = _unwrap_number(iteration)
    if not isinstance(iteration, int | None):
        raise CheckpointError(f"{path} has an iteration that is not an integer; copy it again")
    return RankFile(path, args or None, float(version), iteration, chunks)


def _infer_parallel_sizes(first: RankFile, files: Mapping[str, Path]) -> ParallelSizes:
    """Return the parallel sizes from the args, or from the directory names if there are no args.

    The args have precedence, because 001 in `mp_rank_00_001` can be a stage or an expert rank.
    """
    if first.args is not None:
        args = MegatronArgs(first.args, str(first.path))
        tp = args.integer("tensor_model_parallel_size", args.integer("model_parallel_size", 1))
        pp = args.integer("pipeline_model_parallel_size", 1)
        ep = args.integer("expert_model_parallel_size", 1)
        if min(tp, pp, ep) < 1 or tp * pp * ep > 1 << 20:
            raise CheckpointError(
                f"{first.path}: args give impossible parallel sizes, TP {tp} x PP {pp} x EP {ep}; "
                "copy the file again"
            )
        experts, etp = args.integer("num_experts"), args.integer("expert_tensor_parallel_size", tp)
        if experts and etp != tp:
            raise CheckpointError(
                f"{first.path}: args.expert_tensor_parallel_size is {etp}, but the tensor parallel "
                f"size is {tp}; different sizes are not supported: save the checkpoint as "
                "torch_dist"
            )
        return ParallelSizes(tp, pp, ep)
    matches = [match for match in map(RANK_FOLDER.fullmatch, files) if match]
    tp, pp, ep = (1 + max(int(match[group] or 0) for match in matches) for group in (1, 2, 3))
    return ParallelSizes(tp, pp, ep)


def _refuse_mixed(first: RankFile, other: RankFile) -> None:
    for attribute, first_value, other_value in (
        ("iteration", first.iteration, other.iteration),
        ("checkpoint_version", first.version, other.version),
    ):
        if first_value != other_value:
            raise CheckpointError(
                f"{first.path} has {attribute} {first_value}, but {other.path} has {other_value}; "
                "two checkpoints are mixed: take all ranks from the same checkpoint"
            )
    name = _find_differing_arg(first.args or {}, other.args or {})
    if name:
        values = [short_repr((saved.args or {}).get(name)) for saved in (first, other)]
        raise CheckpointError(
            f"{first.path} has args.{name} {values[0]}, but {other.path} has {values[1]}; two "
            "checkpoints are mixed: take all ranks from the same checkpoint"
        )


def _find_differing_arg(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first architecture arg that differs between two ranks, or None."""
    for name in ARCHITECTURE_ARGS:
        if short_repr(first.get(name)) != short_repr(other.get(name)):
            return name
    return None
