"""OpenAI's `/v1/completions` and `/v1/models`: the base is a model, and so is each adapter.

A body becomes an `Ask` for each prompt, pieces become choices: whole, or event by event. Log-
probabilities have OpenAI's old shape, which programs that score texts read. What a field means is
in `openai_request`; what HTTP is, in `serving.http`.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from aiohttp import web

from gpt.errors import RequestError
from gpt.text_stream import TextStream
from gpt.tokenizer import Tokenizer
from serving.front import Call, Ended, Front
from serving.http import (
    GOODBYE_S,
    JSON,
    Answer,
    BadRequestError,
    Events,
    Routes,
    answered,
    body_of,
    record_of,
)
from serving.messages import Scored
from serving.request import Answer as Asked
from serving.request import Finish, Piece, RefusedError
from serving.service import Service
from serving.stream import Stream
from serving.wires import openai_request
from serving.wires.openai_request import Body, asks_of, guide_field

WIRE = "openai"
FINISH: Mapping[Finish, str] = {"stop": "stop", "length": "length", "scored": "length"}
# JSON has no infinity, which the logarithm of no chance at all is.
LOGPROB_MIN = -9999.0


def routes(front: Front) -> Routes:
    """The endpoints, by path."""
    surface = _Surface(front)
    models: Mapping[str, Answer] = {"GET": surface.models, "HEAD": surface.models}
    return {
        "/v1/completions": {"POST": surface.completions},
        "/v1/models": models,
        "/v1/models/": models,
    }


class _Surface:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._front.call(WIRE, "models", _credential(request)) as call:
            call.caller.must("generate")
            base = call.service.name
            wanted = request.path.removeprefix("/v1/models").lstrip("/")
            found = {base: self._model(base, None, call.service.admission.context_tokens_max)}
            for resident, current in call.service.adapters.list(call.caller.tenant):
                for name in (resident.name, resident.key) if current else (resident.key,):
                    found.setdefault(name, self._model(name, base, None))
            if not wanted:
                return answered({"object": "list", "data": list(found.values())})
            if wanted not in found:
                raise _unknown(wanted)
            return answered(found[wanted])

    def _model(self, name: str, parent: str | None, context: int | None) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "preamble"}
        return model | {"root": parent or name, "parent": parent, "max_model_len": context}

    async def completions(self, request: web.BaseRequest) -> web.StreamResponse:
        events, said = Events(request), Body()
        try:
            async with self._front.call(WIRE, "completions", _credential(request)) as call:
                call.caller.must("generate")
                said = await _body(request, call)
                run = await _Run.start(said, call)
                if not said.stream:
                    return answered(await run.whole())
                async with aclosing(run.chunks()) as chunks:
                    async for chunk in chunks:
                        await call.send(events.send(chunk))
                await call.send(events.send(b"[DONE]"))
                return await events.end()
        except Ended as ended:
            named = _named(ended, said)
            if not events.begun:
                raise named from None
            return await _broken(events, named)


async def _broken(events: Events, ended: Ended) -> web.StreamResponse:
    """The end of a stream that had begun well."""
    if ended.reason.name != "SLOW_READER":
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await events.send(msgspec.json.encode(record_of(ended)))
                return await events.end()
    events.cut()
    return await events.end()


def _credential(request: web.BaseRequest) -> str | None:
    return request.headers.get("Authorization")


async def _body(request: web.BaseRequest, call: Call) -> Body:
    config = call.service.config
    # A page that a browser is tricked into showing can send other kinds without being asked.
    if request.content_type != JSON or "Content-Type" not in request.headers:
        kind = ascii(request.headers.get("Content-Type", ""))[:100]
        raise BadRequestError(400, f"the content type is {kind}; it must be {JSON}")
    data = await body_of(request, config.message_bytes_max, config.slow_reader_s)
    return openai_request.body_of(data)


def _unknown(model: str) -> RefusedError:
    shown = ascii(model)[:100]
    return RefusedError(
        "UNKNOWN_MODEL", f"there is no model {shown} here; GET /v1/models tells of all", "model"
    )


def _named(ended: Ended, body: Body) -> Ended:
    """With OpenAI's word for the field that is to blame, where that is another one than ours."""
    if isinstance(ended, BadRequestError) or ended.field is None:
        return ended
    name = openai_request.NAMES.get(ended.field, ended.field)
    if ended.field.partition(".")[0] == "guide":
        name = guide_field(body)
    message = re.sub(rf"(?<![\w.]){re.escape(ended.field)}(?![\w.])", name, str(ended), count=1)
    return Ended(ended.reason, message, name, ended.retry_s)


