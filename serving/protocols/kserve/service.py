"""`inference.GRPCInferenceService`: KServe's v2 protocol, with Triton's streams.

The model and each adapter are models here, told apart by name and version. A stream carries many
requests at once, each a call of its own with its own clock and end; what ends one badly is a
message on the stream, which goes on. Tensors' meanings are in kserve_inputs and kserve_outputs.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from gpt.errors import RequestError
from protos.foreign import package
from serving.engine.stream import Stream, completion
from serving.frontend.call import Call, Ended
from serving.frontend.field_names import said_as
from serving.frontend.grpc_transport import Method, Write
from serving.protocols.kserve.inputs import Wanted, read_request
from serving.protocols.kserve.metadata import ALIASES, KINDS, OUTPUTS
from serving.protocols.kserve.outputs import Answers
from serving.protocols.kserve.tensors import BYTES
from serving.request import Piece, RefusedError, UnavailableError
from serving.service.error_reasons import REASONS
from serving.service.metrics import version

pb = package("kserve")
SERVICE = "inference.GRPCInferenceService"
PLATFORM = "preamble"
VERSION = "1"  # The model's. An adapter's are its own.
EXTENSIONS = ("binary_tensor_data", "parameters", "model_configuration")
FINAL = "triton_final_response"
# What Triton serves besides, and this server does not: named, so that the refusal is a sentence.
UNSERVED = (
    *("ModelStatistics", "RepositoryModelUnload"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
    *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    *("TraceSetting", "LogSettings"),
)
DATATYPES = {"text": BYTES, "texts": BYTES, "object": BYTES, "flag": "BOOL", "early": "BOOL"}
DATATYPES |= {"number": "FP32", "integer": "INT32", "integers": "INT32"}


def methods() -> list[Method]:
    return [
        Method("ServerLive", pb.ServerLiveRequest, server_live, draining=True),
        Method("ServerReady", pb.ServerReadyRequest, server_ready, draining=True),
        Method("ModelReady", pb.ModelReadyRequest, model_ready, draining=True),
        Method("ServerMetadata", pb.ServerMetadataRequest, server_metadata, draining=True),
        Method("ModelMetadata", pb.ModelMetadataRequest, model_metadata),
        Method("ModelConfig", pb.ModelConfigRequest, model_config),
        Method("RepositoryIndex", pb.RepositoryIndexRequest, repository_index),
        Method("RepositoryModelLoad", pb.RepositoryModelLoadRequest, load, role="adapters"),
        Method("ModelInfer", pb.ModelInferRequest, model_infer),
        Method("ModelStreamInfer", pb.ModelInferRequest, model_stream_infer, "both"),
        # Whatever they are sent is a message without fields.
        *(Method(name, pb.ServerLiveRequest, _unserved(name)) for name in UNSERVED),
    ]


def _unserved(name: str) -> Any:
    async def refuse(message: Any, call: Call) -> Any:
        raise RefusedError(
            "UNSUPPORTED", f"{name} is not served here; ServerMetadata tells which extensions are"
        )

    return refuse


# ------------------------------------------------------------------------- what is there, and how


@dataclass(frozen=True)
class Model:
    """What a request is for."""

    name: str  # As the caller says it.
    version: str
    adapter: str  # As `name@version`; empty: the model alone.
    ripe: bool = True  # Whether a strict server serves it by now.


async def server_live(message: Any, call: Call) -> Any:
    service = call.front.service
    return pb.ServerLiveResponse(live=service is None or not service.engine.gone)


async def server_ready(message: Any, call: Call) -> Any:
    return pb.ServerReadyResponse(ready=_ready(call))


async def model_ready(message: Any, call: Call) -> Any:
    """Of a model that is not there: false, as Triton says."""
    try:
        ready = _ready(call) and (await _model(call, message.name, message.version)).ripe
    except RefusedError:
        ready = False
    return pb.ModelReadyResponse(ready=ready)


async def server_metadata(message: Any, call: Call) -> Any:
    return pb.ServerMetadataResponse(name="preamble", version=version(), extensions=EXTENSIONS)


async def model_metadata(message: Any, call: Call) -> Any:
    model = await _model(call, message.name, message.version, "name")
    told = pb.ModelMetadataResponse(name=model.name, platform=PLATFORM, versions=[model.version])
    for name, datatype, size in _inputs():
        told.inputs.add(name=name, datatype=datatype, shape=[size])
    for name, (datatype, _) in OUTPUTS.items():
        told.outputs.add(name=name, datatype=datatype, shape=[-1])
    return told


async def model_config(message: Any, call: Call) -> Any:
    model = await _model(call, message.name, message.version, "name")
    told = pb.ModelConfigResponse()
    config = told.config
    config.name, config.backend, config.max_batch_size = model.name, PLATFORM, 0
    config.model_transaction_policy.decoupled = True
    for name, datatype, size in _inputs():
        optional = name != "text_input"
        config.input.add(name=name, data_type=_type(datatype), dims=[size], optional=optional)
    for name, (datatype, _) in OUTPUTS.items():
        config.output.add(name=name, data_type=_type(datatype), dims=[-1])
    return told


async def repository_index(message: Any, call: Call) -> Any:
    up = _ready(call)
    state, reason = ("READY", "") if up else ("UNAVAILABLE", "the engine is lost, or loading")
    told = pb.RepositoryIndexResponse()
    if message.ready and not up:
        return told
    told.models.add(name=call.service.name, version=VERSION, state=state, reason=reason)
    for resident, _ in call.service.adapters.list(call.caller.tenant):
        number, how = str(resident.version), (state, reason)
        if up and not call.service.replays.ripe(resident):
            how = "UNAVAILABLE", "its golden examples have not passed, and this server is strict"
            if message.ready:
                continue
        told.models.add(name=resident.name, version=number, state=how[0], reason=how[1])
    return told


async def load(message: Any, call: Call) -> Any:
    """Of an adapter that has just been put there; the model itself is there anyway."""
    for name in message.parameters:
        raise RefusedError(
            "UNSUPPORTED",
            f"{name[:80]!r} is given, and models are loaded as they lie on the server; leave it "
            "out, or send an adapter's file by preamble.v1.AdapterService",
            "parameters",
        )
    service, name = call.service, message.model_name
    if name not in service.base_names:
        try:
            await asyncio.to_thread(service.store.load, name, call.caller.tenant)
        except RequestError as error:
            raise _unknown(str(error)) from None
    return pb.RepositoryModelLoadResponse()


def _ready(call: Call) -> bool:
    front = call.front
    return front.state == "serving" and front.service is not None and front.service.engine.up


async def _model(call: Call, name: str, number: str, field: str = "model_name") -> Model:
    service = call.service
    if name in service.base_names:
        if number not in ("", VERSION):
            said = f"the model {name!r} has version {VERSION} only, not {number[:80]!r}"
            raise _unknown(said, field)
        return Model(name, VERSION, "")
    asked = f"{name}@{number}" if number else name
    try:
        # In a thread: a name that nobody has may be a file that is new.
        resident = await asyncio.to_thread(service.adapters.resolve, asked, call.caller.tenant)
    except RequestError:
        raise _unknown(
            f"there is no model {asked[:200]!r} here; ask for {service.name!r} or for one that "
            "RepositoryIndex names",
            field,
        ) from None
    return Model(name, str(resident.version), resident.key, service.replays.ripe(resident))


def _unknown(message: str, field: str = "model_name") -> RefusedError:
    return RefusedError("UNKNOWN_MODEL", message, field)


def _inputs() -> list[tuple[str, str, int]]:
    """Each input's name, datatype and size; -1: any."""
    kinds = {**KINDS, **{alias: KINDS[name] for alias, name in ALIASES.items()}}
    told = [
        (name, DATATYPES[kind], -1 if kind in ("texts", "integers") else 1)
        for name, kind in kinds.items()
    ]
    return [(name, "UINT64" if name == "seed" else kind, size) for name, kind, size in told]


