"""KServe inference: runs one inference request, and yields the output tensors of its responses.

gRPC and HTTP use this class alike; they differ in how a request is encoded (`InferContent`) and how
the output tensors are sent.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpt.errors import RequestError
from serving.engine.stream import build_completion
from serving.frontend.call import Call
from serving.frontend.field_names import translate_error
from serving.protocols.kserve.inputs import InferContent, InferRequest, read_request
from serving.protocols.kserve.models import ServedModel
from serving.protocols.kserve.outputs import InferResponseBuilder
from serving.protocols.kserve.tensors import OutputTensor
from serving.request import Piece


@dataclass(frozen=True)
class Inference:
    """A validated inference request, with the model that it names and the call that it runs in."""

    model: ServedModel
    request: InferRequest
    call: Call

    @classmethod
    def build(cls, content: InferContent, model: ServedModel, call: Call) -> "Inference":
        """Validate a request, and set the call's deadline by the request's timeout."""
        limits = call.service.config.limits_config
        request = read_request(content, model.adapter, limits.text_bytes_max)
        if request.timeout_s is not None:
            deadline = time.monotonic() + request.timeout_s
            call.deadline = deadline if call.deadline is None else min(deadline, call.deadline)
        return cls(model, request, call)

    def check_unary(self, method: str, stream_method: str) -> None:
        """Raise an error if the request has `stream`; `method` sends only one response."""
        if self.request.stream:
            raise RequestError(
                f"stream is true, but {method} sends one response; call {stream_method}, or "
                "remove stream",
                "stream",
            )

    async def final_outputs(self) -> list[OutputTensor]:
        """Run the request; return the outputs of one response with all completions."""
        with self._translate_errors():
            stream = await self.call.start(self.request.ask, final_only=True)
            pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
            async for piece in self.call.pieces(stream):
                pieces[piece.index].append(piece)
        return InferResponseBuilder(self.request, self.call).build_final(
            [
                build_completion(index, answer, pieces[index])
                for index, answer in enumerate(stream.request.answers)
            ],
        )

    async def output_chunks(self) -> AsyncGenerator[tuple[list[OutputTensor], bool], None]:
        """Run the request; yield the outputs of each response, and whether it is the last one.

        A request without `stream` has one response.
        """
        if not self.request.stream:
            yield await self.final_outputs(), True
            return
        with self._translate_errors():
            stream = await self.call.start(self.request.ask)
            builder, answers = InferResponseBuilder(self.request, self.call), stream.request.answers
            unfinished = len(answers)
            async for piece in self.call.pieces(stream):
                unfinished -= piece.finish is not None
                yield builder.build_chunk(piece, answers[piece.index]), unfinished == 0

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert errors of the admission and of the engine to the names of the inputs."""
        try:
            yield
        except RequestError as error:
            raise translate_error(error, self.request.field_names) from None
