"""The ranks' own channels: who comes in, what is heard, and that an end is seen."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch.distributed as dist

from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import Circle, Store
from serving.ranks.rank_position import Place
from tests.support.servers import eventually

RANKS = 3
WAIT_S = 10.0


class Member:
    """A rank, and what it is told from the circle's own thread."""

    def __init__(self, store: Store, rank: int) -> None:
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ask = lambda: self.asked.put(True)
        place = Place(rank, RANKS, rank, RANKS)
        self.circle = Circle.join(
            store, place, "127.0.0.1", WAIT_S, ended=self.ended.put, asked=self._ask
        )
        if rank > 0:
            # Together with the greeting, which whoever reads that must not lose.
            self.circle.say(b"first words of %d" % rank)


def join(store: Store, strangers: Callable[[], None] = lambda: None) -> list[Member]:
    members: dict[int, Member] = {}

    def one(rank: int) -> None:
        members[rank] = Member(store, rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
    threads[0].start()
    strangers()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [members[rank] for rank in range(RANKS)]


@pytest.fixture
def store() -> Store:
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


@pytest.fixture
def members(store: Store) -> Iterator[list[Member]]:
    members = join(store)
    yield members
    close(members)


def close(members: list[Member]) -> None:
    for member in members:
        for channel in member.circle._channels.values():
            channel.close()


def test_rank_0_hears_each_and_is_heard_by_all(members: list[Member]) -> None:
    for rank in (1, 2):
        assert members[0].circle.hear(rank, WAIT_S) == b"first words of %d" % rank
    members[0].circle.say(b"a step")
    assert [member.circle.hear(0, WAIT_S) for member in members[1:]] == [b"a step"] * 2
    with pytest.raises(TimeoutError, match="rank 1 said nothing"):
        members[0].circle.hear(1, 0.01)


def test_a_wish_to_end_is_passed_on_and_is_no_answer(members: list[Member]) -> None:
    members[2].circle.ask()
    assert members[0].asked.get(timeout=WAIT_S)
    assert members[0].circle.hear(2, WAIT_S) == b"first words of 2"


def test_an_end_is_seen_by_both_sides(members: list[Member]) -> None:
    for channel in members[1].circle._channels.values():
        channel.close()
    assert members[0].ended.get(timeout=WAIT_S) == 1
    assert members[1].ended.get(timeout=WAIT_S) == 0
    assert members[2].ended.empty()


def test_who_does_not_know_the_secret_is_not_let_in(store: Store) -> None:
    turned_away: list[bytes | None] = []

    def strangers() -> None:
        eventually(lambda: store.check(["preamble/circle"]))
        told = msgspec.json.decode(store.get("preamble/circle"))
        for hello in ({"secret": "0" * 64, "rank": 1}, {"secret": told["secret"], "rank": 7}, "?"):
            channel = Channel(socket.create_connection((told["host"], told["port"])))
            channel.send(msgspec.json.encode(hello))
            turned_away.append(channel.receive(WAIT_S))

    members = join(store, strangers)

    assert turned_away == [None] * 3
    assert members[0].circle.hear(1, WAIT_S) == b"first words of 1"
    close(members)
