"""The page /metrics: negotiation of format and encoding, and the bound on its cost.

An HTTP server in this process serves the page; aiohttp's client asks for it.
"""

import asyncio
import gzip
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

import aiohttp
import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serving.config import NetworkConfig
from serving.frontend.http_transport import HttpServer
from serving.frontend.metrics_page import (
    OPENMETRICS_CONTENT_TYPE,
    SCRAPE_SHARE,
    TEXT_CONTENT_TYPE,
    MetricsPage,
    ScrapeFormat,
)
from serving.service.metrics import Metrics

# The Accept headers of Prometheus 2.42 and 3.7.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TEXT_FIRST = (
    "text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("application/json", False),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; Version=1.0.0; charset=utf-8", True),
        ('application/openmetrics-text; version="1.0.0"', True),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        (TEXT_FIRST, False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.000", False),
        ("application/openmetrics-text;q=0.5, text/plain", False),
        ("application/openmetrics-text;q=0.5, text/*;q=0.4", True),
        ("application/openmetrics-text;q=much", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=2.0.0,application/openmetrics-text", True),
        (";;;,,=;q", False),
    ],
)
def test_openmetrics_is_for_clients_that_prefer_it(accept: str, openmetrics: bool) -> None:
    assert ScrapeFormat.negotiate(accept, "").openmetrics is openmetrics


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", PROMETHEUS_2, PROMETHEUS_3])
def test_negotiation_agrees_with_prometheus_client(accept: str) -> None:
    _, content_type = choose_encoder(accept)
    chosen = ScrapeFormat.negotiate(accept, "").headers["Content-Type"]
    assert content_type.startswith(chosen)  # The library may add the escaping scheme.


@pytest.mark.parametrize(
    ("accept_encoding", "compressed"),
    [
        ("", False),
        ("identity", False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("br, zstd", False),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("*;q=0", False),
        ("identity, gzip;q=0.5", False),
    ],
)
def test_gzip_is_for_clients_that_accept_it(accept_encoding: str, compressed: bool) -> None:
    assert ScrapeFormat.negotiate("", accept_encoding).gzip is compressed


class CountingMetrics(Metrics):
    """Metrics that count how often they are rendered."""

    renders = 0

    def render(self, *, openmetrics: bool = False, with_usage: bool = False) -> bytes:
        self.renders += 1
        return super().render(openmetrics=openmetrics, with_usage=with_usage)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


Fetch = Callable[[Mapping[str, str]], Coroutine[None, None, Reply]]


def with_page(
    work: Callable[[Metrics, Fetch], Coroutine[None, None, None]], metrics: Metrics
) -> None:
    """Run `work` with a function that asks for the page with the given headers."""

    async def run() -> None:
        routes = {"/metrics": MetricsPage(metrics).handlers()}
        server = HttpServer(NetworkConfig(http_port=0), routes)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            server,
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
        ):

            async def fetch(headers: Mapping[str, str]) -> Reply:
                url = f"http://127.0.0.1:{server.port}/metrics"
                no_default = ("Accept", "Accept-Encoding")
                async with session.get(
                    url, headers=headers, skip_auto_headers=no_default
                ) as response:
                    return Reply(response.status, response.headers, await response.read())

            await work(metrics, fetch)

    asyncio.run(run())


def test_each_format_and_encoding_is_served() -> None:
    metrics = Metrics("m", "vllm")
    metrics.record_first_token("openai", 0.3, {"request_id": "a b{c}=d,e"})

    async def work(metrics: Metrics, fetch: Fetch) -> None:
        plain = await fetch({})
        assert plain.headers["Content-Type"] == TEXT_CONTENT_TYPE
        assert "Content-Encoding" not in plain.headers and b"# EOF" not in plain.body
        compressed = await fetch({"Accept": PROMETHEUS_2, "Accept-Encoding": "gzip"})
        assert compressed.headers["Content-Type"] == OPENMETRICS_CONTENT_TYPE
        assert compressed.headers["Content-Encoding"] == "gzip"
        assert compressed.headers["Vary"] == "Accept, Accept-Encoding"
        packed = compressed.body
        text = gzip.decompress(packed).decode()
        assert len(packed) < len(text) / 5
        families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        name = "preamble_time_to_first_token_seconds"
        (samples,) = [family.samples for family in families if family.name == name]
        labels = [sample.exemplar.labels for sample in samples if sample.exemplar]
        assert labels == [{"request_id": "a b{c}=d,e"}]

    with_page(work, metrics)


def test_concurrent_scrapes_share_their_renders() -> None:
    async def work(metrics: Metrics, fetch: Fetch) -> None:
        assert isinstance(metrics, CountingMetrics)
        started = time.monotonic()
        responses = await asyncio.gather(*(fetch({}) for _ in range(60)))
        assert {response.status for response in responses} == {200}
        # The first request is rendered alone; all requests that arrive meanwhile share the second
        # one. On a busy machine requests arrive later, after the pause of another render.
        pauses = (time.monotonic() - started) / render_s * SCRAPE_SHARE
        assert metrics.renders <= 2 + pauses

    metrics = CountingMetrics("m", "vllm")
    started = time.thread_time()
    metrics.render()
    render_s = time.thread_time() - started
    metrics.renders = 0
    with_page(work, metrics)


def test_a_client_that_disconnects_does_not_cancel_the_scrape_of_others() -> None:
    async def work(metrics: Metrics, fetch: Fetch) -> None:
        await fetch({})  # The next scrape begins after a pause, in which requests come together.
        tasks = [asyncio.create_task(fetch({})) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        responses = await asyncio.gather(*tasks, return_exceptions=True)
        answered = [response for response in responses if isinstance(response, Reply)]
        assert len(answered) == 2 and {response.status for response in answered} == {200}

    with_page(work, Metrics())
