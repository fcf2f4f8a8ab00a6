"""Control channels between ranks: authentication, messages, and notice of closed channels."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch.distributed as dist

from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import _ADDRESS_KEY, RankChannels, Store
from serving.ranks.rank_position import RankPosition
from tests.support.servers import WAIT_S, eventually

RANKS = 3


class Rank:
    """The channels of a rank, and the callbacks that their reader thread made."""

    def __init__(self, store: Store, rank: int) -> None:
        self.ended_ranks: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.notices: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.drain_requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.channels = RankChannels.connect_ranks(
            store,
            RankPosition(rank, RANKS, rank, RANKS),
            "127.0.0.1",
            WAIT_S,
            on_ended=self.ended_ranks.put,
            on_drain_requested=self._record_drain_request,
            on_notice=self.notices.put,
        )
        if rank > 0:
            # May be received together with the hello message, and must not be lost then.
            self.channels.broadcast(b"first frame of %d" % rank)

    def _record_drain_request(self) -> None:
        self.drain_requests.put(True)


def connect_ranks(store: Store, connect_strangers: Callable[[], None] = lambda: None) -> list[Rank]:
    """Connect all ranks; strangers connect to rank 0 before the other ranks do."""
    ranks: dict[int, Rank] = {}

    def connect(rank: int) -> None:
        ranks[rank] = Rank(store, rank)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(RANKS)]
    threads[0].start()
    connect_strangers()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [ranks[rank] for rank in range(RANKS)]


@pytest.fixture
def store() -> Store:
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


@pytest.fixture
def ranks(store: Store) -> Iterator[list[Rank]]:
    ranks = connect_ranks(store)
    yield ranks
    close(ranks)


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        for channel in rank.channels._channels.values():
            channel.close()


def test_rank_0_receives_from_each_rank_and_broadcasts_to_all(ranks: list[Rank]) -> None:
    for rank in (1, 2):
        assert ranks[0].channels.receive(rank, WAIT_S) == b"first frame of %d" % rank
    ranks[0].channels.broadcast(b"a step")
    assert [rank.channels.receive(0, WAIT_S) for rank in ranks[1:]] == [b"a step"] * 2
    with pytest.raises(TimeoutError, match="rank 1 sent nothing"):
        ranks[0].channels.receive(1, 0.01)


def test_a_drain_request_reaches_rank_0_and_is_not_a_frame(ranks: list[Rank]) -> None:
    ranks[2].channels.request_drain()
    assert ranks[0].drain_requests.get(timeout=WAIT_S)
    assert ranks[0].channels.receive(2, WAIT_S) == b"first frame of 2"


def test_a_notice_reaches_rank_0_and_is_not_a_frame(ranks: list[Rank]) -> None:
    ranks[2].channels.send_notice(b"compiling")
    assert ranks[0].notices.get(timeout=WAIT_S) == b"compiling"
    ranks[2].channels.broadcast(b"second frame")
    assert ranks[0].channels.receive(2, WAIT_S) == b"first frame of 2"
    assert ranks[0].channels.receive(2, WAIT_S) == b"second frame"


def test_both_sides_notice_a_closed_channel(ranks: list[Rank]) -> None:
    for channel in ranks[1].channels._channels.values():
        channel.close()
    assert ranks[0].ended_ranks.get(timeout=WAIT_S) == 1
    assert ranks[1].ended_ranks.get(timeout=WAIT_S) == 0
    assert ranks[2].ended_ranks.empty()


def test_a_peer_without_the_secret_is_rejected(store: Store) -> None:
    received: list[bytes | None] = []

    def connect_strangers() -> None:
        eventually(lambda: store.check([_ADDRESS_KEY]))
        address = msgspec.json.decode(store.get(_ADDRESS_KEY))
        for hello in (
            {"secret": "0" * 64, "rank": 1},
            {"secret": address["secret"], "rank": 7},
            "?",
        ):
            channel = Channel(socket.create_connection((address["host"], address["port"])))
            channel.send(msgspec.json.encode(hello))
            received.append(channel.receive(WAIT_S))

    ranks = connect_ranks(store, connect_strangers)

    assert received == [None] * 3
    assert ranks[0].channels.receive(1, WAIT_S) == b"first frame of 1"
    close(ranks)
