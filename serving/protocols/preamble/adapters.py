"""preamble.v1.AdapterService: list, get, upload, load, unload, promote and roll back adapters.

A caller sees the adapters of its tenant and the shared adapters, and can change the adapters of its
tenant. `serving.adapters.version_updates` validates changes and makes them durable; this module
translates messages, and runs file I/O in threads.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from gpt.adapters.adapter_file import parse_name
from gpt.adapters.change_log import ChangeAction, ChangeAuthor
from gpt.errors import PreambleError, RequestError
from protos.preamble.v1 import adapters_pb2 as pb
from serving.adapters.registry import ListedAdapter, LoadedAdapter
from serving.adapters.version_updates import AdapterUpload
from serving.frontend.adapter_changes import adapter_name_field, change_result, run_change
from serving.frontend.call import Call
from serving.frontend.grpc_transport import Cardinality, RpcMethod
from serving.request import RefusedError

SERVICE = "preamble.v1.AdapterService"
PAGE_DEFAULT, PAGE_MAX = 100, 1000
T = TypeVar("T")


def methods() -> list[RpcMethod]:
    return [
        RpcMethod("ListAdapters", pb.ListAdaptersRequest, list_adapters, is_probe=True),
        RpcMethod("GetAdapter", pb.GetAdapterRequest, get_adapter, is_probe=True),
        RpcMethod("LoadAdapter", pb.LoadAdapterRequest, load_adapter, role="adapters"),
        _change_method("UploadAdapter", pb.UploadAdapterRequest, upload_adapter, "upload"),
        _change_method("UnloadAdapter", pb.UnloadAdapterRequest, unload_adapter, "unload"),
        _change_method("PromoteAdapter", pb.PromoteAdapterRequest, promote_adapter, "promote"),
        _change_method("RollbackAdapter", pb.RollbackAdapterRequest, rollback_adapter, "rollback"),
    ]


def _change_method(
    name: str,
    request_type: type[Message],
    handle: Callable[..., Awaitable[Message]],
    change: ChangeAction,
) -> RpcMethod:
    cardinality: Cardinality = "in" if change == "upload" else "unary"
    return RpcMethod(name, request_type, handle, cardinality, "adapters", change=change)


async def list_adapters(message: pb.ListAdaptersRequest, call: Call) -> pb.ListAdaptersResponse:
    entries = call.service.adapters.list_all(call.caller.tenant)
    cursor = _parse_page_token(message.page_token)
    substring = message.contains.lower()
    matches = [
        entry
        for entry in entries
        if (entry.name, entry.version) > cursor and substring in entry.name.lower()
    ]
    page_size = min(message.page_size or PAGE_DEFAULT, PAGE_MAX)
    page = matches[:page_size]
    return pb.ListAdaptersResponse(
        adapters=[_listed_message(entry) for entry in page],
        next_page_token=page[-1].key if len(matches) > page_size else "",
    )


async def get_adapter(message: pb.GetAdapterRequest, call: Call) -> pb.GetAdapterResponse:
    adapter = await _run_in_thread(call, call.service.store.get, message.name, call.caller.tenant)
    return pb.GetAdapterResponse(adapter=_describe_adapter(adapter, call))


async def load_adapter(message: pb.LoadAdapterRequest, call: Call) -> pb.LoadAdapterResponse:
    adapter = await _run_in_thread(call, call.service.store.load, message.name, call.caller.tenant)
    return pb.LoadAdapterResponse(adapter=_describe_adapter(adapter, call))


async def unload_adapter(message: pb.UnloadAdapterRequest, call: Call) -> pb.UnloadAdapterResponse:
    await _run_store_change("unload", call.service.store.unload, message.name, call)
    return pb.UnloadAdapterResponse()


async def promote_adapter(
    message: pb.PromoteAdapterRequest, call: Call
) -> pb.PromoteAdapterResponse:
    adapter = await _run_store_change("promote", call.service.store.promote, message.name, call)
    return pb.PromoteAdapterResponse(adapter=_describe_adapter(adapter, call))


async def rollback_adapter(
    message: pb.RollbackAdapterRequest, call: Call
) -> pb.RollbackAdapterResponse:
    adapter = await _run_store_change("rollback", call.service.store.rollback, message.name, call)
    return pb.RollbackAdapterResponse(adapter=_describe_adapter(adapter, call))


async def upload_adapter(
    messages: AsyncIterator[pb.UploadAdapterRequest], call: Call
) -> pb.UploadAdapterResponse:
    limit_s = call.service.config.adapter_config.upload_s
    deadline = asyncio.get_running_loop().time() + limit_s
    upload = await _start_upload(messages, call, deadline)
    try:
        async with _upload_deadline(deadline, limit_s):
            await _receive_upload(messages, upload, call)
        # Checking and flushing a large file takes long, so only `upload_s` limits it.
        access = call.service.file_threads.submit(call.caller.tenant, upload.finish)
        remaining_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
        adapter = await change_result(call, access, limit_s=remaining_s)
    except BaseException as error:
        await _run_to_end(call, upload.discard, error)
        raise
    await _run_to_end(call, upload.discard)
    return pb.UploadAdapterResponse(adapter=_describe_adapter(adapter, call))


@asynccontextmanager
async def _upload_deadline(deadline: float, limit_s: float) -> AsyncIterator[None]:
    """End the block at `deadline`, a time of the event loop."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise RefusedError(
            "DEADLINE_PASSED",
            f"the upload took longer than {limit_s:g} s (upload_s); retry with a faster connection",
        ) from None


