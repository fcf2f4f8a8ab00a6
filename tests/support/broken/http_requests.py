"""Invalid HTTP requests: some nearly valid, some arbitrary bytes.

An exchange is everything that is sent on one connection, and how that connection ends. It depends
on a seed and its number only, so that a harmful exchange can be sent again, alone.
"""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.broken.protobuf_messages import TEXTS, damage

# How the client ends an exchange: after all responses, by closing one half, or both halves.
End = Literal["wait", "half", "cut"]

# In addition to the paths that the server has.
PATHS = (
    "/v1/models/",
    "/v1/models/sum",
    "/v1/models/nobody",
    "/v1",
    "/v1/models/%F0%9F",
    "/%00",
    "/v1/models/%ff%fe",
    "/v1/models/../../etc/passwd",
    "http://x/v1/models",
    "/metrics/",
    "/v1/completions?stream=true&" + "a=b&" * 50,
    "/v1/models/" + "a" * 3000,
    "/%2e%2e/",
    "/v1/adapters?page_size=1",
    "/v1/adapters?page_token=%ff&%ff=%00",
    "/v1/load?a&=&&b=%",
)
ODD_PATHS = (
    "*",
    "//",
    "/v1//models",
    "x:1",
    "/health/live#x",
    "/v1/models/\xff",
    "/\xc3\xa9",
    "",
    " ",
)
METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "get",
    "PRI",
    "PROPFIND",
    "QUERY",
    "A" * 300,
    "G\xc9T",
    "",
    "POST POST",
)
# JSON values as text: some fit some fields, some are invalid.
VALUES = (
    "null",
    "true",
    "false",
    "0",
    "1",
    "2",
    "-1",
    "0.5",
    "1.0",
    "-0",
    "-0.0",
    "16",
    "64",
    "128",
    "1e999",
    "-1e999",
    "1e-999",
    "1E400",
    "9" * 400,
    "NaN",
    "Infinity",
    "01",
    "+1",
    ".5",
    "0x10",
    str(2**31),
    str(2**53),
    str(2**63 - 1),
    str(2**63),
    str(2**64),
    str(-(2**63)),
    "1e20",
    '""',
    '"a"',
    '"hello world"',
    '"sum"',
    '"sum@1"',
    '"\\u0000"',
    '"\\ud83e\\udd9c"',
    '"é"',
    '"\\ud800"',
    '"\\x"',
    '"\n"',
    '"\udcff"',
    "'a'",
    '"auto"',
    '"low"',
    '"latency"',
    '"never"',
    "[]",
    "[1]",
    "[1,2,3]",
    "[[1],[2]]",
    '["a","b"]',
    '["a",1]',
    "[[]]",
    "[null]",
    "[0,639]",
    "[640]",
    "[-1]",
    "[1.5]",
    "[true]",
    '[""]',
    "[[1],2]",
    "[[[1]]]",
    "[1,]",
    "[" * 2000,
    "{}",
    '{"1":2}',
    '{"5":-100}',
    '{"a":"b"}',
    '{"a":{"b":[]}}',
    '{"":0}',
    '{"1":NaN}',
    "{",
    '{"include_usage":true}',
    '{"type":"json_object"}',
    '{"type":"string","maxLength":3}',
    '{"type":"json_schema","json_schema":{"schema":{"type":"null"}}}',
    '{"type":"text"}',
    '[{"role":"user","content":[{"type":"text","text":"a"}]}]',
    '[{"role":"\\u0000"}]',
    "[{}]",
    '[{"role":"assistant","content":null,"tool_calls":[]},{"role":"tool","content":"{{1/0}}"}]',
    '{"$ref":"#"}',
    '{"enum":[]}',
    '{"type":"string","pattern":"(a|b)*c"}',
    '"(a|b)*c"',
    '"(("',
    "[" + "1," * 3000 + "1]",
    '["' + 'a","' * 300 + '"]',
    '"' + "word " * 3000 + '"',
    '{"a":' * 600 + "1" + "}" * 600,
    "[" * 400 + "]" * 400,
    "tru",
    "",
    " ",
    "//",
    "1 2",
    *(json.dumps(text) for text in TEXTS),
)
# Valid requests that end soon. Each of them succeeds alone.
TIMEOUT = '"timeout"', "0.4"
GOOD: Sequence[Sequence[tuple[str, str]]] = [
    [('"prompt"', '"hello world"'), ('"max_tokens"', "3"), *more, TIMEOUT]
    for more in (
        [('"temperature"', "0")],
        [('"model"', '"sum"'), ('"temperature"', "1"), ('"seed"', "7")],
        [('"stream"', "true"), ('"stream_options"', '{"include_usage":true}')],
        [('"logprobs"', "2"), ('"echo"', "true"), ('"n"', "2"), ('"stream"', "true")],
        [('"top_p"', "0.5"), ('"top_k"', "5"), ('"min_p"', "0.1"), ('"typical_p"', "0.9")],
        [('"stop"', '["a","the"]'), ('"logit_bias"', '{"5":-1.5}'), ('"presence_penalty"', "1")],
        [('"use_beam_search"', "true"), ('"beam_width"', "2"), ('"length_penalty"', "0.5")],
        [('"guided_choice"', '["a","b"]'), ('"service_class"', '"throughput"')],
        [('"guided_json"', '{"type":"boolean"}'), ('"user"', '"somebody"'), ('"priority"', "3")],
        [('"bad_words"', '["quick"]'), ('"allowed_token_ids"', "[5,6,7]"), ('"min_tokens"', "1")],
        [('"response_format"', '{"type":"text"}'), ('"truncate_prompt_tokens"', "2")],
        [('"guided_regex"', '"[ab]{2}"'), ('"ignore_eos"', "true"), ('"repetition_penalty"', "2")],
    )
]
NAMES = [
    *sorted({name for fields in GOOD for name, _ in fields}),
    '"inputs"',
    '"suffix"',
    '"best_of"',
    '"frequency_penalty"',
    '"guided_grammar"',
    '"messages"',
    '"prompt_logprobs"',
    '"stop_token_ids"',
    '"early_stopping"',
    '"no_repeat_ngram_size"',
    '"include_stop_str_in_output"',
    '""',
    '"\\u0000"',
    '"\\ud800"',
    '"' + "n" * 5000 + '"',
    "a",
]
HEADERS = (
    "content-type: text/plain",
    "content-type: application/json; charset=latin-1",
    "content-type:",
    "content-type: application/json, application/json",
    "content-type: \xff/\x01",
    "host:",
    "content-encoding: gzip",
    "content-encoding: deflate",
    "content-encoding: br",
    "te: x",
    "content-encoding: zstd",
    "content-encoding: identity",
    "content-encoding: gzip, gzip",
    "expect: 100-continue",
    "expect: 200-ok",
    "upgrade: websocket\r\nconnection: upgrade",
    "upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABk",
    "cookie: ;=;",
    "connection: close",
    "connection: keep-alive",
    "connection: x",
    "range: bytes=0-1",
    "a: b" * 99,
    "authorization: Bearer x",
    "authorization: \xff",
    "authorization:",
    "x: " + "y" * 8000,
    ": z",
    "content-length: 0",
    "content-length: 3",
    "content-length: -1",
    "content-length: +5",
    "content-length: 99999999999999999999",
    "content-length: 0x10",
    "content-length: 1, 1",
    "transfer-encoding: identity",
    "transfer-encoding: chunked, chunked",
    "host: a\r\nhost: b",
    "transfer-encoding: gzip, chunked",
    "transfer-encoding: x",
    "transfer-encoding : chunked",
    "x: a\r\n b",
    "no colon",
    "x\x00y: z",
    "x: \x00",
    "x: \x7f\xff",
    "\xe9: a",
    "if-match: *",
)
TLS_CLIENT_HELLO = (
    b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03"
    + bytes(range(32))
    + b"\x00\x00\x20"
    + b"\xc0" * 80
)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# The last request of an exchange that expects responses: the server closes after it.
PROBE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Exchange:
    data: bytes
    end: End = "wait"
    to_grpc_port: bool = False


