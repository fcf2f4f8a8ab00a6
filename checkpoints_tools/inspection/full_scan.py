"""Looks at every byte of a checkpoint for what no header shows.

Values that are not finite, tensors that are all one value, copies that ranks hold and that are not
equal, files whose bytes are not those that their own checksums say, rank files that stand in each
other's place. A fault is what would change an answer; a remark is what a person should look at.
Nothing is repaired, and what is read is forgotten block by block.
"""

import hashlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from checkpoints_tools.inspection.parallel_read import Desk, Job, Report, run
from checkpoints_tools.inspection.tensor_diff import Comparison
from gpt.checkpoint.files.file_tree import Span, files_in
from gpt.checkpoint.files.torch_save import ZIP
from gpt.checkpoint.files.torch_zip import Window
from gpt.checkpoint.logical_tensor import BLOCK_BYTES, Checkpoint, Copy, Logical, some
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST, read_manifest
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD
from gpt.formats.megatron.rank_files import Place, Ranks, open_ranks
from gpt.formats.megatron.torch_dist import INTEGRITY, Slab, json_of
from gpt.formats.nemo.archive import open_archive


@dataclass(frozen=True)
class Finding:
    """`where` is a tensor or a file; the two together are a sentence."""

    where: str
    what: str
    fault: bool = True

    @property
    def line(self) -> str:
        return f"{self.where}: {self.what}"


Task = tuple[int, Job[list[Finding]]]  # How many bytes it reads.


def tasks(checkpoint: Checkpoint) -> list[Task]:
    """All there is to read of it."""
    found: list[Task] = []
    for name, logical in checkpoint.tensors.items():
        found.append((logical.nbytes, partial(_values, name, logical)))
    for copy in checkpoint.copies:
        size = math.prod(copy.kept.shape) * copy.kept.dtype.itemsize
        found.append((2 * size, partial(_copy, copy)))
    head, embedding = (checkpoint.tensors.get(name) for name in (HEAD, EMBEDDING))
    if head is not None and embedding is not None and head.dtype == embedding.dtype:
        found.append((2 * head.nbytes, partial(_untied, head, embedding)))
    for file in filter(is_plain, checkpoint.files):
        found.append((file.stat().st_size, partial(_archive, file)))
    for blob in _blobs(checkpoint):
        where = f"{blob.path} at byte {blob.offset}"
        found.append((blob.length, partial(_span, where, blob)))
    return [*found, *manifest_tasks(checkpoint.path), *integrity_tasks(checkpoint.path)]


def examine(checkpoint: Checkpoint, workers: int, report: Report) -> list[Finding]:
    """Everything that is wrong, or strange, in the order of the model."""
    jobs = [job for _, job in tasks(checkpoint)]
    found = [finding for findings in run(jobs, workers, report) for finding in findings]
    found += misplaced(checkpoint)
    # One value in a whole matrix is a fault; a bias of zeros is common, and told in one line.
    vectors = [one for one in found if one.what == CONSTANT]
    rest = [one for one in found if one.what != CONSTANT]
    if vectors:
        names = some([one.where for one in vectors])
        what = f"{len(vectors)} vectors hold one value each, as an untrained model's do"
        rest.append(Finding(names, what, fault=False))
    return sorted(rest, key=lambda one: not one.fault)


# What a zip that is no longer one makes its reader raise.
BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(NotImplementedError, RuntimeError, EOFError, ValueError),
)
CONSTANT = "constant vector"


def _values(name: str, logical: Logical, desk: Desk) -> list[Finding]:
    """What is not finite, and where it begins; whether all is one value."""
    nan = infinite = 0
    first: tuple[int, int] | None = None
    low, high = math.inf, -math.inf
    try:
        for start, (rows,) in desk.bands(logical):
            if not rows.numel():
                continue
            least, most = rows.aminmax()
            if bool(least.isfinite()) and bool(most.isfinite()):
                low, high = min(low, float(least)), max(high, float(most))
                continue
            if first is None:
                at = int((~rows.isfinite()).flatten().to(torch.uint8).argmax())
                first = (start + at // rows.shape[1], at % rows.shape[1])
            nan += int(rows.isnan().sum())
            infinite += int(rows.isinf().sum())
    except (CheckpointError, OSError) as error:
        return [Finding(name, f"cannot be read: {error}")]
    if first is not None:
        kinds = [f"{count:,} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite"))]
        held = " and ".join(kind for kind in kinds if not kind.startswith("0 "))
        size = math.prod(logical.shape)
        place = f"the first at {list(first)}, in {source_of(logical, first)}"
        return [Finding(name, f"{held} of {size:,} values, {place}")]
    if low != high or math.prod(logical.shape) < 2:
        return []
    if len(logical.shape) == 1:
        return [Finding(name, CONSTANT, fault=False)]
    value = "zero" if low == 0 else f"{low:g}"
    return [Finding(name, f"all {math.prod(logical.shape):,} values are {value}")]


