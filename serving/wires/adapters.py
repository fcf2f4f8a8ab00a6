"""`preamble.v1.AdapterService`: which adapters there are, and changing that.

A caller sees its own. What a change may be and how it lasts is `serving.adapters`' business; this
is words in, words out.
"""

from collections.abc import Sequence

from gpt.adapter import parse_name
from gpt.errors import RequestError
from protos.preamble.v1 import adapters_pb2 as pb
from serving.adapters import Resident
from serving.front import Call
from serving.rpc import Method

SERVICE = "preamble.v1.AdapterService"
PAGE_DEFAULT, PAGE_MAX = 100, 1000


def methods() -> list[Method]:
    return [Method("ListAdapters", pb.ListAdaptersRequest, list_adapters)]


async def list_adapters(message: pb.ListAdaptersRequest, call: Call) -> pb.ListAdaptersResponse:
    entries = call.service.adapters.list()
    after = _after(message.page_token)
    rest = [(r, current) for r, current in entries if (r.name, r.version) > after]
    size = min(message.page_size or PAGE_DEFAULT, PAGE_MAX)
    page = rest[:size]
    return pb.ListAdaptersResponse(
        adapters=[_adapter(resident, current) for resident, current in page],
        next_page_token=page[-1][0].key if len(rest) > size else "",
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
