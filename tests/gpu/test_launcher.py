"""Launches of compiled Triton kernels on a CUDA device: results, streams and CUDA graphs."""

import pytest
import torch
from torch import Tensor

from gpt.triton_runtime.availability import triton_unavailable_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CUDA = torch.device("cuda")
OFFSET, ADDEND, SCALE = 3, 0.5, 2


def launch(x: Tensor) -> Tensor:
    """Return SCALE * x + ADDEND, without the first OFFSET elements."""
    from gpt.triton_runtime import launcher
    from tests.support.launched_kernel import store_sum

    size = len(x) - OFFSET
    out = torch.zeros(size, device=CUDA)
    launcher.launch(
        store_sum, (-(-size // 32),), x, out, size, OFFSET, ADDEND, None, SCALE=SCALE, BLOCK=32
    )
    return out


def expected(x: Tensor) -> Tensor:
    return SCALE * x[OFFSET:] + ADDEND


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    reason = triton_unavailable_reason(CUDA)
    if reason is not None:
        pytest.skip(reason)


def test_later_launches_give_the_results_of_the_first() -> None:
    memory = torch.arange(200.0, device=CUDA)
    for x in (memory, memory[1:], memory[:150], memory[:4], memory[:19]) * 3:
        assert torch.equal(launch(x), expected(x))


def test_a_launch_is_queued_on_the_current_stream_and_in_a_graph() -> None:
    x = torch.arange(100.0, device=CUDA)
    launch(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(launch(x), expected(x))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(x)
    x += 1
    graph.replay()
    assert torch.equal(out, expected(x))
