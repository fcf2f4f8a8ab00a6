"""The life of a server: refuse early, bind, load, serve, drain.

Health tells it to whoever watches: not serving until the model answers, while its ranks are lost,
and from the first SIGTERM on, when what was accepted is finished. A second signal ends at once.
"""

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpt.errors import ConfigError
from serving.access import Access
from serving.config import ServerConfig
from serving.front import Front
from serving.http import HttpServer, Page, family
from serving.link import Link
from serving.links import open_link
from serving.metrics import CONTENT_TYPE, Metrics, version
from serving.service import Found, Service
from serving.wires import handlers, wires

log = logging.getLogger(__name__)

SERVICES = [wire.service for wire in wires()]

# Connections that are still open when the last call has ended get this long to notice.
GOODBYE_S = 1.0

# Looking at the adapters' directory may take this share of a thread's time.
SCAN_SHARE = 0.02


async def serve(config: ServerConfig, ready: Callable[[str], None]) -> int:
    """Serve until a signal says otherwise; `ready` is told the one line that says where."""
    started = time.monotonic()
    service = Service(Found.at(config))
    metrics = Metrics()
    front = Front(metrics, Access())
    checks = health.aio.HealthServicer()
    await _tell(checks, up=False)
    server, port = _bind(config)
    server.add_generic_rpc_handlers(tuple(handlers(front)))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    with HttpServer(config.host, config.http_port, _pages(front)) as http:
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
            _watch(metrics, service)
            front.open(service)
            tasks = [asyncio.create_task(work) for work in (_poll(service), _heed(service, checks))]
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


def _bind(config: ServerConfig) -> tuple[grpc.aio.Server, int]:
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
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.message_bytes_max),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.so_reuseport", 0),  # So that a second server on the port fails, not shares.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ],
    )
    return server, server.add_insecure_port(config.address(config.port))


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
    checks: health.aio.HealthServicer,
    hurry: asyncio.Event,
) -> None:
    """Refuse what is new, finish what was accepted, within the time there is."""
    assert front.service is not None
    log.info("event=draining drain_s=%g", front.service.config.drain_s)
    await checks.enter_graceful_shutdown()
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


async def _heed(service: Service, checks: health.aio.HealthServicer) -> None:
    """Tell by health whether the engine answers, as soon as that changes."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    service.engine.on_change = partial(loop.call_soon_threadsafe, changed.set)
    while True:
        changed.clear()
        await _tell(checks, up=service.engine.up)
        await changed.wait()


async def _tell(checks: health.aio.HealthServicer, *, up: bool) -> None:
    kinds = health_pb2.HealthCheckResponse
    for name in ("", *SERVICES):
        await checks.set(name, kinds.SERVING if up else kinds.NOT_SERVING)


def _pages(front: Front) -> dict[str, Callable[[], Page]]:
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

    def metrics() -> Page:
        return Page(200, front.metrics.text(), CONTENT_TYPE)

    return {"/metrics": metrics, "/health/live": live, "/health/ready": ready}


def _watch(metrics: Metrics, service: Service) -> None:
    """Have the scrape read the engine's state."""
    engine, adapters = service.engine, service.adapters
    engine.on_step = metrics.step.observe
    for name, text, read in (
        ("scheduler_running_requests", "Requests that run.", lambda: engine.load.running),
        ("scheduler_waiting_requests", "Requests that wait.", lambda: engine.waiting),
        ("kv_blocks", "Blocks of memory for keys and values.", lambda: engine.load.blocks),
        ("kv_blocks_held", "Those that requests hold.", lambda: engine.load.blocks_held),
        ("kv_blocks_cached", "Those kept for later prompts.", lambda: engine.load.blocks_cached),
        ("adapters_resident", "On the device.", lambda: engine.load.adapters_resident),
        ("adapters_loaded", "Adapters that can be asked for.", lambda: len(adapters)),
        ("engine_up", "Whether the ranks answer.", lambda: engine.up),
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
        ("adapter_loads", "Adapters put on the device.", lambda: engine.load.adapter_loads),
        ("adapter_load_failures", "Adapter files refused.", lambda: adapters.failures),
    ):
        metrics.watch_count(name, text, count)
    if (proved := service.proved) is not None:
        text = "A logit's largest distance from the proof's, in standard deviations."
        metrics.watch("proof_difference", text, lambda: proved)
    metrics.build(version=version(), model=service.name, dtype=service.dtype)
