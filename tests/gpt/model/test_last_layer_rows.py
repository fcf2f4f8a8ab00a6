"""The last layer computes only the rows that the LM head reads, with unchanged results."""

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.model.gpt_model import GPT
from tests.support.models import CONFIGS, build

ROWS = torch.tensor([16, 4, 7, 9])


def logits_and_gradients(model: GPT, ids: Tensor, *, early: bool) -> dict[str, Tensor]:
    """Logits of some rows, and the gradients of an embedding table and of all weights."""
    lengths, parents = (3, 8, 6), (None, 0, 0)
    table = torch.linspace(-1, 1, 2 * model.config.hidden_size, dtype=torch.float64)
    table = table.view(2, -1).requires_grad_()
    batch = Batch.unpaged(lengths, logit_rows=ROWS if early else None, parents=parents)
    x = model.forward_hidden(ids, batch, None, table)
    assert len(x) == (len(ROWS) if early else batch.tokens)
    logits = model.compute_logits(x, Batch.unpaged(lengths, logit_rows=ROWS, parents=parents))
    inputs = {"table": table, **dict(model.named_parameters())}
    loss = (logits * logits.detach().cos()).sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    tensors = {"logits": logits.detach()}
    for name, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:  # An expert without rows has no gradient.
            tensors[name] = gradient
    return tensors


@pytest.mark.parametrize("name", list(CONFIGS))
def test_rows_selected_before_the_last_mlp_equal_rows_selected_after_it(name: str) -> None:
    model = build(CONFIGS[name], trainable=True)
    ids = torch.arange(17) * 5 % CONFIGS[name].vocab_size
    ids[[0, 2]] = CONFIGS[name].vocab_size + torch.tensor([1, 0])
    early = logits_and_gradients(model, ids, early=True)
    late = logits_and_gradients(model, ids, early=False)
    for name in early.keys() | late.keys():
        # The gradient of an expert with unread rows only is zero, or absent if they are skipped.
        zeros = torch.zeros_like(late.get(name, early.get(name, torch.zeros(()))))
        torch.testing.assert_close(
            early.get(name, zeros), late.get(name, zeros), rtol=1e-9, atol=1e-11
        )
