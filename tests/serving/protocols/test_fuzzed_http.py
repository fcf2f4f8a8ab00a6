"""Fuzzing of the HTTP port: thirty thousand malformed requests over raw sockets, concurrently.

Each response is complete, and is either an error that blames the caller in the one error format, or
correct. Afterwards the server gives the same answers, holds no request, and has not grown.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from clients.client import Options
from serving.service.error_reasons import REASONS
from tests.support.broken.http_requests import (
    PROBE,
    Exchange,
    Reply,
    TornError,
    errors_in,
    exchange,
    replies,
)
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import (
    WAIT_S,
    Server,
    eventually,
    is_idle,
    serving,
    write_adapter,
    write_checkpoint,
)
from tests.support.suites import by_suite

SEED = 1
WARM = 1_500
MESSAGES_MIN = 30 / 13  # Mean number of requests of an exchange.
AT_ONCE = 64
# A client without a full response by then disconnects. No valid request takes so long.
PATIENCE_S = 1.0
IDLE_S = 1.0
# Errors of load, time and unsupported features; any other status from 500 on is a server fault.
ALLOWED = {"UNSUPPORTED", "QUEUE_FULL", "DEADLINE_PASSED", "RATE_LIMITED"}
KINDS = ("text_completion", "chat.completion")  # The `object` field of a completion.
# Statuses from 500 on that ALLOWED errors have in the formats of KServe and TGI.
ALLOWED_STATUSES = {501, 504}
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "surface.json"
MODEL_PATHS = [f"/v2/models/preamble/{name}" for name in ("infer", "generate", "generate_stream")]
PATHS = [*json.loads(GOLDEN.read_text())["server"]["http_routes"], *MODEL_PATHS]
VALID_BODY = {"model": "sum", "prompt": "hello world", "max_tokens": 20, "temperature": 0}


class Fuzz:
    """Runs exchanges, and checks their responses."""

    def __init__(self, server: Server, seed: int, right: str) -> None:
        self._http, self._grpc = (
            int(address.rpartition(":")[2]) for address in (server.http_address, server.address)
        )
        self._seed = seed
        self._expected = right
        self.messages = self.silent = 0
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []  # Violations, each with the number of its exchange.

    async def run(self, numbers: range) -> None:
        remaining = iter(numbers)

        async def work() -> None:
            for number in remaining:
                if number % 50 == 0:
                    await self._send_valid(number)
                await self._send_exchange(number, exchange(self._seed, number, PATHS))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _send_valid(self, number: int) -> None:
        """Send a valid request between the exchanges."""
        body = json.dumps(VALID_BODY).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        payload = f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        received, complete = await self._send(Exchange(payload), patience_s=WAIT_S)
        if not received and not complete:
            received, _ = await self._send(Exchange(payload), patience_s=WAIT_S)
        if [text_of(reply) for reply in replies(received)] != [self._expected]:
            self.violations.append(f"{number}: {received[-500:]!r} to a request that is right")

    async def _send_exchange(self, number: int, exchange_: Exchange) -> None:
        received, complete = await self._send(exchange_)
        responses: list[Reply] = []
        try:
            responses = [] if exchange_.to_grpc_port else replies(received)
        except TornError as error:
            if complete:
                self.violations.append(f"{number}: torn {error.args} in {received[-300:]!r}")
        self.messages += max(1, len(responses))
        self.silent += not responses
        for response in responses:
            self.violations += [
                f"{number}: {violation}" for violation in self._violations(response)
            ]
        if (
            complete
            and exchange_.end == "wait"
            and exchange_.data.endswith(PROBE)
            and not responses
        ):
            self.violations.append(f"{number}: no answer to {exchange_.data[:300]!r}")

    def _violations(self, response: Reply) -> list[str]:
        """Violations in a response."""
        try:
            bodies = errors_in(response)
            # The error formats of KServe and TGI have a text, and OpenAI's format has an object.
            # vLLM's adapter routes have OpenAI's format with the status as code.
            text_bodies = [body for body in bodies if isinstance(body["error"], str)]
            errors = [body["error"] for body in bodies if body not in text_bodies]
            vllm_errors = [error for error in errors if isinstance(error["code"], int)]
            reasons = [REASONS[error["code"]] for error in errors if error not in vllm_errors]
            shaped = all(
                set(error) == {"message", "type", "param", "code"} and error["message"]
                for error in errors
            ) and all(error["code"] == response.status for error in vllm_errors)
            shaped &= all(
                set(body) <= {"error", "error_type"} and body["error"] for body in text_bodies
            )
        except (ValueError, KeyError, TypeError):
            return [f"{response.status} {response.body[:300]!r} has no shape"]
        kinds = [kind for kind in KINDS if f'"object":"{kind}'.encode() in response.body]
        names = [reason.name for reason in reasons] or kinds[:1] or [str(response.status)]
        self.outcomes.update(names)
        statuses = {response.status} if response.status >= 400 else {r.status for r in reasons}
        faults = [r for r in reasons if r.status >= 500 and r.name not in ALLOWED]
        is_fault = response.status >= 500 and response.status not in ALLOWED_STATUSES
        if (text_bodies or vllm_errors) and is_fault:
            return [f"{response.status} {response.body[:300]!r}"]
        if faults or not shaped or (reasons and statuses != {reasons[0].status}):
            return [f"{response.status} {response.body[:300]!r}"]
        return []

    async def _send(
        self, exchange_: Exchange, patience_s: float = PATIENCE_S
    ) -> tuple[bytes, bool]:
        """The received bytes, and whether the exchange is complete: until either side closes."""
        port = self._grpc if exchange_.to_grpc_port else self._http
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = bytearray()
        complete = False
        may_be_idle = False
        try:
            async with asyncio.timeout(patience_s):
                writer.write(exchange_.data)
                await writer.drain()
                may_be_idle = (
                    time.monotonic() - start > IDLE_S / 2
                )  # It may be disconnected as idle.
                if exchange_.end == "cut":
                    return b"", False
                if exchange_.end == "half":
                    writer.write_eof()
                while chunk := await reader.read(1 << 16):
                    received += chunk
                complete = bool(received) or not may_be_idle
        except OSError:  # Including TimeoutError.
            pass
        finally:
            writer.transport.abort()
        return bytes(received), complete


def text_of(response: Reply) -> str:
    return str(json.loads(response.body)["choices"][0]["text"]) if response.status == 200 else ""


def open_sockets(server: Server) -> int:
    """Sockets of the server: listening ones and connections, one of which may just close."""
    count = 0
    for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(fd.readlink()).startswith("socket:")
    return count


@pytest.mark.parametrize("exchanges", by_suite(5_000, 13_000))
def test_malformed_http_requests_do_not_affect_the_server(exchanges: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    write_adapter(adapters / "sum.safetensors", checkpoint, [5, 6, 7])
    template = tmp_path / "chat.jinja"
    template.write_text("{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}")
    limits: dict[str, object] = {
        "slow_reader_s": 1.0,
        "http_idle_s": IDLE_S,
        "message_bytes_max": 1 << 20,
    }
    limits |= {"adapters": str(adapters), "chat_template": str(template)}
    log = tmp_path / "log"
    with serving(checkpoint, tmp_path / "settings.yaml", log, **limits) as server:
        fuzz_and_check(server, log, exchanges)


def fuzz_and_check(server: Server, log: Path, exchanges: int) -> None:
    options = Options(adapter="sum", max_new_tokens=20)
    with server.client() as client:
        expected = client.generate("hello world", options).text
        fuzz = Fuzz(server, SEED, expected)
        asyncio.run(fuzz.run(range(exchanges, exchanges + WARM)))
        eventually(lambda: is_idle(server))
        size = anonymous_bytes(server.process.pid)
        start = time.monotonic()
        open_before = open_sockets(server)
        asyncio.run(fuzz.run(range(exchanges)))
        took_s = time.monotonic() - start
        eventually(lambda: is_idle(server))
        eventually(lambda: open_sockets(server) <= open_before)
        growth = anonymous_bytes(server.process.pid) - size
        assert client.generate("hello world", options).text == expected
    print(f"seed {SEED}: {fuzz.messages} requests in {took_s:.0f} s")
    print(dict(fuzz.outcomes.most_common()), f"{fuzz.silent} exchanges without an answer")
    print(f"the front end grew by {growth / 2**20:.0f} MiB")
    assert not fuzz.violations, "\n".join(
        [f"{len(fuzz.violations)} with seed {SEED}:", *fuzz.violations[:20]]
    )
    assert fuzz.messages >= MESSAGES_MIN * exchanges
    assert server.get("/health/ready") == (200, "ready\n")
    log_text = log.read_text()
    faults = ("Traceback", "event=call_failed", "event=http_failed", "exception")
    assert not [fault for fault in faults if fault in log_text], log_text[-3000:]
    # Valid requests succeeded, and invalid ones were told apart.
    assert not [kind for kind in KINDS if fuzz.outcomes[kind] < 200]
    common = ("INVALID_FIELD", "UNREADABLE", "UNKNOWN_PATH", "WRONG_METHOD", "UNKNOWN_MODEL")
    assert not [name for name in (*common, "BODY_TOO_LARGE", "200") if fuzz.outcomes[name] < 50]
    # Fragmented free memory is a few kilobytes per request; a leak would be more.
    assert growth < 96 << 20
