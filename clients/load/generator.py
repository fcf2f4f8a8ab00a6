"""Load generator: sends open-loop (Poisson) or closed-loop streaming requests, and times each call.

Open loop: calls start at the times of a Poisson process, whether or not earlier calls have ended.
TTFT and end-to-end time count from the scheduled start, so a late start does not reduce them.
Closed loop: a fixed number of calls is in flight. `clients.load.report` computes the figures.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from clients.transport import Tls, call_metadata, channel_options, read_call_error
from protos.preamble.v1 import admin_pb2
from protos.preamble.v1 import generation_pb2 as pb

SERVICE_CLASSES: Mapping[str, pb.ServiceClass] = {
    "latency": pb.SERVICE_CLASS_LATENCY,
    "throughput": pb.SERVICE_CLASS_THROUGHPUT,
}
GENERATE_STREAM_METHOD = "/preamble.v1.GenerationService/GenerateStream"
SERVER_INFO_METHOD = "/preamble.v1.AdminService/GetServerInfo"
WARMUP_CONCURRENCY = 8


class LoadError(Exception):
    """The load cannot run with these settings; the message says what to change."""


@dataclass(frozen=True)
class LengthSampler:
    """Draws token counts: fixed, uniform over a range, or exponential with a mean."""

    kind: Literal["fixed", "range", "mean"]
    low: int  # The lower bound, the fixed count or the mean.
    high: int  # The upper bound; equals `low` unless `kind` is "range".

    @classmethod
    def parse(cls, text: str) -> "LengthSampler":
        """Parse `128` (fixed), `64-256` (range) or `~128` (mean)."""
        low, dash, high = text.removeprefix("~").partition("-")
        try:
            numbers = int(low), int(high or low)
        except ValueError:
            numbers = 0, 0
        if not 0 < numbers[0] <= numbers[1] or (dash and text.startswith("~")):
            raise LoadError(
                f"{text!r} is not a length; give tokens as 128, 64-256 or ~128 (a mean)"
            )
        return cls("mean" if text.startswith("~") else "range" if dash else "fixed", *numbers)

    def sample(self, rng: random.Random, tokens_max: int) -> int:
        if self.kind == "mean":
            return max(1, min(tokens_max, round(rng.expovariate(1 / self.low))))
        return min(tokens_max, rng.randint(self.low, self.high))


@dataclass(frozen=True)
class DatasetPrompt:
    """One line of a dataset. For a field that is None, the value of the `LoadSpec` is used."""

    prompt: str | list[int] | dict[str, str]
    new_tokens: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class LoadSpec:
    """The load: arrivals, prompts and lengths."""

    rate: float | None = None  # Open loop: requests per second. None: closed loop.
    concurrency: int = 1  # Closed loop: calls in flight.
    requests_max: int | None = 100  # None: only `duration_s` limits the load.
    duration_s: float | None = None  # No call starts after this time. None: no limit.
    warmup_requests: int = 4  # Number of requests that are sent first and not measured.
    prompt_length: LengthSampler = LengthSampler("fixed", 128, 128)
    output_length: LengthSampler = LengthSampler("fixed", 128, 128)
    # Calls use the prompts of the dataset in turn. Empty: prompts of random ids.
    dataset: tuple[DatasetPrompt, ...] = ()
    adapters: tuple[str, ...] = ("",)  # Calls use these adapters in turn.
    service_class: str = "latency"
    timeout_s: float = 120.0  # Timeout of each call.
    seed: int = 0


@dataclass
class CallRecord:
    """Times and tokens of one call. Times are in seconds since the start of the load."""

    due_s: float  # Scheduled start, from which TTFT and end-to-end time count.
    started_s: float = 0.0
    # Times of the first and the last message with tokens. None: no message had tokens.
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0  # 0: unknown, for a prompt that is not token ids.
    # Time and token count of each message with tokens.
    messages: list[tuple[float, int]] = field(default_factory=list)
    code: str = "OK"
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.code == "OK"

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.messages)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: (last_token_s - first_token_s) / tokens after the first message.

        None if there are no tokens after the first message.
        """
        later_tokens = self.tokens - self.messages[0][1] if self.messages else 0
        if self.first_token_s is None or self.last_token_s is None or later_tokens <= 0:
            return None
        return (self.last_token_s - self.first_token_s) / later_tokens

    @property
    def message_gaps(self) -> list[tuple[float, int]]:
        """The gaps between consecutive messages: (seconds, token count of the later message)."""
        pairs = itertools.pairwise(self.messages)
        return [(after - before, count) for (before, _), (after, count) in pairs]


