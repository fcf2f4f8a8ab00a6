"""OpenAI choices: renders pieces of text as chunks of a choice, with log-probabilities.

Plain completions have log-probabilities in OpenAI's legacy format, which evaluation programs read.
A `CompletionFormat` contains every difference between the responses of plain completions and chats;
the chat format is in `chat`. `streaming` sends the chunks or merges them into one response. This
module is independent of HTTP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpt.tokenizers.detokenizer import IncrementalDetokenizer
from gpt.tokenizers.tokenizer import Tokenizer, piece_decoder
from serving.engine.stream import Stream
from serving.messages import TokenScore
from serving.protocols.openai.completion_request import BaseCompletionRequest, CompletionRequest
from serving.request import AnswerSpec, FinishReason, Piece
from serving.service.service import Service

FINISH_REASONS: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "scored": "length",
}
# Replaces minus infinity (probability 0), which JSON cannot represent.
LOGPROB_MIN = -9999.0

JsonObject = dict[str, Any]


class Choice(Protocol):
    """A choice in progress: turns the pieces of one completion into chunks."""

    @property
    def index(self) -> int: ...
    @property
    def answer(self) -> AnswerSpec: ...
    @property
    def generated_tokens(self) -> int:
        """Number of completion tokens so far."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        ...

    def render(self, piece: Piece) -> JsonObject | None:
        """Return this choice's chunk for one piece; None if the piece adds nothing."""
        ...


@dataclass(frozen=True)
class CompletionFormat:
    """The response format of an endpoint: plain completions or chats.

    `build_choices` returns the choices of each stream, `merge_chunks` merges two consecutive chunks
    of a choice, and `finalize` converts the merged chunks to a choice of a final response.
    `response_fields` are the fields of a choice that belong to the response: they are moved there.
    """

    id_prefix: str
    final_object: str
    chunk_object: str
    build_choices: Callable[[Any, Sequence[Stream], Service], list[list[Choice]]]
    merge_chunks: Callable[[JsonObject, JsonObject], JsonObject]
    finalize: Callable[[JsonObject], JsonObject]
    response_fields: tuple[str, ...] = ()

    def build_response(
        self, common_fields: JsonObject, choices: Sequence[JsonObject]
    ) -> JsonObject:
        """Build a response from choices (or a chunk of a stream from a chunk of one choice)."""
        response_fields = {
            name: choice.pop(name)
            for choice in choices
            for name in self.response_fields
            if name in choice
        }
        return {**common_fields, "choices": choices, **response_fields}


def _build_choices(
    body: CompletionRequest, streams: Sequence[Stream], service: Service
) -> list[list[Choice]]:
    choices: list[list[Choice]] = []
    for stream_index, stream in enumerate(streams):
        first_index = sum(map(len, choices))
        prompt = body.prompt[stream_index] if isinstance(body.prompt, list) else body.prompt
        echo_text = prompt if isinstance(prompt, str) and not body.truncate_prompt_tokens else None
        choices.append(
            [
                TextChoice(first_index + index, answer, body, service, echo_text)
                for index, answer in enumerate(stream.request.answers)
            ]
        )
    return choices


def _merge_chunks(choice: dict[str, Any], chunk: dict[str, Any]) -> dict[str, Any]:
    """Append a chunk to `choice`, which has the merged earlier chunks; return the result."""
    merged_choice = {**choice, **chunk, "text": choice["text"] + chunk["text"]}
    if choice["logprobs"] is not None and chunk["logprobs"] is not None:
        merged_choice["logprobs"] = {
            name: values + chunk["logprobs"][name] for name, values in choice["logprobs"].items()
        }
    if "token_ids" in choice:
        merged_choice["token_ids"] = choice["token_ids"] + chunk["token_ids"]
    return merged_choice


