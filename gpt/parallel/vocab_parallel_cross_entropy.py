"""Vocabulary-parallel cross entropy: token losses from logits split over tensor ranks.

The logits are not gathered. The ranks reduce three numbers per row: the largest logit, the sum of
the exponentials, and the target's logit. The module computes the loss of each token; callers
average the losses.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gpt.parallel.collectives import all_reduce_no_grad
from gpt.parallel.mesh import Mesh
from gpt.parallel.vocabulary_padding import local_vocab_range


def token_losses(logits: Tensor, targets: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
    """Return the negative log-probability (n,) of each row's target in `targets` (n,).

    All tensor ranks return the losses of all rows. `logits` (n, padded vocabulary / ranks) is this
    rank's shard, in at least fp32. The forward pass overwrites it with the probabilities, and the
    backward pass overwrites it with the gradient of the logits.

    Every target must be a token id below `vocab_size`. Other targets are not detected: with an
    ignore index such as -100, the loss and the gradient of the row are wrong. The caller must
    remove or mask such rows.
    """
    losses = _VocabParallelCrossEntropy.apply(logits, targets, mesh, vocab_size)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
        with torch.no_grad():
            exponentials = logits.detach()
            width = logits.shape[1]
            vocab_start = mesh.tp_rank * width
            start, stop = local_vocab_range(vocab_size, width, mesh.tp_rank)
            # The columns of vocabulary padding get the probability 0.
            exponentials[:, stop - start :] = float("-inf")
            exponentials -= all_reduce_no_grad(exponentials.amax(1), mesh, ReduceOp.MAX).unsqueeze(
                1
            )
            local_targets = targets - vocab_start
            out_of_shard = (local_targets < 0) | (local_targets >= width)
            local_targets = local_targets.masked_fill(out_of_shard, 0)
            target_logits = exponentials.gather(1, local_targets.unsqueeze(1)).squeeze(1)
            target_logits = target_logits.masked_fill(out_of_shard, 0)
            exponentials.exp_()
            exp_sums, target_logits = all_reduce_no_grad(
                torch.stack([exponentials.sum(1), target_logits]), mesh, ReduceOp.SUM
            )
            exponentials /= exp_sums.unsqueeze(1)
        ctx.save_for_backward(exponentials, local_targets, out_of_shard)
        losses: Tensor = exp_sums.log() - target_logits
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local_targets, out_of_shard = ctx.saved_tensors
        in_shard = (~out_of_shard).to(probabilities.dtype).unsqueeze(1)
        probabilities.scatter_add_(1, local_targets.unsqueeze(1), -in_shard)
        return probabilities.mul_(grads[0].unsqueeze(1)), None, None, None
