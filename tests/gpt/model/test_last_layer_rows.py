"""The last layer computes the rows that its head reads, and no other; nothing else changes."""

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.model.gpt_model import GPT
from tests.support.models import CONFIGS, build

ROWS = torch.tensor([16, 4, 7, 9])


def learned(model: GPT, ids: Tensor, *, early: bool) -> dict[str, Tensor]:
    """Logits of some rows, and the gradients of a table and of all weights."""
    lengths, parents = (3, 8, 6), (None, 0, 0)
    table = torch.linspace(-1, 1, 2 * model.config.hidden_size, dtype=torch.float64)
    table = table.view(2, -1).requires_grad_()
    batch = Batch.plain(lengths, rows=ROWS if early else None, parents=parents)
    x = model.hidden(ids, batch, None, table)
    assert len(x) == (len(ROWS) if early else batch.tokens)
    logits = model.head(x, Batch.plain(lengths, rows=ROWS, parents=parents))
    named = dict(model.named_parameters())
    wanted = [table, *named.values()]
    found = torch.autograd.grad((logits * logits.detach().cos()).sum(), wanted, allow_unused=True)
    grads = {
        name: grad
        for name, grad in zip(["table", *named], found, strict=True)
        if grad is not None  # An expert's that nobody chose.
    }
    return {"logits": logits.detach(), **grads}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_rows_picked_before_the_last_mlp_are_those_picked_after_it(name: str) -> None:
    model = build(CONFIGS[name], trainable=True)
    ids = torch.arange(17) * 5 % CONFIGS[name].vocab_size
    ids[[0, 2]] = CONFIGS[name].vocab_size + torch.tensor([1, 0])
    early, late = (learned(model, ids, early=early) for early in (True, False))
    for part in early.keys() | late.keys():
        # An expert chosen by rows that nobody reads has a gradient of zeros.
        other = torch.zeros_like(late.get(part, early.get(part, torch.zeros(()))))
        torch.testing.assert_close(
            early.get(part, other), late.get(part, other), rtol=1e-9, atol=1e-11
        )
