"""TGIS gRPC service (`fmaas.GenerationService`): batched generation, streaming and tokenization.

This is the protocol of IBM's TGIS and of vllm-tgis-adapter. A unary call has one or more prompts. A
stream has one prompt, and its first response describes the input. `request` reads the parameters;
this module turns pieces into messages. `model_id` is ignored, as in vllm-tgis-adapter, because a
server has one model. `prefix_id` and `adapter_id` both name an adapter.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from gpt.errors import RequestError
from gpt.tokenizers.tokenizer import Tokenizer
from protos.foreign.descriptor_pools import load_package
from serving.engine.stream import Stream, build_completion
from serving.frontend.call import Call
from serving.frontend.field_names import translate_error
from serving.frontend.grpc_transport import RpcMethod, WriteMessage
from serving.messages import TokenScore
from serving.protocols.tgis.request import (
    FIELD_PATHS,
    build_ask,
    is_sampling,
    requested_adapters,
    translate_errors,
    wants_token_details,
)
from serving.request import AnswerSpec, Ask, Completion, FinishReason, Piece

SERVICE = "fmaas.GenerationService"
pb = load_package("tgis")
STOP_REASONS = pb.file.enum_types_by_name["StopReason"].values_by_name
PROMPT_FIELDS = ("text", "prompt")  # Names of the prompt in errors of the admission.
NO_OFFSET = (0, 0)  # The offsets of a control token that is not in the text.
# `_token_offsets` skips at most this number of bytes of the text to find a token.
TOKEN_GAP_BYTES_MAX = 64


def methods() -> list[RpcMethod]:
    return [
        RpcMethod("Generate", pb.BatchedGenerationRequest, generate),
        RpcMethod("GenerateStream", pb.SingleGenerationRequest, generate_stream, "out"),
        RpcMethod("Tokenize", pb.BatchedTokenizeRequest, tokenize),
        RpcMethod("ModelInfo", pb.ModelInfoRequest, model_info, is_probe=True),
    ]


async def generate(message: Any, call: Call) -> Any:
    """Return a response per prompt, in order. If one prompt is invalid, no prompt is run."""
    _check_batch(message, call)
    with translate_errors():
        asks = [_build_ask(message, request.text, call) for request in message.requests]
        if len(asks) > 1:
            await _load_adapters(message, call)
            await asyncio.to_thread(_admit_all, asks, call)
        streams = [await _start_stream(ask, call) for ask in asks]
        responses = []
        for request, stream in zip(message.requests, streams, strict=True):
            # The streams run concurrently, and buffer their pieces until this loop reads them.
            pieces = [piece async for piece in call.pieces(stream)]
            completion = build_completion(0, stream.request.answers[0], pieces)
            builder = _GenerationResponseBuilder(message.params, request.text, stream, call)
            response = builder.build(completion, len(completion.token_ids))
            builder.add_input(response, completion.prompt_scores)
            responses.append(response)
        return pb.BatchedGenerationResponse(responses=responses)


async def generate_stream(message: Any, call: Call, write: WriteMessage) -> None:
    """Stream one completion. The first response describes the input."""
    with translate_errors():
        text = message.request.text
        stream = await call.start(_build_ask(message, text, call))
        builder = _GenerationResponseBuilder(message.params, text, stream, call)
        input_sent = False
        generated_tokens = 0
        prompt_scores: list[TokenScore | None] = []
        async for piece in call.pieces(stream):
            prompt_scores += piece.prompt_scores
            if not (piece.token_ids or piece.finish):
                continue  # The prompt scores are complete when the first token arrives.
            if not input_sent:
                input_sent = True
                input_response = pb.GenerationResponse()
                builder.add_input(input_response, prompt_scores)
                await write(input_response)
            generated_tokens += len(piece.token_ids)
            response = builder.build(piece, generated_tokens)
            if response.text or response.tokens or piece.finish:
                await write(response)


async def tokenize(message: Any, call: Call) -> Any:
    _check_batch(message, call)
    limits = call.service.config.limits_config
    size = sum(len(request.text.encode()) for request in message.requests)
    if size > limits.text_bytes_max:
        raise RequestError(
            f"the texts are {size} bytes in total; this server accepts at most "
            f"{limits.text_bytes_max} (text_bytes_max) in a call",
            "requests",
        )
    with translate_errors():
        await _load_adapters(message, call)
        return await asyncio.to_thread(_tokenize_batch, message, call)


async def model_info(message: Any, call: Call) -> Any:
    tokens_max = call.service.admission.tokens_max
    return pb.ModelInfoResponse(max_sequence_length=tokens_max, max_new_tokens=tokens_max - 1)


# ----------------------------------------------------------------------------------------- requests


def _check_batch(message: Any, call: Call) -> None:
    count = len(message.requests)
    requests_max = call.service.config.scheduler_config.queue_requests_max
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
        # The invalid prompt is the only prompt of the call: if a call has several prompts,
        # `_admit_all` refuses invalid ones before this function runs.
        raise _with_prompt_index(error, 0) from None


def _with_prompt_index(error: RequestError, index: int) -> Exception:
    """Return the error; if it names the prompt, with the prompt's index in the call."""
    if error.field not in PROMPT_FIELDS:
        return error
    names = {**FIELD_PATHS, **dict.fromkeys(PROMPT_FIELDS, f"requests[{index}].text")}
    return translate_error(RequestError(f"requests[{index}]: {error}", error.field), names)


