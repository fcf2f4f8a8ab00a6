"""A server's life: refusals at its start, requests that end early, overload, drain.

Its model knows numbers only, so nothing but its length ends a completion, and a long one can be
caught in the middle.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.client import CallError, Client, Options
from gpt.formats.registry import open_checkpoint
from gpt.model.reference_logits import prove
from protos.preamble.v1 import generation_pb2, generation_pb2_grpc
from serving.__main__ import main, serve_parser
from serving.admission.auth import Access
from serving.config import ServerConfig
from serving.frontend.call import Ended, Front
from serving.frontend.grpc_transport import abort
from serving.request import DeadlinePassedError
from serving.service.metrics import Metrics
from tests.support.servers import (
    ROOT,
    WAIT_S,
    Server,
    command,
    eventually,
    serving,
    stopped,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

LONG = Options(max_new_tokens=4000)
SHORT = Options(max_new_tokens=2)
REFUSED_S = 1.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lifecycle"), tokenizer=False)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    folder = checkpoint.parent
    limits: dict[str, Any] = {"running_requests_max": 2, "queue_requests_max": 2}
    with serving(checkpoint, folder / "narrow.yaml", flight_dir=str(folder), **limits) as server:
        yield server


@dataclass(frozen=True)
class Logged:
    server: Server
    log: Path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    """Of a model with a proof; for tests in their order, as one kills its rank and one ends it."""
    folder = tmp_path_factory.mktemp("proved")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    prove(open_checkpoint(checkpoint)).save(checkpoint)
    with serving(checkpoint, log=folder / "log") as server:
        yield Logged(server, folder / "log")


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client
    eventually(lambda: idle(server))


def sent_at_the_end(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return str([tuple(item) for item in error.trailing_metadata()])


def idle(server: Server) -> bool:
    states = ("scheduler_running_requests", "scheduler_waiting_requests", "requests_in_flight")
    return all(server.metric(f"preamble_{state}") == 0 for state in states)


def test_an_error_for_a_caller_who_has_gone_is_counted_and_writes_no_stack() -> None:
    class Gone:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("the call is over")

    async def work() -> Front:
        front = Front(Metrics(), Access())
        with pytest.raises(Ended) as ended:
            async with front.call("preamble", "Generate"):
                raise DeadlinePassedError("late")
        # The library logs a stack for any other exception.
        with pytest.raises(asyncio.CancelledError):
            await abort(cast(Any, Gone()), ended.value)
        await asyncio.wait_for(front.drained(), 1)
        return front

    text = asyncio.run(work()).metrics.text().decode()
    labels = 'code="DEADLINE_EXCEEDED",method="Generate",wire="preamble"'
    assert f"preamble_requests_total{{{labels}}} 1.0" in text


def test_a_client_that_leaves_takes_its_request_along(server: Server, client: Client) -> None:
    stream = client.stream("1 2 3", LONG)
    next(stream)
    assert server.metric("preamble_scheduler_running_requests") == 1

    stream.close()

    eventually(lambda: idle(server))
    ended = 'preamble_requests_total{code="CANCELLED",method="GenerateStream",wire="preamble"}'
    eventually(lambda: server.metric(ended) >= 1)


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits(server: Server) -> None:
    with server.client(timeout_s=0.5) as hasty, server.client() as patient:
        with pytest.raises(CallError) as running:
            hasty.generate("1 2 3", LONG)
        assert running.value.code == "DEADLINE_EXCEEDED"
        eventually(lambda: idle(server))

        held = [patient.stream("1", LONG) for _ in range(2)]
        for stream in held:
            next(stream)
        with pytest.raises(CallError) as waiting:
            hasty.generate("1 2 3", SHORT)
        assert waiting.value.code == "DEADLINE_EXCEEDED"
        eventually(lambda: server.metric("preamble_scheduler_waiting_requests") == 0)
        for stream in held:
            stream.close()
        eventually(lambda: idle(server))


def test_a_full_queue_refuses_at_once_and_what_was_accepted_is_answered(
    server: Server, client: Client
) -> None:
    running = [client.stream("1", LONG) for _ in range(2)]
    for stream in running:
        next(stream)
    answers: list[int] = []
    waiting = [
        threading.Thread(
            target=lambda: answers.append(client.generate("2", SHORT).usage.completion_tokens)
        )
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    eventually(lambda: server.metric("preamble_scheduler_waiting_requests") == 2)

    with pytest.raises(CallError, match="queue_requests_max") as refused:
        client.generate("3", SHORT)

    assert refused.value.code == "RESOURCE_EXHAUSTED"
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as told:
            stub.Generate(generation_pb2.GenerateRequest(text="3"), timeout=WAIT_S)
        assert "('grpc-retry-pushback-ms', '1000')" in sent_at_the_end(told.value)
    assert answers == []  # Those who wait still do.
    for stream in running:
        stream.close()
    for thread in waiting:
        thread.join(WAIT_S)
    assert answers == [2, 2]


def test_a_server_replays_the_proof_and_tells_how_far_it_was(other: Logged) -> None:
    far = other.server.metric("preamble_proof_difference")
    assert 0 < far < 1e-5
    line = next(line for line in other.log.read_text().splitlines() if "proof_replayed" in line)
    assert f"event=proof_replayed difference={far:.3g} limit=0.001 best=128/128" in line


def test_a_killed_rank_is_told_and_replaced_and_what_had_told_nothing_is_answered(
    other: Logged,
) -> None:
    options, server = Options(max_new_tokens=2000), other.server
    with server.client(timeout_s=2 * WAIT_S) as client:
        (rank,) = server.ranks
        expected = client.generate("1 2 3", options).token_ids
        answers: list[list[int]] = []
        unary = threading.Thread(
            target=lambda: answers.append(client.generate("1 2 3", options).token_ids)
        )
        stream = client.stream("4 5 6", LONG)
        next(stream)
        unary.start()
        eventually(lambda: server.metric("preamble_scheduler_running_requests") == 2)

        os.kill(rank, signal.SIGKILL)
        eventually(lambda: bool(set(server.ranks) - {rank}))
        (heir,) = set(server.ranks) - {rank}
        with stopped(heir):  # It is not back before all this has been told.
            with pytest.raises(CallError, match="try again in a moment") as told:
                list(stream)
            assert told.value.code == "UNAVAILABLE"
            eventually(lambda: server.get("/health/ready") == (503, "the engine is lost\n"))
            assert server.get("/health/live")[0] == 200
            with pytest.raises(CallError, match="loaded again") as refused:
                client.generate("7", SHORT)
            assert refused.value.code == "UNAVAILABLE"
            assert server.metric("preamble_engine_up") == 0
        eventually(lambda: server.get("/health/ready")[0] == 200)
        assert server.metric("preamble_engine_restarts_total") == 1
        unary.join(WAIT_S)
        assert answers == [expected]


def test_sigterm_finishes_what_was_accepted_and_refuses_what_comes(other: Logged) -> None:
    server = other.server
    with server.client(timeout_s=2 * WAIT_S) as client:
        stream = client.stream("1 2 3", Options(max_new_tokens=2500))
        got = len(next(stream).token_ids)

        server.process.send_signal(signal.SIGTERM)

        eventually(lambda: server.get("/health/ready")[0] == 503)
        assert server.get("/health/live")[0] == 200
        with grpc.insecure_channel(server.address) as channel:
            request = health_pb2.HealthCheckRequest()
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(CallError) as refused:
            client.generate("4", SHORT)
        assert refused.value.code == "UNAVAILABLE"
        codes: set[str] = set()

        def insist() -> None:
            while server.process.poll() is None:
                with pytest.raises(CallError) as refused:
                    client.generate("4", SHORT)
                codes.add(refused.value.code)

        callers = [threading.Thread(target=insist) for _ in range(8)]
        for caller in callers:
            caller.start()
        got += sum(len(piece.token_ids) for piece in stream)
        assert got == 2500
        assert server.process.wait(WAIT_S) == 0
        for caller in callers:
            caller.join(WAIT_S)
        assert codes == {"UNAVAILABLE"}  # Also in the instant of the end.


def test_a_signal_has_the_last_steps_written_down_without_what_was_asked(
    server: Server, client: Client, checkpoint: Path
) -> None:
    client.generate("333 444", SHORT)

    server.process.send_signal(signal.SIGUSR2)

    eventually(lambda: any(checkpoint.parent.glob("*.jsonl")))
    (written,) = checkpoint.parent.glob("*.jsonl")
    eventually(lambda: "lengths" in written.read_text())
    steps = written.read_text()
    assert '"ids": [' not in steps and "333, 444" not in steps
    assert client.generate("1", SHORT).usage.completion_tokens == 2
    assert server.metric("preamble_step_duration_seconds_count") >= 2
    assert server.metric("preamble_kv_blocks") > 0


def test_a_signal_while_the_model_loads_ends_the_server_and_its_ranks(checkpoint: Path) -> None:
    words = command("serve", checkpoint, "--port", "0", "--http-port", "0")
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        started = process.stderr.readline()
        assert "event=ranks_started" in started
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, "")
        assert "event=stopped while=loading" in err
        assert "Traceback" not in err
        (rank,) = re.findall(r"pids=(\d+)", started)
        eventually(lambda: not Path(f"/proc/{rank}").exists())
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_drain_ends_when_its_time_is_over(checkpoint: Path) -> None:
    settings = checkpoint.parent / "drain.yaml"
    with serving(checkpoint, settings, drain_s=0.5) as server:
        drain_is_cut_short(server, signals=1)


def test_a_drain_ends_with_a_second_signal(server: Server) -> None:
    """The last of the tests of this server."""
    drain_is_cut_short(server, signals=2)


def drain_is_cut_short(server: Server, signals: int) -> None:
    with server.client() as client:
        stream = client.stream("1 2 3", LONG)
        next(stream)
        started = time.monotonic()

        server.process.send_signal(signal.SIGTERM)
        if signals == 2:
            eventually(lambda: server.get("/health/ready")[0] == 503)
            server.process.send_signal(signal.SIGTERM)

        with pytest.raises(CallError) as ended:
            list(stream)
        assert ended.value.code in ("UNAVAILABLE", "CANCELLED")
        assert server.process.wait(WAIT_S) == 0
        assert time.monotonic() - started < 10


def test_what_cannot_be_served_is_refused_in_one_sentence_and_at_once(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import_module("serving.server")  # How long that takes is not what is measured.

    def refusal(*words: str | Path) -> str:
        started = time.process_time()  # What others do on the machine is not what is measured.
        assert main(["serve", *map(str, words)]) == 1
        assert time.process_time() - started < REFUSED_S
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(checkpoint, "--port", str(port), "--http-port", "0") == (
            f"preamble serve: port {port} of 127.0.0.1 cannot be bound (Address already in use); "
            "choose another, or 0 for any that is free\n"
        )
        assert f"http_port {port}" in refusal(checkpoint, "--port", "0", "--http-port", str(port))
    assert "--insecure" in refusal(checkpoint, "--host", "0.0.0.0")
    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "not a directory" in refusal(checkpoint, "--adapters", tmp_path / "nothing")
    assert "--tp can be 1, 2" in refusal(checkpoint, "--tp", "3")
    assert "at most 2" in refusal(checkpoint, "--pp", "3")
    settings = tmp_path / "s.yaml"
    settings.write_text("queue_request_max: 3\n")
    assert "did you mean 'queue_requests_max'" in refusal(checkpoint, "--config", settings)


@pytest.mark.slow
def test_an_ipv6_address_is_bound_and_told_in_brackets(checkpoint: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(checkpoint, checkpoint.parent / "six.yaml", host="::1") as server:
        assert server.address.startswith("[::1]:")
        assert server.get("/health/ready")[0] == 200
        with server.client() as client:
            assert client.generate("1", SHORT).usage.completion_tokens == 2


def test_a_flag_overrides_the_file_and_every_flag_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("model: a\nport: 1\ndrain_s: 5\n")
    config = ServerConfig.read(str(file), {"port": 2, "host": None})
    assert (config.model, config.port, config.drain_s, config.host) == ("a", 2, 5.0, "127.0.0.1")
    flags = vars(serve_parser().parse_args([]))
    assert set(flags) - {"config", "profile"} <= set(ServerConfig.__dataclass_fields__)
    assert set(flags.values()) == {None}
