"""Metrics and logs: exported series, their documentation, log lines, and no prompt in any of them.

One server takes calls that end in several ways; its scrape is compared with the document of the
series, the dashboard and the alerts. tests/third_party_clients/test_prometheus.py has the tests
that need Prometheus itself.
"""

import asyncio
import json
import logging
import math
import random
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from clients.client import CallError, Options
from gpt.sampling_params import SamplingParams
from protos.preamble.v1 import generation_pb2, generation_pb2_grpc
from serving.admission.auth import Authenticator
from serving.frontend.call import CallFailure, Frontend
from serving.logs import LogThrottle, log_to_stderr
from serving.request import AnswerSpec, OverloadedError, RefusedError
from serving.service.metrics import (
    ADAPTER_LABELS_MAX,
    EXEMPLAR_CHARACTERS_MAX,
    INTER_TOKEN_BUCKETS_S,
    OTHER_ADAPTERS,
    PHASE_BUCKETS_S,
    REQUEST_BUCKETS_S,
    BulkHistogram,
    Metrics,
    exemplar_labels,
)
from tests.support.servers import (
    CONFIG,
    ROOT,
    WAIT_S,
    Server,
    eventually,
    serving,
    without_model_name,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Starts servers: too slow for the fast suite.

LONG_TOKENS = 3000
LONG = Options(max_new_tokens=LONG_TOKENS)
SECRET = "314 159 265 358"
# Series that depend on the server's configuration.
OPTIONAL_SERIES = {
    "preamble_adapter_mirror_bytes",
    "preamble_adapter_mirror_evictions_total",
    "preamble_adapter_store_errors_total",
    "preamble_adapter_store_fetched_bytes_total",
    "preamble_adapter_store_fetches_total",
    "preamble_adapter_store_listing_age_seconds",
    "preamble_adapter_store_versions",
    "preamble_proof_difference",
    "preamble_tls_certificate_expiry_timestamp_seconds",
    "preamble_trace_spans_dropped_total",
    "preamble_trace_spans_sent_total",
    "preamble_usage_written_timestamp_seconds",
    "preamble_weights_agreement_ratio",
    "preamble_weights_divergence",
}
PROMETHEUS_SERIES = {"up"}
SERIES = re.compile(r"\b(?:preamble|process)_[a-z0-9_]+")


@dataclass(frozen=True)
class ScrapedServer:
    """A running server with the file of its log."""

    server: Server
    log: Path


@pytest.fixture(scope="module")
def scraped_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedServer]:
    """A server after successful calls, a call with an adapter, an invalid call and overload."""
    folder = tmp_path_factory.mktemp("metrics")
    checkpoint = write_checkpoint(folder, tokenizer=False)  # No stop token ends an answer early.
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters/sum@3.safetensors", checkpoint, [5, 6, 7])
    limits: dict[str, Any] = {
        "adapters": str(folder / "adapters"),
        "running_requests_max": 2,
        "queue_requests_max": 2,
        "log_format": "json",
    }
    log = folder / "log"
    with serving(checkpoint, folder / "settings.yaml", log, **limits) as server:
        with server.client(timeout_s=180) as client:
            client.generate(SECRET, Options(max_new_tokens=6))
            client.generate(SECRET, Options(max_new_tokens=2, adapter="sum"))
            list(client.stream(SECRET, Options(max_new_tokens=6)))
            with pytest.raises(CallError):
                client.generate(SECRET, Options(adapter="nobody"))
            with ThreadPoolExecutor(4) as pool:
                calls = [pool.submit(client.generate, SECRET, LONG) for _ in range(4)]
                eventually(lambda: server.metric("preamble_scheduler_waiting_requests") == 2)
                # Without our client, which might retry.
                with grpc.insecure_channel(server.address) as channel:
                    stub = generation_pb2_grpc.GenerationServiceStub(channel)
                    for _ in range(3):
                        with pytest.raises(grpc.RpcError):
                            stub.Generate(generation_pb2.GenerateRequest(text=SECRET))
                assert not [call for call in calls if call.done()]
                assert {call.result().usage.completion_tokens for call in calls} == {LONG_TOKENS}
        eventually(lambda: server.metric("preamble_requests_in_flight") == 0)
        yield ScrapedServer(server, log)


