"""One batch through the stages of a pipeline, forward: decoding, on any split.

A stage receives hidden states, runs, and sends. On a mesh of one stage nothing is sent. A stage may
have several chunks of the model; then the last stage sends to the first one too. Gradients, and
several batches at once, are for who learns (`ptuning.training.pipeline`).
"""

from collections.abc import Sequence

from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import receive_from, send_to


def take(model: GPT, ids: Tensor, batch: Batch) -> Tensor:
    """This stage's input: the ids, or the hidden states that the stage before sends."""
    return ids if model.first else receive(model, batch.tokens)


def receive(model: GPT, tokens: int) -> Tensor:
    """Hidden states of so many tokens, from the stage before."""
    mesh = model.mesh
    shape = (mesh.rows(tokens), model.config.hidden_size)
    return receive_from(shape, model.dtype, mesh, (mesh.pp_rank - 1) % mesh.pp)


def forward(
    model: GPT | Sequence[GPT],
    ids: Tensor,
    batch: Batch,
    *,
    kv: KVPool | None = None,
    table: Tensor | None = None,
) -> Tensor | None:
    """Run this stage, chunk by chunk, and pass its outputs on; the last stage returns logits."""
    x: Tensor | None = None
    for chunk in chunks_of(model):
        mesh = chunk.mesh
        y: Tensor = chunk(take(chunk, ids, batch) if x is None else x, batch, kv, table)
        if chunk.last:
            return y
        if mesh.pp == 1:
            x = y
        else:
            send_to(y, mesh, (mesh.pp_rank + 1) % mesh.pp)
    return None


def chunks_of(model: GPT | Sequence[GPT]) -> Sequence[GPT]:
    """What this rank has of the model, in the order in which tokens go through it."""
    return (model,) if isinstance(model, GPT) else model
