"""Adapter directories that do not answer: only the calls that need the directory are delayed."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.adapter_client import AdapterCalls
from clients.client import CallError, Client, Options
from gpt.adapters.change_log import AdapterChangeLog
from gpt.tokenizers.tokenizer import open_tokenizer
from serving.file_threads import OWNER_THREADS_MAX
from tests.support.hung_disk import HungDisk
from tests.support.servers import (
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own.

ANSWER_S = 2.0  # `adapters_answer_s` of these servers.
SHORT = Options(max_new_tokens=4, temperature=0.0)
# Limit of a call that needs no disk, on a busy machine.
QUICK_S = 5.0
UNKNOWN_CALLS = 12  # More than the default threads of asyncio.
EXIT_S = 15.0


class Deployment:
    """A checkpoint and a directory with adapters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_checkpoint(folder)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        for name in ("read", "unread"):
            self.write(name)

    def write(self, name: str) -> None:
        ids = open_tokenizer(self.checkpoint / "tokenizer").encode(f"the {name}")
        write_adapter(self.adapters / f"{name}.safetensors", self.checkpoint, ids)

    @contextmanager
    def serve(self, **settings: Any) -> Iterator[Server]:
        limits: dict[str, Any] = {
            "adapters": str(self.adapters),
            "adapters_answer_s": ANSWER_S,
            "adapter_read_s": ANSWER_S,
            **settings,
        }
        with serving(
            self.checkpoint, self.folder / "s.yaml", self.folder / "log", **limits
        ) as server:
            yield server

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def generate(server: Server, adapter: str = "", timeout_s: float = WAIT_S) -> str:
    with server.client(timeout_s) as client:
        return client.generate("twelve", replace(SHORT, adapter=adapter)).text


def reason(server: Server, adapter: str, timeout_s: float = WAIT_S) -> str:
    """The reason with which a call for an adapter is refused."""
    with pytest.raises(CallError) as caught:
        generate(server, adapter, timeout_s)
    return caught.value.reason


def assert_quick_answers(server: Server) -> None:
    """Check that calls that need no disk are answered within QUICK_S."""
    for adapter in ("", "read"):
        started = time.monotonic()
        generate(server, adapter, QUICK_S)
        assert time.monotonic() - started < QUICK_S
    with server.client(QUICK_S) as client:
        assert {adapter.name for adapter in client.adapters()} >= {"read", "unread"}
    assert server.get("/health/ready")[0] == 200


def assert_exits(server: Server) -> None:
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < EXIT_S


SPECIAL_FILES = ("read.current", "new.safetensors", ".upload-0123456789abcdef.safetensors")


def test_special_files_delay_no_call(tmp_path: Path) -> None:
    """FIFOs in place of an alias, an adapter and an upload; links that lead to themselves."""
    deployment = Deployment(tmp_path)
    with deployment.serve(adapters_poll_s=0.1) as server:
        generate(server, "read")
        for name in SPECIAL_FILES:
            os.mkfifo(deployment.adapters / name)
        (deployment.adapters / "loop.safetensors").symlink_to("loop.safetensors")
        (deployment.adapters / "loop").symlink_to(".")
        (deployment.adapters / "device.safetensors").symlink_to("/dev/zero")
        eventually(lambda: "event=adapter_note_refused file=read.current" in deployment.log)
        assert_quick_answers(server)
        reasons = {reason(server, f"unknown{number}") for number in range(UNKNOWN_CALLS)}
        assert reasons == {"UNKNOWN_ADAPTER"}
        with server.client() as client, pytest.raises(CallError, match="not a regular file"):
            AdapterCalls(client).load("new")
        deployment.write("late")
        assert generate(server, "late")
        assert_exits(server)


