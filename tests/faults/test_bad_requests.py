"""Bad requests: each is refused by an error that names its field, and the server is unharmed.

The requests of each cause are tried on every route that has the field. Values that look wrong but
are accepted on purpose are in `ACCEPTED`, each with its reason.
"""

import http.client
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grpc
import pytest

from clients.client import Options
from protos.preamble.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2_grpc
from protos.preamble.v1 import generation_pb2 as pb
from tests.support.broken.bad_messages import (
    ADAPTER_METHODS,
    ADAPTER_NAMES,
    GENERATE,
    with_field,
)
from tests.support.broken.bad_values import (
    COMPLETIONS,
    DETOKENIZE,
    KSERVE_GENERATE,
    MESSAGES,
    RESPONSES,
    SAMPLING,
    SCHEMAS,
    TGI,
    TOKENIZE,
    BadValue,
    Values,
    bad_values,
)
from tests.support.chat_templates import CHATML
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import (
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # A server of its own.

MODEL = "base"
LIMIT_S = 20.0  # Time limit of an answer.
GROWTH_MAX = 512 << 20  # Of the front end's memory, at any time.
GROWTH_LEFT_MAX = 64 << 20  # A minute after the requests.
ERROR_STATUSES = {400, 404, 409, 413, 422, 501}
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"}


class Route(NamedTuple):
    """A route with a valid body. `within`: the field of the body that has the table's fields."""

    path: str
    body: Mapping[str, Any]
    tables: tuple[Mapping[str, Values], ...]
    within: str = ""

    def requests(self) -> Iterator[tuple[BadValue, dict[str, Any]]]:
        for bad in bad_values(*self.tables):
            fields = {bad.field: bad.value}
            if self.within:
                inner = {**self.body.get(self.within, {}), **fields}
                fields = {self.within: inner}
            yield bad, {**self.body, **fields}


CHAT = [{"role": "user", "content": "one"}]
ROUTES = (
    Route(
        "/v1/completions",
        {"model": MODEL, "prompt": "one", "max_tokens": 2},
        (COMPLETIONS, SAMPLING, {"guided_json": SCHEMAS}),
    ),
    Route(
        "/v1/chat/completions",
        {"model": MODEL, "messages": CHAT, "max_tokens": 2},
        (MESSAGES, SAMPLING),
    ),
    Route(
        "/v1/responses",
        {"model": MODEL, "input": "one", "max_output_tokens": 2},
        (RESPONSES,),
    ),
    Route("/tokenize", {"prompt": "one"}, (TOKENIZE,)),
    Route("/detokenize", {"tokens": [1]}, (DETOKENIZE,)),
    Route(
        "/generate",
        {"inputs": "one", "parameters": {"max_new_tokens": 2, "do_sample": True}},
        (TGI,),
        "parameters",
    ),
    Route(
        f"/v2/models/{MODEL}/generate",
        {"text_input": "one", "max_tokens": 2},
        (KSERVE_GENERATE,),
    ),
)
# Values that are accepted, by (path or "", cause), with the reason.
ACCEPTED: dict[tuple[str, str], str] = {
    ("", "allowed_token_ids: none"): "an empty list restricts nothing",
    ("", "guided_regex: huge"): "repetitions are counted, not expanded",
    ("/generate", "truncate: 30 digits"): "no prompt is as long",
}
# What an error calls a field whose name it does not have.
NAMES = {"adapter_id": "adapter"}


class Target:
    """A server with adapters and a chat template."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.idle_bytes = anonymous_bytes(server.process.pid)
        self.peak_bytes = self.idle_bytes
        self.answer = self.ask()

    def ask(self) -> str:
        with self.server.client() as client:
            return client.generate("twelve", Options(max_new_tokens=8, temperature=0.0)).text

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        host, _, port = self.server.http_address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
            self.measure()

    def measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self.server.process.pid))

    def check_unharmed(self) -> None:
        """Check that the server gives the same answer, frees KV blocks, and bounds its memory."""
        assert self.ask() == self.answer
        with self.server.client() as client:
            eventually(lambda: client.load().kv_blocks_held == 0)
        assert self.peak_bytes - self.idle_bytes < GROWTH_MAX
        pid = self.server.process.pid
        eventually(lambda: anonymous_bytes(pid) - self.idle_bytes < GROWTH_LEFT_MAX, WAIT_S)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("bad-requests")
    checkpoint = write_checkpoint(folder)
    (checkpoint / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    adapters = folder / "adapters"
    adapters.mkdir()
    write_adapter(adapters / "sum.safetensors", checkpoint, [5, 6, 7])
    limits = {"adapters": str(adapters), "served_model_name": [MODEL]}
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        running = Target(server)
        yield running
        running.check_unharmed()
    log = (folder / "log").read_text()
    assert "Traceback" not in log, log[log.index("Traceback") :][:2000]


def violation_of(bad: BadValue, status: int, body: bytes) -> str | None:
    """What is wrong with the answer to a bad request; None: nothing."""
    text = body.decode("utf-8", "replace")
    if status not in ERROR_STATUSES:
        return f"status {status}: {text[:160]}"
    try:
        record = json.loads(text)
    except ValueError:
        return f"no JSON: {text[:160]}"
    error = record.get("error", record)
    message = error if isinstance(error, str) else str(error.get("message", error))
    if not message or "internal" in message.lower():
        return f"no reason: {text[:160]}"
    names = (bad.field, bad.field.replace("_", " "), NAMES.get(bad.field, bad.field))
    # Text that is no Unicode is refused before its field is known.
    if not any(name in text for name in names) and bad.kind != "a lone surrogate":
        return f"does not name {bad.field}: {message[:160]}"
    return None


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_bad_request_is_refused_by_name(route: Route, target: Target) -> None:
    violations = []
    count = Counter[str]()
    for bad, body in route.requests():
        status, answer = target.post(route.path, json.dumps(body).encode())
        reason = ACCEPTED.get((route.path, bad.cause)) or ACCEPTED.get(("", bad.cause))
        count["accepted" if status == 200 else "refused"] += 1
        if status == 200 and reason:
            continue
        violation = violation_of(bad, status, answer)
        if violation is not None:
            violations.append(f"{bad.cause}: {violation}")
    print(f"\n{route.path}: {dict(count)}")
    assert not violations, "\n".join([f"{len(violations)} violations", *violations])
    assert target.ask() == target.answer


# Bodies that are no valid JSON object of a request, with what is wrong.
BODIES: Mapping[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "two objects": b"{}{}",
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a trailing comma": b'{"prompt": "a",}',
    "single quotes": b"{'prompt': 'a'}",
    "a comment": b'{"prompt": "a" /* b */}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "a number out of range": b'{"prompt": "a", "temperature": 1e999}',
    "deep lists": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "a million numbers": b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
    "a million keys": b"{" + b",".join(b'"k%d":1' % n for n in range(300_000)) + b"}",
    "a long key": b'{"' + b"k" * (1 << 20) + b'": 1}',
    "a long number": b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
    "a zero byte": b'{"prompt": "a\x00b"}',
    "too long": b'{"prompt": "' + b"a" * (17 << 20) + b'"}',
}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_body_that_is_no_request_is_refused(route: Route, target: Target) -> None:
    violations = []
    for kind, body in BODIES.items():
        try:
            status, answer = target.post(route.path, body)
        except (ConnectionError, http.client.HTTPException) as error:
            if kind != "too long":  # The server closes the connection before the end of the body.
                violations.append(f"{kind}: {error!r}")
            continue
        if status not in ERROR_STATUSES or not json.loads(answer):
            violations.append(f"{kind}: status {status}: {answer[:160]!r}")
    assert not violations, "\n".join(violations)
    assert target.ask() == target.answer


def refusal(call: Any, message: Any) -> str | None:
    """What is wrong with the answer to a bad message; None: nothing."""
    try:
        call(message, timeout=LIMIT_S)
    except grpc.RpcError as error:
        code, details = error.code().name, error.details() or ""
        is_refusal = code in REFUSALS and details and "internal" not in details.lower()
        return None if is_refusal else f"{code}: {details[:160]}"
    return "accepted"


# Values of messages that are accepted, by cause, with the reason.
ACCEPTED_MESSAGES: dict[str, str] = {
    "adapters: the base twice": "one answer for each entry",
    "time_limit_ms: the largest number": "a limit of 49 days",
}


def test_a_bad_message_is_refused(target: Target) -> None:
    violations = []
    with grpc.insecure_channel(target.server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = pb.GenerateRequest(text="one", max_new_tokens=2)
        for bad in bad_values(GENERATE):
            violation = refusal(stub.Generate, with_field(message, bad.field, bad.value))
            if violation == "accepted" and bad.cause in ACCEPTED_MESSAGES:
                continue
            if violation is not None:
                violations.append(f"{bad.cause}: {violation}")
            target.measure()
        adapters = adapters_pb2_grpc.AdapterServiceStub(channel)
        for method in ADAPTER_METHODS:
            request_type = getattr(adapters_pb2, f"{method}Request")
            for kind, name in ADAPTER_NAMES.items():
                violation = refusal(getattr(adapters, method), request_type(name=name))
                if violation is not None:
                    violations.append(f"{method} name: {kind}: {violation}")
    assert not violations, "\n".join([f"{len(violations)} violations", *violations])
    assert target.ask() == target.answer
