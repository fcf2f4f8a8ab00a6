"""The files of a Megatron-LM checkpoint: which ranks it has, and that they belong together.

A root has a tracker file that names an iteration; an iteration has a directory for every tensor,
pipeline and expert rank. The directories' names are ambiguous, so the arguments inside decide; all
ranks that they promise must be there, of one iteration, with one architecture.
It knows no tensors by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.restricted_unpickle import Stub, read_pickle
from gpt.checkpoint.logical_tensor import some
from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import DESCRIBING, Args
from gpt.settings import shown

TRACKER = "latest_checkpointed_iteration.txt"
BRIDGE_TRACKER = "latest_train_state.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
TEXT_BYTES_MAX = 1000
VERSIONS_END = 100  # Three are known; what is no number at all is in no range.
# The second is of 2022 and 2023, when a distributed optimizer had files of its own.
WEIGHTS = ("model_optim_rng.pt", "model_rng.pt")


@dataclass(frozen=True)
class Place:
    """A rank's coordinates among those that wrote files."""

    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True)
class Split:
    tp: int
    pp: int
    ep: int

    def places(self) -> list[Place]:
        """In the order of stages, then experts, then tensor ranks."""
        stages, experts, tensors = range(self.pp), range(self.ep), range(self.tp)
        return [Place(t, p, e) for p in stages for e in experts for t in tensors]

    def folder(self, place: Place) -> str:
        """A suffix is there only if there is more than one such rank."""
        stage = f"_{place.stage:03}" if self.pp > 1 else ""
        expert = f"_{place.expert:03}" if self.ep > 1 else ""
        return f"mp_rank_{place.tensor:02}{stage}{expert}"


@dataclass(frozen=True)
class Saved:
    """What one rank's file says of the model; its chunks are one unless pipelined virtually."""

    path: Path
    args: Mapping[str, Any] | None  # None in files of 2019 and 2020.
    version: float  # Of the order of rows in the attention; 0 where it is not said.
    iteration: int | None
    chunks: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Ranks:
    """All files of one checkpoint."""

    split: Split
    saved: Mapping[Place, Saved]

    @property
    def chunks(self) -> int:
        """Virtual stages; one that holds no layer may be missing in a file."""
        return 1 + max(max(saved.chunks, default=0) for saved in self.saved.values())


def find_iteration(path: Path) -> Path | None:
    """The directory with the rank directories: `path`, or what its tracker names; None if none."""
    if path.name in WEIGHTS:
        path = path.parent
    if RANK.fullmatch(path.name):
        path = path.parent
    if _rank_files(path):
        return path
    if not (path / TRACKER).is_file():
        return None
    named = tracked(path)
    if not named.is_dir():
        others = ", ".join(_iterations(path)[-3:]) or "none"
        raise CheckpointError(
            f"{path / TRACKER} names {named.name}, which is not there; found are: {others}; copy "
            "the missing directory, or give one of these"
        )
    return named if _rank_files(named) else None


def newer_iteration(iteration: Path) -> list[str]:
    """A note on a later save beside the one that the tracker names: it may have died."""
    tracker = iteration.parent / TRACKER
    if not tracker.is_file() or tracked(iteration.parent) != iteration:
        return []
    newest = _iterations(iteration.parent)[-1]
    if "release" in (newest, iteration.name) or newest == iteration.name:
        return []
    return [
        f"{newest} is newer than {iteration.name}, which the tracker names; its save may not have "
        "ended: give its own directory to read it"
    ]


def bridge_iteration(root: Path) -> tuple[Path, str] | None:
    """What Megatron-Bridge's own tracker names, and a note if it names none that can be read."""
    tracker = root / BRIDGE_TRACKER
    if not tracker.is_file():
        return None
    state = read_pickle(tracker)
    step = state.get("step") if isinstance(state, dict) else None
    step = _number(step)
    if type(step) is int:
        named = root / f"iter_{step:07}"
        if not named.is_dir():
            others = ", ".join(_iterations(root)[-3:]) or "none"
            raise CheckpointError(
                f"{tracker} names {named.name}, which is not there; found are: {others}; copy the "
                "missing directory, or give one of these"
            )
        return named, ""
    names = _iterations(root)
    if not names:
        return None
    return root / names[-1], f"{tracker.name} names no step; {names[-1]}, the newest, is read"


def open_ranks(iteration: Path) -> Ranks:
    """Every rank's file, mapped, and held against the others."""
    files = _rank_files(iteration)
    first = _open(files[min(files)])
    split = _split(first, files)
    wanted = {split.folder(place): place for place in split.places()}
    missing = sorted(set(wanted) - set(files))
    says = "args" if first.args else "names"
    if missing:
        raise CheckpointError(
            f"{iteration} lacks {some(missing)} of the {len(wanted)} ranks (TP {split.tp} x PP "
            f"{split.pp} x EP {split.ep} by the {says} of {first.path.parent.name}); copy the "
            "missing ones, each node of a cluster may have kept its own"
        )
    surplus = sorted(set(files) - set(wanted))
    if surplus:
        raise CheckpointError(
            f"{iteration} has {some(surplus)} beyond the {len(wanted)} ranks (TP {split.tp} x PP "
            f"{split.pp} x EP {split.ep} by the {says} of {first.path.parent.name}); two "
            "checkpoints are mixed here: remove what is not of this one"
        )
    saved = {}
    for name, place in wanted.items():
        saved[place] = first if files[name] == first.path else _open(files[name])
        _refuse_mixed(first, saved[place])
    return Ranks(split, saved)


