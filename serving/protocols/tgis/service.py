"""TGIS gRPC service (`fmaas.GenerationService`): batched generation, streaming and tokenization.

This is the protocol of IBM's TGIS and of vllm-tgis-adapter. A unary call has many prompts; a stream
has one prompt, and its first response describes the input. `request` reads the parameters; this
module turns pieces into messages. `model_id` is ignored, as in vllm-tgis-adapter, because a server
has one model; `prefix_id` and `adapter_id` name an adapter.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from gpt.errors import RequestError
from gpt.tokenizers.tokenizer import Tokenizer
from protos.foreign import package
from serving.engine.stream import Stream, build_completion
from serving.frontend.call import Call
from serving.frontend.grpc_transport import RpcMethod, WriteMessage
from serving.messages import TokenScore
from serving.protocols.tgis.request import (
    build_ask,
    is_sampling,
    requested_adapters,
    translated_errors,
    wants_token_details,
)
from serving.request import AnswerSpec, Ask, Completion, FinishReason, Piece

SERVICE = "fmaas.GenerationService"
pb = package("tgis")
STOP_REASONS = pb.file.enum_types_by_name["StopReason"].values_by_name
# If a token's text does not directly follow the previous token, this distance is searched for it.
TOKEN_GAP_BYTES_MAX = 64


def methods() -> list[RpcMethod]:
    return [
        RpcMethod("Generate", pb.BatchedGenerationRequest, generate),
        RpcMethod("GenerateStream", pb.SingleGenerationRequest, generate_stream, "out"),
        RpcMethod("Tokenize", pb.BatchedTokenizeRequest, tokenize),
        RpcMethod("ModelInfo", pb.ModelInfoRequest, model_info),
    ]


async def generate(message: Any, call: Call) -> Any:
    """Return a response per prompt, in order. If a prompt is invalid, none of them is run."""
    _check_batch(message, call)
    with translated_errors():
        asks = [_build_ask(message, single.text, call) for single in message.requests]
        if len(asks) > 1:
            await asyncio.to_thread(_admit_all, asks, call)
        streams = [await _start_stream(ask, call) for ask in asks]
        responses = []
        for single, stream in zip(message.requests, streams, strict=True):
            # The streams run concurrently; each buffers its pieces until it is read here.
            pieces = [piece async for piece in call.pieces(stream)]
            completion = build_completion(0, stream.request.answers[0], pieces)
            builder = _GenerationResponseBuilder(message.params, single.text, stream, call)
            response = builder.build(completion, len(completion.token_ids))
            builder.add_input(response, completion.prompt_scores)
            responses.append(response)
        return pb.BatchedGenerationResponse(responses=responses)


async def generate_stream(message: Any, call: Call, write: WriteMessage) -> None:
    """Stream one completion. The first response describes the input."""
    with translated_errors():
        text = message.request.text
        stream = await call.start(_build_ask(message, text, call))
        builder = _GenerationResponseBuilder(message.params, text, stream, call)
        started, generated_tokens = False, 0
        prompt_scores: list[TokenScore | None] = []
        async for piece in call.pieces(stream):
            prompt_scores += piece.prompt_scores
            if not (piece.token_ids or piece.finish):
                continue  # The input response needs all prompt scores; wait for the first token.
            if not started:
                started, input_response = True, pb.GenerationResponse()
                builder.add_input(input_response, prompt_scores)
                await write(input_response)
            generated_tokens += len(piece.token_ids)
            response = builder.build(piece, generated_tokens)
            if response.text or response.tokens or piece.finish:
                await write(response)


async def tokenize(message: Any, call: Call) -> Any:
    _check_batch(message, call)
    limits = call.service.config.limits_config
    size = sum(len(single.text.encode()) for single in message.requests)
    if size > limits.text_bytes_max:
        raise RequestError(
            f"the texts are {size} bytes in total; this server accepts at most "
            f"{limits.text_bytes_max} (text_bytes_max) in a call",
            "requests",
        )
    with translated_errors():
        return await asyncio.to_thread(_tokenize_batch, message, call)


async def model_info(message: Any, call: Call) -> Any:
    tokens_max = call.service.admission.tokens_max
    return pb.ModelInfoResponse(max_sequence_length=tokens_max, max_new_tokens=tokens_max - 1)


# ----------------------------------------------------------------------------------------- requests


def _check_batch(message: Any, call: Call) -> None:
    count, requests_max = (
        len(message.requests),
        call.service.config.scheduler_config.queue_requests_max,
    )
    if count > requests_max:
        raise RequestError(
            f"requests has {count} entries; a call may have at most {requests_max} "
            "(queue_requests_max)",
            "requests",
        )


def _build_ask(message: Any, text: str, call: Call) -> Ask:
    service = call.service
    return build_ask(message, text, service.config.limits_config, service.admission.tokens_max)


async def _start_stream(ask: Ask, call: Call) -> Stream:
    try:
        return await call.start(ask, final_only=True)
    except RequestError as error:
        if error.field in ("text", "prompt"):
            # This is the only prompt: `_admit_all` has checked the prompts of a larger batch.
            error.field = "requests[0].text"
        raise


def _admit_all(asks: Sequence[Ask], call: Call) -> None:
    """Admit all prompts. Raise the first error, with the prompt's index in the error's field."""
    for index, ask in enumerate(asks):
        try:
            call.service.admission.admit(replace(ask, tenant=call.caller.tenant))
        except RequestError as error:
            if error.field in ("text", "prompt"):
                error.field = f"requests[{index}].text"
            raise


# ---------------------------------------------------------------------------------------- responses


def _stop_reason_number(stop_reason: str) -> int:
    return int(STOP_REASONS[stop_reason].number)


@dataclass(frozen=True)
class _GenerationResponseBuilder:
    """Builds the response messages of one completion, with the details that `params` requests."""

    params: Any
    text: str
    stream: Stream
    call: Call

    @property
    def _answer(self) -> AnswerSpec:
        return self.stream.request.answers[0]

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.call.service.tokenizer

    def add_input(self, response: Any, scores: Sequence[TokenScore | None]) -> None:
        """Add the input's token count, text, tokens and the seed to a response."""
        answer, response_options = self._answer, self.params.response
        response.input_token_count = answer.prompt_tokens
        if is_sampling(self.params):
            response.seed = answer.sampling.seed
        vocab_size = self.call.service.checkpoint.config.vocab_size
        # Omit virtual tokens, whose ids are not below the vocabulary size.
        text_tokens = [
            (token, scored)
            for token, scored in zip_longest(answer.prompt, scores[: len(answer.prompt)])
            if token < vocab_size
        ]
        if response_options.input_text:
            truncated = self.params.truncate_input_tokens
            text = (
                self._tokenizer.decode(token for token, _ in text_tokens)
                if truncated
                else self.text
            )
            response.text = text + response.text
        if response_options.input_tokens:
            response.input_tokens.extend(self._token_infos(text_tokens))

    def build(self, output: Piece | Completion, generated_tokens: int) -> Any:
        """Build a response with `output`; `generated_tokens` is the completion's count so far."""
        response = pb.GenerationResponse(
            text=output.text,
            generated_token_count=generated_tokens,
            stop_reason=self._stop_reason(output),
        )
        if isinstance(output.stop, str):
            response.stop_sequence = output.stop
        if self.params.response.generated_tokens:
            response.tokens.extend(self._token_infos(zip_longest(output.token_ids, output.scores)))
        return response

    def _stop_reason(self, output: Piece | Completion) -> int:
        finish: FinishReason | None = output.finish
        match finish:
            case None:
                return _stop_reason_number("NOT_FINISHED")
            case "stop":
                return _stop_reason_number(
                    "STOP_SEQUENCE" if isinstance(output.stop, str) else "EOS_TOKEN"
                )
            case "time":
                return _stop_reason_number("TIME_LIMIT")
        return _stop_reason_number("TOKEN_LIMIT" if self._limited_by_context else "MAX_TOKENS")

    @property
    def _limited_by_context(self) -> bool:
        """Return whether the model's context, not `max_new_tokens`, set the token limit."""
        answer, requested = self._answer, self.params.stopping.max_new_tokens
        limit = answer.sampling.max_new_tokens
        if requested:
            return bool(limit < requested)
        return len(answer.prompt) + limit >= self.call.service.admission.tokens_max

    def _token_infos(self, tokens: Iterable[tuple[int, TokenScore | None]]) -> list[Any]:
        response_options, spelling = self.params.response, self._tokenizer.id_to_token
        infos = []
        for token, scored in tokens:
            info = pb.TokenInfo(text=spelling(token))
            infos.append(info)
            if scored is None or not wants_token_details(response_options):
                continue
            if response_options.token_logprobs:
                info.logprob = scored.logprob
            if response_options.token_ranks:
                info.rank = scored.rank
            for top, logprob in scored.tops[: response_options.top_n_tokens]:
                info.top_tokens.add(
                    text=spelling(top), logprob=logprob if response_options.token_logprobs else 0.0
                )
        return infos


