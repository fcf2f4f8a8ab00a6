"""The life of a server: refuse early, bind, load, serve, drain.

Health tells it to whoever watches: not serving until the model answers, while its ranks are lost,
and from the first SIGTERM on, when what was accepted is finished. A second signal ends at once.
"""

import asyncio
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio

from gpt.errors import ConfigError
from serving.admission.auth import Access
from serving.config import ServerConfig
from serving.engine.transport import Link
from serving.frontend.call import Front
from serving.frontend.health_reflection import Health, reflect
from serving.frontend.http_transport import HttpServer, Page, Routes, family, paged
from serving.frontend.tls import Tls
from serving.protocols.grpc_services import handlers, wires
from serving.protocols.openai import routes
from serving.protocols.preamble import web_page
from serving.ranks.launcher import open_link
from serving.service.metrics import CONTENT_TYPE, ENGINE_STATES, Metrics, version
from serving.service.service import Found, Service

log = logging.getLogger(__name__)

SERVICES = [wire.service for wire in wires()]

# Names of no service that health can be asked for, as kubelets do.
LIVENESS, READINESS = "liveness", "readiness"

# Connections that are still open when the last call has ended get this long to notice.
GOODBYE_S = 1.0

# Looking at the adapters' directory may take this share of a thread's time.
SCAN_SHARE = 0.02


async def serve(config: ServerConfig, ready: Callable[[str], None]) -> int:
    """Serve until a signal says otherwise; `ready` is told the one line that says where."""
    started = time.monotonic()
    tls, access = Tls.of(config), Access(config.tokens)
    service = Service(Found.at(config))
    metrics = Metrics()
    front = Front(metrics, access, calls_max=config.calls_max, slow_reader_s=config.slow_reader_s)
    said = "Which of these states it is in."
    metrics.watch_state("engine_state", said, ENGINE_STATES, partial(_state, front))
    if tls is not None:
        said = "When the certificate that is served expires, since 1970."
        metrics.watch("tls_certificate_expiry_timestamp_seconds", said, lambda: tls.expires)
    checks = Health()
    await _tell(checks, up=False)
    server, port = _bind(config, tls)
    server.add_generic_rpc_handlers(tuple(handlers(front)))
    checks.serve(server)
    if config.reflection:
        reflect(SERVICES, server)
    aside = _aside(config, front)
    secret = None if tls is None else tls.context
    http = HttpServer(config, _routes(config, front), tls=secret)
    async with _traced(config, front), http, aside:
        link = open_link(config)
        await server.start()
        hurry = _signals(front)
        try:
            loading = _load(service, link)
            if not await _first(loading, front.stop):
                loading.cancel()
                log.info("event=stopped while=loading")
                return 0
            loading.result()
            gc.collect()
            gc.freeze()  # What is here stays. To look through it again holds up all for 0.1 s.
            _watch(metrics, service)
            front.open(service)
            replays = service.replays.begin(
                service.adapters, service.admission, service.engine, metrics.replayed
            )
            works = (_poll(service), _heed(service, checks), _reread(config, access, tls), replays)
            tasks = [asyncio.create_task(work) for work in works]
            ready(
                f"ready grpc={config.address(port)} http={config.address(http.port)} "
                f"model={service.name} {service.ledger.line()} adapters={len(service.adapters)} "
                f"start_s={time.monotonic() - started:.2f}"
            )
            await front.stop.wait()
            for task in tasks:
                task.cancel()
            await _drain(server, front, checks, hurry)
        finally:
            await asyncio.to_thread(service.close)
            await asyncio.to_thread(link.close)
            await server.stop(0)
    return 0


@asynccontextmanager
async def _traced(config: ServerConfig, front: Front) -> AsyncIterator[None]:
    """Traces of all calls, if they are wanted; sent on until the block ends."""
    if config.traces is None:
        yield
        return
    try:
        from serving.frontend.tracing import Traces
    except ImportError as error:
        raise ConfigError(
            f"traces are to go to {config.traces}, and {error.name or 'a package'} is not "
            "installed; pip install 'preamble[traces]', or leave traces out"
        ) from None
    traces = Traces(config.traces, config.traces_share, version())
    outbox, watch = traces.outbox, front.metrics.watch_count
    watch("trace_spans_sent", "Spans that a receiver took.", lambda: outbox.sent)
    watch("trace_spans_dropped", "Spans that nobody got.", lambda: outbox.dropped)
    front.traces = traces
    try:
        yield
    finally:
        await asyncio.to_thread(traces.close)


