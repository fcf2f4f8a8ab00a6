"""Gradient reduction: replication of parameters, sums over replicas, shares of the norm."""

import pytest
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.parallel.mesh import Mesh
from ptuning.training.gradient_reduction import (
    WORD_EMBEDDING,
    Replication,
    TrainableTensor,
    reduce_gradient,
    squared_norm_share,
    trainable_encoder_tensors,
    trainable_model_tensors,
    trainable_prefix_tensors,
)
from tests.support.models import CLASSIC, MODERN, build
from tests.support.ranks import ranks

CPU = torch.device("cpu")
# On 4 tensor ranks, each of the 2 KV heads has 2 replicas.
GROUPED = MODERN.with_fields(num_query_groups=2)


def test_prompt_encoder_shards_only_the_named_parameters() -> None:
    parameters = {"a": torch.ones(2), "b": torch.ones(2)}
    trainables = trainable_encoder_tensors(parameters.items(), ["b"])
    assert [trainable.replication for trainable in trainables] == [
        Replication.REPLICATED,
        Replication.SPLIT,
    ]


@pytest.mark.parametrize(("tp", "replication"), [(2, Replication.SPLIT), (4, Replication.KV_HEADS)])
def test_prefix_is_replicated_with_fewer_kv_heads_than_ranks(
    tp: int, replication: Replication
) -> None:
    mesh = Mesh(CPU, tp=tp)
    (trainable,) = trainable_prefix_tensors([("0", torch.ones(2))], GROUPED, mesh)
    assert trainable.replication is replication


def test_all_parameters_of_a_model_are_trained() -> None:
    model = build(CLASSIC)
    trainables = trainable_model_tensors([model])
    assert [trainable.name for trainable in trainables] == [
        name for name, _ in model.named_parameters()
    ]
    assert all(trainable.value.requires_grad for trainable in trainables)
    assert not any(trainable.is_tied_copy for trainable in trainables)


def share_sum(replication: Replication, grads: list[Tensor], config: GPTConfig) -> float:
    """Sum of the shares of all tensor ranks in the squared norm."""
    total = 0.0
    for rank, grad in enumerate(grads):
        mesh = Mesh(CPU, tp=len(grads), rank=rank)
        total += squared_norm_share(TrainableTensor("a", grad, replication), grad, config, mesh)
    return total


def test_norm_counts_each_replica_once() -> None:
    kv_rows = 2 * GROUPED.kv_channels
    shards = [torch.full((kv_rows + 4, 3), float(rank + 1)) for rank in range(4)]
    assert share_sum(Replication.SPLIT, shards, GROUPED) == sum(
        float(shard.square().sum()) for shard in shards
    )
    for replication in (Replication.REPLICATED, Replication.PARTIAL):
        replicas = [shards[2]] * 4
        assert share_sum(replication, replicas, GROUPED) == float(shards[2].square().sum())
    heads = [shards[0], shards[0], shards[1], shards[1]]
    assert share_sum(Replication.KV_HEADS, heads, GROUPED) == sum(
        float(head.square().sum()) for head in shards[:2]
    )
    for first_rank in (0, 2):
        shards[first_rank + 1][-kv_rows:] = shards[first_rank][-kv_rows:]
    expected = sum(float(shard[:-kv_rows].square().sum()) for shard in shards)
    expected += sum(float(shards[rank][-kv_rows:].square().sum()) for rank in (0, 2))
    assert share_sum(Replication.KV_GROUPS, shards, GROUPED) == pytest.approx(expected)


def test_norm_excludes_data_parallel_replicas_and_the_tied_copy() -> None:
    grad = torch.ones(3)
    trainable = TrainableTensor("a", grad, Replication.SPLIT)
    assert squared_norm_share(trainable, grad, CLASSIC, Mesh(CPU, dp=2, rank=0)) == 3.0
    assert squared_norm_share(trainable, grad, CLASSIC, Mesh(CPU, dp=2, rank=1)) == 0.0
    tied_copy = TrainableTensor(WORD_EMBEDDING, grad, Replication.SPLIT, is_tied_copy=True)
    assert squared_norm_share(tied_copy, grad, CLASSIC, Mesh(CPU, pp=2, rank=1)) == 0.0


def reduce_on_rank(
    rank: int, split: tuple[int, int, int], name: str, replication: Replication, config: GPTConfig
) -> list[float]:
    """Reduce a gradient of as many rows as a QKV weight has; return the first value of each row."""
    tp, pp, dp = split
    mesh = Mesh.create(tp, pp, dp)
    grad = torch.full((2 * config.kv_channels + 1, 2), 10.0**rank, dtype=torch.float64)
    reduce_gradient(TrainableTensor(name, grad, replication), grad, config, mesh)
    return grad[:, 0].tolist()


REDUCTIONS: dict[
    str, tuple[tuple[int, int, int], str, Replication, GPTConfig, list[tuple[float, float]]]
] = {
    # Split (tp, pp, dp), name, replication, model; the first and last row of each rank.
    "shards": ((2, 1, 1), "a", Replication.SPLIT, CLASSIC, [(1, 1), (10, 10)]),
    "replicas": ((2, 1, 1), "a", Replication.REPLICATED, CLASSIC, [(1, 1), (10, 10)]),
    "sequence parallel": ((2, 1, 1), "a", Replication.PARTIAL, CLASSIC, [(11, 11)] * 2),
    "data parallel": ((1, 1, 2), "a", Replication.SPLIT, CLASSIC, [(11, 11)] * 2),
    "KV heads": (
        (4, 1, 1),
        "a",
        Replication.KV_HEADS,
        GROUPED,
        [(11, 11), (11, 11), (1100, 1100), (1100, 1100)],
    ),
    "KV rows of a QKV weight": (
        (4, 1, 1),
        "a",
        Replication.KV_GROUPS,
        GROUPED,
        [(1, 11), (10, 11), (100, 1100), (1000, 1100)],
    ),
    "tied embedding": ((1, 2, 1), WORD_EMBEDDING, Replication.SPLIT, CLASSIC, [(11, 11)] * 2),
    "untied embedding": (
        (1, 2, 1),
        WORD_EMBEDDING,
        Replication.SPLIT,
        CLASSIC.with_fields(untie_embeddings_and_output_weights=True),
        [(1, 1), (10, 10)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REDUCTIONS)
def test_gradient_is_summed_over_the_ranks_of_its_replication(case: str) -> None:
    split, name, replication, config, expected = REDUCTIONS[case]
    tp, pp, dp = split
    rows_by_rank = ranks(tp * pp * dp, reduce_on_rank, split, name, replication, config)
    assert [(rows[0], rows[-1]) for rows in rows_by_rank] == expected