async def _load_adapters(message: Any, call: Call) -> None:
    await call.service.load_new_adapters(requested_adapters(message), call.caller.tenant)


def _admit_all(asks: Sequence[Ask], call: Call) -> None:
    """Validate all prompts. Raise the first error, with the prompt's index in the error's field."""
    for index, ask in enumerate(asks):
        try:
            call.service.admission.admit(replace(ask, tenant=call.caller.tenant))
        except RequestError as error:
            raise _with_prompt_index(error, index) from None


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
        """Describe the input: add the token count, the seed, and the requested text and tokens.

        The seed is added only if tokens are sampled.
        """
        answer, response_options = self._answer, self.params.response
        response.input_token_count = answer.prompt_tokens
        if is_sampling(self.params):
            response.seed = answer.sampling.seed
        vocab_size = self.call.service.checkpoint.config.vocab_size
        # Virtual tokens are omitted; their ids are at or above the vocabulary size.
        text_tokens = [
            (token, score)
            for token, score in zip_longest(answer.prompt, scores[: len(answer.prompt)])
            if token < vocab_size
        ]
        if response_options.input_text:
            text = self.text
            if self.params.truncate_input_tokens:
                text = self._tokenizer.decode(token for token, _ in text_tokens)
            response.text = text + response.text
        if response_options.input_tokens:
            response.input_tokens.extend(self._token_infos(text_tokens))

    def build(self, output: Piece | Completion, generated_tokens: int) -> Any:
        """Build a response with `output`.

        `generated_tokens` is the number of the completion's tokens so far.
        """
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
        """Whether the context or the KV cache, not `max_new_tokens`, set the token limit."""
        answer = self._answer
        requested_tokens = self.params.stopping.max_new_tokens
        limit = answer.sampling.max_new_tokens
        if requested_tokens:
            return bool(limit < requested_tokens)
        return len(answer.prompt) + limit >= self.call.service.admission.tokens_max

    def _token_infos(self, tokens: Iterable[tuple[int, TokenScore | None]]) -> list[Any]:
        response_options, id_to_token = self.params.response, self._tokenizer.id_to_token
        token_infos = []
        for token, score in tokens:
            token_info = pb.TokenInfo(text=id_to_token(token))
            token_infos.append(token_info)
            if score is None or not wants_token_details(response_options):
                continue
            if response_options.token_logprobs:
                token_info.logprob = score.logprob
            if response_options.token_ranks:
                token_info.rank = score.rank
            for top_token, logprob in score.tops[: response_options.top_n_tokens]:
                token_info.top_tokens.add(
                    text=id_to_token(top_token),
                    logprob=logprob if response_options.token_logprobs else 0.0,
                )
        return token_infos


# ------------------------------------------------------------------------------------- tokenization


def _tokenize_batch(message: Any, call: Call) -> Any:
    admission, tokenizer = call.service.admission, call.service.tokenizer
    response = pb.BatchedTokenizeResponse()
    for request in message.requests:
        full_ask = Ask(
            request.text,
            adapters=requested_adapters(message),
            parse_by_default=True,
            tenant=call.caller.tenant,
        )
        truncated_ask = replace(full_ask, truncate_tokens=message.truncate_input_tokens or None)
        ids = admission.text_ids(truncated_ask)
        text_response = response.responses.add(token_count=len(ids))
        if message.return_tokens:
            text_response.tokens.extend(map(tokenizer.id_to_token, ids))
        if message.return_offsets:
            tokens = admission.tokenize(full_ask)
            offsets = [
                *[NO_OFFSET] * len(tokens.before),
                *_token_offsets(tokens.text, request.text, tokenizer),
                *[NO_OFFSET] * len(tokens.after),
            ]
            if len(ids) < len(offsets):
                # Truncation removed tokens at the start of the text, but may have kept BOS.
                before = len(tokens.before)
                keeps_before = before < len(ids) and ids[:before] == tokens.before
                prefix = before if keeps_before else 0
                offsets = [*offsets[:prefix], *offsets[len(offsets) - len(ids) + prefix :]]
            for start, end in offsets:
                text_response.offsets.add(start=start, end=end)
    return response


def _token_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return start and end (exclusive) of each token in the text, in characters.

    A token that is part of a character gets the range of the whole character. If the tokenizer has
    changed the text, the token's bytes may not directly follow the previous token. In this case, up
    to `TOKEN_GAP_BYTES_MAX` bytes are skipped to find the token's bytes. A token that is not found
    gets an empty range.
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
        if token_bytes is None:  # A control token, which the text contains.
            token_bytes = tokenizer.id_to_token(token).encode()
        start = end = offset
        if data.startswith(token_bytes, offset):
            end = offset + len(token_bytes)
        elif stripped_bytes := token_bytes.lstrip(b" "):
            search_end = offset + len(token_bytes) + TOKEN_GAP_BYTES_MAX
            match_start = data.find(stripped_bytes, offset, search_end)
            if match_start >= 0:
                end = match_start + len(stripped_bytes)
                # If only whitespace was skipped, it belongs to the token.
                start = match_start if data[offset:match_start].strip() else offset
        end_character = byte_characters[end - 1] + 1 if end > start else byte_characters[start]
        offsets.append((byte_characters[start], end_character))
        offset = end
    return offsets
