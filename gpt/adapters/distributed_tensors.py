"""Tensors of an adapter in a distributed checkpoint (`torch_dist`), layer by layer.

A tensor rank of a gated linear_fc1 has the rows of its gates above those of its ups. Megatron-Core
saves the halves of a rank's rows as two chunks: in the whole tensor, the first halves of all ranks
are above the second halves. Adapters are saved with or without these halves (import_bridge.py).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt.adapters.linear_check import LINEARS_BYTES_MAX
from gpt.checkpoint.files.torch_dcp import ChunkedTensor
from gpt.errors import AdapterError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def count_cuts(entry: ChunkedTensor, dimension: int) -> int:
    """Return the number of equal pieces into which the chunks cut a dimension; 0: not equal."""
    offsets = sorted({chunk.offsets[dimension] for chunk in entry.chunks})
    size, remainder = divmod(entry.shape[dimension], max(len(offsets), 1))
    are_equal = not remainder and offsets == [size * number for number in range(len(offsets))]
    return len(offsets) if are_equal else 0


def _covers_exactly(entry: ChunkedTensor) -> bool:
    """Tell whether the chunks are all cells of a grid over the whole tensor, each once."""
    ends: list[dict[int, int]] = []  # The end of each interval of a dimension, by its start.
    for dimension, size in enumerate(entry.shape):
        starts = sorted({chunk.offsets[dimension] for chunk in entry.chunks})
        if starts[:1] != [0]:
            return False
        ends.append(dict(zip(starts, [*starts[1:], size], strict=True)))
    cells = {tuple(chunk.offsets) for chunk in entry.chunks}
    if len(cells) != len(entry.chunks) or len(cells) != math.prod(map(len, ends)):
        return False
    return all(
        offset + size == intervals[offset]
        for chunk in entry.chunks
        for offset, size, intervals in zip(chunk.offsets, chunk.sizes, ends, strict=True)
    )


def ranks_to_halves(rows: Tensor, tp: int) -> Tensor:
    """Place the first halves of all tensor ranks' rows above the second halves."""
    return rows.view(tp, 2, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def halves_to_ranks(rows: Tensor, tp: int) -> Tensor:
    """Undo `ranks_to_halves`: place the rows of each tensor rank side by side."""
    return rows.view(2, tp, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def layer_tensors(
    entry: ChunkedTensor, layer: str | None, dimensions: int, num_layers: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield each layer's number and tensor in fp32.

    `layer` is the number in the key; None: the key stacks the tensors of all layers.
    """
    elements = math.prod(entry.shape)
    is_stack = layer is not None or (entry.shape and entry.shape[0] == num_layers)
    is_usable = entry.dtype in DTYPES and 4 * elements <= LINEARS_BYTES_MAX
    if len(entry.shape) != dimensions + (layer is None) or not is_stack or not is_usable:
        raise AdapterError(
            f"the adapter has {entry.key[:200]!r} in {entry.dtype} with the shape {entry.shape}; "
            f"this model has {num_layers} layers: give the model that it was trained on"
        )
    if not _covers_exactly(entry):
        raise AdapterError(
            f"the adapter's chunks of {entry.key[:200]!r} do not cover it exactly; copy the "
            "checkpoint again"
        )
    stacked = torch.empty(entry.shape)
    for chunk in entry.chunks:
        box = tuple(
            slice(offset, offset + size)
            for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        stacked[box] = chunk.tensor()
    if layer is not None:
        yield int(layer), stacked
    else:
        yield from enumerate(stacked)
