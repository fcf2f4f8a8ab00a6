"""Linears of the training kernels equal torch, in bf16 and against fp64, with low-rank products."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.cpu import kernels, training_linear
from gpt.linear_adapter import LinearTerm, OutputColumns
from gpt.model.activation import ACTIVATIONS
from gpt.model.adapted_linear import adapted_product
from tests.support.gradients import ERROR_MAX, output_and_gradients, relative_error
from tests.support.threads import num_threads

if shutil.which("cc") is None or kernels.isa_level() != kernels.ISA_LEVELS[-1]:
    pytest.skip("no C compiler, or no AVX512-bf16", allow_module_level=True)

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _single_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "gated_silu"])
@pytest.mark.parametrize(
    ("rows", "channels", "columns"), [(64, 32, 96), (65, 96, 32), (131, 128, 64), (300, 64, 160)]
)
@pytest.mark.parametrize("has_bias_and_residual", [True, False])
def test_linear_and_its_gradient_equal_torch(
    rows: int, channels: int, columns: int, activation: str | None, has_bias_and_residual: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, channels), torch.randn(columns, channels) * channels**-0.5
    outputs = output_columns(columns, activation)
    bias, residual = torch.randn(columns), torch.randn(rows, outputs)
    tensors = [tensor.to(BF16) for tensor in (x, weight, bias, residual)]
    dy = torch.randn(rows, outputs).to(BF16)

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> list[Tensor]:
        x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
        y = F.linear(x, weight, bias if has_bias_and_residual else None)
        y = y if activation is None else ACTIVATIONS[activation](y)
        if has_bias_and_residual:
            return output_and_gradients(y + residual, dy, x, residual)
        return output_and_gradients(y, dy, x)

    def by_kernels() -> list[Tensor]:
        x, weight, bias, residual = tensors
        x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
        assert training_linear.supports_matmul(x, weight)
        if has_bias_and_residual:
            y = training_linear.linear(x, weight, bias, activation, residual)
            return output_and_gradients(y, dy, x, residual)
        return output_and_gradients(
            training_linear.linear(x, weight, None, activation, None), dy, x
        )

    exact_tensors = by_torch(*(tensor.double() for tensor in tensors))
    values = by_kernels()
    for output, torch_output, exact in zip(values, by_torch(*tensors), exact_tensors, strict=True):
        error = relative_error(output, exact)
        assert error <= max(1.1 * relative_error(torch_output, exact), 1e-9)
        assert error < ERROR_MAX
    torch.set_num_threads(2)
    try:
        assert all(map(torch.equal, values, by_kernels()))
    finally:
        torch.set_num_threads(1)


def output_columns(columns: int, activation: str | None) -> int:
    """The number of output columns of a linear with this activation."""
    return columns // 2 if activation == "gated_silu" else columns


def test_only_frozen_bf16_weights_in_full_panels_are_supported() -> None:
    x, weight = torch.zeros(64, 32, dtype=BF16), torch.zeros(32, 32, dtype=BF16)
    supports = training_linear.supports_matmul
    assert supports(x, weight)
    assert not supports(x[:63], weight)
    assert not supports(x.float(), weight.float())
    assert not supports(x, weight.clone().requires_grad_())
    assert not supports(x, weight[:16])
    assert not supports(x, weight.t()[:, :31].t())
    kernels.force_isa_level("avx2")
    try:
        assert not supports(x, weight)
    finally:
        kernels.force_isa_level(None)


def term_columns(placement: str, columns: int) -> list[OutputColumns | None]:
    """The columns of the terms of a linear with this number of columns."""
    half, eighth = columns // 2, columns // 8
    placements: dict[str, list[OutputColumns | None]] = {
        "all": [None],
        "halves": [OutputColumns(i * half, half, columns, 1) for i in (0, 1)],
        "runs": [OutputColumns(i * eighth, eighth, 2 * eighth, 4) for i in (0, 1)],
        "a part": [OutputColumns(half, half // 2, columns, 1)],
    }
    return placements[placement]


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "gated_silu"])
@pytest.mark.parametrize("placement", ["all", "halves", "runs", "a part"])
@pytest.mark.parametrize("kind", ["lora", "dora", "output scales", "lora and output scales"])
@pytest.mark.parametrize(
    "sizes",  # Rows, channels, columns, rank and threads.
    [(64, 32, 96, 16, 2), (65, 96, 32, 24, 1), (263, 128, 64, 48, 2), (600, 64, 160, 5, 2)],
)
def test_linear_with_terms_and_its_gradients_equal_torch(
    sizes: tuple[int, ...], kind: str, placement: str, activation: str | None
) -> None:
    rows, channels, columns, rank, threads = sizes
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def random_term(part: OutputColumns | None) -> LinearTerm:
        width = columns if part is None else part.count * part.width
        a, b, factor = normal(rank, channels), normal(width, rank), normal(width)
        return LinearTerm(
            part,
            a * channels**-0.5 if "ora" in kind else None,
            b * rank**-0.5 if "ora" in kind else None,
            0.5,
            output_factor=factor if kind == "dora" else None,
            output_scale=factor if "output scales" in kind else None,
        )

    outputs = output_columns(columns, activation)
    x, residual = (normal(rows, width).to(BF16).requires_grad_() for width in (channels, outputs))
    weight, bias, dy = normal(columns, channels), normal(columns), normal(rows, outputs).to(BF16)
    weight, bias = (weight * channels**-0.5).to(BF16), bias.to(BF16)
    terms = [
        random_term(part).map_tensors(lambda tensor: tensor.requires_grad_())
        for part in term_columns(placement, columns)
    ]
    inputs = [x, residual, *(tensor for term in terms for tensor in term.tensors())]
    wide_terms = [
        term.map_tensors(lambda tensor: tensor.detach().double().requires_grad_()) for term in terms
    ]
    wide_x, wide_residual = (tensor.detach().double().requires_grad_() for tensor in (x, residual))
    wide_weight, wide_bias = weight.double(), bias.double()

    def by_torch(
        x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, terms: list[LinearTerm]
    ) -> list[Tensor]:
        y = adapted_product(x, [(None, terms)], lambda rows: rows @ weight.T, bias)
        y = (y if activation is None else ACTIVATIONS[activation](y)) + residual
        tensors = (tensor for term in terms for tensor in term.tensors())
        return output_and_gradients(y, dy, x, residual, *tensors)

    torch_values = by_torch(x, weight, bias, residual, terms)
    expected = by_torch(wide_x, wide_weight, wide_bias, wide_residual, wide_terms)
    assert training_linear.supports_matmul(x, weight) and training_linear.supports_terms(terms)

    def by_kernels(x: Tensor) -> Tensor:
        return training_linear.linear(x, weight, bias, activation, residual, terms)

    with num_threads(threads):
        actual = output_and_gradients(by_kernels(x), dy, *inputs)
        # Without the gradient of x, the other gradients are the same.
        frozen_x = output_and_gradients(by_kernels(x.detach()), dy, *inputs[1:])
        with torch.no_grad():
            without_grad = by_kernels(x)
    for value, torch_value, exact in zip(actual, torch_values, expected, strict=True):
        error = relative_error(value, exact)
        # With gates, the terms of a gradient may cancel each other: torch's error is larger, too.
        has_limit_of_torch = activation == "gated_silu"
        limit = relative_error(torch_value, exact) if has_limit_of_torch else 0.0
        assert error < max(ERROR_MAX, limit)
    assert all(map(torch.equal, frozen_x, [actual[0], *actual[2:]]))
    assert relative_error(without_grad, expected[0]) < ERROR_MAX


@pytest.mark.parametrize("activation", [None, "gelu", "gated_silu"])
@pytest.mark.parametrize("has_output_scale", [False, True])
@pytest.mark.parametrize(("rows", "threads"), [(64, 1), (96, 2), (305, 2)])
def test_linear_with_an_input_scale_and_its_gradients_equal_torch(
    rows: int, threads: int, has_output_scale: bool, activation: str | None
) -> None:
    draw = torch.Generator().manual_seed(5)
    channels, columns = 96, 64
    x, weight, dy = (
        torch.randn(shape, generator=draw).to(BF16)
        for shape in (
            (rows, channels),
            (columns, channels),
            (rows, output_columns(columns, activation)),
        )
    )
    weight *= channels**-0.5
    scale, factor = (torch.randn(size, generator=draw) for size in (channels, columns))
    inputs = [tensor.requires_grad_() for tensor in (x, scale, factor)[: 2 + has_output_scale]]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = (wide[0] * wide[1]) @ weight.double().T
    if has_output_scale:
        exact = exact * wide[2]
    expected = output_and_gradients(
        exact if activation is None else ACTIVATIONS[activation](exact), dy, *wide
    )
    terms = [LinearTerm(input_scale=scale, output_scale=factor if has_output_scale else None)]

    def by_kernels(x: Tensor) -> Tensor:
        return training_linear.linear(x, weight, None, activation, None, terms)

    with num_threads(threads):
        actual = output_and_gradients(by_kernels(x), dy, *inputs)
        # Without the gradient of x, the other gradients are the same, and vice versa.
        frozen_x = output_and_gradients(by_kernels(x.detach()), dy, *inputs[1:])
        terms = [term.map_tensors(torch.Tensor.detach) for term in terms]
        frozen_scales = output_and_gradients(by_kernels(x), dy, x)
    for value, reference in zip(actual, expected, strict=True):
        assert relative_error(value, reference) < ERROR_MAX
    assert all(map(torch.equal, frozen_x, [actual[0], *actual[2:]]))
    assert all(map(torch.equal, frozen_scales, actual[:2]))


def test_terms_that_one_product_and_one_factor_cannot_express_are_not_supported() -> None:
    term = LinearTerm(None, torch.zeros(4, 32), torch.zeros(32, 4), 0.5)
    columns = torch.ones(32)
    supports = training_linear.supports_terms
    assert supports([term])
    assert supports([term, replace(term, output_scale=columns)])
    assert supports([LinearTerm(input_scale=columns)])
    assert not supports([term, replace(term, scale=0.25)])
    assert not supports([replace(term, input_scale=columns)])
    assert not supports([replace(term, output_scale=columns), replace(term, output_factor=columns)])


@pytest.mark.parametrize("activation", ["gelu", "gated_silu"])
@pytest.mark.parametrize("kind", ["dora", "lora and output scales", "input and output scales"])
def test_the_number_of_threads_changes_no_bit(kind: str, activation: str) -> None:
    draw = torch.Generator().manual_seed(7)
    x, weight, dy = (
        torch.randn(size, generator=draw).to(BF16)
        for size in ((301, 96), (64, 96), (301, output_columns(64, activation)))
    )
    scale = torch.randn(96, generator=draw)
    a, b, factor = (torch.randn(size, generator=draw) for size in ((16, 96), (64, 16), (64,)))
    results = []
    for threads in (1, 2, 3):
        if kind == "input and output scales":
            inputs = [tensor.detach().requires_grad_() for tensor in (x, scale, factor)]
            term = LinearTerm(input_scale=inputs[1], output_scale=inputs[2])
        else:
            inputs = [tensor.detach().requires_grad_() for tensor in (x, a, b, factor)]
            own_factor = inputs[3] if kind == "dora" else None
            own_scale = None if kind == "dora" else inputs[3]
            term = LinearTerm(None, inputs[1], inputs[2], 0.5, own_factor, own_scale)
        with num_threads(threads):
            y = training_linear.linear(inputs[0], weight, None, activation, None, [term])
            results.append(output_and_gradients(y, dy, *inputs))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
