"""Checks of adapters in the packed GEMM for every instruction set: the tests of each set run them.

Each check compares with the reference in fp64, or with the same kernel on one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.cpu import int8_linear, packed_linear
from gpt.cpu.int8_linear import Int8PackedLinear
from gpt.cpu.packed_linear import CpuNorm, PackedLinear
from gpt.linear.cpu_linear import CpuLinear
from gpt.linear_adapter import LinearTerm, OutputColumns
from gpt.model.activation import ACTIVATIONS
from gpt.model.adapted_linear import RowTerms, adapted_product
from tests.support.tolerance import activated, assert_within, roundoff, sum_limit

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A linear, its input, and adapters for some rows of the input."""

    linear: CpuLinear
    weight: Tensor
    x: Tensor
    bias: Tensor | None
    activation: str | None
    residual: Tensor | None
    adapters: list[list[LinearTerm]]
    # The adapter of each row; -1: none.
    row_adapters: Tensor

    def terms(self) -> RowTerms:
        return [
            ((self.row_adapters == index).nonzero().flatten(), adapter)
            for index, adapter in enumerate(self.adapters)
        ]

    def output(self) -> Tensor:
        return self.linear.forward_adapted(
            self.x, self.bias, self.activation, self.residual, self.terms()
        )

    def row(self, row: int) -> "Case":
        """The row alone, with its adapter alone."""
        adapter = int(self.row_adapters[row])
        return self._replace(
            x=self.x[row : row + 1],
            residual=None if self.residual is None else self.residual[row : row + 1],
            adapters=self.adapters[adapter : adapter + 1] if adapter >= 0 else [],
            row_adapters=torch.tensor([min(adapter, 0)]),
        )


def draw_adapters(
    columns: int, channels: int, generator: torch.Generator
) -> list[list[LinearTerm]]:
    """Adapters of all kinds for a linear with these output columns (of a gated one, all)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def factors(count: int) -> Tensor:
        return (1 + 0.3 * normal(count)).to(BF16)

    def low_rank(rank: int, part: OutputColumns | None = None, scale: float = 0.7) -> LinearTerm:
        rows = columns if part is None else part.width * part.count
        a = (normal(rank, channels) / channels**0.5).to(BF16)
        return LinearTerm(part, a, normal(rows, rank).to(BF16), scale)

    third = columns // 3
    # Runs of columns that begin and end within panels, as the queries, keys and values of groups.
    runs = [
        OutputColumns(offset, width, third, 3) for offset, width in ((0, third - 2), (third - 2, 1))
    ]
    halves = [
        OutputColumns(0, columns // 2, columns, 1),
        OutputColumns(columns // 2, 1, columns, 1),
    ]
    # Of a gated linear, the gate and the part that it multiplies.
    gate, other = (
        OutputColumns(offset, columns // 2, columns // 2, 1) for offset in (0, columns // 2)
    )
    return [
        [low_rank(16)],
        [low_rank(16, gate), low_rank(16, other)],
        [low_rank(3, other, 0.2), replace(low_rank(3, gate), output_factor=factors(columns // 2))],
        [low_rank(4, gate), low_rank(6, other)],
        [low_rank(3, gate), low_rank(4, other)],
        [low_rank(1), replace(low_rank(4), lora_a=None, lora_b=None)],
        [low_rank(rank, part, 1 / rank) for rank, part in zip((3, 21), runs, strict=True)],
        [replace(low_rank(5), output_factor=factors(columns))],
        [replace(low_rank(2, part), output_factor=factors(part.width)) for part in halves],
        [LinearTerm(output_scale=factors(columns))],
        [LinearTerm(input_scale=factors(channels))],
        [replace(low_rank(40), input_scale=factors(channels), output_scale=factors(columns))],
        [LinearTerm(runs[0], output_scale=factors(3 * (third - 2)))],
    ]


def draw_case(
    rows: int,
    shape: tuple[int, int],
    activation: str | None,
    *,
    has_bias: bool = True,
    has_residual: bool = False,
    has_norm: bool = False,
    int8: bool = False,
    run_rows: int = 1,
) -> Case:
    """`run_rows`: adjacent rows with the same adapter."""
    channels, columns = shape
    gated = activation is not None and activation.startswith(packed_linear.GATED_PREFIX)
    generator = torch.Generator().manual_seed(rows * channels)
    weight = torch.randn(columns * (1 + gated), channels, generator=generator).to(BF16)
    adapters = draw_adapters(len(weight), channels, generator)
    packed: PackedLinear
    if int8:
        memory = torch.empty(int8_linear.packed_bytes(weight, gated=gated), dtype=torch.uint8)
        packed = Int8PackedLinear(weight, memory, gated=gated)
    else:
        memory = torch.empty(packed_linear.packed_numel(weight, gated=gated), dtype=BF16)
        packed = PackedLinear(weight, memory, gated=gated)
    norm = None
    if has_norm:
        scale, shift = torch.randn(2, channels, generator=generator)
        norm = CpuNorm(scale, shift, 1e-5, rms=False)
    draw = torch.randint(-1, len(adapters), (-(-rows // run_rows),), generator=generator)
    return Case(
        CpuLinear(packed, norm),
        weight,
        torch.randn(rows, channels, generator=generator).to(BF16),
        torch.randn(len(weight), generator=generator).to(BF16) if has_bias else None,
        activation,
        torch.randn(rows, columns, generator=generator).to(BF16) if has_residual else None,
        adapters,
        draw.repeat_interleave(run_rows)[:rows],
    )


def exact_output(case: Case) -> tuple[Tensor, Tensor]:
    """The output of the reference in fp64, and the error limit of the kernel's."""
    x, weight, terms = case.x.double(), case.weight.double(), case.terms()
    bias = None if case.bias is None else case.bias.double()

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, terms: RowTerms) -> Tensor:
        # Rows are rounded to bf16 after an input scale.
        return adapted_product(x, terms, lambda rows: rows.to(BF16).double() @ weight.T, bias)

    y = product(x, weight, bias, [(rows, map_terms(group, Tensor.double)) for rows, group in terms])
    magnitudes = product(
        x.abs(),
        weight.abs(),
        None if bias is None else bias.abs(),
        [(rows, map_terms(group, lambda tensor: tensor.double().abs())) for rows, group in terms],
    )
    # The kernel rounds u to bf16, adds all terms in fp32, and rounds each operation after the sums.
    error = roundoff(BF16) * low_rank_magnitudes(case)
    error = error + sum_limit(magnitudes, case.x.shape[1] + 64) + 4 * roundoff(FP32) * magnitudes
    if case.activation is not None:
        y, error = activated(y, error, case.activation)
    if case.residual is not None:
        y = y + case.residual.double()
        error = error + roundoff(FP32) * (y.abs() + error)
    return y, error + roundoff(BF16) * (y.abs() + error)


