"""OpenAI streaming: the chunks of a call, as server-sent events or merged into one response.

A call has a stream of text pieces for each prompt. Each piece becomes a chunk of one choice. If the
request sets `stream`, each chunk is the JSON of one event. Otherwise, the chunks of each choice are
merged and returned as one response. The format of the chunks is a `CompletionFormat` (in
`responses` and `chat`). The events are sent by `EventStream` of `serving.frontend.http_transport`.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from gpt.errors import RequestError
from serving.engine.stream import Stream
from serving.frontend.call import Call
from serving.protocols.openai.completion_request import BaseCompletionRequest, unknown_model_error
from serving.protocols.openai.responses import Choice, CompletionFormat
from serving.request import Ask, Piece


class CompletionRun:
    """The response of one call: the choices of its streams, one stream for each prompt."""

    def __init__(
        self,
        body: BaseCompletionRequest,
        call: Call,
        streams: Sequence[Stream],
        completion_format: CompletionFormat,
    ) -> None:
        self._call = call
        self._streams = streams
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_per_chunk = bool(options and options.continuous_usage_stats)
        service = call.service
        self._choices = completion_format.build_choices(body, streams, service)
        self._format = completion_format
        # The model that the response names.
        self.model = streams[0].request.answers[0].adapter or service.name
        object_type = completion_format.final_object
        if body.stream:
            object_type = completion_format.chunk_object
        self._common_fields = {
            "id": f"{completion_format.id_prefix}-{body.request_id or secrets.token_hex(12)}",
            "object": object_type,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": service.base_fingerprint,
        }

    @classmethod
    async def start(
        cls,
        body: BaseCompletionRequest,
        asks: Sequence[Ask],
        call: Call,
        completion_format: CompletionFormat,
    ) -> "CompletionRun":
        """Submit the `Ask` of each prompt to the engine; raise if an `Ask` is refused."""
        streams = []
        try:
            for ask in asks:
                streams.append(await call.start(ask, final_only=not body.stream))
        except RequestError as error:
            if error.field == "adapter" and body.model is not None:
                raise unknown_model_error(body.model) from None
            raise
        return cls(body, call, streams, completion_format)

    async def final_response(self) -> dict[str, Any]:
        """Return one response with all choices, for a request without `stream`."""
        choices_by_index: dict[int, dict[str, Any]] = {}
        async with aclosing(self.pieces()) as pieces:
            async for choice, piece in pieces:
                chunk = choice.render(piece)
                if chunk is not None:
                    index = choice.index
                    if index in choices_by_index:
                        chunk = self._format.merge_chunks(choices_by_index[index], chunk)
                    choices_by_index[index] = chunk
        choices = [
            self._format.finalize(choices_by_index[index]) for index in sorted(choices_by_index)
        ]
        return {
            **self._format.build_response(self._common_fields, choices),
            "usage": self.usage(),
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the JSON text of each chunk, for a request with `stream`."""
        fields = self._common_fields
        if self._include_usage:
            fields = {**fields, "usage": None}
        async with aclosing(self.pieces()) as pieces:
            async for choice, piece in pieces:
                chunk = choice.render(piece)
                if chunk is not None:
                    if self._usage_per_chunk and self._include_usage:
                        fields["usage"] = self.usage()
                    yield msgspec.json.encode(self._format.build_response(fields, [chunk]))
        if self._include_usage:
            yield msgspec.json.encode({**self._common_fields, "choices": [], "usage": self.usage()})

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Yield the pieces of all streams, with their choices, in order of arrival.

        The first error ends the whole call, because OpenAI's protocol has no error per choice.
        """
        async with aclosing(_merge_streams(self._call, self._streams)) as pieces:
            async for index, piece in pieces:
                if piece.error is not None:
                    raise piece.error
                yield self._choices[index][piece.index], piece

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens so far."""
        # All choices of a stream have the same prompt, which is counted once.
        first_choices = [choices[0] for choices in self._choices]
        prompt_tokens = sum(choice.answer.prompt_tokens for choice in first_choices)
        completion_tokens = sum(
            choice.generated_tokens for choices in self._choices for choice in choices
        )
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "virtual_tokens": sum(choice.answer.virtual_tokens for choice in first_choices),
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in first_choices)
            },
        }


async def _merge_streams(
    call: Call, streams: Sequence[Stream]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield the pieces of all streams in order of arrival, each with the index of its stream."""
    if len(streams) == 1:
        async for first_stream_piece in call.pieces(streams[0]):
            yield 0, first_stream_piece
        return
    sources = [call.pieces(stream) for stream in streams]

    def start_next(index: int) -> "asyncio.Task[Piece | None]":
        return asyncio.ensure_future(anext(sources[index], None))

    pending_tasks = {start_next(index): index for index in range(len(sources))}
    try:
        while pending_tasks:
            done, _ = await asyncio.wait(pending_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending_tasks.pop(task)
                piece = task.result()
                if piece is not None:
                    yield index, piece
                    pending_tasks[start_next(index)] = index
    finally:
        for task in pending_tasks:
            task.cancel()
        await asyncio.gather(*pending_tasks, return_exceptions=True)
