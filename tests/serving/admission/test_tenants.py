"""Who may call, and how much: a front, then a real server that has a file of tokens.

A role, a rate, a place too few and a reader's patience end a call with a reason, the same on every
wire; others never notice.
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
from serving.admission.auth import Access
from serving.frontend.call import Ended, Front
from serving.service.metrics import Metrics
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint
from tests.support.tokens_file import BOSS, CREW, GUEST, POOR, SLOW, sha256, tokens_file

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


# ------------------------------------------------------------------------------------ the front


def test_calls_at_once_are_bounded_but_for_those_who_look_into_the_server() -> None:
    async def work() -> None:
        front = Front(Metrics(), Access(), calls_max=2)
        async with front.call("w", "One"), front.call("w", "Two"):
            with pytest.raises(Ended, match=r"2 calls at once, and takes 2 \(calls_max\)") as told:
                async with front.call("w", "Three"):
                    pass
            assert told.value.reason.name == "QUEUE_FULL" and told.value.retry_s
            async with front.call("w", "GetLoad", draining=True):
                pass
        async with front.call("w", "Four"):
            pass

    asyncio.run(work())


def test_a_part_that_is_not_taken_ends_its_call_and_slow_parts_that_are_do_not() -> None:
    async def work() -> None:
        front = Front(Metrics(), Access(), slow_reader_s=1.5)
        async with front.call("w", "Slow") as call:
            for _ in range(4):
                await call.send(asyncio.sleep(0.5))
            await asyncio.sleep(1.8)  # Nothing to send: nobody is slow.
        with pytest.raises(Ended, match=r"for 1\.5 s") as told:
            async with front.call("w", "Stuck") as call:
                await call.send(asyncio.sleep(WAIT_S))
        assert told.value.reason.name == "SLOW_READER"
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.wait_for(front.drained(), WAIT_S)

    asyncio.run(work())


# ---------------------------------------------------------------------------------- a real server


@dataclass(frozen=True)
class World:
    server: Server
    tokens: Path
    log: Path


TENANTS: dict[str, Any] = {
    "crew": {"token_sha256": sha256(CREW), "limits": {"calls_max": 2}},
    # So little that no machine is slow enough to make room again while a test runs.
    "guest": {"token_sha256": sha256(GUEST), "limits": {"requests_per_s": 0.01}},
    "poor": {"token_sha256": sha256(POOR), "limits": {"tokens_per_s": 1}},
    "boss": {"token_sha256": sha256(BOSS), "roles": ["adapters", "operator"]},
    "slow": {"token_sha256": sha256(SLOW)},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("access")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    tokens, log = folder / "tokens.yaml", folder / "log"
    limits = {
        "tokens": tokens_file(tokens, TENANTS),
        "secrets_poll_s": 0.1,
        "slow_reader_s": 1.0,
        "client_ping_s": 0.5,
        "connection_age_s": 4.0,
        "connections_max": 40,
    }
    with serving(checkpoint, folder / "s.yaml", log, **limits) as server:
        yield World(server, tokens, log)


@pytest.fixture
def channel(world: World) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(world.server.address) as channel:
        yield channel


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def generate(channel: grpc.Channel, metadata: Any, prompt: str = "1 2", new: int = 2) -> Any:
    message = pb.GenerateRequest(text=prompt, max_new_tokens=new)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    return stub.Generate(message, metadata=metadata, timeout=WAIT_S)


def ended(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, float]:
    """Code, reason, and when to come back; 0: not said."""
    assert isinstance(error, grpc.Call)
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    reason, wait_s = "", 0.0
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        if detail.Unpack(retry):
            wait_s = retry.retry_delay.ToMilliseconds() / 1000
            assert trailers["grpc-retry-pushback-ms"] == str(round(1000 * wait_s))
    return error.code(), reason, wait_s


def reason_for(channel: grpc.Channel, token: str) -> str:
    """Why a call is refused; empty: it is not."""
    try:
        generate(channel, bearer(token))
    except grpc.RpcError as error:
        return ended(error)[1]
    return ""


def test_a_call_needs_a_token_and_the_right_one(world: World, channel: grpc.Channel) -> None:
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
    for metadata in (None, bearer("x" * 30), [("authorization", f"Basic {CREW}")]):
        with pytest.raises(grpc.RpcError) as told:
            generate(channel, metadata)
        assert ended(told.value) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", 0)


def test_a_token_of_a_megabyte_harms_nobody(world: World, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as told:
        generate(channel, bearer("x" * (1 << 20)))
    assert isinstance(told.value, grpc.Call)
    assert told.value.code() in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # The library's own limit of metadata comes first.
        grpc.StatusCode.UNAUTHENTICATED,
    )
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2


def test_a_role_lacking_is_refused_whatever_is_sent(world: World, channel: grpc.Channel) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    with pytest.raises(grpc.RpcError, match="this takes the role 'operator'") as told:
        admin.Drain(admin_pb2.DrainRequest(), metadata=bearer(CREW), timeout=WAIT_S)
    assert ended(told.value)[:2] == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    with pytest.raises(grpc.RpcError, match="'boss' has \\['adapters', 'operator'\\]") as told:
        generate(channel, bearer(BOSS))
    assert ended(told.value)[1] == "PERMISSION_DENIED"


def test_health_reflection_and_metrics_need_no_token(world: World, channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "liveness", "readiness", "preamble.v1.GenerationService"):
        asked = health_pb2.HealthCheckRequest(service=name)
        status = health.Check(asked, timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as told:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=WAIT_S)
    assert isinstance(told.value, grpc.Call) and told.value.code() == grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (told_of,) = reflection.ServerReflectionInfo(iter([asked]), timeout=WAIT_S)
    names = {one.name for one in told_of.list_services_response.service}
    assert "preamble.v1.GenerationService" in names
    for path in ("/metrics", "/health/live", "/health/ready"):
        assert world.server.get(path)[0] == 200


def test_http_takes_the_same_tokens(world: World) -> None:
    def models(credential: str | None) -> tuple[int, Any]:
        headers = {} if credential is None else {"Authorization": credential}
        asked = urllib.request.Request(
            f"http://{world.server.http_address}/v1/models", None, headers
        )
        try:
            with urllib.request.urlopen(asked, timeout=WAIT_S) as page:
                return page.status, json.load(page)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    assert models(f"Bearer {CREW}")[0] == 200
    for credential in (None, "Bearer " + "x" * 30, "Bearer \u00e9\u00e9\u00e9" + "x" * 30):
        status, said = models(credential)
        assert (status, said["error"]["code"]) == (401, "UNAUTHENTICATED")


def test_a_rate_is_told_with_the_caller_s_own_numbers_and_kept(
    world: World, channel: grpc.Channel
) -> None:
    generate(channel, bearer(GUEST))
    with pytest.raises(
        grpc.RpcError, match=r"'guest' has made its 0\.01 requests a second"
    ) as told:
        generate(channel, bearer(GUEST))
    code, reason, wait_s = ended(told.value)
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 50 < wait_s <= 100

    generate(channel, bearer(POOR), new=300)  # More than a second's worth: it is owed to by now.
    said = r"asks for 12 tokens .*, and tenant 'poor' has -\d+ left of its 1 a second"
    with pytest.raises(grpc.RpcError, match=said) as told:
        generate(channel, bearer(POOR), new=10)
    assert ended(told.value)[1] == "RATE_LIMITED" and 100 < ended(told.value)[2] <= 303
    # Nobody else has to wait for it.
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2


def test_calls_at_once_are_bounded_for_each_tenant(world: World, channel: grpc.Channel) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    message = pb.GenerateStreamRequest(text="1", max_new_tokens=3000)
    streams = [stub.GenerateStream(message, metadata=bearer(CREW), timeout=WAIT_S) for _ in "ab"]
    for stream in streams:
        next(stream)
    with pytest.raises(grpc.RpcError, match="'crew' has 2 calls at once, and may have 2") as told:
        generate(channel, bearer(CREW))
    assert ended(told.value)[1:] == ("RATE_LIMITED", 1.0)
    assert generate(channel, bearer(SLOW)).usage.completion_tokens == 2
    for stream in streams:
        stream.cancel()

    eventually(lambda: reason_for(channel, CREW) == "")


def test_what_one_tenant_has_asked_is_not_in_another_s_cache(
    world: World, channel: grpc.Channel
) -> None:
    prompt = " ".join(str(number) for number in range(100, 164))
    assert generate(channel, bearer(CREW), prompt).usage.cached_tokens == 0
    assert generate(channel, bearer(CREW), prompt).usage.cached_tokens > 0
    assert generate(channel, bearer(SLOW), prompt).usage.cached_tokens == 0


def test_a_client_that_reads_nothing_loses_its_call_and_its_keys_and_nobody_else_does(
    world: World, channel: grpc.Channel
) -> None:
    server = world.server
    # A window of a few kilobytes that does not grow, as a slow line has one.
    narrow = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    message = pb.GenerateStreamRequest(
        text="1", max_new_tokens=4000, details=pb.Details(logprobs=20)
    )
    with grpc.insecure_channel(server.address, narrow) as stuck:
        stub = generation_pb2_grpc.GenerationServiceStub(stuck)
        labels = 'code="RESOURCE_EXHAUSTED",method="GenerateStream",wire="preamble"'
        ends = f"preamble_requests_total{{{labels}}}"
        before = server.metric(ends)
        stream = stub.GenerateStream(message, metadata=bearer(SLOW), timeout=2 * WAIT_S)
        next(stream)
        eventually(lambda: server.metric(ends) == before + 1)
        eventually(lambda: server.metric("preamble_kv_blocks_held") == 0)
        assert server.metric("preamble_requests_in_flight") == 0
        assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
        with pytest.raises(grpc.RpcError, match=r"took nothing of the answer for 1 s") as told:
            list(stream)
        assert ended(told.value)[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


def test_connections_over_the_bound_are_closed_and_those_there_are_go_on(
    world: World, channel: grpc.Channel
) -> None:
    generate(channel, bearer(CREW))
    host, port = world.server.address.rsplit(":", 1)
    held = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(60)]
    greeted = [one for one in held if one.recv(1)]  # A server begins by saying its settings.
    assert 20 <= len(greeted) < 40
    assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
    for one in held:
        one.close()
    with grpc.insecure_channel(
        world.server.address, [("grpc.use_local_subchannel_pool", 1)]
    ) as other:
        eventually(lambda: reason_for(other, CREW) == "")


@pytest.mark.slow
def test_a_client_may_ping_on_a_silent_call_and_an_old_connection_lets_it_finish(
    world: World,
) -> None:
    # The library's own limit, five minutes, would end it at the third ping.
    options = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    with grpc.insecure_channel(world.server.address, options) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watching)
        end = time.monotonic() + 6  # Its age is over at 4.4 s at the latest.
        while time.monotonic() < end:
            assert generate(channel, bearer(CREW)).usage.completion_tokens == 2
            time.sleep(0.2)
        assert watching.is_active()
        watching.cancel()


def test_a_changed_file_of_tokens_holds_while_calls_go_on(
    world: World, channel: grpc.Channel
) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    message = pb.GenerateStreamRequest(text="1", max_new_tokens=600)
    stream = stub.GenerateStream(message, metadata=bearer(SLOW), timeout=2 * WAIT_S)
    got = len(next(stream).token_ids)
    fresh = "fresh-token-0123456789abcdef"
    tokens_file(world.tokens, {**TENANTS, "slow": {"token_sha256": sha256(fresh)}})

    eventually(lambda: reason_for(channel, SLOW) == "UNAUTHENTICATED")
    assert generate(channel, bearer(fresh)).usage.completion_tokens == 2
    assert got + sum(len(piece.token_ids) for piece in stream) == 600


def test_nothing_of_a_token_or_a_prompt_is_in_the_log_and_names_forge_no_line(
    world: World, channel: grpc.Channel
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
    world.server.get("/forged%0aINFO%20event=forged")
    said = world.log.read_text()
    assert "event=tokens_read" in said
    for token in (CREW, GUEST, POOR, BOSS, SLOW):
        assert token not in said and sha256(token) not in said
    assert "611 617" not in said
    assert not any(line.startswith("INFO event=forged") for line in said.splitlines())
