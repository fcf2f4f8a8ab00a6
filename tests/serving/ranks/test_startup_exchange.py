"""Start-up exchange: no rank leaves a phase before all have ended it, or after one has failed."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import pytest
import torch.distributed as dist

from gpt.errors import CheckpointError, ConfigError
from serving.messages import Failed, decode_from_engine_loop
from serving.ranks import startup_exchange
from serving.ranks.rank_channels import RankChannels, Store
from serving.ranks.rank_position import RankPosition
from serving.ranks.startup_exchange import StartupExchange, StartupFailedError
from serving.worker.startup import WorkerReport
from tests.support.servers import WAIT_S

T = TypeVar("T")

RANKS = 3


def start(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a daemon thread: a rank that blocks forever must not outlive its test."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Ranks:
    """The exchanges of ranks that run in threads."""

    def __init__(self, count: int) -> None:
        self.failures: queue.SimpleQueue[Failed] = queue.SimpleQueue()
        self.notices: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._store: Store = dist.HashStore()  # type: ignore[attr-defined]
        connections = [start(partial(self._connect, rank, count)) for rank in range(count)]
        self.channels = [connection.result(WAIT_S) for connection in connections]
        self._exchanges = [
            StartupExchange(channels, RankPosition(rank, count, rank, count), self.failures.put)
            for rank, channels in enumerate(self.channels)
        ]

    def _connect(self, rank: int, count: int) -> RankChannels:
        return RankChannels.connect_ranks(
            self._store,
            RankPosition(rank, count, rank, count),
            "127.0.0.1",
            WAIT_S,
            on_ended=lambda rank: None,
            on_drain_requested=lambda: None,
            on_notice=self.notices.put,
        )

    def run(self, method: Callable[[StartupExchange, int], T]) -> "list[Future[T]]":
        """Call `method` for each rank's exchange, with the rank, in threads."""
        return [
            start(partial(method, exchange, rank)) for rank, exchange in enumerate(self._exchanges)
        ]

    def close(self) -> None:
        for channels in self.channels:
            for channel in channels._channels.values():
                channel.close()


@pytest.fixture
def all_ranks() -> Iterator[Ranks]:
    ranks = Ranks(RANKS)
    yield ranks
    ranks.close()


def test_a_phase_returns_its_value_once_all_ranks_have_ended_it(all_ranks: Ranks) -> None:
    ended: list[int] = []
    others_ended = threading.Event()

    def phase(rank: int) -> str:
        if rank == RANKS - 1:  # The slowest.
            assert others_ended.wait(WAIT_S)
        ended.append(rank)
        if len(ended) == RANKS - 1:
            others_ended.set()
        return f"value of {rank}"

    def run(exchange: StartupExchange, rank: int) -> tuple[str, int]:
        returned = exchange.run_phase(lambda: phase(rank))
        return returned, len(ended)

    all_returned = [future.result(WAIT_S) for future in all_ranks.run(run)]
    assert all_returned == [(f"value of {rank}", RANKS) for rank in range(RANKS)]
    assert all_ranks.failures.empty()


def test_all_gather_returns_values_in_rank_order_on_every_rank(all_ranks: Ranks) -> None:
    reports = [WorkerReport(10 + rank, 100, proof=[0.5, float(rank)]) for rank in range(RANKS)]
    for future in all_ranks.run(lambda exchange, rank: exchange.all_gather(reports[rank])):
        assert future.result(WAIT_S) == reports
    for flags in all_ranks.run(lambda exchange, rank: exchange.all_gather(rank == 1)):
        assert flags.result(WAIT_S) == [False, True, False]


def test_a_permanent_error_is_reported_before_the_error_of_a_lower_rank(
    all_ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    def phase(rank: int) -> int:
        if rank == 1:
            raise OSError("no memory")
        if rank == 2:
            raise CheckpointError("a file is missing")
        return rank

    futures = all_ranks.run(lambda exchange, rank: exchange.run_phase(lambda: phase(rank)))
    with pytest.raises(StartupFailedError):
        futures[0].result(WAIT_S)
    assert all_ranks.failures.get(timeout=WAIT_S) == Failed("a file is missing", is_permanent=True)
    assert all_ranks.failures.empty()
    assert caplog.text.count("event=rank_failed") == 1
    # The exit of rank 0 ends the others. Here a release shows that they would not go on, either.
    all_ranks.channels[0].broadcast(b"{}")
    for future in futures[1:]:
        with pytest.raises(AssertionError, match="no rank may continue"):
            future.result(WAIT_S)


def test_a_failed_rank_reports_its_error_although_rank_0_does_not_end_the_phase(
    all_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a collective, rank 0 and rank 2 wait for the failed rank."""
    monkeypatch.setattr(startup_exchange, "FAILURE_GRACE_S", 0.01)
    unblocked = threading.Event()

    def phase(rank: int) -> None:
        if rank == 1:
            raise ConfigError("lower step_tokens_max")
        assert unblocked.wait(WAIT_S)

    all_ranks.run(lambda exchange, rank: exchange.run_phase(lambda: phase(rank)))
    notice = decode_from_engine_loop(all_ranks.notices.get(timeout=WAIT_S))
    assert notice == Failed("lower step_tokens_max", is_permanent=True)
    assert all_ranks.failures.empty()
    unblocked.set()


def test_rank_0_reports_its_error_although_the_others_do_not_end_the_phase(
    all_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_exchange, "FAILURE_GRACE_S", 0.01)
    unblocked = threading.Event()

    def phase(rank: int) -> None:
        if rank == 0:
            raise ConfigError("lower step_tokens_max")
        assert unblocked.wait(WAIT_S)

    futures = all_ranks.run(lambda exchange, rank: exchange.run_phase(lambda: phase(rank)))
    with pytest.raises(StartupFailedError):
        futures[0].result(WAIT_S)
    failed = all_ranks.failures.get(timeout=WAIT_S)
    assert failed == Failed("lower step_tokens_max", is_permanent=True)
    unblocked.set()


def test_a_single_rank_names_itself_and_the_kind_of_its_error() -> None:
    ranks = Ranks(1)

    def phase() -> None:
        raise MemoryError("out of memory")

    (future,) = ranks.run(lambda exchange, rank: exchange.run_phase(phase))
    with pytest.raises(StartupFailedError):
        future.result(WAIT_S)
    assert ranks.failures.get(timeout=WAIT_S) == Failed("rank 0: MemoryError: out of memory")
    ranks.close()