class Draw(random.Random):
    """A random generator, and the paths to choose from."""

    paths: Sequence[str] = PATHS


def exchange(seed: int, number: int, server_paths: Sequence[str]) -> Exchange:
    """The exchange with this number. `server_paths`: the paths that the server has."""
    draw = Draw(f"{seed} {number}")
    draw.paths = (*PATHS, *server_paths)
    make: Callable[[Draw], Exchange] = draw.choices(
        (_pipelined, _damaged, _cut_short, _aborted, _noise, _flood, _http2),
        (75, 10, 2, 6, 3, 2, 2),
    )[0]
    return make(draw)


def _pipelined(draw: Draw) -> Exchange:
    count = draw.choice((1, 2, 4, 6, 12))
    return Exchange(b"".join(_request(draw) for _ in range(count)) + PROBE)


def _damaged(draw: Draw) -> Exchange:
    payload = _request(draw)
    return Exchange(damage(payload, draw) + PROBE, draw.choice(("wait", "wait", "cut")))


def _cut_short(draw: Draw) -> Exchange:
    """A request cut short, whose connection stays open."""
    data = _request(draw, strange=0.0)
    return Exchange(data[: draw.randrange(1, len(data))])


def _aborted(draw: Draw) -> Exchange:
    """A client that closes before or during its response."""
    payload = b"".join(_request(draw) for _ in range(draw.choice((1, 1, 2, 4))))
    if draw.random() < 0.5:
        payload = payload[: draw.randrange(1, len(payload))]
    return Exchange(payload, draw.choice(("half", "cut")))


