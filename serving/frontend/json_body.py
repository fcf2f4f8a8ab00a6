"""JSON bodies: reads the JSON body of an HTTP request, bounds its size, and parses it.

A protocol declares the fields of a body as a `RequestBody`. An unknown field is an error, because
ignoring a misspelled field would change results silently. This module knows no endpoint.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
from aiohttp import web

from gpt.errors import RequestError
from gpt.settings import MISSPELLING_SIMILARITY_MIN, nearest_name
from serving.frontend.call import Call
from serving.frontend.http_transport import JSON_TYPE, read_body
from serving.frontend.json_fields import remove_unset_fields
from serving.request import RefusedError

# The value of an unset schema. Schemas stay raw JSON, so that a large schema does not become Python
# objects.
JSON_NULL = msgspec.Raw(b"null")
QUOTED_CHARACTERS_MAX = 200
# JSON parsing holds the GIL, even in a thread, and the parsed objects take more memory than the
# text. Therefore the strings, lists and objects of a body over LARGE_BODY_BYTES are counted before
# parsing. No valid request needs more than JSON_PARTS_MAX of them.
LARGE_BODY_BYTES = 64 << 10
JSON_PARTS_MAX = 100_000
# Browsers send one of these headers with each POST to another site.
BROWSER_HEADERS = ("Origin", "Sec-Fetch-Site")
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_PATH = re.compile(r" - at `(.*)`$", re.DOTALL)

T = TypeVar("T")


class RequestPart(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object in a request. Unknown fields are errors."""

    @classmethod
    def has_no_effect(cls, name: str, value: Any) -> bool:
        """Return whether a field that this object does not have can be ignored with this value."""
        return False


class RequestBody(RequestPart):
    """The JSON object of a whole request body."""

    # Advice in errors, by the name of a field that this endpoint does not have.
    FIELD_HINTS: ClassVar[Mapping[str, str]] = {}

    @property
    def field_names(self) -> Mapping[str, str]:
        """Maps the field names in the admission's errors to this endpoint's names."""
        return {}

    @classmethod
    def unknown_field_error(cls, name: str) -> str | None:
        """Return the message for a field that this body does not have; None: the usual message."""
        return None

    def check(self) -> None:
        """Raise a RequestError if two fields contradict each other, or a value is unsupported."""


BodyT = TypeVar("BodyT", bound=RequestBody)
_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = cache(msgspec.json.Decoder)


async def read_json_body(
    request: web.BaseRequest, call: Call, *, json_type_only: bool = True
) -> bytes:
    """Read the body of a request; raise an error if its content type is refused.

    `json_type_only`: refuse every content type except JSON. False: also accept programs that send
    JSON without a content type or with a wrong one, as curl does, but no browsers.
    """
    # If text/plain were accepted too, any web page could let a browser send requests to this
    # server, because browsers send text/plain without a CORS preflight.
    is_json = request.content_type == JSON_TYPE and "Content-Type" in request.headers
    is_browser = any(header in request.headers for header in BROWSER_HEADERS)
    if not is_json and (json_type_only or is_browser):
        content_type = ascii(request.headers.get("Content-Type", ""))[:100]
        raise RefusedError("UNREADABLE", f"the content type is {content_type}; send {JSON_TYPE}")
    limits = call.service.config.limits_config
    return await read_body(request, limits.message_bytes_max, call.frontend.slow_reader_s)


