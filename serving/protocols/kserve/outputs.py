"""What a KServe v2 answer has: the text outputs of Triton's vLLM and TensorRT-LLM backends.

Only those that were asked for are made. A whole answer has a row for each completion; a piece is
one row, and says whose by `sequence_index`. Knows nothing of streams and calls, and of the service
only its tokenizer.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.frontend.call import Call
from serving.messages import Scored
from serving.protocols.kserve.inputs import Wanted
from serving.protocols.kserve.metadata import OUTPUTS
from serving.protocols.kserve.tensors import write_tensor, write_values
from serving.request import Answer, Completion, Finish, Piece

FINISH: Mapping[Finish | None, str] = {
    None: "",
    "stop": "stop",
    "length": "length",
    "scored": "length",
    "time": "time_limit",
}
LOGPROB_MIN = -9999.0  # JSON has no minus infinity.
TABLES = ("output_ids", "output_log_probs")  # A row of values for each answer, not one.


@dataclass(frozen=True)
class _Row:
    """What is told of one answer in one message."""

    index: int
    text: str
    token_ids: Sequence[int]
    scores: Sequence[Scored]
    finish: Finish | None
    logprob: float  # Of all of the answer so far.
    cached_tokens: int
    answer: Answer | Completion  # Both know what went in.
    seed: int


class Answers:
    """One request's, as the messages that they become. `blank` is what each begins as."""

    def __init__(self, blank: Any, wanted: Wanted, call: Call) -> None:
        self._blank, self._wanted, self._call = blank, wanted, call
        self._logprobs: dict[int, float] = {}  # Each answer's, so far.
        self._cached: dict[int, int] = {}

    def whole(self, done: Sequence[Completion]) -> Any:
        rows = []
        for one in done:
            if one.error is not None:
                raise one.error
            text = self._wanted.prepend + one.text
            logprob = sum(score.logprob for score in one.scores)
            rows.append(
                _Row(
                    one.index,
                    text,
                    one.token_ids,
                    one.scores,
                    one.finish,
                    logprob,
                    one.cached_tokens,
                    one,
                    one.seed,
                )
            )
        return self._message(rows)

    def piece(self, piece: Piece, answer: Answer) -> Any:
        if piece.error is not None:
            raise piece.error
        index = piece.index
        made = sum(score.logprob for score in piece.scores)
        self._logprobs[index] = self._logprobs.get(index, 0.0) + made
        self._cached[index] = self._cached.get(index, 0) + piece.cached_tokens
        row = _Row(
            index,
            piece.text,
            piece.token_ids,
            piece.scores,
            piece.finish,
            self._logprobs[index],
            self._cached[index],
            answer,
            answer.sampling.seed,
        )
        return self._message([row])

    def _message(self, rows: Sequence[_Row]) -> Any:
        message = type(self._blank)()
        message.CopyFrom(self._blank)
        for name, (datatype, _) in OUTPUTS.items():
            if name not in self._wanted.outputs:
                continue
            told = [_TOLD[name](row, self._decode) for row in rows]
            write = write_tensor if name in TABLES else write_values
            write(message, name, datatype, told)
        return message

    def _decode(self, token: int) -> str:
        return self._call.service.tokenizer.decode([token])


Decode = Callable[[int], str]


def _alternatives(row: _Row, decode: Decode) -> str:
    """As the vLLM backend writes them: for each token, ids with what each was worth."""
    told: list[dict[str, dict[str, object]]] = []
    for token, score in zip(row.token_ids, row.scores, strict=False):
        # The one that was chosen may be none of the likeliest, and is told by its own rank.
        ranked = {one: (logprob, rank) for rank, (one, logprob) in enumerate(score.tops, 1)}
        ranked[token] = (score.logprob, score.rank)
        told.append(
            {
                str(one): {
                    "logprob": max(logprob, LOGPROB_MIN),
                    "rank": rank,
                    "decoded_token": decode(one),
                }
                for one, (logprob, rank) in ranked.items()
            }
        )
    return json.dumps(told)


_TOLD: Mapping[str, Callable[[_Row, Decode], Any]] = {
    "text_output": lambda row, _: row.text,
    "finish_reason": lambda row, _: FINISH[row.finish],
    "cumulative_logprob": lambda row, _: row.logprob,
    "logprobs": _alternatives,
    "num_input_tokens": lambda row, _: row.answer.prompt_tokens,
    "num_output_tokens": lambda row, _: len(row.token_ids),
    "num_virtual_tokens": lambda row, _: row.answer.virtual_tokens,
    "num_cached_tokens": lambda row, _: row.cached_tokens,
    "output_ids": lambda row, _: row.token_ids,
    "cum_log_probs": lambda row, _: row.logprob,
    "output_log_probs": lambda row, _: [score.logprob for score in row.scores],
    "sequence_index": lambda row, _: row.index,
    "seed": lambda row, _: row.seed,
    "adapter": lambda row, _: row.answer.adapter,
}