def _number(value: object) -> object:
    """Some runs keep a number as a tensor; one that is none stays what it is."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type != "cpu":
        return value
    return int(value) if value.dtype in (torch.int64, torch.int32) else value


def _rank_files(path: Path) -> dict[str, Path]:
    found = {}
    for folder in path.glob("mp_rank_*"):
        if RANK.fullmatch(folder.name):
            for name in WEIGHTS:
                if (folder / name).is_file():
                    found[folder.name] = folder / name
                    break
    return found


def _iterations(path: Path) -> list[str]:
    """The last one is the newest."""
    names = [child.name for child in path.iterdir() if child.is_dir()]
    names = [name for name in names if name == "release" or re.fullmatch(r"iter_\d{7,}", name)]
    return sorted(names, key=lambda name: (name != "release", len(name), name))


def tracked(path: Path) -> Path:
    with open(path / TRACKER, "rb") as file:
        text = file.read(TEXT_BYTES_MAX).decode("utf-8", "replace").strip()
    if text == "release":
        return path / text
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise CheckpointError(
            f"{path / TRACKER} says {text[:40]!r}, not a number or 'release'; give the directory "
            "of one iteration"
        )
    return path / f"iter_{int(text):07}"


def _open(path: Path) -> Saved:
    record = read_pickle(path)
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} is a {type(record).__name__}, not a Megatron checkpoint")
    if record.get("modelopt_state") is not None:
        raise CheckpointError(
            f"{path} has modelopt_state: the model was quantized or pruned; give the one before"
        )
    chunks: dict[int, Mapping[str, Any]] = {}
    for key, value in record.items():
        found = re.fullmatch(r"model(\d{0,4})", str(key))
        if found and isinstance(value, dict):
            chunks[int(found[1] or 0)] = value
    if not chunks:
        keys = ", ".join(str(key) for key in list(record)[:5]) or "nothing"
        raise CheckpointError(
            f"{path} has no model among its keys ({keys}); an optimizer's own file is no model"
        )
    args, version = record.get("args"), record.get("checkpoint_version", 0)
    if isinstance(args, Stub):
        args = args.fields
    known = type(version) in (int, float) and 0 <= version < VERSIONS_END
    if not isinstance(args, dict | None) or not known:
        raise CheckpointError(f"{path} has args or a version that are none; copy it again")
    iteration = record.get("iteration", record.get("total_iters"))
    iteration = _number(iteration)
    if not isinstance(iteration, int | None):
        raise CheckpointError(f"{path} has an iteration that is no number; copy it again")
    return Saved(path, args or None, float(version), iteration, chunks)


def _split(first: Saved, files: Mapping[str, Path]) -> Split:
    """Sizes from the arguments; `mp_rank_00_001` alone can be a stage or an expert rank."""
    if first.args is not None:
        args = Args(first.args, str(first.path))
        tp = args.whole("tensor_model_parallel_size", args.whole("model_parallel_size", 1))
        pp = args.whole("pipeline_model_parallel_size", 1)
        ep = args.whole("expert_model_parallel_size", 1)
        if min(tp, pp, ep) < 1 or tp * pp * ep > 1 << 20:
            raise CheckpointError(
                f"{first.path}: args give TP {tp} x PP {pp} x EP {ep}, which no cluster has; copy "
                "the file again"
            )
        experts, etp = args.whole("num_experts"), args.whole("expert_tensor_parallel_size", tp)
        if experts and etp != tp:
            raise CheckpointError(
                f"{first.path}: args.expert_tensor_parallel_size is {etp}, the tensor parallel size"
                f" {tp}; where they differ the experts are not read: save as torch_dist"
            )
        return Split(tp, pp, ep)
    matches = [match for match in map(RANK.fullmatch, files) if match]
    tp, pp, ep = (1 + max(int(match[place] or 0) for match in matches) for place in (1, 2, 3))
    return Split(tp, pp, ep)


def _refuse_mixed(first: Saved, other: Saved) -> None:
    for what, mine, its in (
        ("iteration", first.iteration, other.iteration),
        ("checkpoint_version", first.version, other.version),
    ):
        if mine != its:
            raise CheckpointError(
                f"{first.path} has {what} {mine}, {other.path} has {its}; two checkpoints are "
                "mixed: take all ranks from one"
            )
    name = _disagreement(first.args or {}, other.args or {})
    if name:
        values = [shown((saved.args or {}).get(name)) for saved in (first, other)]
        raise CheckpointError(
            f"{first.path} has args.{name} {values[0]}, {other.path} has {values[1]}; two "
            "checkpoints are mixed: take all ranks from one"
        )


def _disagreement(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first describing argument on which two ranks differ; None if there is none."""
    for name in DESCRIBING:
        if shown(first.get(name)) != shown(other.get(name)):
            return name
    return None
