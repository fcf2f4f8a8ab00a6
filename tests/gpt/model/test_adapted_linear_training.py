"""The autograd function of adapted linears equals torch's derivatives of the reference."""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter, LinearTerm
from gpt.linear_parts import split_key
from gpt.model.adapted_linear import adapted_product
from gpt.model.adapted_linear_training import adapted_linear, supports_terms
from gpt.model.linear import TrainingLinear
from gpt.parallel.adaptable_linears import adaptable_linears
from gpt.parallel.adapter_sharding import shard_linear_adapter
from tests.support.linear_adapters import METHODS, random_linears
from tests.support.models import MODERN

ROWS = 9
LAYER = "decoder.layers.0."


def terms_of(config: GPTConfig, changes: dict[str, LinearAdapter], name: str) -> list[LinearTerm]:
    linear = adaptable_linears(config)[name]
    return [
        shard_linear_adapter(change, linear, split_key(key)[1], config, rank=0, tp=1)
        for key, change in changes.items()
        if split_key(key)[0] == name
    ]


def trainable(term: LinearTerm, dtype: torch.dtype) -> LinearTerm:
    """The term with leaves that require gradients."""
    tensors = {
        field.name: getattr(term, field.name).to(dtype, copy=True).requires_grad_()
        for field in fields(term)
        if isinstance(getattr(term, field.name), Tensor)
    }
    return replace(term, **tensors)


def gradients(y: Tensor, x: Tensor, residual: Tensor, terms: Sequence[LinearTerm]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    leaves = [
        getattr(term, field.name)
        for term in terms
        for field in fields(term)
        if isinstance(getattr(term, field.name), Tensor)
    ]
    return [y, *torch.autograd.grad((y * weights).sum(), [x, residual, *leaves])]


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "linear", ["self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"]
)
def test_outputs_and_gradients_equal_the_reference(
    linear: str, method: str, has_bias: bool, by_parts: bool
) -> None:
    name = LAYER + linear
    changes = random_linears(MODERN, method, by_parts=by_parts)
    terms = [trainable(term, torch.float64) for term in terms_of(MODERN, changes, name)]
    adaptable = adaptable_linears(MODERN)[name]
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    weight = normal(adaptable.out_features, adaptable.in_features)
    bias = normal(adaptable.out_features) if has_bias else None
    x = normal(ROWS, adaptable.in_features).requires_grad_()
    residual = normal(ROWS, adaptable.out_features).requires_grad_()
    reference = residual + adapted_product(x, [(None, terms)], lambda rows: rows @ weight.T, bias)
    expected = gradients(reference, x, residual, terms)

    assert supports_terms(weight, [(None, terms)])
    actual = gradients(
        adapted_linear(x, weight, bias, residual, [(None, terms)]), x, residual, terms
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


ROWS_OF_METHODS = {
    "consecutive": ([0, 1], [2, 3, 4], [5], [6, 7, 8]),
    "with rows of the base": ([0, 1], [3, 4], [5], [7, 8]),
    "in any order": ([0, 8], [1, 4, 7], [2], [3, 5, 6]),
}


@pytest.mark.parametrize("placement", ROWS_OF_METHODS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("linear", ["self_attention.linear_qkv", "mlp.linear_fc2"])
def test_rows_with_different_adapters_equal_the_reference(
    linear: str, has_bias: bool, placement: str
) -> None:
    name = LAYER + linear
    groups: list[tuple[Tensor | None, list[LinearTerm]]] = []
    for number, (method, rows) in enumerate(
        zip(("lora", "dora", "ia3", "lora"), ROWS_OF_METHODS[placement], strict=True)
    ):
        changes = random_linears(MODERN, method, by_parts=number == 3)
        terms = [trainable(term, torch.float64) for term in terms_of(MODERN, changes, name)]
        groups.append((torch.tensor(rows), terms))
    adaptable = adaptable_linears(MODERN)[name]
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    weight = normal(adaptable.out_features, adaptable.in_features)
    bias = normal(adaptable.out_features) if has_bias else None
    x = normal(ROWS, adaptable.in_features).requires_grad_()
    residual = normal(ROWS, adaptable.out_features).requires_grad_()
    all_terms = [term for _, terms in groups for term in terms]
    reference = residual + adapted_product(x, groups, lambda rows: rows @ weight.T, bias)
    expected = gradients(reference, x, residual, all_terms)

    assert supports_terms(weight, groups)
    output = adapted_linear(x, weight, bias, residual, groups)
    actual = gradients(output, x, residual, all_terms)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("linear", ["self_attention.linear_qkv", "mlp.linear_fc1"])
def test_the_tensors_of_a_term_get_gradients_in_their_own_dtype(
    linear: str, method: str, by_parts: bool
) -> None:
    """In bf16, with as many rows as the C library needs; the reference is fp32."""
    config = MODERN.with_fields(hidden_size=64, kv_channels=32, ffn_hidden_size=96)
    name = LAYER + linear
    terms = [
        trainable(term, torch.float32)
        for term in terms_of(config, random_linears(config, method, by_parts=by_parts), name)
    ]
    adaptable = adaptable_linears(config)[name]
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(adaptable.out_features, 64, generator=draw).bfloat16()
    x = torch.randn(96, 64, generator=draw).bfloat16().requires_grad_()
    residual = torch.randn(96, adaptable.out_features, generator=draw).bfloat16().requires_grad_()
    wide_x, wide_residual = (y.detach().float().requires_grad_() for y in (x, residual))
    wide = wide_residual + adapted_product(
        wide_x, [(None, terms)], lambda rows: rows @ weight.float().T, None
    )
    expected = gradients(wide, wide_x, wide_residual, terms)
    rows_and_terms = [(None, terms)]
    outputs = (
        TrainingLinear(weight).forward_adapted(x, None, None, residual, rows_and_terms),
        adapted_linear(x, weight, None, residual, rows_and_terms),
    )
    for output in outputs:
        actual = gradients(output, x, residual, terms)
        assert {y.dtype for y in actual[:3]} == {torch.bfloat16}
        assert {grad.dtype for grad in actual[3:]} == {torch.float32}
        for value, reference in zip(actual, expected, strict=True):
            error = (value.detach().float() - reference.detach()).norm() / reference.detach().norm()
            assert float(error) < 2e-2


def test_the_gradient_of_an_input_that_needs_none_is_not_computed() -> None:
    name = LAYER + "mlp.linear_fc1"
    terms = [
        trainable(term, torch.float64) for term in terms_of(MODERN, random_linears(MODERN), name)
    ]
    weight = torch.randn(MODERN.ffn_hidden_size * 2, 32, dtype=torch.float64)
    y = adapted_linear(
        torch.randn(ROWS, 32, dtype=torch.float64), weight, None, None, [(None, terms)]
    )
    y.sum().backward()
    assert all(term.lora_a is not None and term.lora_a.grad is not None for term in terms)
