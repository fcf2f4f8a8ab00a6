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

from gpt.attention.kv_cache import BLOCK_TOKENS, KVPool, prefix_part
from gpt.batch import Batch
from gpt.errors import RequestError
from gpt.generation.reference_sampler import Score, choose, score
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import share_from_last
from gpt.sampling_params import Sampling

# "scored": no token was asked for. "fault": the model's logits were not finite, so there is no next
# token.
FinishReason = Literal["stop", "length", "scored", "fault"]

# Numbers of a score that every rank gets: log-probability, rank, and two for each alternative.
_SCORE = 2


@dataclass(frozen=True)
class Piece:
    """One new token of one prompt, and why it is the last, if it is."""

    row: int
    token_id: int  # -1 with "scored": there is none.
    logprob: float
    finish_reason: FinishReason | None
    score: Score | None = None  # If the rules ask for `logprobs`.
    prompt_scores: list[Score | None] = field(default_factory=list)  # With the first piece.


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    scores: list[Score] = field(default_factory=list)  # If the rules ask for `logprobs`.
    # If they ask for `prompt_logprobs`; None for the first token, for virtual ones, and for one
    # behind a prefix.
    prompt_scores: list[Score | None] = field(default_factory=list)


def generate(
    model: GPT | Sequence[GPT],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    table: Tensor | None = None,
    kind: str = "rows",
) -> list[Completion]:
    """A completion for each prompt. Ids at or above the vocabulary are rows of `table`.

    `model` is what this rank has of it: several chunks, in the order of their layers, or one.
    `kind` is what the table is, as a card says it.
    """
    completions = [Completion() for _ in prompts]
    for pieces in stream(model, prompts, sampling, table=table, kind=kind):
        for piece in pieces:
            completion = completions[piece.row]
            completion.finish_reason = piece.finish_reason or completion.finish_reason
            completion.prompt_scores += piece.prompt_scores
            if piece.token_id < 0:
                continue
            completion.token_ids.append(piece.token_id)
            completion.logprobs.append(piece.logprob)
            completion.scores += [piece.score] if piece.score else []
    return completions


@torch.inference_mode()
def stream(
    model: GPT | Sequence[GPT],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    table: Tensor | None = None,
    kind: str = "rows",
    dropped: Container[int] = (),
) -> Iterator[list[Piece]]:
    """The same, a step at a time: each step's list has one piece for each unfinished prompt.

    A caller may put rows that are no longer wanted into `dropped`: no step after that has them.
    """
    if not prompts:
        return
    rules = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    chunks = pipeline.chunks_of(model)
    model = chunks[-1]  # The one that has the logits, if this rank has them.
    virtual = 0 if table is None else len(table)
    check_prompts(model, prompts, rules, virtual)
    device = model.mesh.device
    pool, tables = _pool(chunks, prompts, rules)
    rows = list(range(len(prompts)))
    past = [0] * len(prompts)
    if kind == "prefix" and table is not None:
        past = check_prefixes(prompts, model.config.vocab_size, virtual)
        _fill(chunks, pool, tables, past, table)
        table = None
    ids = [list(prompt[start:]) for prompt, start in zip(prompts, past, strict=True)]
    made: list[list[int]] = [[] for _ in prompts]
    # Logits of every place of a prompt are needed in the first step only, for its tokens' scores.
    whole = any(rule.prompt_logprobs is not None for rule in rules)
    while rows:
        batch = Batch.paged(
            [len(ids[row]) for row in rows], [past[row] for row in rows], tables[rows], BLOCK_TOKENS
        )
        batch = batch if whole else replace(batch, rows=batch.last_rows)
        flat = torch.tensor([token for row in rows for token in ids[row]], device=device)
        logits = pipeline.forward(chunks, flat, batch, kv=pool, table=table)
        told = _prompt_scores(model, logits, prompts, rules, past) if whole else {}
        if logits is not None and whole:
            logits = logits[batch.last_rows]
        whole = False
        turns = [_Turn(rules[row], prompts[row], made[row]) for row in rows]
        pieces = []
        for row, context, (token, drawn) in zip(
            rows, batch.contexts, _choose(model, logits, turns), strict=True
        ):
            past[row], ids[row] = context, [token]
            made[row].append(token)
            finish = _finish(token, len(made[row]), rules[row]) if drawn else "fault"
            token = -1 if finish == "scored" else token
            logprob = drawn.logprob if drawn else float("nan")
            asked = drawn if rules[row].logprobs is not None else None
            pieces.append(Piece(row, token, logprob, finish, asked, told.get(row, [])))
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


def check_prefixes(prompts: Sequence[Sequence[int]], vocab_size: int, virtual: int) -> list[int]:
    """How many tokens of each prompt are a prefix's: all of them, at the front, or none."""
    found = []
    for prompt in prompts:
        if max(prompt) < vocab_size:
            found.append(0)
            continue
        begins = list(prompt[:virtual]) == list(range(vocab_size, vocab_size + virtual))
        if not begins or max(prompt[virtual:], default=vocab_size) >= vocab_size:
            raise RequestError(
                f"the prompt does not begin with the prefix's {virtual} virtual tokens, in order, "
                "with text after them; keys and values of layers can only stand first",
                "token_ids",
            )
        found.append(virtual)
    return found


