"""`preamble verify`: whether two checkpoints of any format and split are one model, bit for bit.

All tensors of both are streamed once, compared and hashed on the way, so the digest of each costs
no second reading. Every difference is named. One checkpoint alone is held against what Preamble
wrote down when it made it. The result is printed by the caller, in words or as one JSON object.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from checkpoints_tools.flags import source_changes
from checkpoints_tools.inspection.full_scan import (
    Finding,
    examine,
    manifest_tasks,
    source_of,
    tasks,
)
from checkpoints_tools.inspection.parallel_read import Desk, Job, Report, Tally, in_words, run
from checkpoints_tools.inspection.tensor_diff import Comparison
from gpt.checkpoint.digest import combine, fingerprint, function, remember
from gpt.checkpoint.logical_tensor import Checkpoint, Identity, Logical, as_bytes
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.registry import open_checkpoint
from gpt.model.reference_logits import FILE as PROOF
from gpt.model.reference_logits import check_proof, find_proof

Say = Callable[[str], None]  # Takes a line of the result.
Progress = Callable[[int], AbstractContextManager[Report]]  # Made for so many bytes.


@dataclass(frozen=True)
class Difference:
    """One field or one tensor; `kind` is config, missing, shape, dtype or values."""

    name: str
    kind: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "what": self.what, **self.facts}


@dataclass(frozen=True)
class Outcome:
    """What became of one tensor: its hash on each side that has it, and how the two differ."""

    hashes: tuple[str, str]
    difference: Difference | None = None


@dataclass
class Side:
    """One of the two; `digest` is of the bytes that were read."""

    letter: str
    checkpoint: Checkpoint
    digest: str = ""
    findings: list[Finding] = field(default_factory=list)
    proof: str = ""  # A sentence.
    proven: bool = True

    def record(self) -> dict[str, Any]:
        identity = self.checkpoint.identity
        return {
            "path": str(self.checkpoint.path),
            "format": self.checkpoint.format,
            "digest": self.digest,
            "recorded_digest": identity.digest if identity else None,
            "faults": [one.line for one in self.findings if one.fault],
            "remarks": [one.line for one in self.findings if not one.fault],
            "proof": self.proof or None,
            "proven": self.proven if self.proof else None,
        }


@dataclass
class Verdict:
    """Everything that was found. `record` is what --json prints; its keys stay."""

    sides: list[Side]
    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        faults = any(one.fault for side in self.sides for one in side.findings)
        return not self.differences and not faults and all(side.proven for side in self.sides)

    def record(self) -> dict[str, Any]:
        named = {side.letter.lower(): side.record() for side in self.sides}
        return {
            "a": named["a"],
            "b": named.get("b"),
            "good": self.good,
            "equal": not self.differences if len(self.sides) == 2 else None,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "differences": [one.record() for one in self.differences],
        }


def verify(flags: argparse.Namespace, say: Say, progress: Progress) -> int:
    """Carry out what `flags.verify_parser` understood; 0: nothing is wrong, 1: something is."""
    changes = source_changes(flags)
    words = [word for word in (flags.a, flags.b) if word is not None]
    opened = [open_checkpoint(word, changes) for word in words]
    sides = [Side(letter, one) for letter, one in zip("AB", opened, strict=False)]
    first = sides[0].checkpoint
    proof = find_proof(first) if flags.prove else None
    if flags.prove and proof is None:
        raise CheckpointError(
            f"{first.path} has no {PROOF}, which is what --prove replays; write the checkpoint "
            "with `preamble convert --prove`, or leave out --prove"
        )
    if len(sides) == 1 and not (first.path / MANIFEST).is_file() and not flags.deep and not proof:
        raise CheckpointError(
            f"{first.path} has no {MANIFEST} with checksums to hold it against; give a second "
            "checkpoint, or --deep to look for faults that show without one"
        )
    verdict = hold(sides, deep=flags.deep, workers=flags.workers, progress=progress)
    for side in sides if proof else ():
        assert proof is not None
        difference = check_proof(side.checkpoint, proof)
        side.proof, side.proven = difference.sentence, difference.same
    if flags.json:
        say(json.dumps(verdict.record(), indent=2))
    else:
        for line in _lines(verdict):
            say(line)
    return 0 if verdict.good else 1


def hold(sides: list[Side], *, deep: bool, workers: int, progress: Progress) -> Verdict:
    """Read all that is to be read of one checkpoint, or of two, and hold it together."""
    left = sides[0].checkpoint
    right = sides[1].checkpoint if len(sides) == 2 else None
    names = list(dict.fromkeys(name for side in sides for name in side.checkpoint.tensors))
    jobs: list[Job[Outcome]] = []
    for name in names:
        if right is None:
            jobs.append(partial(_alone, left.tensors[name]))
        else:
            jobs.append(partial(_one, name, left.tensors.get(name), right.tensors.get(name)))
    sizes = [one.nbytes for side in sides for one in side.checkpoint.tensors.values()]
    files = manifest_tasks(left.path) if right is None and not deep else []
    more = sum(size for side in sides for size, _ in tasks(side.checkpoint)) if deep else 0
    verdict = Verdict(sides, tensors=len(names), bytes=sum(sizes))
    with progress(sum(sizes) + more + sum(size for size, _ in files)) as report:
        tally, started = Tally(report), time.monotonic()
        outcomes = dict(zip(names, run(jobs, workers, tally.add), strict=True))
        verdict.seconds = time.monotonic() - started
        for found in run([job for _, job in files], workers, tally.add):
            sides[0].findings += found
        for side in sides if deep else ():
            side.findings += examine(side.checkpoint, workers, tally.add)
    for number, side in enumerate(sides):
        hashes = {name: outcomes[name].hashes[number] for name in side.checkpoint.tensors}
        side.digest = combine(side.checkpoint, hashes)
        side.findings += _against_record(side)
        if side.checkpoint.identity is None:
            sampled = fingerprint(side.checkpoint)
            remember(side.checkpoint, Identity(side.digest, sampled, sampled=sampled))
    if right is not None:
        unequal = [one.difference for one in outcomes.values() if one.difference]
        verdict.differences = [*_fields(left, right), *unequal]
    return verdict


def _against_record(side: Side) -> Iterator[Finding]:
    """The digest that the manifest has must be that of the bytes, unless they were converted."""
    identity, path = side.checkpoint.identity, str(side.checkpoint.path)
    if identity is None:
        return
    recorded = identity.stored or ("" if identity.note else identity.digest)
    if identity.note:
        what = f"{MANIFEST} records the digest of its origin, {identity.digest}: {identity.note}"
        yield Finding(path, what, fault=False)
    if recorded and recorded != side.digest:
        what = f"{MANIFEST} records the digest {recorded}, the weights give {side.digest}"
        yield Finding(path, f"{what}; they were changed after they were written")


def _fields(left: Checkpoint, right: Checkpoint) -> Iterator[Difference]:
    """Only those that change what is computed; readers may fill the others as they like."""
    mine, its = function(left.config), function(right.config)
    for name in dict.fromkeys([*mine, *its]):
        if name not in mine or name not in its or mine[name] != its[name]:
            values = [getattr(one.config, name) for one in (left, right)]
            what = f"is {values[0]!r} in A, {values[1]!r} in B"
            if name not in mine or name not in its:
                what += f", and counts only in {'A' if name in mine else 'B'}"
            yield Difference(name, "config", what)


def _one(name: str, left: Logical | None, right: Logical | None, desk: Desk) -> Outcome:
    """A tensor of both; None where a side lacks it."""
    if left is None or right is None or left.shape != right.shape:
        return Outcome((_hash(left, desk), _hash(right, desk)), _unlike(name, left, right))
    # While no bit differs, one hash is that of both.
    together = left.dtype == right.dtype
    mine = hashlib.sha256()
    its = None if together else hashlib.sha256()
    found = Comparison()
    for start, (one, other) in desk.bands(left, right):
        found.add(start, one, other)
        if found.differing and its is None:
            its = mine.copy()
        mine.update(as_bytes(one))
        if its is not None:
            its.update(as_bytes(other))
    hashes = (mine.hexdigest(), (its or mine).hexdigest())
    if not found.differing and together:
        return Outcome(hashes)
    return Outcome(hashes, _unequal(name, left, right, found))


def _hash(logical: Logical | None, desk: Desk) -> str:
    own = hashlib.sha256()
    if logical is not None:
        for _, (rows,) in desk.bands(logical):
            own.update(as_bytes(rows))
    return own.hexdigest()


def _alone(logical: Logical, desk: Desk) -> Outcome:
    own = _hash(logical, desk)
    return Outcome((own, own))


def _unlike(name: str, left: Logical | None, right: Logical | None) -> Difference:
    if left is None or right is None:
        present, absent = ("A", "B") if right is None else ("B", "A")
        return Difference(name, "missing", f"is in {present}, but not in {absent}")
    what = f"has shape {left.shape} in A, {right.shape} in B"
    if name == EMBEDDING:
        what += "; if one of them counts rows of padding, give --true-vocab-size"
    return Difference(name, "shape", what)


def _unequal(name: str, left: Logical, right: Logical, found: Comparison) -> Difference:
    facts, words = found.record(), []
    if left.dtype != right.dtype:
        names = (FLOAT_NAMES[left.dtype], FLOAT_NAMES[right.dtype])
        words.append(f"is {names[0]} in A, {names[1]} in B")
        rounded = found.left_rounded or found.right_rounded
        facts |= {"dtypes": list(names), "same_values": not found.differing, "rounded": rounded}
        if not found.differing:
            return Difference(name, "dtype", f"{words[0]}, of the same values", facts)
        if rounded:
            whose = ("B's", "A's") if found.left_rounded else ("A's", "B's")
            words.append(f"{whose[0]} values being {whose[1]}, rounded")
    assert found.first is not None
    files = [source_of(one, found.first) for one in (left, right)]
    facts["sources"] = files
    words.append(f"{found.sentence}, in {files[0]} and in {files[1]}")
    return Difference(name, "values", "; ".join(words), facts)


def _lines(verdict: Verdict) -> Iterator[str]:
    """The result for people: everything that is wrong, a line each, and the sum of it last."""
    for side in verdict.sides:
        size = sum(one.nbytes for one in side.checkpoint.tensors.values())
        held = f"{in_words(size)} of {side.checkpoint.config.dtype}"
        yield f"{side.letter}  {side.checkpoint.path} ({side.checkpoint.format}, {held})"
    for one in verdict.differences:
        yield f"different: {one.name} {one.what}"
    for side in verdict.sides:
        for finding in side.findings:
            yield f"{'fault' if finding.fault else 'remark'} in {side.letter}: {finding.line}"
    for side in verdict.sides:
        if side.proof:
            verb = "holds" if side.proven else "fails"
            yield f"the proof {verb} for {side.letter}: {side.proof}"
    for side in verdict.sides:
        yield f"digest of {side.letter}: {side.digest}"
    speed = in_words(verdict.bytes / max(verdict.seconds, 1e-9))
    passed = f"{in_words(verdict.bytes)} in {verdict.seconds:.1f} s, {speed}/s"
    if len(verdict.sides) == 1:
        yield f"{'intact' if verdict.good else 'damaged'}: {verdict.tensors} tensors, {passed}"
        return
    fields = sum(one.kind == "config" for one in verdict.differences)
    tensors = len(verdict.differences) - fields
    if not verdict.differences:
        faults = sum(one.fault for side in verdict.sides for one in side.findings)
        but = f", but {faults} faults" if faults else ""
        yield f"equal: {verdict.tensors} tensors{but}, {passed}"
    else:
        equal = verdict.tensors - tensors
        of = f"{tensors} of {verdict.tensors} tensors and {fields} fields of the config"
        rounded = all(one.facts.get("rounded") for one in verdict.differences)
        but = ", all of them by rounding to another dtype alone" if rounded else ""
        yield f"different: {of}{but}; {equal} tensors are equal; {passed}"