async def _start_upload(
    messages: AsyncIterator[pb.UploadAdapterRequest], call: Call, deadline: float
) -> AdapterUpload:
    store, author, name = call.service.store, call.change_author, ""
    try:
        async with _upload_deadline(deadline, store.config.upload_s):
            name = await _read_name(messages)
        return store.start_upload(name, author.tenant, author)
    except PreambleError as error:
        await call.service.file_threads.wait(call.record_refusal("upload", name, error))
        raise


async def _read_name(messages: AsyncIterator[pb.UploadAdapterRequest]) -> str:
    first_message = await anext(messages, None)
    if first_message is None or first_message.WhichOneof("part") != "name":
        raise RequestError(
            "the first message has no name; send the name first, then the data", "name"
        )
    return first_message.name


async def _receive_upload(
    messages: AsyncIterator[pb.UploadAdapterRequest], upload: AdapterUpload, call: Call
) -> None:
    await _run_in_thread(call, upload.create_file)
    async for message in messages:
        match message.WhichOneof("part"):
            case "data":
                await _run_in_thread(call, upload.write_chunk, message.data)
            case "name":
                raise RequestError("a second name was sent; send one adapter per upload", "name")
            case _:
                raise RequestError("a message has no data; send the file as data messages", "data")


async def _run_store_change(
    action: ChangeAction, change: Callable[[str, str, ChangeAuthor], T], name: str, call: Call
) -> T:
    """Run a method of the adapter store that changes the adapter `name`."""
    author = call.change_author
    return await run_change(call, action, name, partial(change, name, author.tenant, author))


async def _run_in_thread(call: Call, function: Callable[..., T], *args: object) -> T:
    """Call `function`, which does file I/O, in a thread of the caller's tenant."""
    with adapter_name_field():
        return await call.service.file_threads.run(call.caller.tenant, function, *args)


async def _run_to_end(call: Call, function: Callable[..., object], *args: object) -> None:
    """Like `_run_in_thread`, but a cancellation of the call or a time-out does not drop it."""
    await call.service.file_threads.run_to_end(call.caller.tenant, partial(function, *args))


def _describe_adapter(adapter: LoadedAdapter, call: Call) -> pb.Adapter:
    return _adapter_message(adapter, call.service.adapters.is_current(adapter))


def _parse_page_token(page_token: str) -> tuple[str, int]:
    if not page_token:
        return ("", 0)
    try:
        name, version = parse_name(page_token)
    except RequestError:
        version = None
    if version is None:
        raise RequestError(
            "page_token is invalid; send the next_page_token of a page, or none for the first page",
            "page_token",
        )
    return (name, version)


def _listed_message(entry: ListedAdapter) -> pb.Adapter:
    if entry.adapter is None:  # Its file has not been fetched from the object store.
        return pb.Adapter(name=entry.name, version=entry.version, current=entry.is_current)
    return _adapter_message(entry.adapter, entry.is_current)


def _adapter_message(adapter: LoadedAdapter, is_current: bool) -> pb.Adapter:
    card = adapter.card
    fields: Sequence[str] = ()
    if card.template is not None:
        fields = [name for name in card.template.fields if name != card.template.answer_field]
    metrics = {
        name: float(value)
        for name, value in card.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return pb.Adapter(
        name=adapter.name,
        version=adapter.version,
        current=is_current,
        virtual_tokens=adapter.adapter_ref.row_count,
        digest=adapter.adapter_ref.digest,
        task=card.task,
        input_fields=fields,
        method=adapter.info.method,
        metrics=metrics,
        max_new_tokens=card.max_new_tokens or 0,
        stops=card.stop,
        rank=adapter.info.rank,
        bytes=adapter.info.nbytes,
        invocation=card.invocation,
    )
