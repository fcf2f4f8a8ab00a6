"""Pipeline-parallel forward pass: one batch through all model chunks of this rank's stage.

Pipeline parallelism for inference: a stage receives hidden states, runs its layers, and sends the
output to the next stage. A stage may have several chunks of the model; the last stage then sends
the output of a chunk to the first stage, which runs its next chunk. With one stage nothing is sent.
Pipeline parallelism for training, with micro-batches and gradients, is in
`ptuning.training.pipeline`.
"""

from collections.abc import Sequence

from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.model.gpt_model import GPT
from gpt.parallel.pipeline_communication import receive_from_stage, send_to_stage


def receive_input(model: GPT, ids: Tensor, batch: Batch) -> Tensor:
    """Return the input of this stage: the token ids, or hidden states from the previous stage."""
    return ids if model.is_first_stage else receive_hidden(model, batch.tokens)


def receive_hidden(model: GPT, tokens: int) -> Tensor:
    """Receive the hidden states of `tokens` tokens from the previous stage."""
    mesh = model.mesh
    shape = (mesh.local_rows(tokens), model.config.hidden_size)
    return receive_from_stage(shape, model.dtype, mesh, (mesh.pp_rank - 1) % mesh.pp)


def forward(
    model: GPT | Sequence[GPT],
    ids: Tensor,
    batch: Batch,
    *,
    kv: KVPool | None = None,
    virtual_embeddings: Tensor | None = None,
) -> Tensor | None:
    """Run this stage's chunks and send their outputs to the next stage.

    The last stage returns logits, the other stages None.
    """
    x: Tensor | None = None
    for chunk in model_chunks(model):
        mesh = chunk.mesh
        y: Tensor = chunk(
            receive_input(chunk, ids, batch) if x is None else x, batch, kv, virtual_embeddings
        )
        if chunk.is_last_stage:
            return y
        if mesh.pp == 1:
            x = y
        else:
            send_to_stage(y, mesh, (mesh.pp_rank + 1) % mesh.pp)
    return None


def model_chunks(model: GPT | Sequence[GPT]) -> Sequence[GPT]:
    """Return the model chunks of this rank, in the order of the forward pass."""
    return (model,) if isinstance(model, GPT) else model
