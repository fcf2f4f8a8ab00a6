"""The ranks' own channels: rank 0 to each other one, for steps and for what must be agreed upon.

They go beside torch's collectives, so that rank 0 never waits for a busy rank, and so that a rank's
end is seen by all the others at once, even by one that is stuck in a collective. Who is who is told
by a secret in the store through which the ranks found each other.
"""

import hmac
import logging
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from serving.config import loopback
from serving.ranks.message_socket import Channel
from serving.ranks.rank_position import Place

log = logging.getLogger(__name__)

HELLO_S = 10.0
_ASK = b""  # No message is empty.


class Store(Protocol):
    """Of torch's stores, what is needed here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class _Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    secret: str


class _Hello(msgspec.Struct, frozen=True):
    secret: str
    rank: int


_address = msgspec.json.Decoder(_Address).decode
_hello = msgspec.json.Decoder(_Hello).decode


class Circle:
    """Rank 0's channels to all others, or another's to rank 0. A thread reads them.

    From that thread `ended` is called when one ends; nothing of that rank is heard any more. And
    `asked` when another rank was told to end, and passes it on with `ask`.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        ended: Callable[[int], None],
        asked: Callable[[], None],
    ) -> None:
        self._channels = dict(channels)
        self._frames: dict[int, queue.SimpleQueue[bytes]] = {
            rank: queue.SimpleQueue() for rank in channels
        }
        self._left = set(channels)
        self._ended, self._asked = ended, asked
        listen(channels, self._take, self._gone)

    @classmethod
    def join(
        cls,
        store: Store,
        place: Place,
        host: str,
        timeout_s: float,
        *,
        ended: Callable[[int], None],
        asked: Callable[[], None],
    ) -> "Circle":
        """All ranks must call this together. `host` is where the others reach rank 0."""
        if place.rank == 0:
            return cls(_accept(store, host, place.ranks, timeout_s), ended, asked)
        return cls({0: _connect(store, place.rank, timeout_s)}, ended, asked)

    def say(self, frame: bytes) -> None:
        """To everybody at the other ends."""
        for channel in self._channels.values():
            channel.send(frame)

    def ask(self) -> None:
        """Pass on to rank 0 that the end was asked for."""
        self.say(_ASK)

    def hear(self, rank: int, timeout_s: float | None = None) -> bytes:
        """The next frame from that rank; raises TimeoutError."""
        try:
            return self._frames[rank].get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"rank {rank} said nothing for {timeout_s:g} s") from None

    def part(self, timeout_s: float) -> None:
        """Wait until the others have gone, who were told to: what they have said is read first."""
        end = time.monotonic() + timeout_s
        while self._left and time.monotonic() < end:
            time.sleep(0.005)

    def _take(self, rank: int, frame: bytes) -> None:
        if frame == _ASK:
            self._asked()
        else:
            self._frames[rank].put(frame)

    def _gone(self, rank: int) -> None:
        self._left.discard(rank)
        self._ended(rank)


def listen(
    channels: Mapping[int, Channel],
    take: Callable[[int, bytes], None],
    ended: Callable[[int], None],
) -> None:
    """Read channels in a thread, each until its end. A process that can hear no more ends."""

    numbers = {channel.fileno(): key for key, channel in channels.items()}
    poll = select.poll()

    def drain(number: int) -> None:
        key = numbers[number]
        while channels[key].poll():
            frame = channels[key].receive()
            if frame is None:
                poll.unregister(number)
                del numbers[number]
                ended(key)
                return
            take(key, frame)

    def run() -> None:
        try:
            for number in list(numbers):
                poll.register(number, select.POLLIN)
                drain(number)  # A greeting's reader may have read on.
            while numbers:
                for number, _ in poll.poll():
                    drain(number)
        except BaseException:
            log.exception("event=listening_failed")
            os._exit(1)

    threading.Thread(target=run, name="listen", daemon=True).start()


def _accept(store: Store, host: str, ranks: int, timeout_s: float) -> dict[int, Channel]:
    channels: dict[int, Channel] = {}
    if ranks == 1:
        return channels
    secret = secrets.token_hex(32)
    with _listening(host, ranks) as server:
        address = _Address(host, server.getsockname()[1], secret)
        store.set("preamble/circle", msgspec.json.encode(address).decode())
        end = time.monotonic() + timeout_s
        while len(channels) < ranks - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            channel = Channel(server.accept()[0])
            rank = _greeted(channel, secret)
            if rank is None or not 0 < rank < ranks or rank in channels:
                log.warning("event=stranger_refused")
                channel.close()
            else:
                channels[rank] = channel
    return channels


def _listening(host: str, backlog: int) -> socket.socket:
    """On all addresses unless on loopback: what a node's name means differs within and outside."""
    if loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _greeted(channel: Channel, secret: str) -> int | None:
    """Who it is, if it knows the secret."""
    try:
        frame = channel.receive(HELLO_S)
        if frame is None:
            return None
        hello = _hello(frame)
    except (TimeoutError, msgspec.DecodeError):
        return None
    return hello.rank if hmac.compare_digest(hello.secret.encode(), secret.encode()) else None


def _connect(store: Store, rank: int, timeout_s: float) -> Channel:
    end = time.monotonic() + timeout_s
    while not store.check(["preamble/circle"]):
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0 was not there within {timeout_s:g} s")
        time.sleep(0.01)
    address = _address(store.get("preamble/circle"))
    sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    channel = Channel(sock)
    channel.send(msgspec.json.encode(_Hello(address.secret, rank)))
    return channel
