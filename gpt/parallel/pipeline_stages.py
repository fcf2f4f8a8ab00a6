"""Pipeline stages: the layers of each stage, and of each of its chunks (virtual stages).

The module computes with plain integers and does not import torch.
"""


def stage_layers(
    num_layers: int, pp: int, stages: list[int] | None = None, vpp: int = 1
) -> list[list[range]]:
    """Return the global layer numbers of each stage's chunks, as `[stage][chunk]`.

    Consecutive layers are assigned to the first chunk of every stage, then to the second chunk of
    every stage. `stages` is the number of layers of each stage. By default the numbers of layers of
    the chunks differ by at most one. The last chunk, with the LM head, then has the smaller number;
    the first chunk, with the embedding, has it too if at least two chunks have it (3 layers in two
    stages are 2 and 1).
    """
    if stages is None:
        chunks = _split_evenly(num_layers, pp * vpp)
    else:
        chunks_by_stage = [_split_evenly(layers, vpp) for layers in stages]
        chunks = [chunks_by_stage[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    ranges = [range(start, start + size) for start, size in zip(starts, chunks, strict=True)]
    return [[ranges[chunk * pp + stage] for chunk in range(vpp)] for stage in range(pp)]


def _split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` numbers that differ by at most one.

    The larger numbers are in the middle; if these cannot be centered, they are nearer to the start.
    """
    small, extra = divmod(total, parts)
    first = (parts - extra) // 2
    return [small + (first <= i < first + extra) for i in range(parts)]