def _load(service: Service, link: Link) -> "asyncio.Future[None]":
    """In a thread that is left behind if a signal comes first: a big model takes minutes."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[None] = loop.create_future()

    def load() -> None:
        failure = None
        try:
            service.open(link)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # The loop is closed if a signal came first.
            loop.call_soon_threadsafe(tell, failure)

    def tell(failure: BaseException | None) -> None:
        if loaded.cancelled():
            return
        if failure is None:
            loaded.set_result(None)
        else:
            loaded.set_exception(failure)

    threading.Thread(target=load, name="load", daemon=True).start()
    return loaded


def _bind(config: ServerConfig, tls: Tls | None) -> tuple[grpc.aio.Server, int]:
    try:
        # The library would say on stderr, in its own words, that a port is taken. Ask first.
        with socket.socket(family(config.host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"port {config.port} of {config.host} cannot be bound ({error.strerror}); "
            "choose another, or 0 for any that is free"
        ) from None
    server = grpc.aio.server(options=_options(config))
    address = config.address(config.port)
    if tls is None:
        return server, server.add_insecure_port(address)
    return server, server.add_secure_port(address, tls.credentials())


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    def ms(seconds: float) -> int:
        return round(1000 * seconds)

    return [
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),  # So that a second server on the port fails, not shares.
        ("grpc.max_allowed_incoming_connections", config.connections_max),
        ("grpc.max_concurrent_streams", config.connection_calls_max),
        # The library varies the age by a tenth, so that connections do not all end together.
        ("grpc.max_connection_age_ms", ms(config.connection_age_s)),
        ("grpc.max_connection_age_grace_ms", ms(config.connection_grace_s)),
        ("grpc.max_connection_idle_ms", ms(config.connection_idle_s)),
        ("grpc.server_handshake_timeout_ms", ms(config.handshake_s)),
        # Our pings find clients that are gone. Theirs are welcome, on a silent call too.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", ms(config.client_ping_s)),
    ]


def _signals(front: Front) -> asyncio.Event:
    """Set by a signal to end that is not the first. SIGUSR2 asks what the engine was doing."""
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        (hurry if front.stop.is_set() else front.stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)

    def dump() -> None:
        if front.service is not None:
            log.info("event=flight_asked path=%s", front.service.engine.dump())

    loop.add_signal_handler(signal.SIGUSR2, dump)
    return hurry


async def _first(future: "asyncio.Future[Any]", event: asyncio.Event) -> bool:
    """Whether the future is done before the event is set."""
    waiting: asyncio.Future[Any] = asyncio.create_task(event.wait())
    await asyncio.wait([future, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return future.done()


async def _drain(
    server: grpc.aio.Server,
    front: Front,
    checks: Health,
    hurry: asyncio.Event,
) -> None:
    """Refuse what is new, finish what was accepted, within the time there is."""
    assert front.service is not None
    log.info("event=draining drain_s=%g", front.service.config.drain_s)
    await _tell(checks, up=False)
    drained: asyncio.Task[Any] = asyncio.create_task(front.drained())
    hurried: asyncio.Task[Any] = asyncio.create_task(hurry.wait())
    done, _ = await asyncio.wait(
        [drained, hurried],
        timeout=front.service.config.drain_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in (drained, hurried):
        task.cancel()
    # What arrives right now gRPC ends as CANCELLED, in none of our hands; our client understands.
    await server.stop(GOODBYE_S if drained in done else 0)
    log.info("event=stopped drained=%s", drained in done)


async def _poll(service: Service) -> None:
    """Look at the adapters' directory, the longer it takes the more seldom."""
    took_s = 0.0
    while True:
        await asyncio.sleep(max(service.config.adapters_poll_s, took_s / SCAN_SHARE))
        started = time.monotonic()
        try:
            await asyncio.to_thread(service.adapters.scan)
        except Exception:  # A network file system may be away for a while; look again later.
            log.exception("event=adapters_not_scanned")
        took_s = time.monotonic() - started


async def _heed(service: Service, checks: Health) -> None:
    """Tell by health whether the engine answers, as soon as that changes."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    service.engine.on_change = partial(loop.call_soon_threadsafe, changed.set)
    while True:
        changed.clear()
        await _tell(checks, up=service.engine.up, live=not service.engine.gone)
        await changed.wait()


async def _reread(config: ServerConfig, access: Access, tls: Tls | None) -> None:
    """Look at the files of tokens and certificates; what is wrong with them is logged there."""
    while True:
        await asyncio.sleep(config.secrets_poll_s)
        await asyncio.to_thread(access.refresh)
        if tls is not None:
            await asyncio.to_thread(tls.refresh)


async def _tell(checks: Health, *, up: bool, live: bool = True) -> None:
    """Readiness, by every service's name and that of none; apart from it, whether to restart us."""
    for name in ("", READINESS, *SERVICES):
        await checks.tell(name, up=up)
    await checks.tell(LIVENESS, up=live)


def _routes(config: ServerConfig, front: Front) -> Routes:
    """What the HTTP port has."""
    pages = dict(_pages(front))
    if config.metrics_port is not None:
        del pages["/metrics"]
    return {**pages, **routes.routes(front), **web_page.routes(front, page=config.page)}


