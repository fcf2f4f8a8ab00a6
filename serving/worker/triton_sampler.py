"""Launcher of the sampler's Triton kernel: temperature, top-k, top-p, min-p and the draw.

One launch samples all rows. A row's token does not depend on the other rows or on their number.
The launch does not synchronize the device. The module does not know slots and logits processing.
"""

import torch
from torch import Tensor

from gpt.triton_runtime import launcher
from gpt.triton_runtime.block_sizes import next_power_of_two
from serving.worker import triton_sampling_kernels as kernels

BLOCK_SIZE = 8192  # Logits that a program reads at once.
SCRATCH_BLOCK_SIZE = 2048  # Candidates that a program reads at once.
WARPS = 16  # Of a whole block. 32 are slower: a thread then has half as many registers.


def sample_rows(logits: Tensor, parameters: Tensor, tokens: Tensor) -> None:
    """Write the token of each row of `logits` (R, V) with a temperature above 0 to `tokens` (R,).

    `parameters` (R, 5), fp64: temperature, top-k, top-p, min-p, uniform random number.
    """
    rows, vocabulary = logits.shape
    assert parameters.is_contiguous() and tokens.is_contiguous()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    scratch = torch.empty(rows, vocabulary, dtype=torch.int32, device=logits.device)
    # Small vocabularies need fewer threads.
    block_size = min(max(next_power_of_two(vocabulary), kernels.BINS.value), BLOCK_SIZE)
    launcher.launch(
        kernels.sample_row,
        (rows,),
        logits,
        parameters,
        scratch,
        tokens,
        vocabulary,
        logits.stride(0),
        BLOCK_SIZE=block_size,
        SCRATCH_BLOCK_SIZE=min(block_size, SCRATCH_BLOCK_SIZE),
        num_warps=max(block_size * WARPS // BLOCK_SIZE, 1),
    )
