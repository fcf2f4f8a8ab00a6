"""The gRPC surface: bytes to an `Ask`, pieces to bytes, errors to codes. Nothing is decided here.

What a request may be is the admission's business, when it runs the engine's. A call is counted and
timed from its arrival to its end, and whatever ends it badly gets its code from one table.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gpt.adapter import parse_name
from gpt.costs import parameter_count
from gpt.errors import AdapterError, PreambleError, RequestError
from protos.preamble.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2_grpc,
)
from protos.preamble.v1 import generation_pb2 as pb
from serving.adapters import Resident
from serving.metrics import Metrics, version
from serving.request import (
    Answer,
    Ask,
    DeadlinePassedError,
    EngineFaultError,
    Finish,
    OverloadedError,
    Piece,
    UnavailableError,
    UnknownAdapterError,
)
from serving.service import Service

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
State = Literal["loading", "serving", "draining"]

# The first that fits. Whatever is not here is a bug, and INTERNAL.
CODES: tuple[tuple[type[PreambleError], grpc.StatusCode], ...] = (
    (UnknownAdapterError, grpc.StatusCode.NOT_FOUND),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (AdapterError, grpc.StatusCode.FAILED_PRECONDITION),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlinePassedError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (EngineFaultError, grpc.StatusCode.INTERNAL),
)

FINISH: dict[Finish | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}

PAGE_DEFAULT, PAGE_MAX = 100, 1000

# gRPC's own key: a client that is set up to retry waits this long first.
RETRY_LATER = (("grpc-retry-pushback-ms", "1000"),)


@dataclass
class _Call:
    """The clock of one call."""

    metrics: Metrics
    arrival: float
    last: float | None = None  # When the last token came.

    def made(self, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        self.metrics.generated_tokens.inc(tokens)
        if self.last is None:
            self.metrics.first_token.observe(now - self.arrival)
            self.last = now  # What came along with the first took no further time.
            tokens -= 1
        for _ in range(tokens):
            self.metrics.next_token.observe((now - self.last) / tokens)
        self.last = now


class Servicer(
    generation_pb2_grpc.GenerationServiceServicer,
    adapters_pb2_grpc.AdapterServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """All services of `preamble.v1`, for a service that comes when it is loaded."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.state: State = "loading"
        self.service: Service | None = None
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    def open(self, service: Service) -> None:
        self.service, self.state = service, "serving"

    async def drained(self) -> None:
        """Refuse calls from now on; returns when the last one that was accepted has ended."""
        self.state = "draining"
        await self._idle.wait()

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self.call("Generate", context) as call:
            service = self._serving()
            stream = await service.start(_ask(message), _deadline(context), whole=True)
            with closing(stream):
                pieces = []
                async for piece in stream:
                    call.made(len(piece.token_ids))
                    pieces.append(piece)
            answer = stream.request.answers[0]
            ids = [token for piece in pieces for token in piece.token_ids]
            self._count(answer, pieces[-1].finish)
            return pb.GenerateResponse(
                text="".join(piece.text for piece in pieces),
                token_ids=ids,
                finish_reason=FINISH[pieces[-1].finish],
                usage=_usage(answer, len(ids)),
                seed=answer.sampling.seed,
                adapter=answer.adapter,
            )

    async def GenerateStream(self, message: pb.GenerateStreamRequest, context: Context) -> None:
        async with self.call("GenerateStream", context) as call:
            service = self._serving()
            stream = await service.start(_ask(message), _deadline(context))
            answer, made = stream.request.answers[0], 0
            with closing(stream):
                async for piece in stream:
                    call.made(len(piece.token_ids))
                    await context.write(_piece(piece, answer, made))
                    made += len(piece.token_ids)
                    if piece.finish:
                        self._count(answer, piece.finish)

    async def Tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self.call("Tokenize", context):
            admission = self._serving().admission
            ids = await asyncio.to_thread(admission.tokenize, message.text)
            return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with self.call("Detokenize", context):
            admission = self._serving().admission
            text = await asyncio.to_thread(admission.detokenize, tuple(message.token_ids))
            return pb.DetokenizeResponse(text=text)

    async def ListAdapters(
        self, message: adapters_pb2.ListAdaptersRequest, context: Context
    ) -> adapters_pb2.ListAdaptersResponse:
        async with self.call("ListAdapters", context):
            entries = self._serving().adapters.list()
            after = _after(message.page_token)
            rest = [(r, current) for r, current in entries if (r.name, r.version) > after]
            size = min(message.page_size or PAGE_DEFAULT, PAGE_MAX)
            page = rest[:size]
            return adapters_pb2.ListAdaptersResponse(
                adapters=[_adapter(resident, current) for resident, current in page],
                next_page_token=page[-1][0].key if len(rest) > size else "",
            )

    async def GetServerInfo(
        self, message: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        async with self.call("GetServerInfo", context, draining=True):
            service = self._serving()
            config = service.config
            return admin_pb2.GetServerInfoResponse(
                version=version(),
                state=admin_pb2.SERVER_STATE_DRAINING
                if self.state == "draining"
                else admin_pb2.SERVER_STATE_SERVING,
                model=_model(service),
                limits=admin_pb2.Limits(
                    queue_requests_max=config.queue_requests_max,
                    running_requests_max=config.running_requests_max,
                    new_tokens_default=config.new_tokens_default,
                    text_bytes_max=config.text_bytes_max,
                    stops_max=config.stops_max,
                ),
                adapters=len(service.adapters),
            )

    def _serving(self) -> Service:
        if self.service is None:
            raise UnavailableError("the model is still being loaded; try again in a moment")
        return self.service

    def _count(self, answer: Answer, finish: Finish | None) -> None:
        assert finish is not None
        self.metrics.finished.labels(finish).inc()
        self.metrics.prompt_tokens.inc(answer.prompt_tokens)
        self.metrics.virtual_tokens.inc(answer.virtual_tokens)

    @asynccontextmanager
    async def call(
        self, method: str, context: Context, *, draining: bool = False
    ) -> AsyncIterator[_Call]:
        """Around each call: its count, its time, and a code for what ends it badly."""
        call = _Call(self.metrics, time.monotonic())
        code = grpc.StatusCode.OK
        self._enter()
        try:
            if self.state == "draining" and not draining:
                raise UnavailableError("this server is shutting down; try another")
            yield call
        except PreambleError as error:
            code = _code(error)
            again = isinstance(error, OverloadedError | UnavailableError)
            wait = RETRY_LATER if again and self.state != "draining" else ()
            await _abort(context, code, str(error), wait)
        except asyncio.CancelledError:
            remaining = context.time_remaining()
            late = remaining is not None and remaining <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception:
            log.exception("event=call_failed method=%s", method)
            code = grpc.StatusCode.INTERNAL
            reason = "a fault of this server ended the call; its log says why"
            await _abort(context, code, reason)
        finally:
            self._leave()
            self.metrics.requests.labels(method, code.name).inc()
            self.metrics.duration.labels(method, code.name).observe(time.monotonic() - call.arrival)

    def _enter(self) -> None:
        self._calls += 1
        self._idle.clear()
        self.metrics.in_flight.inc()

    def _leave(self) -> None:
        self._calls -= 1
        self.metrics.in_flight.dec()
        if self._calls == 0:
            self._idle.set()


class Reading(grpc.aio.ServerInterceptor):
    """Has our methods read their requests inside a call, where a failure gets a code and a count.

    The library would end the call as UNKNOWN, and write a stack to the log for each.
    """

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        package, _, method = handler_call_details.method.rpartition("/")
        if handler is None or not package.startswith("/preamble.v1."):
            return handler

        async def answer(data: bytes, context: Context) -> Any:
            try:
                message = handler.request_deserializer(data)
            except DecodeError:
                async with self._servicer.call(method, context):
                    raise RequestError(
                        f"the {len(data)} bytes sent are no request of {method}; make them from "
                        "this server's protos, which reflection tells"
                    ) from None
            return await (handler.unary_unary or handler.unary_stream)(message, context)

        make = grpc.unary_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
        return make(answer, response_serializer=handler.response_serializer)


async def _abort(
    context: Context,
    code: grpc.StatusCode,
    reason: str,
    trailing: tuple[tuple[str, str], ...] = (),
) -> None:
    """End a call badly. Where nobody hears it any more the library would log a stack for each."""
    try:
        await context.abort(code, reason, trailing)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _code(error: PreambleError) -> grpc.StatusCode:
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _ask(message: pb.GenerateRequest | pb.GenerateStreamRequest) -> Ask:
    sampling = message.sampling
    prompt: Any = None
    match message.WhichOneof("prompt"):
        case "text":
            prompt = message.text
        case "token_ids":
            prompt = tuple(message.token_ids.ids)
        case "inputs":
            prompt = dict(message.inputs.fields)
    return Ask(
        prompt,
        adapters=(message.adapter,) if message.adapter else (),
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_strings=tuple(message.stops.strings),
        stop_token_ids=tuple(message.stops.token_ids),
    )


def _piece(piece: Piece, answer: Answer, made: int) -> pb.GenerateStreamResponse:
    """`made` tokens were sent before it."""
    message = pb.GenerateStreamResponse(
        text=piece.text, token_ids=piece.token_ids, finish_reason=FINISH[piece.finish]
    )
    if made == 0:
        message.seed, message.adapter = answer.sampling.seed, answer.adapter
    if piece.finish:
        message.usage.CopyFrom(_usage(answer, made + len(piece.token_ids)))
    return message


def _usage(answer: Answer, made: int) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=answer.prompt_tokens,
        virtual_tokens=answer.virtual_tokens,
        completion_tokens=made,
    )


def _after(page_token: str) -> tuple[str, int]:
    if not page_token:
        return ("", 0)
    try:
        name, version = parse_name(page_token)
    except RequestError:
        version = None
    if version is None:
        raise RequestError("page_token is not one that a page gave; begin anew", "page_token")
    return (name, version)


def _adapter(resident: Resident, current: bool) -> adapters_pb2.Adapter:
    card = resident.card
    fields: Sequence[str] = ()
    if card.template is not None:
        fields = [name for name in card.template.fields if name != card.template.answer_field]
    return adapters_pb2.Adapter(
        name=resident.name,
        version=resident.version,
        current=current,
        virtual_tokens=resident.rows.count,
        digest=resident.rows.digest,
        task=card.task,
        input_fields=fields,
    )


def _model(service: Service) -> admin_pb2.ModelInfo:
    config = service.checkpoint.config
    return admin_pb2.ModelInfo(
        name=service.name,
        format=service.checkpoint.format,
        parameters=parameter_count(config),
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        context_tokens_max=config.max_position_embeddings,
        dtype=service.dtype,
        tokenizer=service.tokenizer.kind,
        digest=service.digest,
    )