@dataclass(frozen=True)
class LoadRun:
    """The calls of a finished load."""

    calls: list[CallRecord]
    seconds: float  # From the start of the load to the end of the last call.
    cpu_s: float  # CPU time of the generator process.
    open_loop: bool

    @property
    def start_delays_s(self) -> list[float]:
        """Delay of each call's start behind its schedule; empty for a closed loop."""
        return [call.started_s - call.due_s for call in self.calls] if self.open_loop else []


Metadata = tuple[tuple[str, str], ...]
# Called with the number of calls in flight, the number of finished calls, and the seconds so far.
ProgressCallback = Callable[[int, int, float], None]


@dataclass(frozen=True)
class ServerEndpoint:
    """Address and credentials of the server."""

    address: str  # HOST:PORT.
    token: str | None = None
    tls: Tls | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def open_channel(self) -> grpc.aio.Channel:
        # Retries are off, because a refused call must count as an error.
        options = [*channel_options(self.tls), ("grpc.enable_retries", 0)]
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self.tls.credentials, options=options)


def run_load(
    endpoint: ServerEndpoint, spec: LoadSpec, progress: ProgressCallback | None = None
) -> LoadRun:
    """Run the load, and return the records of all calls."""
    return asyncio.run(run_load_async(endpoint, spec, progress))


async def run_load_async(
    endpoint: ServerEndpoint, spec: LoadSpec, progress: ProgressCallback | None = None
) -> LoadRun:
    async with endpoint.open_channel() as channel:
        metadata = call_metadata(endpoint.token, endpoint.metadata)
        return await _LoadGenerator(
            channel, spec, await _server_limits(channel, metadata, endpoint.address), metadata
        ).run(progress)