# ------------------------------------------------------------------------------------- tokenization


def _tokenize_batch(message: Any, call: Call) -> Any:
    admission, tokenizer = call.service.admission, call.service.tokenizer
    response = pb.BatchedTokenizeResponse()
    for single in message.requests:
        full_ask = Ask(single.text, adapters=requested_adapters(message), tenant=call.caller.tenant)
        truncated_ask = replace(full_ask, truncate_tokens=message.truncate_input_tokens or None)
        ids = admission.text_ids(truncated_ask)
        text_response = response.responses.add(token_count=len(ids))
        if message.return_tokens:
            text_response.tokens.extend(map(tokenizer.id_to_token, ids))
        if message.return_offsets:
            offsets = _token_offsets(admission.text_ids(full_ask), single.text, tokenizer)
            if len(ids) < len(offsets):
                keeps_bos = len(ids) > 1 and ids[0] == tokenizer.bos_id
                tail = offsets[len(offsets) - len(ids) + keeps_bos :]
                offsets = [*offsets[:keeps_bos], *tail]
            for start, end in offsets:
                text_response.offsets.add(start=start, end=end)
    return response


def _token_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return start and end (exclusive) of each token in the text, in characters.

    A token that is part of a character gets the whole character. Where the tokenizer changed the
    text, the token is searched for near the previous token; if not found, its range is empty.
    """
    data = text.encode()
    # Character index of each byte.
    byte_characters = [
        position for position, character in enumerate(text) for _ in character.encode()
    ]
    byte_characters.append(len(text))
    offset, offsets = 0, []
    for token in ids:
        token_bytes = tokenizer.token_bytes(token)
        if token_bytes is None:
            offsets.append((0, 0))  # A control token has no text.
            continue
        start, stripped = offset, token_bytes.lstrip(b" ")
        if data.startswith(token_bytes, offset):
            end = offset + len(token_bytes)
        elif (
            stripped
            and (
                match_at := data.find(
                    stripped, offset, offset + len(token_bytes) + TOKEN_GAP_BYTES_MAX
                )
            )
            >= 0
        ):
            # The tokenizer added or removed a space before the token.
            end = match_at + len(stripped)
            start = match_at if data[offset:match_at].strip() else offset
        else:
            end = offset
        end_character = byte_characters[end - 1] + 1 if end > start else byte_characters[start]
        offsets.append((byte_characters[start], end_character))
        offset = end
    return offsets
