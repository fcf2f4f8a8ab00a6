"""A conversion: planned whole, copied under a journal, finished in one step.

Everything that can be wrong with the source's structure, the target's form or the disk's room is
said before a byte is written. The files grow in a hidden directory beside the target; only when all
is on the disk, and our own reader finds there the model that was meant, is it renamed. A killed run
leaves that directory and its journal, which `resume` continues.
"""

import errno
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

from checkpoints_tools.conversion.copy_engine import Copied, copy
from checkpoints_tools.conversion.journal import Done, Journal
from checkpoints_tools.conversion.target_directory import (
    check_place,
    complete,
    held,
    is_begun,
    partial_of,
    sync_folder,
    sync_folders,
)
from checkpoints_tools.layout.layout import Layout, unplaced
from checkpoints_tools.layout.tokenizer_files import tokenizer_files
from checkpoints_tools.writers.registry import Wish, lay_out
from gpt.checkpoint.digest import combine, fingerprint, function, identify
from gpt.checkpoint.logical_tensor import Checkpoint, Identity, in_memory, some
from gpt.config import GPTConfig
from gpt.dtypes import FLOATS
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST, Manifest
from gpt.formats.registry import open_checkpoint
from gpt.model.reference_logits import FILE as PROOF
from gpt.model.reference_logits import Proof, prove
from gpt.tokenizers.tokenizer import check_tokenizer, open_tokenizer

MEMORY = 1 << 30
WORKERS = 2  # More help where there are more processors; the command has as many.
# Part of the plan's name: a journal of a Preamble that laid files out otherwise is not continued.
PLAN_VERSION = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Report = Callable[[int], None]


@dataclass(frozen=True)
class Plan:
    source: Checkpoint  # As it is stored.
    made: Checkpoint  # The same in the dtypes that the target has.
    target: Path
    layout: Layout
    prove: bool = False

    @property
    def partial(self) -> Path:
        return partial_of(self.target)

    @property
    def source_files(self) -> list[str]:
        """What tells whether they were replaced since."""
        files = [(file.resolve(), file.stat()) for file in self.source.files]
        return [f"{file} {status.st_size} {status.st_mtime_ns}" for file, status in files]

    @property
    def key(self) -> str:
        """A name of all that the files' bytes follow from."""
        whole = hashlib.sha256(f"{PLAN_VERSION} {fingerprint(self.source)}".encode())
        whole.update(repr(self.source_files).encode())
        for file in (*self.layout.files, *self.layout.last):
            whole.update(repr(file).encode())
            for text in file.texts:
                whole.update(text.content)
        return whole.hexdigest()


@dataclass(frozen=True)
class Result:
    identity: Identity
    not_finite: tuple[str, ...] = ()
    overflown: tuple[str, ...] = ()
    was_complete: bool = False  # There was nothing left to do.


def plan(source: Checkpoint, target: Path, wish: Wish) -> Plan:
    """What will be where; refuses what the target's form cannot hold, by its name."""
    target = Path(os.path.abspath(target))
    tokenizer = wish.tokenizer or source.tokenizer
    made = replace(source, tokenizer=tokenizer)
    if wish.dtype is not None:
        made = made.in_dtype(FLOATS[wish.dtype])
    layout = lay_out(made, wish)
    if lost := unplaced(made, layout):
        raise RuntimeError(f"--to {wish.to} would lose {some(lost)}")  # A mistake of the writer.
    made = _as_placed(made, layout)
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


def _as_placed(made: Checkpoint, layout: Layout) -> Checkpoint:
    """In the dtypes that the files have: some forms keep all layers of a kind in one."""
    dtypes = {place.name: place.dtype for file in layout.files for place in file.placements}
    tensors = {
        name: logical if logical.dtype == dtypes[name] else replace(logical, dtype=dtypes[name])
        for name, logical in made.tensors.items()
    }
    return replace(made, tensors=tensors)


def convert(
    plan: Plan,
    *,
    resume: bool = False,
    workers: int = WORKERS,
    memory: int = MEMORY,
    refuse_nan: bool = False,
    keep: bool = True,
    report: Report = lambda _: None,
) -> Result:
    """Write the target: all of it appears at once, or nothing.

    What a failed run has done stays for `resume`, unless the source or the wish cannot be met, or
    `keep` is false.
    """
    known = _recorded(plan.source)
    try:
        if resume and (finished := _finished(plan)) is not None:
            return Result(finished, was_complete=True)
        check_place(plan.source, plan.target, plan.layout, resume)
        key, files = plan.key, plan.source_files
        proof = prove(plan.source, Identity("", "")) if plan.prove else None
        with held(plan.partial):
            over = False
            try:
                # Another run may have finished while we looked.
                check_place(plan.source, plan.target, plan.layout, resume=True)
                with Journal(plan.partial / "journal", key) as journal:
                    copied = _copied(plan, journal, workers, memory, refuse_nan, report)
                identity = _identity(plan, copied, known)
                _finish(plan, copied, identity, proof)
                if plan.source_files != files:
                    raise CheckpointError(
                        f"{plan.source.path} was changed while it was read; convert it again when "
                        "nobody writes there"
                    )
                _appear(plan)
                over = True
            except CheckpointError:
                over = not resume  # What the source or the wish has wrong does not get better.
                raise
            finally:
                if over or not keep or not any(plan.partial.iterdir()):
                    shutil.rmtree(plan.partial, ignore_errors=True)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        way = "make room" if error.errno in NO_ROOM else "mend that, or choose another place"
        raise CheckpointError(
            f"cannot write {plan.target}: {what}{error.strerror or error}; {way}, and run again "
            "with --resume"
        ) from None
    return Result(identity, copied.not_finite, copied.overflown)