def parse_series(text: str) -> dict[str, dict[str, Any]]:
    """The kind, labels and HELP text of each series of a scrape, by its name; no aliases."""
    series: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("vllm:"):
            continue
        for sample in family.samples:
            name = sample.name
            if family.type == "histogram":
                name = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            labels = set(sample.labels) - {"le"}
            if name.startswith("preamble_"):  # The document says this once for all series.
                labels.remove("model_name")
            series[name] = {"kind": family.type, "labels": labels, "text": family.documentation}
    return series


def documented_series() -> dict[str, dict[str, Any]]:
    """The kind and labels of each series in docs/metrics.md, by its name."""
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\|", text, flags=re.M)
    return {
        name: {"kind": kind, "labels": set(re.findall(r"\w+", labels))}
        for name, kind, labels in rows
    }


def test_every_series_is_documented_with_its_kind_and_labels(scraped_server: ScrapedServer) -> None:
    exported = parse_series(scraped_server.server.get("/metrics")[1])
    documented = documented_series()
    assert set(documented) - OPTIONAL_SERIES == set(exported)
    for name, series in exported.items():
        assert {key: series[key] for key in ("kind", "labels")} == documented[name], name
        assert series["text"].endswith(".") or not name.startswith("preamble_"), name


def test_every_series_in_the_dashboard_and_the_alerts_exists(scraped_server: ScrapedServer) -> None:
    exported = set(parse_series(scraped_server.server.get("/metrics")[1]))
    existing = exported | OPTIONAL_SERIES | PROMETHEUS_SERIES
    dashboard = json.loads((ROOT / "deploy/grafana/preamble.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    queries.append(dashboard["templating"]["list"][1]["query"])
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    queries += [rule["expr"] for group in groups for rule in group["rules"]]
    autoscaler = (ROOT / "deploy/kubernetes/hpa.yaml").read_text()
    queries += re.findall(r"preamble_\w+", autoscaler)
    assert len(queries) > 60
    for query in queries:
        for name in SERIES.findall(query):
            histogram = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in existing or histogram in existing, f"{name} in {query}"


def test_label_values_in_alerts_are_exported(scraped_server: ScrapedServer) -> None:
    text = without_model_name(scraped_server.server.get("/metrics")[1])
    states = set(re.findall(r'engine_state{state="(\w+)"}', text))
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    rules = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    assert set(re.findall(r'state="(\w+)"', rules)) <= states
    for name in ("request_errors", "admission_rejections"):
        reasons = set(re.findall(rf'{name}_total{{reason="(\w+)"}}', text))
        for alternatives in re.findall(rf'{name}_total{{reason=~?"([\w|]+)"}}', rules):
            assert set(alternatives.split("|")) <= reasons


def test_calls_are_counted_by_reason_and_tokens(scraped_server: ScrapedServer) -> None:
    metric = scraped_server.server.metric
    assert metric('preamble_request_errors_total{reason="UNKNOWN_ADAPTER"}') == 1
    assert metric('preamble_request_errors_total{reason="QUEUE_FULL"}') == 3
    assert metric('preamble_admission_rejections_total{reason="QUEUE_FULL"}') == 3
    assert metric('preamble_admission_rejections_total{reason="DRAINING"}') == 0
    assert metric('preamble_adapter_requests_total{adapter="sum"}') == 1
    assert metric("preamble_generated_length_tokens_count") == 3 + 4
    assert metric("preamble_generated_length_tokens_sum") == 6 + 2 + 6 + 4 * LONG_TOKENS
    assert metric("preamble_generated_tokens_total") == 6 + 2 + 6 + 4 * LONG_TOKENS
    assert metric("preamble_inter_token_latency_seconds_count") == 5 + 1 + 5 + 4 * (LONG_TOKENS - 1)
    assert metric("preamble_prompt_length_tokens_sum") == 7 * 4 + 3  # With virtual tokens.
    assert metric('preamble_engine_state{state="serving"}') == 1
    assert metric('preamble_engine_state{state="loading"}') == 0
    step = metric("preamble_engine_last_step_timestamp_seconds")
    assert step > metric("process_start_time_seconds")
    assert metric("preamble_stream_message_tokens_sum") == 6  # Unary answers are not counted.


def test_durations_of_calls_have_few_labels_and_buckets(scraped_server: ScrapedServer) -> None:
    # The bounds are a part of the earlier ones, and of those of the histogram without labels, so
    # that queries of the buckets that are left, and quantiles, are unchanged.
    earlier = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320}
    assert set(REQUEST_BUCKETS_S) < earlier and set(REQUEST_BUCKETS_S) < set(PHASE_BUCKETS_S)
    metric = scraped_server.server.metric
    ok = 'code="OK",method="Generate",wire="preamble"'
    failed = 'code="FAILED",method="Generate",wire="preamble"'
    codes = ("NOT_FOUND", "RESOURCE_EXHAUSTED")
    counts = [
        metric(f'preamble_requests_total{{code="{code}",method="Generate",wire="preamble"}}')
        for code in codes
    ]
    assert counts == [1, 3]
    assert metric(f"preamble_request_duration_seconds_count{{{failed}}}") == 4
    assert metric(f"preamble_request_duration_seconds_count{{{ok}}}") == 2 + 4
    assert metric("preamble_generation_duration_seconds_count") == 3 + 4


def test_adapters_on_the_device_are_listed(scraped_server: ScrapedServer) -> None:
    server = scraped_server.server
    assert server.metric('preamble_adapter_resident{adapter="sum"}') == 1
    assert server.metric("preamble_adapters_resident") == 1
    rows, capacity = 3, server.metric("preamble_adapters_resident_max")
    labels = f'max_lora="{capacity:.0f}",running_lora_adapters="sum",waiting_lora_adapters=""'
    changed_at = server.metric(f"preamble_adapters_info{{{labels}}}")
    assert capacity == 4096 // rows
    assert changed_at > server.metric("process_start_time_seconds")
    loaded = 'adapter_name="sum",engine="0",level="gpu",pinned="false"'
    assert server.metric(f"vllm:lora_adapter_loaded{{{loaded}}}") == 1
    assert server.metric(f"vllm:lora_requests_info{{{labels}}}") == changed_at


def test_the_cache_configuration_equals_the_sizes_of_the_cache(
    scraped_server: ScrapedServer,
) -> None:
    metric = scraped_server.server.metric
    tokens, blocks = metric("preamble_kv_block_tokens"), metric("preamble_kv_blocks")
    assert tokens > 0 and blocks > 0
    context = CONFIG.max_position_embeddings
    concurrency = blocks * tokens / context
    labels = f'block_tokens="{tokens:.0f}",blocks="{blocks:.0f}",'
    labels += f'context_requests="{concurrency:g}",context_tokens="{blocks * tokens:.0f}",'
    labels += 'dtype="auto",prefix_cache="true"'
    assert metric(f"preamble_kv_cache_info{{{labels}}}") == 1
    labels = f'block_size="{tokens:.0f}",cache_dtype="auto",enable_prefix_caching="True"'
    labels += f',engine="0",kv_cache_max_concurrency="{concurrency:g}"'
    labels += f',kv_cache_size_tokens="{blocks * tokens:.0f}",num_gpu_blocks="{blocks:.0f}"'
    assert metric(f"vllm:cache_config_info{{{labels}}}") == 1


@pytest.mark.parametrize(
    ("request_id", "trace_id", "labels"),
    [
        ("", "", {}),
        ("r", "", {"request_id": "r"}),
        ("", "t" * 32, {"trace_id": "t" * 32}),
        ("r" * 100, "", {"request_id": "r" * 100}),
        ('a"b\\c', "", {"request_id": "a_b_c"}),
        ("r" * 100, "t" * 32, {"request_id": "r" * 78, "trace_id": "t" * 32}),
    ],
)
def test_labels_of_exemplars_fit_into_openmetrics(
    request_id: str, trace_id: str, labels: dict[str, str]
) -> None:
    assert exemplar_labels(request_id, trace_id) == labels
    assert sum(map(len, (*labels, *labels.values()))) <= EXEMPLAR_CHARACTERS_MAX


def test_the_json_log_has_overload_lines_and_no_prompt(scraped_server: ScrapedServer) -> None:
    text = scraped_server.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) > 3 and SECRET not in text and not re.search(r"314\D{1,3}159", text)
    assert {line["rank"] for line in lines if "rank" in line} == {0}
    ended = [line for line in lines if line.get("event") == "call_ended"]
    assert {line["fields"]["reason"] for line in ended} == {"QUEUE_FULL"}
    first = ended[0]["fields"]
    assert (first["wire"], first["method"], first["accepted"]) == ("preamble", "Generate", "False")
    # The lines of one second are throttled to one; the next line has the count of the others.
    assert 1 <= len(ended) + sum(int(line["fields"]["suppressed"]) for line in ended) <= 3


