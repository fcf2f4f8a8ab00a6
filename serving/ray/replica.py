"""Replica: the deployment of Ray Serve, a complete front end with its service and ranks.

A proxy of Serve is the gRPC server. It passes each call to a method of this class, which runs it
with the same functions as the server of `preamble serve`, so authentication, limits, metrics and
errors are the same. Serve restarts a replica whose `check_health` fails, changes settings by
`reconfigure`, and waits for the open calls of a replica before it stops the replica.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc

from serving.config import ServerConfig
from serving.frontend.grpc_transport import build_call_function
from serving.frontend.http_transport import HttpServer
from serving.logs import log_to_stderr
from serving.protocols.grpc_services import all_services
from serving.ray.call_context import CallContext, Handler, single_message
from serving.ray.grpc_services import (
    TRAILERS_ONLY,
    RequestMessage,
    ResponseMessage,
    ServiceMethod,
    service_methods,
)
from serving.ray.ranks import RaySupervisor
from serving.server import (
    attach_service,
    build_frontend,
    exports,
    load_in_thread,
    open_metrics_server,
)
from serving.service.service import ServableCheckpoint, Service

log = logging.getLogger(__name__)


# This method would stop one replica, which the caller cannot choose.
UNSERVED_METHODS = ("preamble.v1.AdminService/Drain",)


class Replica:
    """One replica. Its gRPC methods are added below the class."""

    # Serve awaits this method.
    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        config = ServerConfig(**settings)
        log_to_stderr(config.observability_config.log_format)
        self._config = config
        self._resources = AsyncExitStack()
        self._service = Service(ServableCheckpoint.from_config(config))
        self._frontend = build_frontend(config, config.network_config, self._service)
        self._handlers: dict[str, Handler] = {
            f"{service.service}/{method.name}": build_call_function(
                self._frontend, service.protocol, service.service, method
            )
            for service in all_services()
            for method in service.methods
            if f"{service.service}/{method.name}" not in UNSERVED_METHODS
        }
        try:
            await self._open()
        except BaseException:
            await self._resources.aclose()
            raise

    async def _open(self) -> None:
        config, resources = self._config, self._resources
        await resources.enter_async_context(
            exports(config.observability_config, self._frontend, self._service.name)
        )
        metrics_server = await resources.enter_async_context(
            open_metrics_server(config.network_config, config.security_config, self._frontend)
        )
        if isinstance(metrics_server, HttpServer):
            log.info("event=metrics_opened port=%d", metrics_server.port)
        transport = RaySupervisor(config)
        resources.push_async_callback(asyncio.to_thread, transport.close)
        resources.push_async_callback(asyncio.to_thread, self._service.close)
        await load_in_thread(self._service, transport)
        tasks = attach_service(self._frontend, self._service)
        for task in tasks:
            resources.callback(task.cancel)
        log.info("event=replica_ready %s", self._service.memory_report.log_line())

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Change settings while the replica serves; Serve also calls this after the start."""
        network = replace(self._config.network_config, **settings)
        self._frontend.calls_max = network.calls_max
        self._frontend.slow_reader_s = network.slow_reader_s

    def check_health(self) -> None:
        """Raise after a permanent failure of the ranks, so that Serve replaces this replica."""
        if not self._frontend.is_live:
            raise RuntimeError(self._service.engine.down_reason or "the engine has failed")

    def record_routing_stats(self) -> dict[str, bool]:
        """Tell the routers whether the ranks run (`serving.ray.router`)."""
        return {"is_ready": self._frontend.is_ready}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics of `serving.ray.scaling`."""
        engine = self._service.engine
        return {
            "running": float(engine.stats.running),
            "waiting": float(engine.waiting_sequences),
            "used": max(
                engine.stats.blocks_held / max(1, engine.stats.blocks),
                engine.stats.running / self._config.scheduler_config.running_requests_max,
            ),
        }

    async def __del__(self) -> None:
        """Stop: Serve calls this after the last call has ended."""
        try:
            await self._frontend.drain()
        finally:
            await self._resources.aclose()

    async def _call_unary(
        self, method: str, messages: AsyncIterator[bytes], serve_context: Any
    ) -> ResponseMessage:
        if (handler := self._find_handler(method, serve_context)) is None:
            return ResponseMessage()
        return await CallContext(serve_context).run_unary(handler, messages)

    async def _call_stream(
        self, method: str, messages: AsyncIterator[bytes], serve_context: Any
    ) -> AsyncIterator[ResponseMessage]:
        if (handler := self._find_handler(method, serve_context)) is None:
            yield TRAILERS_ONLY
            return
        async for response in CallContext(serve_context).run_stream(handler, messages):
            yield response

    def _find_handler(self, method: str, serve_context: Any) -> Handler | None:
        handler = self._handlers.get(method)
        if handler is None:
            serve_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            serve_context.set_details(f"{method} is not served with Ray; use `preamble ray`")
        return handler


def _method_function(method: ServiceMethod) -> Callable[..., Any]:
    """Return a method of `Replica`, which Serve calls for all gRPC methods of this name."""
    full_name = f"{method.service}/{method.name}"

    # The name of the second parameter tells Serve to pass the context. Serve distinguishes streams
    # by the kind of the function.
    async def call_unary(
        self: Replica, request: RequestMessage, grpc_context: Any
    ) -> ResponseMessage:
        return await self._call_unary(request.method, single_message(request), grpc_context)

    async def call_stream(
        self: Replica, request: RequestMessage, grpc_context: Any
    ) -> AsyncIterator[ResponseMessage]:
        messages = single_message(request)
        async for response in self._call_stream(request.method, messages, grpc_context):
            yield response

    async def call_unary_with_stream(
        self: Replica, requests: AsyncIterator[RequestMessage], grpc_context: Any
    ) -> ResponseMessage:
        return await self._call_unary(full_name, _data_of(requests), grpc_context)

    async def call_stream_with_stream(
        self: Replica, requests: AsyncIterator[RequestMessage], grpc_context: Any
    ) -> AsyncIterator[ResponseMessage]:
        async for response in self._call_stream(full_name, _data_of(requests), grpc_context):
            yield response

    functions: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): call_unary,
        (False, True): call_stream,
        (True, False): call_unary_with_stream,
        (True, True): call_stream_with_stream,
    }
    function = functions[method.has_request_stream, method.has_response_stream]
    function.__name__ = method.name
    return function


async def _data_of(requests: AsyncIterator[RequestMessage]) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request.data


for _method in service_methods():
    setattr(Replica, _method.name, _method_function(_method))
