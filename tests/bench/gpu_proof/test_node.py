"""Proof of a node: its number of ranks, its layouts, and the all-reduces that it times."""

import pytest
import torch

from bench.gpu_proof.all_reduce_times import SumTimes, measure_size
from bench.gpu_proof.layouts import layouts
from bench.gpu_proof.measurements import count_ranks
from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageFailure
from gpt.parallel.mesh import Mesh
from gpt.parallel.symmetric_memory import BUFFER_BYTES, KIB, use_symmetric_memory
from tests.support.ranks import ranks
from tests.support.symmetric_kernels import FakeMemory, Kernels


@pytest.mark.parametrize(("devices", "count"), [(2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_a_node_has_a_power_of_two_ranks(
    devices: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert count_ranks("cuda", 0) == count
    assert count_ranks("cuda", 2) == 2 and count_ranks("cuda", 1) == 1


def test_too_few_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (count_ranks("cpu", 1), count_ranks("cpu", 0), count_ranks("cpu", 8)) == (1, 2, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StageFailure, match="no CUDA device"):
        count_ranks("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StageFailure, match="only one CUDA device"):
        count_ranks("cuda", 0)
    with pytest.raises(StageFailure, match="fewer than 4 ranks"):
        count_ranks("cuda", 4)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_each_layout_uses_all_ranks_and_divides_the_models(count: int, device: str) -> None:
    sizes = ProofSizes.of(device)
    assert len(layouts(count)) == (2 if count == 2 else 3)
    for layout in layouts(count):
        assert layout.tp * layout.pp == count
        for network in [sizes.node_network] + [sizes.suite.network] * (device == "cuda"):
            assert network.num_layers % layout.pp == network.num_attention_heads % layout.tp == 0
            assert network.vocab_size % layout.tp == 0
    # An answer that fills the positions is long enough to lose a rank in the middle of it.
    assert sizes.node_network.max_position_embeddings >= 4096


def measure_with_stub(rank: int) -> list[SumTimes]:
    """Sums of 8 KiB, the same with wrong kernels, and sums beyond the symmetric buffer."""
    kernels = Kernels()
    mesh = use_symmetric_memory(Mesh.create(2, 1), FakeMemory(kernels, multicast=True))
    right = measure_size(mesh, 8 * KIB)
    kernels.wrong = 1.0
    return [right, measure_size(mesh, 8 * KIB), measure_size(mesh, BUFFER_BYTES + 16)]


@pytest.mark.slow
def test_each_kernel_is_timed_and_wrong_sums_are_noticed() -> None:
    for right, wrong, large in ranks(2, measure_with_stub):
        assert list(right.eager_s) == ["gloo", "one_shot", "two_shot", "multimem"]
        assert all(seconds > 0 for seconds in right.eager_s.values())
        assert (right.ranks, right.chosen, right.wrong) == (2, "one_shot", [])
        assert wrong.wrong == ["one_shot", "two_shot", "multimem"]
        # A tensor beyond the buffer uses the process group.
        assert list(large.eager_s) == ["gloo"] and large.chosen == "gloo" and not large.wrong