def test_a_hung_directory_delays_only_the_calls_that_need_it(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    disk = HungDisk(deployment.adapters, tmp_path)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(UNKNOWN_CALLS) as pool:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        with deployment.serve() as server:
            answer = generate(server, "read")
            disk.stop()
            unknown: list[Future[str]] = [
                pool.submit(reason, server, f"unknown{number}") for number in range(UNKNOWN_CALLS)
            ]
            unread = pool.submit(reason, server, "unread")
            assert_quick_answers(server)
            assert generate(server, "read") == answer
            assert {call.result() for call in unknown} == {"STORAGE_TIMEOUT"}
            assert unread.result() == "ADAPTER_UNUSABLE"
            assert_quick_answers(server)
            with server.client() as client:
                calls = AdapterCalls(client)
                for change in (calls.load, calls.unload):
                    with pytest.raises(CallError) as caught:
                        change("unread@1")
                    assert (caught.value.code, caught.value.reason) == (
                        "UNAVAILABLE",
                        "STORAGE_TIMEOUT",
                    )
            disk.resume()
            eventually(lambda: _answers(server, "unread"))
            deployment.write("late")
            assert generate(server, "late")
            assert reason(server, "unknown") == "UNKNOWN_ADAPTER"
            disk.stop()
            for number in range(UNKNOWN_CALLS):
                pool.submit(generate, server, f"unknown{number}", ANSWER_S)
            assert_quick_answers(server)
            assert_exits(server)
    assert "event=stopped drained=True" in deployment.log
    assert "Traceback" not in deployment.log


def test_a_change_in_a_hung_directory_is_made_once(tmp_path: Path) -> None:
    """A change that runs is waited for up to `upload_s`; a change without a thread is dropped."""
    deployment = Deployment(tmp_path)
    disk = HungDisk(deployment.adapters, tmp_path)
    for version in range(2, 5):
        deployment.write(f"read@{version}")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        with (
            deployment.serve(upload_s=2 * ANSWER_S) as server,
            Client(server.address, WAIT_S) as client,  # Retries.
        ):
            calls = AdapterCalls(client)
            for version in range(1, 5):
                calls.promote(f"read@{version}")
            disk.stop()
            rollback = pool.submit(calls.rollback, "read")
            time.sleep(1.5 * ANSWER_S)
            disk.resume()
            assert rollback.result().version == 3
            disk.stop()
            with pytest.raises(CallError, match="may still be made") as caught:
                calls.rollback("read")
            assert (caught.value.code, caught.value.reason) == (
                "DEADLINE_EXCEEDED",
                "DEADLINE_PASSED",
            )
            unknown = [pool.submit(reason, server, f"u{n}") for n in range(OWNER_THREADS_MAX)]
            assert {call.result() for call in unknown} == {"STORAGE_TIMEOUT"}
            with server.client() as impatient_client, pytest.raises(CallError) as caught:
                AdapterCalls(impatient_client).promote("read@4")
            assert caught.value.reason == "STORAGE_TIMEOUT"
            disk.resume()
            records = [
                *4 * [("promote", "done", "")],
                ("promote", "refused", "STORAGE_TIMEOUT"),
                *2 * [("rollback", "done", "")],
            ]
            eventually(lambda: sorted(_change_records(deployment)) == records)
            # The record is written before the directory is scanned.
            eventually(lambda: calls.show("read").version == 2)


def _change_records(deployment: Deployment) -> list[tuple[str, str, str]]:
    """The action, status and reason of each change in the change log."""
    records = AdapterChangeLog(deployment.adapters).read()
    return [(record["action"], record["status"], record["reason"]) for record in records]


def _answers(server: Server, adapter: str) -> bool:
    try:
        return bool(generate(server, adapter))
    except CallError:
        return False


def test_a_server_starts_beside_a_hung_directory(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    disk = HungDisk(deployment.adapters, tmp_path)
    disk.stop()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        with deployment.serve() as server:
            assert generate(server)
            assert reason(server, "read") == "STORAGE_TIMEOUT"
            disk.resume()
            eventually(lambda: _answers(server, "read"))
            assert_exits(server)


def test_a_hundred_thousand_files_delay_no_call(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with deployment.serve(adapters_poll_s=0.1) as server:
        generate(server, "read")
        for number in range(100_000):
            descriptor = os.open(
                deployment.adapters / f"n{number}.safetensors", os.O_CREAT | os.O_WRONLY
            )
            os.close(descriptor)
        with server.client() as client:
            _refresh(client)
        assert_quick_answers(server)
        assert server.metric("preamble_adapter_load_failures_total") == 100_000
        assert_exits(server)
    refusals = deployment.log.count("event=adapter_refused")
    assert 0 < refusals < 10_000 and "event=adapters_refused" in deployment.log


def _refresh(client: Client) -> None:
    """Rescan the directory until a scan ends in time."""
    end = time.monotonic() + 10 * WAIT_S
    while time.monotonic() < end:
        try:
            AdapterCalls(client).load("read")
        except CallError as error:
            if error.reason != "STORAGE_TIMEOUT":
                raise
        else:
            return
    raise AssertionError("the scan has not ended")


def test_a_pipe_of_logs_that_is_not_read_stops_no_call(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    with deployment.serve() as server:
        for number in range(3_000):  # Each logs a line: together more than fits into a pipe.
            (deployment.adapters / f"bad{number}.safetensors").touch()
            if number % 100 == 0:
                reason(server, f"bad{number}")
        assert_quick_answers(server)
        server.process.send_signal(signal.SIGUSR2)
        assert_exits(server)
    os.close(reader)
