"""The kernels of linear adapters against their torch reference, in Triton's interpreter.

tests/gpt/linear/test_low_rank.py runs it in a process of its own.
"""

import pytest
import torch

from bench.suites.gpu_adapters import LinearShapes, LowRankSizes, run_suite
from tests.support.attention_cases import patch_interpreter
from tests.support.low_rank_batches import (
    KINDS,
    SHAPES,
    LowRankCase,
    check_case,
    check_replaced_descriptors,
    check_rows_are_independent,
    check_selected_rows,
)

patch_interpreter()
CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_terms_agree_with_torch(kind: str, bias: bool) -> None:
    for shape in SHAPES:
        check_case(LowRankCase(shape, (kind,), rows=5, bias=bias), CPU, torch.float32)


@pytest.mark.parametrize("rank", [1, 8, 16, 17, 33])
def test_ranks_agree_with_torch(rank: int) -> None:
    check_case(LowRankCase("qkv", ("lora parts",), rows=3, rank=rank), CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_kinds_of_terms_in_one_batch_agree_with_torch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check_case(LowRankCase(shape, KINDS, rows=40, bias=True), CPU, dtype)


def test_groups_of_many_rows_agree_with_torch() -> None:
    check_case(LowRankCase("qkv", ("lora", "dora parts"), rows=300), CPU, torch.float32)


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    check_rows_are_independent(CPU)


def test_selected_rows_agree_with_torch() -> None:
    check_selected_rows(CPU)


def test_the_same_launches_serve_other_adapters() -> None:
    check_replaced_descriptors(CPU)


def test_the_benchmark_measures_every_number_of_adapters() -> None:
    sizes = LowRankSizes("cpu", torch.float32, 3, (1, 2), (1, 2), 64)
    lines = list(run_suite((), sizes, {"tiny": LinearShapes(2, ((20, 16), (8, 12)))}))
    assert [str(line).partition(" of rank")[0] for line in lines[1:]] == [
        "tiny, 1 rows, 1 adapters",
        "tiny, 2 rows, 1 adapters",
        "tiny, 2 rows, 2 adapters",
    ]
