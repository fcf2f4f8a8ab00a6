"""What the answers of completions look like: choices, told bit by bit, whole or in events.

Log-probabilities have OpenAI's old shape, which programs that score texts read. A `Shape` is all in
which one kind of completions differs from the other; chat's is in `chat`. Knows no HTTP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpt.tokenizers.detokenizer import TextStream
from gpt.tokenizers.tokenizer import Tokenizer
from serving.engine.stream import Stream
from serving.messages import Scored
from serving.protocols.openai.completion_request import Body
from serving.request import Answer as Asked
from serving.request import Finish, Piece
from serving.service.service import Service

FINISH: Mapping[Finish, str] = {"stop": "stop", "length": "length", "scored": "length"}
# JSON has no infinity, which the logarithm of no chance at all is.
LOGPROB_MIN = -9999.0

Record = dict[str, Any]


class Choice(Protocol):
    """One answer on its way."""

    @property
    def index(self) -> int: ...
    @property
    def answer(self) -> Asked: ...
    @property
    def made(self) -> int:
        """Tokens so far,"""
        ...

    @property
    def cached(self) -> int:
        """and those of the prompt that were known."""
        ...

    def told(self, piece: Piece) -> Record | None:
        """A piece as a choice of an event; None: there is nothing to tell yet."""
        ...


@dataclass(frozen=True)
class Shape:
    """`made`: the choices of each stream. `joined`: two bits of a choice. `ended`: a whole one."""

    prefix: str
    whole: str
    event: str
    made: Callable[[Any, Sequence[Stream], Service], list[list[Choice]]]
    joined: Callable[[Record, Record], Record]
    ended: Callable[[Record], Record]


def _made(body: Body, streams: Sequence[Stream], service: Service) -> list[list[Choice]]:
    made: list[list[Choice]] = []
    for place, stream in enumerate(streams):
        first = sum(map(len, made))
        prompt = body.prompt[place] if isinstance(body.prompt, list) else body.prompt
        echoed = prompt if isinstance(prompt, str) and not body.truncate_prompt_tokens else None
        made.append(
            [
                TextChoice(first + index, answer, body, service, echoed)
                for index, answer in enumerate(stream.request.answers)
            ]
        )
    return made


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


class TextChoice:
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
                    "decoded_token": spelled(self._tokenizer, one),
                }
                for rank, (one, logprob) in enumerate(scored.tops[:tops], 1)
            }
            own = {"logprob": max(scored.logprob, LOGPROB_MIN), "rank": scored.rank or None}
            entry[str(token)] = own | {"decoded_token": spelled(self._tokenizer, token)}
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
            text, word = stream.push(token), spelled(self._tokenizer, token)
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
            name = word if one == token else spelled(self._tokenizer, one)
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


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as OpenAI writes it: text, or bytes of it; of one that is neither, its id."""
    raw = tokenizer.token_bytes(token)
    if raw is None:
        return f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


TEXT = Shape("cmpl", "text_completion", "text_completion", _made, _joined, lambda told: told)
