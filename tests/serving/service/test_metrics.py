"""Metrics and logs: what is counted, what it costs, what is told of it, and what is never said.

One server takes calls that end in several ways; its scrape, the document of series, the dashboard
and the alerts are held against each other. What needs Prometheus itself is in
tests/e2e/test_prometheus.py.
"""

import asyncio
import json
import logging
import math
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from clients.client import CallError, Options
from gpt.sampling_params import Sampling
from protos.preamble.v1 import generation_pb2, generation_pb2_grpc
from serving.admission.auth import Access
from serving.frontend.call import Ended, Front
from serving.logs import Sparing, log_to_stderr
from serving.request import Answer, OverloadedError, RefusedError
from serving.service.metrics import ADAPTERS_SHOWN_MAX, NEXT_TOKEN_S, OTHER, Metrics, Spread
from tests.support.servers import ROOT, Server, eventually, serving, write_adapter, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


LONG_TOKENS = 3000
LONG = Options(max_new_tokens=LONG_TOKENS)
SECRET = "314 159 265 358"
# Series that only some servers have.
SOMETIMES = {
    "preamble_proof_difference",
    "preamble_tls_certificate_expiry_timestamp_seconds",
    "preamble_weights_agreement_ratio",
    "preamble_weights_divergence",
}
SOMETIMES |= {f"preamble_trace_spans_{what}_total" for what in ("sent", "dropped")}
OF_THE_SCRAPER = {"up"}
SERIES = re.compile(r"\b(?:preamble|process)_[a-z0-9_]+")


@dataclass(frozen=True)
class World:
    server: Server
    log: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server that has been called: well, with an adapter, wrongly, and too much."""
    folder = tmp_path_factory.mktemp("metrics")
    checkpoint = write_checkpoint(folder, tokenizer=False)  # Nothing ends an answer early.
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
                busy = [pool.submit(client.generate, SECRET, LONG) for _ in range(4)]
                eventually(lambda: server.metric("preamble_scheduler_waiting_requests") == 2)
                # Without a client of ours, which might try again.
                with grpc.insecure_channel(server.address) as channel:
                    stub = generation_pb2_grpc.GenerationServiceStub(channel)
                    for _ in range(3):
                        with pytest.raises(grpc.RpcError):
                            stub.Generate(generation_pb2.GenerateRequest(text=SECRET))
                assert not [one for one in busy if one.done()]
                assert {one.result().usage.completion_tokens for one in busy} == {LONG_TOKENS}
        eventually(lambda: server.metric("preamble_requests_in_flight") == 0)
        yield World(server, log)


def scraped(text: str) -> dict[str, dict[str, Any]]:
    """By each series' name as it is in the text: its kind and its labels."""
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if family.type == "histogram":
                name = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            labels = set(sample.labels) - {"le"}
            found[name] = {"kind": family.type, "labels": labels, "text": family.documentation}
    return found


def documented() -> dict[str, dict[str, Any]]:
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\|", text, flags=re.M)
    return {name: {"kind": kind, "labels": set(re.findall(r"\w+", ls))} for name, kind, ls in rows}


def test_every_series_is_documented_with_its_kind_and_labels(world: World) -> None:
    there, told = scraped(world.server.get("/metrics")[1]), documented()
    assert set(told) - SOMETIMES == set(there)
    for name, facts in there.items():
        assert {key: facts[key] for key in ("kind", "labels")} == told[name], name
        assert facts["text"].endswith(".") or not name.startswith("preamble_"), name


