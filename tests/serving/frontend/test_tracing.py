"""Traces, from real servers to a real receiver of OTLP: what is told of a call, and what it costs.

The receiver is a gRPC server of the test; it takes spans, hangs, or is not there at all. Nothing of
that may be seen by who is served.
"""

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.client import Client, Options
from protos.foreign import package
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.frontend.call_origin import Came
from serving.logs import Sparing
from tests.support.servers import (
    START_S,
    WAIT_S,
    Server,
    command,
    eventually,
    serving,
    write_adapter,
)
from tests.support.servers import write_checkpoint as checkpoint_in

pytest.importorskip("opentelemetry.proto", reason="the extra `traces` is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from serving.frontend.tracing import CLOSE_S, QUEUE_SPANS_MAX, Traces

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

SECRET = "314 159 265 358"
TRACE, PARENT = "a1" * 16, "b2" * 8
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
PREFIX = "preamble.v1.GenerationService"
# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Receiver(otlp_grpc.TraceServiceServicer):
    """Takes what comes; with `hold` set, nothing until that is over."""

    resources: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    hold: threading.Event | None = None
    asked: int = 0
    address: str = ""

    def Export(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.hold is not None:
            self.hold.wait(60)
        for resource in request.resource_spans:
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return otlp.ExportTraceServiceResponse()

    def of(self, trace_id: bytes) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def whole(self, **facts: object) -> tuple[Span, list[Span]]:
        """The call whose span has these attributes, and what is below it; waits for it."""

        def found() -> list[Span]:
            return [one for one in self.spans if facts.items() <= attributes(one).items()]

        eventually(lambda: bool(found()))
        (span,) = found()
        return span, [one for one in self.spans if one.parent_span_id == span.span_id]


@contextmanager
def receiving(*, hold: threading.Event | None = None) -> Iterator[Receiver]:
    receiver = Receiver(hold=hold)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        if hold is not None:
            hold.set()
        server.stop(0).wait(10)


def attributes(span: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        told[one.key] = [x.string_value for x in value.values] if kind == "array_value" else value
    return told


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@dataclass
class World:
    server: Server
    receiver: Receiver
    checkpoint: Path
    log: Path

    def stub(self, channel: grpc.Channel) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("traces")
    checkpoint = checkpoint_in(folder, tokenizer=False)  # Nothing ends an answer early.
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters/sum@3.safetensors", checkpoint, [5, 6, 7])
    limits: dict[str, Any] = {
        "adapters": str(folder / "adapters"),
        "running_requests_max": 2,
        "queue_requests_max": 2,
    }
    log = folder / "log"
    with receiving() as receiver:
        limits |= {"traces": receiver.address, "traces_share": 0.0}
        with serving(checkpoint, folder / "s.yaml", log, **limits) as server:
            yield World(server, receiver, checkpoint, log)


def generate(
    world: World, label: str, parent: str = SAMPLED, stream: bool = False, **more: Any
) -> None:
    """A call of our own wire, with a parent and a name."""
    metadata = [("x-request-id", label), ("traceparent", parent)]
    fields = {"text": SECRET, "max_new_tokens": 6, **more}
    with grpc.insecure_channel(world.server.address) as channel:
        stub = world.stub(channel)
        if stream:
            message = pb.GenerateStreamRequest(**fields)
            list(stub.GenerateStream(message, metadata=metadata, timeout=30))
        else:
            stub.Generate(pb.GenerateRequest(**fields), metadata=metadata, timeout=30)


def post(world: World, label: str, body: dict[str, Any]) -> str | None:
    """The answer's name for the request."""
    request = urllib.request.Request(
        f"http://{world.server.http_address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "traceparent": SAMPLED, "X-Request-Id": label},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
        name: str | None = answer.headers["x-request-id"]
        return name


# ------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_a_span_below_its_callers_and_its_phases_are_below_it(
    world: World, stream: bool
) -> None:
    label = f"phases-{stream}"
    generate(world, label, stream=stream, adapters=["sum"])
    span, below = world.receiver.whole(**{"preamble.request_id": label})
    method = f"{PREFIX}/{'GenerateStream' if stream else 'Generate'}"
    assert span.name == method and span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    facts = attributes(span)
    assert facts["rpc.system.name"] == "grpc" and facts["rpc.method"] == method
    assert facts["rpc.response.status_code"] == "OK" and "error.type" not in facts
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.request.model"] == world.checkpoint.name
    assert facts["gen_ai.usage.input_tokens"] == 4  # Numbers are tokens here.
    assert facts["gen_ai.usage.output_tokens"] == 6
    assert facts["gen_ai.request.max_tokens"] == 6
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["preamble.adapters"] == ["sum@3"] and facts["preamble.virtual_tokens"] == 3
    assert span.status.code == 0

    assert [one.name for one in below] == ["admission", "queue", "prefill", "decode"]
    for one in below:
        assert one.trace_id == span.trace_id and one.kind == Span.SPAN_KIND_INTERNAL
        assert one.start_time_unix_nano >= span.start_time_unix_nano - 5e6
        assert one.end_time_unix_nano <= span.end_time_unix_nano + 5e6
    queue, prefill, decode = below[1:]
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert seconds(prefill) > 0 and seconds(decode) > 0
    assert sum(map(seconds, below)) <= seconds(span) + 0.01


def test_time_in_the_queue_is_told_and_counted(world: World) -> None:
    metric = world.server.metric
    counts = {
        name: metric(f"preamble_{name}_duration_seconds_count")
        for name in ("queue", "prefill", "decode")
    }
    before = metric("preamble_queue_duration_seconds_sum")
    with Client(world.server.address, 60) as client, futures.ThreadPoolExecutor(2) as pool:
        long = [pool.submit(client.generate, SECRET, Options(max_new_tokens=3000)) for _ in "12"]
        eventually(lambda: metric("preamble_scheduler_running_requests") == 2)
        generate(world, "waits")
        assert all(one.result() for one in long)
    span, below = world.receiver.whole(**{"preamble.request_id": "waits"})
    queue = next(one for one in below if one.name == "queue")
    prefill = next(one for one in below if one.name == "prefill")
    assert seconds(queue) > seconds(prefill)
    assert seconds(queue) > 0.2 * seconds(span)
    for name, count in counts.items():
        assert metric(f"preamble_{name}_duration_seconds_count") == count + 3
    waited = metric("preamble_queue_duration_seconds_sum") - before
    assert waited == pytest.approx(seconds(queue), rel=0.5)


def test_http_calls_are_told_in_its_own_words(world: World) -> None:
    body = {"prompt": [SECRET, "1 2"], "max_tokens": 5, "n": 2, "seed": 1, "temperature": 0.5}
    assert post(world, "over-http", body) == "over-http"
    assert post(world, "streamed", {"prompt": SECRET, "stream": True}) == "streamed"
    span, below = world.receiver.whole(**{"preamble.request_id": "over-http"})
    facts = attributes(span)
    assert span.name == "POST /v1/completions"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert facts["http.request.method"] == "POST" and facts["http.route"] == "/v1/completions"
    assert facts["http.response.status_code"] == 200 and facts["url.scheme"] == "http"
    assert facts["gen_ai.usage.output_tokens"] == 4 * 5
    assert facts["gen_ai.usage.input_tokens"] == 4 + 2  # A prompt counts once.
    assert facts["gen_ai.request.choice.count"] == 4
    assert facts["gen_ai.request.temperature"] == 0.5
    names = [one.name for one in below]
    assert [names.count(name) for name in ("admission", "queue", "prefill", "decode")] == [
        *(2, 4, 4, 4)
    ]


def test_requests_of_one_stream_are_spans_below_it(world: World) -> None:
    infer = package("kserve")
    request = infer.ModelInferRequest(model_name="preamble", id="7")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(SECRET.encode())
    request.parameters["max_tokens"].int64_param = 4
    with grpc.insecure_channel(world.server.address) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            infer.ModelInferRequest.SerializeToString,
            infer.ModelStreamInferResponse.FromString,
        )
        metadata = (("traceparent", SAMPLED), ("x-correlation-id", "a-stream"))
        answers = list(call(iter([request, request]), metadata=metadata, timeout=30))
        assert not any(answer.error_message for answer in answers)
    facts = {"preamble.request_id": "a-stream", "rpc.system.name": "grpc"}
    span, below = world.receiver.whole(**facts)
    assert span.name == "inference.GRPCInferenceService/ModelStreamInfer"
    assert [one.name for one in below] == ["ModelStreamInfer/request"] * 2
    for part in below:
        assert attributes(part)["gen_ai.usage.output_tokens"] == 4
        assert [one.name for one in world.receiver.spans if one.parent_span_id == part.span_id]


def test_a_bad_end_has_its_reason_and_is_an_error_if_it_is_the_servers(world: World) -> None:
    with pytest.raises(grpc.RpcError):
        generate(world, "wrong", adapters=["nobody"])
    span, _ = world.receiver.whole(**{"preamble.request_id": "wrong"})
    facts = attributes(span)
    assert facts["error.type"] == "UNKNOWN_ADAPTER" and span.status.code == 0
    assert facts["rpc.response.status_code"] == "NOT_FOUND"
    with grpc.insecure_channel(world.server.address) as channel:
        stub = world.stub(channel)
        stub.Generate(pb.GenerateRequest(text=SECRET, max_new_tokens=1))  # It is connected.
        metadata = [("traceparent", SAMPLED), ("x-request-id", "late")]
        message = pb.GenerateRequest(text=SECRET, max_new_tokens=4000)
        with pytest.raises(grpc.RpcError):
            stub.Generate(message, metadata=metadata, timeout=1.5)
    span, below = world.receiver.whole(**{"preamble.request_id": "late"})
    assert attributes(span)["error.type"] in ("DEADLINE_PASSED", "CANCELLED")
    if attributes(span)["error.type"] == "DEADLINE_PASSED":
        assert (span.status.code, span.status.message) == (2, "DEADLINE_PASSED")
    assert attributes(span)["gen_ai.usage.input_tokens"] == 4
    assert [one.name for one in below if one.name != "decode"] == ["admission", "queue", "prefill"]


def test_of_an_unsampled_trace_nothing_is_told_and_of_none_by_the_share(world: World) -> None:
    """The share is 0 here, so that only what a caller has sampled is told."""
    total = "preamble_trace_spans_sent_total"
    eventually(lambda: world.server.metric(total) == len(world.receiver.spans))
    sent = world.server.metric(total)
    generate(world, "unsampled", parent=UNSAMPLED)
    generate(world, "wrong parent", parent="00-zz-1-01")
    with world.server.client() as client:
        client.generate(SECRET, Options(max_new_tokens=2))
    generate(world, "sampled")
    world.receiver.whole(**{"preamble.request_id": "sampled"})
    labels = {attributes(span).get("preamble.request_id") for span in world.receiver.spans}
    assert not labels & {"unsampled", "wrong parent"}
    # The call, and four phases.
    eventually(lambda: world.server.metric(total) == sent + 5)


def test_the_log_names_the_call_as_its_caller_and_its_trace_do(world: World) -> None:
    waiting = "preamble_scheduler_waiting_requests"
    message = pb.GenerateRequest(text=SECRET, max_new_tokens=4000)
    with grpc.insecure_channel(world.server.address) as channel:
        busy = [world.stub(channel).Generate.future(message) for _ in range(4)]
        eventually(lambda: world.server.metric(waiting) == 2)
        with pytest.raises(grpc.RpcError):
            generate(world, "too 'much'")
        assert [one.cancel() for one in busy] == [True] * 4
    lines = [line for line in world.log.read_text().splitlines() if "event=call_ended" in line]
    assert re.search(rf"label=\"too 'much'\" trace='{TRACE}'", lines[-1]), lines
    eventually(lambda: world.server.metric("preamble_requests_in_flight") == 0)


def test_no_span_has_a_prompt_and_the_server_says_which_it_is(world: World) -> None:
    assert world.receiver.spans
    told = str([(span.name, attributes(span), span.events) for span in world.receiver.spans])
    assert SECRET not in told and "314" not in told
    names = [attributes(resource)["service.name"] for resource in world.receiver.resources]
    assert set(names) == {"preamble"}
    assert world.server.metric("preamble_trace_spans_dropped_total") == 0


# ------------------------------------------------------------------------- what it must not disturb


@pytest.mark.parametrize("receiver", ["down", "hangs"])
def test_a_receiver_that_takes_nothing_hinders_neither_serving_nor_stopping(
    world: World, receiver: str, tmp_path: Path
) -> None:
    hold, log = threading.Event(), tmp_path / "log"
    with receiving(hold=hold) as hanging:
        address = NOWHERE if receiver == "down" else hanging.address
        with (
            serving(world.checkpoint, tmp_path / "s.yaml", log, traces=address) as server,
            server.client(timeout_s=60) as client,
        ):
            for _ in range(60):
                client.generate("1 2 3", Options(max_new_tokens=2))
            if receiver == "hangs":
                eventually(lambda: hanging.asked > 0)
            else:
                eventually(lambda: server.metric("preamble_trace_spans_dropped_total") > 0)
            assert server.metric("preamble_trace_spans_sent_total") == 0
            client.generate("1 2 3", Options(max_new_tokens=2))
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < START_S / 4
    text = log.read_text()
    lines = [line for line in text.splitlines() if "event=traces_dropped" in line]
    assert 1 <= len(lines) <= 3 and address in lines[0]
    assert "Traceback" not in text and "Failed to export" not in text


def test_what_finds_the_queue_full_is_dropped_and_counted_at_no_cost_to_the_caller() -> None:
    hold = threading.Event()
    with receiving(hold=hold) as receiver:
        traces = Traces(receiver.address, 1.0, "0")
        more = 1000
        for _ in range(2 * QUEUE_SPANS_MAX + more):
            traces.begin(Came("a/call"), None).end(Came("a/call"), "", None)
        assert traces.outbox.sent == 0
        # A batch may be on its way.
        assert more <= traces.outbox.dropped <= QUEUE_SPANS_MAX + more
        began = time.monotonic()
        traces.close()
        assert time.monotonic() - began < 10 * CLOSE_S
        assert not receiver.spans
        traces.begin(Came("late"), None).end(Came("late"), "", None)
        eventually(lambda: traces.outbox.dropped == 2 * QUEUE_SPANS_MAX + more + 1)


def test_what_is_left_is_sent_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.frontend.tracing.CLOSE_S", WAIT_S)
    with receiving() as receiver:
        traces = Traces(receiver.address, 1.0, "7")
        for _ in range(1500):
            traces.begin(Came("a/call"), None).end(Came("a/call"), "tenant", None)
        traces.close()
        assert (traces.outbox.sent, traces.outbox.dropped) == (1500, 0)
        assert len(receiver.spans) == 1500
        assert attributes(receiver.spans[0]) == {"preamble.tenant": "tenant"}
        assert attributes(receiver.resources[0])["service.version"] == "7"
        # None came with a parent, so each has a trace of its own.
        assert len({span.trace_id for span in receiver.spans}) == 1500


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "x" * 100_000},
        {"traceparent": SAMPLED, "tracestate": "=,=;\x00" * 1000},
        {"traceparent": SAMPLED, "tracestate": "a=1,a=1"},
        {"traceparent": f"ff-{TRACE}-{PARENT}-01"},
        {"traceparent": "", "tracestate": "\udcff"},
    ],
)
def test_whatever_a_caller_sends_as_its_trace_the_call_goes_on(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.frontend.tracing.CLOSE_S", WAIT_S)
    with receiving() as receiver:
        traces = Traces(receiver.address, 1.0, "0")
        trace = traces.begin(Came("a/call", headers), None)
        assert len(trace.id) == 32
        trace.end(Came("a/call", headers), "", None)
        traces.close()
        assert len(receiver.spans) == 1


def test_without_the_package_the_server_says_what_to_install(world: World, tmp_path: Path) -> None:
    import subprocess
    import sys

    settings = tmp_path / "s.yaml"
    settings.write_text(f"traces: {NOWHERE}\nport: 0\nhttp_port: 0\n")
    words = [str(word) for word in command("serve", world.checkpoint, "--config", settings)][3:]
    # As it is where the extra was never installed: the import fails.
    hidden = "import sys; sys.modules['opentelemetry.sdk.resources'] = None; import preamble; "
    program = f"{hidden}sys.exit(preamble.main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install 'preamble[traces]'" in done.stderr and "Traceback" not in done.stderr


def test_lines_about_a_receiver_are_as_rare_as_they_are_said_to_be() -> None:
    sparing = Sparing(3600.0)
    assert [sparing.due("a") for _ in range(3)] == [0, None, None]