async def maybe_in_thread(data: bytes, function: Callable[..., T], *args: object) -> T:
    """Call `function`, in a thread if the body is large, so that the event loop is not blocked."""
    if len(data) <= LARGE_BODY_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def parse_request(data: bytes, request_type: type[BodyT]) -> BodyT:
    """Parse and check a request body. This may take long if the body is large."""
    body = _decode(data, request_type, request_type)
    body.check()
    return body


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a request body that is a JSON object with any fields."""
    return _decode(data, dict[str, Any], RequestBody)


def _decode(data: bytes, json_type: type[T], request_type: type[RequestBody]) -> T:
    if len(data) > LARGE_BODY_BYTES and _count_json_parts(data) > JSON_PARTS_MAX:
        raise RefusedError(
            "BODY_TOO_LARGE",
            f"the body has more than {JSON_PARTS_MAX} strings, lists and objects; send several "
            "requests",
        )
    try:
        body: T = _decode_fields(data, json_type, request_type)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), request_type) from None
    except msgspec.DecodeError as error:
        raise RefusedError("UNREADABLE", f"the body is not JSON: {shorten(str(error))}") from None
    except UnicodeDecodeError:
        raise RefusedError("UNREADABLE", "the body is not UTF-8; send JSON in UTF-8") from None
    except RecursionError:
        raise RefusedError("UNREADABLE", "the body is nested too deeply") from None
    return body


def _decode_fields(data: bytes, json_type: type[T], request_type: type[RequestBody]) -> T:
    decode: Callable[[bytes], T] = _decoder(json_type).decode
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        try:
            data = remove_unset_fields(data, request_type, _has_no_effect)
        except (msgspec.MsgspecError, RecursionError):
            raise error from None
    return decode(data)


def _has_no_effect(struct: type[msgspec.Struct], name: str, value: Any) -> bool:
    return issubclass(struct, RequestPart) and struct.has_no_effect(name, value)


def _count_json_parts(data: bytes) -> int:
    """Count the strings, lists and objects of a JSON text.

    If the strings alone are over the limit, the lists and objects are not counted.
    """
    text = _remove_escapes(data)
    strings = text.count(b'"') // 2
    if strings > JSON_PARTS_MAX:
        return strings
    return strings + count_outside_strings(text, "[{")


def count_outside_strings(data: bytes, characters: str) -> int:
    """Return how often the characters occur in a JSON text, except in its strings."""
    texts = _remove_escapes(data).split(b'"')[::2]
    return sum(text.count(character.encode()) for text in texts for character in characters)


def _remove_escapes(data: bytes) -> bytes:
    """Remove escaped backslashes and quotes, so that each remaining quote delimits a string."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")


def _validation_error(message: str, request_type: type[RequestBody]) -> RequestError:
    """Convert msgspec's message to a RequestError.

    The message can end with the JSON path of the invalid value, such as " - at `$.stop[0]`".
    """
    if len(message) > 4 * QUOTED_CHARACTERS_MAX:  # The message quotes a long field name.
        message = message[: 2 * QUOTED_CHARACTERS_MAX] + message[-2 * QUOTED_CHARACTERS_MAX :]
    path_match = _PATH.search(message)
    description = message[: path_match.start()] if path_match else message
    field = path_match[1].removeprefix("$").lstrip(".") if path_match else ""
    top_field = re.split(r"[.\[]", field)[0] or None
    unknown_field = _UNKNOWN.search(description)
    if unknown_field is None:
        return RequestError(f"{shorten(field or 'the body')}: {shorten(description)}", top_field)
    name = unknown_field[1]
    if top_field is not None:
        return RequestError(f"{shorten(field)} has the unknown field {shorten(name)!r}", top_field)
    return RequestError(_unknown_field_message(name, request_type), shorten(name))


def _unknown_field_message(name: str, request_type: type[RequestBody]) -> str:
    advice = request_type.FIELD_HINTS.get(name)
    if advice is None and (message := request_type.unknown_field_error(name)) is not None:
        return message
    if advice is None:
        nearest = nearest_name(
            name[:QUOTED_CHARACTERS_MAX], request_type.__struct_fields__, MISSPELLING_SIMILARITY_MIN
        )
        advice = "remove it" if nearest is None else f"did you mean {nearest!r}?"
    return f"{shorten(name)!r} is not a field of this endpoint; {advice}"


def shorten(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= QUOTED_CHARACTERS_MAX else text[:QUOTED_CHARACTERS_MAX] + "..."
