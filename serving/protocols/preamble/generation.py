"""`preamble.v1.GenerationService`: completions, scores, and text to ids and back.

A message becomes an `Ask`, pieces become messages. A field that was not set stays None, so that
defaults are decided in one place, the admission.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpt.errors import RequestError
from protos.preamble.v1 import generation_pb2 as pb
from serving.engine.stream import Stream, completion
from serving.frontend.call import Call, ended_by
from serving.frontend.field_names import said_as
from serving.frontend.grpc_transport import Method, Write
from serving.messages import Guide, Scored, ServiceClass
from serving.request import Answer, Ask, Completion, EarlyStopping, Finish, Piece

SERVICE = "preamble.v1.GenerationService"
FINISH: Mapping[Finish | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "scored": pb.FINISH_REASON_LENGTH,
    "time": pb.FINISH_REASON_TIME_LIMIT,
}
CLASSES: Mapping[int, ServiceClass] = {
    pb.SERVICE_CLASS_UNSPECIFIED: "latency",
    pb.SERVICE_CLASS_LATENCY: "latency",
    pb.SERVICE_CLASS_THROUGHPUT: "throughput",
}
EARLY: Mapping[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FIRST: True,
    pb.EARLY_STOPPING_NEVER: "never",
}

# Where the messages have what an ask calls so; all else has one name in both.
FIELDS: Mapping[str, str] = {
    **{one.name: f"sampling.{one.name}" for one in pb.Sampling.DESCRIPTOR.fields},
    **{one.name: f"details.{one.name}" for one in pb.Details.DESCRIPTOR.fields},
    "guide.json": "guide.json_schema",
    "guide.choice": "guide.choices",
    "beam_width": "beams.width",
    "length_penalty": "beams.length_penalty",
    "truncate_tokens": "truncate_prompt_tokens",
}
SCORE_FIELDS: Mapping[str, str] = {"prompt_logprobs": "logprobs"}

Asked = pb.GenerateRequest | pb.GenerateStreamRequest


def methods() -> list[Method]:
    return [
        Method("Generate", pb.GenerateRequest, generate),
        Method("GenerateStream", pb.GenerateStreamRequest, generate_stream, "out"),
        Method("Score", pb.ScoreRequest, score),
        Method("Tokenize", pb.TokenizeRequest, tokenize),
        Method("Detokenize", pb.DetokenizeRequest, detokenize),
    ]


async def generate(message: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
    stream = await _start(call, ask_of(message), FIELDS, whole=True)
    done = [_completion(one, call) for one in await _whole(stream, call)]
    first = done[0]
    return pb.GenerateResponse(
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=first.usage,
        seed=first.seed,
        adapter=first.adapter,
        completions=done,
    )


async def generate_stream(message: pb.GenerateStreamRequest, call: Call, write: Write) -> None:
    stream = await _start(call, ask_of(message), FIELDS)
    writers = [_Writer(answer, call) for answer in stream.request.answers]
    async for piece in call.pieces(stream):
        await write(writers[piece.index].message(piece))


async def score(message: pb.ScoreRequest, call: Call) -> pb.ScoreResponse:
    ask = Ask(
        _prompt(message),
        adapters=(message.adapter,) if message.adapter else (),
        continuations=tuple(message.continuations),
        max_new_tokens=0,
        prompt_logprobs=message.logprobs,
        service=_one_of(CLASSES, message.service_class, "service_class"),
        priority=message.priority,
    )
    stream = await _start(call, ask, SCORE_FIELDS, whole=True)
    done = await _whole(stream, call)
    answers = stream.request.answers
    for one in done:
        if one.error is not None:
            raise one.error
    first = answers[0]
    return pb.ScoreResponse(
        scores=[_text_score(answer, one, call) for answer, one in zip(answers, done, strict=True)],
        usage=pb.Usage(
            prompt_tokens=first.prompt_tokens - first.continued,
            virtual_tokens=first.virtual_tokens,
            completion_tokens=sum(answer.continued for answer in answers),
            cached_tokens=done[0].cached_tokens,
        ),
        adapter=first.adapter,
    )


async def tokenize(message: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
    admission = call.service.admission
    return pb.TokenizeResponse(token_ids=await asyncio.to_thread(admission.tokenize, message.text))


async def detokenize(message: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
    admission = call.service.admission
    ids = tuple(message.token_ids)
    return pb.DetokenizeResponse(text=await asyncio.to_thread(admission.detokenize, ids))


# ------------------------------------------------------------------------------------ what is asked


async def _start(call: Call, ask: Ask, names: Mapping[str, str], *, whole: bool = False) -> Stream:
    """A refusal speaks of the message's fields, since who gets it knows no ask."""
    try:
        return await call.start(ask, whole=whole)
    except RequestError as error:
        raise said_as(error, names) from None


