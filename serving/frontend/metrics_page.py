"""Metrics page: the HTTP handler of `/metrics`, with content negotiation and a bounded cost.

A client that names OpenMetrics in `Accept` gets it, with exemplars; all other clients get
Prometheus' text format. The response is compressed if `Accept-Encoding` allows gzip.

Bound of the cost: a thread renders one scrape at a time, outside the event loop. Requests that wait
for the same format and content get the same scrape. The next scrape begins after a pause, so that
scrapes take at most the share SCRAPE_SHARE of a core, however many clients ask. A scrape of 1,000
series takes 5 to 10 ms of CPU time (`serving.service.metrics` bounds the number of series). Only
scrapes of more than 250 ms would take a larger share, since SCRAPE_PAUSE_S_MAX limits the pause.
"""

import asyncio
import gzip
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from serving.frontend.http_transport import HEADERS, Handler
from serving.service.metrics import Metrics

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_MEDIA_TYPE = "application/openmetrics-text"
# Prometheus names version 0.0.1 too; both versions have the same format.
OPENMETRICS_VERSIONS = ("", "0.0.1", "1.0.0")
TEXT_MEDIA_TYPES = ("text/plain", "text/*", "*/*")
# Higher levels take longer, and make the repetitive text only slightly smaller.
GZIP_LEVEL = 1
SCRAPE_SHARE = 0.2
SCRAPE_PAUSE_S_MAX = 1.0


@dataclass(frozen=True)
class ScrapeFormat:
    """The format and the encoding of a scrape."""

    openmetrics: bool
    gzip: bool

    @classmethod
    def negotiate(cls, accept: str, accept_encoding: str) -> "ScrapeFormat":
        """Return the format that a client prefers.

        `accept`, `accept_encoding`: its headers; several headers are joined by commas.
        """
        openmetrics, text = 0.0, 0.0
        for media_type, parameters in _parse_items(accept):
            version, quality = parameters.get("version", ""), _quality(parameters)
            if media_type == OPENMETRICS_MEDIA_TYPE and version in OPENMETRICS_VERSIONS:
                openmetrics = max(openmetrics, quality)
            elif media_type in TEXT_MEDIA_TYPES:
                text = max(text, quality)
        encodings = {
            coding: _quality(parameters) for coding, parameters in _parse_items(accept_encoding)
        }
        gzip_quality = encodings.get("gzip", encodings.get("*", 0.0))
        return cls(
            openmetrics=0 < openmetrics >= text,
            gzip=0 < gzip_quality >= encodings.get("identity", 0.0),
        )

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"Content-Type": TEXT_CONTENT_TYPE, "Vary": "Accept, Accept-Encoding"}
        if self.openmetrics:
            headers["Content-Type"] = OPENMETRICS_CONTENT_TYPE
        if self.gzip:
            headers["Content-Encoding"] = "gzip"
        return headers

    def render(self, metrics: Metrics, *, with_usage: bool) -> bytes:
        text = metrics.render(openmetrics=self.openmetrics, with_usage=with_usage)
        return gzip.compress(text, GZIP_LEVEL, mtime=0) if self.gzip else text


class MetricsPage:
    """Answers the requests for `/metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(1, "scrape")
        self._render_lock = asyncio.Lock()
        self._next_render_at = 0.0  # On the monotonic clock.
        # Scrapes that have not begun, by format and content.
        self._pending: dict[tuple[ScrapeFormat, bool], asyncio.Task[bytes]] = {}

    def handlers(self, *, with_usage: bool = False) -> Mapping[str, Handler]:
        """Return the handlers; `with_usage`: the scrapes have the usage of each tenant."""
        handle = partial(self._handle, with_usage=with_usage)
        return {"GET": handle, "HEAD": handle}

    async def _handle(self, request: web.BaseRequest, *, with_usage: bool) -> web.StreamResponse:
        scrape_format = ScrapeFormat.negotiate(
            ",".join(request.headers.getall("Accept", ())),
            ",".join(request.headers.getall("Accept-Encoding", ())),
        )
        key = scrape_format, with_usage
        task = self._pending.get(key)
        if task is None:
            task = asyncio.create_task(self._render(scrape_format, with_usage))
            self._pending[key] = task
        # A client that disconnects must not cancel the scrape of the other clients.
        body = await asyncio.shield(task)
        headers = {**HEADERS, **scrape_format.headers, "Cache-Control": "no-store"}
        return web.Response(body=body, headers=headers)

    async def _render(self, scrape_format: ScrapeFormat, with_usage: bool) -> bytes:
        async with self._render_lock:
            await asyncio.sleep(max(0.0, self._next_render_at - time.monotonic()))
            del self._pending[scrape_format, with_usage]
            body, cpu_s = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._render_timed, scrape_format, with_usage
            )
            pause_s = min(cpu_s * (1 / SCRAPE_SHARE - 1), SCRAPE_PAUSE_S_MAX)
            self._next_render_at = time.monotonic() + pause_s
            return body

    def _render_timed(self, scrape_format: ScrapeFormat, with_usage: bool) -> tuple[bytes, float]:
        """Return a scrape and the CPU time that it took."""
        started = time.thread_time()
        body = scrape_format.render(self._metrics, with_usage=with_usage)
        return body, time.thread_time() - started


def _parse_items(header: str) -> list[tuple[str, Mapping[str, str]]]:
    """Return the items of an Accept header, in lower case, each with its parameters."""
    items: list[tuple[str, Mapping[str, str]]] = []
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        pairs = (parameter.partition("=") for parameter in parameters)
        items.append((name, {key.strip(): value.strip(' "') for key, _, value in pairs}))
    return items


def _quality(parameters: Mapping[str, str]) -> float:
    """Return the parameter `q`; 1 without it, and 0 if it is not a number."""
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
