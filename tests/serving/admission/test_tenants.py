"""Admission of tenants: a front end alone, then a real server with a tokens file.

A missing role, a rate, a concurrency limit or a slow reader ends a call with a reason, the same on
every protocol; other tenants are not affected.
"""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.preamble.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2_grpc,
)
from protos.preamble.v1 import generation_pb2 as pb
from serving.admission.auth import Authenticator
from serving.frontend.call import CallFailure, Frontend
from serving.protocols.grpc_services import all_services
from serving.service.metrics import Metrics
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint
from tests.support.tokens_file import BOSS, CREW, GUEST, POOR, SLOW, sha256, tokens_file

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


# ------------------------------------------------------------------------------- the front end


def test_the_call_limit_does_not_apply_to_admin_calls() -> None:
    async def work() -> None:
        front = Frontend(Metrics(), Authenticator(), calls_max=2)
        async with front.call("w", "One"), front.call("w", "Two"):
            with pytest.raises(
                CallFailure, match=r"2 concurrent calls and takes at most 2 \(calls_max\)"
            ) as caught:
                async with front.call("w", "Three"):
                    pass
            assert caught.value.reason.name == "QUEUE_FULL" and caught.value.retry_s
            async with front.call("w", "GetLoad", while_draining=True):
                pass
        async with front.call("w", "Four"):
            pass

    asyncio.run(work())


def test_unread_response_parts_end_the_call_and_slow_production_does_not() -> None:
    async def work() -> None:
        front = Frontend(Metrics(), Authenticator(), slow_reader_s=1.5)
        async with front.call("w", "Slow") as call:
            for _ in range(4):
                await call.send_part(asyncio.sleep(0.5))
            await asyncio.sleep(1.8)  # With nothing to send, the reader is not slow.
        with pytest.raises(CallFailure, match=r"for 1\.5 s") as caught:
            async with front.call("w", "Stuck") as call:
                await call.send_part(asyncio.sleep(WAIT_S))
        assert caught.value.reason.name == "SLOW_READER"
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.wait_for(front.drain(), WAIT_S)

    asyncio.run(work())


# ---------------------------------------------------------------------------------- a real server


@dataclass(frozen=True)
class TenantServer:
    server: Server
    tokens: Path
    log: Path


PROBER = "prober-token-0123456789abcdef"
TENANTS: dict[str, Any] = {
    "prober": {
        "token_sha256": sha256(PROBER),
        "limits": {"requests_per_s": 0.01, "calls_max": 1},
    },
    "crew": {"token_sha256": sha256(CREW), "limits": {"calls_max": 2}},
    # A rate so low that no test is slow enough for it to refill.
    "guest": {"token_sha256": sha256(GUEST), "limits": {"requests_per_s": 0.01}},
    "poor": {"token_sha256": sha256(POOR), "limits": {"tokens_per_s": 1}},
    "boss": {"token_sha256": sha256(BOSS), "roles": ["adapters", "operator"]},
    "slow": {"token_sha256": sha256(SLOW)},
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantServer]:
    folder = tmp_path_factory.mktemp("access")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    tokens = folder / "tokens.yaml"
    log = folder / "log"
    limits = {
        "tokens": tokens_file(tokens, TENANTS),
        "secrets_poll_s": 0.1,
        "slow_reader_s": 1.0,
        "client_ping_s": 0.5,
        "connection_age_s": 4.0,
        "connections_max": 40,
    }
    with serving(checkpoint, folder / "s.yaml", log, **limits) as server:
        yield TenantServer(server, tokens, log)


