"""NeMo 1 reader: opens `.nemo` archives and unpacked directories as logical checkpoints.

A `.nemo` contains a config, weights, and the tokenizer's files under hashed names. The weights are
one file per rank, or a distributed checkpoint. The tensors have Megatron's names and sharding, so
Megatron's readers join them. This module finds the files of all ranks and of the tokenizer, and
refuses missing or surplus ranks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt.checkpoint.cached_folders import cached_folder
from gpt.checkpoint.files.file_tree import FileTree, Span, scan_folder_recursive
from gpt.checkpoint.files.torch_file import read_torch_span
from gpt.checkpoint.logical_tensor import Checkpoint, summarize_names
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import PartialConfig, WeightShapes
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.mappings.nemo_args import config_from_nemo1, matching_vocab_size
from gpt.formats.mappings.nemo_yaml import NemoConfig, read_config
from gpt.formats.megatron.rank_files import ParallelSizes, RankCoordinates, RankFile, RankFiles
from gpt.formats.megatron.reader import join_ranks
from gpt.formats.megatron.torch_dist import join_chunks
from gpt.formats.nemo.archive import CONFIG_FILE, open_nemo_archive
from gpt.settings import short_repr
from gpt.tokenizers.tokenizer import open_tokenizer

WEIGHTS_FILE, DISTRIBUTED_FOLDER = "model_weights.ckpt", "model_weights"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})|tp_rank_(\d{2,})_pp_rank_(\d{3,})")
RANKS_MAX = 1 << 16
TOKENIZER_BYTES_MAX = 256 << 20
# Tokenizer fields of the config that refer to a file, and the name of the file's copy in the cache.
SENTENCEPIECE_FILES = {"model": "tokenizer.model"}
BPE_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
# Folder in the archives that Preamble writes. It contains all files of the tokenizer, so that a
# conversion back to another format has them. NeMo ignores it.
CARRIED_TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class BundledTokenizer:
    """The tokenizer in a model's archive."""

    path: Path | None = None  # The folder of its files in the cache; None if it is not usable.
    vocab_size: int = 0  # 0 if unknown.
    note: str = ""  # For the user: why the tokenizer is not usable.


def find_nemo(path: Path) -> Path | None:
    """Return the archive, or the directory of an unpacked archive; None if `path` is neither."""
    if path.name in (CONFIG_FILE, DISTRIBUTED_FOLDER) and (path.parent / CONFIG_FILE).is_file():
        path = path.parent
    if path.is_file() and path.suffix == ".nemo":
        return path
    return path if path.is_dir() and (path / CONFIG_FILE).is_file() else None


