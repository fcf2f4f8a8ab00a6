"""The plain way to generate: all prompts in one ragged batch, one step after another.

It has no queue and no policy, and runs on any split (every rank calls it alike). It is the oracle
of faster engines, and what a program uses that has a list of prompts and a model.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from gpt import pipeline
from gpt.batch import Batch
from gpt.choice import choose
from gpt.errors import RequestError
from gpt.kv import BLOCK_TOKENS, KVPool
from gpt.model import GPT
from gpt.parallel import share_from_last
from gpt.sampling import Sampling

# "fault": the model's logits were not finite, so there is no next token.
FinishReason = Literal["stop", "length", "fault"]


@dataclass(frozen=True)
class Piece:
    """One new token of one prompt, and why it is the last, if it is."""

    row: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    table: Tensor | None = None,
) -> list[Completion]:
    """A completion for each prompt. Ids at or above the vocabulary are rows of `table`."""
    completions = [Completion() for _ in prompts]
    for pieces in stream(model, prompts, sampling, table=table):
        for piece in pieces:
            completion = completions[piece.row]
            completion.token_ids.append(piece.token_id)
            completion.logprobs.append(piece.logprob)
            completion.finish_reason = piece.finish_reason or completion.finish_reason
    return completions


@torch.inference_mode()
def stream(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    table: Tensor | None = None,
    dropped: Container[int] = (),
) -> Iterator[list[Piece]]:
    """The same, a step at a time: each step's list has one piece for each unfinished prompt.

    A caller may put rows that are no longer wanted into `dropped`: no step after that has them.
    """
    if not prompts:
        return
    rules = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    check_prompts(model, prompts, rules, 0 if table is None else len(table))
    device = model.mesh.device
    pool, tables = _pool(model, prompts, rules)
    rows = list(range(len(prompts)))
    ids = [list(prompt) for prompt in prompts]
    past = [0] * len(prompts)
    while rows:
        batch = Batch.paged(
            [len(ids[row]) for row in rows], [past[row] for row in rows], tables[rows], BLOCK_TOKENS
        )
        batch = replace(batch, rows=batch.last_rows)
        flat = torch.tensor([token for row in rows for token in ids[row]], device=device)
        logits = pipeline.forward(model, flat, batch, kv=pool, table=table)
        chosen = _choose(model, logits, [rules[row] for row in rows], batch.contexts)
        pieces = []
        for row, context, (token, logprob) in zip(rows, batch.contexts, chosen, strict=True):
            past[row], ids[row] = context, [token]
            made = context - len(prompts[row]) + 1
            finish = _finish(token, made, rules[row]) if isfinite(logprob) else "fault"
            pieces.append(Piece(row, token, logprob, finish))
        yield pieces
        rows = [p.row for p in pieces if p.finish_reason is None and p.row not in dropped]


def check_prompts(
    model: GPT, prompts: Sequence[Sequence[int]], rules: Sequence[Sampling], virtual: int
) -> None:
    """Refuse what cannot be run: empty, too long, or with ids that nothing stands behind."""
    limit, known = model.config.max_position_embeddings, model.config.vocab_size + virtual
    for prompt, rule in zip(prompts, rules, strict=True):
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        wrong = next((token for token in prompt if not 0 <= token < known), None)
        if wrong is not None:
            raise RequestError(
                f"token id {wrong} is outside the vocabulary of {model.config.vocab_size}"
                + (f" and the {virtual} virtual tokens at hand" if virtual else ""),
                "token_ids",
            )
        if len(prompt) + rule.max_new_tokens > limit:
            room = limit - len(prompt)
            way = f"ask for at most {room} new tokens" if room > 0 else f"cut {1 - room} tokens"
            raise RequestError(
                f"prompt ({len(prompt)} tokens) + max_new_tokens ({rule.max_new_tokens}) = "
                f"{len(prompt) + rule.max_new_tokens}, over the model's context of {limit}; {way}",
                "max_new_tokens",
            )


def _pool(
    model: GPT, prompts: Sequence[Sequence[int]], rules: Sequence[Sampling]
) -> tuple[KVPool, Tensor]:
    """Memory for every prompt at its longest, and each one's row of blocks."""
    needs = [
        -(-(len(prompt) + rule.max_new_tokens) // BLOCK_TOKENS)
        for prompt, rule in zip(prompts, rules, strict=True)
    ]
    mesh = model.mesh
    layers, blocks = model.layers, sum(needs)
    pool = KVPool(model.config, layers, blocks, tp=mesh.tp, dtype=model.dtype, device=mesh.device)
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    start = 0
    for row, need in enumerate(needs):
        tables[row, :need] = torch.arange(start, start + need)
        start += need
    return pool, tables.to(mesh.device)


def _choose(
    model: GPT, logits: Tensor | None, rules: Sequence[Sampling], positions: Sequence[int]
) -> list[tuple[int, float]]:
    """The last stage's choice and its log-probability, on every rank."""
    chosen = torch.zeros(len(rules), 2, dtype=torch.float64, device=model.mesh.device)
    if logits is not None:
        tokens = choose(logits, rules, positions)
        # A row that is not finite has a log-probability that is not, and so tells itself.
        logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        logprobs = logprobs.masked_fill(~logits.isfinite().all(-1), float("nan"))
        # Token ids are exact in fp64 up to 2^53, so one message carries both.
        chosen = torch.stack([tokens.to(torch.float64), logprobs.to(torch.float64)], dim=-1)
    rows = share_from_last(chosen, model.mesh).tolist()
    return [(int(token), logprob) for token, logprob in rows]


def _finish(token: int, made: int, rule: Sampling) -> FinishReason | None:
    if token in rule.stop_token_ids:
        return "stop"
    return "length" if made >= rule.max_new_tokens else None
