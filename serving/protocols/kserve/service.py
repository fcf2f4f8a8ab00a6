"""KServe v2 gRPC service: model metadata, unary inference and Triton's bidirectional streams.

The service is `inference.GRPCInferenceService`. The base model and each adapter are KServe models,
identified by name and version. The requests of a stream run concurrently, and each is measured as a
separate call. If a request fails, the client gets an error message, and the stream stays open.
`inference` runs a request, and the meaning of each tensor is in `inputs` and `outputs`. The HTTP
form of this protocol is in `http_routes`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from gpt.errors import RequestError
from gpt.software_versions import preamble_version
from protos.foreign.descriptor_pools import load_package
from serving.frontend.call import Call, CallFailure
from serving.frontend.grpc_transport import RpcMethod, WriteMessage, probe_method
from serving.protocols.kserve.inference import Inference
from serving.protocols.kserve.inputs import read_message
from serving.protocols.kserve.metadata import INPUT_ALIASES, INPUT_KINDS, OUTPUTS
from serving.protocols.kserve.models import VERSION, ServedModel, find_model, unknown_model_error
from serving.protocols.kserve.tensors import BYTES, OutputTensor, write_tensors
from serving.request import RefusedError, UnavailableError
from serving.service.error_reasons import REASONS

pb = load_package("kserve")
SERVICE = "inference.GRPCInferenceService"
PLATFORM = "preamble"
EXTENSIONS = ("binary_tensor_data", "parameters", "model_configuration")
FINAL_RESPONSE = "triton_final_response"
# Methods of Triton that this server does not support. They are registered so that the caller gets
# an error with advice; gRPC's own UNIMPLEMENTED error has none.
UNSUPPORTED_METHODS = (
    "ModelStatistics",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
)
KIND_DATATYPES = {"text": BYTES, "texts": BYTES, "object": BYTES, "flag": "BOOL", "early": "BOOL"}
KIND_DATATYPES |= {"number": "FP32", "integer": "INT32", "integers": "INT32"}


def methods() -> list[RpcMethod]:
    return [
        probe_method("ServerLive", pb.ServerLiveRequest, server_live),
        probe_method("ServerReady", pb.ServerReadyRequest, server_ready),
        probe_method("ModelReady", pb.ModelReadyRequest, model_ready),
        probe_method("ServerMetadata", pb.ServerMetadataRequest, server_metadata),
        RpcMethod("ModelMetadata", pb.ModelMetadataRequest, model_metadata, is_probe=True),
        RpcMethod("ModelConfig", pb.ModelConfigRequest, model_config, is_probe=True),
        RpcMethod("RepositoryIndex", pb.RepositoryIndexRequest, repository_index, is_probe=True),
        RpcMethod(
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest,
            repository_model_load,
            role="adapters",
        ),
        RpcMethod("ModelInfer", pb.ModelInferRequest, model_infer),
        RpcMethod("ModelStreamInfer", pb.ModelInferRequest, model_stream_infer, "both"),
        # These methods read no field, so a message type without fields can decode any request.
        *(
            RpcMethod(name, pb.ServerLiveRequest, _unsupported_method(name))
            for name in UNSUPPORTED_METHODS
        ),
    ]


def _unsupported_method(name: str) -> Any:
    async def refuse(message: Any, call: Call) -> Any:
        raise RefusedError(
            "UNSUPPORTED",
            f"{name} is not served here; ServerMetadata lists the supported extensions",
        )

    return refuse


# ------------------------------------------------------------------------- health and metadata


async def server_live(message: Any, call: Call) -> Any:
    return pb.ServerLiveResponse(live=call.frontend.is_live)


async def server_ready(message: Any, call: Call) -> Any:
    return pb.ServerReadyResponse(ready=call.frontend.is_ready)


async def model_ready(message: Any, call: Call) -> Any:
    """Report whether a model is ready. As in Triton, an unknown model is reported as not ready."""
    try:
        ready = (
            call.frontend.is_ready
            and (await find_model(call, message.name, message.version)).is_eligible
        )
    except RefusedError:
        ready = False
    return pb.ModelReadyResponse(ready=ready)


async def server_metadata(message: Any, call: Call) -> Any:
    version = preamble_version()
    return pb.ServerMetadataResponse(name="preamble", version=version, extensions=EXTENSIONS)


async def model_metadata(message: Any, call: Call) -> Any:
    model = await find_model(call, message.name, message.version, "name")
    response = pb.ModelMetadataResponse(
        name=model.name, platform=PLATFORM, versions=[model.version]
    )
    for name, datatype, size in _input_specs():
        response.inputs.add(name=name, datatype=datatype, shape=[size])
    for name, (datatype, _) in OUTPUTS.items():
        response.outputs.add(name=name, datatype=datatype, shape=[-1])
    return response


async def model_config(message: Any, call: Call) -> Any:
    model = await find_model(call, message.name, message.version, "name")
    response = pb.ModelConfigResponse()
    config = response.config
    config.name = model.name
    config.backend = PLATFORM
    config.max_batch_size = 0
    config.model_transaction_policy.decoupled = True
    for name, datatype, size in _input_specs():
        optional = name != "text_input"
        config.input.add(
            name=name, data_type=_triton_type(datatype), dims=[size], optional=optional
        )
    for name, (datatype, _) in OUTPUTS.items():
        config.output.add(name=name, data_type=_triton_type(datatype), dims=[-1])
    return response


async def repository_index(message: Any, call: Call) -> Any:
    is_ready = call.frontend.is_ready
    state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", "the engine is lost or loading")
    response = pb.RepositoryIndexResponse()
    if message.ready and not is_ready:
        return response
    for name in call.service.listed_names(call.caller.tenant):
        response.models.add(name=name, version=VERSION, state=state, reason=reason)
    for entry in call.service.adapters.list_all(call.caller.tenant):
        adapter, status = entry.adapter, (state, reason)
        is_refused = adapter and not call.service.golden_checker.is_eligible(adapter)
        if is_ready and is_refused:
            status = "UNAVAILABLE", "its golden examples have not passed (golden: strict)"
            if message.ready:
                continue
        response.models.add(
            name=entry.name, version=str(entry.version), state=status[0], reason=status[1]
        )
    return response


async def repository_model_load(message: Any, call: Call) -> Any:
    """Load an adapter file that is new in the adapter directory; the base model needs no load."""
    for name in message.parameters:
        raise RefusedError(
            "UNSUPPORTED",
            f"parameter {name[:80]!r} is set, but models are loaded unchanged from the server's "
            "disk; remove the parameter, or upload an adapter with preamble.v1.AdapterService",
            "parameters",
        )
    service, name = call.service, message.model_name
    adapter_name = service.adapter_name(name, call.caller.tenant)
    if adapter_name is not None:
        try:
            tenant = call.caller.tenant
            await service.file_threads.run(tenant, service.store.load, adapter_name, tenant)
        except RequestError as error:
            raise unknown_model_error(str(error)) from None
    return pb.RepositoryModelLoadResponse()


def _input_specs() -> list[tuple[str, str, int]]:
    """Return name, datatype and element count of each input; -1 means any count."""
    kinds = {**INPUT_KINDS, **{alias: INPUT_KINDS[name] for alias, name in INPUT_ALIASES.items()}}
    specs = []
    for name, kind in kinds.items():
        datatype = "UINT64" if name == "seed" else KIND_DATATYPES[kind]
        specs.append((name, datatype, -1 if kind in ("texts", "integers") else 1))
    return specs


def _triton_type(datatype: str) -> int:
    values = pb.file.enum_types_by_name["DataType"].values_by_name
    return int(values["TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"].number)


# ---------------------------------------------------------------------------------------- inference


async def _open_inference(message: Any, call: Call) -> Inference:
    model = await find_model(call, message.model_name, message.model_version)
    return Inference.build(read_message(message), model, call)


def _build_response(message: Any, model: ServedModel, outputs: Iterable[OutputTensor]) -> Any:
    response = pb.ModelInferResponse(
        model_name=model.name, model_version=model.version, id=message.id
    )
    write_tensors(response, outputs)
    return response


async def model_infer(message: Any, call: Call) -> Any:
    inference = await _open_inference(message, call)
    inference.check_unary("ModelInfer", "ModelStreamInfer")
    return _build_response(message, inference.model, await inference.final_outputs())


async def model_stream_infer(messages: AsyncIterator[Any], call: Call, write: WriteMessage) -> None:
    await _InferStream(call, write).serve(messages)


class _InferStream:
    """The requests of one bidirectional stream; they run concurrently."""

    def __init__(self, call: Call, write: WriteMessage) -> None:
        self._call = call
        self._write = write
        self._write_lock = asyncio.Lock()  # gRPC accepts one write at a time.
        self._running: set[asyncio.Task[None]] = set()
        config = call.service.config.limits_config
        self._requests_max = config.stream_requests_max
        self._idle_s = config.stream_idle_s
        self._last_busy_at = time.monotonic()  # Time at which a request was last running.

    async def serve(self, messages: AsyncIterator[Any]) -> None:
        """Serve until the client has sent all messages and all requests have ended.

        If the server drains, read no more messages, finish the running requests, and raise
        UnavailableError.
        """
        stop_task = asyncio.ensure_future(self._call.frontend.stop_requested.wait())
        try:
            while (message := await self._next_message(messages, stop_task)) is not None:
                await self._accept(message)
            if self._running:
                await asyncio.wait(self._running)
            if stop_task.done():
                raise UnavailableError(
                    "this server is shutting down; try another server", "DRAINING"
                )
        finally:
            stop_task.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _next_message(
        self, messages: AsyncIterator[Any], stop_task: "asyncio.Future[Any]"
    ) -> Any:
        """Return the next message; None at the end of the stream or when the server stops."""
        next_message = asyncio.ensure_future(anext(messages, None))
        try:
            while not (next_message.done() or stop_task.done()):
                remaining_s = self._idle_s
                if not self._running:
                    remaining_s -= time.monotonic() - self._last_busy_at
                if remaining_s <= 0:
                    raise RefusedError(
                        "IDLE_STREAM",
                        f"this stream had no request for {self._idle_s:g} s (stream_idle_s) and is "
                        "closed, since open streams count toward calls_max; open a new stream for "
                        "the next request",
                    )
                await asyncio.wait(
                    {next_message, stop_task},
                    timeout=remaining_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            return next_message.result() if next_message.done() else None
        finally:
            next_message.cancel()

    async def _accept(self, message: Any) -> None:
        if len(self._running) >= self._requests_max:
            return await self._send_error(
                message,
                CallFailure(
                    REASONS["QUEUE_FULL"],
                    f"{self._requests_max} requests of this stream are running "
                    "(stream_requests_max); wait for one to end, or open another stream",
                ),
            )
        task = asyncio.create_task(self._run_request(message))
        self._running.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._last_busy_at = time.monotonic()

    async def _run_request(self, message: Any) -> None:
        try:
            async with self._call.subcall("ModelStreamInfer/request") as call:
                await self._infer(message, call)
        except CallFailure as error:
            await self._send_error(message, error)

    async def _infer(self, message: Any, call: Call) -> None:
        inference = await _open_inference(message, call)
        async with aclosing(inference.output_chunks()) as chunks:
            async for outputs, is_last in chunks:
                response = _build_response(message, inference.model, outputs)
                await self._send_response(response, final=is_last)

    async def _send_response(self, response: Any, *, final: bool) -> None:
        # The final flag is set in the last message with data; no empty final message follows.
        response.parameters[FINAL_RESPONSE].bool_param = final
        async with self._write_lock:
            await self._write(pb.ModelStreamInferResponse(infer_response=response))

    async def _send_error(self, message: Any, error: CallFailure) -> None:
        """Send the error that ended a request, with its code and details as response parameters."""
        stream_response = pb.ModelStreamInferResponse(error_message=str(error))
        response = stream_response.infer_response
        response.id = message.id
        response.model_name = message.model_name
        response.parameters[FINAL_RESPONSE].bool_param = True
        response.parameters["reason"].string_param = error.reason.name
        response.parameters["code"].string_param = error.reason.code.name
        if error.field:
            response.parameters["field"].string_param = error.field
        if error.retry_s is not None:
            response.parameters["retry_ms"].int64_param = round(1000 * error.retry_s)
        async with self._write_lock:
            await self._write(stream_response)