@pytest.fixture
def channel(deployment: TenantServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(deployment.server.address) as channel:
        yield channel


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def generate(channel: grpc.Channel, metadata: Any, prompt: str = "1 2", new: int = 2) -> Any:
    message = pb.GenerateRequest(text=prompt, max_new_tokens=new)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    return stub.Generate(message, metadata=metadata, timeout=WAIT_S)


def describe_error(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, float]:
    """Code, reason, and seconds until a retry; 0: none."""
    assert isinstance(error, grpc.Call)
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    reason = ""
    wait_s = 0.0
    for detail in status.details:
        error_info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(error_info):
            reason = error_info.reason
        if detail.Unpack(retry):
            wait_s = retry.retry_delay.ToMilliseconds() / 1000
            assert trailers["grpc-retry-pushback-ms"] == str(round(1000 * wait_s))
    return error.code(), reason, wait_s


def refusal_reason(channel: grpc.Channel, token: str) -> str:
    """The reason of a refused call, or "no connection"; empty if it is not refused."""
    try:
        generate(channel, bearer(token))
    except grpc.RpcError as error:
        has_reached_the_server = isinstance(error, grpc.Call) and error.trailing_metadata()
        return describe_error(error)[1] if has_reached_the_server else "no connection"
    return ""


def test_calls_need_a_valid_token(deployment: TenantServer, channel: grpc.Channel) -> None:
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
    for metadata in (None, bearer("x" * 30), [("authorization", f"Basic {CREW}")]):
        with pytest.raises(grpc.RpcError) as caught:
            generate(channel, metadata)
        assert describe_error(caught.value) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "UNAUTHENTICATED",
            0,
        )


def test_huge_tokens_are_refused(deployment: TenantServer, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, bearer("x" * (1 << 20)))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # gRPC's own limit of metadata applies first.
        grpc.StatusCode.UNAUTHENTICATED,
    )
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2


