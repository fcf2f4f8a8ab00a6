"""Server lifecycle: checks settings, binds ports, loads the model, serves, reports health, drains.

Health is NOT_SERVING until the model is loaded, while ranks are lost, and during the drain. The
first SIGTERM or SIGINT starts the drain: the server refuses new calls and finishes accepted ones. A
second signal ends the drain at once. A signal while the model is being loaded stops the server.
"""

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
import msgspec
from aiohttp import web

from gpt.errors import ConfigError
from gpt.garbage_collection import freeze_startup_objects
from gpt.kv_groups import kv_groups
from gpt.software_versions import preamble_version
from serving.adapters.object_mirror import ObjectMirror
from serving.admission.auth import Authenticator
from serving.config import (
    COUNT_MAX,
    LimitsConfig,
    NetworkConfig,
    ObservabilityConfig,
    SecurityConfig,
    ServerConfig,
    is_loopback,
)
from serving.engine.transport import EngineTransport
from serving.file_threads import (
    CHANGE_LOG_OWNER,
    FLIGHT_OWNER,
    MIRROR_OWNER,
    TLS_OWNER,
    TOKENS_OWNER,
    FileThreads,
)
from serving.frontend.call import Frontend
from serving.frontend.grpc_transport import ProbeInterceptor
from serving.frontend.health_reflection import HealthService, add_reflection
from serving.frontend.http_transport import (
    JSON_TYPE,
    Handler,
    HttpServer,
    Routes,
    TextPage,
    address_family,
    credential,
    merge_routes,
    page_handlers,
)
from serving.frontend.metrics_page import MetricsPage
from serving.frontend.open_files import fit_connections, log_accept_errors
from serving.frontend.tls import TlsCertificates
from serving.protocols.grpc_services import all_services, handlers
from serving.protocols.kserve import http_routes as kserve_http
from serving.protocols.openai import lora_adapters, routes
from serving.protocols.preamble import web_page
from serving.protocols.tgi import routes as tgi
from serving.ranks.launcher import open_transport
from serving.request import UnavailableError
from serving.service.metrics import ENGINE_STATES, Metrics
from serving.service.service import ServableCheckpoint, Service
from serving.service.usage import UsageMeter
from serving.service.usage_file import UsageFile

log = logging.getLogger(__name__)

SERVICES = [protocol.service for protocol in all_services()]

# Names that health probes (for example of Kubernetes) may request besides the service names.
LIVENESS, READINESS = "liveness", "readiness"

# HTTP paths of the two probes: our own path first, then the paths of vLLM, SGLang, TGI, SageMaker
# (`/ping`) and Kubernetes components, which clients, routers and charts request.
LIVENESS_PATHS = ("/health/live", "/livez", "/healthz")
READINESS_PATHS = ("/health/ready", "/health", "/ping", "/readyz", "/v1/health")
METRICS_PATH = "/metrics"
# Paths that are answered even if the HTTP port has its maximum of connections.
PROBE_PATHS = frozenset(
    {
        *LIVENESS_PATHS,
        *READINESS_PATHS,
        kserve_http.LIVE_PATH,
        kserve_http.READY_PATH,
        METRICS_PATH,
    }
)

# The error formats of the HTTP paths; other paths have OpenAI's format.
ERROR_FORMATS = {
    **kserve_http.ERROR_FORMATS,
    **tgi.ERROR_FORMATS,
    **lora_adapters.ERROR_FORMATS,
}

# Seconds for open connections to close after the last call has ended.
CLOSE_GRACE_S = 1.0

# Maximum of (duration of a scan of the adapter directory) / (pause after the scan): after a slow
# scan, `_poll_adapters` waits longer before the next scan.
SCAN_SHARE = 0.02
# Maximum of (duration of a listing of the object store) / (pause after the listing).
LISTING_SHARE = 0.25


