"""NeMo 1 checkpoints: `.nemo` archives, and the directories that they unpack to.

A `.nemo` holds one config, the weights of every rank or one distributed checkpoint, and the
tokenizer's files under names of their own. Ranks' tensors have Megatron's names and split, so
joining them is Megatron's business; here it is settled which files there are, that none is missing,
and which of the tokenizer's belong together.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.file_tree import FileTree, Span, files_below
from gpt.checkpoint.files.torch_zip import read_archive
from gpt.checkpoint.logical_tensor import Checkpoint, some
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import Answer, Weights
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.mappings.nemo_args import describe_nemo_1, tokens_of
from gpt.formats.mappings.nemo_yaml import Fields, read_config
from gpt.formats.megatron.rank_files import Place, Ranks, Saved, Split
from gpt.formats.megatron.reader import join_ranks
from gpt.formats.megatron.torch_dist import join_chunks
from gpt.formats.nemo.archive import CONFIG, kept, open_archive
from gpt.settings import shown
from gpt.tokenizers.tokenizer import open_tokenizer

WEIGHTS, DISTRIBUTED = "model_weights.ckpt", "model_weights"
RANK = re.compile(r"mp_rank_(\d{2,})|tp_rank_(\d{2,})_pp_rank_(\d{3,})")
RANKS_MAX = 1 << 16
TOKENIZER_BYTES_MAX = 256 << 20
# What a tokenizer's fields refer to, and what its file is called where it is kept.
SENTENCEPIECE = {"model": "tokenizer.model"}
BPE = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}


@dataclass(frozen=True)
class Words:
    """The tokenizer that came with a model: how many tokens it has, 0 if that is not known."""

    place: Path | None = None
    tokens: int = 0
    note: str = ""


def find_nemo(path: Path) -> Path | None:
    """The archive, or the directory that one was unpacked to; None if it is neither."""
    if path.name in (CONFIG, DISTRIBUTED) and (path.parent / CONFIG).is_file():
        path = path.parent
    if path.is_file() and path.suffix == ".nemo":
        return path
    return path if path.is_dir() and (path / CONFIG).is_file() else None


def open_nemo(path: Path, changes: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """An archive or an unpacked one. `changes` are fields of GPTConfig that override its config."""
    found = find_nemo(path)
    if found is None:
        raise CheckpointError(
            f"{path} is no .nemo archive, nor a directory with {CONFIG}; give the one or the other"
        )
    tree, note = open_archive(found) if found.is_file() else (files_below(found), "")
    if CONFIG not in tree.spans:
        held = some(sorted(tree.spans)) or "nothing"
        raise CheckpointError(
            f"{found} has no {CONFIG}, but {held}; it is not a NeMo model's archive"
        )
    fields = Fields(read_config(tree.spans[CONFIG]), str(found / CONFIG))
    words = _words(found, tree, fields.under("tokenizer"))
    checkpoint = _open_weights(found, tree, fields, changes or {}, words.tokens)
    return replace(
        checkpoint,
        path=found,
        format="nemo",
        tokenizer=words.place,
        notes=tuple(filter(None, (*checkpoint.notes, words.note, note))),
    )


def _open_weights(
    path: Path,
    tree: FileTree,
    fields: Fields,
    changes: GPTConfig | Mapping[str, Any],
    tokens: int,
) -> Checkpoint:
    asks = asks_of(fields, tokens)
    distributed = tree.under(DISTRIBUTED)
    if any(name.endswith((".zarray", ".zmetadata")) for name in distributed.spans):
        raise CheckpointError(
            f"{path} keeps its weights in zarr, a format that NeMo itself gave up; load it with a "
            "version of its time and save it as torch_dist"
        )
    if any("fsdp_shard" in name for name in tree.spans):
        raise CheckpointError(
            f"{path} keeps its weights in shards of FSDP (fsdp_shard...), which are not read; save "
            "it again with tensor parallelism, or as a distributed checkpoint"
        )
    if distributed.spans:
        return join_chunks(distributed, changes, lambda _, weights: asks(weights))
    files = {name: span for name, span in tree.spans.items() if name.endswith(f"/{WEIGHTS}")}
    if WEIGHTS in tree.spans:
        files = {f"mp_rank_00/{WEIGHTS}": tree.spans[WEIGHTS]} | files
    if not files:
        raise CheckpointError(
            f"{path} has a {CONFIG} but no weights: looked for {WEIGHTS}, mp_rank_00/{WEIGHTS}, "
            f"tp_rank_00_pp_rank_000/{WEIGHTS} or {DISTRIBUTED}/, found "
            f"{some(sorted(tree.spans))}; copy the missing ones"
        )
    version = 0.0 if fields.get("megatron_legacy") is True else 3.0
    by_folder = {name.split("/")[-2]: span for name, span in files.items()}
    split, places = all_ranks(path, by_folder, fields)
    ranks = Ranks(split, {place: _saved(span, version) for place, span in places.items()})
    refuse_lost_chunks(ranks, fields)
    checkpoint = join_ranks(ranks, path, changes, asks)
    return replace(checkpoint, files=tuple(sorted({s.file.path for s in files.values()})))


def asks_of(fields: Fields, tokens: int = 0) -> Callable[[Weights], Answer]:
    """Describes the weights by a config; of the tokenizer's `tokens`, only if they fit."""

    def ask(weights: Weights) -> Answer:
        # NeMo may know tokens that the files do not have. Rows that fit the padding say no.
        own = tokens_of(fields, tokens, weights.rows(EMBEDDING))
        return describe_nemo_1(fields, weights, own)

    return ask


