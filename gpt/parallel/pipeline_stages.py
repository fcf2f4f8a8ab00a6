"""Pipeline stages: the layers of each stage, and of each of its chunks (virtual stages).

The module computes with plain integers and does not import torch.
"""


def stage_layers(
    num_layers: int, pp: int, stages: list[int] | None = None, vpp: int = 1
) -> list[list[range]]:
    """Return the global layer numbers of each stage's chunks, as `[stage][chunk]`.

    `pp` is the number of stages, and `vpp` the number of chunks per stage. The layers are assigned
    in order: first to chunk 0 of every stage, then to chunk 1 of every stage, and so on.

    `stages` gives the number of layers of each stage, which are divided evenly over the chunks of
    the stage. None: all layers are divided evenly over all chunks.

    If the layers do not divide evenly, some chunks have one layer more: the chunks in the middle,
    because the first chunk also has the embedding, and the last chunk the LM head. If the larger
    chunks cannot be centered, they are nearer to the start. Examples:

    - 4 layers over 3 chunks: 1, 2, 1
    - 5 layers over 3 chunks: 2, 2, 1
    - 3 layers over 2 chunks: 2, 1
    """
    if stages is None:
        chunk_sizes = _split_evenly(num_layers, pp * vpp)
    else:
        sizes_by_stage = [_split_evenly(layers, vpp) for layers in stages]
        chunk_sizes = [sizes_by_stage[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    starts = [sum(chunk_sizes[:i]) for i in range(len(chunk_sizes))]
    ranges = [range(start, start + size) for start, size in zip(starts, chunk_sizes, strict=True)]
    return [[ranges[chunk * pp + stage] for chunk in range(vpp)] for stage in range(pp)]


def _split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` numbers that differ by at most one.

    The larger numbers are in the middle. If they cannot be centered, they are nearer to the start.
    """
    small, extra = divmod(total, parts)
    first = (parts - extra) // 2
    return [small + (first <= i < first + extra) for i in range(parts)]
