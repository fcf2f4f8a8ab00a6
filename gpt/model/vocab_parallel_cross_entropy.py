"""Cross entropy over a vocabulary that is split over tensor ranks, never gathered.

Three numbers of a row pass between the ranks: the largest logit, the sum of exponentials, and the
right answer's logit. It knows logits and answers, no model and no means.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gpt.parallel.mesh import Mesh, reduced


def token_losses(logits: Tensor, answers: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
    """Minus the log probability of each answer (n,), equal on all tensor ranks.

    `logits` (n, padded vocabulary / ranks) is this rank's part, in at least fp32. Its memory is
    used up: it holds the probabilities afterwards, then their gradient.
    """
    losses = _TokenLosses.apply(logits, answers, mesh, vocab_size)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, answers: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
        with torch.no_grad():
            exponentials = logits.detach()
            width = logits.shape[1]
            start = mesh.tp_rank * width
            # Rows behind the vocabulary pad it; no answer lies there.
            exponentials[:, max(0, vocab_size - start) :] = float("-inf")
            exponentials -= reduced(exponentials.amax(1), mesh, ReduceOp.MAX).unsqueeze(1)
            local = answers - start
            elsewhere = (local < 0) | (local >= width)
            local = local.masked_fill(elsewhere, 0)
            right = exponentials.gather(1, local.unsqueeze(1)).squeeze(1)
            right = right.masked_fill(elsewhere, 0)
            exponentials.exp_()
            sums, right = reduced(torch.stack([exponentials.sum(1), right]), mesh, ReduceOp.SUM)
            exponentials /= sums.unsqueeze(1)
        ctx.save_for_backward(exponentials, local, elsewhere)
        losses: Tensor = sums.log() - right
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        ones = (~elsewhere).to(probabilities.dtype).unsqueeze(1)
        probabilities.scatter_add_(1, local.unsqueeze(1), -ones)
        return probabilities.mul_(grads[0].unsqueeze(1)), None, None, None
