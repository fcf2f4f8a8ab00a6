"""Process faults: a server of four ranks, with streams, whose processes and clients fail.

After each fault every stream ends, either with all expected tokens, or with one error after the
first of them. The server then serves again, has no running request and no additional process.
"""

import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.client import CallError, Options
from clients.options import fill_request
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from tests.support.chat_templates import CHATML
from tests.support.client_crowd import OWN_CONNECTION
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import Server, eventually, serving, write_checkpoint

RANKS = 4
STREAMS = 8
NEW = 160
SEED = 1
STEP_TIMEOUT_S = 4.0
# A stream ends within this time after a fault: the fault is detected, ranks restart, tokens follow.
END_S = 240.0
GROWTH_MAX = 512 << 20
GROWTH_LEFT_MAX = 64 << 20
RANK_LOSSES = {"ENGINE_LOST", "ENGINE_RESTARTING"}


def options(new: int = NEW) -> Options:
    return Options(max_new_tokens=new, temperature=0.0, ignore_ends=True)


class StreamClient(threading.Thread):
    """A stream on a connection of its own, and what it received."""

    def __init__(self, address: str, prompt: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.is_finished = False
        self.error: grpc.RpcError | None = None
        self.call: Any = None
        self.has_begun = threading.Event()

    def run(self) -> None:
        message = fill_request(pb.GenerateStreamRequest(), self.prompt, options())
        with grpc.insecure_channel(self._address, [OWN_CONNECTION]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            self.call = stub.GenerateStream(message, timeout=END_S)
            try:
                for piece in self.call:
                    self.token_ids += piece.token_ids
                    self.has_begun.set()
                    self.is_finished |= piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED
            except grpc.RpcError as error:
                self.error = error
        self.has_begun.set()

    def outcome(self, expected: list[int], *, may_be_cancelled: bool) -> str:
        """Check what the stream received; return how it ended."""
        assert self.token_ids == expected[: len(self.token_ids)], "wrong tokens"
        if self.error is None:
            assert self.is_finished and self.token_ids == expected, "tokens are missing"
            return "finished"
        code, details = self.error.code().name, self.error.details()
        if may_be_cancelled and code in ("CANCELLED", "UNAVAILABLE"):
            return "cancelled"
        assert code == "UNAVAILABLE" and details, f"{code}: {details}"
        return "lost"


@dataclass
class Drill:
    """A server with streams, and the answers of an undisturbed server."""

    server: Server
    prompts: list[str]
    draw: random.Random = field(default_factory=lambda: random.Random(SEED))
    expected: dict[str, list[int]] = field(default_factory=dict)
    streams: list[StreamClient] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    idle_bytes: int = 0
    peak_bytes: int = 0

    def begin(self) -> None:
        for prompt in self.prompts:
            self.expected[prompt] = self.ask(prompt)
        assert self.ask_chat() == 200
        self.idle_bytes = anonymous_bytes(self.server.process.pid)

    def ask(self, prompt: str) -> list[int]:
        with self.server.client(END_S) as client:
            return list(client.generate(prompt, options()).token_ids)

    def ask_chat(self) -> int:
        messages = [{"role": "user", "content": "one"}]
        body = {"messages": messages, "max_tokens": 2}
        return self.server.request("/v1/chat/completions", body)[0]

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order."""
        return [pid for pid in self.server.ranks if "rank_process" in command_line(pid)]

    @property
    def template_process(self) -> int:
        (pid,) = [pid for pid in self.server.ranks if "template_sandbox" in command_line(pid)]
        return pid

    def start_streams(self, moment: str) -> None:
        """Start all streams, and wait for the moment of the fault."""
        self.streams = [StreamClient(self.server.address, prompt) for prompt in self.prompts]
        if moment == "idle":
            return
        for stream in self.streams:
            stream.start()
        if moment == "decode":
            for stream in self.streams:
                assert stream.has_begun.wait(END_S)
        time.sleep(self.draw.uniform(0.0, 0.2))

    def check(self, *, may_be_cancelled: bool = False) -> None:
        """Check all streams, and that the server serves again and has no running request."""
        for stream in self.streams:
            if stream.ident is None:
                continue
            end = time.monotonic() + END_S
            while stream.is_alive():
                pid = self.server.process.pid
                self.peak_bytes = max(self.peak_bytes, anonymous_bytes(pid))
                assert time.monotonic() < end, "a stream hangs"
                stream.join(0.1)
            expected = self.expected[stream.prompt]
            self.outcomes[stream.outcome(expected, may_be_cancelled=may_be_cancelled)] += 1
        prompt = self.draw.choice(self.prompts)
        eventually(lambda: self._answers(prompt), END_S)
        assert self.ask_chat() == 200
        with self.server.client() as client:
            eventually(lambda: client.load().running_requests == 0, END_S)
            eventually(lambda: client.load().kv_blocks_held == 0, END_S)
        eventually(lambda: len(self.ranks) == RANKS, END_S)
        eventually(lambda: len(self.server.ranks) <= RANKS + 1, END_S)
        assert self.peak_bytes - self.idle_bytes < GROWTH_MAX

    def _answers(self, prompt: str) -> bool:
        try:
            return self.ask(prompt) == self.expected[prompt]
        except CallError as error:
            if error.reason not in RANK_LOSSES:
                raise
            return False


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


Fault = Callable[[Drill], object]


def signal_rank(number: int, *ranks: int) -> Fault:
    def fault(drill: Drill) -> None:
        pids = drill.ranks
        for rank in ranks:
            os.kill(pids[rank], number)

    return fault


def stop_briefly(rank: int) -> Fault:
    """Stop a rank for less time than the limit of a step."""

    def fault(drill: Drill) -> None:
        pid = drill.ranks[rank]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STEP_TIMEOUT_S / 4)
        os.kill(pid, signal.SIGCONT)

    return fault


def kill_during_restart(rank: int) -> Fault:
    """Kill a rank, and one of the ranks that are started in its place."""

    def fault(drill: Drill) -> None:
        old = set(drill.ranks)
        os.kill(drill.ranks[rank], signal.SIGKILL)
        eventually(lambda: len(set(drill.ranks) - old) > rank, END_S)
        time.sleep(drill.draw.uniform(0.0, 2.0))
        new = sorted(set(drill.ranks) - old)
        with suppress(ProcessLookupError):
            os.kill(new[rank], signal.SIGKILL)

    return fault


def signal_template(number: int) -> Fault:
    return lambda drill: os.kill(drill.template_process, number)


def stop_front_end(drill: Drill) -> None:
    os.kill(drill.server.process.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(drill.server.process.pid, signal.SIGCONT)


def cancel_streams(drill: Drill) -> None:
    for stream in drill.streams:
        if stream.call is not None:
            stream.call.cancel()


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def half_open_clients(drill: Drill) -> None:
    """Clients that send a part of a request and close the connection."""
    body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    connections = []
    for data in (b"", b"P", b"POST /v1/compl", body, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        for address in (drill.server.http_address, drill.server.address):
            connection = socket.create_connection(address_of(address))
            connection.sendall(data)
            connections.append(connection)
    time.sleep(0.2)
    for number, connection in enumerate(connections):
        if number % 2:  # Close with a reset.
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()


STREAM_BODY = b'{"prompt": "one", "max_tokens": 100, "stream": true, "ignore_eos": true}'
STREAM_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(STREAM_BODY), STREAM_BODY)
)


def reset_http_streams(drill: Drill) -> None:
    """HTTP clients that reset their connections while their streams run."""
    for _ in range(4):
        connection = socket.create_connection(address_of(drill.server.http_address))
        connection.sendall(STREAM_REQUEST)
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def unread_http_streams(drill: Drill) -> None:
    """HTTP clients that do not read their streams, and close them later."""
    connections = []
    for _ in range(4):
        connection = socket.create_connection(address_of(drill.server.http_address))
        connection.sendall(STREAM_REQUEST * 3)
        connections.append(connection)
    time.sleep(0.5)
    for connection in connections:
        connection.close()


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Lower a soft limit of a running process during the block."""
    previous = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (min(soft, previous[1]), previous[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, previous)


def no_descriptors(*, kill: bool) -> Fault:
    """The front end has no free file descriptor for a while; optionally, a rank is killed."""

    def fault(drill: Drill) -> None:
        pid = drill.server.process.pid
        used = len(os.listdir(f"/proc/{pid}/fd"))
        connections = []
        with limited(pid, resource.RLIMIT_NOFILE, used + 4):
            for _ in range(40):
                with suppress(OSError):
                    connections.append(
                        socket.create_connection(address_of(drill.server.http_address), 1.0)
                    )
            if kill:
                os.kill(drill.ranks[2], signal.SIGKILL)
            time.sleep(2.0)
            ticks = processor_ticks(pid)
            time.sleep(1.0)
            if not any(stream.is_alive() for stream in drill.streams):
                assert processor_ticks(pid) - ticks < 80, "a busy loop"
        for connection in connections:
            connection.close()

    return fault


def processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def full_disk(drill: Drill) -> None:
    """No process of the server can write to a file; a rank is killed."""

    def limit_files(soft: int) -> None:
        # New ranks inherit the limit of the front end.
        for pid in (drill.server.process.pid, *drill.ranks):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    limit_files(0)
    os.kill(drill.ranks[1], signal.SIGKILL)
    time.sleep(2.0)
    limit_files(resource.RLIM_INFINITY)


def garbage_to_listeners(drill: Drill) -> None:
    """Random bytes to every port on which a process of the server listens."""
    for port in listening_ports([drill.server.process.pid, *drill.server.ranks]):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as connection:
            connection.sendall(drill.draw.randbytes(4096))


def listening_ports(pids: list[int]) -> set[int]:
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(link))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
            ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports


@dataclass(frozen=True)
class Case:
    name: str
    moment: str  # "idle", "prefill" or "decode".
    fault: Fault
    may_cancel: bool = False  # Whether the fault ends the clients' streams.


MOMENTS = ("idle", "prefill", "decode")
SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
}


def cases() -> Iterator[Case]:
    for moment in MOMENTS:
        for rank in range(RANKS):
            for name, number in SIGNALS.items():
                yield Case(f"rank {rank} {name}", moment, signal_rank(number, rank))
        for ranks in ((0, 1), (1, 2), (0, 3), (1, 3), (0, 1, 2, 3)):
            yield Case(f"ranks {ranks} killed", moment, signal_rank(signal.SIGKILL, *ranks))
        for rank in (0, 3):
            yield Case(f"rank {rank} stopped briefly", moment, stop_briefly(rank))
        yield Case("template killed", moment, signal_template(signal.SIGKILL))
        yield Case("template stopped", moment, signal_template(signal.SIGSTOP))
        yield Case("front end stopped", moment, stop_front_end)
        yield Case("half-open clients", moment, half_open_clients)
        yield Case("HTTP streams reset", moment, reset_http_streams)
        yield Case("HTTP streams unread", moment, unread_http_streams)
        yield Case("no file descriptors", moment, no_descriptors(kill=False))
        yield Case("random bytes to all ports", moment, garbage_to_listeners)
    for moment in ("prefill", "decode"):
        yield Case("streams cancelled", moment, cancel_streams, may_cancel=True)
        yield Case("no file descriptors, rank killed", moment, no_descriptors(kill=True))
        yield Case("full disk, rank killed", moment, full_disk)
    for rank in range(RANKS):
        yield Case(f"rank {rank} killed during its restart", "decode", kill_during_restart(rank))


CASES = tuple(cases())
# A few of the cases, for the suite of the slow tests.
QUICK = (
    "rank 3 stopped",
    "template stopped",
    "HTTP streams reset",
    "no file descriptors, rank killed",
    "rank 0 killed during its restart",
)


@contextmanager
def drill_server(folder: Path) -> Iterator[Drill]:
    checkpoint = write_checkpoint(folder)
    (checkpoint / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    settings = {
        "tp": 2,
        "pp": 2,
        "step_timeout_s": STEP_TIMEOUT_S,
        "flight_dir": str(folder),
        "chat_template_s": 2.0,
    }
    with serving(checkpoint, folder / "s.yaml", folder / "log", **settings) as server:
        drill = Drill(server, [f"{number} and {number}?" for number in range(STREAMS)])
        drill.begin()
        yield drill
        pids = server.ranks
        pid = server.process.pid
        eventually(lambda: anonymous_bytes(pid) - drill.idle_bytes < GROWTH_LEFT_MAX)
        assert server.stop() == 0
        eventually(lambda: not any(Path(f"/proc/{rank}").exists() for rank in pids))
    assert (folder / "log").stat().st_size < 16 << 20


def run(drill: Drill, selected: list[Case]) -> None:
    failures = []
    for number, case in enumerate(selected):
        drill.start_streams(case.moment)
        started = time.monotonic()
        verdict = "passed"
        try:
            case.fault(drill)
            drill.check(may_be_cancelled=case.may_cancel)
        except Exception as error:
            verdict = repr(error)[:500]
            failures.append(f"{case.name}, {case.moment}: {verdict}")
            if drill.server.process.poll() is not None:
                break
        seconds = time.monotonic() - started
        progress = f"{number + 1}/{len(selected)}"
        print(f"{progress} {case.name}, {case.moment}: {verdict}, {seconds:.1f} s", flush=True)
    print(
        f"streams: {dict(drill.outcomes)}; peak {(drill.peak_bytes - drill.idle_bytes) >> 20} MiB"
    )
    assert not failures, "\n".join([f"{len(failures)} failures", *failures])


@pytest.mark.slow
def test_faults_of_each_kind_lose_nothing(tmp_path: Path) -> None:
    selected = [next(case for case in reversed(CASES) if case.name == name) for name in QUICK]
    with drill_server(tmp_path) as drill:
        run(drill, selected)


@pytest.mark.soak
def test_a_hundred_faults_lose_nothing(tmp_path: Path) -> None:
    assert len(CASES) >= 100
    order = list(CASES)
    random.Random(SEED).shuffle(order)
    with drill_server(tmp_path) as drill:
        run(drill, order)