def test_missing_roles_are_refused_before_the_message_is_read(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    with pytest.raises(grpc.RpcError, match="this call needs the role 'operator'") as caught:
        admin.Drain(admin_pb2.DrainRequest(), metadata=bearer(CREW), timeout=WAIT_S)
    assert describe_error(caught.value)[:2] == (
        grpc.StatusCode.PERMISSION_DENIED,
        "PERMISSION_DENIED",
    )
    with pytest.raises(
        grpc.RpcError, match=r"'boss' has the roles \['adapters', 'operator'\]"
    ) as caught:
        generate(channel, bearer(BOSS))
    assert describe_error(caught.value)[1] == "PERMISSION_DENIED"


def test_health_reflection_and_metrics_need_no_token(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "liveness", "readiness", "preamble.v1.GenerationService"):
        request = health_pb2.HealthCheckRequest(service=name)
        status = health.Check(request, timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=WAIT_S)
    assert isinstance(caught.value, grpc.Call) and caught.value.code() == grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = reflection.ServerReflectionInfo(iter([request]), timeout=WAIT_S)
    names = {service.name for service in reply.list_services_response.service}
    assert "preamble.v1.GenerationService" in names
    for path in ("/metrics", "/health/live", "/health/ready"):
        assert deployment.server.get(path)[0] == 200


def test_http_accepts_the_same_tokens(deployment: TenantServer) -> None:
    def models(credential: str | None) -> tuple[int, Any]:
        headers = {} if credential is None else {"Authorization": credential}
        http_request = urllib.request.Request(
            f"http://{deployment.server.http_address}/v1/models", None, headers
        )
        try:
            with urllib.request.urlopen(http_request, timeout=WAIT_S) as page:
                return page.status, json.load(page)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    assert models(f"Bearer {CREW}")[0] == 200
    for credential in (None, "Bearer " + "x" * 30, "Bearer \u00e9\u00e9\u00e9" + "x" * 30):
        status, body = models(credential)
        assert (status, body["error"]["code"]) == (401, "UNAUTHENTICATED")


def test_rate_errors_state_the_tenants_own_numbers(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    generate(channel, bearer(GUEST))
    with pytest.raises(
        grpc.RpcError, match=r"'guest' has used its 0\.01 requests per second"
    ) as caught:
        generate(channel, bearer(GUEST))
    code, reason, wait_s = describe_error(caught.value)
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 50 < wait_s <= 100

    generate(channel, bearer(POOR), new=300)  # More than a second's tokens: a debt remains.
    message = (
        r"needs 12 tokens .*, but the balance of tenant 'poor' is -\d+ tokens, "
        r"and grows by 1 tokens per second"
    )
    with pytest.raises(grpc.RpcError, match=message) as caught:
        generate(channel, bearer(POOR), new=10)
    assert (
        describe_error(caught.value)[1] == "RATE_LIMITED"
        and 100 < describe_error(caught.value)[2] <= 303
    )
    # No other tenant has to wait for it.
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2


# Health checks, and listings of models and adapters, of all protocols.
PROBE_METHODS = {
    "inference.GRPCInferenceService/ServerLive",
    "inference.GRPCInferenceService/ServerReady",
    "inference.GRPCInferenceService/ModelReady",
    "inference.GRPCInferenceService/ServerMetadata",
    "inference.GRPCInferenceService/ModelMetadata",
    "inference.GRPCInferenceService/ModelConfig",
    "inference.GRPCInferenceService/RepositoryIndex",
    "preamble.v1.AdminService/GetServerInfo",
    "preamble.v1.AdminService/GetLoad",
    "preamble.v1.AdapterService/ListAdapters",
    "preamble.v1.AdapterService/GetAdapter",
    "fmaas.GenerationService/ModelInfo",
}
PROBE_PATHS = (
    "/health/live",
    "/health/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/preamble",
    "/v2",
    "/v2/health/live",
    "/v2/models/preamble",
    "/v2/models/preamble/config",
    "/v2/models/preamble/ready",
    "/info",
    "/version",
    "/load",
)


def probe_refusal(channel: grpc.Channel, method: str) -> str:
    """The reason of a refused probe: an empty request may name no model. Empty: not refused."""
    probe: Any = channel.unary_unary(f"/{method}")
    try:
        probe(b"", metadata=bearer(PROBER), timeout=WAIT_S)
    except grpc.RpcError as error:
        return describe_error(error)[1]
    return ""


def test_probes_and_listings_are_not_charged_to_a_tenant(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    methods = {
        f"{protocol.service}/{method.name}"
        for protocol in all_services()
        for method in protocol.methods
        if method.is_probe
    }
    assert methods == PROBE_METHODS
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    message = pb.GenerateStreamRequest(text="1", max_new_tokens=3000)
    # The stream takes the tenant's only request of this minute, and its only concurrent call.
    stream = stub.GenerateStream(message, metadata=bearer(PROBER), timeout=WAIT_S)
    next(stream)
    assert refusal_reason(channel, PROBER) == "RATE_LIMITED"
    for method in sorted(methods):
        for _ in range(3):
            assert probe_refusal(channel, method) != "RATE_LIMITED", method
    for path in PROBE_PATHS:
        for _ in range(3):
            status, body = deployment.server.get(path, PROBER)
            assert status == 200, (path, body)
    assert refusal_reason(channel, PROBER) == "RATE_LIMITED"
    stream.cancel()


def test_concurrent_calls_are_limited_per_tenant(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    message = pb.GenerateStreamRequest(text="1", max_new_tokens=3000)
    streams = [stub.GenerateStream(message, metadata=bearer(CREW), timeout=WAIT_S) for _ in "ab"]
    for stream in streams:
        next(stream)
    with pytest.raises(
        grpc.RpcError, match="'crew' has 2 concurrent calls and may have 2"
    ) as caught:
        generate(channel, bearer(CREW))
    assert describe_error(caught.value)[1:] == ("RATE_LIMITED", 1.0)
    assert generate(channel, bearer(SLOW)).usage.completion_tokens == 2
    for stream in streams:
        stream.cancel()

    eventually(lambda: refusal_reason(channel, CREW) == "")


def test_tenants_do_not_share_the_prefix_cache(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    prompt = " ".join(str(number) for number in range(100, 164))
    assert generate(channel, bearer(CREW), prompt).usage.cached_tokens == 0
    assert generate(channel, bearer(CREW), prompt).usage.cached_tokens > 0
    assert generate(channel, bearer(SLOW), prompt).usage.cached_tokens == 0


def test_unread_streams_are_cancelled_and_free_their_kv_blocks(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    server = deployment.server
    # A window of a few kilobytes that does not grow, as on a slow network.
    narrow = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    message = pb.GenerateStreamRequest(
        text="1", max_new_tokens=4000, details=pb.Details(logprobs=20)
    )
    with grpc.insecure_channel(server.address, narrow) as stuck:
        stub = generation_pb2_grpc.GenerationServiceStub(stuck)
        labels = 'code="RESOURCE_EXHAUSTED",method="GenerateStream",wire="preamble"'
        ended_calls = f"preamble_requests_total{{{labels}}}"
        count_before = server.metric(ended_calls)
        stream = stub.GenerateStream(message, metadata=bearer(SLOW), timeout=2 * WAIT_S)
        next(stream)
        eventually(lambda: server.metric(ended_calls) == count_before + 1)
        eventually(lambda: server.metric("preamble_kv_blocks_held") == 0)
        assert server.metric("preamble_requests_in_flight") == 0
        assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
        with pytest.raises(grpc.RpcError, match=r"read nothing of the response for 1 s") as caught:
            list(stream)
        assert describe_error(caught.value)[:2] == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SLOW_READER",
        )


def test_connections_over_the_limit_are_closed_and_others_continue(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    generate(channel, bearer(CREW))
    host, port = deployment.server.address.rsplit(":", 1)
    connections = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(60)]
    accepted = [
        connection for connection in connections if connection.recv(1)
    ]  # A server first sends its settings.
    assert 20 <= len(accepted) < 40
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
    for connection in connections:
        connection.close()
    with grpc.insecure_channel(
        deployment.server.address, [("grpc.use_local_subchannel_pool", 1)]
    ) as other_channel:
        eventually(lambda: refusal_reason(other_channel, CREW) == "")


@pytest.mark.slow
def test_keepalive_pings_are_allowed_and_old_connections_finish_their_calls(
    deployment: TenantServer,
) -> None:
    # gRPC's default minimum of five minutes between pings would end it at the third ping.
    options = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    with grpc.insecure_channel(deployment.server.address, options) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watching)
        end = time.monotonic() + 6  # Its maximum age ends at 4.4 s at the latest.
        while time.monotonic() < end:
            assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
            time.sleep(0.2)
        assert watching.is_active()
        watching.cancel()


def test_changed_token_files_apply_while_calls_continue(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    message = pb.GenerateStreamRequest(text="1", max_new_tokens=600)
    stream = stub.GenerateStream(message, metadata=bearer(SLOW), timeout=2 * WAIT_S)
    received = len(next(stream).token_ids)
    fresh = "fresh-token-0123456789abcdef"
    tokens_file(deployment.tokens, {**TENANTS, "slow": {"token_sha256": sha256(fresh)}})

    eventually(lambda: refusal_reason(channel, SLOW) == "UNAUTHENTICATED")
    assert generate(channel, bearer(fresh)).usage.completion_tokens == 2
    assert received + sum(len(piece.token_ids) for piece in stream) == 600


def test_logs_contain_no_token_or_prompt_and_no_forged_line(
    deployment: TenantServer, channel: grpc.Channel
) -> None:
    forged = "x\nINFO event=forged"
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    adapters = adapters_pb2_grpc.AdapterServiceStub(channel)
    with pytest.raises(grpc.RpcError):
        stub.Generate(
            pb.GenerateRequest(text="611 617 613", adapter=forged),
            metadata=bearer(CREW),
            timeout=WAIT_S,
        )
    with pytest.raises(grpc.RpcError):
        adapters.ListAdapters(
            adapters_pb2.ListAdaptersRequest(page_token=forged),
            metadata=bearer(BOSS),
            timeout=WAIT_S,
        )
    generate(channel, bearer(CREW), "611 617 613")
    deployment.server.get("/forged%0aINFO%20event=forged")
    log_text = deployment.log.read_text()
    assert "event=tokens_read" in log_text
    for token in (CREW, GUEST, POOR, BOSS, SLOW):
        assert token not in log_text and sha256(token) not in log_text
    assert "611 617" not in log_text
    assert not any(line.startswith("INFO event=forged") for line in log_text.splitlines())