async def _server_limits(
    channel: grpc.aio.Channel, metadata: Metadata, address: str
) -> tuple[int, int]:
    """Return the vocabulary size and the context length of the model."""
    get_server_info = channel.unary_unary(
        SERVER_INFO_METHOD,
        request_serializer=admin_pb2.GetServerInfoRequest.SerializeToString,
        response_deserializer=admin_pb2.GetServerInfoResponse.FromString,
    )
    try:
        response = await get_server_info(
            admin_pb2.GetServerInfoRequest(), timeout=30.0, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        failure = read_call_error(error, address)
        raise LoadError(
            f"GetServerInfo failed ({failure.code}: {failure}); check --server and --token"
        ) from None
    return response.model.vocabulary_size, response.model.context_tokens_max


class _LoadGenerator:
    """Sends the calls of one load and records them."""

    def __init__(
        self, channel: grpc.aio.Channel, spec: LoadSpec, limits: tuple[int, int], metadata: Metadata
    ) -> None:
        self._spec = spec
        self._metadata = metadata
        self._vocab_size, self._context_tokens_max = limits
        self._rng = random.Random(spec.seed)
        self._stream_call: Any = channel.unary_stream(
            GENERATE_STREAM_METHOD,
            request_serializer=pb.GenerateStreamRequest.SerializeToString,
            response_deserializer=pb.GenerateStreamResponse.FromString,
        )
        self._start = 0.0
        self._calls: list[CallRecord] = []

    async def run(self, progress: ProgressCallback | None) -> LoadRun:
        await self._warm_up()
        progress_task = asyncio.create_task(self._report_progress(progress)) if progress else None
        cpu_s, self._start = time.process_time(), time.perf_counter()
        try:
            await (
                self._run_closed_loop()
                if self._spec.rate is None
                else self._run_open_loop(self._spec.rate)
            )
        finally:
            if progress_task is not None:
                progress_task.cancel()
        seconds = max((call.ended_s for call in self._calls), default=0.0)
        cpu_used_s = time.process_time() - cpu_s
        return LoadRun(self._calls, seconds, cpu_used_s, self._spec.rate is not None)

    async def _warm_up(self) -> None:
        semaphore = asyncio.Semaphore(WARMUP_CONCURRENCY)

        async def send_warmup(message: pb.GenerateStreamRequest) -> None:
            async with semaphore:
                await self._send(message, CallRecord(0.0))

        warmup_messages = itertools.islice(self._messages(), self._spec.warmup_requests)
        await asyncio.gather(*(send_warmup(message) for message, _ in warmup_messages))

    async def _run_open_loop(self, rate: float) -> None:
        """Start calls at the times of a Poisson process, whatever the responses."""
        arrivals = random.Random(self._spec.seed + 1)
        due_s, tasks = 0.0, []
        for message, length in self._limited_messages():
            due_s += arrivals.expovariate(rate)
            if self._spec.duration_s is not None and due_s > self._spec.duration_s:
                break
            wait_s = due_s - self._now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            call = self._record_call(CallRecord(due_s, prompt_tokens=length))
            tasks.append(asyncio.create_task(self._send(message, call)))
        await asyncio.gather(*tasks)

    async def _run_closed_loop(self) -> None:
        messages = self._limited_messages()

        async def send_in_sequence() -> None:
            for message, length in messages:
                if self._spec.duration_s is not None and self._now() > self._spec.duration_s:
                    return
                call = self._record_call(CallRecord(self._now(), prompt_tokens=length))
                await self._send(message, call)

        await asyncio.gather(*(send_in_sequence() for _ in range(self._spec.concurrency)))

    def _record_call(self, call: CallRecord) -> CallRecord:
        self._calls.append(call)
        return call

    async def _send(self, message: pb.GenerateStreamRequest, call: CallRecord) -> None:
        call.started_s = self._now()
        try:
            timeout_s = self._spec.timeout_s
            async for response in self._stream_call(
                message, timeout=timeout_s, metadata=self._metadata
            ):
                if tokens := len(response.token_ids):
                    call.last_token_s = self._now()
                    call.first_token_s = (
                        call.last_token_s if call.first_token_s is None else call.first_token_s
                    )
                    call.messages.append((call.last_token_s, tokens))
                if response.HasField("failure"):
                    call.code = "FAILED"
                    call.reason = response.failure.reason
        except grpc.aio.AioRpcError as error:
            failure = read_call_error(error)
            call.code = failure.code
            call.reason = failure.reason
        call.ended_s = self._now()

    def _limited_messages(self) -> Iterator[tuple[pb.GenerateStreamRequest, int]]:
        return itertools.islice(self._messages(), self._spec.requests_max)

    def _messages(self) -> Iterator[tuple[pb.GenerateStreamRequest, int]]:
        """Yield requests without end, each with the token count of its prompt (0: unknown)."""
        spec = self._spec
        for index in itertools.count():
            new_tokens = spec.output_length.sample(self._rng, max(1, self._context_tokens_max - 1))
            dataset_prompt = spec.dataset[index % len(spec.dataset)] if spec.dataset else None
            if dataset_prompt is None:
                length = spec.prompt_length.sample(
                    self._rng, max(1, self._context_tokens_max - new_tokens)
                )
                dataset_prompt = DatasetPrompt(self._rng.choices(range(self._vocab_size), k=length))
            new_tokens = dataset_prompt.new_tokens or new_tokens
            adapter = spec.adapters[index % len(spec.adapters)]
            message = pb.GenerateStreamRequest(
                adapter=adapter if dataset_prompt.adapter is None else dataset_prompt.adapter,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                service_class=SERVICE_CLASSES[spec.service_class],
            )
            if isinstance(dataset_prompt.prompt, str):
                message.text = dataset_prompt.prompt
            elif isinstance(dataset_prompt.prompt, dict):
                message.inputs.fields.update(dataset_prompt.prompt)
            else:
                message.token_ids.ids.extend(dataset_prompt.prompt)
            yield (
                message,
                len(dataset_prompt.prompt) if isinstance(dataset_prompt.prompt, list) else 0,
            )

    async def _report_progress(self, progress: ProgressCallback) -> None:
        while True:
            await asyncio.sleep(1.0)
            finished = sum(call.ended_s > 0 for call in self._calls)
            progress(len(self._calls) - finished, finished, self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._start


def read_dataset(path: Path) -> tuple[DatasetPrompt, ...]:
    """Read a dataset: JSON lines in the format that `_parse_prompt` describes."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read ({error}); give a readable text file") from None
    prompts = [
        _parse_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise LoadError(f"{path} has no lines; write one prompt per line, as JSON")
    return tuple(prompts)


def _parse_prompt(path: Path, number: int, line: str) -> DatasetPrompt:
    expected_format = (
        '{"prompt": TEXT or IDS} or {"inputs": {NAME: TEXT}}, with optional new_tokens and adapter'
    )
    try:
        record = json.loads(line)
        prompt = record["inputs"] if "inputs" in record else record["prompt"]
        new_tokens, adapter = record.get("new_tokens"), record.get("adapter")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{path}:{number} is not {expected_format}") from None
    is_valid = isinstance(prompt, str | dict) or (
        isinstance(prompt, list)
        and all(isinstance(token_id, int) and token_id >= 0 for token_id in prompt)
    )
    is_valid &= new_tokens is None or (isinstance(new_tokens, int) and new_tokens > 0)
    if not is_valid or not isinstance(adapter, str | None):
        raise LoadError(f"{path}:{number} is not {expected_format}")
    return DatasetPrompt(prompt, new_tokens, adapter)