def _noise(draw: Draw) -> Exchange:
    noise = draw.randbytes(draw.choice((1, 10, 300, 3000)))
    payload = draw.choice(
        (noise, TLS_CLIENT_HELLO, HTTP2_PREFACE, b"\r\n" * 300, b"\0" * 900, b"GET")
    )
    return Exchange(payload + draw.choice((b"", b"\r\n\r\n", noise)), draw.choice(("half", "cut")))


def _flood(draw: Draw) -> Exchange:
    """A head with too many headers, or with a line that is too long."""
    count = draw.choice((100, 130, 2000))
    head = draw.choice(
        (
            "GET /health/live HTTP/1.1\r\n"
            + "".join(f"h{number}: v\r\n" for number in range(count)),
            "GET /health/live HTTP/1.1\r\nx: " + "y" * 100 * count + "\r\n",
            "GET /health/live HTTP/1.1\r\n" + "x" * 100 * count,
            "GET /" + "a" * 100 * count + " HTTP/1.1\r\n",
            "A" * 100 * count + " / HTTP/1.1\r\n",
            "GET / HTTP/" + "1" * count + "\r\n",
        )
    )
    return Exchange(head.encode("latin-1") + b"\r\n" + PROBE, draw.choice(("wait", "cut")))


def _http2(draw: Draw) -> Exchange:
    """Bytes for a port that accepts HTTP/2 only."""
    payload = draw.choice((TLS_CLIENT_HELLO, PROBE, HTTP2_PREFACE, _request(draw)))
    payload += draw.randbytes(draw.choice((0, 9, 200)))
    return Exchange(payload, draw.choice(("half", "cut")), to_grpc_port=True)


def _request(draw: Draw, strange: float = 0.08) -> bytes:
    """One request. `strange`: how likely its head contains an irregularity."""
    completion_path = draw.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions"))
    path = completion_path if draw.random() < 0.5 else draw.choice(draw.paths)
    if draw.random() < strange / 2:
        path = draw.choice(ODD_PATHS)
    method = "POST" if path.endswith("completions") else draw.choice(("GET", "HEAD"))
    if draw.random() < strange / 2:
        method = draw.choice(METHODS)
    chat = "chat" in path
    body = body_of(draw, chat=chat) if method == "POST" or draw.random() < 0.1 else b""
    odd = draw.random() < strange / 2
    version = draw.choice(("1.0", "1.0", "0.9", "2.0", "1.2", "", "1")) if odd else "1.1"
    lines = [f"{method} {path} HTTP/{version}", "host: localhost"]
    if draw.random() > strange / 2:
        lines.append("content-type: application/json")
    if draw.random() < 0.05:
        body, coding = draw.choice(
            ((gzip.compress(body), "gzip"), (zlib.compress(body), "deflate"), (GZIP_BOMB, "gzip"))
        )
        lines.append(f"content-encoding: {coding}")
    if body and draw.random() < 0.2:
        lines.append("transfer-encoding: chunked")
        body = _chunked(body, draw)
    elif body or draw.random() < 0.1:
        size = len(body) if draw.random() > strange / 20 else draw.randrange(2 * len(body) + 2)
        lines.append(f"content-length: {size}")
    while draw.random() < strange:
        lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(HEADERS))
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


