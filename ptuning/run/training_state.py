"""Training states, from which a run resumes: saving, loading, and the lock of the run's folder.

A state is a folder with one JSON file of facts, and one tensor file for each (stage, tensor rank)
that has trainable tensors; only data-parallel rank 0 writes tensor files. A state is written under
a temporary name, synced to disk and renamed, so a folder with the final name is complete. A run can
resume from a state only with the same settings, records and base model; the fingerprint of the run
identifies all three. Settings that do not affect the training result (`RESUMABLE_CHANGES`) may
differ. This module does not interpret the facts and tensors of a state.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import read_small_file
from gpt.errors import ConfigError
from gpt.files.atomic_files import fsync_folder, rename_durable, write_synced
from gpt.parallel.mesh import Mesh
from gpt.settings import setting_fields
from ptuning.config import TuneConfig, rename_monitor
from ptuning.data.dataset import Example
from ptuning.task import Task

FORMAT, VERSION = "preamble.run", 1
FACTS_FILE = "facts.json"
STATE_PATTERN = re.compile(r"state-(\d{8})")  # Name of a state's folder, with the step.
RUN_PATTERN = re.compile(r"[1-9]\d{0,5}")  # Name of a run's folder: the number of the run.
# Settings that may change when a run resumes, because they do not affect the training result.
RESUMABLE_CHANGES = {"output", "run", "save_every", "tensorboard", "golden_examples"}


@dataclass(frozen=True)
class RunFingerprint:
    """Identity of a run; a run resumes from a state only if both have the same fingerprint."""

    settings: Mapping[str, Any]  # All settings except RESUMABLE_CHANGES.
    records: str  # Digest of all rendered examples, training and validation.
    base: str  # Digest of the base model.

    @classmethod
    def compute(
        cls, config: TuneConfig, examples: Sequence[Example], base: str
    ) -> "RunFingerprint":
        digest = hashlib.sha256()
        for example in examples:
            ids, positions = array("i", example.ids), array("i", example.loss_positions)
            digest.update(b"%d %d %d " % (example.task_index, len(ids), len(positions)))
            digest.update(ids)
            digest.update(positions)
        settings = {
            key: value for key, value in config.to_record().items() if key not in RESUMABLE_CHANGES
        }
        # Settings that are read from a state have been converted to JSON and back, which turns
        # tuples into lists. The same conversion makes these settings comparable.
        return cls(json.loads(json.dumps(settings)), digest.hexdigest(), base)

    def check_same_on_all_ranks(self, mesh: Mesh) -> None:
        """Raise ConfigError if the ranks have different fingerprints.

        With different inputs, the ranks could call different collectives and deadlock.
        """
        if mesh.tp * mesh.dp * mesh.pp == 1:
            return
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()
        number = int.from_bytes(digest[:7])
        # One all-reduce gives the maximum and the negative minimum over the ranks.
        extremes = torch.tensor([number, -number], dtype=torch.int64, device=mesh.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != -int(extremes[1]):
            raise ConfigError(
                "the ranks read different records, settings or base models, or these files "
                "changed while the run started; make all machines read the same files"
            )

    def matches(self, saved: Mapping[str, Any]) -> bool:
        """Return whether `saved`, which may be of an earlier release, is this fingerprint."""
        saved_settings = read_settings(saved)
        return (saved.get("records"), saved.get("base")) == (self.records, self.base) and all(
            saved_settings[key] == value for key, value in self.settings.items()
        )

    def check_matches(self, saved: Mapping[str, Any], path: Path) -> None:
        """Raise ConfigError with the first difference from `saved`, the fingerprint of a state.

        `path` is the state's folder.
        """
        saved_settings = read_settings(saved)
        for key, value in self.settings.items():
            if saved_settings[key] != value:
                raise ConfigError(
                    f"the unfinished run of {path} had {key} {saved_settings[key]!r}, now "
                    f"{key} is {value!r}; set {key} back to resume, or give --restart to start "
                    "from step 0"
                )
        for name, expected in (("records", self.records), ("base", self.base)):
            if saved.get(name) != expected:
                change = "the records have" if name == "records" else "the base model has"
                raise ConfigError(
                    f"{change} changed since the unfinished run of {path} started; restore the "
                    "original to resume, or give --restart to start from step 0"
                )


def read_settings(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the fingerprint of a state, with the meaning that this release has.

    A state of an earlier release lacks the settings that were added later; its run had their
    defaults. If a release renames a setting or changes its meaning, this function converts it.
    """
    defaults = {
        key: list(field.default) if isinstance(field.default, tuple) else field.default
        for key, field in setting_fields(TuneConfig).items()
    }
    saved = fingerprint.get("settings", {})
    settings = rename_monitor(saved)
    if "monitor" not in saved:  # A state of version 0.1, in which None meant never, as 0 does now.
        settings.setdefault("monitor", "loss")
        settings["measure"] = "first"
        if settings.get("validate_every") is None:
            settings["validate_every"] = 0
        elif settings.get("patience") is None:
            settings["patience"] = 0
    task_defaults = json.loads(json.dumps(asdict(Task(""))))
    # An earlier release has saved tasks without the task settings that were added later.
    tasks = [{**task_defaults, **task} for task in settings.get("tasks") or ()]
    return {**defaults, **settings, "tasks": tasks}


