"""KServe v2 outputs: converts completions and stream pieces to response tensors.

The outputs include those of Triton's vLLM and TensorRT-LLM backends; only requested outputs are
built. The first axis of each output tensor is the completion. A unary response contains all
completions. A stream response contains one piece of one completion, whose index is the output
`sequence_index`. The module starts no streams, and uses only the tokenizer of the service.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.frontend.call import Call
from serving.messages import TokenScore
from serving.protocols.kserve.inputs import InferRequest
from serving.protocols.kserve.metadata import OUTPUTS
from serving.protocols.kserve.tensors import OutputTensor
from serving.request import AnswerSpec, Completion, FinishReason, Piece

FINISH_REASONS: Mapping[FinishReason | None, str] = {
    None: "",
    "stop": "stop",
    "length": "length",
    "scored": "length",
    "time": "time_limit",
}
LOGPROB_MIN = -9999.0  # Replaces minus infinity, which JSON cannot represent.
# 2-D outputs, with a row of values for each completion. All other outputs are 1-D, with one value
# for each completion.
ROW_OUTPUTS = ("output_ids", "output_log_probs")


@dataclass(frozen=True)
class _OutputRow:
    """The values of one completion in one response message."""

    index: int
    text: str
    token_ids: Sequence[int]
    scores: Sequence[TokenScore]
    finish: FinishReason | None
    logprob: float  # Cumulative log-probability so far.
    cached_tokens: int
    answer: AnswerSpec | Completion  # Both types have the prompt's token counts and the adapter.
    seed: int


class InferResponseBuilder:
    """Builds the output tensors of each response of one request."""

    def __init__(self, request: InferRequest, call: Call) -> None:
        self._request = request
        self._call = call
        # Cumulative log-probability and cached prompt tokens, by completion index.
        self._logprobs: dict[int, float] = {}
        self._cached_tokens: dict[int, int] = {}

    def build_final(self, completions: Sequence[Completion]) -> list[OutputTensor]:
        """Build the outputs of the unary response.

        If a completion failed, the error of the first such completion is raised.
        """
        rows = []
        for completion in completions:
            if completion.error is not None:
                raise completion.error
            text = self._request.prompt_prefix + completion.text
            logprob = sum(score.logprob for score in completion.scores)
            rows.append(
                _OutputRow(
                    completion.index,
                    text,
                    completion.token_ids,
                    completion.scores,
                    completion.finish,
                    logprob,
                    completion.cached_tokens,
                    completion,
                    completion.seed,
                )
            )
        return self._build_outputs(rows)

    def build_chunk(self, piece: Piece, answer: AnswerSpec) -> list[OutputTensor]:
        """Build the outputs of the stream response for one piece, or raise the piece's error."""
        if piece.error is not None:
            raise piece.error
        index = piece.index
        piece_logprob = sum(score.logprob for score in piece.scores)
        self._logprobs[index] = self._logprobs.get(index, 0.0) + piece_logprob
        self._cached_tokens[index] = self._cached_tokens.get(index, 0) + piece.cached_tokens
        row = _OutputRow(
            index,
            piece.text,
            piece.token_ids,
            piece.scores,
            piece.finish,
            self._logprobs[index],
            self._cached_tokens[index],
            answer,
            answer.sampling.seed,
        )
        return self._build_outputs([row])

    def _build_outputs(self, rows: Sequence[_OutputRow]) -> list[OutputTensor]:
        tensors = []
        for name, (datatype, _) in OUTPUTS.items():
            if name in self._request.outputs:
                values = [_OUTPUT_READERS[name](row, self._decode) for row in rows]
                build = OutputTensor.from_rows if name in ROW_OUTPUTS else OutputTensor.from_values
                tensors.append(build(name, datatype, values))
        return tensors

    def _decode(self, token: int) -> str:
        return self._call.service.tokenizer.decode([token])


DecodeToken = Callable[[int], str]


def _logprobs_json(row: _OutputRow, decode: DecodeToken) -> str:
    """Return the vLLM backend's JSON: for each generated token, an object with token ids as keys.

    The object contains the log-probabilities of the generated token and of its alternatives.
    """
    positions: list[dict[str, dict[str, object]]] = []
    for token, score in zip(row.token_ids, row.scores, strict=False):
        # The sampled token may be outside the top tokens, so it is added with its rank.
        ranked = {
            top_token: (logprob, rank) for rank, (top_token, logprob) in enumerate(score.tops, 1)
        }
        ranked[token] = (score.logprob, score.rank)
        positions.append(
            {
                str(top_token): {
                    "logprob": max(logprob, LOGPROB_MIN),
                    "rank": rank,
                    "decoded_token": decode(top_token),
                }
                for top_token, (logprob, rank) in ranked.items()
            }
        )
    return json.dumps(positions)


_OUTPUT_READERS: Mapping[str, Callable[[_OutputRow, DecodeToken], Any]] = {
    "text_output": lambda row, _: row.text,
    "finish_reason": lambda row, _: FINISH_REASONS[row.finish],
    "cumulative_logprob": lambda row, _: row.logprob,
    "logprobs": _logprobs_json,
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
