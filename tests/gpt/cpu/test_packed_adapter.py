"""Adapters in the packed GEMM: the reference in fp64, and rows alone and in mixed batches."""

import pytest
import torch

from gpt.cpu import int8_linear, kernels
from gpt.cpu.packed_adapter import PackedTerms
from gpt.linear_adapter import LinearTerm
from tests.support.packed_adapter_cases import (
    check_adapted_gemm,
    check_adapted_rows_are_independent,
    draw_case,
)

pytestmark = pytest.mark.skipif(
    kernels.isa_level() != kernels.ISA_LEVELS[-1],
    reason="a machine without AVX512-bf16 uses torch",
)


def test_adapted_gemm_equals_the_reference() -> None:
    check_adapted_gemm()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_rows_are_independent_of_other_rows_and_their_adapters(int8: bool, has_norm: bool) -> None:
    if int8 and not int8_linear.has_int8_gemm():
        pytest.skip("this machine has no int8 GEMM")
    check_adapted_rows_are_independent(int8=int8, has_norm=has_norm)


def test_prepared_terms_have_the_results_and_the_bytes_of_the_terms() -> None:
    case = draw_case(9, (96, 66), None)
    expected = case.output()
    prepared = [list(case.linear.prepare_terms(terms, torch.bfloat16)) for terms in case.adapters]
    assert torch.equal(case._replace(adapters=prepared).output(), expected)
    for terms, (packed,) in zip(case.adapters, prepared, strict=True):
        assert isinstance(packed, PackedTerms)
        # Of 66 columns, the panels have 96. A pair of ranks has two rows.
        matrices = [x for t in terms for x in (t.lora_a, t.lora_b) if x is not None]
        assert packed.nbytes <= 2 * sum(x.nbytes for x in matrices) + 12 * 96


def test_an_adapter_without_effect_changes_no_bit() -> None:
    case = draw_case(5, (96, 40), "gelu")
    base = case.linear.forward(case.x, case.bias, "gelu", None)
    zeros = LinearTerm(
        lora_a=torch.ones(2, 96).bfloat16(),
        lora_b=torch.zeros(40, 2).bfloat16(),
        output_factor=torch.ones(40),
        output_scale=torch.ones(40),
        input_scale=torch.ones(96),
    )
    adapted = case._replace(adapters=[[zeros]], row_adapters=torch.zeros(5, dtype=torch.long))
    assert torch.equal(adapted.output(), base)