@dataclass(frozen=True)
class SavedState:
    """A complete state on disk."""

    path: Path  # Folder of the state.
    facts: dict[str, Any]  # Content of FACTS_FILE.

    def load_tensors(self, mesh: Mesh) -> dict[str, Tensor]:
        """Return this rank's tensors; empty if the rank has no trainable tensors."""
        file = self.path / _rank_file(mesh)
        if not file.exists():
            return {}
        try:
            return safetensors.torch.load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}); restore it, or give --restart to start from "
                "step 0"
            ) from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create a run folder, and lock it against other `preamble tune` processes."""
    descriptor = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{folder} is in use by another `preamble tune`; wait until that command ends, or "
                "set `run` to another directory"
            ) from None
        raise _unwritable_error(folder, error) from None
    try:
        yield
    finally:
        os.close(descriptor)


def choose_run_folder(base: Path, *, restart: bool) -> Path:
    """Return the folder of the latest run if the run can resume, else create a new folder.

    With `restart`, always create a new folder.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        latest = _latest_run(base)
        can_resume = not restart and unfinished_state(base) is not None
        folder = base / str(latest if can_resume else latest + 1)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable_error(base, error) from None
    return folder


def unfinished_state(base: Path) -> SavedState | None:
    """Return the newest state of the latest run below `base`; None if no run can resume."""
    return latest_state(base / str(latest)) if (latest := _latest_run(base)) else None


def _latest_run(base: Path) -> int:
    """Return the number of the latest run below `base`; 0 if there is none."""
    numbers = [int(path.name) for path in base.glob("*") if RUN_PATTERN.fullmatch(path.name)]
    return max(numbers, default=0)


def _unwritable_error(folder: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(
        f"run: {folder} cannot be written ({reason}); free disk space, or set `run` to another "
        "directory"
    )


def latest_state(folder: Path) -> SavedState | None:
    """Return the newest state with readable facts in a run folder; None if there is none.

    A finished run has no states.
    """
    for path in sorted(folder.glob("state-*"), reverse=True):
        if not STATE_PATTERN.fullmatch(path.name):
            continue
        try:
            facts = json.loads(read_small_file(path / FACTS_FILE))
        except (OSError, ValueError):
            # A state is complete when it gets its final name, so this state was damaged later. Try
            # the next older state.
            continue
        if facts.get("format") != FORMAT or facts.get("version", 0) > VERSION:
            raise ConfigError(
                f"{path} has an unknown format, perhaps of a later version of Preamble; resume "
                "with that version, or give --restart to start from step 0"
            )
        return SavedState(path, facts)
    return None


def common_state(folder: Path, mesh: Mesh) -> SavedState | None:
    """Return the latest state, or None if no rank finds one.

    Raise ConfigError if the ranks find states of different steps.
    """
    state = latest_state(folder)
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return state
    step = -1 if state is None else int(state.facts["step"])
    # One all-reduce gives the maximum and the negative minimum over the ranks.
    extremes = torch.tensor([step, -step], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    step_max, step_min = int(extremes[0]), -int(extremes[1])
    if step_max != step_min:
        raise ConfigError(
            f"not every rank finds the state of step {step_max} in {folder}; set `run` to a "
            "directory that all machines share, or give --restart to start from step 0"
        )
    return state


def save_state(
    folder: Path, mesh: Mesh, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> str | None:
    """Write a state; return None on every rank if it was written, else an error message.

    For each stage and tensor rank, data-parallel rank 0 writes the tensors. All ranks must call
    this function. After the state is written, older states are removed.
    """
    path = folder / f"state-{step:08d}"
    partial_path = folder / f".{path.name}.part"
    error = (
        _try_write(lambda: partial_path.mkdir(parents=True, exist_ok=True))
        if mesh.rank == 0
        else None
    )
    error = agree_on_error(error, mesh)
    if error is None and tensors and mesh.dp_rank == 0:
        content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        error = _try_write(
            lambda: write_synced(partial_path / _rank_file(mesh), safetensors.torch.save(content))
        )
    error = agree_on_error(error, mesh)
    if error is None and mesh.rank == 0:
        all_facts = {"format": FORMAT, "version": VERSION, "step": step, **facts}
        error = _try_write(lambda: _commit_state(partial_path, path, all_facts))
    if mesh.rank == 0:
        if error is None:
            remove_states(folder, keep=path)
        else:
            shutil.rmtree(partial_path, ignore_errors=True)
    return agree_on_error(error, mesh)


def remove_states(folder: Path, keep: Path | None = None) -> None:
    """Remove all states of a run except `keep`."""
    for path in folder.glob("state-*"):
        if path != keep:
            # The state is renamed first, because a partly removed state must not look complete.
            with suppress(OSError):
                rename_durable(path, folder / f".{path.name}.gone")
    for path in [*folder.glob(".state-*.part"), *folder.glob(".state-*.gone")]:
        shutil.rmtree(path, ignore_errors=True)


def agree_on_error(error: str | None, mesh: Mesh) -> str | None:
    """Return None on every rank if no rank has an error, else an error message on every rank.

    `error` is the error of this rank.
    """
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return error
    failed_ranks = torch.tensor([error is not None], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(failed_ranks)
    return error or ("another rank could not write" if int(failed_ranks) else None)


def _rank_file(mesh: Mesh) -> str:
    return f"rank-{mesh.pp_rank}-{mesh.tp_rank}.safetensors"


def _try_write(action: Any) -> str | None:
    """Call `action`; return the message of an OSError, or None."""
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _commit_state(partial_path: Path, path: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts of a state, and give the folder its final name."""
    write_synced(partial_path / FACTS_FILE, json.dumps(facts).encode())
    fsync_folder(partial_path)
    rename_durable(partial_path, path)
