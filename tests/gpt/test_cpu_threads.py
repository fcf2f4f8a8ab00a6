"""CPU threads: their number, and the spin limit of OpenMP."""

from collections.abc import Iterator

import pytest
import torch

from gpt.cpu_threads import limit_openmp_spinning, set_thread_count
from gpt.host_limits import usable_cores

CORES = usable_cores()


@pytest.fixture(autouse=True)
def _restore_thread_count() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("users_setting", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_users_setting_of_openmp_has_priority(users_setting: str) -> None:
    environment = {users_setting: "a value"}
    limit_openmp_spinning(environment)
    assert environment == {users_setting: "a value"}


def test_openmp_spinning_is_limited_by_default() -> None:
    environment: dict[str, str] = {}
    limit_openmp_spinning(environment)
    assert 0 < int(environment["GOMP_SPINCOUNT"]) < 300_000


@pytest.mark.parametrize(("setting", "threads"), [("3", 3), ("0", CORES), ("many", CORES)])
def test_omp_num_threads_sets_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, setting: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    set_thread_count()
    assert torch.get_num_threads() == threads
    set_thread_count(respect_environment=False)
    assert torch.get_num_threads() == CORES


def test_processes_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_thread_count(processes=CORES)
    assert torch.get_num_threads() == 1
    set_thread_count(processes=100 * CORES)
    assert torch.get_num_threads() == 1