def ask_of(message: Asked) -> Ask:
    if message.adapter and message.adapters:
        raise RequestError("adapter and adapters are both set; give one of them", "adapters")
    sampling, beams, details = message.sampling, message.beams, message.details
    decay = sampling.length_decay
    searches = message.HasField("beams")
    if searches and beams.width < 2:
        raise RequestError(
            f"beams.width is {beams.width}; a search needs at least 2", "beams.width"
        )
    return Ask(
        _prompt(message),
        adapters=tuple(message.adapters) or ((message.adapter,) if message.adapter else ()),
        answers=message.answers or 1,
        max_new_tokens=_set(message, "max_new_tokens"),
        min_new_tokens=message.min_new_tokens,
        temperature=_set(sampling, "temperature"),
        top_k=sampling.top_k,
        top_p=_set(sampling, "top_p"),
        min_p=_number(sampling.min_p),
        typical_p=_set(sampling, "typical_p", 1.0),
        repetition_penalty=_set(sampling, "repetition_penalty", 1.0),
        presence_penalty=_number(sampling.presence_penalty),
        frequency_penalty=_number(sampling.frequency_penalty),
        logit_bias={token: _number(bias) for token, bias in sampling.logit_bias.items()},
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(sampling.bad_words),
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        length_decay=(decay.start, _number(decay.factor))
        if sampling.HasField("length_decay")
        else None,
        seed=_set(sampling, "seed"),
        stop_strings=tuple(message.stops.strings),
        stop_token_ids=tuple(message.stops.token_ids),
        stop_in_text=message.stops.include_in_text,
        ignore_ends=message.stops.ignore_model_ends,
        logprobs=_set(details, "logprobs"),
        prompt_logprobs=_set(details, "prompt_logprobs"),
        guide=_guide(message.guide) if message.HasField("guide") else None,
        beam_width=beams.width if searches else 1,
        length_penalty=_set(beams, "length_penalty", 1.0),
        early_stopping=_one_of(EARLY, beams.early_stopping, "beams.early_stopping"),
        service=_one_of(CLASSES, message.service_class, "service_class"),
        priority=message.priority,
        truncate_tokens=message.truncate_prompt_tokens or None,
        time_limit_s=message.time_limit_ms / 1000 or None,
    )


def _prompt(message: Any) -> str | tuple[int, ...] | dict[str, str] | None:
    match message.WhichOneof("prompt"):
        case "text":
            return str(message.text)
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "inputs":
            return dict(message.inputs.fields)
    return None


def _guide(guide: pb.Guide) -> Guide:
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
        "guide says nothing; set json_schema, regex, choices or grammar, or leave it out", "guide"
    )


def _set(message: Any, field: str, unset: Any = None) -> Any:
    """What an optional field has, or what stands for none."""
    if not message.HasField(field):
        return unset
    value = getattr(message, field)
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float:
    """What was written: a message has 32 bits of 0.7, and other surfaces, asked the same, 64."""
    return float(f"{value:.7g}")


def _one_of(known: Mapping[int, Any], value: int, field: str) -> Any:
    """An enum's value; one that only a newer client knows would change what is asked."""
    if value not in known:
        raise RequestError(f"{field} is {value}, which this server does not know", field)
    return known[value]


# --------------------------------------------------------------------------------- what is answered


async def _whole(stream: Stream, call: Call) -> list[Completion]:
    """Every answer, whole. The fault of the only one is the call's."""
    pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
    async for piece in call.pieces(stream):
        pieces[piece.index].append(piece)
    return [
        completion(index, answer, pieces[index])
        for index, answer in enumerate(stream.request.answers)
    ]


