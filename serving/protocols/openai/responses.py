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
from gpt.tokenizers.tokenizer import Tokenizer
from serving.engine.stream import Stream
from serving.messages import TokenScore
from serving.protocols.openai.completion_request import CompletionRequest
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
    """

    id_prefix: str
    final_object: str
    chunk_object: str
    build_choices: Callable[[Any, Sequence[Stream], Service], list[list[Choice]]]
    merge_chunks: Callable[[JsonObject, JsonObject], JsonObject]
    finalize: Callable[[JsonObject], JsonObject]


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
    if "prompt_logprobs" in choice:
        merged_choice["prompt_logprobs"] = choice["prompt_logprobs"]
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
        self._vocab_size = service.checkpoint.config.vocab_size
        self.generated_tokens = self.cached_tokens = 0
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._tokenizer = service.tokenizer
        self._echo_text = echo_text
        self._prompt_scores: list[TokenScore | None] = []
        self._started = False
        self._detokenizer = IncrementalDetokenizer(service.tokenizer, continues_text=True)
        self._text_offset = 0

    def render(self, piece: Piece) -> dict[str, Any] | None:
        """Return this choice's chunk for one piece; None if the piece adds nothing."""
        self.generated_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        self._prompt_scores += piece.prompt_scores
        if not (piece.token_ids or piece.text or piece.finish):
            return None
        text, tokens = piece.text, _TokenLogprobs(self._logprobs, self._tokenizer)
        choice: dict[str, Any] = {"index": self.index}
        if not self._started:
            self._started = True
            text = self._render_prompt(tokens) + text
            choice["seed"] = self.answer.sampling.seed
            if self._prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._render_prompt_logprobs(self._prompt_logprobs)
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

    @property
    def _prompt_positions(self) -> list[tuple[int, int]]:
        """Position and id of each prompt token that is not a virtual token."""
        virtual_tokens = self.answer.virtual_tokens
        prompt = enumerate(self.answer.prompt)
        return [
            (position, token)
            for position, token in prompt
            if not virtual_tokens or token < self._vocab_size
        ]

    def _render_prompt(self, tokens: "_TokenLogprobs") -> str:
        """Return the prompt's text ('' without `echo`). Add the prompt's logprobs to `tokens`."""
        if not self._echo:
            return ""
        positions = self._prompt_positions
        ids = [token for _, token in positions]
        text = self._tokenizer.decode(ids) if self._echo_text is None else self._echo_text
        if self._logprobs is not None:
            assert len(self._prompt_scores) == len(self.answer.prompt)
            scores = [self._prompt_scores[position] for position, _ in positions]
            tokens.add_tokens(IncrementalDetokenizer(self._tokenizer), ids, scores, 0)
        self._text_offset = len(text)
        return text

    def _render_prompt_logprobs(self, top_count: int) -> list[dict[str, Any] | None]:
        """Build vLLM's `prompt_logprobs`: an element per prompt token.

        An element contains the logprobs of the token and its alternatives, by token id. It is None
        for a token without a score, such as the first token.
        """
        logprobs: list[dict[str, Any] | None] = []
        for position, token in self._prompt_positions:
            score = self._prompt_scores[position]
            if score is None:
                logprobs.append(None)
                continue
            alternatives = {
                str(top_token): {
                    "logprob": max(logprob, LOGPROB_MIN),
                    "rank": rank,
                    "decoded_token": format_token(self._tokenizer, top_token),
                }
                for rank, (top_token, logprob) in enumerate(score.tops[:top_count], 1)
            }
            alternatives[str(token)] = {
                "logprob": max(score.logprob, LOGPROB_MIN),
                "rank": score.rank or None,
                "decoded_token": format_token(self._tokenizer, token),
            }
            logprobs.append(alternatives)
        return logprobs


class _TokenLogprobs:
    """OpenAI's legacy log-probabilities: four lists, each with one element per token."""

    def __init__(self, top_count: int | None, tokenizer: Tokenizer) -> None:
        self._top_count = top_count or 0
        self._tokenizer = tokenizer
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
    ) -> int:
        """Add tokens whose text begins at `offset`; return the offset of the next token."""
        for token, score in zip(ids, scores, strict=True):
            self._offsets.append(offset)
            text, token_text = detokenizer.push(token), format_token(self._tokenizer, token)
            offset += len(text)
            if text and token_text.endswith(text):
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
            text = token_text if top_token == token else format_token(self._tokenizer, top_token)
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


def format_token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token in OpenAI's notation.

    - The token's bytes are UTF-8: the text.
    - The token's bytes are not UTF-8: `bytes:` and the bytes.
    - The token has no bytes: `token_id:` and the id.
    """
    token_bytes = tokenizer.token_bytes(token)
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
