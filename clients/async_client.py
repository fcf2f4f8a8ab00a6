"""AsyncClient: the same as `clients.client.Client`, for asyncio.

Messages, answers, retries and errors are the other client's; only waiting differs. One client, in
one event loop, is good for as many calls at once as the server takes.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from clients.client import PAGE
from clients.options import DEFAULTS, Options, Prompt, request, score_request
from clients.responses import (
    Completion,
    Piece,
    Scores,
    completions_of,
    first_of,
    piece_of,
    scores_of,
)
from clients.transport import (
    RETRIES,
    Attempts,
    Retries,
    Tls,
    call_error,
    channel_options,
    metadata_of,
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
    """Calls the server at `address`, HOST:PORT; close it, or use it in an `async with`.

    To be made where its event loop runs. A task that is cancelled cancels its call.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 60.0,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retries: Retries = RETRIES,
    ) -> None:
        self.timeout_s, self.retries = timeout_s, retries
        self.metadata = metadata_of(token)
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
        self, prompt: Prompt, options: Options = DEFAULTS, timeout_s: float | None = None
    ) -> Completion:
        """The first completion: the only one, unless the options ask for more."""
        message = request(pb.GenerateRequest(), prompt, options)
        return first_of(await self.call(self._generation.Generate, message, timeout_s))

    async def completions(
        self, prompt: Prompt, options: Options, timeout_s: float | None = None
    ) -> list[Completion]:
        """All of them: all answers of the first adapter, then of the next one."""
        message = request(pb.GenerateRequest(), prompt, options)
        return completions_of(await self.call(self._generation.Generate, message, timeout_s))

    async def stream(
        self, prompt: Prompt, options: Options = DEFAULTS, timeout_s: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces as they come. To leave early, `aclose` the iterator: that cancels the call."""
        message = request(pb.GenerateStreamRequest(), prompt, options)
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        begun = False
        while True:
            call = self._generation.GenerateStream(
                message, timeout=attempts.left_s, metadata=self.metadata
            )
            try:
                async for response in call:
                    begun = True
                    yield piece_of(response)
                return
            except grpc.aio.AioRpcError as error:
                failure = call_error(error)
            finally:
                call.cancel()
            if begun:  # Another attempt would say again what was said.
                raise failure
            await asyncio.sleep(attempts.after(failure))

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str] = (),
        *,
        adapter: str = "",
        logprobs: int = 0,
        timeout_s: float | None = None,
    ) -> Scores:
        """How likely each continuation of the prompt is; without any, the prompt itself."""
        message = score_request(prompt, continuations, adapter, logprobs)
        return scores_of(await self.call(self._generation.Score, message, timeout_s))

    async def tokenize(self, text: str) -> list[int]:
        message = pb.TokenizeRequest(text=text)
        return list((await self.call(self._generation.Tokenize, message)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        message = pb.DetokenizeRequest(token_ids=token_ids)
        return str((await self.call(self._generation.Detokenize, message)).text)

    async def adapters(self) -> list[adapters_pb2.Adapter]:
        """All of them, as many pages as there are."""
        adapters: list[adapters_pb2.Adapter] = []
        token = ""
        while True:
            message = adapters_pb2.ListAdaptersRequest(page_size=PAGE, page_token=token)
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
        """How busy the server is now."""
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
        """A stub's unary method, for what has no method here."""
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return await method(message, timeout=attempts.left_s, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                failure = call_error(error)
            await asyncio.sleep(attempts.after(failure))
