"""The pass that a CUDA graph captures, on a fake device: it can be captured, with few launches."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from gpt.model.gpt_model import GPT
from serving.worker.cuda_graphs import GraphCaptureError
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
    "llama": {"bfloat16": 10, "float16": 10, "float32": 10, "fp8": 12},
    "modern": {"bfloat16": 10, "float16": 10, "float32": 10, "fp8": 14},
    "odd": {"bfloat16": 11, "float16": 11, "float32": 11, "fp8": 12},
}


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("linears", ["bfloat16", "float16", "float32", "fp8"])
@pytest.mark.parametrize("family", LAUNCHES_MAX)
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
    assert 0 < launches <= LAUNCHES_MAX[family][linears]


def test_every_dense_config_is_captured() -> None:
    from tests.support.fake_device_runners import FAMILIES

    dense = [config for config in CONFIGS.values() if not config.num_experts]
    assert all(config in FAMILIES.values() for config in dense)
    assert FAMILIES.keys() == LAUNCHES_MAX.keys()


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

    compute_logits = GPT.compute_logits
    assert callable(operation)
    monkeypatch.setattr(
        GPT, "compute_logits", lambda model, x, batch: operation(compute_logits(model, x, batch))
    )
    with fake_device() as device, pytest.raises(CaptureForbids, match="host"):
        capture_graph(device, FAMILIES["classic"], torch.bfloat16)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import capture_graph

    with fake_device() as device, pytest.raises(GraphCaptureError, match=r"aten\.nonzero"):
        capture_graph(device, EXPERTS, torch.bfloat16)