def _completion(one: Completion, call: Call) -> pb.Completion:
    message = pb.Completion(
        text=one.text,
        token_ids=one.token_ids,
        finish_reason=FINISH[one.finish],
        usage=pb.Usage(
            prompt_tokens=one.prompt_tokens,
            virtual_tokens=one.virtual_tokens,
            completion_tokens=len(one.token_ids),
            cached_tokens=one.cached_tokens,
        ),
        seed=one.seed,
        adapter=one.adapter,
        scores=_scores(one.token_ids, one.scores),
        prompt_scores=_prompt_scores(one.prompt, 0, one.prompt_scores, call),
        beam_score=one.beam_score,
    )
    _end(message, one.stop, one.error)
    return message


class _Writer:
    """One answer's messages, in order."""

    def __init__(self, answer: Answer, call: Call) -> None:
        self._answer, self._call = answer, call
        self._begun = False
        self._made = self._cached = self._told = 0

    def message(self, piece: Piece) -> pb.GenerateStreamResponse:
        answer = self._answer
        message = pb.GenerateStreamResponse(
            text=piece.text,
            token_ids=piece.token_ids,
            finish_reason=FINISH[piece.finish],
            index=piece.index,
        )
        if piece.scores:
            message.scores.extend(_scores(piece.token_ids, piece.scores))
        if piece.prompt_scores:
            told, self._told = self._told, self._told + len(piece.prompt_scores)
            message.prompt_scores.extend(
                _prompt_scores(answer.prompt, told, piece.prompt_scores, self._call)
            )
        if not self._begun:
            message.seed, message.adapter = answer.sampling.seed, answer.adapter
            self._begun = True
        self._made += len(piece.token_ids)
        self._cached += piece.cached_tokens
        if piece.finish or piece.error:
            message.usage.prompt_tokens = answer.prompt_tokens
            message.usage.virtual_tokens = answer.virtual_tokens
            message.usage.completion_tokens = self._made
            message.usage.cached_tokens = self._cached
            if piece.beam_score is not None:
                message.beam_score = piece.beam_score
            _end(message, piece.stop, piece.error)
        return message


def _end(
    message: pb.Completion | pb.GenerateStreamResponse,
    stop: str | int | None,
    error: Any,
) -> None:
    if isinstance(stop, str):
        message.stop_string = stop
    elif stop is not None:
        message.stop_token_id = stop
    if error is not None:
        ended = ended_by(error)
        message.failure.reason, message.failure.message = ended.reason.name, str(ended)


def _scores(ids: Sequence[int], scores: Iterable[Scored]) -> list[pb.TokenScore]:
    return [_score(token, one) for token, one in zip(ids, scores, strict=False)]


def _score(token: int, scored: Scored | None) -> pb.TokenScore:
    if scored is None:
        return pb.TokenScore(token_id=token)
    return pb.TokenScore(
        token_id=token,
        logprob=scored.logprob,
        rank=scored.rank,
        top_tokens=[pb.TopToken(token_id=one, logprob=logprob) for one, logprob in scored.tops],
    )


def _prompt_scores(
    prompt: Sequence[int], start: int, scores: Sequence[Scored | None], call: Call
) -> list[pb.TokenScore]:
    """Of the prompt's tokens from `start` on; ids of rows are nobody's business outside."""
    vocab_size = call.service.checkpoint.config.vocab_size
    told = []
    for token, scored in zip(prompt[start : start + len(scores)], scores, strict=True):
        virtual = token >= vocab_size
        message = _score(0 if virtual else token, scored)
        message.virtual = virtual
        told.append(message)
    return told


def _text_score(answer: Answer, one: Completion, call: Call) -> pb.TextScore:
    start = len(answer.prompt) - answer.continued if answer.continued else 0
    known = [scored for scored in one.prompt_scores if scored is not None]
    return pb.TextScore(
        logprob=sum(scored.logprob for scored in known),
        greedy=all(scored.rank == 1 for scored in known),
        tokens=_prompt_scores(answer.prompt, start, one.prompt_scores, call),
    )