GZIP_BOMB = gzip.compress(b'{"prompt": "' + b" " * (4 << 20) + b'"}')


def _chunked(body: bytes, draw: random.Random) -> bytes:
    parts = []
    step = draw.choice((1, 7, 100, 10_000)) if len(body) < 1000 else 10_000
    for begin in range(0, len(body), step):
        chunk = body[begin : begin + step]
        size = len(chunk) if draw.random() < 0.998 else draw.choice((0, len(chunk) + 1, 2**64, -1))
        parts.append(b"%x%s\r\n%s\r\n" % (size, draw.choice((b"", b"", b";a=b")), chunk))
    last_chunk = (
        b"0\r\n\r\n" if draw.random() < 0.97 else draw.choice((b"", b"0\r\n", b"0\r\na: b\r\n\r\n"))
    )
    return b"".join(parts) + last_chunk


def body_of(draw: Draw, *, chat: bool) -> bytes:
    """The body of a completion: valid, or invalid in one or more fields."""
    fields = list(draw.choice(GOOD))
    if chat:
        fields[0] = ('"messages"', '[{"role":"user","content":"hello world"}]')
    kind = draw.random()
    if kind < 0.35:
        return _json_text(fields)
    if kind < 0.4:
        return draw.choice(VALUES).encode(errors="surrogateescape")
    if kind < 0.42:  # Too long to be parsed in the event loop.
        long_text = draw.choice(
            ("[[1]," * 60_000, '"' + "a" * 80_000 + '"', "[" + "1," * 40_000 + "1]")
        )
        return _json_text([*fields, ('"prompt"', long_text)])
    while True:
        change = draw.randrange(4)
        position = draw.randrange(len(fields))
        if change == 0:
            fields[position] = (fields[position][0], draw.choice(VALUES))
        elif change == 1 and len(fields) > 1:
            del fields[position]
        elif change == 2:
            fields.insert(position, (draw.choice(NAMES), draw.choice(VALUES)))
        else:
            fields.append(draw.choice(fields))  # A duplicate name.
        if draw.random() < 0.6:
            break
    payload = _json_text(fields)
    return damage(payload, draw) if draw.random() < 0.1 else payload


def _json_text(fields: Sequence[tuple[str, str]]) -> bytes:
    text = "{" + ",".join(f"{name}:{value}" for name, value in fields) + "}"
    return text.encode(errors="surrogateescape")  # Some bytes are not UTF-8.


# ------------------------------------------------------------------------------------ responses


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


class TornError(Exception):
    """The bytes are not complete responses."""


def replies(data: bytes) -> list[Reply]:
    """All responses of a connection. A response to HEAD is recognized by what follows it."""
    parsed: list[Reply] = []
    while data:
        head, cut, data = data.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        if not cut or not status_line.startswith("HTTP/1."):
            raise TornError(head[:100])
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            body, data = _joined(data)
        elif "content-length" not in headers and not status_line[9:12].startswith("1"):
            # Until the end of the connection, as in HTTP/1.0.
            body = data
            data = b""
        elif not data.startswith(b"HTTP/1.") and data:
            size = int(headers.get("content-length", "0"))
            if len(data) < size:
                raise TornError(status_line, len(data), size)
            body = data[:size]
            data = data[size:]
        if not status_line[9:12].startswith("1"):
            parsed.append(Reply(int(status_line[9:12]), headers, body))
    return parsed


def _joined(data: bytes) -> tuple[bytes, bytes]:
    """A chunked body, and what follows it."""
    parts = []
    while True:
        line, cut, data = data.partition(b"\r\n")
        if not cut:
            raise TornError("a chunk's size")
        size = int(line, 16)
        if len(data) < size + 2 or data[size : size + 2] != b"\r\n":
            raise TornError("a chunk", size)
        parts.append(data[:size])
        data = data[size + 2 :]
        if size == 0:
            return b"".join(parts), data


def errors_in(reply: Reply) -> list[Any]:
    """The errors of a response: in its body, or in an event."""
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
        return [event for event in map(json.loads, events) if "error" in event]
    return [json.loads(reply.body)] if reply.status >= 400 and reply.body else []
