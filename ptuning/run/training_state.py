"""A run's directory: states to go on from, and which run they belong to.

A state is a folder with a file for each rank that learns something and one of facts, made under
another name and renamed when all of it is on the disk; so there is none that is half. A state is
only for the run that wrote it: same settings, same records, same base.
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

from gpt.checkpoint.files.safetensors_file import read_text
from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example

FORMAT, VERSION = "preamble.run", 1
FACTS = "facts.json"
STATE = re.compile(r"state-(\d{8})")
RUN = re.compile(r"[1-9]\d{0,5}")
# Settings that may differ when a run goes on: they change nothing that is learned.
FREE = {"output", "run", "save_every", "tensorboard", "golden_examples"}


@dataclass(frozen=True)
class Origin:
    """What a state must have come from, to be gone on from."""

    settings: Mapping[str, Any]
    records: str  # A digest of all rendered examples, those that only measure among them.
    base: str  # The model's digest.

    @classmethod
    def of(cls, config: TuneConfig, examples: Sequence[Example], base: str) -> "Origin":
        whole = hashlib.sha256()
        for example in examples:
            ids, places = array("i", example.ids), array("i", example.learned)
            whole.update(b"%d %d %d " % (example.task, len(ids), len(places)))
            whole.update(ids)
            whole.update(places)
        settings = {key: value for key, value in asdict(config).items() if key not in FREE}
        # As JSON gives them back.
        return cls(json.loads(json.dumps(settings)), whole.hexdigest(), base)

    def check_alike(self, mesh: Mesh) -> None:
        """Refuse ranks that were given different things: they would wait for each other."""
        if mesh.tp * mesh.dp * mesh.pp == 1:
            return
        whole = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()
        own = int.from_bytes(whole[:7])
        told = torch.tensor([own, -own], dtype=torch.int64, device=mesh.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if int(told[0]) != -int(told[1]):
            raise ConfigError(
                "the ranks were not given the same records, settings and base model, or these "
                "changed while the run started; let all machines read the same files"
            )

    def check(self, other: Mapping[str, Any], where: Path) -> None:
        """Refuse a state that came from something else, naming what has changed."""
        was = other.get("settings", {})
        for key, value in self.settings.items():
            if was.get(key) != value:
                raise ConfigError(
                    f"{where} is of a run that is not finished and had {key} {was.get(key)!r}, now "
                    f"it is {value!r}; set it back to go on, or give --restart to begin anew"
                )
        for name, own in (("records", self.records), ("base", self.base)):
            if other.get(name) != own:
                what = "the records have" if name == "records" else "the base model has"
                raise ConfigError(
                    f"{where} is of a run that is not finished, and {what} changed since; bring "
                    "back what it learned from, or give --restart to begin anew"
                )


@dataclass(frozen=True)
class Saved:
    """A state, as it was found."""

    path: Path
    facts: dict[str, Any]

    def tensors(self, mesh: Mesh) -> dict[str, Tensor]:
        """This rank's; empty if it learns nothing."""
        file = self.path / _file(mesh)
        if not file.exists():
            return {}
        try:
            return safetensors.torch.load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}); bring it back, or give --restart to begin anew"
            ) from None


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep others from running here meanwhile."""
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{folder} is in use by another `preamble tune`; wait for it, or name another `run`"
            ) from None
        raise _no_room(folder, error) from None
    try:
        yield
    finally:
        os.close(lock)


def choose_run(base: Path, *, restart: bool) -> Path:
    """The folder of the latest run if it is to go on, else of a new one."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        numbers = [int(one.name) for one in base.iterdir() if RUN.fullmatch(one.name)]
        latest = max(numbers, default=0)
        goes_on = latest and not restart and latest_state(base / str(latest)) is not None
        folder = base / str(latest if goes_on else latest + 1)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _no_room(base, error) from None
    return folder


def _no_room(folder: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"run: {folder} cannot be written ({why}); make room, or name another")


def latest_state(folder: Path) -> Saved | None:
    """The newest whole state of a run that is not finished."""
    for path in sorted(folder.glob("state-*"), reverse=True):
        if not STATE.fullmatch(path.name):
            continue
        try:
            facts = json.loads(read_text(path / FACTS))
        except (OSError, ValueError):
            continue  # Nobody renames an unfinished one; somebody else has been here.
        if facts.get("format") != FORMAT or facts.get("version", 0) > VERSION:
            raise ConfigError(
                f"{path} is of a later Preamble; go on with that one, or give --restart"
            )
        return Saved(path, facts)
    return None


def common_state(folder: Path, mesh: Mesh) -> Saved | None:
    """The latest one as all ranks find it: their machines may see different disks."""
    saved = latest_state(folder)
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return saved
    step = -1 if saved is None else int(saved.facts["step"])
    told = torch.tensor([step, -step], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    most, least = int(told[0]), -int(told[1])
    if most != least:
        raise ConfigError(
            f"not every rank finds the state of step {most} in {folder}; let `run` be a directory "
            "that all machines share, or give --restart to begin anew"
        )
    return saved


def save_state(
    folder: Path, mesh: Mesh, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> str | None:
    """Write a state, every rank its part; why it could not be, on every rank, if it could not."""
    path = folder / f"state-{step:08d}"
    part = folder / f".{path.name}.part"
    trouble = _tried(lambda: part.mkdir(parents=True, exist_ok=True)) if mesh.rank == 0 else None
    trouble = agreed(trouble, mesh)
    if trouble is None and tensors and mesh.dp_rank == 0:
        content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        trouble = _tried(lambda: _write(part / _file(mesh), safetensors.torch.save(content)))
    trouble = agreed(trouble, mesh)
    if trouble is None and mesh.rank == 0:
        record = {"format": FORMAT, "version": VERSION, "step": step, **facts}
        trouble = _tried(lambda: _finish(part, path, record))
    if mesh.rank == 0:
        if trouble is None:
            forget_states(folder, but=path)
        else:
            shutil.rmtree(part, ignore_errors=True)
    return agreed(trouble, mesh)


def forget_states(folder: Path, but: Path | None = None) -> None:
    """Remove the states of a run, since a later one stands or the run is finished."""
    for other in folder.glob("state-*"):
        if other != but:
            # Else what is half removed would look whole, if this ended here.
            with suppress(OSError):
                os.rename(other, folder / f".{other.name}.gone")
    for other in [*folder.glob(".state-*.part"), *folder.glob(".state-*.gone")]:
        shutil.rmtree(other, ignore_errors=True)


def agreed(trouble: str | None, mesh: Mesh) -> str | None:
    """The same answer on every rank: none, or the first rank's trouble, in short."""
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return trouble
    bad = torch.tensor([trouble is not None], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(bad)
    return trouble or ("another rank could not write" if int(bad) else None)


def _file(mesh: Mesh) -> str:
    return f"rank-{mesh.pp_rank}-{mesh.tp_rank}.safetensors"


def _tried(act: Any) -> str | None:
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _write(file: Path, content: bytes) -> None:
    with open(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _finish(part: Path, path: Path, record: Mapping[str, Any]) -> None:
    _write(part / FACTS, json.dumps(record).encode())
    _sync(part)
    os.rename(part, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
