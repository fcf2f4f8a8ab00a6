"""The C library's experts equal, token by token, the sum of their experts' MLPs in fp64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpt.cpu import packed_linear
from gpt.cpu.int8_linear import Int8PackedLinear, has_int8_gemm, packed_bytes
from gpt.cpu.kernels import ISA_LEVELS, force_isa_level, isa_level
from gpt.cpu.packed_experts import ExpertLinears, PackedExperts
from gpt.cpu.packed_linear import (
    NO_LIMITS,
    Fp32PackedLinear,
    GateLimits,
    PackedLinear,
    packed_numel,
)
from gpt.model.activation import ACTIVATIONS, torch_activation
from tests.support.models import EXPERTS as MODEL

EXPERTS, TOPK, HIDDEN, COLUMNS = 6, 2, 72, 40  # Neither width is a multiple of a panel's columns.
# The largest permitted error, relative to the largest output. The activated rows and the outputs
# are rounded to bf16, each with a relative error of up to 2**-9. A wrong expert or weight has an
# error of about 1.
ERROR_MAX = {torch.bfloat16: 2.0**-7, torch.float32: 2e-6}


@pytest.fixture(params=ISA_LEVELS[1:], autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    force_isa_level(request.param)
    if isa_level() != request.param:
        force_isa_level(None)
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    force_isa_level(None)


def pack(weight: Tensor, *, gated: bool, limits: GateLimits = NO_LIMITS) -> PackedLinear:
    memory = torch.zeros(packed_numel(weight, gated=gated), dtype=weight.dtype)
    linear_type = PackedLinear if weight.dtype == torch.bfloat16 else Fp32PackedLinear
    packed = linear_type(weight, memory, gated=gated)
    packed.use_gate_limits(limits)
    return packed


class Layer:
    """Random experts, packed, and their exact outputs."""

    def __init__(
        self,
        activation: str,
        *,
        has_bias: bool,
        experts: int = EXPERTS,
        limits: GateLimits = NO_LIMITS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        gated = activation.startswith(packed_linear.GATED_PREFIX)
        self.config = MODEL.with_fields(
            activation=activation.removeprefix(packed_linear.GATED_PREFIX),
            gated=gated,
            activation_func_clamp_value=limits.limit,
            glu_linear_offset=limits.offset,
        )
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

        fc1_columns = COLUMNS * (1 + gated)
        self.tensors = [
            (
                draw(fc1_columns, HIDDEN),
                draw(fc1_columns) if has_bias else None,
                draw(HIDDEN, COLUMNS),
                draw(HIDDEN) if has_bias else None,
            )
            for _ in range(experts)
        ]
        self.packed = PackedExperts(
            [
                ExpertLinears(
                    pack(fc1, gated=gated, limits=limits),
                    fc1_bias,
                    pack(fc2, gated=False),
                    fc2_bias,
                )
                for fc1, fc1_bias, fc2, fc2_bias in self.tensors
            ],
            activation,
        )

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float64)
        for row in range(len(x)):
            for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
                fc1, fc1_bias, fc2, fc2_bias = (
                    None if tensor is None else tensor.double() for tensor in self.tensors[expert]
                )
                assert fc1 is not None and fc2 is not None
                hidden = fc1 @ x[row].double()
                hidden = torch_activation(
                    self.config, hidden if fc1_bias is None else hidden + fc1_bias
                )
                output = fc2 @ hidden
                y[row] += weight * (output if fc2_bias is None else output + fc2_bias)
        return y


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def routings(rows: int) -> dict[str, Tensor]:
    """Return the numbers of the experts of `rows` tokens, by name of the routing."""
    generator = torch.Generator().manual_seed(rows)
    spread = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :TOPK].contiguous()
    return {
        "spread": spread,
        "few experts": spread // 2 * 2 % EXPERTS * torch.tensor([1, 0]) + torch.tensor([0, 5]),
        "one pair of experts": torch.tensor([[3, 1]]).repeat(rows, 1),
    }


def check(layer: Layer, x: Tensor, ids: Tensor) -> None:
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) + 0.1
    got = layer.packed(x, ids, weights).double()
    exact = layer.exact(x, ids, weights)
    assert exact.std() > 0.02
    assert (got - exact).abs().max() <= ERROR_MAX[x.dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", ERROR_MAX)
@pytest.mark.parametrize("rows", [1, 2, 7, 61])
def test_outputs_of_all_routings_equal_the_mlps(rows: int, dtype: torch.dtype) -> None:
    layer = Layer("gated_silu", has_bias=True, dtype=dtype)
    for ids in routings(rows).values():
        check(layer, rows_of(rows, dtype), ids)


@pytest.mark.parametrize("dtype", ERROR_MAX)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [*sorted(ACTIVATIONS), "quick_gelu", "gated_quick_gelu"])
def test_all_activations_equal_the_mlps(
    activation: str, has_bias: bool, dtype: torch.dtype
) -> None:
    layer = Layer(activation, has_bias=has_bias, dtype=dtype)
    check(layer, rows_of(7, dtype), routings(7)["spread"])


@pytest.mark.parametrize("dtype", ERROR_MAX)
@pytest.mark.parametrize("limits", [GateLimits(0.4, 1.0), GateLimits(0.7), GateLimits(offset=-0.5)])
@pytest.mark.parametrize("activation", ["gated_quick_gelu", "gated_silu", "gated_gelu"])
def test_limited_gates_equal_the_mlps(
    activation: str, limits: GateLimits, dtype: torch.dtype
) -> None:
    layer = Layer(activation, has_bias=True, limits=limits, dtype=dtype)
    check(layer, rows_of(7, dtype), routings(7)["spread"])


@pytest.mark.parametrize("column", [3, COLUMNS + 3], ids=["gate", "up"])
def test_limits_keep_nan(column: int) -> None:
    layer = Layer("gated_quick_gelu", has_bias=True, limits=GateLimits(0.4, 1.0))
    bias = layer.tensors[1][1]
    assert bias is not None
    bias[column] = torch.nan
    ids = torch.tensor([[0, 2], [4, 1], [5, 3]])
    y = layer.packed(rows_of(3), ids, torch.ones(3, TOPK))
    assert y.isnan().all(-1).tolist() == [False, True, False]
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", ERROR_MAX)
def test_a_tokens_output_is_equal_in_every_batch(dtype: torch.dtype) -> None:
    layer, x = Layer("gated_silu", has_bias=True, dtype=dtype), rows_of(61, dtype)
    ids, weights = routings(61)["spread"], torch.rand(61, TOPK)
    batch = layer.packed(x, ids, weights)
    for row in (0, 13, 60):
        part = slice(row, row + 1)
        assert torch.equal(layer.packed(x[part], ids[part], weights[part]), batch[part])


@pytest.mark.parametrize("dtype", ERROR_MAX)
def test_more_pairs_than_are_computed_at_once(dtype: torch.dtype) -> None:
    layer = Layer("gated_silu", has_bias=False, dtype=dtype)
    rows = 4103  # 8,206 pairs; the library computes 8,194 at once.
    x, ids = rows_of(rows, dtype), routings(rows)["spread"]
    weights = torch.rand(rows, TOPK)
    y = layer.packed(x, ids, weights)
    for first, end in ((0, 7), (4090, rows)):
        part = slice(first, end)
        assert torch.equal(y[part], layer.packed(x[part], ids[part], weights[part]))


def test_no_tokens_have_no_outputs() -> None:
    empty = torch.empty(0, TOPK)
    assert Layer("gated_silu", has_bias=False).packed(rows_of(0), empty.long(), empty).shape == (
        0,
        HIDDEN,
    )


def test_int8_experts_equal_int8_linears(level: str) -> None:
    if not has_int8_gemm():
        pytest.skip("this CPU has no int8 GEMM")
    layer = Layer("gated_silu", has_bias=False)

    def pack_int8(weight: Tensor, *, gated: bool) -> Int8PackedLinear:
        memory = torch.zeros(packed_bytes(weight, gated=gated), dtype=torch.uint8)
        return Int8PackedLinear(weight, memory, gated=gated)

    linears = [
        ExpertLinears(pack_int8(fc1, gated=True), None, pack_int8(fc2, gated=False), None)
        for fc1, _, fc2, _ in layer.tensors
    ]
    x, ids = rows_of(61), routings(61)["spread"]
    weights = torch.rand(61, TOPK, generator=torch.Generator().manual_seed(2))
    got = PackedExperts(linears, "gated_silu")(x, ids, weights).float()
    want = torch.stack(
        [
            torch.stack(
                [
                    linears[expert]
                    .fc2(
                        linears[expert].fc1(row[None], None, "gated_silu", None), None, None, None
                    )[0]
                    .float()
                    for expert in experts
                ]
            ).T
            @ weight
            for row, experts, weight in zip(x, ids.tolist(), weights, strict=True)
        ]
    )
    assert (got - want).abs().max() <= ERROR_MAX[torch.bfloat16] * want.abs().max()
