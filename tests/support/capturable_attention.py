"""An attention that a graph could have recorded, in plain torch: it reads nothing but tensors.

Each sequence's whole table is gathered, and what lies past its end is masked. So a step of the kind
that is recorded can be done on a CPU, where replaying it means doing it again.
"""

import torch
from torch import Tensor

from gpt.attention.paged import KV, ragged
from gpt.batch import Batch
from gpt.model.gpt_model import GPT


def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
) -> Tensor:
    """As gpt.attention.paged.ragged does, from `Batch.ends`; without them it is that."""
    if batch.ends is None or kv is None:
        return ragged(q, k, v, batch, kv, window)
    assert batch.tables is not None
    size, (rows, heads, width), groups = kv.shape[3], q.shape, kv.shape[2]
    ends, tables = batch.ends.long().unsqueeze(1), batch.tables.long()
    starts = torch.arange(tables.shape[1]) * size
    held = kv[tables.masked_fill(starts >= ends, 0)]  # (rows, blocks, 2, groups, size, width)
    keys, values = held.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    places = torch.arange(keys.shape[2])
    unseen = places >= ends
    if window is not None:
        unseen |= places < ends - window
    scores = torch.einsum("rgqd,rgkd->rgqk", q.view(rows, groups, -1, width), keys) * width**-0.5
    weights = scores.masked_fill(unseen[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("rgqk,rgkd->rgqd", weights, values).reshape(rows, heads, width)


attend.captured = True  # type: ignore[attr-defined]


def recordable(model: GPT) -> GPT:
    """The same model, whose steps can be recorded."""
    for block in model.blocks:
        block.self_attention.attend = attend
    return model
