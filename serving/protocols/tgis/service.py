"""`fmaas.GenerationService`: the wire of IBM's TGIS and of vllm-tgis-adapter.

Many prompts in a call, or one as a stream whose first message tells of the input. What is asked is
read in `request`; here pieces become that wire's messages. `model_id` is not looked at, as there
and here a server has one model; `prefix_id` and `adapter_id` name an adapter.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from gpt.errors import RequestError
from gpt.tokenizers.tokenizer import Tokenizer
from protos.foreign import package
from serving.engine.stream import Stream, completion
from serving.frontend.call import Call
from serving.frontend.grpc_transport import Method, Write
from serving.messages import Scored
from serving.protocols.tgis.request import adapters_of, ask_of, details, draws, refusals
from serving.request import Answer, Ask, Completion, Finish, Piece

SERVICE = "fmaas.GenerationService"
pb = package("tgis")
STOPS = pb.file.enum_types_by_name["StopReason"].values_by_name
GAP_BYTES_MAX = 64  # How far behind the one before a token is looked for in a text.


def methods() -> list[Method]:
    return [
        Method("Generate", pb.BatchedGenerationRequest, generate),
        Method("GenerateStream", pb.SingleGenerationRequest, generate_stream, "out"),
        Method("Tokenize", pb.BatchedTokenizeRequest, tokenize),
        Method("ModelInfo", pb.ModelInfoRequest, model_info),
    ]


async def generate(message: Any, call: Call) -> Any:
    """Every prompt's answer, in order. One that cannot be has all refused, before any runs."""
    _check_batch(message, call)
    with refusals():
        asks = [_ask(message, one.text, call) for one in message.requests]
        if len(asks) > 1:
            await asyncio.to_thread(_admit_all, asks, call)
        streams = [await _start(ask, call) for ask in asks]
        responses = []
        for one, stream in zip(message.requests, streams, strict=True):
            # They run side by side, and each keeps what comes until it is its turn here.
            pieces = [piece async for piece in call.pieces(stream)]
            done = completion(0, stream.request.answers[0], pieces)
            teller = _Teller(message.params, one.text, stream, call)
            response = teller.output(done, len(done.token_ids))
            teller.put_input(response, done.prompt_scores)
            responses.append(response)
        return pb.BatchedGenerationResponse(responses=responses)


async def generate_stream(message: Any, call: Call, write: Write) -> None:
    with refusals():
        text = message.request.text
        stream = await call.start(_ask(message, text, call))
        teller = _Teller(message.params, text, stream, call)
        begun, made = False, 0
        prompt_scores: list[Scored | None] = []
        async for piece in call.pieces(stream):
            prompt_scores += piece.prompt_scores
            if not (piece.token_ids or piece.finish):
                continue  # The input is told at once, so all of it has to be there.
            if not begun:
                begun, first = True, pb.GenerationResponse()
                teller.put_input(first, prompt_scores)
                await write(first)
            made += len(piece.token_ids)
            response = teller.output(piece, made)
            if response.text or response.tokens or piece.finish:
                await write(response)


async def tokenize(message: Any, call: Call) -> Any:
    _check_batch(message, call)
    config = call.service.config
    size = sum(len(one.text.encode()) for one in message.requests)
    if size > config.text_bytes_max:
        raise RequestError(
            f"the texts are {size} bytes together; this server takes at most "
            f"{config.text_bytes_max} (text_bytes_max) in a call",
            "requests",
        )
    with refusals():
        return await asyncio.to_thread(_tokenized, message, call)


async def model_info(message: Any, call: Call) -> Any:
    tokens_max = call.service.admission.tokens_max
    return pb.ModelInfoResponse(max_sequence_length=tokens_max, max_new_tokens=tokens_max - 1)


# ------------------------------------------------------------------------------------ what is asked


def _check_batch(message: Any, call: Call) -> None:
    count, most = len(message.requests), call.service.config.queue_requests_max
    if count > most:
        raise RequestError(
            f"requests has {count}; at most {most} may be in a call (queue_requests_max)",
            "requests",
        )


def _ask(message: Any, text: str, call: Call) -> Ask:
    service = call.service
    return ask_of(message, text, service.config, service.admission.tokens_max)


async def _start(ask: Ask, call: Call) -> Stream:
    try:
        return await call.start(ask, whole=True)
    except RequestError as error:
        if error.field in ("text", "prompt"):
            error.field = "requests[0].text"  # Others of a batch were admitted before.
        raise


def _admit_all(asks: Sequence[Ask], call: Call) -> None:
    """Raises what is wrong with one of them; says which."""
    for place, ask in enumerate(asks):
        try:
            call.service.admission.admit(replace(ask, tenant=call.caller.tenant))
        except RequestError as error:
            if error.field in ("text", "prompt"):
                error.field = f"requests[{place}].text"
            raise


# --------------------------------------------------------------------------------- what is answered


def _number(stop_reason: str) -> int:
    return int(STOPS[stop_reason].number)


