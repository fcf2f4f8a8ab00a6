"""Frames arrive whole and in order, or not at all; nobody waits for ever."""

import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.ranks.message_socket import Channel
from tests.support.servers import eventually

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


def test_frames_of_any_size_arrive_whole_and_in_order(ends: Ends) -> None:
    near, far = ends
    frames = [b"", b"a", os.urandom(70_000), b"", os.urandom(3 << 20), b"end"]

    assert all(near.send(frame) for frame in frames)  # More than a socket takes: none waits.

    assert [far.receive(5) for _ in frames] == frames
    assert not far.poll()


@given(sizes=st.lists(st.integers(0, 300), max_size=30), cuts=st.lists(st.integers(1, 97)))
@settings(max_examples=60, deadline=None)
def test_however_a_stream_is_cut_the_frames_are_the_same(sizes: list[int], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    frames = [os.urandom(size) for size in sizes]
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    got: list[bytes | None] = []
    with theirs:
        far = Channel(ours)
        for cut in [*cuts, len(stream)]:
            theirs.sendall(stream[:cut])
            stream = stream[cut:]
            while far.poll():
                got.append(far.receive(0))
        far.close()
    assert got == frames


def test_many_threads_send_and_no_frame_is_torn(ends: Ends) -> None:
    near, far = ends
    threads = [
        threading.Thread(target=lambda n=n: [near.send(bytes([n]) * 5000) for _ in range(100)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    frames = [far.receive(5) for _ in range(400)]
    for thread in threads:
        thread.join()
    assert all(frame is not None and frame == frame[:1] * 5000 for frame in frames)


def test_what_was_sent_before_the_end_is_still_read(ends: Ends) -> None:
    near, far = ends
    near.send(b"last words")
    near.close()
    assert far.receive(5) == b"last words"
    assert far.receive(5) is None
    assert far.receive(5) is None
    assert not far.send(b"too late")


def test_an_end_in_the_middle_of_a_frame_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    far = Channel(ours)
    theirs.sendall(struct.pack("<I", 100) + b"half")
    theirs.close()
    assert far.receive(5) is None


def test_a_frame_that_claims_too_much_ends_the_channel() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        far = Channel(ours, frame_bytes_max=1000)
        theirs.sendall(struct.pack("<I", 1001) + bytes(1001))
        assert far.receive(5) is None
        assert not far.send(b"x")


def test_a_peer_that_does_not_read_is_given_up_and_the_sender_never_waits() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        near = Channel(ours, waiting_bytes_max=4 << 20)
        started = time.monotonic()
        taken = 0
        while near.send(bytes(1 << 20)):
            taken += 1
            assert taken < 20
        assert taken >= 4
        assert time.monotonic() - started < 2
        assert near.receive(1) is None


def test_waiting_ends_with_its_time_or_with_the_channel(ends: Ends) -> None:
    near, far = ends
    with pytest.raises(TimeoutError):
        far.receive(0.05)
    ended: list[object] = []
    waiting = threading.Thread(target=lambda: ended.append(far.receive()))
    waiting.start()
    time.sleep(0.05)
    far.close()
    waiting.join(3)
    assert ended == [None]
    assert near.receive(5) is None


def test_a_channel_leaves_no_file_and_no_thread_behind() -> None:
    gc.collect()  # Of those before it.
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        near, theirs = Channel.pair()
        far = Channel(theirs)
        near.send(bytes(1 << 20))
        assert len(far.receive(5) or b"") == 1 << 20
        near.close()
        far.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    eventually(lambda: threading.active_count() <= threads)