def _recorded(source: Checkpoint) -> Identity | None:
    """Which model the source says it is; refused if its weights are no longer those."""
    return identify(source) if source.identity is not None else None


def _finished(plan: Plan) -> Identity | None:
    """What an earlier run made of this plan; what it left beside it goes."""
    finished = complete(plan.made, plan.target, plan.layout, plan.prove)
    if finished is not None and plan.partial.exists():
        with held(plan.partial):
            shutil.rmtree(plan.partial, ignore_errors=True)
    return finished


def _copied(
    plan: Plan, journal: Journal, workers: int, memory: int, refuse_nan: bool, report: Report
) -> Copied:
    """All tensors where they belong; those that an earlier run brought there are not copied."""
    content = plan.partial / "content"
    if not (journal.done and is_begun(content, plan.layout)):
        journal.forget()
        shutil.rmtree(content, ignore_errors=True)
    content.mkdir(exist_ok=True)

    def found(done: Done) -> None:
        if refuse_nan and not (done.finite and done.fits):
            what = "holds values that are not finite"
            if done.finite:
                what = f"holds values that {plan.made.config.dtype} cannot hold"
            raise CheckpointError(
                f"{plan.source.path}: {done.name} {what}, and such were to be refused; take an "
                "earlier checkpoint, or leave out --refuse-nan to copy them"
            )

    return copy(
        *(plan.source, plan.layout, content, journal),
        workers=workers,
        memory=memory,
        report=report,
        found=found,
    )


def _appear(plan: Plan) -> None:
    """The one step that makes it a target. A journal without its content is not believed."""
    content = plan.partial / "content"
    whole = content / plan.layout.files[0].path if plan.layout.alone else content
    whole.rename(plan.target)
    sync_folder(plan.target.parent)


def _identity(plan: Plan, copied: Copied, known: Identity | None) -> Identity:
    digest = combine(plan.source, copied.hashes)
    recorded = known and (known.stored or ("" if known.note else known.digest))
    if recorded and recorded != digest:
        raise CheckpointError(
            f"{plan.source.path}: the weights give digest {digest[:12]}, its manifest says "
            f"{recorded[:12]}; files were damaged after it was written: `preamble verify` it"
        )
    identity = known or Identity(digest, fingerprint(plan.source))
    stored = combine(plan.made, copied.stored)
    note = identity.note
    if stored != digest:
        dtypes = plan.source.config.dtype, plan.made.config.dtype
        what = f"converted from {dtypes[0]} to {dtypes[1]}"
        what = what if dtypes[0] != dtypes[1] else f"some weights converted beside {dtypes[0]}"
        note = f"{note}; {what}" if note else what
    return replace(
        identity,
        note=note,
        sampled=fingerprint(plan.made),
        stored="" if stored == identity.digest else stored,
    )


def _finish(plan: Plan, copied: Copied, identity: Identity, proof: Proof | None) -> None:
    """What makes it a checkpoint; and our own reader has to find the right one there."""
    content = plan.partial / "content"
    if not plan.layout.alone:
        _write_small_files(plan, content, copied, identity, proof)
    sync_folders(content)
    look = content / plan.layout.files[0].path if plan.layout.alone else content
    _look(plan, open_checkpoint(look), identity)


def _write_small_files(
    plan: Plan, content: Path, copied: Copied, identity: Identity, proof: Proof | None
) -> None:
    """The manifest before the files of its own form."""
    folder = content / plan.layout.folder
    files = {
        _inside(file.path, plan): {"bytes": file.size, "crc32": f"{copied.crcs[file.path]:08x}"}
        for file in plan.layout.files
    }
    if proof is not None:
        text = replace(proof, base=identity.digest).to_bytes()
        _write(folder / PROOF, text)
        files[PROOF] = _entry(text)
    last = {file.path: b"".join(text.content for text in file.texts) for file in plan.layout.last}
    files |= {
        _inside(path, plan): _entry(text)
        for path, text in last.items()
        if not plan.layout.folder or path.startswith(f"{plan.layout.folder}/")
    }
    manifest = Manifest(plan.layout.format, plan.made.config, identity, files)
    _write(folder / MANIFEST, manifest.to_bytes())
    for path, text in last.items():
        _write(content / path, text)


def _look(plan: Plan, written: Checkpoint, identity: Identity) -> None:
    """What a writer got wrong shows here, and not at the first answer of a server."""
    meant, found = function(plan.made.config), function(written.config)
    wrong = [name for name, value in meant.items() if found.get(name) != value]
    if wrong:
        raise RuntimeError(f"{some(wrong)} of the config is not written as it was meant")
    if fingerprint(written) != identity.sampled:
        raise RuntimeError("what was written is not the source's model")


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
    return convert(plan(checkpoint, target, wish), keep=False).identity
