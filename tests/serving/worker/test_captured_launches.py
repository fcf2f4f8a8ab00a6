"""The pass that a CUDA graph captures, on a fake device: it can be captured, with few launches."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from gpt.linear import unquantized_matmul
from gpt.model.gpt_model import GPT
from gpt.parallel import symmetric_memory
from gpt.sampling_params import SamplingParams
from serving.worker.cuda_graphs import GraphCaptureError
from tests.support.graph_steps import next_step, prefill_step
from tests.support.models import CONFIGS, EXPERTS

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="the fake device needs a CPU build of torch"
    ),
]

# By family, and by dtype of the linears: the maximum number of launches of a layer. A lower number
# makes decode steps faster, so lower the maximum with the number.
LAUNCHES_MAX = {
    "classic": {"bfloat16": 8, "float16": 8, "float32": 8, "fp8": 10},
    "llama": {"bfloat16": 10, "float16": 10, "float32": 10, "fp8": 10},
    "modern": {"bfloat16": 10, "float16": 10, "float32": 10, "fp8": 13},
    "odd": {"bfloat16": 11, "float16": 11, "float32": 11, "fp8": 11},
    "ALiBi": {"bfloat16": 8, "float16": 8, "float32": 8, "fp8": 10},
    # Experts in another dtype read values on the host.
    "experts": {"bfloat16": 21},
    "sigmoid experts": {"bfloat16": 21},
}
# The launches of a sampled step beyond those of a greedy step: the kernel of the sampler, and the
# store of the last tokens.
SAMPLING_LAUNCHES_MAX = 2
# The maximum number of launches of a layer of Llama's shape, on each of one or two tensor ranks.
LLAMA_LAUNCHES_MAX = 12


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize(
    ("family", "linears"),
    [(family, linears) for family, maxima in LAUNCHES_MAX.items() for linears in maxima],
)
def test_a_decode_pass_can_be_captured(family: str, linears: str, fp8_kv: bool) -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import FAMILIES, capture_graph

    fp8_linears = linears == "fp8"
    # fp8 matmuls need a model in bfloat16.
    dtype = torch.bfloat16 if fp8_linears else getattr(torch, linears)
    with fake_device() as device:
        launches = capture_graph(
            device, FAMILIES[family], dtype, fp8_linears=fp8_linears, fp8_kv=fp8_kv
        )
    assert 0 < len(launches) <= LAUNCHES_MAX[family][linears], launches


# By the implementation of the all-reduce: the launch of a sum.
SUM_LAUNCHES = {
    "nccl": "all_reduce",
    "one_shot": "one_shot_all_reduce",
    "two_shot": "two_shot_all_reduce_",
    "multimem": "multimem_all_reduce_",
}


@pytest.mark.parametrize("fp8_linears", [False, True])
@pytest.mark.parametrize(
    ("all_reduce", "rank", "few_rows_kernel"),
    [
        ("nccl", 0, False),
        ("nccl", 1, True),
        ("one_shot", 0, True),
        ("one_shot", 1, False),
        ("two_shot", 0, False),
        ("multimem", 0, False),
    ],
)
def test_a_layer_of_two_tensor_ranks_has_few_launches_and_no_copies(
    all_reduce: str,
    rank: int,
    fp8_linears: bool,
    few_rows_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.support.fake_device import DEVICE, fake_device
    from tests.support.fake_device_runners import FAMILIES, capture_graph
    from tests.support.stub_collectives import stub_collectives, stub_mesh, with_symmetric_memory

    if few_rows_kernel:
        monkeypatch.setattr(unquantized_matmul, "WEIGHT_BYTES_MIN", 0)
    bytes_max = 1 << 20 if all_reduce == "one_shot" else 0
    with fake_device() as device, stub_collectives(device.launch):
        mesh = stub_mesh(DEVICE, 2, rank)
        if all_reduce != "nccl":
            monkeypatch.setattr(symmetric_memory, "ONE_SHOT_BYTES_MAX", {2: bytes_max})
            mesh = with_symmetric_memory(mesh, device.launch, multicast=all_reduce == "multimem")
        launches = capture_graph(
            device, FAMILIES["llama"], torch.bfloat16, mesh, fp8_linears=fp8_linears
        )
    assert 0 < len(launches) <= LLAMA_LAUNCHES_MAX, launches
    sums = [name for name in launches if "all_reduce" in name]
    assert sums == [SUM_LAUNCHES[all_reduce]] * 2
    assert not any("copy" in name or "clone" in name for name in launches)


@pytest.mark.parametrize(("family", "activation_launches"), [("classic", 0), ("llama", 1)])
def test_a_decode_pass_with_matmuls_of_few_rows_can_be_captured(
    family: str, activation_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import FAMILIES, capture_graph

    monkeypatch.setattr(unquantized_matmul, "WEIGHT_BYTES_MIN", 0)
    with fake_device() as device:
        launches = capture_graph(device, FAMILIES[family], torch.bfloat16)
    assert 0 < len(launches) <= LAUNCHES_MAX[family]["bfloat16"] - activation_launches


def test_every_config_is_captured() -> None:
    from tests.support.fake_device_runners import FAMILIES

    # Layers whose norms, activation or factors the fused linears do not compute have more launches.
    names = CONFIGS.keys() - {"layered", "post norms", "sinks", "multipliers", "xIELU"}
    assert all(CONFIGS[name] in FAMILIES.values() for name in names)
    assert FAMILIES.keys() == LAUNCHES_MAX.keys()


@pytest.mark.parametrize("tp", [1, 2])
def test_sampling_adds_few_launches_to_a_replayed_step(tp: int) -> None:
    from tests.support.fake_device import DEVICE, fake_device
    from tests.support.fake_device_runners import FAMILIES, make_runner
    from tests.support.stub_collectives import stub_collectives, stub_mesh

    def replay_launches(rules: SamplingParams) -> int:
        with fake_device() as device, stub_collectives(device.launch):
            # A replay runs the captured work again, so its launches are counted in both steps.
            runner = make_runner(
                FAMILIES["llama"],
                torch.bfloat16,
                mesh=None if tp == 1 else stub_mesh(DEVICE, tp),
                capturer=lambda work: work,
            )
            assert runner._graphs is not None
            runner._graphs.capture_next()
            prefill = prefill_step([rules] * 4, blocks=4)
            outcome = runner.run_step(prefill)
            assert outcome is not None
            decode = next_step(prefill, outcome, lambda slot, token: -1)
            with device.counted() as counts:
                outcome = runner.run_step(decode)
            assert outcome is not None and outcome.replayed
        return len(counts.launches)

    rules = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=1)
    launches = replay_launches(rules) - replay_launches(SamplingParams())
    assert 0 < launches <= SAMPLING_LAUNCHES_MAX


def copy_from_host(x: Tensor) -> Tensor:
    return x + torch.tensor([0.0], device=x.device)


def read_on_host(x: Tensor) -> Tensor:
    return x * float(x.sum())


def copy_to_host(x: Tensor) -> Tensor:
    return x + x.cpu().to(x.device)


@pytest.mark.parametrize("operation", [copy_from_host, read_on_host, copy_to_host])
def test_an_operation_that_needs_the_host_is_refused(
    operation: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.fake_device import CaptureForbids, fake_device
    from tests.support.fake_device_runners import FAMILIES, capture_graph

    compute_logits = GPT.compute_logits_on_first_rank
    assert callable(operation)
    monkeypatch.setattr(
        GPT,
        "compute_logits_on_first_rank",
        lambda model, x, batch: operation(compute_logits(model, x, batch)),
    )
    with fake_device() as device, pytest.raises(CaptureForbids, match="host"):
        capture_graph(device, FAMILIES["classic"], torch.bfloat16)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import capture_graph

    with fake_device() as device, pytest.raises(GraphCaptureError, match=r"aten\.nonzero"):
        capture_graph(device, EXPERTS, torch.float16)