def source_of(logical: Logical, place: tuple[int, int]) -> str:
    """The file and the key that a row and a column come from."""
    for piece in logical.pieces:
        left, right = piece.columns or (0, place[1] + 1)
        if piece.rows[0] <= place[0] < piece.rows[1] and left <= place[1] < right:
            return piece.source.where
    return "no file"


def _copy(copy: Copy, desk: Desk) -> list[Finding]:
    """Whether what is not read is equal to what is."""
    try:
        kept, other = (_matrix(stored.tensor()) for stored in (copy.kept, copy.other))
    except (CheckpointError, OSError) as error:
        return [Finding(copy.other.where, f"cannot be read: {error}")]
    of = f"{copy.kept.where}, though both are {copy.name}"
    if kept.shape != other.shape or kept.dtype != other.dtype:
        mine, its = ((one.dtype, tuple(one.shape)) for one in (other, kept))
        return [Finding(copy.other.where, f"is {mine}, not {its} as {of}")]
    found, count = Comparison(), max(1, BLOCK_BYTES // max(1, kept.shape[1] * kept.itemsize))
    for start in range(0, kept.shape[0], count):
        left, right = kept[start : start + count], other[start : start + count]
        found.add(start, left, right)
        desk.report(2 * left.nbytes)
    if not found.differing:
        return []
    return [Finding(copy.other.where, f"is not equal to {of}: {found.sentence}")]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def _untied(head: Logical, embedding: Logical, desk: Desk) -> list[Finding]:
    found = Comparison()
    try:
        for start, (left, right) in desk.bands(head, embedding):
            found.add(start, left, right)
            if found.differing:
                return []
    except (CheckpointError, OSError):
        return []  # Told where the tensor itself is read.
    return [Finding(HEAD, same_head(head), fault=False)]


def same_head(head: Logical) -> str:
    return (
        f"equals the embedding though the model is said to be untied; tied, it would be "
        f"{head.nbytes:,} bytes smaller"
    )


def _archive(path: Path, desk: Desk) -> list[Finding]:
    """The checksums of a file of `torch.save`; nothing of a file of another kind."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(ZIP))
            file.seek(0)
            if head == ZIP:
                return _records(str(path), file, desk)
        if path.suffix == ".nemo":
            inside = open_archive(path)[0].spans.values()
            zips = (span for span in inside if is_plain(span.path) and span.head(len(ZIP)) == ZIP)
            return [finding for span in zips for finding in _span(str(span.path), span, desk)]
        desk.report(path.stat().st_size)
        return []
    except (OSError, CheckpointError) as error:
        return [Finding(str(path), f"cannot be read ({error})")]


def is_plain(path: Path) -> bool:
    """Whether it is no file of distributed chunks, each of which is an archive of its own."""
    return path.suffix != ".distcp"


def _blobs(checkpoint: Checkpoint) -> Iterable[Span]:
    """The archives of distributed chunks that the model is read from."""
    sources = (piece.source for one in checkpoint.tensors.values() for piece in one.pieces)
    found = (source.chunk.blob for source in sources if isinstance(source, Slab))
    return {id(blob): blob for blob in found}.values()


def _span(where: str, span: Span, desk: Desk) -> list[Finding]:
    try:
        with io.BufferedReader(Window(span.memory())) as file:
            return _records(where, file, desk)
    except OSError as error:
        return [Finding(where, f"cannot be read ({error.strerror})")]


def _records(where: str, file: IO[bytes], desk: Desk) -> list[Finding]:
    found = []
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # torch can be told to write no checksums; then they are zero.
                if member.CRC and not _intact(archive, member, desk):
                    crc = f"its bytes are not those of its CRC-32, {member.CRC:08x}"
                    found.append(Finding(where, f"{member.filename} is damaged: {crc}"))
    except BROKEN as error:
        found.append(Finding(where, f"is a broken archive ({error})"))
    return found


def _intact(archive: zipfile.ZipFile, member: zipfile.ZipInfo, desk: Desk) -> bool:
    try:
        with archive.open(member) as record:
            while block := record.read(BLOCK_BYTES):
                desk.report(len(block))
    except zipfile.BadZipFile:
        return False
    return True


def manifest_tasks(folder: Path) -> list[Task]:
    """Every file that `preamble.json` names against its checksum; none without a manifest."""
    if not (folder / MANIFEST).is_file():
        return []
    files = read_manifest(folder).files
    return [
        (entry["bytes"], partial(_file, folder / name, entry, MANIFEST))
        for name, entry in files.items()
    ]


def integrity_tasks(folder: Path) -> list[Task]:
    """The same of the list that newer saves of `torch_dist` have beside them."""
    record = json_of(files_in(folder), INTEGRITY) if (folder / INTEGRITY).is_file() else {}
    files = record.get("files")
    if record.get("algorithm") != "sha256" or not isinstance(files, dict):
        return []
    known = {name: value for name, value in files.items() if Path(name).name == name}
    return [
        (path.stat().st_size, partial(_file, path, {"sha256": value}, INTEGRITY))
        for path, value in ((folder / name, value) for name, value in sorted(known.items()))
        if path.is_file()
    ]


def _file(path: Path, entry: Mapping[str, Any], says: str, desk: Desk) -> list[Finding]:
    """A file whose list gives both checksums has to have both."""
    sha256, crc32 = hashlib.sha256(), 0
    expected = {kind: str(entry[kind]) for kind in ("sha256", "crc32") if kind in entry}
    try:
        for block in _blocks(path, desk):
            if "sha256" in expected:
                sha256.update(block)
            if "crc32" in expected:
                crc32 = zlib.crc32(block, crc32)
    except OSError as error:
        return [Finding(str(path), f"cannot be read ({error.strerror})")]
    found = {"sha256": sha256.hexdigest(), "crc32": f"{crc32:08x}"}
    for kind, value in expected.items():
        if found[kind] != value:
            what = f"its {kind} is {found[kind][:12]}, {says} says {value[:12]}"
            return [Finding(str(path), f"{what}; it was changed after it was written")]
    return []


def _blocks(path: Path, desk: Desk) -> Iterator[memoryview]:
    room = desk.room(0, BLOCK_BYTES).numpy().data
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(room):
            yield room[:size]
            desk.report(size)


def misplaced(checkpoint: Checkpoint) -> list[Finding]:
    """Rank files that are not those of their directories, as far as their content tells."""
    if checkpoint.format != "megatron":
        return []
    return [*_recorded(open_ranks(checkpoint.path)), *_padding(checkpoint)]


# Older runs kept their own place.
OWN = {
    "tensor_model_parallel_rank": "tensor",
    "pipeline_model_parallel_rank": "stage",
    "expert_model_parallel_rank": "expert",
}


def _recorded(ranks: Ranks) -> Iterator[Finding]:
    """What each file says of its own place. A converter writes one rank everywhere: no evidence."""
    numbers: dict[Place, int] = {}
    for place, saved in ranks.saved.items():
        args = saved.args or {}
        for name, field in OWN.items():
            own = args.get(name)
            if type(own) is int and own != getattr(place, field):
                what = f"args.{name} is {own}, but its directory is that of {getattr(place, field)}"
                yield Finding(str(saved.path), f"{what}; rank files are swapped: rename them")
        if type(args.get("rank")) is int:
            numbers[place] = args["rank"]
    if len(set(numbers.values())) < 2:
        return
    for place, rank in numbers.items():
        # Tensor ranks count first in every order that Megatron knows; stages come after them.
        below = Place(place.tensor, place.stage - 1, place.expert)
        beside = Place(place.tensor, place.stage, place.expert - 1)
        tensor = rank % ranks.split.tp
        wrong = ""
        if tensor != place.tensor:
            wrong = f"which is tensor rank {tensor}, but its directory is that of {place.tensor}"
        elif numbers.get(below, -1) >= rank or numbers.get(beside, -1) > rank:
            other = below if numbers.get(below, -1) >= rank else beside
            wrong = f"though {ranks.saved[other].path.parent.name} before it has {numbers[other]}"
        if wrong:
            what = f"it was saved by rank {rank}, {wrong}"
            yield Finding(str(ranks.saved[place].path), f"{what}; rank files are swapped")


def _padding(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Padding has rows that are all alike, and only the last tensor rank has them."""
    for name in (EMBEDDING, HEAD):
        logical = checkpoint.tensors.get(name)
        parts = [piece.source for piece in logical.pieces] if logical else []
        if len(parts) < 2 or len(parts) != checkpoint.split.get("tp") or not logical:
            continue
        rows = parts[0].shape[0]
        padding = min(rows, len(parts) * rows - logical.shape[0])
        if padding < 2 or _alike(parts[-1].tensor()[-padding:]):
            continue
        for part in parts[:-1]:
            if _alike(part.tensor()[-padding:]):
                what = f"its last {padding} rows are all alike, as padding is, and the last tensor"
                yield Finding(part.where, f"{what} rank's are not: rank files are swapped")


def _alike(rows: Tensor) -> bool:
    return bool((rows == rows[:1]).all())
