"""A conversion: planned whole, copied under a journal, finished in one step.

Everything that can be wrong with the source's structure, the target's form or the disk's room is
said before a byte is written. The files grow in a hidden directory beside the target; only when all
is on the disk, and our own reader finds there the model that was meant, is it renamed. A killed run
leaves that directory and its journal, which `resume` continues.
"""

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.copying import Copied, copy
from checkpoints_tools.journal import Done, Journal
from checkpoints_tools.layout import Layout, unplaced
from checkpoints_tools.tokenizer_files import tokenizer_files
from checkpoints_tools.writers import Wish, lay_out
from gpt.checkpoint import open_checkpoint
from gpt.config import GPTConfig
from gpt.digest import combine, fingerprint, function, identify
from gpt.errors import CheckpointError
from gpt.logical import FLOATS, Checkpoint, Identity, in_memory
from gpt.manifest import MANIFEST, Manifest, read_manifest
from gpt.proof import FILE as PROOF
from gpt.proof import prove
from gpt.tokenizer import check_tokenizer, open_tokenizer

MEMORY = 1 << 30
WORKERS = 2  # More help where there are more processors; the command has as many.
# Part of the plan's name: a journal of a Preamble that laid files out otherwise is not continued.
PLAN_VERSION = 1
# What a filesystem needs besides the files' own bytes.
ROOM_SPARE = 16 << 20

Report = Callable[[int], None]


@dataclass(frozen=True)
class Plan:
    source: Checkpoint  # As it is stored.
    made: Checkpoint  # The same in the dtype that the target has.
    target: Path
    layout: Layout
    prove: bool = False

    @property
    def partial(self) -> Path:
        """Where the target grows, on the same disk."""
        return self.target.parent / f".{self.target.name}.partial"

    @property
    def key(self) -> str:
        """A name of all that the files' bytes follow from."""
        whole = hashlib.sha256(f"{PLAN_VERSION} {fingerprint(self.source)}".encode())
        for file in self.source.files:
            status = file.stat()
            whole.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
        for file_ in (*self.layout.files, *self.layout.last):
            whole.update(repr(file_).encode())
            for text in file_.texts:
                whole.update(text.content)
        return whole.hexdigest()


@dataclass(frozen=True)
class Result:
    identity: Identity
    not_finite: tuple[str, ...] = ()
    was_complete: bool = False  # There was nothing left to do.


def plan(source: Checkpoint, target: Path, wish: Wish) -> Plan:
    """What will be where; refuses what the target's form cannot hold, by its name."""
    tokenizer = wish.tokenizer or source.tokenizer
    made = replace(source, tokenizer=tokenizer)
    if wish.dtype is not None:
        made = made.in_dtype(FLOATS[wish.dtype])
    layout = lay_out(made, wish)
    assert not unplaced(made, layout), f"{wish.to} would lose {unplaced(made, layout)[:3]}"
    if tokenizer is None:
        note = "the source has no tokenizer beside it; give one with --tokenizer, or add it later"
        return Plan(source, made, target, replace(layout, notes=(*layout.notes, note)), wish.prove)
    if layout.alone:  # It has taken of the tokenizer what it can hold.
        return Plan(source, made, target, layout)
    files, notes = tokenizer_files(tokenizer, layout), layout.notes
    try:
        check_tokenizer(open_tokenizer(tokenizer), made.config.vocab_size, tokenizer)
    except CheckpointError as error:
        notes = (*notes, f"the tokenizer is taken along as it is, but {error}")
    layout = replace(layout, files=(*layout.files, *files), notes=notes)
    return Plan(source, made, target, layout, wish.prove)


def convert(
    plan: Plan,
    *,
    resume: bool = False,
    workers: int = WORKERS,
    memory: int = MEMORY,
    refuse_nan: bool = False,
    report: Report = lambda _: None,
) -> Result:
    """Write the target: all of it appears at once, or nothing."""
    known = _recorded(plan.source)
    if resume and (complete := _complete(plan)) is not None:
        return Result(complete, was_complete=True)
    check_target(plan, resume)

    def found(done: Done) -> None:
        if refuse_nan and not done.finite:
            raise CheckpointError(
                f"{plan.source.path}: {done.name} holds values that are not finite, and they were "
                "to be refused; take an earlier checkpoint, or leave out --refuse-nan to copy them"
            )

    options: dict[str, Any] = {
        "workers": workers,
        "memory": memory,
        "report": report,
        "found": found,
    }
    content = plan.partial / "content"
    try:
        key = plan.key  # It looks into every tensor, and may find one that cannot be read.
        plan.partial.mkdir(parents=True, exist_ok=True)
        with Journal(plan.partial / "journal", key) as journal:
            if journal.begins:
                shutil.rmtree(content, ignore_errors=True)
            content.mkdir(exist_ok=True)
            try:
                copied = copy(plan.source, plan.layout, content, journal, **options)
                identity = _identity(plan, copied, known)
                _finish(plan, content, copied, identity)
            except CheckpointError:
                # What the source or the wish has wrong does not get better with time.
                if not resume:
                    shutil.rmtree(plan.partial, ignore_errors=True)
                raise
            # Whoever removes the target later must not find notes of work that went with it.
            journal.end()
            whole = content / plan.layout.files[0].path if plan.layout.alone else content
            whole.rename(plan.target)
            _sync_folder(plan.target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {plan.target}: {error.strerror or error}; make room or choose another "
            "place, and run again with --resume"
        ) from None
    shutil.rmtree(plan.partial, ignore_errors=True)
    return Result(identity, copied.not_finite)


