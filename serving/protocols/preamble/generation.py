"""preamble.v1.GenerationService: generate, stream, score, tokenize and detokenize.

A request message becomes an `Ask`, and the pieces of output become response messages. An unset
field such as `max_new_tokens` becomes None in the `Ask`, and the admission chooses its default.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpt.errors import RequestError
from protos.preamble.v1 import generation_pb2 as pb
from serving.engine.stream import Stream, build_completion
from serving.frontend.call import Call, to_call_failure
from serving.frontend.field_names import translate_error
from serving.frontend.grpc_transport import RpcMethod, WriteMessage
from serving.messages import Guide, ServiceClass, TokenScore
from serving.request import (
    AnswerSpec,
    Ask,
    Completion,
    EarlyStopping,
    FinishReason,
    Piece,
    ResumedOutput,
)

SERVICE = "preamble.v1.GenerationService"
FINISH_REASONS: Mapping[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "scored": pb.FINISH_REASON_LENGTH,
    "time": pb.FINISH_REASON_TIME_LIMIT,
}
SERVICE_CLASSES: Mapping[int, ServiceClass] = {
    pb.SERVICE_CLASS_UNSPECIFIED: "latency",
    pb.SERVICE_CLASS_LATENCY: "latency",
    pb.SERVICE_CLASS_THROUGHPUT: "throughput",
}
EARLY_STOPPING: Mapping[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FIRST: True,
    pb.EARLY_STOPPING_NEVER: "never",
}

# Maps fields of an `Ask` to their paths in the request message, if the path is not simply the name
# of the field. Errors use these paths.
FIELD_PATHS: Mapping[str, str] = {
    **{field.name: f"sampling.{field.name}" for field in pb.Sampling.DESCRIPTOR.fields},
    **{field.name: f"details.{field.name}" for field in pb.Details.DESCRIPTOR.fields},
    "guide.json": "guide.json_schema",
    "guide.choice": "guide.choices",
    "beam_width": "beams.width",
    "length_penalty": "beams.length_penalty",
    "truncate_tokens": "truncate_prompt_tokens",
}
SCORE_FIELD_PATHS: Mapping[str, str] = {"prompt_logprobs": "logprobs"}

GenerateMessage = pb.GenerateRequest | pb.GenerateStreamRequest


def methods() -> list[RpcMethod]:
    return [
        RpcMethod("Generate", pb.GenerateRequest, generate),
        RpcMethod("GenerateStream", pb.GenerateStreamRequest, generate_stream, "out"),
        RpcMethod("Score", pb.ScoreRequest, score),
        RpcMethod("Tokenize", pb.TokenizeRequest, tokenize),
        RpcMethod("Detokenize", pb.DetokenizeRequest, detokenize),
    ]


async def generate(message: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
    stream = await _start_stream(call, build_ask(message), FIELD_PATHS, final_only=True)
    completions = [
        _completion_message(completion, call)
        for completion in await _collect_completions(stream, call)
    ]
    first_completion = completions[0]
    return pb.GenerateResponse(
        text=first_completion.text,
        token_ids=first_completion.token_ids,
        finish_reason=first_completion.finish_reason,
        usage=first_completion.usage,
        seed=first_completion.seed,
        adapter=first_completion.adapter,
        completions=completions,
    )


async def generate_stream(
    message: pb.GenerateStreamRequest, call: Call, write: WriteMessage
) -> None:
    stream = await _start_stream(call, build_ask(message), FIELD_PATHS)
    builders = [_ChunkBuilder(answer, call) for answer in stream.request.answers]
    async for piece in call.pieces(stream):
        await write(builders[piece.index].build(piece))


async def score(message: pb.ScoreRequest, call: Call) -> pb.ScoreResponse:
    ask = Ask(
        _read_prompt(message),
        adapters=(message.adapter,) if message.adapter else (),
        continuations=tuple(message.continuations),
        max_new_tokens=0,
        prompt_logprobs=message.logprobs,
        service=_enum_value(SERVICE_CLASSES, message.service_class, "service_class"),
        priority=message.priority,
        **_special_token_fields(message),
    )
    stream = await _start_stream(call, ask, SCORE_FIELD_PATHS, final_only=True)
    completions = await _collect_completions(stream, call)
    answers = stream.request.answers
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    first_answer = answers[0]
    return pb.ScoreResponse(
        scores=[
            _text_score(answer, completion, call)
            for answer, completion in zip(answers, completions, strict=True)
        ],
        usage=pb.Usage(
            prompt_tokens=first_answer.prompt_tokens - first_answer.continuation_tokens,
            virtual_tokens=first_answer.virtual_tokens,
            completion_tokens=sum(answer.continuation_tokens for answer in answers),
            cached_tokens=completions[0].cached_tokens,
        ),
        adapter=first_answer.adapter,
    )


async def tokenize(message: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
    ask = Ask(message.text, **_special_token_fields(message))
    return pb.TokenizeResponse(
        token_ids=await asyncio.to_thread(call.service.admission.text_ids, ask)
    )


async def detokenize(message: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
    admission = call.service.admission
    ids = tuple(message.token_ids)
    return pb.DetokenizeResponse(text=await asyncio.to_thread(admission.detokenize, ids))


# ----------------------------------------------------------------------------------------- requests


async def _start_stream(
    call: Call, ask: Ask, names: Mapping[str, str], *, final_only: bool = False
) -> Stream:
    """Start a stream; errors of the admission get the field names of the request message."""
    try:
        return await call.start(ask, final_only=final_only)
    except RequestError as error:
        raise translate_error(error, names) from None


def build_ask(message: GenerateMessage) -> Ask:
    """Build the `Ask` of a generate request."""
    if message.adapter and message.adapters:
        raise RequestError("adapter and adapters are both set; set only one of them", "adapters")
    sampling = message.sampling
    beams = message.beams
    details = message.details
    length_decay = sampling.length_decay
    is_beam_search = message.HasField("beams")
    if is_beam_search and beams.width < 2:
        raise RequestError(f"beams.width is {beams.width}; it must be at least 2", "beams.width")
    return Ask(
        _read_prompt(message),
        adapters=tuple(message.adapters) or ((message.adapter,) if message.adapter else ()),
        answers=message.answers or 1,
        max_new_tokens=_optional_field(message, "max_new_tokens"),
        min_new_tokens=message.min_new_tokens,
        temperature=_optional_field(sampling, "temperature"),
        top_k=sampling.top_k,
        top_p=_optional_field(sampling, "top_p"),
        min_p=_round_float32(sampling.min_p),
        typical_p=_optional_field(sampling, "typical_p", 1.0),
        repetition_penalty=_optional_field(sampling, "repetition_penalty", 1.0),
        presence_penalty=_round_float32(sampling.presence_penalty),
        frequency_penalty=_round_float32(sampling.frequency_penalty),
        logit_bias={token: _round_float32(bias) for token, bias in sampling.logit_bias.items()},
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(sampling.bad_words),
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        length_decay=(length_decay.start, _round_float32(length_decay.factor))
        if sampling.HasField("length_decay")
        else None,
        seed=_optional_field(sampling, "seed"),
        stop_strings=tuple(message.stops.strings),
        stop_token_ids=tuple(message.stops.token_ids),
        stop_in_text=message.stops.include_in_text,
        ignore_ends=message.stops.ignore_model_ends,
        logprobs=_optional_field(details, "logprobs"),
        prompt_logprobs=_optional_field(details, "prompt_logprobs"),
        guide=_read_guide(message.guide) if message.HasField("guide") else None,
        beam_width=beams.width if is_beam_search else 1,
        length_penalty=_optional_field(beams, "length_penalty", 1.0),
        early_stopping=_enum_value(EARLY_STOPPING, beams.early_stopping, "beams.early_stopping"),
        service=_enum_value(SERVICE_CLASSES, message.service_class, "service_class"),
        priority=message.priority,
        truncate_tokens=message.truncate_prompt_tokens or None,
        time_limit_s=message.time_limit_ms / 1000 or None,
        resume=_read_resume(message.resume) if message.HasField("resume") else None,
        **_special_token_fields(message),
    )


def _special_token_fields(message: Any) -> dict[str, Any]:
    """Return the fields of an `Ask` about control tokens in and around the text."""
    return {
        "parse_special_tokens": message.parse_special_tokens,
        "add_special_tokens": _optional_field(message, "add_special_tokens", True),
    }


def _read_prompt(message: Any) -> str | tuple[int, ...] | dict[str, str] | None:
    match message.WhichOneof("prompt"):
        case "text":
            return str(message.text)
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "inputs":
            return dict(message.inputs.fields)
    return None


def _read_guide(guide: pb.Guide) -> Guide:
    match guide.WhichOneof("kind"):
        case "json_schema":
            return Guide("json", guide.json_schema)
        case "regex":
            return Guide("regex", guide.regex)
        case "choices":
            return Guide("choice", json.dumps(list(guide.choices.texts)))
        case "grammar":
            return Guide("grammar", guide.grammar)
    raise RequestError(
        "guide is empty; set json_schema, regex, choices or grammar, or remove guide", "guide"
    )


def _read_resume(resume: pb.Resume) -> ResumedOutput:
    return ResumedOutput(resume.seed, tuple(resume.token_ids), resume.base_fingerprint)


def _optional_field(message: Any, field: str, default: Any = None) -> Any:
    """Return the value of an optional field, or `default` if the field is unset."""
    if not message.HasField(field):
        return default
    value = getattr(message, field)
    return _round_float32(value) if isinstance(value, float) else value


def _round_float32(value: float) -> float:
    """Return the value of a float32 field, rounded to 7 significant digits.

    The caller's 0.7 is a float32 in this protocol's messages, and a float64 in JSON. The rounding
    makes both values equal, so that all protocols generate the same completions.
    """
    return float(f"{value:.7g}")


def _enum_value(values: Mapping[int, Any], value: int, field: str) -> Any:
    """Return the value for an enum number; raise if the number is unknown to this server."""
    if value not in values:
        raise RequestError(
            f"{field} is {value}, which this version of the server does not support; choose one "
            f"of: {', '.join(map(str, values))}",
            field,
        )
    return values[value]


# ---------------------------------------------------------------------------------------- responses


async def _collect_completions(stream: Stream, call: Call) -> list[Completion]:
    """Return all completions of a stream; raise an error that ends the whole request."""
    pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
    async for piece in call.pieces(stream):
        pieces[piece.index].append(piece)
    return [
        build_completion(index, answer, pieces[index])
        for index, answer in enumerate(stream.request.answers)
    ]


def _completion_message(completion: Completion, call: Call) -> pb.Completion:
    message = pb.Completion(
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=FINISH_REASONS[completion.finish],
        usage=pb.Usage(
            prompt_tokens=completion.prompt_tokens,
            virtual_tokens=completion.virtual_tokens,
            completion_tokens=completion.resumed_tokens + len(completion.token_ids),
            cached_tokens=completion.cached_tokens,
        ),
        seed=completion.seed,
        adapter=completion.adapter,
        scores=_token_scores(completion.token_ids, completion.scores),
        prompt_scores=_prompt_token_scores(completion.prompt, 0, completion.prompt_scores, call),
        beam_score=completion.beam_score,
    )
    _set_end(message, completion.stop, completion.error)
    return message


class _ChunkBuilder:
    """Builds the stream messages of one completion, in order."""

    def __init__(self, answer: AnswerSpec, call: Call) -> None:
        self._answer = answer
        self._call = call
        self._started = False
        self._generated_tokens = len(answer.resumed_tokens)
        self._cached_tokens = self._prompt_scores_sent = 0

    def build(self, piece: Piece) -> pb.GenerateStreamResponse:
        answer = self._answer
        message = pb.GenerateStreamResponse(
            text=piece.text,
            token_ids=piece.token_ids,
            finish_reason=FINISH_REASONS[piece.finish],
            index=piece.index,
        )
        if piece.scores:
            message.scores.extend(_token_scores(piece.token_ids, piece.scores))
        if piece.prompt_scores:
            start = self._prompt_scores_sent
            self._prompt_scores_sent += len(piece.prompt_scores)
            message.prompt_scores.extend(
                _prompt_token_scores(answer.prompt, start, piece.prompt_scores, self._call)
            )
        if not self._started:
            message.seed = answer.sampling.seed
            message.adapter = answer.adapter
            message.base_fingerprint = self._call.service.base_fingerprint
            self._started = True
        self._generated_tokens += len(piece.token_ids)
        self._cached_tokens += piece.cached_tokens
        if piece.finish or piece.error:
            message.usage.prompt_tokens = answer.prompt_tokens
            message.usage.virtual_tokens = answer.virtual_tokens
            message.usage.completion_tokens = self._generated_tokens
            message.usage.cached_tokens = self._cached_tokens
            if piece.beam_score is not None:
                message.beam_score = piece.beam_score
            _set_end(message, piece.stop, piece.error)
        return message


def _set_end(
    message: pb.Completion | pb.GenerateStreamResponse,
    stop: str | int | None,
    error: Any,
) -> None:
    """Set the stop and failure fields of a finished completion."""
    if isinstance(stop, str):
        message.stop_string = stop
    elif stop is not None:
        message.stop_token_id = stop
    if error is not None:
        call_failure = to_call_failure(error)
        message.failure.reason = call_failure.reason.name
        message.failure.message = str(call_failure)


def _token_scores(ids: Sequence[int], scores: Iterable[TokenScore]) -> list[pb.TokenScore]:
    return [_token_score(token, score) for token, score in zip(ids, scores, strict=False)]


def _token_score(token: int, score: TokenScore | None) -> pb.TokenScore:
    if score is None:
        return pb.TokenScore(token_id=token)
    return pb.TokenScore(
        token_id=token,
        logprob=score.logprob,
        rank=score.rank,
        top_tokens=[
            pb.TopToken(token_id=top_token, logprob=logprob) for top_token, logprob in score.tops
        ],
    )


def _prompt_token_scores(
    prompt: Sequence[int], start: int, scores: Sequence[TokenScore | None], call: Call
) -> list[pb.TokenScore]:
    """Return the messages of `scores`, the scores of the prompt's tokens from index `start` on.

    The message of a virtual token has `token_id` 0 and `virtual` true.
    """
    vocab_size = call.service.checkpoint.config.vocab_size
    messages = []
    for token, score in zip(prompt[start : start + len(scores)], scores, strict=True):
        is_virtual = token >= vocab_size
        message = _token_score(0 if is_virtual else token, score)
        message.virtual = is_virtual
        messages.append(message)
    return messages


def _text_score(answer: AnswerSpec, completion: Completion, call: Call) -> pb.TextScore:
    """Return the score of the continuation, or of the whole prompt if there is no continuation."""
    start = len(answer.prompt) - answer.continuation_tokens if answer.continuation_tokens else 0
    token_scores = [score for score in completion.prompt_scores if score is not None]
    return pb.TextScore(
        logprob=sum(score.logprob for score in token_scores),
        greedy=all(score.rank == 1 for score in token_scores),
        tokens=_prompt_token_scores(answer.prompt, start, completion.prompt_scores, call),
    )
