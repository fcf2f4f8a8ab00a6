"""Tracing: spans from real servers at a real OTLP receiver, and failures of the receiver.

The receiver is a gRPC server of the test; it accepts spans, hangs, or is missing. Callers must not
notice any of that.
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
from protos.foreign.descriptor_pools import load_package
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.frontend.call_origin import CallOrigin
from serving.logs import LogThrottle
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

from serving.frontend.tracing import QUEUE_SPANS_MAX, SHUTDOWN_TIMEOUT_S, CallTracer

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

SECRET = "314 159 265 358"
TRACE = "a1" * 16
PARENT = "b2" * 8
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"
PREFIX = "preamble.v1.GenerationService"
# No process listens on this port.
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Receiver(otlp_grpc.TraceServiceServicer):
    """Accepts spans; with `hold` set, only after that event."""

    resources: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    hold: threading.Event | None = None
    export_calls: int = 0
    address: str = ""

    def Export(self, request: Any, context: Any) -> Any:
        self.export_calls += 1
        if self.hold is not None:
            self.hold.wait(60)
        for resource in request.resource_spans:
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return otlp.ExportTraceServiceResponse()

    def spans_of_trace(self, trace_id: bytes) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def spans_named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def call_spans(self, **expected_attributes: object) -> tuple[Span, list[Span]]:
        """Wait for the call whose span has these attributes; return it and its child spans."""

        def matching_spans() -> list[Span]:
            return [
                span
                for span in self.spans
                if expected_attributes.items() <= attributes(span).items()
            ]

        eventually(lambda: bool(matching_spans()))
        (span,) = matching_spans()
        return span, [child for child in self.spans if child.parent_span_id == span.span_id]


@contextmanager
def start_receiver(*, hold: threading.Event | None = None) -> Iterator[Receiver]:
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
    values_by_key: dict[str, Any] = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values_by_key[attribute.key] = (
            [x.string_value for x in value.values] if kind == "array_value" else value
        )
    return values_by_key


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@dataclass
class TracedServer:
    server: Server
    receiver: Receiver
    checkpoint: Path
    log: Path

    def stub(self, channel: grpc.Channel) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedServer]:
    folder = tmp_path_factory.mktemp("traces")
    checkpoint = checkpoint_in(folder, tokenizer=False)  # No token ends an answer early.
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters/sum@3.safetensors", checkpoint, [5, 6, 7])
    limits: dict[str, Any] = {
        "adapters": str(folder / "adapters"),
        "running_requests_max": 2,
        "queue_requests_max": 2,
    }
    log = folder / "log"
    with start_receiver() as receiver:
        limits |= {"traces": receiver.address, "traces_share": 0.0}
        with serving(checkpoint, folder / "s.yaml", log, **limits) as server:
            yield TracedServer(server, receiver, checkpoint, log)


def generate(
    deployment: TracedServer, label: str, parent: str = SAMPLED, stream: bool = False, **more: Any
) -> None:
    """A call of preamble.v1, with a trace parent and a label."""
    metadata = [("x-request-id", label), ("traceparent", parent)]
    fields = {"text": SECRET, "max_new_tokens": 6, **more}
    with grpc.insecure_channel(deployment.server.address) as channel:
        stub = deployment.stub(channel)
        if stream:
            message = pb.GenerateStreamRequest(**fields)
            list(stub.GenerateStream(message, metadata=metadata, timeout=30))
        else:
            stub.Generate(pb.GenerateRequest(**fields), metadata=metadata, timeout=30)


def post_completion(deployment: TracedServer, label: str, body: dict[str, Any]) -> str | None:
    """The request id in the response."""
    request = urllib.request.Request(
        f"http://{deployment.server.http_address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "traceparent": SAMPLED, "X-Request-Id": label},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()
        name: str | None = response.headers["x-request-id"]
        return name


# ------------------------------------------------------------------------------------ spans


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_child_spans_with_a_span_per_phase(
    deployment: TracedServer, stream: bool
) -> None:
    label = f"phases-{stream}"
    generate(deployment, label, stream=stream, adapters=["sum"])
    span, children = deployment.receiver.call_spans(**{"preamble.request_id": label})
    method = f"{PREFIX}/{'GenerateStream' if stream else 'Generate'}"
    assert span.name == method and span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    span_attributes = attributes(span)
    assert span_attributes["rpc.system.name"] == "grpc" and span_attributes["rpc.method"] == method
    assert (
        span_attributes["rpc.response.status_code"] == "OK" and "error.type" not in span_attributes
    )
    assert span_attributes["gen_ai.operation.name"] == "text_completion"
    assert span_attributes["gen_ai.request.model"] == deployment.checkpoint.name
    assert span_attributes["gen_ai.usage.input_tokens"] == 4  # The prompt's numbers are tokens.
    assert span_attributes["gen_ai.usage.output_tokens"] == 6
    assert span_attributes["gen_ai.request.max_tokens"] == 6
    assert span_attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert (
        span_attributes["preamble.adapters"] == ["sum@3"]
        and span_attributes["preamble.virtual_tokens"] == 3
    )
    assert span.status.code == 0

    assert [child.name for child in children] == ["admission", "queue", "prefill", "decode"]
    for child in children:
        assert child.trace_id == span.trace_id and child.kind == Span.SPAN_KIND_INTERNAL
        assert child.start_time_unix_nano >= span.start_time_unix_nano - 5e6
        assert child.end_time_unix_nano <= span.end_time_unix_nano + 5e6
    queue, prefill, decode = children[1:]
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert seconds(prefill) > 0 and seconds(decode) > 0
    assert sum(map(seconds, children)) <= seconds(span) + 0.01


def test_queue_time_is_traced_and_counted(deployment: TracedServer) -> None:
    metric = deployment.server.metric
    counts = {
        name: metric(f"preamble_{name}_duration_seconds_count")
        for name in ("queue", "prefill", "decode")
    }
    seconds_before = metric("preamble_queue_duration_seconds_sum")
    with Client(deployment.server.address, 60) as client, futures.ThreadPoolExecutor(2) as pool:
        long_calls = [
            pool.submit(client.generate, SECRET, Options(max_new_tokens=3000)) for _ in "12"
        ]
        eventually(lambda: metric("preamble_scheduler_running_requests") == 2)
        generate(deployment, "waits")
        assert all(child.result() for child in long_calls)
    span, children = deployment.receiver.call_spans(**{"preamble.request_id": "waits"})
    queue = next(child for child in children if child.name == "queue")
    prefill = next(child for child in children if child.name == "prefill")
    assert seconds(queue) > seconds(prefill)
    assert seconds(queue) > 0.2 * seconds(span)
    for name, count in counts.items():
        assert metric(f"preamble_{name}_duration_seconds_count") == count + 3
    waited = metric("preamble_queue_duration_seconds_sum") - seconds_before
    assert waited == pytest.approx(seconds(queue), rel=0.5)


def test_http_calls_have_http_attributes(deployment: TracedServer) -> None:
    body = {"prompt": [SECRET, "1 2"], "max_tokens": 5, "n": 2, "seed": 1, "temperature": 0.5}
    assert post_completion(deployment, "over-http", body) == "over-http"
    assert post_completion(deployment, "streamed", {"prompt": SECRET, "stream": True}) == "streamed"
    span, children = deployment.receiver.call_spans(**{"preamble.request_id": "over-http"})
    span_attributes = attributes(span)
    assert span.name == "POST /v1/completions"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (
        span_attributes["http.request.method"] == "POST"
        and span_attributes["http.route"] == "/v1/completions"
    )
    assert (
        span_attributes["http.response.status_code"] == 200
        and span_attributes["url.scheme"] == "http"
    )
    assert span_attributes["gen_ai.usage.output_tokens"] == 4 * 5
    assert span_attributes["gen_ai.usage.input_tokens"] == 4 + 2  # A prompt counts once.
    assert span_attributes["gen_ai.request.choice.count"] == 4
    assert span_attributes["gen_ai.request.temperature"] == 0.5
    names = [child.name for child in children]
    assert [names.count(name) for name in ("admission", "queue", "prefill", "decode")] == [
        *(2, 4, 4, 4)
    ]


def test_requests_of_a_stream_are_its_child_spans(deployment: TracedServer) -> None:
    infer = load_package("kserve")
    request = infer.ModelInferRequest(model_name="preamble", id="7")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(SECRET.encode())
    request.parameters["max_tokens"].int64_param = 4
    with grpc.insecure_channel(deployment.server.address) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            infer.ModelInferRequest.SerializeToString,
            infer.ModelStreamInferResponse.FromString,
        )
        metadata = (("traceparent", SAMPLED), ("x-correlation-id", "a-stream"))
        responses = list(call(iter([request, request]), metadata=metadata, timeout=30))
        assert not any(response.error_message for response in responses)
    expected_attributes = {"preamble.request_id": "a-stream", "rpc.system.name": "grpc"}
    span, children = deployment.receiver.call_spans(**expected_attributes)
    assert span.name == "inference.GRPCInferenceService/ModelStreamInfer"
    assert [child.name for child in children] == ["ModelStreamInfer/request"] * 2
    for part in children:
        assert attributes(part)["gen_ai.usage.output_tokens"] == 4
        assert [
            child.name
            for child in deployment.receiver.spans
            if child.parent_span_id == part.span_id
        ]


def test_failed_calls_have_a_reason_and_server_faults_are_errors(deployment: TracedServer) -> None:
    with pytest.raises(grpc.RpcError):
        generate(deployment, "wrong", adapters=["nobody"])
    span, _ = deployment.receiver.call_spans(**{"preamble.request_id": "wrong"})
    span_attributes = attributes(span)
    assert span_attributes["error.type"] == "UNKNOWN_ADAPTER" and span.status.code == 0
    assert span_attributes["rpc.response.status_code"] == "NOT_FOUND"
    with grpc.insecure_channel(deployment.server.address) as channel:
        stub = deployment.stub(channel)
        stub.Generate(pb.GenerateRequest(text=SECRET, max_new_tokens=1))  # It is connected.
        metadata = [("traceparent", SAMPLED), ("x-request-id", "late")]
        message = pb.GenerateRequest(text=SECRET, max_new_tokens=4000)
        with pytest.raises(grpc.RpcError):
            stub.Generate(message, metadata=metadata, timeout=1.5)
    span, children = deployment.receiver.call_spans(**{"preamble.request_id": "late"})
    assert attributes(span)["error.type"] in ("DEADLINE_PASSED", "CANCELLED")
    if attributes(span)["error.type"] == "DEADLINE_PASSED":
        assert (span.status.code, span.status.message) == (2, "DEADLINE_PASSED")
    assert attributes(span)["gen_ai.usage.input_tokens"] == 4
    assert [child.name for child in children if child.name != "decode"] == [
        "admission",
        "queue",
        "prefill",
    ]


def test_only_sampled_traces_are_exported(deployment: TracedServer) -> None:
    """The sampling ratio is 0 here, so only traces that a caller samples are exported."""
    total = "preamble_trace_spans_sent_total"
    eventually(lambda: deployment.server.metric(total) == len(deployment.receiver.spans))
    spans_before = deployment.server.metric(total)
    generate(deployment, "unsampled", parent=UNSAMPLED)
    generate(deployment, "wrong parent", parent="00-zz-1-01")
    with deployment.server.client() as client:
        client.generate(SECRET, Options(max_new_tokens=2))
    generate(deployment, "sampled")
    deployment.receiver.call_spans(**{"preamble.request_id": "sampled"})
    labels = {attributes(span).get("preamble.request_id") for span in deployment.receiver.spans}
    assert not labels & {"unsampled", "wrong parent"}
    # The call, and four phases.
    eventually(lambda: deployment.server.metric(total) == spans_before + 5)


def test_logs_have_the_request_id_and_the_trace_id(deployment: TracedServer) -> None:
    waiting = "preamble_scheduler_waiting_requests"
    message = pb.GenerateRequest(text=SECRET, max_new_tokens=4000)
    with grpc.insecure_channel(deployment.server.address) as channel:
        busy = [deployment.stub(channel).Generate.future(message) for _ in range(4)]
        eventually(lambda: deployment.server.metric(waiting) == 2)
        with pytest.raises(grpc.RpcError):
            generate(deployment, "too 'much'")
        assert [call.cancel() for call in busy] == [True] * 4
    lines = [line for line in deployment.log.read_text().splitlines() if "event=call_ended" in line]
    assert re.search(rf"label=\"too 'much'\" trace='{TRACE}'", lines[-1]), lines
    eventually(lambda: deployment.server.metric("preamble_requests_in_flight") == 0)


def test_spans_contain_no_prompt_and_name_the_server(deployment: TracedServer) -> None:
    assert deployment.receiver.spans
    exported = str(
        [(span.name, attributes(span), span.events) for span in deployment.receiver.spans]
    )
    assert SECRET not in exported and "314" not in exported
    names = [attributes(resource)["service.name"] for resource in deployment.receiver.resources]
    assert set(names) == {"preamble"}
    assert deployment.server.metric("preamble_trace_spans_dropped_total") == 0


# ------------------------------------------------------------------------- receiver failures


@pytest.mark.parametrize("receiver", ["down", "hangs"])
def test_hanging_receivers_do_not_delay_serving_or_stopping(
    deployment: TracedServer, receiver: str, tmp_path: Path
) -> None:
    hold = threading.Event()
    log = tmp_path / "log"
    with start_receiver(hold=hold) as hanging:
        address = NOWHERE if receiver == "down" else hanging.address
        with (
            serving(deployment.checkpoint, tmp_path / "s.yaml", log, traces=address) as server,
            server.client(timeout_s=60) as client,
        ):
            for _ in range(60):
                client.generate("1 2 3", Options(max_new_tokens=2))
            if receiver == "hangs":
                eventually(lambda: hanging.export_calls > 0)
            else:
                eventually(lambda: server.metric("preamble_trace_spans_dropped_total") > 0)
            assert server.metric("preamble_trace_spans_sent_total") == 0
            client.generate("1 2 3", Options(max_new_tokens=2))
            start = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - start < START_S / 4
    text = log.read_text()
    lines = [line for line in text.splitlines() if "event=traces_dropped" in line]
    assert 1 <= len(lines) <= 3 and address in lines[0]
    assert "Traceback" not in text and "Failed to export" not in text


def test_spans_over_the_queue_limit_are_dropped_and_counted() -> None:
    hold = threading.Event()
    with start_receiver(hold=hold) as receiver:
        traces = CallTracer(receiver.address, 1.0, "0")
        extra = 1000
        for _ in range(2 * QUEUE_SPANS_MAX + extra):
            traces.start_call(CallOrigin("a/call"), None).end(CallOrigin("a/call"), "", None)
        assert traces.processor.exported == 0
        # A batch may be in transit.
        assert extra <= traces.processor.dropped <= QUEUE_SPANS_MAX + extra
        start = time.monotonic()
        traces.close()
        assert time.monotonic() - start < 10 * SHUTDOWN_TIMEOUT_S
        assert not receiver.spans
        traces.start_call(CallOrigin("late"), None).end(CallOrigin("late"), "", None)
        eventually(lambda: traces.processor.dropped == 2 * QUEUE_SPANS_MAX + extra + 1)


def test_closing_exports_queued_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.frontend.tracing.SHUTDOWN_TIMEOUT_S", WAIT_S)
    with start_receiver() as receiver:
        traces = CallTracer(receiver.address, 1.0, "7")
        for _ in range(1500):
            traces.start_call(CallOrigin("a/call"), None).end(CallOrigin("a/call"), "tenant", None)
        traces.close()
        assert (traces.processor.exported, traces.processor.dropped) == (1500, 0)
        assert len(receiver.spans) == 1500
        assert attributes(receiver.spans[0]) == {"preamble.tenant": "tenant"}
        assert attributes(receiver.resources[0])["service.version"] == "7"
        # None has a parent, so each has a trace of its own.
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
def test_malformed_trace_headers_do_not_fail_calls(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.frontend.tracing.SHUTDOWN_TIMEOUT_S", WAIT_S)
    with start_receiver() as receiver:
        traces = CallTracer(receiver.address, 1.0, "0")
        trace = traces.start_call(CallOrigin("a/call", headers), None)
        assert len(trace.trace_id) == 32
        trace.end(CallOrigin("a/call", headers), "", None)
        traces.close()
        assert len(receiver.spans) == 1


def test_missing_packages_are_named_at_start(deployment: TracedServer, tmp_path: Path) -> None:
    import subprocess
    import sys

    settings = tmp_path / "s.yaml"
    settings.write_text(f"traces: {NOWHERE}\nport: 0\nhttp_port: 0\n")
    arguments = [
        str(word) for word in command("serve", deployment.checkpoint, "--config", settings)
    ][3:]
    # As if the extra was never installed: the import fails.
    hidden = "import sys; sys.modules['opentelemetry.sdk.resources'] = None; import preamble; "
    program = f"{hidden}sys.exit(preamble.main({arguments!r}))"
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 1
    assert (
        "pip install 'preamble[traces]'" in completed.stderr and "Traceback" not in completed.stderr
    )


def test_receiver_warnings_are_throttled() -> None:
    sparing = LogThrottle(3600.0)
    assert [sparing.claim_line("a") for _ in range(3)] == [0, None, None]
