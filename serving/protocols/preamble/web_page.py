"""The page at `/` for a person, and what it reads: calls of `preamble.v1` that only look, as JSON.

The files are served as they lie in `serving/page`, to anyone, and tell nothing of this server. What
tells is behind the same credential, role and quota as the call over gRPC of that name. Knows no
HTML; which rules a browser holds the page to, and those forbid all that it does not need, is here.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from gpt.errors import RequestError
from serving.frontend.call import Front
from serving.frontend.grpc_transport import Method
from serving.frontend.http_transport import HEADERS, Answer, Routes, answered, came
from serving.protocols.preamble import adapters, admin

WIRE = "http"
LOOKS = {
    "/v1/server": ("GetServerInfo", admin.methods()),
    "/v1/load": ("GetLoad", admin.methods()),
    "/v1/adapters": ("ListAdapters", adapters.methods()),
}
SHOWN_CHARACTERS_MAX = 100
FOLDER = Path(__file__).resolve().parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
RULES = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE = {
    **HEADERS,
    "Content-Security-Policy": RULES,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # Asked for again each time, and sent again if it is another.
}


def routes(front: Front, *, page: bool) -> Routes:
    """The calls; with `page` the files too."""
    looks: dict[str, Mapping[str, Answer]] = {}
    for path, (name, methods) in LOOKS.items():
        method = next(method for method in methods if method.name == name)
        looks[path] = _both(_look(front, method))
    files = {path: _both(_file(*file)) for path, file in FILES.items()} if page else {}
    return {**files, **looks}


def _both(answer: Answer) -> Mapping[str, Answer]:
    return {"GET": answer, "HEAD": answer}


def _look(front: Front, method: Method) -> Answer:
    """A call without a body: fields of its message are in the query, as protobuf writes JSON."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        credential = request.headers.get("Authorization")
        how = came(request, request.path)
        async with front.call(
            WIRE, method.name, credential, draining=method.draining, came=how
        ) as call:
            call.caller.must(method.role)
            told = await method.answer(_asked(request, method), call)
            assert told is not None
            # In a thread, which lets others in: a thousand adapters are a while.
            record = await asyncio.to_thread(
                MessageToDict,
                told,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            return answered(record, headers={"Cache-Control": "no-store"})

    return answer


def _asked(request: web.BaseRequest, method: Method) -> Message:
    message, fields = method.request(), method.request.DESCRIPTOR.fields_by_name
    for name, value in request.query.items():
        shown = ascii(name)[:SHOWN_CHARACTERS_MAX]
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise RequestError(f"there is no {shown} in this query; known are: {known}", name[:100])
        try:
            ParseDict({name: value}, message)
        except ParseError:
            said = ascii(value)[:SHOWN_CHARACTERS_MAX]
            raise RequestError(
                f"{name} is {said}; it must be a whole number, 0 or more", name
            ) from None
    return message


def _file(name: str, content_type: str) -> Answer:
    body = (FOLDER / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**SAFE, "Content-Type": content_type, "ETag": etag}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    return answer
