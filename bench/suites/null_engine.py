"""Null engine: a transport that returns fixed tokens, to time the front end alone.

The process has the gRPC server, protocols, admission, engine and streams of a real server. Its CPU
time is therefore the cost of serving without the model. Every sequence gets one token per step, at
a steady interval.
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
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.errors import PreambleError
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.admission.auth import Authenticator
from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.frontend.call import Frontend
from serving.messages import (
    Cancel,
    EndReason,
    EngineStats,
    Ready,
    SequenceOutput,
    Submission,
    ToEngineLoop,
    Update,
    decode_from_engine_loop,
    encode,
)
from serving.protocols.grpc_services import handlers
from serving.service.metrics import Metrics
from serving.service.service import ServableCheckpoint, Service

FIRST_TOKEN_ID = 1000


@dataclass
class _NullSequence:
    number: int
    tokens_left: int


class NullTransport:
    """A transport that returns one token per step and sequence; `cpu_s` is its CPU time."""

    refusal: PreambleError | None = None

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self._messages: deque[ToEngineLoop] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._run, name="null-engine", daemon=True)
        self.cpu_s = 0.0

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread.start()

    def send(self, message: ToEngineLoop) -> None:
        self._messages.append(message)
        self._wake.set()

    def close(self, timeout_s: float = 10.0) -> None:
        self._closed = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        assert self._receiver is not None
        self._receiver.ready(Ready(1 << 24, 1, "bfloat16"))
        running: dict[int, _NullSequence] = {}
        steps, next_step_at = 0, time.monotonic()
        while not self._closed:
            if not running and not self._messages:
                self._wake.wait(1.0)
                self._wake.clear()
                next_step_at = time.monotonic() + self._step_s
                continue
            wait_s = next_step_at - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            next_step_at = max(next_step_at, time.monotonic() - self._step_s) + self._step_s
            start = time.thread_time()
            steps += 1
            packed = encode(
                Update(self._step(running), EngineStats(running=len(running), steps=steps))
            )
            self.cpu_s += time.thread_time() - start
            # Decoding is work of the front end, so its time is not part of `cpu_s`.
            update = decode_from_engine_loop(packed)
            assert isinstance(update, Update)
            self._receiver.update(update)

    def _step(self, running: dict[int, _NullSequence]) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, Submission):
                count = message.sampling.max_new_tokens
                running[message.sequence_id] = _NullSequence(message.sequence_id, count)
            elif isinstance(message, Cancel):
                cancelled = [number for number in message.sequence_ids if running.pop(number, None)]
                outputs += [SequenceOutput(number, end="cancelled") for number in cancelled]
        for sequence in list(running.values()):
            sequence.tokens_left -= 1
            end: EndReason | None = None if sequence.tokens_left else "length"
            outputs.append(
                SequenceOutput(
                    sequence.number, [FIRST_TOKEN_ID + sequence.tokens_left % 1000], end=end
                )
            )
            if end:
                del running[sequence.number]
        return outputs


def null_service(
    step_s: float, streams: int, gather_ms: float = 0.0
) -> tuple[Service, NullTransport]:
    """Open a service on a null transport that runs `streams` requests at once."""
    config = ServerConfig(
        "",
        running_requests_max=streams,
        queue_requests_max=streams,
        step_tokens_max=1 << 14,
        gather_ms=gather_ms,
    )
    tokenizer = NullTokenizer(GPT2_SMALL.vocab_size)
    servable = ServableCheckpoint(
        checkpoint=random_init_checkpoint(GPT2_SMALL, 0),
        tokenizer=tokenizer,
        proof=None,
        config=config,
        device=torch.device("cpu"),
    )
    transport = NullTransport(step_s)
    return Service(servable).open(transport), transport


def serve_null(pipe: Connection, step_s: float, streams: int) -> None:
    """Run a null-engine server in this process until the pipe receives False.

    The function sends the port of the server through the pipe. It answers each True with (CPU
    seconds of the process, CPU seconds of the null engine).
    """
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, step_s, streams))


async def _serve(pipe: Connection, step_s: float, streams: int) -> None:
    service, transport = null_service(step_s, streams)
    front = Frontend(Metrics(), Authenticator())
    front.attach_service(service)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(tuple(handlers(front)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    try:
        while await asyncio.to_thread(pipe.recv):
            pipe.send((time.process_time(), transport.cpu_s))
    finally:
        await server.stop(0)
        service.close()
