"""Thirty thousand HTTP requests that nobody would send, over raw sockets, many at a time.

Each answer is whole, and blames the caller in the one shape of errors, or is right; and after them
all the server says what it said before, holds nothing, and is not larger.
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
    serving,
    write_adapter,
    write_checkpoint,
)

SEED = 1
EXCHANGES, WARM = 13_000, 1_500
MESSAGES_MIN = 30_000
AT_ONCE = 64
# A client that has not got all by then leaves. Nothing that is right takes so long.
PATIENCE_S = 1.0
IDLE_S = 1.0
# What may be told of load, of time, and of what is not served; anything else from 500 on is ours.
ALLOWED = {"UNSUPPORTED", "QUEUE_FULL", "DEADLINE_PASSED", "RATE_LIMITED"}
KINDS = ("text_completion", "chat.completion")  # What a completion says it is.
ASKED = {"model": "sum", "prompt": "hello world", "max_tokens": 20, "temperature": 0}


class Fuzz:
    """So many exchanges, and what came back."""

    def __init__(self, server: Server, seed: int, right: str) -> None:
        self._http, self._grpc = (
            int(address.rpartition(":")[2]) for address in (server.http_address, server.address)
        )
        self._seed, self._right = seed, right
        self._known = server.get("/nowhere")[1].partition("known are: ")[2].partition('"')[0]
        self.messages = self.silent = 0
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []  # What was found, each with the number of its exchange.

    async def run(self, numbers: range) -> None:
        left = iter(numbers)

        async def work() -> None:
            for number in left:
                if number % 50 == 0:
                    await self._ask(number)
                await self._one(number, exchange(self._seed, number, self._known.split(", ")))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _ask(self, number: int) -> None:
        """Between the others, one that is right."""
        body = json.dumps(ASKED).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        data = f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        said, ended = await self._sent(Exchange(data), patience_s=WAIT_S)
        if not said and not ended:
            said, _ = await self._sent(Exchange(data), patience_s=WAIT_S)
        if [text_of(one) for one in replies(said)] != [self._right]:
            self.wrong.append(f"{number}: {said[-500:]!r} to a request that is right")

    async def _one(self, number: int, one: Exchange) -> None:
        said, ended = await self._sent(one)
        answers: list[Reply] = []
        try:
            answers = [] if one.other else replies(said)
        except TornError as error:
            if ended:
                self.wrong.append(f"{number}: torn {error.args} in {said[-300:]!r}")
        self.messages += max(1, len(answers))
        self.silent += not answers
        for answer in answers:
            self.wrong += [f"{number}: {what}" for what in self._look(answer)]
        if ended and one.end == "wait" and one.data.endswith(PROBE) and not answers:
            self.wrong.append(f"{number}: no answer to {one.data[:300]!r}")

    def _look(self, answer: Reply) -> list[str]:
        """What is not right about it."""
        try:
            told = [one["error"] for one in errors_in(answer)]
            reasons = [REASONS[one["code"]] for one in told]
            shaped = all(
                set(one) == {"message", "type", "param", "code"} and one["message"] for one in told
            )
        except (ValueError, KeyError, TypeError):
            return [f"{answer.status} {answer.body[:300]!r} has no shape"]
        said = [kind for kind in KINDS if f'"object":"{kind}'.encode() in answer.body]
        names = [reason.name for reason in reasons] or said[:1] or [str(answer.status)]
        self.ended.update(names)
        statuses = {answer.status} if answer.status >= 400 else {r.status for r in reasons}
        bad = [r for r in reasons if r.status >= 500 and r.name not in ALLOWED]
        if bad or not shaped or (reasons and statuses != {reasons[0].status}):
            return [f"{answer.status} {answer.body[:300]!r}"]
        return []

    async def _sent(self, one: Exchange, patience_s: float = PATIENCE_S) -> tuple[bytes, bool]:
        """What comes back, and whether that was all: until the server closes, or we do."""
        port = self._grpc if one.other else self._http
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said, ended, late = bytearray(), False, False
        try:
            async with asyncio.timeout(patience_s):
                writer.write(one.data)
                await writer.drain()
                late = time.monotonic() - began > IDLE_S / 2  # It may have been ended as idle.
                if one.end == "cut":
                    return b"", False
                if one.end == "half":
                    writer.write_eof()
                while more := await reader.read(1 << 16):
                    said += more
                ended = bool(said) or not late
        except OSError:  # Of which a TimeoutError is one.
            pass
        finally:
            writer.transport.abort()
        return bytes(said), ended


def text_of(answer: Reply) -> str:
    return str(json.loads(answer.body)["choices"][0]["text"]) if answer.status == 200 else ""


def connections(server: Server) -> int:
    """Sockets that the server holds, its own and its clients', of which one may just close."""
    count = 0
    for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(fd.readlink()).startswith("socket:")
    return count


def idle(server: Server) -> bool:
    states = ("requests_in_flight", "scheduler_running_requests", "scheduler_waiting_requests")
    return all(server.metric(f"preamble_{state}") == 0 for state in (*states, "kv_blocks_held"))


@pytest.mark.slow
def test_no_request_over_http_harms_the_server(tmp_path: Path) -> None:
    checkpoint, adapters = write_checkpoint(tmp_path), tmp_path / "adapters"
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
        harmed(server, log)


def harmed(server: Server, log: Path) -> None:
    options = Options(adapter="sum", max_new_tokens=20)
    with server.client() as client:
        right = client.generate("hello world", options).text
        fuzz = Fuzz(server, SEED, right)
        asyncio.run(fuzz.run(range(EXCHANGES, EXCHANGES + WARM)))
        eventually(lambda: idle(server))
        size, began = anonymous_bytes(server.process.pid), time.monotonic()
        open_before = connections(server)
        asyncio.run(fuzz.run(range(EXCHANGES)))
        took_s = time.monotonic() - began
        eventually(lambda: idle(server))
        eventually(lambda: connections(server) <= open_before)
        grown = anonymous_bytes(server.process.pid) - size
        assert client.generate("hello world", options).text == right
    print(f"seed {SEED}: {fuzz.messages} requests in {took_s:.0f} s")
    print(dict(fuzz.ended.most_common()), f"{fuzz.silent} exchanges without an answer")
    print(f"the front end grew by {grown / 2**20:.0f} MiB")
    assert not fuzz.wrong, "\n".join([f"{len(fuzz.wrong)} with seed {SEED}:", *fuzz.wrong[:20]])
    assert fuzz.messages >= MESSAGES_MIN
    assert server.get("/health/ready") == (200, "ready\n")
    said = log.read_text()
    faults = ("Traceback", "event=call_failed", "event=http_failed", "exception")
    assert not [fault for fault in faults if fault in said], said[-3000:]
    # What is nearly right got through, and what is not was told apart.
    assert not [kind for kind in KINDS if fuzz.ended[kind] < 200]
    common = ("INVALID_FIELD", "UNREADABLE", "UNKNOWN_PATH", "WRONG_METHOD", "UNKNOWN_MODEL")
    assert not [name for name in (*common, "BODY_TOO_LARGE", "200") if fuzz.ended[name] < 50]
    # Of each request a few kilobytes are free memory in between others; what is lost would be more.
    assert grown < 96 << 20
