"""Swapped rank files: detects weight files in the directory of the wrong TP, PP or EP rank.

Two properties show the rank of a file: the ranks that the training run recorded in the file's args,
and the padding rows of the vocabulary, which are at the end of the last tensor rank. If stages with
different tensor names are swapped, the reader already refuses them
(`gpt/formats/megatron/reader.py`).
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from checkpoints_tools.inspection.finding import Finding
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD
from gpt.formats.megatron.rank_files import RankCoordinates, RankFiles, open_rank_files


def find_swapped_ranks(checkpoint: Checkpoint) -> list[Finding]:
    """Find Megatron rank files that are in the directory of the wrong rank."""
    if checkpoint.format != "megatron":
        return []
    return [
        *_check_recorded_ranks(open_rank_files(checkpoint.path)),
        *_check_padding_rows(checkpoint),
    ]


# Maps each arg in which older training runs recorded a rank to a field of RankCoordinates.
RANK_ARGS = {
    "tensor_model_parallel_rank": "tensor",
    "pipeline_model_parallel_rank": "stage",
    "expert_model_parallel_rank": "expert",
}


def _check_recorded_ranks(ranks: RankFiles) -> Iterator[Finding]:
    """Compare each file's directory with the ranks recorded in the file's args.

    `args.rank` is ignored if it is equal in all files, as in the output of converters.
    """
    global_ranks: dict[RankCoordinates, int] = {}
    for coordinates, rank_file in ranks.files.items():
        args = rank_file.args or {}
        for arg_name, field in RANK_ARGS.items():
            recorded_rank = args.get(arg_name)
            if type(recorded_rank) is int and recorded_rank != getattr(coordinates, field):
                message = (
                    f"args.{arg_name} is {recorded_rank}, but the directory is rank "
                    f"{getattr(coordinates, field)}'s"
                )
                yield Finding(
                    str(rank_file.path), f"{message}; rank files are swapped: rename them"
                )
        if type(args.get("rank")) is int:
            global_ranks[coordinates] = args["rank"]
    if len(set(global_ranks.values())) < 2:
        return
    for coordinates, rank in global_ranks.items():
        # In every rank order of Megatron, the tensor rank varies fastest. If two files differ only
        # in the stage, the later stage has the larger global rank. If two files differ only in the
        # expert rank, the later expert rank has the larger global rank. Two expert ranks with equal
        # global ranks are accepted: some programs write the same args to the files of all expert
        # ranks, so equal global ranks are no evidence of a swap.
        previous_stage = replace(coordinates, stage=coordinates.stage - 1)
        previous_expert = replace(coordinates, expert=coordinates.expert - 1)
        tensor_rank = rank % ranks.parallel_sizes.tp
        reason = ""
        if tensor_rank != coordinates.tensor:
            reason = (
                f"which is tensor rank {tensor_rank}, but the directory is tensor rank "
                f"{coordinates.tensor}'s"
            )
        elif (
            global_ranks.get(previous_stage, -1) >= rank
            or global_ranks.get(previous_expert, -1) > rank
        ):
            if global_ranks.get(previous_stage, -1) >= rank:
                previous = previous_stage
            else:
                previous = previous_expert
            reason = (
                f"but {ranks.files[previous].path.parent.name}, which is before it in rank order, "
                f"was saved by rank {global_ranks[previous]}"
            )
        if reason:
            message = f"it was saved by rank {rank}, {reason}"
            yield Finding(
                str(ranks.files[coordinates].path),
                f"{message}; rank files are swapped: rename them",
            )


def _check_padding_rows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find files that end with padding rows but are not the file of the last tensor rank.

    All padding rows are equal. Only checkpoints in which each tensor rank has rows of real tokens
    are checked; in these only the last rank has padding rows.
    """
    for name in (EMBEDDING, HEAD):
        logical = checkpoint.tensors.get(name)
        sources = [piece.source for piece in logical.slices] if logical else []
        if len(sources) < 2 or len(sources) != checkpoint.split.get("tp") or not logical:
            continue
        source_rows = sources[0].shape[0]
        padding_rows = min(source_rows, len(sources) * source_rows - logical.shape[0])
        if padding_rows < 2 or _rows_are_equal(sources[-1].tensor()[-padding_rows:]):
            continue
        for source in sources[:-1]:
            if _rows_are_equal(source.tensor()[-padding_rows:]):
                message = (
                    f"its last {padding_rows} rows are equal, like padding rows, but the last rows "
                    "in the file of the last tensor rank are not; rank files are swapped: rename "
                    "them"
                )
                yield Finding(source.location, message)


def _rows_are_equal(rows: Tensor) -> bool:
    return bool((rows == rows[:1]).all())
