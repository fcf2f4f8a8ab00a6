"""Control channels between rank 0 and every other rank: steps, start-up agreement, liveness.

The channels are separate from torch's collectives. Therefore rank 0 sends a step without waiting
for busy ranks. A rank also detects at once that the rank at the channel's other end has exited,
even if its own main thread is blocked in a collective. The ranks authenticate with a secret that
rank 0 writes into the rendezvous store.
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

from serving.config import is_loopback
from serving.ranks.message_socket import Channel
from serving.ranks.rank_position import RankPosition

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0  # A new connection must send its `_Hello` within this time.
_DRAIN_REQUEST = b""  # The frame that `request_drain` sends; no other frame is empty.
_NOTICE_PREFIX = b"\0"  # Of the frames of `send_notice`; no other frame begins with it.
_ADDRESS_KEY = "preamble/rank_zero_address"  # In the rendezvous store.


class Store(Protocol):
    """The methods of torch.distributed.Store that this package uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class _RankZeroAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    secret: str


class _Hello(msgspec.Struct, frozen=True):
    secret: str
    rank: int


_decode_address = msgspec.json.Decoder(_RankZeroAddress).decode
_decode_hello = msgspec.json.Decoder(_Hello).decode


class RankChannels:
    """Rank 0's channels to all other ranks, or another rank's channel to rank 0.

    One thread reads all channels and calls the callbacks: `on_ended(rank)` after the last frame of
    a closed channel, and on rank 0 `on_drain_requested()` when another rank calls `request_drain`,
    and `on_notice(frame)` when another rank calls `send_notice`.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        on_ended: Callable[[int], None],
        on_drain_requested: Callable[[], None],
        on_notice: Callable[[bytes], None],
    ) -> None:
        self._channels = dict(channels)
        self._inboxes: dict[int, queue.SimpleQueue[bytes]] = {
            rank: queue.SimpleQueue() for rank in channels
        }
        self._open_ranks = set(channels)
        self._on_ended = on_ended
        self._on_drain_requested = on_drain_requested
        self._on_notice = on_notice
        start_reader(channels, self._on_frame, self._on_closed)

    @classmethod
    def connect_ranks(
        cls,
        store: Store,
        position: RankPosition,
        host: str,
        timeout_s: float,
        *,
        on_ended: Callable[[int], None],
        on_drain_requested: Callable[[], None],
        on_notice: Callable[[bytes], None],
    ) -> "RankChannels":
        """Connect the ranks, and return this rank's channels. Every rank must call this.

        `host`: rank 0's address. `timeout_s`: the time in which all ranks must connect.
        """
        if position.rank == 0:
            return cls(
                _accept_ranks(store, host, position.world_size, timeout_s),
                on_ended,
                on_drain_requested,
                on_notice,
            )
        return cls(
            {0: _connect_to_rank_zero(store, position.rank, timeout_s)},
            on_ended,
            on_drain_requested,
            on_notice,
        )

    def broadcast(self, frame: bytes) -> None:
        """Send a frame on every channel."""
        for channel in self._channels.values():
            channel.send(frame)

    def request_drain(self) -> None:
        """Ask rank 0 for a drain of the server; rank 0 itself must not call this."""
        self.broadcast(_DRAIN_REQUEST)

    def send_notice(self, frame: bytes) -> None:
        """Send rank 0 a frame that is not for its inbox; rank 0 itself must not call this."""
        self.broadcast(_NOTICE_PREFIX + frame)

    def receive(self, rank: int, timeout_s: float | None = None) -> bytes:
        """Return the next frame from `rank`; raise TimeoutError after `timeout_s` (None: no limit).

        Without a limit, the call waits for ever if the channel closes, so `on_ended` must end the
        process.
        """
        try:
            return self._inboxes[rank].get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"rank {rank} sent nothing for {timeout_s:g} s") from None

    def drain(self, timeout_s: float) -> None:
        """Wait until the peers have closed all channels, but at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._open_ranks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _on_frame(self, rank: int, frame: bytes) -> None:
        if frame == _DRAIN_REQUEST:
            self._on_drain_requested()
        elif frame.startswith(_NOTICE_PREFIX):
            self._on_notice(frame.removeprefix(_NOTICE_PREFIX))
        else:
            self._inboxes[rank].put(frame)

    def _on_closed(self, rank: int) -> None:
        self._open_ranks.discard(rank)
        self._on_ended(rank)