class TextChoice:
    """A choice of a plain completion in progress, with echo of the prompt and log-probabilities."""

    def __init__(
        self,
        index: int,
        answer: AnswerSpec,
        body: CompletionRequest,
        service: Service,
        echo_text: str | None,
    ) -> None:
        self.index = index
        self.answer = answer
        self.generated_tokens, self.cached_tokens = len(answer.resumed_tokens), 0
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._add_special_tokens = body.add_special_tokens is not False
        self._tokenizer = service.tokenizer
        self._token_notation = TokenNotation(
            service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._prompt_tokens = PromptTokenFields(answer, body, service)
        self._return_token_ids = bool(body.return_token_ids)
        self._echo_text = echo_text
        self._started = False
        decoder = piece_decoder(service.tokenizer, keep_special_tokens=answer.keep_special_tokens)
        self._detokenizer = IncrementalDetokenizer(decoder, continues_text=True)
        self._text_offset = sum(
            len(self._detokenizer.push(token)) for token in answer.resumed_tokens
        )

    def render(self, piece: Piece) -> dict[str, Any] | None:
        """Return this choice's chunk for one piece; None if the piece adds nothing."""
        self.generated_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        self._prompt_tokens.scores += piece.prompt_scores
        if not (piece.token_ids or piece.text or piece.finish):
            return None
        text, tokens = piece.text, _TokenLogprobs(self._logprobs, self._token_notation)
        choice: dict[str, Any] = {"index": self.index}
        if not self._started:
            self._started = True
            text = self._render_prompt(tokens) + text
            choice["seed"] = self.answer.sampling.seed
            choice |= self._prompt_tokens.to_json()
        if self._return_token_ids:
            choice["token_ids"] = piece.token_ids
        if self._logprobs is not None:
            self._text_offset = tokens.add_tokens(
                self._detokenizer, piece.token_ids, piece.scores, self._text_offset
            )
        stop_field = {"stop_reason": piece.stop} if piece.stop is not None else {}
        return choice | {
            "text": text,
            "logprobs": None if self._logprobs is None else tokens.to_json(),
            "finish_reason": None
            if piece.finish is None
            else FINISH_REASONS.get(piece.finish, "length"),
            **stop_field,
        }

    def _render_prompt(self, tokens: "_TokenLogprobs") -> str:
        """Return the prompt's text ('' without `echo`). Add the prompt's logprobs to `tokens`."""
        if not self._echo:
            return ""
        ids = self._prompt_tokens.ids
        text = self._tokenizer.decode(ids) if self._echo_text is None else self._echo_text
        if self._logprobs is not None:
            scores = self._prompt_tokens.text_scores
            control_texts = None
            if self._echo_text is not None:
                prefix = self._tokenizer.prefix_ids if self._add_special_tokens else ()
                added = len(prefix) if tuple(ids[: len(prefix)]) == prefix else 0
                control_texts = _ControlTexts(self._tokenizer, self._echo_text, added)
            detokenizer = IncrementalDetokenizer(self._tokenizer)
            tokens.add_tokens(detokenizer, ids, scores, 0, control_texts)
        self._text_offset = len(text)
        return text


class PromptTokenFields:
    """The prompt of a choice, without virtual tokens, in the formats that a request can ask for."""

    def __init__(
        self,
        answer: AnswerSpec,
        body: BaseCompletionRequest,
        service: Service,
    ) -> None:
        self.scores: list[TokenScore | None] = []  # One for each token of the answer's prompt.
        self._answer = answer
        self._vocab_size = service.checkpoint.config.vocab_size
        self._return_ids = bool(body.return_token_ids)
        self._logprobs = body.prompt_logprobs
        self._notation = TokenNotation(service.tokenizer)

    @property
    def _positions(self) -> list[tuple[int, int]]:
        """Position and id of each prompt token that is not a virtual token."""
        has_virtual_tokens = self._answer.virtual_tokens > 0
        return [
            (position, token)
            for position, token in enumerate(self._answer.prompt)
            if not has_virtual_tokens or token < self._vocab_size
        ]

    @property
    def ids(self) -> list[int]:
        return [token for _, token in self._positions]

    @property
    def text_scores(self) -> list[TokenScore | None]:
        """The score of each token of `ids`."""
        assert len(self.scores) == len(self._answer.prompt)
        return [self.scores[position] for position, _ in self._positions]

    def to_json(self) -> JsonObject:
        """Return vLLM's fields `prompt_token_ids` and `prompt_logprobs`, if they are requested."""
        fields: JsonObject = {}
        if self._return_ids:
            fields["prompt_token_ids"] = self.ids
        if self._logprobs is not None:
            fields["prompt_logprobs"] = self._render_logprobs(self._logprobs)
        return fields

    def _render_logprobs(self, top_count: int) -> list[JsonObject | None]:
        """Build vLLM's `prompt_logprobs`: an element per prompt token.

        An element contains the logprobs of the token and its alternatives, by token id. It is None
        for a token without a score, such as the first token.
        """
        logprobs: list[JsonObject | None] = []
        for token, score in zip(self.ids, self.text_scores, strict=True):
            if score is None:
                logprobs.append(None)
                continue
            alternatives = {
                str(top_token): {
                    "logprob": max(logprob, LOGPROB_MIN),
                    "rank": rank,
                    "decoded_token": self._notation.format(top_token),
                }
                for rank, (top_token, logprob) in enumerate(score.tops[:top_count], 1)
            }
            alternatives[str(token)] = {
                "logprob": max(score.logprob, LOGPROB_MIN),
                "rank": score.rank or None,
                "decoded_token": self._notation.format(token),
            }
            logprobs.append(alternatives)
        return logprobs


class _ControlTexts:
    """Finds the control tokens of a prompt in its text, in order.

    `added`: number of tokens at the beginning of the prompt that are not in the text (BOS).
    """

    def __init__(self, tokenizer: Tokenizer, text: str, added: int) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._added = added
        self._end = 0

    def find_next(self, token: int) -> tuple[int, int] | None:
        """Return start and end of the next token in the text; None if it is no control token."""
        if self._added:
            self._added -= 1
            return None
        content = "" if self._tokenizer.piece(token) else self._tokenizer.id_to_token(token)
        if not content:
            return None
        start = self._text.find(content, self._end)
        if start < 0:  # The tokenizer has changed the text. Do not search for later tokens either.
            self._end = len(self._text)
            return None
        self._end = start + len(content)
        return start, self._end


class _TokenLogprobs:
    """OpenAI's legacy log-probabilities: four lists, each with one element per token."""

    def __init__(self, top_count: int | None, notation: "TokenNotation") -> None:
        self._top_count = top_count or 0
        self._notation = notation
        self._token_texts: list[str] = []
        self._logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_tokens(
        self,
        detokenizer: IncrementalDetokenizer,
        ids: Sequence[int],
        scores: Sequence[TokenScore | None],
        offset: int,
        control_texts: _ControlTexts | None = None,
    ) -> int:
        """Add tokens whose text begins at `offset`; return the offset of the next token.

        Control tokens have no text, except in an echoed prompt (`control_texts`).
        """
        for token, score in zip(ids, scores, strict=True):
            text, token_text = detokenizer.push(token), self._notation.format(token)
            span = None if control_texts is None else control_texts.find_next(token)
            start, offset = (offset, offset + len(text)) if span is None else span
            self._offsets.append(start)
            if text and token_text.endswith(text) and not self._notation.as_ids:
                # At the start of the text, the detokenizer strips the token's leading space.
                token_text = text
            self._token_texts.append(token_text)
            self._logprobs.append(None if score is None else max(score.logprob, LOGPROB_MIN))
            self._top_logprobs.append(
                None if score is None else self._top_alternatives(token, token_text, score)
            )
        return offset

    def _top_alternatives(self, token: int, token_text: str, score: TokenScore) -> dict[str, float]:
        """Return the logprobs of the top tokens and of `token`, by text.

        If several of these tokens have the same text, the logprob of the first one is returned.
        """
        logprobs: dict[str, float] = {}
        for top_token, logprob in score.tops[: self._top_count]:
            text = token_text if top_token == token else self._notation.format(top_token)
            logprobs.setdefault(text, max(logprob, LOGPROB_MIN))
        logprobs.setdefault(token_text, max(score.logprob, LOGPROB_MIN))
        return logprobs

    def to_json(self) -> dict[str, list[Any]]:
        return {
            "tokens": self._token_texts,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._offsets,
        }


class TokenNotation:
    """OpenAI's notation of a token as text.

    - The token's bytes are UTF-8: the text.
    - The token's bytes are not UTF-8: `bytes:` and the bytes.
    - The token has no bytes, or `as_ids` (vLLM's `return_tokens_as_token_ids`): `token_id:` and the
      id.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self.as_ids = as_ids

    def format(self, token: int) -> str:
        token_bytes = None if self.as_ids else self._tokenizer.token_bytes(token)
        if token_bytes is None:
            return f"token_id:{token}"
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


TEXT_FORMAT = CompletionFormat(
    "cmpl",
    "text_completion",
    "text_completion",
    _build_choices,
    _merge_chunks,
    lambda choice: choice,
)