def scrape_openmetrics(server: Server) -> dict[str, Metric]:
    """The families of a scrape in OpenMetrics, by name."""
    request = urllib.request.Request(f"http://{server.http_address}/metrics")
    request.add_header("Accept", "application/openmetrics-text")
    with urllib.request.urlopen(request, timeout=WAIT_S) as page:
        assert page.headers["Content-Type"].startswith("application/openmetrics-text")
        families = openmetrics_families(page.read().decode())  # type: ignore[no-untyped-call]
        return {family.name: family for family in families}


def test_exemplars_lead_from_latencies_to_calls(scraped_server: ScrapedServer) -> None:
    server, trace_id = scraped_server.server, "5f" * 16
    metadata = (("x-request-id", "slow-one"), ("traceparent", f"00-{trace_id}-{'ab' * 8}-01"))
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = generation_pb2.GenerateRequest(text=SECRET, max_new_tokens=4)
        stub.Generate(message, metadata=metadata, timeout=WAIT_S)
    status, _ = server.request("/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
    assert status == 200

    def labels_of(name: str) -> list[dict[str, str]]:
        samples = scrape_openmetrics(server)[name].samples
        return [sample.exemplar.labels for sample in samples if sample.exemplar]

    call = {"trace_id": trace_id, "request_id": "slow-one"}
    eventually(lambda: call in labels_of("preamble_request_duration_seconds"))
    names = ["preamble_time_to_first_token_seconds", "preamble_inter_token_latency_seconds"]
    names += [
        f"preamble_{phase}_duration_seconds"
        for phase in ("queue", "prefill", "decode", "generation")
    ]
    for name in names:
        assert labels_of(name), name
    # The HTTP call has the random id that the server gave it.
    openai = [
        sample.exemplar.labels
        for sample in scrape_openmetrics(server)["preamble_time_to_first_token_seconds"].samples
        if sample.exemplar and sample.labels["wire"] == "openai"
    ]
    assert len(openai) == 1 and re.fullmatch(r"[0-9a-f]{32}", openai[0]["request_id"])


def test_a_bulk_histogram_equals_the_librarys_histogram() -> None:
    generator = random.Random(7)
    bounds = INTER_TOKEN_BUCKETS_S
    library_registry = CollectorRegistry()
    library_histogram = Histogram("x_seconds", "X.", buckets=bounds, registry=library_registry)
    bulk_registry = CollectorRegistry()
    bulk_histogram = BulkHistogram("x_seconds", "X.", bounds)
    bulk_registry.register(bulk_histogram)
    for _ in range(200):
        seconds = generator.choice([0.0, 7.0, *bounds, generator.expovariate(50)])
        count = generator.randint(1, 40)
        bulk_histogram.observe(seconds, count)
        for _ in range(count):
            library_histogram.observe(seconds)

    def samples(registry: CollectorRegistry) -> dict[Any, float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {
            (sample.name, sample.labels.get("le")): sample.value
            for family in families
            for sample in family.samples
        }

    actual = samples(bulk_registry)
    expected = samples(library_registry)
    assert actual.keys() == expected.keys()
    assert all(math.isclose(actual[key], expected[key], rel_tol=1e-9) for key in actual)


def test_the_number_of_adapter_labels_is_limited() -> None:
    metrics = Metrics()
    spec = AnswerSpec((1,), SamplingParams(max_new_tokens=1))
    for number in range(5 * ADAPTER_LABELS_MAX):
        # Answers of two versions in one request count once for the adapter's name.
        versions = [f"task{number}@{version}" for version in (1, 2)]
        metrics.record_accepted([replace(spec, adapter=version) for version in versions])
    metrics.record_accepted([spec])
    # A tenant's private adapter is counted without its name.
    metrics.record_accepted([replace(spec, adapter="own@1", is_private=True)])
    rows = re.findall(r'adapter_requests_total{adapter="(\w+)"} (\S+)', metrics.render().decode())
    counts = {name: float(value) for name, value in rows}
    assert len(counts) == ADAPTER_LABELS_MAX + 1
    assert counts.pop(OTHER_ADAPTERS) == 4 * ADAPTER_LABELS_MAX + 1
    assert set(counts.values()) == {1.0} and "task0" in counts


@pytest.mark.parametrize(
    ("error", "reason", "logged"),
    [
        (OverloadedError("full"), "QUEUE_FULL", True),
        (RefusedError("RATE_LIMITED", "slow down"), "RATE_LIMITED", True),
        (RefusedError("PERMISSION_DENIED", "no"), "PERMISSION_DENIED", False),
        (ZeroDivisionError("a bug"), "INTERNAL", True),
    ],
)
def test_failed_calls_are_counted_and_logged_if_the_server_caused_them(
    error: Exception, reason: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing_calls() -> Frontend:
        frontend = Frontend(Metrics(), Authenticator())
        for _ in range(50):
            with pytest.raises(CallFailure) as failure:
                async with frontend.call("test", "Ask"):
                    raise error
            assert failure.value.reason.name == reason
        return frontend

    with caplog.at_level(logging.WARNING, "serving.frontend.call"):
        text = asyncio.run(failing_calls()).metrics.render().decode()
    assert f'preamble_request_errors_total{{reason="{reason}"}} 50.0' in text
    lines = [line for line in caplog.messages if "event=call_ended" in line]
    assert 1 <= len(lines) <= 5 if logged else not lines
    assert all(f"reason={reason}" in line for line in lines)


def test_a_log_line_has_the_count_of_suppressed_lines() -> None:
    throttle = LogThrottle(period_s=0.0)
    assert [throttle.claim_line("a"), throttle.claim_line("a")] == [0, 0]
    throttle.period_s = 1e9
    counts = [throttle.claim_line("a"), throttle.claim_line("a"), throttle.claim_line("b")]
    assert counts == [None, None, 0]
    throttle.period_s = 0.0
    assert throttle.claim_line("a") == 2


def test_a_json_line_has_the_fields_of_the_message(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = logging.getLogger().handlers[:]
    try:
        logging.getLogger().handlers[:] = []  # As in a separate process.
        log_to_stderr("json", rank=3)
        logging.warning("event=x reason=%r path=%s n=%d", 'it\'s "so"', "a/b", 7)
        logging.warning("of another library\nwith two lines")
        try:
            raise ValueError("why")
        except ValueError:
            logging.exception("event=failed")
    finally:
        logging.getLogger().handlers[:] = handlers
    first, second, third = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["level"], first["rank"], first["event"]) == ("WARNING", 3, "x")
    assert first["fields"]["path"] == "a/b" and first["fields"]["n"] == "7"
    assert "so" in first["fields"]["reason"]
    assert second["message"] == "of another library\nwith two lines" and "event" not in second
    assert third["stack"].endswith("ValueError: why")
