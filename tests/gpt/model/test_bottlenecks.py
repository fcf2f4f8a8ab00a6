"""Bottlenecks in the model: the logits of NeMo's networks, in any batch and at any split."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.linear_adapter import AdaptedRows, ModelAdapter
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import largest_rank_bytes, shard_adapter
from gpt.parallel.mesh import Mesh
from tests.support.houlsby_adapters import put_into
from tests.support.linear_adapters import BOTTLENECKS, merge_into, random_linears
from tests.support.models import CONFIGS, build
from tests.support.ranks import ranks

IDS = torch.arange(3, 39).view(3, 12)
TOLERANCE = 1e-11
# Networks whose blocks end without a norm.
NETWORKS = [name for name, config in CONFIGS.items() if config.norm_placement == "pre"]


def sharded(model: GPT, method: str, **options: object) -> ModelAdapter:
    mesh = model.mesh
    linears = random_linears(model.config, method, **options)  # type: ignore[arg-type]
    return shard_adapter(
        linears, model.config, model.layers, rank=mesh.tp_rank, tp=mesh.tp, dtype=model.dtype
    )


def adapted_logits(
    model: GPT, adapted_rows: tuple[AdaptedRows, ...], rows: Tensor | None = None
) -> Tensor:
    batch = Batch.unpaged((IDS.shape[1],) * len(IDS), logit_rows=rows)
    logits: Tensor = model(IDS.flatten(), replace(batch, adapted_rows=adapted_rows))
    return logits


@torch.inference_mode()
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", BOTTLENECKS)
def test_a_bottleneck_has_the_logits_of_nemos_network(name: str, method: str) -> None:
    config = CONFIGS[name]
    model = build(config)
    adapted = (AdaptedRows(sharded(model, method), None),)
    expected = put_into(build(config), random_linears(config, method)).logits(IDS).flatten(0, 1)
    actual = adapted_logits(model, adapted)
    assert not torch.allclose(expected, model.logits(IDS).flatten(0, 1), rtol=0.1, atol=0.1)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["classic", "modern"])
def test_each_row_of_a_mixed_batch_has_its_own_adapter(name: str) -> None:
    """Bottlenecks, LoRA and IA3, which also changes linear_proj, in one batch."""
    config = CONFIGS[name]
    model = build(config)
    methods = ("bottleneck", "ia3", "bottleneck-post")
    first = torch.arange(12)
    adapted = tuple(
        AdaptedRows(sharded(model, method), first + 12 * index)
        for index, method in enumerate(methods)
    )
    expected = torch.cat(
        [
            put_into(build(config), random_linears(config, "bottleneck")).logits(IDS[:1]),
            merge_into(build(config), random_linears(config, "ia3")).logits(IDS[1:2]),
            put_into(build(config), random_linears(config, "bottleneck-post")).logits(IDS[2:]),
        ]
    ).flatten(0, 1)
    torch.testing.assert_close(
        adapted_logits(model, adapted), expected, rtol=TOLERANCE, atol=TOLERANCE
    )
    rows = torch.tensor([11, 23, 30, 35])
    torch.testing.assert_close(
        adapted_logits(model, adapted, rows), expected[rows], rtol=TOLERANCE, atol=TOLERANCE
    )


def mixed_logits(model: GPT) -> Tensor:
    """A bottleneck in the first sequence, LoRA in the second, and none in the third."""
    adapted = (
        AdaptedRows(sharded(model, "bottleneck"), torch.arange(12)),
        AdaptedRows(sharded(model, "lora"), torch.arange(12, 24)),
    )
    return adapted_logits(model, adapted)


def rank_logits(_: int, name: str, tp: int) -> list[Tensor]:
    results = []
    for sequence_parallel in (False, True):
        mesh = Mesh.create(tp=tp, pp=1, dp=1, sequence_parallel=sequence_parallel)
        with torch.inference_mode():
            model = build(CONFIGS[name], mesh)
            alone = adapted_logits(model, (AdaptedRows(sharded(model, "bottleneck"), None),))
            results += [mixed_logits(model), alone]
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("classic", 2), *((name, 4) for name in NETWORKS)])
def test_tensor_ranks_equal_one_rank(name: str, tp: int) -> None:
    with torch.inference_mode():
        model = build(CONFIGS[name])
        mixed = mixed_logits(model)
        alone = adapted_logits(model, (AdaptedRows(sharded(model, "bottleneck"), None),))
    for results in ranks(tp, rank_logits, name, tp):
        for actual, expected in zip(results, (mixed, alone) * 2, strict=True):
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_each_rank_has_all_bytes_of_a_bottleneck() -> None:
    config = CONFIGS["modern"]
    linears = random_linears(config, "bottleneck")
    numbers = sum(tensor.numel() for linear in linears.values() for _, tensor in linear.tensors())
    for tp in (1, 2):
        nbytes = largest_rank_bytes(linears, config, [range(config.num_layers)], tp=tp, itemsize=64)
        assert nbytes == 64 * numbers