def open_nemo(path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """Open an archive or its unpacked directory. `overrides` replaces fields of GPTConfig."""
    root = find_nemo(path)
    if root is None:
        raise CheckpointError(
            f"{path} is neither a .nemo archive nor a directory with {CONFIG_FILE}; give an "
            "archive or such a directory"
        )
    tree, note = open_nemo_archive(root) if root.is_file() else (scan_folder_recursive(root), "")
    if CONFIG_FILE not in tree.spans:
        file_names = summarize_names(sorted(tree.spans)) or "nothing"
        raise CheckpointError(
            f"{root} has no {CONFIG_FILE}; it contains {file_names}, so it is not the archive of a "
            "NeMo model: give another file"
        )
    fields = NemoConfig(read_config(tree.spans[CONFIG_FILE]), str(root / CONFIG_FILE))
    tokenizer = _extract_tokenizer(root, tree, fields.section("tokenizer"))
    checkpoint = _open_weights(root, tree, fields, overrides or {}, tokenizer.vocab_size)
    return replace(
        checkpoint,
        path=root,
        format="nemo",
        tokenizer=tokenizer.path,
        notes=tuple(filter(None, (*checkpoint.notes, tokenizer.note, note))),
    )


def _open_weights(
    path: Path,
    tree: FileTree,
    fields: NemoConfig,
    overrides: GPTConfig | Mapping[str, Any],
    tokenizer_vocab_size: int,
) -> Checkpoint:
    infer_config = nemo1_config_inferrer(fields, tokenizer_vocab_size)
    distributed = tree.subtree(DISTRIBUTED_FOLDER)
    if any(name.endswith((".zarray", ".zmetadata")) for name in distributed.spans):
        raise CheckpointError(
            f"{path} has its weights in zarr, a format that NeMo has removed; load it with a "
            "NeMo version that supports zarr, and save it as torch_dist"
        )
    if any("fsdp_shard" in name for name in tree.spans):
        raise CheckpointError(
            f"{path} has its weights in FSDP shards (fsdp_shard...), which are not supported; save "
            "it again with tensor parallelism, or as a distributed checkpoint"
        )
    if distributed.spans:
        return join_chunks(distributed, overrides, lambda _, weights: infer_config(weights))
    files = {name: span for name, span in tree.spans.items() if name.endswith(f"/{WEIGHTS_FILE}")}
    if WEIGHTS_FILE in tree.spans:
        files = {f"mp_rank_00/{WEIGHTS_FILE}": tree.spans[WEIGHTS_FILE]} | files
    if not files:
        raise CheckpointError(
            f"{path} has a {CONFIG_FILE} but no weights: looked for {WEIGHTS_FILE}, "
            f"mp_rank_00/{WEIGHTS_FILE}, tp_rank_00_pp_rank_000/{WEIGHTS_FILE} or "
            f"{DISTRIBUTED_FOLDER}/, found "
            f"{summarize_names(sorted(tree.spans))}; copy the missing files"
        )
    version = 0.0 if fields.get("megatron_legacy") is True else 3.0
    by_folder = {name.split("/")[-2]: span for name, span in files.items()}
    split, span_by_rank = assign_ranks(path, by_folder, fields)
    ranks = RankFiles(
        split, {rank: _read_rank_file(span, version) for rank, span in span_by_rank.items()}
    )
    refuse_missing_chunks(ranks, fields)
    checkpoint = join_ranks(ranks, path, overrides, infer_config)
    return replace(checkpoint, files=tuple(sorted({s.file.path for s in files.values()})))


def nemo1_config_inferrer(
    fields: NemoConfig, tokenizer_vocab_size: int = 0
) -> Callable[[WeightShapes], PartialConfig]:
    """Return a function that infers the config from a NeMo 1 config and the tensor shapes.

    `tokenizer_vocab_size` is used only if, after padding, it equals the number of embedding rows.
    """

    def infer_config(weights: WeightShapes) -> PartialConfig:
        # NeMo may have added tokens to the tokenizer. Then the padded vocabulary size differs from
        # the number of embedding rows, and `vocab_size` is 0 (unknown).
        vocab_size = matching_vocab_size(fields, tokenizer_vocab_size, weights.rows(EMBEDDING))
        return config_from_nemo1(fields, weights, vocab_size)

    return infer_config


def refuse_missing_chunks(ranks: RankFiles, fields: NemoConfig) -> None:
    """Refuse files that lack model chunks of the config's virtual pipeline.

    Without all chunks, the order of the layers is unknown.
    """
    vpp = fields.get("virtual_pipeline_model_parallel_size")
    if ranks.parallel_sizes.pp > 1 and vpp not in (None, 1, ranks.chunks):
        raise CheckpointError(
            f"{fields.location}: virtual_pipeline_model_parallel_size is {short_repr(vpp)}, but "
            f"the largest number of chunks in a rank's file is {ranks.chunks}, so the order of the "
            "layers is unknown; save the model without a virtual pipeline"
        )


def _read_rank_file(span: Span, version: float) -> RankFile:
    state_dict = read_torch_span(span)
    if not isinstance(state_dict, dict):
        raise CheckpointError(
            f"{span.path} is a {type(state_dict).__name__}, not the state dict of a NeMo model; "
            "copy it again from the training run"
        )
    if "state_dict" in state_dict and isinstance(state_dict["state_dict"], dict):
        state_dict = state_dict["state_dict"]
    return RankFile(span.path, None, version, None, {0: state_dict})


def assign_ranks(
    path: Path, files: Mapping[str, Span], fields: NemoConfig
) -> tuple[ParallelSizes, dict[RankCoordinates, Span]]:
    """Assign files to ranks; the keys of `files` are the names of rank directories.

    Missing ranks and ranks beyond the parallel sizes are refused. A parallel size that the config
    lacks is inferred from the directory names.
    """
    span_by_rank: dict[RankCoordinates, Span] = {}
    for folder, span in files.items():
        match = RANK_FOLDER.fullmatch(folder)
        if not match:
            raise CheckpointError(
                f"{span.path} is not in a rank directory such as mp_rank_00; remove it if it does "
                "not belong to this model"
            )
        rank = RankCoordinates(int(match[1] or match[2]), int(match[3] or 0), 0)
        if rank in span_by_rank:
            raise CheckpointError(
                f"{span.path} and {span_by_rank[rank].path} are both of tensor rank {rank.tensor}, "
                f"stage {rank.stage}; two checkpoints are mixed: remove the files of one of them"
            )
        span_by_rank[rank] = span
    sizes = []
    for name, indices in (
        ("tensor_model_parallel_size", {rank.tensor for rank in span_by_rank}),
        ("pipeline_model_parallel_size", {rank.stage for rank in span_by_rank}),
    ):
        size = fields.get(name, 1 + max(indices))
        if type(size) is not int or not 1 <= size <= RANKS_MAX:
            raise CheckpointError(
                f"{fields.location}: {name} is {short_repr(size)}; it must be a whole number from "
                f"1 to {RANKS_MAX}: copy the file from the training run again"
            )
        sizes.append(size)
    split = ParallelSizes(sizes[0], sizes[1], 1)
    expected_ranks = set(split.ranks())
    ranks_with_sizes = (
        f"the {len(expected_ranks)} ranks (TP {split.tp} x PP {split.pp} according to the config, "
        "or to the directory names if the config lacks these sizes)"
    )
    missing = expected_ranks - set(span_by_rank)
    if missing:
        raise CheckpointError(
            f"{path} lacks {_summarize_ranks(missing)} of {ranks_with_sizes}; copy the missing "
            "files"
        )
    surplus = set(span_by_rank) - expected_ranks
    if surplus:
        raise CheckpointError(
            f"{path} has {_summarize_ranks(surplus)} beyond {ranks_with_sizes}; two checkpoints "
            "are mixed: remove the files of the checkpoint that you do not need"
        )
    return split, {rank: span_by_rank[rank] for rank in split.ranks()}


def _summarize_ranks(ranks: set[RankCoordinates]) -> str:
    ordered_ranks = sorted(ranks, key=lambda rank: (rank.stage, rank.tensor))
    return summarize_names(
        [f"tensor rank {rank.tensor} of stage {rank.stage}" for rank in ordered_ranks]
    )


def _extract_tokenizer(path: Path, tree: FileTree, fields: NemoConfig) -> BundledTokenizer:
    """Copy the tokenizer's files to the cache, under the names that tokenizer readers expect.

    A failure is not an error: the returned tokenizer then has a note instead of a path.
    """
    artifacts: dict[str, Span | None] = {}  # By the name in the cache; None: not in the archive.
    for file_names in (SENTENCEPIECE_FILES, BPE_FILES):
        references = {field: fields.text(field) for field in file_names}
        if all(references.values()) and not artifacts:
            artifacts = {
                file_names[field]: _artifact_span(tree, value)
                for field, value in references.items()
            }
    spans = {name: span for name, span in artifacts.items() if span is not None}
    carried_spans = {
        Path(name).name: span
        for name, span in tree.spans.items()
        if Path(name).parent == Path(CARRIED_TOKENIZER_FOLDER)
    }
    if carried_spans:
        spans = carried_spans
    elif not spans or len(spans) < len(artifacts):
        library, kind = fields.text("library", "unknown"), fields.text("type", "unknown")
        return BundledTokenizer(
            note=f"the tokenizer (library {library}, type {kind}) is not in the archive; give a "
            "tokenizer file or directory"
        )
    try:
        file_stats = [(s.file.path.stat().st_mtime_ns, s.offset, s.length) for s in spans.values()]
        tokenizer_folder = cached_folder(
            "tokenizers",
            (str(path.resolve()), *file_stats),
            lambda folder: _copy_files(spans, folder),
        )
    except (OSError, CheckpointError) as error:
        return BundledTokenizer(
            note=f"the tokenizer cannot be copied to the user's cache ({error})"
        )
    if fields.get("sentencepiece_legacy") is True:
        # NeMo adds tokens when it loads the tokenizer, so the vocabulary size is unknown.
        return BundledTokenizer(tokenizer_folder)
    try:
        return BundledTokenizer(tokenizer_folder, open_tokenizer(tokenizer_folder).vocab_size)
    except CheckpointError as error:
        return BundledTokenizer(note=f"the tokenizer cannot be read: {error}")


def _artifact_span(tree: FileTree, reference: str) -> Span | None:
    """Return the archive member of a reference `nemo:<name>`; None for an external path."""
    name = reference.removeprefix("nemo:")
    return tree.spans.get(name) if "/" not in name else None


def _copy_files(spans: Mapping[str, Span], folder: Path) -> None:
    for name, span in spans.items():
        (folder / name).write_bytes(span.read(TOKENIZER_BYTES_MAX))
