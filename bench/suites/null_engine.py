"""A server whose engine is nothing: what answers over its link costs no more than the messages.

Everything before the link is the true front end (gRPC, wires, admission, engine, streams), so what
its process spends is what serving costs beside the model. Every sequence gets a token a step, and
steps come at a steady pace, as ranks make them. Knows no model and no client.
"""

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc.aio
import torch

from bench.harness.offline_engine import GPT2_SMALL
from gpt.checkpoint.random_init import fresh
from gpt.errors import PreambleError
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.admission.auth import Access
from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.frontend.call import Front
from serving.messages import (
    Cancel,
    End,
    Load,
    Made,
    Ready,
    Submission,
    ToPlanner,
    Update,
    encode,
    from_planner,
)
from serving.protocols.grpc_services import handlers
from serving.service.metrics import Metrics
from serving.service.service import Found, Service

TOKEN = 1000


@dataclass
class _Running:
    number: int
    left: int  # Tokens.


class NullLink:
    """Answers whatever is sent: a token a step for each sequence. `spent_s` is its own CPU time."""

    refusal: PreambleError | None = None

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self._sent: deque[ToPlanner] = deque()
        self._came = threading.Event()
        self._closed = False
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._run, name="null-engine", daemon=True)
        self.spent_s = 0.0

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread.start()

    def send(self, message: ToPlanner) -> None:
        self._sent.append(message)
        self._came.set()

    def close(self, timeout_s: float = 10.0) -> None:
        self._closed = True
        self._came.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        assert self._receiver is not None
        self._receiver.ready(Ready(1 << 24, 1, "bfloat16"))
        running: dict[int, _Running] = {}
        steps, due = 0, time.monotonic()
        while not self._closed:
            if not running and not self._sent:
                self._came.wait(1.0)
                self._came.clear()
                due = time.monotonic() + self._step_s
                continue
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            due = max(due, time.monotonic() - self._step_s) + self._step_s
            begun = time.thread_time()
            steps += 1
            packed = encode(Update(self._step(running), Load(running=len(running), steps=steps)))
            self.spent_s += time.thread_time() - begun
            update = from_planner(packed)  # As bytes from another process are taken.
            assert isinstance(update, Update)
            self._receiver.update(update)

    def _step(self, running: dict[int, _Running]) -> list[Made]:
        made: list[Made] = []
        while self._sent:
            message = self._sent.popleft()
            if isinstance(message, Submission):
                count = message.sampling.max_new_tokens
                running[message.number] = _Running(message.number, count)
            elif isinstance(message, Cancel):
                gone = [number for number in message.numbers if running.pop(number, None)]
                made += [Made(number, end="cancelled") for number in gone]
        for one in list(running.values()):
            one.left -= 1
            end: End | None = None if one.left else "length"
            made.append(Made(one.number, [TOKEN + one.left % 1000], end=end))
            if end:
                del running[one.number]
        return made


def null_service(step_s: float, streams: int, gather_ms: float = 0.0) -> tuple[Service, NullLink]:
    """Open, with room for that many requests."""
    config = ServerConfig(
        "",
        running_requests_max=streams,
        queue_requests_max=streams,
        step_tokens_max=1 << 14,
        gather_ms=gather_ms,
    )
    tokenizer = NullTokenizer(GPT2_SMALL.vocab_size)
    found = Found(config, fresh(GPT2_SMALL, 0), tokenizer, torch.device("cpu"), None)
    link = NullLink(step_s)
    return Service(found).open(link), link


def serve_null(pipe: Connection, step_s: float, streams: int) -> None:
    """The whole of a process: says its port, then (CPU seconds, the null engine's) when asked."""
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, step_s, streams))


async def _serve(pipe: Connection, step_s: float, streams: int) -> None:
    service, link = null_service(step_s, streams)
    front = Front(Metrics(), Access())
    front.open(service)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(tuple(handlers(front)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    try:
        while await asyncio.to_thread(pipe.recv):
            pipe.send((time.process_time(), link.spent_s))
    finally:
        await server.stop(0)
        service.close()