async def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal; `on_ready` receives one line with the addresses and memory sizes."""
    started = time.monotonic()
    network, security = fit_connections(config.network_config), config.security_config
    log_accept_errors(asyncio.get_running_loop())
    tls = TlsCertificates.from_config(security)
    service = Service(ServableCheckpoint.from_config(config))
    frontend = build_frontend(config, network, service)
    if tls is not None:
        help_text = "Unix time at which the TLS certificate expires."
        frontend.metrics.watch_gauge(
            "tls_certificate_expiry_timestamp_seconds", help_text, lambda: tls.expires_at
        )
    health = HealthService()
    await _set_health(health, is_ready=False)
    server, port = _bind_grpc(network, config.limits_config, tls)
    server.add_generic_rpc_handlers(tuple(handlers(frontend)))
    health.add_to_server(server)
    if network.reflection:
        add_reflection(SERVICES, server)
    metrics_server = open_metrics_server(network, security, frontend)
    tls_context = None if tls is None else tls.context
    http = HttpServer(
        network,
        _http_routes(network, frontend),
        probe_paths=PROBE_PATHS,
        error_formats=ERROR_FORMATS,
        tls=tls_context,
        security=security,
    )
    # The exports are closed last, after the last call has ended.
    async with exports(config.observability_config, frontend, service.name), http, metrics_server:
        transport = open_transport(config)
        await server.start()
        stop_now = _install_signal_handlers(frontend)
        try:
            loading = load_in_thread(service, transport)
            if not await _finishes_first(loading, frontend.stop_requested):
                loading.cancel()
                log.info("event=stopped while=loading")
                return 0
            loading.result()
            tasks = attach_service(frontend, service)
            tasks.append(asyncio.create_task(_report_health(service, health)))
            if tls is not None:
                poll = _poll_secrets(
                    tls.refresh, TLS_OWNER, security.secrets_poll_s, service.file_threads
                )
                tasks.append(asyncio.create_task(poll))
            on_ready(
                f"ready grpc={network.address(port)} http={network.address(http.port)} "
                f"model={service.name} {service.memory_report.log_line()} "
                f"adapters={len(service.adapters)} start_s={time.monotonic() - started:.2f}"
            )
            await frontend.stop_requested.wait()
            for task in tasks:
                task.cancel()
            await _drain(server, frontend, health, stop_now)
        finally:
            await asyncio.to_thread(service.close)
            await asyncio.to_thread(transport.close)
            await server.stop(0)
    return 0


def build_frontend(config: ServerConfig, network: NetworkConfig, service: Service) -> Frontend:
    """Return the front end of a service that is not loaded yet (`attach_service`)."""
    metrics = Metrics(service.name, config.observability_config.metric_aliases)
    frontend = Frontend(
        metrics,
        Authenticator(config.security_config.tokens),
        calls_max=network.calls_max,
        slow_reader_s=network.slow_reader_s,
        message_bytes_max=config.limits_config.message_bytes_max,
        usage=UsageMeter(config.observability_config.usage_labels_max),
    )
    metrics.watch_usage(frontend.usage)
    help_text = "Engine state; 1 for the current state."
    metrics.watch_state("engine_state", help_text, ENGINE_STATES, partial(_engine_state, frontend))
    return frontend


def attach_service(frontend: Frontend, service: Service) -> "list[asyncio.Task[Any]]":
    """Accept calls for the loaded service; return the background tasks, to be cancelled later."""
    freeze_startup_objects()
    _watch_engine(frontend.metrics, service)
    frontend.attach_service(service)
    golden_replays = service.golden_checker.start(
        service.adapters,
        service.admission,
        service.engine,
        frontend.metrics.record_golden_check,
    )
    tokens_poll = _poll_secrets(
        frontend.access.refresh,
        TOKENS_OWNER,
        service.config.security_config.secrets_poll_s,
        service.file_threads,
    )
    coroutines = (_poll_adapters(service), _poll_mirror(service), tokens_poll, golden_replays)
    return [asyncio.create_task(coroutine) for coroutine in coroutines]


@asynccontextmanager
async def exports(
    config: ObservabilityConfig, frontend: Frontend, model: str
) -> AsyncIterator[None]:
    """Write the usage file and export traces during the block, if they are configured."""
    async with _usage_file(config, frontend, model), _tracing(config, frontend):
        yield


@asynccontextmanager
async def _usage_file(
    config: ObservabilityConfig, frontend: Frontend, model: str
) -> AsyncIterator[None]:
    """Write the usage file during the block, if `usage_file` is configured."""
    if config.usage_file is None:
        yield
        return
    with UsageFile(config, frontend.usage, model) as usage_file:
        frontend.metrics.watch_gauge(
            "usage_written_timestamp_seconds",
            "Unix time up to which all counts are in usage_file.",
            lambda: usage_file.written_until,
        )
        yield


@asynccontextmanager
async def _tracing(config: ObservabilityConfig, frontend: Frontend) -> AsyncIterator[None]:
    """Trace calls if `traces` is configured; export the remaining spans when the block ends."""
    if config.traces is None:
        yield
        return
    try:
        from serving.frontend.tracing import CallTracer
    except ImportError as error:
        raise ConfigError(
            f"traces is {config.traces}, but {error.name or 'a package'} is not installed; "
            "run pip install 'preamble[traces]', or remove traces"
        ) from None
    tracer = CallTracer(config.traces, config.traces_share, preamble_version())
    processor, watch_counter = tracer.processor, frontend.metrics.watch_counter
    watch_counter("trace_spans_sent", "Trace spans exported.", lambda: processor.exported)
    watch_counter("trace_spans_dropped", "Trace spans dropped.", lambda: processor.dropped)
    frontend.tracer = tracer
    try:
        yield
    finally:
        await asyncio.to_thread(tracer.close)


def load_in_thread(service: Service, transport: EngineTransport) -> "asyncio.Future[None]":
    """Load the model in a daemon thread, so that a signal can end the process during the load."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[None] = loop.create_future()

    def open_service() -> None:
        failure = None
        try:
            service.open(transport)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # The loop is closed, because a signal stopped the server.
            loop.call_soon_threadsafe(resolve_future, failure)

    def resolve_future(failure: BaseException | None) -> None:
        if loaded.cancelled():
            return
        if failure is None:
            loaded.set_result(None)
        else:
            loaded.set_exception(failure)

    threading.Thread(target=open_service, name="load", daemon=True).start()
    return loaded


