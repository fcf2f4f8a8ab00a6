"""Message socket: frames arrive complete and in order, or not at all; no call blocks forever."""

import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.ranks.message_socket import Channel
from tests.support.servers import WAIT_S, eventually

Ends = tuple[Channel, Channel]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    left, right = socket.socketpair() if request.param == "unix" else tcp_pair()
    pair = Channel(left), Channel(right)
    yield pair
    for end in pair:
        end.close()


def test_frames_of_any_size_arrive_complete_and_in_order(ends: Ends) -> None:
    near, far = ends
    frames = [b"", b"a", random.randbytes(70_000), b"", random.randbytes(3 << 20), b"end"]

    # The frames exceed a socket's buffer: no call blocks.
    assert all(near.send(frame) for frame in frames)

    assert [far.receive(WAIT_S) for _ in frames] == frames
    assert not far.poll()


@given(sizes=st.lists(st.integers(0, 300), max_size=30), cuts=st.lists(st.integers(1, 97)))
@settings(max_examples=60, deadline=None)
def test_frames_survive_any_fragmentation_of_the_stream(sizes: list[int], cuts: list[int]) -> None:
    near_socket, far_socket = socket.socketpair()
    frames = [random.randbytes(size) for size in sizes]
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    received: list[bytes | None] = []
    with far_socket:
        near = Channel(near_socket)
        for cut in [*cuts, len(stream)]:
            far_socket.sendall(stream[:cut])
            stream = stream[cut:]
            while near.poll():
                received.append(near.receive(0))
        near.close()
    assert received == frames


def test_concurrent_senders_do_not_interleave_frames(ends: Ends) -> None:
    near, far = ends
    threads = [
        threading.Thread(
            target=lambda sender=sender: [near.send(bytes([sender]) * 5000) for _ in range(100)]
        )
        for sender in range(4)
    ]
    for thread in threads:
        thread.start()
    frames = [far.receive(WAIT_S) for _ in range(400)]
    for thread in threads:
        thread.join()
    assert all(frame is not None and frame == frame[:1] * 5000 for frame in frames)


def test_frames_sent_before_close_are_still_received(ends: Ends) -> None:
    near, far = ends
    near.send(b"last frame")
    near.close()
    assert far.receive(WAIT_S) == b"last frame"
    assert far.receive(WAIT_S) is None
    assert far.receive(WAIT_S) is None
    assert not far.send(b"after the close")


def test_a_close_inside_a_frame_ends_the_channel() -> None:
    near_socket, far_socket = socket.socketpair()
    near = Channel(near_socket)
    far_socket.sendall(struct.pack("<I", 100) + b"half")
    far_socket.close()
    assert near.receive(WAIT_S) is None


def test_a_frame_length_over_the_limit_closes_the_channel() -> None:
    near_socket, far_socket = socket.socketpair()
    with far_socket:
        near = Channel(near_socket, frame_bytes_max=1000)
        far_socket.sendall(struct.pack("<I", 1001) + bytes(1001))
        assert near.receive(WAIT_S) is None
        assert not near.send(b"x")


def test_a_full_outbox_closes_the_channel_and_send_never_blocks() -> None:
    near_socket, far_socket = socket.socketpair()
    with far_socket:
        near = Channel(near_socket, outbox_bytes_max=4 << 20)
        frames_sent = 0
        while near.send(bytes(1 << 20)):  # No process reads: a blocking send would not return.
            frames_sent += 1
            assert frames_sent < 20
        assert frames_sent >= 4
        assert near.receive(WAIT_S) is None


def test_receive_returns_on_timeout_or_close(ends: Ends) -> None:
    near, far = ends
    with pytest.raises(TimeoutError):
        far.receive(0.05)
    frames: list[object] = []
    reader = threading.Thread(target=lambda: frames.append(far.receive()))
    reader.start()
    time.sleep(0.05)
    far.close()
    reader.join(WAIT_S)
    assert frames == [None]
    assert near.receive(WAIT_S) is None


def test_a_closed_channel_leaves_no_descriptor_and_no_thread() -> None:
    gc.collect()  # Closes the sockets of earlier tests.
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(20):
        near, far_socket = Channel.pair()
        far = Channel(far_socket)
        near.send(bytes(1 << 20))
        assert len(far.receive(WAIT_S) or b"") == 1 << 20
        near.close()
        far.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    eventually(lambda: threading.active_count() <= threads)
