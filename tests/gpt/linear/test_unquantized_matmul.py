"""Unquantized matmuls: which of them the Triton kernel computes, and the kernels without a GPU."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt.linear import unquantized_matmul
from gpt.linear.unquantized_matmul import COMPILED_ROWS, ROWS_MAX, UnquantizedMatmul
from tests.support.interpreted_cases import check_interpreted_cases
from tests.support.triton_compiled import SHARED_BYTES, recorded_launches

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: make tools"
)
CHANNELS = 2048
# Weight (rows, channels), whether there is a bias, and the activation: the linears of GPT and Llama
# models, and a weight of odd sizes.
LINEARS = (
    (12288, 4096, True, None),
    (16384, 4096, True, "gelu_tanh"),
    (4096, 4096, False, None),
    (28672, 4096, False, "gated_silu"),
    (51200, 4096, False, None),
    (1234, 4112, True, "gelu"),
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on a GPU of compute capability 9.0, without memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(unquantized_matmul, "triton_unavailable_reason", lambda _: None)
    with FakeTensorMode():
        yield


def weight_on_gpu(
    rows: int = CHANNELS, channels: int = CHANNELS, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.empty(rows, channels, dtype=dtype, device="cuda")


def uses_kernel(weight: Tensor) -> bool:
    return UnquantizedMatmul(weight)._multiply_few_rows is not None


@needs_triton
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_multiplies_large_unquantized_weights(dtype: torch.dtype) -> None:
    assert uses_kernel(weight_on_gpu(dtype=dtype))


@needs_triton
@pytest.mark.usefixtures("hopper")
def test_torch_multiplies_other_weights() -> None:
    assert not uses_kernel(weight_on_gpu(dtype=torch.float32))
    assert not uses_kernel(weight_on_gpu(rows=16))
    assert not uses_kernel(weight_on_gpu(channels=CHANNELS + 8))
    assert not uses_kernel(weight_on_gpu().t())
    longer = weight_on_gpu(rows=CHANNELS + 1)
    assert not uses_kernel(longer.as_strided((CHANNELS, CHANNELS), (CHANNELS, 1), storage_offset=1))
    assert not uses_kernel(torch.empty(CHANNELS, CHANNELS, dtype=torch.bfloat16))


@needs_triton
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_torch_multiplies_on_a_gpu_without_block_sizes_for_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not uses_kernel(weight_on_gpu())


@needs_triton
@pytest.mark.usefixtures("hopper")
def test_torch_multiplies_without_a_working_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquantized_matmul, "triton_unavailable_reason", lambda _: "no compiler")
    assert not uses_kernel(weight_on_gpu())


def test_the_first_call_compiles_the_kernels_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_rows: list[int] = []

    def multiply(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        out: Tensor | None,
    ) -> Tensor:
        launched_rows.append(len(x))
        return unquantized_matmul.multiply_in_torch(x, weight, bias, activation, out)

    monkeypatch.setattr(unquantized_matmul, "_few_rows_kernel_for", lambda _: multiply)
    weight, bias = torch.randn(6, 4), torch.randn(6)
    matmul = UnquantizedMatmul(weight)
    for rows in (ROWS_MAX + 1, 1, ROWS_MAX, 0):
        x = torch.randn(rows, 4)
        assert torch.equal(
            matmul(x, bias, "gated_silu"),
            unquantized_matmul.multiply_in_torch(x, weight, bias, "gated_silu"),
        )
    assert launched_rows == [*COMPILED_ROWS, 1, ROWS_MAX]


def launch_matmuls(dtype: torch.dtype, row_counts: Iterable[int]) -> None:
    """Launch the kernels of all LINEARS, with each number of rows."""
    from gpt.linear import triton_few_rows

    for columns, channels, has_bias, activation in LINEARS:
        weight = torch.empty(columns, channels, dtype=dtype)
        bias = torch.empty(columns, dtype=dtype) if has_bias else None
        for rows in row_counts:
            triton_few_rows.multiply(weight[:rows], weight, bias, activation)


@needs_triton
def test_two_kernels_compute_every_number_of_rows() -> None:
    with recorded_launches() as launches:
        launch_matmuls(torch.bfloat16, COMPILED_ROWS)
        compiled = set(launches)
        names = [launch.name for launch in launches.values()]
        # The two linears without a bias and an activation differ in the number of columns only.
        assert names.count("multiply_single_row") == len(LINEARS) - 1
        launch_matmuls(torch.bfloat16, range(1, ROWS_MAX + 1))
        assert set(launches) == compiled


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_compile_for_a_gpu_without_spills(dtype: torch.dtype) -> None:
    with recorded_launches() as launches:
        launch_matmuls(dtype, COMPILED_ROWS)
    for launch in launches.values():
        resources = launch.compile()
        assert resources.spilled_bytes == 0
        # Two thread blocks fit on a multiprocessor.
        assert 2 * resources.shared_bytes <= SHARED_BYTES[90]


@pytest.mark.slow
@needs_triton
def test_interpreted_kernels_equal_the_torch_reference() -> None:
    check_interpreted_cases("tests/support/few_rows_cases.py")
