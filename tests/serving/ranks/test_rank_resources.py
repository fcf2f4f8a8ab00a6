"""The device of a rank, and the current CUDA device of the threads that run steps."""

import threading

import pytest
import torch

from serving.config import ServerConfig
from serving.ranks.in_process import InProcessTransport
from serving.ranks.rank_position import RankPosition
from serving.ranks.rank_resources import RankDevice, select_rank_device, with_index
from tests.support.models import CLASSIC, build
from tests.support.recording_receiver import RecordingReceiver, until_ready

READY_S = 60.0


@pytest.fixture
def current_devices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """The calls of torch.cuda.set_device: the name of the thread, and the device."""
    calls: list[tuple[str, torch.device]] = []

    def set_device(device: torch.device) -> None:
        if device.index is None:  # torch refuses such a device here, though not elsewhere.
            raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")
        calls.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("serving.ranks.rank_resources.parse_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return calls


def position(local_rank: int, local_ranks: int) -> RankPosition:
    return RankPosition(local_rank, local_ranks, local_rank, local_ranks)


@pytest.mark.parametrize(
    ("name", "local_rank", "local_ranks", "rank_device"),
    [
        ("cuda:1", 0, 1, RankDevice(torch.device("cuda:1"), 1)),
        ("cuda:1", 2, 3, RankDevice(torch.device("cuda:1"), 3, is_shared=True)),
        ("cuda", 1, 2, RankDevice(torch.device("cuda:1"), 1)),
        ("cuda", 2, 3, RankDevice(torch.device("cuda:0"), 2, is_shared=True)),
    ],
)
def test_the_gpu_of_a_rank_becomes_the_current_device(
    name: str,
    local_rank: int,
    local_ranks: int,
    rank_device: RankDevice,
    current_devices: list[tuple[str, torch.device]],
) -> None:
    assert select_rank_device(name, position(local_rank, local_ranks)) == rank_device
    assert current_devices == [(threading.current_thread().name, rank_device.device)]


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_the_thread_of_an_in_process_engine_sets_its_current_device(
    name: str, current_devices: list[tuple[str, torch.device]]
) -> None:
    transport = InProcessTransport(build(CLASSIC), ServerConfig("unused", kv_tokens_max=640))
    transport._device = with_index(torch.device(name))
    receiver = RecordingReceiver()
    transport.start(receiver)
    until_ready(transport, receiver, READY_S)
    transport.close()
    assert current_devices == [("planner", torch.device("cuda:1"))]