def start_reader(
    channels: Mapping[int, Channel],
    on_frame: Callable[[int, bytes], None],
    on_ended: Callable[[int], None],
) -> None:
    """Start a thread that reads the channels until all of them are closed.

    The thread calls `on_frame(key, frame)` for each frame, and `on_ended(key)` when a channel has
    ended; `key` is the channel's key in `channels`. If the thread fails, the process exits, because
    it would receive no more messages.
    """
    keys_by_descriptor = {channel.fileno(): key for key, channel in channels.items()}
    poll = select.poll()

    def read_frames(descriptor: int) -> None:
        key = keys_by_descriptor[descriptor]
        while channels[key].poll():
            frame = channels[key].receive()
            if frame is None:
                poll.unregister(descriptor)
                del keys_by_descriptor[descriptor]
                on_ended(key)
                return
            on_frame(key, frame)

    def read_loop() -> None:
        try:
            for descriptor in list(keys_by_descriptor):
                poll.register(descriptor, select.POLLIN)
                # Authentication may have read frames into the receive buffer, and poll() does not
                # report buffered frames.
                read_frames(descriptor)
            while keys_by_descriptor:
                for descriptor, _ in poll.poll():
                    read_frames(descriptor)
        except BaseException:
            log.exception("event=listening_failed")
            os._exit(1)

    threading.Thread(target=read_loop, name="listen", daemon=True).start()


def _accept_ranks(store: Store, host: str, world_size: int, timeout_s: float) -> dict[int, Channel]:
    channels: dict[int, Channel] = {}
    if world_size == 1:
        return channels
    secret = secrets.token_hex(32)
    with _open_server_socket(host, world_size) as server:
        address = _RankZeroAddress(host, server.getsockname()[1], secret)
        store.set(_ADDRESS_KEY, msgspec.json.encode(address).decode())
        deadline = time.monotonic() + timeout_s
        while len(channels) < world_size - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            channel = Channel(server.accept()[0])
            rank = _authenticate(channel, secret)
            if rank is None or not 0 < rank < world_size or rank in channels:
                log.warning("event=stranger_refused")
                channel.close()
            else:
                channels[rank] = channel
    return channels


def _open_server_socket(host: str, backlog: int) -> socket.socket:
    """Return a server socket: on `host` if `host` is a loopback address, else on all addresses.

    A `host` that is no loopback address is not used for binding: on this node, the name may resolve
    to an address that other nodes cannot reach, such as 127.0.1.1.
    """
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _authenticate(channel: Channel, secret: str) -> int | None:
    """Return the peer's rank, or None if the peer does not send the right secret in time."""
    try:
        frame = channel.receive(HELLO_TIMEOUT_S)
        if frame is None:
            return None
        hello = _decode_hello(frame)
    except (TimeoutError, msgspec.DecodeError):
        return None
    return hello.rank if hmac.compare_digest(hello.secret.encode(), secret.encode()) else None


def _connect_to_rank_zero(store: Store, rank: int, timeout_s: float) -> Channel:
    deadline = time.monotonic() + timeout_s
    while not store.check([_ADDRESS_KEY]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not publish its address within {timeout_s:g} s")
        time.sleep(0.01)
    address = _decode_address(store.get(_ADDRESS_KEY))
    sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    channel = Channel(sock)
    channel.send(msgspec.json.encode(_Hello(address.secret, rank)))
    return channel