def _aside(config: ServerConfig, front: Front) -> AbstractAsyncContextManager[object]:
    """The pages at an address of their own, if they are to have one."""
    if config.metrics_port is None:
        return nullcontext()
    if config.metrics_exposed is not None:
        log.warning(
            "event=metrics_exposed host=%s port=%d note=%r",
            *(config.metrics_exposed, config.metrics_port),
            "no TLS, no token: let only probes and scrapes reach it",
        )
    address = (config.metrics_host or config.host, config.metrics_port)
    return HttpServer(config, _pages(front), address=address, setting="metrics_port")


def _pages(front: Front) -> Routes:
    # A scrape takes milliseconds in which no token would go out. One thread: they take turns.
    scraping = ThreadPoolExecutor(1, "scrape")

    def live() -> Page:
        # A loss that mends itself is none of the watcher's business.
        gone = front.service is not None and front.service.engine.gone
        return Page(503, b"the engine has stopped\n") if gone else Page(200, b"live\n")

    def ready() -> Page:
        if front.state != "serving" or front.service is None:
            return Page(503, f"{front.state}\n".encode())
        if not front.service.engine.up:
            return Page(503, b"the engine is lost\n")
        return Page(200, b"ready\n")

    async def metrics() -> Page:
        loop = asyncio.get_running_loop()
        return Page(200, await loop.run_in_executor(scraping, front.metrics.text), CONTENT_TYPE)

    return {
        "/metrics": paged(metrics),
        "/health/live": paged(live),
        "/health/ready": paged(ready),
    }


def _state(front: Front) -> str:
    """Of `ENGINE_STATES`, the one that holds."""
    if front.service is None or front.state == "draining":
        return front.state
    engine = front.service.engine
    if engine.gone:
        return "dead"
    return "serving" if engine.up else "restarting"


def _watch(metrics: Metrics, service: Service) -> None:
    """Have the scrape read the engine's state."""
    engine, adapters = service.engine, service.adapters
    engine.on_step = metrics.stepped
    for name, text, read in (
        ("scheduler_running_requests", "Requests that run.", lambda: engine.load.running),
        ("scheduler_waiting_requests", "Requests that wait.", lambda: engine.waiting),
        ("kv_blocks", "Blocks of memory for keys and values.", lambda: engine.load.blocks),
        ("kv_blocks_held", "Those that requests hold.", lambda: engine.load.blocks_held),
        ("kv_blocks_cached", "Those kept for later prompts.", lambda: engine.load.blocks_cached),
        ("adapters_resident", "On the device.", lambda: engine.load.adapters_resident),
        ("adapters_loaded", "Adapters that can be asked for.", lambda: len(adapters)),
        ("engine_up", "Whether the ranks answer.", lambda: engine.up),
        (
            "kv_usage_ratio",
            "Of those blocks, the part that requests hold.",
            lambda: engine.load.blocks_held / max(1, engine.load.blocks),
        ),
        (
            "engine_last_step_timestamp_seconds",
            "When a step last ended, since 1970; 0: none has.",
            lambda: metrics.last_step,
        ),
        ("weight_bytes", "Memory of the weights.", lambda: service.ledger.weight_bytes),
    ):
        metrics.watch(name, text, read)
    for name, text, count in (
        ("engine_steps", "Steps since the ranks started.", lambda: engine.load.steps),
        ("engine_restarts", "Times that the ranks were lost.", lambda: engine.restarts),
        ("engine_preemptions", "Requests put back for memory.", lambda: engine.load.preemptions),
        ("engine_prompt_tokens", "Of prompts that ran.", lambda: engine.load.prompt_tokens),
        ("engine_cached_tokens", "Those found in the cache.", lambda: engine.load.cached_tokens),
        ("engine_drafted_tokens", "Guessed ahead.", lambda: engine.load.drafted_tokens),
        ("engine_accepted_tokens", "Guessed right.", lambda: engine.load.accepted_tokens),
        ("engine_replayed_steps", "CUDA graphs.", lambda: engine.load.replayed_steps),
        ("engine_early_steps", "Begun before tokens.", lambda: engine.load.early_steps),
        ("adapter_loads", "Adapters put on the device.", lambda: engine.load.adapter_loads),
        ("adapter_load_failures", "Adapter files refused.", lambda: adapters.failures),
    ):
        metrics.watch_count(name, text, count)
    if (proved := service.proved) is not None:
        text = "A logit's largest distance from the proof's, in standard deviations."
        metrics.watch("proof_difference", text, lambda: proved)
    if (drift := service.drift) is not None:
        text = "By how much narrow weights change the next token, in nats."
        metrics.watch("weights_divergence", text, lambda: drift[0])
        text = "In how many places narrow weights leave the likeliest token as it was."
        metrics.watch("weights_agreement_ratio", text, lambda: drift[1])
    metrics.build(version=version(), model=service.name, dtype=service.dtype)