def _type(datatype: str) -> int:
    values = pb.file.enum_types_by_name["DataType"].values_by_name
    return int(values["TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"].number)


# ---------------------------------------------------------------------------------------- inference


async def _asked(message: Any, call: Call) -> tuple[Wanted, Answers]:
    model = await _model(call, message.model_name, message.model_version)
    wanted = read_request(message, model.adapter, call.service.config.text_bytes_max)
    if wanted.timeout_s is not None:
        end = time.monotonic() + wanted.timeout_s
        call.deadline = end if call.deadline is None else min(end, call.deadline)
    blank = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=message.id)
    return wanted, Answers(blank, wanted, call)


async def model_infer(message: Any, call: Call) -> Any:
    wanted, answers = await _asked(message, call)
    if wanted.stream:
        raise RequestError(
            "stream is true, and ModelInfer answers once; call ModelStreamInfer, or leave it out",
            "stream",
        )
    return await _whole(wanted, answers, call)


async def _start(wanted: Wanted, call: Call, *, whole: bool = False) -> Stream:
    try:
        return await call.start(wanted.ask, whole=whole)
    except RequestError as error:
        raise said_as(error, wanted.names) from None


async def _whole(wanted: Wanted, answers: Answers, call: Call) -> Any:
    stream = await _start(wanted, call, whole=True)
    pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
    async for piece in call.pieces(stream):
        pieces[piece.index].append(piece)
    return answers.whole(
        [
            completion(index, answer, pieces[index])
            for index, answer in enumerate(stream.request.answers)
        ],
    )