def test_every_series_in_the_dashboard_and_the_alerts_exists(world: World) -> None:
    there = set(scraped(world.server.get("/metrics")[1])) | SOMETIMES | OF_THE_SCRAPER
    board = json.loads((ROOT / "deploy/grafana/preamble.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked.append(board["templating"]["list"][1]["query"])
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    asked += [rule["expr"] for group in groups for rule in group["rules"]]
    scaled = (ROOT / "deploy/kubernetes/hpa.yaml").read_text()
    asked += re.findall(r"preamble_\w+", scaled)
    assert len(asked) > 60
    for one in asked:
        for name in SERIES.findall(one):
            bare = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in there or bare in there, f"{name} in {one}"


def test_alerts_and_panels_name_labels_that_the_series_have(world: World) -> None:
    text = world.server.get("/metrics")[1]
    states = set(re.findall(r'engine_state{state="(\w+)"}', text))
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    rules = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    assert set(re.findall(r'state="(\w+)"', rules)) <= states
    for name in ("request_errors", "admission_rejections"):
        known = set(re.findall(rf'{name}_total{{reason="(\w+)"}}', text))
        for words in re.findall(rf'{name}_total{{reason=~?"([\w|]+)"}}', rules):
            assert set(words.split("|")) <= known


def test_calls_are_counted_by_what_became_of_them(world: World) -> None:
    metric = world.server.metric
    assert metric('preamble_request_errors_total{reason="UNKNOWN_ADAPTER"}') == 1
    assert metric('preamble_request_errors_total{reason="QUEUE_FULL"}') == 3
    assert metric('preamble_admission_rejections_total{reason="QUEUE_FULL"}') == 3
    assert metric('preamble_admission_rejections_total{reason="DRAINING"}') == 0
    assert metric('preamble_adapter_requests_total{adapter="sum"}') == 1
    assert metric("preamble_generated_length_tokens_count") == 3 + 4
    assert metric("preamble_generated_length_tokens_sum") == 6 + 2 + 6 + 4 * LONG_TOKENS
    assert metric("preamble_generated_tokens_total") == 6 + 2 + 6 + 4 * LONG_TOKENS
    assert metric("preamble_inter_token_latency_seconds_count") == 5 + 1 + 5 + 4 * (LONG_TOKENS - 1)
    assert metric("preamble_prompt_length_tokens_sum") == 7 * 4 + 3  # Virtual ones too.
    assert metric('preamble_engine_state{state="serving"}') == 1
    assert metric('preamble_engine_state{state="loading"}') == 0
    step = metric("preamble_engine_last_step_timestamp_seconds")
    assert step > metric("process_start_time_seconds")
    assert metric("preamble_stream_message_tokens_sum") == 6  # Whole answers are no messages.


def test_the_log_is_json_has_a_line_for_overload_and_no_prompt(world: World) -> None:
    text = world.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) > 3 and SECRET not in text and not re.search(r"314\D{1,3}159", text)
    assert {line["rank"] for line in lines if "rank" in line} == {0}
    ended = [line for line in lines if line.get("event") == "call_ended"]
    assert {line["fields"]["reason"] for line in ended} == {"QUEUE_FULL"}
    first = ended[0]["fields"]
    assert (first["wire"], first["method"], first["accepted"]) == ("preamble", "Generate", "False")
    # Those of one second are one line, and the next one says so.
    assert 1 <= len(ended) + sum(int(line["fields"]["unsaid"]) for line in ended) <= 3


def test_a_spread_is_the_librarys_histogram_of_as_many_values() -> None:
    draw = random.Random(7)
    registry, bounds = CollectorRegistry(), NEXT_TOKEN_S
    theirs = Histogram("x_seconds", "X.", buckets=bounds, registry=registry)
    ours, own = Spread("x_seconds", "X.", bounds), CollectorRegistry()
    own.register(ours)
    for _ in range(200):
        value = draw.choice([0.0, 7.0, *bounds, draw.expovariate(50)])
        times = draw.randint(1, 40)
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)

    def samples(registry: CollectorRegistry) -> dict[Any, float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {
            (sample.name, sample.labels.get("le")): sample.value
            for family in families
            for sample in family.samples
        }

    mine, expected = samples(own), samples(registry)
    assert mine.keys() == expected.keys()
    assert all(math.isclose(mine[key], expected[key], rel_tol=1e-9) for key in mine)


def test_however_many_adapters_there_are_their_series_are_few() -> None:
    metrics, plain = Metrics(), Answer((1,), Sampling(max_new_tokens=1))
    for number in range(5 * ADAPTERS_SHOWN_MAX):
        # Two versions, and several answers: one request for one name.
        metrics.accepted([replace(plain, adapter=f"task{number}@{v}") for v in (1, 2)])
    metrics.accepted([plain])
    metrics.accepted([replace(plain, adapter="own@1", private=True)])  # Of a tenant's alone.
    rows = re.findall(r'adapter_requests_total{adapter="(\w+)"} (\S+)', metrics.text().decode())
    counts = {name: float(value) for name, value in rows}
    assert len(counts) == ADAPTERS_SHOWN_MAX + 1
    assert counts.pop(OTHER) == 4 * ADAPTERS_SHOWN_MAX + 1
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
def test_a_bad_end_is_counted_by_its_reason_and_logged_if_it_is_ours(
    error: Exception, reason: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> Front:
        front = Front(Metrics(), Access())
        for _ in range(50):
            with pytest.raises(Ended) as ended:
                async with front.call("test", "Ask"):
                    raise error
            assert ended.value.reason.name == reason
        return front

    with caplog.at_level(logging.WARNING, "serving.frontend.call"):
        text = asyncio.run(work()).metrics.text().decode()
    assert f'preamble_request_errors_total{{reason="{reason}"}} 50.0' in text
    lines = [line for line in caplog.messages if "event=call_ended" in line]
    assert 1 <= len(lines) <= 5 if logged else not lines
    assert all(f"reason={reason}" in line for line in lines)


def test_what_was_not_said_is_told_with_what_is() -> None:
    sparing = Sparing(period_s=0.0)
    assert [sparing.due("a"), sparing.due("a")] == [0, 0]
    sparing.period_s = 1e9
    assert [sparing.due("a"), sparing.due("a"), sparing.due("b")] == [None, None, 0]
    sparing.period_s = 0.0
    assert sparing.due("a") == 2


def test_a_json_line_has_the_words_of_the_message(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    try:
        logging.getLogger().handlers[:] = []  # As in a process of its own.
        log_to_stderr("json", rank=3)
        logging.warning("event=x reason=%r path=%s n=%d", 'it\'s "so"', "a/b", 7)
        logging.warning("of another library\nwith two lines")
        try:
            raise ValueError("why")
        except ValueError:
            logging.exception("event=failed")
    finally:
        logging.getLogger().handlers[:] = before
    first, second, third = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["level"], first["rank"], first["event"]) == ("WARNING", 3, "x")
    assert first["fields"]["path"] == "a/b" and first["fields"]["n"] == "7"
    assert "so" in first["fields"]["reason"]
    assert second["message"] == "of another library\nwith two lines" and "event" not in second
    assert third["stack"].endswith("ValueError: why")
