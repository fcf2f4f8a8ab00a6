"""TGI outputs: converts completions and stream pieces to TGI's JSON, with details of tokens.

The texts of a completion's tokens, joined, are the text of the completion. Control tokens are
`special` and have no text. This module starts no streams.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from gpt.tokenizers.detokenizer import IncrementalDetokenizer
from gpt.tokenizers.tokenizer import Tokenizer
from serving.messages import TokenScore
from serving.protocols.tgi.request import GenerateRequest
from serving.request import AnswerSpec, Completion, Piece
from serving.service.service import Service

LOGPROB_MIN = -9999.0  # Replaces minus infinity, which JSON cannot represent.

JsonObject = dict[str, Any]


def build_response(
    body: GenerateRequest, completions: Sequence[Completion], service: Service
) -> JsonObject:
    """Build the response of an unstreamed request, or raise the error of a completion.

    The completion with the highest log-probability is the response.
    """
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    ranked = sorted(completions, key=_logprob, reverse=True)
    responses = [_describe(body, completion, service) for completion in ranked]
    response = responses[0]
    if body.settings.details and len(responses) > 1:
        response["details"]["best_of_sequences"] = [
            {"generated_text": other["generated_text"], **other["details"]}
            for other in responses[1:]
        ]
    return response


def _describe(body: GenerateRequest, completion: Completion, service: Service) -> JsonObject:
    """Return text and, if requested, details of one completion."""
    parameters = body.settings
    response: JsonObject = {"generated_text": _full_text(body, completion.text)}
    if not parameters.details:
        return response
    tokens = _TokenRenderer(service.tokenizer, parameters.top_n_tokens or 0)
    rendered = tokens.render(completion.token_ids, completion.text, completion.scores)
    seed = completion.seed if parameters.is_sampling else None
    response["details"] = {
        **_finish_fields(completion, len(completion.token_ids), seed),
        "prefill": _prefill(completion, service),
        "tokens": [token for token, _ in rendered],
    }
    if parameters.top_n_tokens:
        response["details"]["top_tokens"] = [top_tokens for _, top_tokens in rendered]
    return response


def _full_text(body: GenerateRequest, text: str) -> str:
    return body.inputs + text if body.settings.return_full_text else text


def _logprob(completion: Completion) -> float:
    return sum(score.logprob for score in completion.scores)


def _finish_fields(
    output: Piece | Completion, generated_tokens: int, seed: int | None
) -> JsonObject:
    reason = "length"
    if output.finish == "stop":
        reason = "stop_sequence" if isinstance(output.stop, str) else "eos_token"
    return {"finish_reason": reason, "generated_tokens": generated_tokens, "seed": seed}


def _prefill(completion: Completion, service: Service) -> list[JsonObject]:
    """Return the prompt's tokens without virtual tokens; empty if they were not requested."""
    if not completion.prompt_scores:
        return []
    vocab_size = service.checkpoint.config.vocab_size
    detokenizer = IncrementalDetokenizer(service.tokenizer)
    pairs = zip(completion.prompt, completion.prompt_scores, strict=True)
    return [
        {
            "id": token,
            "text": detokenizer.push(token),
            "logprob": None if score is None else _clamp(score.logprob),
        }
        for token, score in pairs
        if token < vocab_size
    ]


def _clamp(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


class _TokenRenderer:
    """Renders the tokens of one completion, in order."""

    def __init__(self, tokenizer: Tokenizer, top_count: int) -> None:
        self._tokenizer = tokenizer
        self._top_count = top_count
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues_text=True)

    def render(
        self, token_ids: Sequence[int], text: str, scores: Sequence[TokenScore]
    ) -> list[tuple[JsonObject, list[JsonObject]]]:
        """Return each token and the most likely tokens at its position.

        `text` is the text of all these tokens.
        """
        texts = [self._detokenizer.push(token) for token in token_ids]
        if texts and "".join(texts) != text:
            # The text lacks a stop string, or characters that may begin one, or it has characters
            # of earlier tokens. The last token gets the whole text.
            texts = [""] * (len(texts) - 1) + [text]
        return [
            (
                self._token(token, token_text, 0.0 if score is None else score.logprob),
                self._top_tokens(score),
            )
            for token, token_text, score in zip_longest(token_ids, texts, scores)
        ]

    def _token(self, token: int, text: str, logprob: float) -> JsonObject:
        is_special = self._tokenizer.token_bytes(token) is None
        return {"id": token, "text": text, "logprob": _clamp(logprob), "special": is_special}

    def _top_tokens(self, score: TokenScore | None) -> list[JsonObject]:
        top_tokens = () if score is None else score.tops[: self._top_count]
        return [
            self._token(token, self._tokenizer.decode([token], continues_text=True), logprob)
            for token, logprob in top_tokens
        ]


class StreamEvents:
    """The events of one streamed completion: one for each token."""

    def __init__(self, body: GenerateRequest, answer: AnswerSpec, service: Service) -> None:
        self._body = body
        self._answer = answer
        self._tokens = _TokenRenderer(service.tokenizer, body.settings.top_n_tokens or 0)
        self._text = ""
        self._token_count = 0

    def build(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield the events of a piece, or raise the piece's error."""
        if piece.error is not None:
            raise piece.error
        self._text += piece.text
        rendered = self._tokens.render(piece.token_ids, piece.text, piece.scores)
        index = self._token_count + 1
        self._token_count += len(rendered)
        if piece.finish is not None and not rendered:
            # The completion ended after its last token was sent. The final event needs a token.
            rendered = [({"id": 0, "text": piece.text, "logprob": 0.0, "special": True}, [])]
        for position, (token, top_tokens) in enumerate(rendered):
            event = {"index": index + position, "token": token}
            if self._body.settings.top_n_tokens:
                event["top_tokens"] = top_tokens
            is_last = piece.finish is not None and position == len(rendered) - 1
            yield event | (self._final_fields(piece) if is_last else _UNFINISHED_FIELDS)

    def _final_fields(self, piece: Piece) -> JsonObject:
        answer = self._answer
        seed = answer.sampling.seed if self._body.settings.is_sampling else None
        details = _finish_fields(piece, self._token_count, seed)
        return {
            "generated_text": _full_text(self._body, self._text),
            "details": {**details, "input_length": answer.prompt_tokens},
        }


# The last fields of an event that does not end its stream.
_UNFINISHED_FIELDS: JsonObject = {"generated_text": None, "details": None}
