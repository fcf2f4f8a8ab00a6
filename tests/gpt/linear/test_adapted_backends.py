"""Linear adapters in the backends of a GPU: the logits of the plain torch linears.

The kernels are replaced by torch here. tests/gpt/linear/test_low_rank.py tests the kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.linear.fused_linear import fuse_layers
from gpt.linear.te_linear import (
    TransformerEngine,
    import_transformer_engine,
    replace_linears,
)
from gpt.linear_adapter import (
    AdaptedRows,
    AdapterKernels,
    LinearAdapter,
    LinearTerm,
    ModelAdapter,
    TermKernels,
)
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.model.adapted_linear import RowTerms, adapted_product, row_terms, select_adapted_rows
from gpt.model.gpt_model import GPT
from gpt.parallel.adaptable_linears import adaptable_linears
from gpt.parallel.adapter_sharding import shard_adapter
from gpt.parallel.mesh import Mesh
from tests.support import te_stub
from tests.support.linear_adapters import random_linears
from tests.support.models import CLASSIC, CONFIGS, MODERN, ODD, build
from tests.support.ranks import ranks

IDS = torch.arange(3, 39).view(3, 12)
EXACT = 1e-9
# The linears of the others have norms behind them, which only torch computes.
NAMES = [name for name in CONFIGS if name not in ("layered", "post norms")]
FAST_NAMES = ("classic", "modern")
# A change of how an fp8 model rounds moves its logits by less than this part of their spread. A
# wrong operation moves them by much more.
FP8_SPREAD_MAX = 0.1


class TorchTermKernels(TermKernels):
    """The terms of a linear in torch."""

    def __init__(self, terms: RowTerms) -> None:
        self._terms = terms

    def scale_input(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        scales = [
            (rows, [LinearTerm(input_scale=term.input_scale) for term in terms])
            for rows, terms in self._terms
        ]
        adapted_product(x, scales, lambda scaled: seen.append(scaled) or scaled, None)  # type: ignore[func-returns-value]
        return seen[0]

    def add_terms(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        terms = [
            (rows, [replace(term, input_scale=None) for term in group])
            for rows, group in self._terms
        ]
        product = y if bias is None else y - bias
        return adapted_product(x, terms, lambda _: product, bias)


class TorchAdapterKernels(AdapterKernels):
    """The adapters of a batch in torch."""

    def __init__(self, adapted_rows: Sequence[AdaptedRows]) -> None:
        self._adapted_rows = adapted_rows
        self.bottlenecks = adapted_rows

    def for_linear(self, linear: str) -> TermKernels | None:
        assert LOCAL_EXPERTS not in linear, "kernels change no linears of experts"
        terms = row_terms(self._adapted_rows, linear)
        return TorchTermKernels(terms) if terms else None

    def select_rows(self, rows: Tensor) -> AdapterKernels:
        return TorchAdapterKernels(select_adapted_rows(self._adapted_rows, rows))

    @property
    def expert_rows(self) -> Sequence[AdaptedRows]:
        return self._adapted_rows


def model_adapter(
    model: GPT, linears: Mapping[str, LinearAdapter] | None = None, **options: object
) -> ModelAdapter:
    mesh = model.mesh
    linears = linears or random_linears(model.config, **options)  # type: ignore[arg-type]
    return shard_adapter(
        linears, model.config, model.layers, rank=mesh.tp_rank, tp=mesh.tp, dtype=model.dtype
    )


def mixed_rows(model: GPT) -> tuple[AdaptedRows, ...]:
    """LoRA, DoRA, IA3 and bottlenecks on a part of the rows each; the last rows have no adapter."""
    rows = torch.arange(30).view(3, 10)
    return (
        AdaptedRows(model_adapter(model, seed=1, by_parts=True, rank=2), rows[0]),
        AdaptedRows(model_adapter(model, method="dora", seed=2), rows[1]),
        AdaptedRows(model_adapter(model, method="ia3", seed=3), rows[2]),
        AdaptedRows(model_adapter(model, method="bottleneck", seed=4), torch.arange(30, 33)),
    )


@torch.inference_mode()
def adapted_logits(model: GPT, adapted: tuple[AdaptedRows, ...], *, kernels: bool) -> Tensor:
    batch = Batch.unpaged((IDS.shape[1],) * len(IDS))
    if kernels:
        batch = replace(batch, adapter_kernels=TorchAdapterKernels(adapted))
    else:
        batch = replace(batch, adapted_rows=adapted)
    logits: Tensor = model(IDS.flatten(), batch)
    return logits


def use_transformer_engine(model: GPT) -> None:
    engine = import_transformer_engine()
    assert isinstance(engine, TransformerEngine)
    replace_linears(model, engine, "none", range(0))


BACKENDS: dict[str, Callable[[GPT], object]] = {
    "torch": lambda model: None,
    "fused": fuse_layers,
    "te": use_transformer_engine,
}


@pytest.fixture(autouse=True)
def stubbed_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    te_stub.install(monkeypatch)
    import_transformer_engine.cache_clear()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST_NAMES else pytest.mark.slow) for name in NAMES],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_apply_adapters_as_the_torch_linears(backend: str, name: str) -> None:
    model = build(CONFIGS[name])
    adapted = mixed_rows(model)
    expected = adapted_logits(model, adapted, kernels=False)
    assert not torch.allclose(expected, adapted_logits(model, (), kernels=False), rtol=0.1)
    BACKENDS[backend](model)
    for kernels in (False, True):
        actual = adapted_logits(model, adapted, kernels=kernels)
        assert (actual - expected).abs().max() < EXACT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "config", [CLASSIC, pytest.param(MODERN, marks=pytest.mark.slow)], ids=["classic", "modern"]
)
def test_inputs_after_a_norm_are_scaled(config: GPTConfig, backend: str) -> None:
    model = build(config)
    linears = {
        name: LinearAdapter(input_scale=torch.linspace(0.5, 2, linear.in_features))
        for name, linear in adaptable_linears(config).items()
    }
    adapted = (AdaptedRows(model_adapter(model, linears), torch.arange(20)),)
    expected = adapted_logits(model, adapted, kernels=False)
    BACKENDS[backend](model)
    for kernels in (False, True):
        assert (adapted_logits(model, adapted, kernels=kernels) - expected).abs().max() < EXACT


def check_tensor_parallel_models(_rank: int) -> None:
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN, ODD):
        unsplit, model = build(config), build(config, mesh)
        expected = adapted_logits(unsplit, mixed_rows(unsplit), kernels=False)
        fuse_layers(model)
        for kernels in (False, True):
            actual = adapted_logits(model, mixed_rows(model), kernels=kernels)
            assert (actual - expected).abs().max() < EXACT


@pytest.mark.slow
def test_tensor_ranks_apply_adapters_before_their_sum() -> None:
    ranks(2, check_tensor_parallel_models)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    "config", [CLASSIC, pytest.param(MODERN, marks=pytest.mark.slow)], ids=["classic", "modern"]
)
@pytest.mark.parametrize(
    "targets",
    [("linear_fc1",), ("linear_fc2",), ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")],
    ids=["fc1", "fc2", "all"],
)
def test_fp8_linears_apply_adapters_to_wide_rows(
    targets: tuple[str, ...], config: GPTConfig, kernels: bool
) -> None:
    """The activation between fc1 and fc2 is applied once, by whichever linear has an adapter."""
    model = build(config)
    adapter = model_adapter(model, targets=targets, strength=0.5)
    adapted = (AdaptedRows(adapter, torch.arange(24)),)
    expected = adapted_logits(model, adapted, kernels=False)
    fuse_layers(model, range(1, 4))
    base = adapted_logits(model, (), kernels=False)
    actual = adapted_logits(model, adapted, kernels=kernels)
    assert (actual - expected).std() < FP8_SPREAD_MAX * expected.std()
    # Rows without an adapter have the logits of the base model. fc2 quantizes its input rows after
    # they are rounded to the dtype of the model, which is fp64 here.
    assert (actual[24:] - base[24:]).std() < 0.01 * base.std()
