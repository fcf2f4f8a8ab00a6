"""Adapter reader: a read that does not end delays no other adapter, and gets a reason."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from serving.engine_core.adapter_reader import (
    READ_THREADS_MAX,
    STALL_S,
    AdapterReader,
    AdapterReadResult,
)
from serving.messages import AdapterRef
from tests.support.servers import WAIT_S


class HangingFiles:
    """Files of which some do not answer until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.reads: list[str] = []

    def read(self, adapter_ref: AdapterRef) -> AdapterReadResult:
        self.reads.append(adapter_ref.digest)
        if adapter_ref.digest.startswith("hung"):
            assert self.released.wait(WAIT_S)
        return AdapterReadResult(adapter_ref, adapter_ref.digest.encode())


@pytest.fixture
def files() -> Iterator[HangingFiles]:
    hanging_files = HangingFiles()
    yield hanging_files
    hanging_files.released.set()


def ref(digest: str) -> AdapterRef:
    return AdapterRef(digest, 1, f"{digest}.safetensors")


def test_files_are_read_in_the_order_of_the_requests(files: HangingFiles) -> None:
    results: queue.SimpleQueue[AdapterReadResult] = queue.SimpleQueue()
    reader = AdapterReader(files.read, results.put, WAIT_S)
    digests = [f"adapter{number}" for number in range(20)]
    for digest in digests:
        reader.request(ref(digest))
    assert [results.get(timeout=WAIT_S).data.decode() for _ in digests] == digests
    reader.close()


@pytest.mark.slow
def test_a_file_that_does_not_answer_delays_no_other_for_long(files: HangingFiles) -> None:
    results: queue.SimpleQueue[AdapterReadResult] = queue.SimpleQueue()
    reader = AdapterReader(files.read, results.put, WAIT_S)
    started = time.monotonic()
    for digest in ("hung1", "hung2", "good"):
        reader.request(ref(digest))
    assert results.get(timeout=WAIT_S).data == b"good"
    assert time.monotonic() - started >= 2 * STALL_S  # One replacement per file that hangs.
    files.released.set()
    assert {results.get(timeout=WAIT_S).data for _ in range(2)} == {b"hung1", b"hung2"}
    reader.request(ref("later"))
    assert results.get(timeout=WAIT_S).data == b"later"
    reader.close()


def test_a_late_read_gets_a_reason_and_its_file_is_not_read_twice(files: HangingFiles) -> None:
    results: queue.SimpleQueue[AdapterReadResult] = queue.SimpleQueue()
    reader = AdapterReader(files.read, results.put, limit_s=0.1)
    for _ in range(3):
        reader.request(ref("hung"))
        late = results.get(timeout=WAIT_S)
        assert late.adapter_ref == ref("hung")
        assert late.reason == "its file could not be read within 0.1 s; try again later"
    assert files.reads == ["hung"]
    files.released.set()
    while not files.reads[1:]:  # The first read ends, and its answer is dropped.
        reader.request(ref("hung"))
        results.get(timeout=WAIT_S)
    reader.close()


@pytest.mark.slow
def test_the_threads_are_bounded(files: HangingFiles) -> None:
    results: queue.SimpleQueue[AdapterReadResult] = queue.SimpleQueue()
    reader = AdapterReader(files.read, results.put, limit_s=WAIT_S)
    before = threading.active_count()
    for number in range(3 * READ_THREADS_MAX):
        reader.request(ref(f"hung{number}"))
    time.sleep(3 * STALL_S)
    assert threading.active_count() - before <= READ_THREADS_MAX + 1
    files.released.set()
    for _ in range(3 * READ_THREADS_MAX):
        results.get(timeout=WAIT_S)
    reader.close()