def map_terms(
    terms: Sequence[LinearTerm], function: Callable[[Tensor], Tensor]
) -> list[LinearTerm]:
    return [term.map_tensors(function) for term in terms]


def low_rank_magnitudes(case: Case) -> Tensor:
    """The low-rank products with absolute values of u, B and all factors."""
    total = torch.zeros(len(case.x), len(case.weight)).double()

    def zeros(_rows: Tensor) -> Tensor:
        return torch.zeros_like(total)

    for rows, group in case.terms():
        for index, term in enumerate(group):
            if term.lora_a is None:
                continue
            u = (case.x.double() @ term.lora_a.double().T).abs()
            magnitudes = [
                replace(other, lora_a=None, lora_b=None, input_scale=None)
                for other in map_terms(group, lambda tensor: tensor.double().abs())
            ]
            identity = torch.eye(len(term.lora_a)).double()
            b = cast(Tensor, term.lora_b).double().abs()
            magnitudes[index] = replace(magnitudes[index], lora_a=identity, lora_b=b)
            total += adapted_product(u, [(rows, magnitudes)], zeros, None)
    return total


@given(
    st.sampled_from([1, 5, 6, 13, 31, 40]),
    st.sampled_from([(2, 12), (64, 32), (96, 33), (130, 100), (2048, 40)]),
    st.sampled_from([None, *ACTIVATIONS]),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([1, 4, 30]),
)
@settings(max_examples=25, deadline=None)
def check_adapted_gemm(
    rows: int,
    shape: tuple[int, int],
    activation: str | None,
    parts: tuple[bool, bool],
    run_rows: int,
) -> None:
    has_bias, has_residual = parts
    case = draw_case(
        rows,
        shape,
        activation,
        has_bias=has_bias,
        has_residual=has_residual,
        run_rows=run_rows,
    )
    assert_within(case.output(), *exact_output(case))


def check_adapted_rows_are_independent(*, int8: bool, has_norm: bool) -> None:
    """A row's result depends neither on the other rows and their adapters nor on the threads."""
    threads = torch.get_num_threads()
    try:
        for activation, run_rows in ((None, 1), ("gelu", 5), ("gated_silu", 1), ("gated_silu", 25)):
            case = draw_case(
                61, (130, 100), activation, has_norm=has_norm, int8=int8, run_rows=run_rows
            )
            outputs = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                outputs.append(case.output())
            assert all(torch.equal(output, outputs[0]) for output in outputs)
            base = case.linear.forward(case.x, case.bias, activation, None)
            for row in range(61):
                has_adapter = int(case.row_adapters[row]) >= 0
                assert torch.equal(case.row(row).output()[0], outputs[0][row])
                assert torch.equal(base[row], outputs[0][row]) != has_adapter
    finally:
        torch.set_num_threads(threads)