def _bind_grpc(
    config: NetworkConfig, limits: LimitsConfig, tls: TlsCertificates | None
) -> tuple[grpc.aio.Server, int]:
    try:
        # If gRPC cannot bind a port, it prints its own error text to stderr. Therefore bind a
        # probe socket first, to raise the error here.
        with socket.socket(address_family(config.host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"port {config.port} of {config.host} cannot be bound ({error.strerror}); "
            "choose another port, or 0 for any free port"
        ) from None
    server = grpc.aio.server(
        interceptors=[ProbeInterceptor(config.slow_reader_s)],
        options=_grpc_options(config, limits),
    )
    address = config.address(config.port)
    if tls is None:
        return server, server.add_insecure_port(address)
    return server, server.add_secure_port(address, tls.credentials())


def _grpc_options(config: NetworkConfig, limits: LimitsConfig) -> list[tuple[str, int]]:
    def ms(seconds: float) -> int:
        # For gRPC, the largest integer of 32 bits means that there is no limit.
        return min(round(1000 * seconds), COUNT_MAX)

    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        # The library checks the size of a message only after it has decompressed the whole message.
        # `wire_messages` decompresses instead.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),  # A second server on the same port must fail, not share it.
        ("grpc.max_allowed_incoming_connections", config.connections_max),
        ("grpc.max_concurrent_streams", config.connection_calls_max),
        # gRPC adds 10% jitter to the age, so that connections do not all end together.
        ("grpc.max_connection_age_ms", ms(config.connection_age_s)),
        ("grpc.max_connection_age_grace_ms", ms(config.connection_grace_s)),
        ("grpc.max_connection_idle_ms", ms(config.connection_idle_s)),
        ("grpc.server_handshake_timeout_ms", ms(config.handshake_s)),
        # Server pings detect lost clients. Client pings are allowed, also without open calls.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", ms(config.client_ping_s)),
    ]


