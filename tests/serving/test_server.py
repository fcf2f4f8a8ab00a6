"""The server's lifecycle: refusals at the start, requests that end early, overload, drain.

The model's tokens are numbers, so only the length ends a completion, and a long one can be
interrupted.
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
from gpt.reference_logits.replay import compute_proof
from gpt.settings import setting_fields
from protos.preamble.v1 import generation_pb2, generation_pb2_grpc
from serving.__main__ import main, serve_parser
from serving.admission.auth import Authenticator
from serving.config import ServerConfig
from serving.frontend.call import CallFailure, Frontend
from serving.frontend.grpc_transport import abort
from serving.request import DeadlinePassedError
from serving.service.metrics import Metrics
from tests.support.servers import (
    ROOT,
    WAIT_S,
    Server,
    command,
    eventually,
    is_idle,
    serving,
    suspended,
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
class LoggedServer:
    server: Server
    log: Path


@pytest.fixture(scope="module")
def server_with_proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedServer]:
    """A model with a reference proof; its tests run in order: one kills a rank, one ends it."""
    folder = tmp_path_factory.mktemp("proved")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    compute_proof(open_checkpoint(checkpoint)).save(checkpoint)
    # On a busy machine, the 2,500 tokens of the drain test can take longer than the default.
    settings = folder / "drain.yaml"
    with serving(checkpoint, settings, log=folder / "log", drain_s=2 * WAIT_S) as server:
        yield LoggedServer(server, folder / "log")


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client
    eventually(lambda: is_idle(server))


def trailing_metadata_text(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return str([tuple(item) for item in error.trailing_metadata()])


def test_errors_after_a_disconnect_are_counted_without_a_stack_trace() -> None:
    class Gone:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("the call is over")

    async def work() -> Frontend:
        front = Frontend(Metrics(), Authenticator())
        with pytest.raises(CallFailure) as caught:
            async with front.call("preamble", "Generate"):
                raise DeadlinePassedError("late")
        # The library logs a stack for any other exception.
        with pytest.raises(asyncio.CancelledError):
            await abort(cast(Any, Gone()), caught.value)
        await asyncio.wait_for(front.drain(), WAIT_S)
        return front

    text = asyncio.run(work()).metrics.render().decode()
    labels = 'code="DEADLINE_EXCEEDED",method="Generate",wire="preamble"'
    assert f"preamble_requests_total{{{labels}}} 1.0" in text


def test_requests_of_disconnected_clients_are_cancelled(server: Server, client: Client) -> None:
    stream = client.stream("1 2 3", LONG)
    next(stream)
    assert server.metric("preamble_scheduler_running_requests") == 1

    stream.close()

    eventually(lambda: is_idle(server))
    cancelled_requests = (
        'preamble_requests_total{code="CANCELLED",method="GenerateStream",wire="preamble"}'
    )
    eventually(lambda: server.metric(cancelled_requests) >= 1)


def test_deadlines_end_running_and_queued_requests(server: Server) -> None:
    with server.client(timeout_s=0.5) as short_timeout_client, server.client() as client:
        with pytest.raises(CallError) as running:
            short_timeout_client.generate("1 2 3", LONG)
        assert running.value.code == "DEADLINE_EXCEEDED"
        eventually(lambda: is_idle(server))

        running_streams = [client.stream("1", LONG) for _ in range(2)]
        for stream in running_streams:
            next(stream)
        with pytest.raises(CallError) as waiting:
            short_timeout_client.generate("1 2 3", SHORT)
        assert waiting.value.code == "DEADLINE_EXCEEDED"
        eventually(lambda: server.metric("preamble_scheduler_waiting_requests") == 0)
        for stream in running_streams:
            stream.close()
        eventually(lambda: is_idle(server))


def test_full_queues_refuse_at_once_and_complete_accepted_requests(
    server: Server, client: Client
) -> None:
    running = [client.stream("1", LONG) for _ in range(2)]
    for stream in running:
        next(stream)
    token_counts: list[int] = []
    waiting = [
        threading.Thread(
            target=lambda: token_counts.append(client.generate("2", SHORT).usage.completion_tokens)
        )
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    eventually(lambda: server.metric("preamble_scheduler_waiting_requests") == 2)

    with pytest.raises(CallError, match="queue_requests_max") as caught:
        client.generate("3", SHORT)

    assert caught.value.code == "RESOURCE_EXHAUSTED"
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught_rpc:
            stub.Generate(generation_pb2.GenerateRequest(text="3"), timeout=WAIT_S)
        assert "('grpc-retry-pushback-ms', '1000')" in trailing_metadata_text(caught_rpc.value)
    assert token_counts == []  # Queued requests are still waiting.
    for stream in running:
        stream.close()
    for thread in waiting:
        thread.join(WAIT_S)
    assert token_counts == [2, 2]


def test_the_proof_is_replayed_and_its_difference_reported(server_with_proof: LoggedServer) -> None:
    difference = server_with_proof.server.metric("preamble_proof_difference")
    assert 0 < difference < 1e-5
    line = next(
        line for line in server_with_proof.log.read_text().splitlines() if "proof_replayed" in line
    )
    assert f"event=proof_replayed difference={difference:.3g} limit=0.001 best=128/128" in line


def test_killed_ranks_restart_and_unstarted_requests_complete(
    server_with_proof: LoggedServer,
) -> None:
    options = Options(max_new_tokens=2000)
    server = server_with_proof.server
    with server.client(timeout_s=2 * WAIT_S) as client:
        (rank,) = server.ranks
        expected = client.generate("1 2 3", options).token_ids
        completions: list[list[int]] = []
        unary = threading.Thread(
            target=lambda: completions.append(client.generate("1 2 3", options).token_ids)
        )
        stream = client.stream("4 5 6", LONG)
        next(stream)
        unary.start()
        eventually(lambda: server.metric("preamble_scheduler_running_requests") == 2)

        os.kill(rank, signal.SIGKILL)
        eventually(lambda: bool(set(server.ranks) - {rank}))
        (remaining_rank,) = set(server.ranks) - {rank}
        with suspended(remaining_rank):  # It is not back before these checks.
            with pytest.raises(CallError, match="try again in a moment") as caught:
                list(stream)
            assert caught.value.code == "UNAVAILABLE"
            eventually(lambda: server.get("/health/ready") == (503, "the engine is lost\n"))
            assert server.get("/health/live")[0] == 200
            with pytest.raises(CallError, match="the model is being loaded") as caught_loading:
                client.generate("7", SHORT)
            assert caught_loading.value.code == "UNAVAILABLE"
            assert server.metric("preamble_engine_up") == 0
        eventually(lambda: server.get("/health/ready")[0] == 200)
        assert server.metric("preamble_engine_restarts_total") == 1
        unary.join(WAIT_S)
        assert completions == [expected]


def test_sigterm_completes_accepted_requests_and_refuses_new_ones(
    server_with_proof: LoggedServer,
) -> None:
    server = server_with_proof.server
    with server.client(timeout_s=2 * WAIT_S) as client:
        stream = client.stream("1 2 3", Options(max_new_tokens=2500))
        received = len(next(stream).token_ids)

        server.process.send_signal(signal.SIGTERM)

        eventually(lambda: server.get("/health/ready")[0] == 503)
        assert server.get("/health/live")[0] == 200
        with grpc.insecure_channel(server.address) as channel:
            request = health_pb2.HealthCheckRequest()
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(CallError) as caught:
            client.generate("4", SHORT)
        assert caught.value.code == "UNAVAILABLE"
        codes: set[str] = set()

        def call_until_closed() -> None:
            while server.process.poll() is None:
                try:
                    client.generate("4", SHORT)
                    codes.add("OK")
                except CallError as error:
                    codes.add(error.code)

        threads = [threading.Thread(target=call_until_closed) for _ in range(8)]
        for caller in threads:
            caller.start()
        received += sum(len(piece.token_ids) for piece in stream)
        assert received == 2500
        assert server.process.wait(2 * WAIT_S) == 0
        for caller in threads:
            caller.join(WAIT_S)
        assert codes == {"UNAVAILABLE"}  # Also at the very end.


def test_sigusr2_writes_recent_steps_without_prompts(
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


def test_signals_during_loading_end_the_server_and_its_ranks(checkpoint: Path) -> None:
    arguments = command("serve", checkpoint, "--port", "0", "--http-port", "0")
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
def test_drain_ends_at_its_time_limit(checkpoint: Path) -> None:
    settings = checkpoint.parent / "drain.yaml"
    with serving(checkpoint, settings, drain_s=0.5) as server:
        check_drain_is_cut_short(server, signals=1)


def test_a_second_signal_ends_the_drain(server: Server) -> None:
    """The last test of this server."""
    check_drain_is_cut_short(server, signals=2)


def check_drain_is_cut_short(server: Server, signals: int) -> None:
    with server.client() as client:
        stream = client.stream("1 2 3", LONG)
        next(stream)
        started = time.monotonic()

        server.process.send_signal(signal.SIGTERM)
        if signals == 2:
            eventually(lambda: server.get("/health/ready")[0] == 503)
            server.process.send_signal(signal.SIGTERM)

        with pytest.raises(CallError) as caught:
            list(stream)
        assert caught.value.code in ("UNAVAILABLE", "CANCELLED")
        assert server.process.wait(WAIT_S) == 0
        assert time.monotonic() - started < 10


def test_unservable_configurations_are_refused_quickly_in_one_sentence(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import_module("serving.server")  # Imported first, so that its time is not measured.

    def refusal(*arguments: str | Path) -> str:
        started = time.process_time()  # CPU time, which other processes do not affect.
        assert main(["serve", *map(str, arguments)]) == 1
        assert time.process_time() - started < REFUSED_S
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        assert refusal(checkpoint, "--port", str(port), "--http-port", "0") == (
            f"preamble serve: port {port} of 127.0.0.1 cannot be bound (Address already in use); "
            "choose another port, or 0 for any free port\n"
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
def test_ipv6_addresses_are_bound_and_printed_in_brackets(checkpoint: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(checkpoint, checkpoint.parent / "six.yaml", host="::1") as server:
        assert server.address.startswith("[::1]:")
        assert server.get("/health/ready")[0] == 200
        with server.client() as client:
            assert client.generate("1", SHORT).usage.completion_tokens == 2


def test_flags_override_the_file_and_every_flag_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("model: a\nport: 1\ndrain_s: 5\n")
    config = ServerConfig.read(str(file), {"port": 2, "host": None})
    network = config.network_config
    assert config.model_config.model == "a"
    assert (network.port, network.drain_s, network.host) == (2, 5.0, "127.0.0.1")
    flags = vars(serve_parser().parse_args([]))
    assert set(flags) - {"config", "profile"} <= set(setting_fields(ServerConfig))
    assert set(flags.values()) == {None}


def test_flags_of_vllm_for_adapters_are_accepted() -> None:
    modules = ["mail=/a", '{"name": "b", "path": "/b"}']
    flags = vars(serve_parser().parse_args(["m", "--enable-lora", "--lora-modules", *modules]))
    config = ServerConfig.read(None, flags)
    assert config.adapter_config.lora_modules == tuple(modules)
