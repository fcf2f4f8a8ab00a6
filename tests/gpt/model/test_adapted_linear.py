"""Linear adapters in the model: the logits of merged weights, in any batch and split."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.linear_adapter import AdaptedRows, ModelAdapter
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import shard_adapter
from gpt.parallel.mesh import Mesh
from tests.support.linear_adapters import METHODS, merge_into, random_linears
from tests.support.models import CONFIGS, SERVED_CONFIGS, build
from tests.support.ranks import ranks

IDS = torch.arange(3, 39).view(3, 12)
TOLERANCE = 1e-11


def sharded(model: GPT, **options: object) -> ModelAdapter:
    mesh = model.mesh
    linears = random_linears(model.config, **options)  # type: ignore[arg-type]
    return shard_adapter(
        linears,
        model.config,
        model.layers,
        rank=mesh.in_stage.rank,
        tp=mesh.tp,
        ep=mesh.ep,
        dtype=model.dtype,
    )


def adapted_logits(model: GPT, adapted_rows: tuple[AdaptedRows, ...]) -> Tensor:
    batch = replace(Batch.unpaged((IDS.shape[1],) * len(IDS)), adapted_rows=adapted_rows)
    logits: Tensor = model(IDS.flatten(), batch)
    return logits.view(*IDS.shape, -1)


# Parts of fused linears in two networks; in the others they are among the slow tests.
MERGED_CASES = [
    (name, method, by_parts)
    if not by_parts or name in ("classic", "modern")
    else pytest.param(name, method, by_parts, marks=pytest.mark.slow)
    for name in CONFIGS
    for method in METHODS
    for by_parts in (False, True)
]


@torch.inference_mode()
@pytest.mark.parametrize(("name", "method", "by_parts"), MERGED_CASES)
def test_an_adapter_has_the_logits_of_its_merged_weights(
    name: str, method: str, by_parts: bool
) -> None:
    config = CONFIGS[name]
    model = build(config)
    adapter = sharded(model, method=method, by_parts=by_parts)
    linears = random_linears(config, method, by_parts=by_parts)
    expected = merge_into(build(config), linears).logits(IDS)
    actual = adapted_logits(model, (AdaptedRows(adapter, None),))
    assert not torch.allclose(expected, model.logits(IDS), rtol=0.1, atol=0.1)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_of_a_mixed_batch_has_its_own_adapter(name: str) -> None:
    config = CONFIGS[name]
    model = build(config)
    lora, ia3 = sharded(model), sharded(model, method="ia3", by_parts=True)
    first = torch.arange(12)
    mixed = (AdaptedRows(lora, first), AdaptedRows(ia3, first + 24))
    logits = adapted_logits(model, mixed)
    expected = [
        merge_into(build(config), random_linears(config)).logits(IDS[:1]),
        model.logits(IDS[1:2]),
        merge_into(build(config), random_linears(config, "ia3", by_parts=True)).logits(IDS[2:]),
    ]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=TOLERANCE, atol=TOLERANCE)


def mixed_logits(model: GPT) -> Tensor:
    """Logits where two adapters act on the first and on the last sequence."""
    first = torch.arange(12)
    dora, ia3 = sharded(model, method="dora"), sharded(model, method="ia3", by_parts=True)
    return adapted_logits(model, (AdaptedRows(dora, first), AdaptedRows(ia3, first + 24)))


def rank_logits(_: int, name: str, tp: int, ep: int, sequence_parallel: bool) -> Tensor:
    mesh = Mesh.create(tp, 1, ep=ep, sequence_parallel=sequence_parallel)
    with torch.inference_mode():
        return mixed_logits(build(SERVED_CONFIGS[name], mesh))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("classic", 2, 1),
        ("modern", 4, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("experts", 2, 1),
                ("eight experts", 1, 2),
                ("eight experts", 2, 2),
                ("eight experts", 4, 2),
                ("eight experts", 2, 4),
            )
        ),
    ],
)
def test_ranks_have_the_logits_of_one_rank(
    name: str, tp: int, ep: int, sequence_parallel: bool
) -> None:
    with torch.inference_mode():
        expected = mixed_logits(build(SERVED_CONFIGS[name]))
    # More expert than tensor ranks only serve models, without sequence parallelism.
    is_parallel = sequence_parallel and tp >= ep
    for logits in ranks(max(tp, ep), rank_logits, name, tp, ep, is_parallel):
        torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
