"""One micro-batch through the stages of a pipeline, forward and back.

A stage receives hidden states, runs, and sends; backward it receives a gradient and sends one. On
a mesh of one stage nothing is sent. Which micro-batch goes when is a schedule's business.
"""

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.kv import KVPool
from gpt.model import GPT
from gpt.parallel import receive_from, send_to


def take(model: GPT, ids: Tensor, batch: Batch) -> Tensor:
    """This stage's input: the ids, or the hidden states that the stage before sends."""
    if model.first:
        return ids
    mesh = model.mesh
    shape = (mesh.rows(batch.tokens), model.config.hidden_size)
    return receive_from(shape, model.dtype, mesh, mesh.pp_rank - 1)


def forward(
    model: GPT,
    ids: Tensor,
    batch: Batch,
    *,
    kv: KVPool | None = None,
    table: Tensor | None = None,
) -> Tensor | None:
    """Run this stage and pass its output on; the last stage returns the logits."""
    y: Tensor = model(take(model, ids, batch), batch, kv, table)
    if model.last:
        return y
    send_to(y, model.mesh, model.mesh.pp_rank + 1)
    return None


def backward(model: GPT, x: Tensor, y: Tensor) -> None:
    """Gradients of this stage: `y` is what it sent, or the loss on the last stage; `x` its input.

    A stage after the first must have run on an input that requires a gradient.
    """
    mesh = model.mesh
    if model.last:
        torch.autograd.backward(y)
    else:
        grad = receive_from(tuple(y.shape), y.dtype, mesh, mesh.pp_rank + 1)
        torch.autograd.backward(y, grad)
    if not model.first:
        assert x.grad is not None
        send_to(x.grad, mesh, mesh.pp_rank - 1)