# --------------------------------------------------------------------------------- what is answered


class _Run:
    """The streams of one call, one for each prompt, and the choices that they make."""

    def __init__(self, body: Body, call: Call, streams: Sequence[Stream]) -> None:
        self._call, self._streams = call, streams
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        service = call.service
        self._choices: list[list[_Choice]] = []
        for place, stream in enumerate(streams):
            first = sum(map(len, self._choices))
            prompt = body.prompt[place] if isinstance(body.prompt, list) else body.prompt
            echoed = prompt if isinstance(prompt, str) and not body.truncate_prompt_tokens else None
            self._choices.append(
                [
                    _Choice(first + index, answer, body, service, echoed)
                    for index, answer in enumerate(stream.request.answers)
                ]
            )
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": streams[0].request.answers[0].adapter or service.name,
        }

    @classmethod
    async def start(cls, body: Body, call: Call) -> "_Run":
        service = call.service
        asks = asks_of(body, service.name, service.config.prompts_max)
        if body.timeout is not None:
            call.deadline = call.arrival + body.timeout
        streams = []
        try:
            for ask in asks:
                streams.append(await call.start(ask, whole=not body.stream))
        except RequestError as error:
            if error.field == "adapter" and body.model is not None:
                raise _unknown(body.model) from None
            raise
        return cls(body, call, streams)

    async def whole(self) -> dict[str, Any]:
        told: dict[int, dict[str, Any]] = {}
        async with aclosing(self._pieces()) as pieces:
            async for choice, piece in pieces:
                more = choice.told(piece)
                if more is not None:
                    index = choice.index
                    told[index] = _joined(told[index], more) if index in told else more
        choices = [told[index] for index in sorted(told)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        head = {**self._head, "usage": None} if self._include_usage else self._head
        async with aclosing(self._pieces()) as pieces:
            async for choice, piece in pieces:
                told = choice.told(piece)
                if told is not None:
                    yield msgspec.json.encode({**head, "choices": [told]})
        if self._include_usage:
            yield msgspec.json.encode({**self._head, "choices": [], "usage": self._usage()})

    async def _pieces(self) -> AsyncGenerator[tuple["_Choice", Piece], None]:
        """Of all streams, as they come. The first that fails ends all: there is no other way to
        say so in this protocol.
        """
        async with aclosing(_merged(self._call, self._streams)) as merged:
            async for place, piece in merged:
                if piece.error is not None:
                    raise piece.error
                yield self._choices[place][piece.index], piece

    def _usage(self) -> dict[str, Any]:
        firsts = [choices[0] for choices in self._choices]  # A prompt counts once.
        prompt = sum(one.answer.prompt_tokens for one in firsts)
        made = sum(one.made for choices in self._choices for one in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "virtual_tokens": sum(one.answer.virtual_tokens for one in firsts),
            "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in firsts)},
        }


async def _merged(call: Call, streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all, each with its stream's place."""
    if len(streams) == 1:
        async for only in call.pieces(streams[0]):
            yield 0, only
        return
    sources = [call.pieces(stream) for stream in streams]

    def ask(place: int) -> "asyncio.Task[Piece | None]":
        return asyncio.ensure_future(anext(sources[place], None))

    waiting = {ask(place): place for place in range(len(sources))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                piece = task.result()
                if piece is not None:
                    yield place, piece
                    waiting[ask(place)] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _joined(told: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Two bits of a choice, one after the other."""
    joined = {**told, **more, "text": told["text"] + more["text"]}
    if told["logprobs"] is not None and more["logprobs"] is not None:
        joined["logprobs"] = {
            name: values + more["logprobs"][name] for name, values in told["logprobs"].items()
        }
    if "prompt_logprobs" in told:
        joined["prompt_logprobs"] = told["prompt_logprobs"]
    return joined


class _Choice:
    """One answer, told bit by bit."""

    def __init__(
        self, index: int, answer: Asked, body: Body, service: Service, echoed: str | None
    ) -> None:
        self.index, self.answer = index, answer
        self._vocab_size = service.checkpoint.config.vocab_size
        self.made = self.cached = 0
        self._echo, self._logprobs = bool(body.echo), body.logprobs
        self._prompt_tops = body.prompt_logprobs
        self._tokenizer, self._echoed = service.tokenizer, echoed
        self._prompt_scores: list[Scored | None] = []
        self._begun = False
        self._stream, self._offset = TextStream(service.tokenizer, started=True), 0

    def told(self, piece: Piece) -> dict[str, Any] | None:
        """A piece as a choice; None: there is nothing to tell yet."""
        self.made += len(piece.token_ids)
        self.cached += piece.cached_tokens
        self._prompt_scores += piece.prompt_scores
        if not (piece.token_ids or piece.text or piece.finish):
            return None
        text, tokens = piece.text, _Tokens(self._logprobs, self._tokenizer)
        record: dict[str, Any] = {"index": self.index}
        if not self._begun:
            self._begun = True
            text = self._prompt(tokens) + text
            record["seed"] = self.answer.sampling.seed
            if self._prompt_tops is not None:
                record["prompt_logprobs"] = self._prompt_record(self._prompt_tops)
        if self._logprobs is not None:
            self._offset = tokens.add(self._stream, piece.token_ids, piece.scores, self._offset)
        stop = {"stop_reason": piece.stop} if piece.stop is not None else {}
        return record | {
            "text": text,
            "logprobs": None if self._logprobs is None else tokens.record(),
            "finish_reason": None if piece.finish is None else FINISH.get(piece.finish, "length"),
            **stop,
        }

    @property
    def _prompt_ids(self) -> list[tuple[int, int]]:
        """The text's tokens, each with its place; an adapter's rows are nobody's business."""
        rows = self.answer.virtual_tokens
        prompt = enumerate(self.answer.prompt)
        return [(place, one) for place, one in prompt if not rows or one < self._vocab_size]

    def _prompt(self, tokens: "_Tokens") -> str:
        """The prompt's text, if it is wanted; its tokens are told too then."""
        if not self._echo:
            return ""
        known = self._prompt_ids
        ids = [token for _, token in known]
        text = self._tokenizer.decode(ids) if self._echoed is None else self._echoed
        if self._logprobs is not None:
            assert len(self._prompt_scores) == len(self.answer.prompt)
            scores = [self._prompt_scores[place] for place, _ in known]
            tokens.add(TextStream(self._tokenizer), ids, scores, 0)
        self._offset = len(text)
        return text

    def _prompt_record(self, tops: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: by token id."""
        told: list[dict[str, Any] | None] = []
        for place, token in self._prompt_ids:
            scored = self._prompt_scores[place]
            if scored is None:
                told.append(None)
                continue
            entry = {
                str(one): {
                    "logprob": max(logprob, LOGPROB_MIN),
                    "rank": rank,
                    "decoded_token": _word(self._tokenizer, one),
                }
                for rank, (one, logprob) in enumerate(scored.tops[:tops], 1)
            }
            own = {"logprob": max(scored.logprob, LOGPROB_MIN), "rank": scored.rank or None}
            entry[str(token)] = own | {"decoded_token": _word(self._tokenizer, token)}
            told.append(entry)
        return told


class _Tokens:
    """OpenAI's log-probabilities: parallel lists over tokens."""

    def __init__(self, tops: int | None, tokenizer: Tokenizer) -> None:
        self._tops, self._tokenizer = tops or 0, tokenizer
        self._words: list[str] = []
        self._logprobs: list[float | None] = []
        self._best: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self,
        stream: TextStream,
        ids: Sequence[int],
        scores: Sequence[Scored | None],
        offset: int,
    ) -> int:
        """`offset`: where the first one begins in the text. Returns where the next one will."""
        for token, scored in zip(ids, scores, strict=True):
            self._offsets.append(offset)
            text, word = stream.push(token), _word(self._tokenizer, token)
            offset += len(text)
            if text and word.endswith(text):
                word = text  # Without the space that a text does not begin with.
            self._words.append(word)
            self._logprobs.append(None if scored is None else max(scored.logprob, LOGPROB_MIN))
            self._best.append(None if scored is None else self._alternatives(token, word, scored))
        return offset

    def _alternatives(self, token: int, word: str, scored: Scored) -> dict[str, float]:
        """The best ones, and the token itself. Of several that read alike the best one is told."""
        best: dict[str, float] = {}
        for one, logprob in scored.tops[: self._tops]:
            name = word if one == token else _word(self._tokenizer, one)
            best.setdefault(name, max(logprob, LOGPROB_MIN))
        best.setdefault(word, max(scored.logprob, LOGPROB_MIN))
        return best

    def record(self) -> dict[str, list[Any]]:
        return {
            "tokens": self._words,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._best,
            "text_offset": self._offsets,
        }


def _word(tokenizer: Tokenizer, token: int) -> str:
    """A token as OpenAI writes it: text, or bytes of it; of one that is neither, its id."""
    raw = tokenizer.token_bytes(token)
    if raw is None:
        return f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