@dataclass(frozen=True)
class _Teller:
    """What an answer's messages hold, as its parameters have it."""

    params: Any
    text: str
    stream: Stream
    call: Call

    @property
    def _answer(self) -> Answer:
        return self.stream.request.answers[0]

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.call.service.tokenizer

    def put_input(self, response: Any, scores: Sequence[Scored | None]) -> None:
        """What is told of the input, and of what was drawn for it."""
        answer, told = self._answer, self.params.response
        response.input_token_count = answer.prompt_tokens
        if draws(self.params):
            response.seed = answer.sampling.seed
        vocab_size = self.call.service.checkpoint.config.vocab_size
        # Rows of an adapter are nobody's tokens outside.
        own = [
            (token, scored)
            for token, scored in zip_longest(answer.prompt, scores[: len(answer.prompt)])
            if token < vocab_size
        ]
        if told.input_text:
            cut = self.params.truncate_input_tokens
            text = self._tokenizer.decode(token for token, _ in own) if cut else self.text
            response.text = text + response.text
        if told.input_tokens:
            response.input_tokens.extend(self._infos(own))

    def output(self, made: Piece | Completion, count: int) -> Any:
        """What was made, of which there are `count` tokens by now."""
        response = pb.GenerationResponse(
            text=made.text, generated_token_count=count, stop_reason=self._reason(made)
        )
        if isinstance(made.stop, str):
            response.stop_sequence = made.stop
        if self.params.response.generated_tokens:
            response.tokens.extend(self._infos(zip_longest(made.token_ids, made.scores)))
        return response

    def _reason(self, made: Piece | Completion) -> int:
        finish: Finish | None = made.finish
        match finish:
            case None:
                return _number("NOT_FINISHED")
            case "stop":
                return _number("STOP_SEQUENCE" if isinstance(made.stop, str) else "EOS_TOKEN")
            case "time":
                return _number("TIME_LIMIT")
        return _number("TOKEN_LIMIT" if self._fitted else "MAX_TOKENS")

    @property
    def _fitted(self) -> bool:
        """Whether it was the context that set how many tokens there could be."""
        answer, asked = self._answer, self.params.stopping.max_new_tokens
        limit = answer.sampling.max_new_tokens
        if asked:
            return bool(limit < asked)
        return len(answer.prompt) + limit >= self.call.service.admission.tokens_max

    def _infos(self, tokens: Iterable[tuple[int, Scored | None]]) -> list[Any]:
        told, spelling = self.params.response, self._tokenizer.spelling
        infos = []
        for token, scored in tokens:
            info = pb.TokenInfo(text=spelling(token))
            infos.append(info)
            if scored is None or not details(told):
                continue
            if told.token_logprobs:
                info.logprob = scored.logprob
            if told.token_ranks:
                info.rank = scored.rank
            for top, logprob in scored.tops[: told.top_n_tokens]:
                info.top_tokens.add(
                    text=spelling(top), logprob=logprob if told.token_logprobs else 0.0
                )
        return infos


# -------------------------------------------------------------------------------- texts, as tokens


def _tokenized(message: Any, call: Call) -> Any:
    admission, tokenizer = call.service.admission, call.service.tokenizer
    response = pb.BatchedTokenizeResponse()
    for one in message.requests:
        whole = Ask(one.text, adapters=adapters_of(message), tenant=call.caller.tenant)
        cut = replace(whole, truncate_tokens=message.truncate_input_tokens or None)
        ids = admission.text_ids(cut)
        told = response.responses.add(token_count=len(ids))
        if message.return_tokens:
            told.tokens.extend(map(tokenizer.spelling, ids))
        if message.return_offsets:
            places = _offsets(admission.text_ids(whole), one.text, tokenizer)
            if len(ids) < len(places):
                begins = len(ids) > 1 and ids[0] == tokenizer.bos_id
                tail = places[len(places) - len(ids) + begins :]
                places = [*places[:begins], *tail]
            for start, end in places:
                told.offsets.add(start=start, end=end)
    return response


def _offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Where in the text each token is, in characters; the end is the first that is not its.

    Bytes of a character have all of it. Where the tokenizer changed the text, a token's place is
    found by looking for it, and one that is not there has none of the text.
    """
    data = text.encode()
    # Of each byte: which character it is of.
    character = [place for place, letter in enumerate(text) for _ in letter.encode()]
    character.append(len(text))
    at, places = 0, []
    for token in ids:
        told = tokenizer.token_bytes(token)
        if told is None:
            places.append((0, 0))  # A control token is nowhere in a text.
            continue
        start, bare = at, told.lstrip(b" ")
        if data.startswith(told, at):
            end = at + len(told)
        elif bare and (found := data.find(bare, at, at + len(told) + GAP_BYTES_MAX)) >= 0:
            # A space that encoding put before it, or took away.
            end = found + len(bare)
            start = found if data[at:found].strip() else at
        else:
            end = at
        last = character[end - 1] + 1 if end > start else character[start]
        places.append((character[start], last))
        at = end
    return places
