"""Grouped experts on a CUDA device: they equal torch, and no operation waits for the device."""

import pytest
import torch

from gpt.linear import grouped_experts
from gpt.linear import selector as linear_selector
from gpt.linear.grouped_experts import GroupedExperts
from gpt.model.moe import TorchExperts
from gpt.parallel.mesh import Mesh
from gpt.triton_runtime.availability import triton_unavailable_reason
from tests.support.experts_cases import (
    CONFIGS,
    EXCESS_MAX,
    ROW_COUNTS,
    SMALL,
    excess_errors,
    make_backend,
    moe_layer,
    routings,
)
from tests.support.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CUDA = torch.device("cuda")
IDS = torch.arange(24).view(2, 12)


def require_grouped_kernel() -> None:
    reason = grouped_experts.unsupported_device_reason(CUDA) or triton_unavailable_reason(CUDA)
    if reason is not None:
        pytest.skip(f"grouped experts are unavailable: {reason}")


# By implementation: the largest mean number of pairs per expert that Triton computes.
IMPLEMENTATIONS = {"torch": 0, "triton": 10_000}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute all experts with one implementation."""
    require_grouped_kernel()
    name: str = request.param
    monkeypatch.setattr(grouped_experts, "TRITON_PAIRS_PER_EXPERT", IMPLEMENTATIONS[name])
    return name


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_experts_in_bf16_equal_the_torch_reference(
    name: str, rows: int, implementation: str
) -> None:
    ratios = excess_errors(CONFIGS[name], rows, "cuda")
    print(f"{implementation}, {name}, {rows} rows: error relative to the loop {ratios}")
    assert max(ratios.values()) < EXCESS_MAX


def test_ranks_compute_only_their_experts(implementation: str) -> None:
    config = CONFIGS["many experts"]
    # Without process groups: the compared functions do not communicate.
    meshes = [Mesh(CUDA, dp=3, ep=3, rank=rank) for rank in range(3)]
    backends = [
        make_backend(GroupedExperts, moe_layer(build(config, mesh, dtype=torch.bfloat16)))
        for mesh in (Mesh.single("cuda"), *meshes)
    ]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, config.hidden_size, generator=generator).to(CUDA, torch.bfloat16)
    logits = routings(64, config.num_experts)["all experts"].to(CUDA, torch.bfloat16)
    outputs = [
        getattr(backend, f"_compute_in_{implementation}")(x, logits)[1] for backend in backends
    ]
    assert outputs[0].isfinite().all()
    assert torch.allclose(sum(outputs[1:]), outputs[0], rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_experts_never_wait_for_the_device(name: str) -> None:
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.bfloat16)
    grouped = make_backend(GroupedExperts, moe_layer(model))
    logits = routings(7, model.config.num_experts)["all experts"].to(CUDA, torch.bfloat16)
    x = torch.randn(7, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    want = grouped.forward(x, logits, 7)  # Compiles the kernels.
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = grouped.forward(x, logits, 7)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(got, want)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_not_finite_changes_no_other_token(number: float) -> None:
    model = build(CONFIGS["many experts"], Mesh.single("cuda"), dtype=torch.bfloat16)
    grouped = make_backend(GroupedExperts, moe_layer(model))
    logits = routings(5, model.config.num_experts)["all experts"].to(CUDA, torch.bfloat16)
    x = torch.randn(5, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    want = grouped.forward(x, logits, 5)
    x[2] = logits[2] = number
    got = grouped.forward(x, logits, 5)
    assert not got[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.allclose(got[others], want[others], rtol=2**-6, atol=2**-6)


def test_a_model_with_grouped_experts_is_as_close_to_fp64_as_one_without() -> None:
    require_grouped_kernel()
    exact = build(SMALL).logits(IDS)
    model = build(SMALL, Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = model.logits(IDS.cuda()).cpu()
    linear_selector.apply_backend(model, "auto")
    assert isinstance(moe_layer(model).experts_backend, GroupedExperts)
    grouped = model.logits(IDS.cuda()).cpu()
    assert (grouped - exact).std() < 1.2 * (plain - exact).std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_in_other_dtypes_are_computed_one_after_the_other(dtype: torch.dtype) -> None:
    model = build(SMALL, Mesh.single("cuda"), dtype=dtype)
    linear_selector.apply_backend(model, "auto")
    assert isinstance(moe_layer(model).experts_backend, TorchExperts)
    reason = grouped_experts.unsupported_reason(model)
    assert reason is not None and "bfloat16" in reason


def test_stacking_keeps_the_bytes_of_the_weights_and_one_layer_in_memory_twice() -> None:
    require_grouped_kernel()
    config = SMALL.with_fields(
        num_layers=6, moe_layers=(True,) * 6, hidden_size=512, moe_ffn_hidden_size=1024
    )
    model = build(config, Mesh.single("cuda"), dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    layer_bytes = sum(p.nbytes for p in moe_layer(model).experts.parameters())
    torch.cuda.reset_peak_memory_stats()
    linear_selector.apply_backend(model, "auto")
    slack = 4 << 20
    assert torch.cuda.memory_allocated() < before + slack
    assert torch.cuda.max_memory_allocated() < before + layer_bytes + slack