def refuse_lost_chunks(ranks: Ranks, fields: Fields) -> None:
    """A virtual pipeline's layers are in another order than the stages'; they must say so."""
    virtual = fields.get("virtual_pipeline_model_parallel_size")
    if ranks.split.pp > 1 and virtual not in (None, 1, ranks.chunks):
        raise CheckpointError(
            f"{fields.where}: virtual_pipeline_model_parallel_size is {shown(virtual)}, but "
            f"the ranks' files hold {ranks.chunks} chunk each, so the order of the layers is not "
            "known; save it without a virtual pipeline"
        )


def _saved(span: Span, version: float) -> Saved:
    record = read_archive(span)
    if not isinstance(record, dict):
        raise CheckpointError(f"{span.path} is a {type(record).__name__}, not a NeMo model's state")
    if "state_dict" in record and isinstance(record["state_dict"], dict):
        record = record["state_dict"]
    return Saved(span.path, None, version, None, {0: record})


def all_ranks(
    path: Path, files: Mapping[str, Span], fields: Fields
) -> tuple[Split, dict[Place, Span]]:
    """All ranks' files; those that the config's split promises must be there, and no others."""
    found: dict[Place, Span] = {}
    for folder, span in files.items():
        match = RANK.fullmatch(folder)
        if not match:
            raise CheckpointError(
                f"{span.path} is in no directory of a rank, such as mp_rank_00; remove it if it is "
                "not of this model"
            )
        place = Place(int(match[1] or match[2]), int(match[3] or 0), 0)
        if place in found:
            raise CheckpointError(
                f"{span.path} and {found[place].path} are both of tensor rank {place.tensor}, stage"
                f" {place.stage}; two checkpoints are mixed: remove what is not of this one"
            )
        found[place] = span
    sizes = []
    for name, held in (
        ("tensor_model_parallel_size", {place.tensor for place in found}),
        ("pipeline_model_parallel_size", {place.stage for place in found}),
    ):
        size = fields.get(name, 1 + max(held))
        if type(size) is not int or not 1 <= size <= RANKS_MAX:
            raise CheckpointError(
                f"{fields.where}: {name} is {shown(size)}, which no cluster has; take the "
                "file from the training run again"
            )
        sizes.append(size)
    split = Split(sizes[0], sizes[1], 1)
    places = set(split.places())
    for odd, verb, remedy in (
        (places - set(found), "lacks", "copy the missing ones"),
        (set(found) - places, "has", "two checkpoints are mixed: remove what is not of this one"),
    ):
        if odd:
            names = [f"tensor rank {p.tensor} of stage {p.stage}" for p in _in_order(odd)]
            beyond = "beyond" if verb == "has" else "of"
            raise CheckpointError(
                f"{path} {verb} {some(names)} {beyond} the {len(places)} ranks (TP {split.tp} x PP "
                f"{split.pp} by its config); {remedy}"
            )
    return split, {place: found[place] for place in split.places()}


def _in_order(places: set[Place]) -> list[Place]:
    return sorted(places, key=lambda place: (place.stage, place.tensor))


def _words(path: Path, tree: FileTree, fields: Fields) -> Words:
    """The tokenizer's files, copied to where the tokenizer's own reader finds them by name."""
    wanted: dict[str, Span | None] = {}
    for kinds in (SENTENCEPIECE, BPE):
        named = {field: fields.text(field) for field in kinds}
        if all(named.values()) and not wanted:
            wanted = {kinds[field]: _artifact(tree, value) for field, value in named.items()}
    spans = {name: span for name, span in wanted.items() if span is not None}
    if not spans or len(spans) < len(wanted):
        library, kind = fields.text("library", "of no library"), fields.text("type", "of no type")
        return Words(
            note=f"its tokenizer ({library}, {kind}) is not inside; give one as a file or a "
            "directory"
        )
    try:
        status = [(s.file.path.stat().st_mtime_ns, s.offset, s.length) for s in spans.values()]
        place = kept(
            *("tokenizers", (str(path.resolve()), *status)),
            lambda folder: _copy(spans, folder),
        )
    except (OSError, CheckpointError) as error:
        return Words(note=f"its tokenizer cannot be copied to the user's cache ({error})")
    if fields.get("sentencepiece_legacy") is True:
        return Words(place)  # It adds tokens that the file does not have.
    try:
        return Words(place, open_tokenizer(place).vocab_size)
    except CheckpointError as error:
        return Words(note=f"its tokenizer cannot be read: {error}")


def _artifact(tree: FileTree, reference: str) -> Span | None:
    """A file that the config calls `nemo:<name>`; elsewhere it lies on another machine."""
    name = reference.removeprefix("nemo:")
    return tree.spans.get(name) if "/" not in name else None


def _copy(spans: Mapping[str, Span], folder: Path) -> None:
    for name, span in spans.items():
        (folder / name).write_bytes(span.read(TOKENIZER_BYTES_MAX))
