"""Client: a running server, called from a program.

Synchronous and typed: plain values in, plain values out, every call under a deadline, and tried
again where the server says that it may be. What ends badly comes back as a `CallError`. It knows
the protos, and nothing of the server's insides; `clients.async_client` is the same for asyncio.
"""

import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from clients.options import DEFAULTS, Beams, Guide, Options, Prompt, request, score_request
from clients.responses import (
    Completion,
    Failure,
    FinishReason,
    Piece,
    Scores,
    TextScore,
    TokenScore,
    Usage,
    completions_of,
    first_of,
    piece_of,
    scores_of,
)
from clients.transport import (
    RETRIES,
    Attempts,
    CallError,
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

__all__ = [
    "Beams",
    "CallError",
    "Client",
    "Completion",
    "Failure",
    "FinishReason",
    "Guide",
    "Options",
    "Piece",
    "Prompt",
    "Retries",
    "Scores",
    "TextScore",
    "Tls",
    "TokenScore",
    "Usage",
]

PAGE = 1000


class Client:
    """Calls the server at `address`, HOST:PORT; close it, or use it in a `with`.

    `timeout_s` is for each call, its retries and a stream as a whole included; each method takes
    another. `token` is sent as a bearer token; `tls` makes the channel a secure one.
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
            grpc.insecure_channel(address, options)
            if tls is None
            else grpc.secure_channel(address, tls.credentials, options)
        )
        self._generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(self.channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def generate(
        self, prompt: Prompt, options: Options = DEFAULTS, timeout_s: float | None = None
    ) -> Completion:
        """The first completion: the only one, unless the options ask for more."""
        message = request(pb.GenerateRequest(), prompt, options)
        return first_of(self.call(self._generation.Generate, message, timeout_s))

    def completions(
        self, prompt: Prompt, options: Options, timeout_s: float | None = None
    ) -> list[Completion]:
        """All of them: all answers of the first adapter, then of the next one."""
        message = request(pb.GenerateRequest(), prompt, options)
        return completions_of(self.call(self._generation.Generate, message, timeout_s))

    def stream(
        self, prompt: Prompt, options: Options = DEFAULTS, timeout_s: float | None = None
    ) -> Generator[Piece, None, None]:
        """Pieces as they come. To leave early, close the iterator: that cancels the call."""
        message = request(pb.GenerateStreamRequest(), prompt, options)
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        begun = False
        while True:
            call = self._generation.GenerateStream(
                message, timeout=attempts.left_s, metadata=self.metadata
            )
            try:
                for response in call:
                    begun = True
                    yield piece_of(response)
                return
            except grpc.RpcError as error:
                failure = call_error(error)
            finally:
                call.cancel()
            if begun:  # Another attempt would say again what was said.
                raise failure
            time.sleep(attempts.after(failure))

    def score(
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
        return scores_of(self.call(self._generation.Score, message, timeout_s))

    def tokenize(self, text: str) -> list[int]:
        message = pb.TokenizeRequest(text=text)
        return list(self.call(self._generation.Tokenize, message).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        message = pb.DetokenizeRequest(token_ids=token_ids)
        return str(self.call(self._generation.Detokenize, message).text)

    def adapters(self) -> list[adapters_pb2.Adapter]:
        """All of them, as many pages as there are."""
        adapters: list[adapters_pb2.Adapter] = []
        token = ""
        while True:
            message = adapters_pb2.ListAdaptersRequest(page_size=PAGE, page_token=token)
            page = self.call(self._adapters.ListAdapters, message)
            adapters += page.adapters
            token = page.next_page_token
            if not token:
                return adapters

    def info(self) -> admin_pb2.GetServerInfoResponse:
        response = self.call(self._admin.GetServerInfo, admin_pb2.GetServerInfoRequest())
        assert isinstance(response, admin_pb2.GetServerInfoResponse)
        return response

    def load(self) -> admin_pb2.GetLoadResponse:
        """How busy the server is now."""
        response = self.call(self._admin.GetLoad, admin_pb2.GetLoadRequest())
        assert isinstance(response, admin_pb2.GetLoadResponse)
        return response

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, method: Any, message: object, timeout_s: float | None = None) -> Any:
        """A stub's unary method, for what has no method here."""
        attempts = Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return method(message, timeout=attempts.left_s, metadata=self.metadata)
            except grpc.RpcError as error:
                failure = call_error(error)
            time.sleep(attempts.after(failure))
