"""`preamble.v1.AdapterService`: which adapters there are, and changing that.

A caller sees its own and everybody's, and changes its own. What a change may be and how it lasts is
`serving.adapters.store`'s business; this is words in, words out, and files in threads.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from gpt.adapters.adapter_file import parse_name
from gpt.errors import RequestError
from protos.preamble.v1 import adapters_pb2 as pb
from serving.adapters.registry import Resident
from serving.frontend.call import Call
from serving.frontend.grpc_transport import Method
from serving.request import RefusedError, UnknownAdapterError

SERVICE = "preamble.v1.AdapterService"
PAGE_DEFAULT, PAGE_MAX = 100, 1000
T = TypeVar("T")


def methods() -> list[Method]:
    return [
        Method("ListAdapters", pb.ListAdaptersRequest, list_adapters),
        Method("GetAdapter", pb.GetAdapterRequest, get_adapter),
        Method("UploadAdapter", pb.UploadAdapterRequest, upload_adapter, "in", "adapters"),
        Method("LoadAdapter", pb.LoadAdapterRequest, load_adapter, role="adapters"),
        Method("UnloadAdapter", pb.UnloadAdapterRequest, unload_adapter, role="adapters"),
        Method("PromoteAdapter", pb.PromoteAdapterRequest, promote_adapter, role="adapters"),
        Method("RollbackAdapter", pb.RollbackAdapterRequest, rollback_adapter, role="adapters"),
    ]


async def list_adapters(message: pb.ListAdaptersRequest, call: Call) -> pb.ListAdaptersResponse:
    entries = call.service.adapters.list(call.caller.tenant)
    after = _after(message.page_token)
    part = message.contains.lower()
    rest = [
        (resident, current)
        for resident, current in entries
        if (resident.name, resident.version) > after and part in resident.name.lower()
    ]
    size = min(message.page_size or PAGE_DEFAULT, PAGE_MAX)
    page = rest[:size]
    return pb.ListAdaptersResponse(
        adapters=[_adapter(resident, current) for resident, current in page],
        next_page_token=page[-1][0].key if len(rest) > size else "",
    )


async def get_adapter(message: pb.GetAdapterRequest, call: Call) -> pb.GetAdapterResponse:
    resident = await _done(call.service.store.show, message.name, call.caller.tenant)
    return pb.GetAdapterResponse(adapter=_shown(resident, call))


async def load_adapter(message: pb.LoadAdapterRequest, call: Call) -> pb.LoadAdapterResponse:
    resident = await _done(call.service.store.load, message.name, call.caller.tenant)
    return pb.LoadAdapterResponse(adapter=_shown(resident, call))


async def unload_adapter(message: pb.UnloadAdapterRequest, call: Call) -> pb.UnloadAdapterResponse:
    await _done(call.service.store.unload, message.name, call.caller.tenant)
    return pb.UnloadAdapterResponse()


async def promote_adapter(
    message: pb.PromoteAdapterRequest, call: Call
) -> pb.PromoteAdapterResponse:
    resident = await _done(call.service.store.promote, message.name, call.caller.tenant)
    return pb.PromoteAdapterResponse(adapter=_shown(resident, call))


async def rollback_adapter(
    message: pb.RollbackAdapterRequest, call: Call
) -> pb.RollbackAdapterResponse:
    resident = await _done(call.service.store.rollback, message.name, call.caller.tenant)
    return pb.RollbackAdapterResponse(adapter=_shown(resident, call))


async def upload_adapter(
    messages: AsyncIterator[pb.UploadAdapterRequest], call: Call
) -> pb.UploadAdapterResponse:
    limit_s = call.service.config.upload_s
    try:
        async with asyncio.timeout(limit_s):
            resident = await _uploaded(messages, call)
    except TimeoutError:
        raise RefusedError(
            "DEADLINE_PASSED",
            f"the upload took longer than {limit_s:g} s (upload_s); send it faster",
        ) from None
    return pb.UploadAdapterResponse(adapter=_shown(resident, call))


async def _uploaded(messages: AsyncIterator[pb.UploadAdapterRequest], call: Call) -> Resident:
    first = await anext(messages, None)
    if first is None or first.WhichOneof("part") != "name":
        raise RequestError("the first message has no name; send that, then the data", "name")
    upload = call.service.store.upload(first.name, call.caller.tenant)
    try:
        await _done(upload.begin)
        async for message in messages:
            match message.WhichOneof("part"):
                case "data":
                    await _done(upload.write, message.data)
                case "name":
                    raise RequestError("a second name came; one upload is one adapter", "name")
                case _:
                    raise RequestError("a message has no data; send the file in parts", "data")
        return await _done(upload.finish)
    finally:
        await _done(upload.drop)


async def _done(work: Callable[..., T], *given: object) -> T:
    """In a thread, as it reads and writes files."""
    try:
        return await asyncio.to_thread(work, *given)
    except UnknownAdapterError as error:
        error.field = "name"  # As these messages call it.
        raise


def _shown(resident: Resident, call: Call) -> pb.Adapter:
    return _adapter(resident, call.service.adapters.is_current(resident))


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


def _adapter(resident: Resident, current: bool) -> pb.Adapter:
    card = resident.card
    fields: Sequence[str] = ()
    if card.template is not None:
        fields = [name for name in card.template.fields if name != card.template.answer_field]
    numbers = {
        name: float(value)
        for name, value in card.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return pb.Adapter(
        name=resident.name,
        version=resident.version,
        current=current,
        virtual_tokens=resident.rows.count,
        digest=resident.rows.digest,
        task=card.task,
        input_fields=fields,
        method=card.method,
        metrics=numbers,
        max_new_tokens=card.max_new_tokens or 0,
        stops=card.stop,
    )