def _install_signal_handlers(frontend: Frontend) -> asyncio.Event:
    """Handle SIGTERM and SIGINT; return the event that the second of these signals sets.

    The first signal starts the drain. SIGUSR2 writes the flight recorder to a file.
    """
    stop_now = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        (stop_now if frontend.stop_requested.is_set() else frontend.stop_requested).set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, request_stop)

    def dump() -> None:
        if frontend.service is not None:
            frontend.service.file_threads.submit(FLIGHT_OWNER, _request_dump, frontend.service)

    loop.add_signal_handler(signal.SIGUSR2, dump)
    return stop_now


def _request_dump(service: Service) -> None:
    """Let rank 0 write its flight recorder to a file."""
    log.info("event=flight_asked path=%s", service.engine.dump())


async def _finishes_first(future: "asyncio.Future[Any]", event: asyncio.Event) -> bool:
    """Wait for the future or the event; return whether the future is done."""
    event_task: asyncio.Future[Any] = asyncio.create_task(event.wait())
    await asyncio.wait([future, event_task], return_when=asyncio.FIRST_COMPLETED)
    event_task.cancel()
    return future.done()


async def _drain(
    server: grpc.aio.Server,
    frontend: Frontend,
    health: HealthService,
    stop_now: asyncio.Event,
) -> None:
    """Refuse new calls and finish accepted ones, within `drain_s` or until a second signal."""
    assert frontend.service is not None
    log.info("event=draining drain_s=%g", frontend.service.config.network_config.drain_s)
    await _set_health(health, is_ready=False)
    drained_task: asyncio.Task[Any] = asyncio.create_task(frontend.drain())
    stop_now_task: asyncio.Task[Any] = asyncio.create_task(stop_now.wait())
    done, _ = await asyncio.wait(
        [drained_task, stop_now_task],
        timeout=frontend.service.config.network_config.drain_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in (drained_task, stop_now_task):
        task.cancel()
    # From here on, gRPC answers new calls with CANCELLED, which `clients` reports as UNAVAILABLE.
    await server.stop(CLOSE_GRACE_S if drained_task in done else 0)
    log.info("event=stopped drained=%s", drained_task in done)


async def _poll_adapters(service: Service) -> None:
    """Scan the adapter directory periodically; less often if a scan takes long."""
    scan_s = 0.0
    while True:
        await asyncio.sleep(max(service.config.adapter_config.adapters_poll_s, scan_s / SCAN_SHARE))
        started = time.monotonic()
        try:
            await service.scan_adapters()
        except UnavailableError as error:
            # The thread still waits for a directory, which the next scan skips.
            log.warning("event=adapters_not_scanned reason=%r", str(error))
            scan_s = 0.0
        except Exception:  # For example, an error of a network file system. The next scan retries.
            log.exception("event=adapters_not_scanned")
        else:
            scan_s = time.monotonic() - started
        with suppress(UnavailableError):  # The records stay pending.
            await service.file_threads.run(CHANGE_LOG_OWNER, service.store.changes.write_pending)


async def _poll_mirror(service: Service) -> None:
    """List the object store of adapters periodically; less often if a listing takes long."""
    mirror = service.mirror
    if mirror is None:
        return
    listing_s = 0.0
    while True:
        poll_s = service.config.adapter_config.adapters_poll_s
        await asyncio.sleep(max(poll_s, listing_s / LISTING_SHARE, mirror.delay_s))
        started = time.monotonic()
        future = service.file_threads.submit(MIRROR_OWNER, mirror.poll)
        await asyncio.wait([asyncio.wrap_future(future)])  # Requests to the store have time limits.
        if (error := future.exception()) is not None:
            log.error("event=adapters_not_listed", exc_info=error)
        listing_s = time.monotonic() - started


async def _report_health(service: Service, health: HealthService) -> None:
    """Update the health status whenever the ranks become ready, are lost, or fail permanently."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    service.engine.on_change = partial(loop.call_soon_threadsafe, changed.set)
    while True:
        changed.clear()
        await _set_health(health, is_ready=service.engine.up, is_live=not service.engine.has_failed)
        await changed.wait()


async def _poll_secrets(
    refresh: Callable[[], None], owner: str, poll_s: float, threads: FileThreads
) -> None:
    """Reload the tokens or the TLS files periodically if they changed; `refresh` logs errors."""
    while True:
        await asyncio.sleep(poll_s)
        try:
            await threads.run(owner, refresh)
        except UnavailableError as error:
            log.warning("event=secrets_not_read files=%s reason=%r", owner, str(error))


async def _set_health(health: HealthService, *, is_ready: bool, is_live: bool = True) -> None:
    """Set readiness for the whole server (the empty name) and every service; set liveness.

    An orchestrator, for example Kubernetes, restarts a server whose liveness probe fails.
    """
    for name in ("", READINESS, *SERVICES):
        await health.set_status(name, up=is_ready)
    await health.set_status(LIVENESS, up=is_live)


def _http_routes(config: NetworkConfig, frontend: Frontend) -> Routes:
    """Return all routes of the HTTP port."""
    pages = _monitoring_routes(frontend)
    if config.metrics_port is None:
        metrics_page = MetricsPage(frontend.metrics)
        pages[METRICS_PATH] = _select_by_credential(
            partial(frontend.access.has_role, role="operator"),
            metrics_page.handlers(with_usage=True),
            metrics_page.handlers(),
        )
    return merge_routes(
        pages,
        routes.routes(frontend),
        kserve_http.routes(frontend),
        tgi.routes(frontend),
        web_page.routes(frontend, page=config.page),
    )


def open_metrics_server(
    config: NetworkConfig, security: SecurityConfig, frontend: Frontend
) -> AbstractAsyncContextManager[object]:
    """Open an HTTP server for metrics and health on `metrics_port`, if that is set."""
    if config.metrics_port is None:
        return nullcontext()
    if config.exposed_metrics_host is not None:
        log.warning(
            "event=metrics_exposed host=%s port=%d note=%r",
            config.exposed_metrics_host,
            config.metrics_port,
            "no TLS, no token: allow only probes and scrapes to reach this port",
        )
    host = config.metrics_host or config.host
    # This port needs no tokens. Scrapers on other machines may use any name for it.
    security = replace(security, tokens=None) if is_loopback(host) else SecurityConfig()
    # Only operators may reach this port, so its metrics have the usage of each tenant.
    pages = _monitoring_routes(frontend)
    pages[METRICS_PATH] = MetricsPage(frontend.metrics).handlers(with_usage=True)
    return HttpServer(
        config,
        pages,
        probe_paths=PROBE_PATHS,
        address=(host, config.metrics_port),
        security=security,
        setting="metrics_port",
    )


def _select_by_credential(
    is_allowed: Callable[[str | None], bool],
    handlers: Mapping[str, Handler],
    other_handlers: Mapping[str, Handler],
) -> Mapping[str, Handler]:
    """Return handlers that call `handlers` if a request's credential is allowed, else the others.

    Both have the same methods.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        selected = handlers if is_allowed(credential(request)) else other_handlers
        return await selected[request.method](request)

    return dict.fromkeys(other_handlers, handle)


def _monitoring_routes(frontend: Frontend) -> dict[str, Mapping[str, Handler]]:
    """Return the routes of probes, without the metrics."""

    def liveness() -> TextPage:
        # The probe passes while lost ranks are restarted. It fails after a permanent failure.
        if frontend.is_live:
            return TextPage(200, b"live\n")
        return TextPage(503, b"the engine has stopped\n")

    def readiness() -> TextPage:
        if frontend.is_ready:
            return TextPage(200, b"ready\n")
        state = "the engine is lost" if frontend.state == "serving" else frontend.state
        return TextPage(503, f"{state}\n".encode())

    def version_page() -> TextPage:
        return TextPage(200, msgspec.json.encode({"version": preamble_version()}), JSON_TYPE)

    def load() -> TextPage:
        # vLLM's name for the number of requests in progress.
        engine = None if frontend.service is None else frontend.service.engine
        requests = 0 if engine is None else engine.stats.running + engine.waiting_sequences
        return TextPage(200, msgspec.json.encode({"server_load": requests}), JSON_TYPE)

    return {
        **dict.fromkeys(LIVENESS_PATHS, page_handlers(liveness)),
        **dict.fromkeys(READINESS_PATHS, page_handlers(readiness)),
        "/version": page_handlers(version_page),
        "/load": page_handlers(load),
    }


def _engine_state(frontend: Frontend) -> str:
    """Return the current state, one of `ENGINE_STATES`."""
    if frontend.service is None or frontend.state == "draining":
        return frontend.state
    engine = frontend.service.engine
    if engine.has_failed:
        return "dead"
    return "serving" if engine.up else "restarting"


def _watch_engine(metrics: Metrics, service: Service) -> None:
    """Register gauges and counters that read the engine's state at each scrape."""
    engine, adapters = service.engine, service.adapters
    cache_config = service.config.cache_config
    engine.on_step = metrics.record_step
    for name, help_text, read in (
        ("scheduler_running_requests", "Running sequences.", lambda: engine.stats.running),
        ("scheduler_waiting_requests", "Waiting sequences.", lambda: engine.waiting_sequences),
        ("kv_blocks", "KV cache blocks in total.", lambda: engine.stats.blocks),
        ("kv_blocks_held", "KV cache blocks held by requests.", lambda: engine.stats.blocks_held),
        (
            "kv_blocks_cached",
            "KV cache blocks kept by the prefix cache.",
            lambda: engine.stats.blocks_cached,
        ),
        (
            "kv_block_tokens",
            "Tokens of a KV cache block.",
            lambda: cache_config.kv_block_tokens,
        ),
        ("adapters_resident", "Adapters on the device.", lambda: engine.stats.adapters_resident),
        ("adapters_loaded", "Adapters that requests can name.", lambda: len(adapters)),
        (
            "adapter_memory_bytes",
            "Memory of each rank for adapters' weights, in bytes.",
            lambda: cache_config.adapter_memory_bytes,
        ),
        (
            "adapter_memory_used_bytes",
            "Part of the adapter memory that adapters have, in bytes.",
            lambda: engine.stats.adapter_memory_bytes,
        ),
        ("engine_up", "1 if the ranks are ready, else 0.", lambda: engine.up),
        (
            "kv_usage_ratio",
            "Fraction of KV cache blocks held by requests.",
            lambda: engine.stats.blocks_held / max(1, engine.stats.blocks),
        ),
        (
            "engine_last_step_timestamp_seconds",
            "Unix time at which the last step ended; 0 before the first step.",
            lambda: metrics.last_step_at,
        ),
        (
            "weight_bytes",
            "Memory of the weights on all ranks, in bytes.",
            lambda: service.memory_report.weight_bytes,
        ),
        (
            "step_memory_bytes",
            "Memory that the largest step needs beside weights and KV cache, on the rank that "
            "needs the most, in bytes; 0 on a CPU, where it is not measured.",
            lambda: service.memory_report.step_bytes,
        ),
    ):
        metrics.watch_gauge(name, help_text, read)
    for name, help_text, read_count in (
        ("engine_steps", "Engine steps since the ranks started.", lambda: engine.stats.steps),
        (
            "engine_restarts",
            "Times that the ranks were lost.",
            lambda: engine.restarts,
        ),
        (
            "engine_preemptions",
            "Preemptions of running sequences.",
            lambda: engine.stats.preemptions,
        ),
        (
            "engine_prompt_tokens",
            "Prompt tokens of requests that started.",
            lambda: engine.stats.prompt_tokens,
        ),
        (
            "engine_cached_tokens",
            "Prompt tokens reused from the prefix cache.",
            lambda: engine.stats.cached_tokens,
        ),
        (
            "engine_drafted_tokens",
            "Draft tokens verified (speculative decoding).",
            lambda: engine.stats.drafted_tokens,
        ),
        (
            "engine_accepted_tokens",
            "Draft tokens accepted (speculative decoding).",
            lambda: engine.stats.accepted_tokens,
        ),
        (
            "engine_replayed_steps",
            "Steps that replayed a CUDA graph.",
            lambda: engine.stats.replayed_steps,
        ),
        (
            "engine_failed_captures",
            "CUDA graph captures that failed; after a failure, steps run without graphs.",
            lambda: engine.stats.failed_captures,
        ),
        (
            "engine_early_steps",
            "Steps launched before the previous step's tokens were known.",
            lambda: engine.stats.early_steps,
        ),
        (
            "engine_compiled_kernels",
            "Triton kernels compiled after the warm-up, on all ranks.",
            lambda: engine.stats.compiled_kernels,
        ),
        ("adapter_loads", "Adapters loaded onto the device.", lambda: engine.stats.adapter_loads),
        (
            "adapter_evictions",
            "Adapters that left the device for others.",
            lambda: engine.stats.adapter_evictions,
        ),
        (
            "adapter_load_failures",
            "Adapter files that could not be used.",
            lambda: adapters.failures,
        ),
    ):
        metrics.watch_counter(name, help_text, read_count)
    if (proof_difference := service.proof_difference) is not None:
        help_text = "Largest logit difference from the proof, in standard deviations."
        metrics.watch_gauge("proof_difference", help_text, lambda: proof_difference)
    if (divergence := service.divergence) is not None:
        help_text = (
            "KL divergence of the next-token distribution due to quantized weights, in nats."
        )
        metrics.watch_gauge("weights_divergence", help_text, lambda: divergence[0])
        help_text = "Fraction of positions where quantized weights keep the most likely token."
        metrics.watch_gauge("weights_agreement_ratio", help_text, lambda: divergence[1])
    if service.mirror is not None:
        _watch_mirror(metrics, service.mirror)
    metrics.watch_adapter_residency(engine.adapter_residency)
    ready_message = engine.ready_message
    assert ready_message is not None
    model_config = service.checkpoint.config
    metrics.watch_kv_groups(kv_groups(model_config), lambda: engine.stats)
    concurrency = service.context_concurrency
    metrics.set_cache_info(
        block_tokens=str(cache_config.kv_block_tokens),
        blocks=str(ready_message.kv_blocks),
        context_requests=f"{concurrency:g}",
        context_tokens=str(int(concurrency * model_config.max_position_embeddings)),
        dtype=cache_config.kv_dtype,
        prefix_cache=str(cache_config.prefix_cache).lower(),
    )
    metrics.set_build_info(version=preamble_version(), model=service.name, dtype=service.dtype)


def _watch_mirror(metrics: Metrics, mirror: ObjectMirror) -> None:
    """Register the metrics of the object store of adapters."""
    counts = mirror.counts
    for name, help_text, read in (
        (
            "adapter_store_versions",
            "Adapter versions in the object store at the last listing.",
            lambda: mirror.stored_versions,
        ),
        (
            "adapter_store_listing_age_seconds",
            "Time since the last complete listing of the object store; -1 before the first.",
            mirror.listing_age_s,
        ),
        (
            "adapter_mirror_bytes",
            "Local copies of adapters of the object store, in bytes.",
            lambda: mirror.folder.nbytes,
        ),
    ):
        metrics.watch_gauge(name, help_text, read)
    for name, help_text, read_count in (
        (
            "adapter_store_fetches",
            "Adapters fetched from the object store.",
            lambda: counts.fetches,
        ),
        (
            "adapter_store_fetched_bytes",
            "Bytes of the adapters fetched from the object store.",
            lambda: counts.fetched_bytes,
        ),
        (
            "adapter_store_errors",
            "Requests to the object store that failed, and local copies that could not be written.",
            lambda: counts.errors,
        ),
        (
            "adapter_mirror_evictions",
            "Adapters whose local copies were removed for others.",
            lambda: counts.evictions,
        ),
    ):
        metrics.watch_counter(name, help_text, read_count)
