"""The life of a server: refuse early, bind, load, serve, drain.

Health tells it to whoever watches: not serving until the model answers, and again from the first
SIGTERM on, while what was accepted is finished. A second signal ends at once.
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
from protos.preamble.v1 import adapters_pb2, admin_pb2, generation_pb2
from serving.config import ServerConfig
from serving.http import HttpServer, Page, family
from serving.metrics import CONTENT_TYPE, Metrics, version
from serving.server import Reading, Servicer
from serving.service import Found, Service

log = logging.getLogger(__name__)

SERVICES = [
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (generation_pb2, "GenerationService"),
        (adapters_pb2, "AdapterService"),
        (admin_pb2, "AdminService"),
    )
]

# Connections that are still open when the last call has ended get this long to notice.
GOODBYE_S = 1.0


async def serve(config: ServerConfig, ready: Callable[[str], None]) -> int:
    """Serve until a signal says otherwise; `ready` is told the one line that says where."""
    started = time.monotonic()
    found = Found.at(config)
    metrics = Metrics()
    servicer = Servicer(metrics)
    checks = health.aio.HealthServicer()
    await _tell(checks, health_pb2.HealthCheckResponse.NOT_SERVING)
    server, port = _bind(config, servicer)
    servicer.add_to(server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    with HttpServer(config.host, config.http_port, _pages(servicer)) as http:
        await server.start()
        stop, hurry = _signals()
        try:
            loading = _load(found)
            if not await _first(loading, stop):
                log.info("event=stopped while=loading")
                return 0
            service = loading.result()
            _watch(metrics, service)
            servicer.open(service)
            await _tell(checks, health_pb2.HealthCheckResponse.SERVING)
            ready(
                f"ready grpc={config.address(port)} http={config.address(http.port)} "
                f"model={service.name} weights_mib={service.weight_bytes / 2**20:.1f} "
                f"adapters={len(service.adapters)} start_s={time.monotonic() - started:.2f}"
            )
            polling = asyncio.create_task(_poll(service, checks))
            await stop.wait()
            polling.cancel()
            await _drain(server, servicer, checks, hurry)
            await asyncio.to_thread(service.close)
        finally:
            await server.stop(0)
    return 0


def _load(found: Found) -> "asyncio.Future[Service]":
    """In a thread that is left behind if a signal comes first: a big model takes minutes."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Service] = loop.create_future()

    def load() -> None:
        tell: Callable[[], None]
        try:
            tell = partial(loaded.set_result, Service(found))
        except BaseException as error:
            tell = partial(loaded.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed if a signal came first.
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=load, name="load", daemon=True).start()
    return loaded


def _bind(config: ServerConfig, servicer: Servicer) -> tuple[grpc.aio.Server, int]:
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
        interceptors=[Reading(servicer)],
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


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first signal to end, and by the second."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    return stop, hurry


async def _first(future: "asyncio.Future[Any]", event: asyncio.Event) -> bool:
    """Whether the future is done before the event is set."""
    waiting: asyncio.Future[Any] = asyncio.create_task(event.wait())
    await asyncio.wait([future, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return future.done()


async def _drain(
    server: grpc.aio.Server,
    servicer: Servicer,
    checks: health.aio.HealthServicer,
    hurry: asyncio.Event,
) -> None:
    """Refuse what is new, finish what was accepted, within the time there is."""
    assert servicer.service is not None
    log.info("event=draining drain_s=%g", servicer.service.config.drain_s)
    await checks.enter_graceful_shutdown()
    drained: asyncio.Task[Any] = asyncio.create_task(servicer.drained())
    hurried: asyncio.Task[Any] = asyncio.create_task(hurry.wait())
    done, _ = await asyncio.wait(
        [drained, hurried],
        timeout=servicer.service.config.drain_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in (drained, hurried):
        task.cancel()
    await server.stop(GOODBYE_S if drained in done else 0)
    log.info("event=stopped drained=%s", drained in done)


async def _poll(service: Service, checks: health.aio.HealthServicer) -> None:
    """Look at the adapters' directory, and whether the engine still runs."""
    while True:
        await asyncio.sleep(service.config.adapters_poll_s)
        try:
            await asyncio.to_thread(service.adapters.scan)
        except Exception:  # A network file system may be away for a while; look again later.
            log.exception("event=adapters_not_scanned")
        if not service.engine.alive:
            log.error("event=engine_dead")
            await _tell(checks, health_pb2.HealthCheckResponse.NOT_SERVING)


async def _tell(checks: health.aio.HealthServicer, status: int) -> None:
    for name in ("", *SERVICES):
        await checks.set(name, status)


def _pages(servicer: Servicer) -> dict[str, Callable[[], Page]]:
    def alive() -> bool:
        return servicer.service is None or servicer.service.engine.alive

    def live() -> Page:
        return Page(200, b"live\n") if alive() else Page(503, b"the engine has stopped\n")

    def ready() -> Page:
        able = servicer.state == "serving" and alive()
        return Page(200, b"ready\n") if able else Page(503, f"{servicer.state}\n".encode())

    def metrics() -> Page:
        return Page(200, servicer.metrics.text(), CONTENT_TYPE)

    return {"/metrics": metrics, "/health/live": live, "/health/ready": ready}


def _watch(metrics: Metrics, service: Service) -> None:
    engine, adapters = service.engine, service.adapters
    metrics.watch("scheduler_running_requests", "Requests that run.", lambda: engine.running)
    metrics.watch("scheduler_waiting_requests", "Requests that wait.", lambda: engine.waiting)
    metrics.watch("adapters_loaded", "Adapters in memory.", lambda: len(adapters))
    metrics.watch_count(
        "adapter_load_failures", "Adapter files that were refused.", lambda: adapters.failures
    )
    metrics.watch("weight_bytes", "Memory of the weights.", lambda: service.weight_bytes)
    if (proved := service.proved) is not None:
        text = "A logit's largest distance from the proof's, in standard deviations."
        metrics.watch("proof_difference", text, lambda: proved.largest)
    metrics.build(version=version(), model=service.name, dtype=service.dtype)
