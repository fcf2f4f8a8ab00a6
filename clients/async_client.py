"""AsyncClient: the asyncio client, with the same methods as `clients.client.Client`.

Arguments, return values, retries and errors are those of `Client`. An AsyncClient belongs to one
event loop; its calls can run concurrently.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType, TracebackType
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
    read_scores,
)
from clients.resumption import StreamState
from clients.servers import Balance, Method, Servers
from clients.transport import (
    DEFAULT_RETRIES,
    Attempts,
    Retries,
    Tls,
    call_metadata,
    read_call_error,
)
from protos.preamble.v1 import adapters_pb2, admin_pb2
from protos.preamble.v1 import generation_pb2 as pb


class AsyncClient:
    """Asyncio client of the servers at `address`. Close it, or use it in `async with`.

    Create it inside a running event loop. A cancelled task cancels its call.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        timeout_s: float = 60.0,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retries: Retries = DEFAULT_RETRIES,
        balance: Balance = "round_robin",
        tenant: str = "",
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.retries = retries
        self.metadata = call_metadata(token, metadata)

        def open_channel(address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
            if tls is None:
                return grpc.aio.insecure_channel(address, options)
            return grpc.aio.secure_channel(address, tls.credentials, options)

        self._servers = Servers(address, open_channel, tls, balance, tenant)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the first address, for the stubs of other services."""
        channel: grpc.aio.Channel = self._servers.all[0].channel
        return channel

    async def generate(
        self, prompt: Prompt, options: Options = DEFAULT_OPTIONS, timeout_s: float | None = None
    ) -> Completion:
        """Return the first completion; use `completions` if the options request several."""
        message = fill_request(pb.GenerateRequest(), prompt, options)
        return read_first_completion(
            await self.call(
                attrgetter("generation.Generate"),
                message,
                timeout_s,
                adapter=options.requested_adapter,
            )
        )

    async def completions(
        self, prompt: Prompt, options: Options, timeout_s: float | None = None
    ) -> list[Completion]:
        """Return all completions, grouped by adapter in the order of `options.adapters`."""
        message = fill_request(pb.GenerateRequest(), prompt, options)
        return read_completions(
            await self.call(
                attrgetter("generation.Generate"),
                message,
                timeout_s,
                adapter=options.requested_adapter,
            )
        )

    async def stream(
        self, prompt: Prompt, options: Options = DEFAULT_OPTIONS, timeout_s: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield pieces of completions as they arrive; `aclose` the generator to cancel the call."""
        message = fill_request(pb.GenerateStreamRequest(), prompt, options)
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        state, route = StreamState(message), self._servers.route(options.requested_adapter)
        while True:
            server = route.next_server()
            call = server.generation.GenerateStream(
                state.next_request(server.address),
                timeout=attempts.remaining_s,
                metadata=(*self.metadata, *route.metadata),
            )
            try:
                async for response in call:
                    yield state.read(response)
                return
            except grpc.aio.AioRpcError as error:
                failure = read_call_error(error, server.address)
            finally:
                call.cancel()
            if state.has_ended:  # Only the status of the call was lost.
                return
            fails_over = route.record_failure(failure)
            if not state.has_started:
                wait_s = attempts.next_wait_s(failure, fails_over=fails_over)
            elif state.can_resume:
                wait_s = attempts.resumption_wait_s(
                    failure, fails_over=fails_over, was_refused=state.is_refused
                )
            else:  # A retry would yield the same pieces again.
                raise failure
            await asyncio.sleep(wait_s)

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
        return read_scores(
            await self.call(attrgetter("generation.Score"), message, timeout_s, adapter=adapter)
        )

    async def tokenize(
        self,
        text: str,
        *,
        parse_special_tokens: bool = False,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        message = build_tokenize_request(text, parse_special_tokens, add_special_tokens)
        return list((await self.call(attrgetter("generation.Tokenize"), message)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        message = pb.DetokenizeRequest(token_ids=token_ids)
        return str((await self.call(attrgetter("generation.Detokenize"), message)).text)

    async def adapters(self) -> list[adapters_pb2.Adapter]:
        """Return all adapters that the caller can use; they are fetched in pages of PAGE_SIZE."""
        adapters: list[adapters_pb2.Adapter] = []
        token = ""
        while True:
            message = adapters_pb2.ListAdaptersRequest(page_size=PAGE_SIZE, page_token=token)
            page = await self.call(attrgetter("adapters.ListAdapters"), message)
            adapters += page.adapters
            token = page.next_page_token
            if not token:
                return adapters

    async def info(self) -> admin_pb2.GetServerInfoResponse:
        response = await self.call(
            attrgetter("admin.GetServerInfo"), admin_pb2.GetServerInfoRequest()
        )
        assert isinstance(response, admin_pb2.GetServerInfoResponse)
        return response

    async def load(self) -> admin_pb2.GetLoadResponse:
        """Return the current load of the server: requests, KV blocks, engine state."""
        response = await self.call(attrgetter("admin.GetLoad"), admin_pb2.GetLoadRequest())
        assert isinstance(response, admin_pb2.GetLoadResponse)
        return response

    async def close(self) -> None:
        for server in self._servers.all:
            await server.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def call(
        self,
        method: Method,
        message: object,
        timeout_s: float | None = None,
        *,
        adapter: str = "",
        idempotent: bool = True,
    ) -> Any:
        """Call a unary method directly, with deadline and retries.

        `method` returns the method of a server's stubs. `adapter`: the adapter of the call, if any.
        `idempotent`: the call is repeated if its server is lost.
        """
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        route = self._servers.route(adapter)
        metadata = (*self.metadata, *route.metadata)
        while True:
            server = route.next_server()
            try:
                return await method(server)(
                    message, timeout=attempts.remaining_s, metadata=metadata
                )
            except grpc.aio.AioRpcError as error:
                failure = read_call_error(error, server.address)
            fails_over = route.record_failure(failure)
            await asyncio.sleep(
                attempts.next_wait_s(failure, fails_over=fails_over, idempotent=idempotent)
            )
