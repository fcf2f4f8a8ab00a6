"""AsyncClient: the asyncio client, with the same methods as `clients.client.Client`.

Arguments, return values, retries and errors are those of `Client`. An AsyncClient belongs to one
event loop; its calls can run concurrently.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from clients.client import PAGE_SIZE
from clients.options import (
    DEFAULT_OPTIONS,
    Options,
    Prompt,
    build_score_request,
    build_tokenize_request,
    fill_request,
)
from clients.responses import (
    Completion,
    Piece,
    Scores,
    read_completions,
    read_first_completion,
    read_piece,
    read_scores,
)
from clients.transport import (
    DEFAULT_RETRIES,
    Attempts,
    Retries,
    Tls,
    call_metadata,
    channel_options,
    read_call_error,
)
from protos.preamble.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2_grpc,
)
from protos.preamble.v1 import generation_pb2 as pb


class AsyncClient:
    """Asyncio client of the server at `address` (HOST:PORT). Close it, or use it in `async with`.

    Create it inside a running event loop. A cancelled task cancels its call.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 60.0,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.retries = retries
        self.metadata = call_metadata(token)
        options = channel_options(tls)
        self.channel = (
            grpc.aio.insecure_channel(address, options)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials, options)
        )
        self._generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(self.channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def generate(
        self, prompt: Prompt, options: Options = DEFAULT_OPTIONS, timeout_s: float | None = None
    ) -> Completion:
        """Return the first completion; use `completions` if the options request several."""
        message = fill_request(pb.GenerateRequest(), prompt, options)
        return read_first_completion(await self.call(self._generation.Generate, message, timeout_s))

    async def completions(
        self, prompt: Prompt, options: Options, timeout_s: float | None = None
    ) -> list[Completion]:
        """Return all completions, grouped by adapter in the order of `options.adapters`."""
        message = fill_request(pb.GenerateRequest(), prompt, options)
        return read_completions(await self.call(self._generation.Generate, message, timeout_s))

    async def stream(
        self, prompt: Prompt, options: Options = DEFAULT_OPTIONS, timeout_s: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield pieces of completions as they arrive; `aclose` the generator to cancel the call."""
        message = fill_request(pb.GenerateStreamRequest(), prompt, options)
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        has_started = False
        while True:
            call = self._generation.GenerateStream(
                message, timeout=attempts.remaining_s, metadata=self.metadata
            )
            try:
                async for response in call:
                    has_started = True
                    yield read_piece(response)
                return
            except grpc.aio.AioRpcError as error:
                failure = read_call_error(error, self.address)
            finally:
                call.cancel()
            if has_started:  # A retry would yield the same pieces again.
                raise failure
            await asyncio.sleep(attempts.next_wait_s(failure))

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str] = (),
        *,
        adapter: str = "",
        logprobs: int = 0,
        timeout_s: float | None = None,
        parse_special_tokens: bool = False,
        add_special_tokens: bool | None = None,
    ) -> Scores:
        """Score each continuation of the prompt; if there are none, score the prompt itself.

        For each scored token, the `logprobs` most likely tokens at its position are also returned.
        The last two arguments are those of `Options`.
        """
        message = build_score_request(
            prompt, continuations, adapter, logprobs, parse_special_tokens, add_special_tokens
        )
        return read_scores(await self.call(self._generation.Score, message, timeout_s))

    async def tokenize(
        self,
        text: str,
        *,
        parse_special_tokens: bool = False,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        message = build_tokenize_request(text, parse_special_tokens, add_special_tokens)
        return list((await self.call(self._generation.Tokenize, message)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        message = pb.DetokenizeRequest(token_ids=token_ids)
        return str((await self.call(self._generation.Detokenize, message)).text)

    async def adapters(self) -> list[adapters_pb2.Adapter]:
        """Return all adapters that the caller can use; they are fetched in pages of PAGE_SIZE."""
        adapters: list[adapters_pb2.Adapter] = []
        token = ""
        while True:
            message = adapters_pb2.ListAdaptersRequest(page_size=PAGE_SIZE, page_token=token)
            page = await self.call(self._adapters.ListAdapters, message)
            adapters += page.adapters
            token = page.next_page_token
            if not token:
                return adapters

    async def info(self) -> admin_pb2.GetServerInfoResponse:
        response = await self.call(self._admin.GetServerInfo, admin_pb2.GetServerInfoRequest())
        assert isinstance(response, admin_pb2.GetServerInfoResponse)
        return response

    async def load(self) -> admin_pb2.GetLoadResponse:
        """Return the current load of the server: requests, KV blocks, engine state."""
        response = await self.call(self._admin.GetLoad, admin_pb2.GetLoadRequest())
        assert isinstance(response, admin_pb2.GetLoadResponse)
        return response

    async def close(self) -> None:
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def call(self, method: Any, message: object, timeout_s: float | None = None) -> Any:
        """Call a unary method of a gRPC stub directly, with deadline and retries."""
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return await method(message, timeout=attempts.remaining_s, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                failure = read_call_error(error, self.address)
            await asyncio.sleep(attempts.next_wait_s(failure))