def _recorded(source: Checkpoint) -> Identity | None:
    """Which model the source says it is; refused if its weights are no longer those."""
    return identify(source) if source.identity is not None else None


def _complete(plan: Plan) -> Identity | None:
    """The identity of a target that an earlier run of this very plan finished; None if none did."""
    folder = plan.target / plan.layout.folder
    if plan.layout.alone and plan.target.is_file():
        found = open_checkpoint(plan.target)
        return identify(found) if fingerprint(found) == fingerprint(plan.made) else None
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    sizes = {path: entry["bytes"] for path, entry in manifest.files.items()}
    same = all(sizes.get(_inside(file.path, plan)) == file.size for file in plan.layout.files)
    if not same or manifest.identity.sampled != fingerprint(plan.made):
        return None
    shutil.rmtree(plan.partial, ignore_errors=True)
    return manifest.identity


def check_target(plan: Plan, resume: bool = False) -> None:
    """Refuse a place that is taken, or that has no room."""
    try:
        _check_place(plan, resume)
    except OSError as error:
        raise CheckpointError(
            f"cannot look for {plan.target}: {error.strerror or error}; choose another target"
        ) from None


def _check_place(plan: Plan, resume: bool) -> None:
    target, partial = plan.target, plan.partial
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link; give the place that it leads to")
    empty = target.is_dir() and not plan.layout.alone and not any(target.iterdir())
    if target.exists() and not empty:
        raise CheckpointError(f"{target} exists already; remove it or choose another target")
    if plan.source.files and target.resolve().is_relative_to(plan.source.path.resolve()):
        raise CheckpointError(
            f"{target} is inside the source, {plan.source.path}, where readers would take it for a "
            "part of it; choose a place beside it"
        )
    began = (partial / "journal").exists()
    if began and not resume:
        raise CheckpointError(
            f"{partial} is what an earlier run left, or one that is running; add --resume to go on "
            "with it, or remove it"
        )
    place = target.parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    need = plan.layout.nbytes + ROOM_SPARE - there
    if need > free:
        raise CheckpointError(
            f"{target} needs {need:,} bytes, {place} has {free:,} free; make room, or choose a "
            "place on another disk"
        )


def _identity(plan: Plan, copied: Copied, known: Identity | None) -> Identity:
    digest = combine(plan.source, copied.hashes)
    if known is not None and not known.note and known.digest != digest:
        raise CheckpointError(
            f"{plan.source.path}: the weights give digest {digest[:12]}, its manifest says "
            f"{known.digest[:12]}; files were damaged after it was written: `preamble verify` it"
        )
    sampled = fingerprint(plan.made)
    identity = replace(known or Identity(digest, fingerprint(plan.source)), sampled=sampled)
    changed = [
        name
        for name, made in plan.made.tensors.items()
        if made.dtype != plan.source.tensors[name].dtype
    ]
    if changed:
        note = f"converted from {plan.source.config.dtype} to {plan.made.config.dtype}"
        note = f"{identity.note}; {note}" if identity.note else note
        identity = replace(identity, note=note)
    return identity


def _finish(plan: Plan, content: Path, copied: Copied, identity: Identity) -> None:
    """The small files that make it a checkpoint, and a look at it by our own reader."""
    if plan.layout.alone:
        _look(plan, open_checkpoint(content / plan.layout.files[0].path), identity)
        return
    folder = content / plan.layout.folder
    files = {
        _inside(file.path, plan): {"bytes": file.size, "crc32": f"{copied.crcs[file.path]:08x}"}
        for file in plan.layout.files
    }
    if plan.prove:
        proof = prove(plan.source, identity).to_bytes()
        _write(folder / PROOF, proof)
        files[PROOF] = _entry(proof)
    for file in plan.layout.last:
        text = b"".join(text.content for text in file.texts)
        _write(content / file.path, text)
        if file.path.startswith(plan.layout.folder):
            files[_inside(file.path, plan)] = _entry(text)
    manifest = Manifest(plan.layout.format, plan.made.config, identity, files)
    _write(folder / MANIFEST, manifest.to_bytes())
    for path in (content, *(path for path in content.rglob("*") if path.is_dir())):
        _sync_folder(path)
    _look(plan, open_checkpoint(content), identity)


def _look(plan: Plan, written: Checkpoint, identity: Identity) -> None:
    """What a writer got wrong shows here, and not at the first answer of a server."""
    meant, found = function(plan.made.config), function(written.config)
    for name, value in meant.items():
        assert found.get(name) == value, f"{name} is written as {found.get(name)}, not {value}"
    assert fingerprint(written) == identity.sampled, "what was written is not the source's model"


def _inside(path: str, plan: Plan) -> str:
    folder = f"{plan.layout.folder}/" if plan.layout.folder else ""
    return path.removeprefix(folder)


def _entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def _write(path: Path, text: bytes) -> None:
    with open(path, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_native(
    source: Checkpoint | tuple[GPTConfig, Mapping[str, Tensor]],
    target: Path,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes_max: int | None = None,
) -> Identity:
    """Write a checkpoint, or tensors in memory, as native."""
    checkpoint = source if isinstance(source, Checkpoint) else in_memory(*source)
    checkpoint.check()
    name = next((name for name, known in FLOATS.items() if known == dtype), None)
    wish = Wish(dtype=name, tokenizer=tokenizer, shard_bytes_max=shard_bytes_max)
    made = plan(checkpoint, target, wish)
    try:
        return convert(made).identity
    finally:
        shutil.rmtree(made.partial, ignore_errors=True)  # Nobody resumes this.