async def model_stream_infer(messages: AsyncIterator[Any], call: Call, write: Write) -> None:
    await _Requests(call, write).serve(messages)


class _Requests:
    """Those of one stream, at once."""

    def __init__(self, call: Call, write: Write) -> None:
        self._call, self._write = call, write
        self._writing = asyncio.Lock()  # gRPC takes one message at a time.
        self._running: set[asyncio.Task[None]] = set()
        config = call.service.config
        self._most, self._idle_s = config.stream_requests_max, config.stream_idle_s
        self._busy = time.monotonic()  # When it last had a request.

    async def serve(self, messages: AsyncIterator[Any]) -> None:
        """Until the client sends no more and all have ended, or the server drains."""
        stopping = asyncio.ensure_future(self._call.front.stop.wait())
        try:
            while (message := await self._next(messages, stopping)) is not None:
                await self._take(message)
            if self._running:
                await asyncio.wait(self._running)
            if stopping.done():
                raise UnavailableError("this server is shutting down; try another", "DRAINING")
        finally:
            stopping.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _next(self, messages: AsyncIterator[Any], stopping: "asyncio.Future[Any]") -> Any:
        """The next message; None if there is none, or the server is to stop."""
        coming = asyncio.ensure_future(anext(messages, None))
        try:
            while not (coming.done() or stopping.done()):
                left_s = self._idle_s
                if not self._running:
                    left_s -= time.monotonic() - self._busy
                if left_s <= 0:
                    raise RefusedError(
                        "IDLE_STREAM",
                        f"this stream had no request for {self._idle_s:g} s (stream_idle_s), and "
                        "each takes a place among the calls (calls_max); open another one",
                    )
                await asyncio.wait(
                    {coming, stopping}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
            return coming.result() if coming.done() else None
        finally:
            coming.cancel()

    async def _take(self, message: Any) -> None:
        if len(self._running) >= self._most:
            return await self._end(
                message,
                Ended(
                    REASONS["QUEUE_FULL"],
                    f"{self._most} requests of this stream are on their way (stream_requests_max); "
                    "wait for one to end, or open another stream",
                ),
            )
        task = asyncio.create_task(self._one(message))
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._busy = time.monotonic()

    async def _one(self, message: Any) -> None:
        try:
            async with self._call.part("ModelStreamInfer/request") as call:
                await self._answer(message, call)
        except Ended as ended:
            await self._end(message, ended)

    async def _answer(self, message: Any, call: Call) -> None:
        wanted, answers = await _asked(message, call)
        if not wanted.stream:
            return await self._send(await _whole(wanted, answers, call), final=True)
        stream = await _start(wanted, call)
        left = len(stream.request.answers)
        async for piece in call.pieces(stream):
            left -= piece.finish is not None
            response = answers.piece(piece, stream.request.answers[piece.index])
            await self._send(response, final=left == 0)

    async def _send(self, response: Any, *, final: bool) -> None:
        # The last message with an answer says that it is: nobody needs an empty one after it.
        response.parameters[FINAL].bool_param = final
        async with self._writing:
            await self._write(pb.ModelStreamInferResponse(infer_response=response))

    async def _end(self, message: Any, ended: Ended) -> None:
        """Say what ended a request, and in parameters what else a status would."""
        told = pb.ModelStreamInferResponse(error_message=str(ended))
        response = told.infer_response
        response.id, response.model_name = message.id, message.model_name
        response.parameters[FINAL].bool_param = True
        response.parameters["reason"].string_param = ended.reason.name
        response.parameters["code"].string_param = ended.reason.code.name
        if ended.field:
            response.parameters["field"].string_param = ended.field
        if ended.retry_s is not None:
            response.parameters["retry_ms"].int64_param = round(1000 * ended.retry_s)
        async with self._writing:
            await self._write(told)