def _fill(
    chunks: Sequence[GPT], pool: KVPool, tables: Tensor, past: Sequence[int], table: Tensor
) -> None:
    """Keys and values of a prefix, for each prompt that begins with it."""
    mesh, layers = chunks[0].mesh, [layer for chunk in chunks for layer in chunk.layers]
    part = prefix_part(table, chunks[0].config, layers, mesh.tp_rank, mesh.tp)
    for row, count in enumerate(past):
        if count:
            pool.fill(tables[row].tolist(), 0, part)


def _pool(
    chunks: Sequence[GPT], prompts: Sequence[Sequence[int]], rules: Sequence[Sampling]
) -> tuple[KVPool, Tensor]:
    """Memory for every prompt at its longest, and each one's row of blocks."""
    needs = [
        -(-(len(prompt) + rule.max_new_tokens) // BLOCK_TOKENS)
        for prompt, rule in zip(prompts, rules, strict=True)
    ]
    model, mesh = chunks[0], chunks[0].mesh
    layers, blocks = [layer for chunk in chunks for layer in chunk.layers], sum(needs)
    pool = KVPool(model.config, layers, blocks, tp=mesh.tp, dtype=model.dtype, device=mesh.device)
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    start = 0
    for row, need in enumerate(needs):
        tables[row, :need] = torch.arange(start, start + need)
        start += need
    return pool, tables.to(mesh.device)


@dataclass(frozen=True)
class _Turn:
    """What the choice of a row's next token depends on, besides the logits."""

    rule: Sampling
    prompt: Sequence[int]
    made: Sequence[int]


def _choose(
    model: GPT, logits: Tensor | None, turns: Sequence[_Turn]
) -> list[tuple[int, Score | None]]:
    """The last stage's choices and their scores, on every rank; no score: it is not finite."""
    chosen = torch.zeros(len(turns), dtype=torch.long, device=model.mesh.device)
    if logits is not None:
        chosen = logits.argmax(-1)
        for row, turn in enumerate(turns):
            if not turn.rule.plain:
                position = len(turn.prompt) + len(turn.made)
                chosen[row] = choose(logits[row], turn.rule, turn.prompt, turn.made, position)
    tokens = share_from_last(chosen, model.mesh).tolist()
    tops = [turn.rule.logprobs or 0 for turn in turns]
    return list(zip(tokens, _scores(model, logits, tokens, tops), strict=True))


def _prompt_scores(
    model: GPT,
    logits: Tensor | None,
    prompts: Sequence[Sequence[int]],
    rules: Sequence[Sampling],
    past: Sequence[int],
) -> dict[int, list[Score | None]]:
    """The scores of the prompts of which they are wanted, by all logits behind `past`."""
    told: dict[int, list[Score | None]] = {}
    start = 0
    for row, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
        start -= past[row]
        if rule.prompt_logprobs is not None:
            known = range(past[row] + 1, len(prompt))
            places = [p for p in known if prompt[p] < model.config.vocab_size]
            before = None if logits is None else logits[[start + p - 1 for p in places]]
            tops = [rule.prompt_logprobs] * len(places)
            scores = _scores(model, before, [prompt[p] for p in places], tops)
            told[row] = [None] * len(prompt)
            for place, one in zip(places, scores, strict=True):
                told[row][place] = one
        start += len(prompt)
    return told


def _scores(
    model: GPT, logits: Tensor | None, tokens: Sequence[int], tops: Sequence[int]
) -> list[Score | None]:
    """The last stage's scores on every rank. None: that row's logits are not finite."""
    most = max(tops, default=0)
    told = torch.zeros(len(tokens), _SCORE + 2 * most, dtype=torch.float64)
    if logits is not None:
        for place, one in enumerate(score(logits, tokens, tops)):
            numbers = [one.logprob, one.rank, *(number for top in one.tops for number in top)]
            told[place, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        told[~logits.isfinite().all(-1).cpu(), 0] = float("nan")
    # Ids are exact in fp64 up to 2^53, so one message carries all.
    shared = share_from_last(told.to(model.mesh.device), model.mesh).tolist()
    counts = [min(count, model.config.vocab_size) for count in tops]
    return [_read(numbers, count) for numbers, count in zip(shared, counts, strict=True)]


def _read(numbers: Sequence[float], count: int) -> Score | None:
    logprob, rank, *rest = numbers
    if not isfinite(logprob):
        return None
    tops = tuple((int(rest[2 * i]), rest[2 * i + 1]) for i in range(count))
    return Score(logprob, int(rank), tops)


def _finish(token: int, made: int, rule: Sampling) -> FinishReason | None:
    if rule.max_new_tokens == 0:
        return "scored"
    if token in rule.stop_token_ids:
        return "stop"
    return "length" if made >= rule.max_new_tokens else None
