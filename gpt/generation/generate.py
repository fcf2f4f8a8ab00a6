"""Reference generation loop: all prompts in one ragged batch over a paged KV pool, step by step.

The loop has no queue and no scheduling policy: the first step is the prefill of all prompts, and
each later step decodes one token per unfinished prompt. With drafts (probable completions), the
first step also verifies the draft of each prompt, as in speculative decoding. At any parallel
split, all ranks must make the same call. The tests of the server's engine use the loop as
reference, and offline programs use it to complete a list of prompts.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from gpt.attention.kv_cache import BLOCK_TOKENS, KVPool, prefix_shard
from gpt.batch import Batch
from gpt.errors import RequestError
from gpt.generation.reference_sampler import Score, sample_token, score_tokens
from gpt.linear_adapter import AdaptedRows, ModelAdapter
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.parallel.pipeline_communication import broadcast_from_last_stage
from gpt.sampling_params import SamplingParams

# - "stop": the last token is a stop token.
# - "length": the completion has max_new_tokens tokens.
# - "scored": max_new_tokens is 0, so only the prompt was scored.
# - "fault": the logits were not finite, so the last token has no meaning.
FinishReason = Literal["stop", "length", "scored", "fault"]

# A score is broadcast as a row of numbers: the token's log-probability and rank (2 numbers), then
# the id and log-probability of each of the most likely tokens.
_SCORE_FIELDS = 2


@dataclass(frozen=True)
class TokenOutput:
    """One new token of one prompt; `finish_reason` is None if more tokens follow."""

    row: int  # Index of the prompt.
    token_id: int  # -1 if `finish_reason` is "scored".
    logprob: float  # NaN if `finish_reason` is "fault".
    finish_reason: FinishReason | None
    score: Score | None = None  # Only if `logprobs` is requested.
    # The scores of the prompt's tokens, one per token (None: not scored). Only the first output of
    # each prompt has them; in later outputs the list is empty.
    prompt_scores: list[Score | None] = field(default_factory=list)
    # The log-probability of each token of the prompt's draft, given the prompt and the tokens of
    # the draft before it. Only the first output of each prompt has them; NaN: the logits were not
    # finite.
    draft_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class SequenceAdapter:
    """An adapter that changes linears for a sequence, on the tokens from `acts_from` on."""

    terms: ModelAdapter
    acts_from: int = 0


@dataclass
class Completion:
    """The complete output for one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    scores: list[Score] = field(default_factory=list)  # Only if `logprobs` is requested.
    # One entry per prompt token if `prompt_logprobs` is requested, else empty. The entry is None
    # for these tokens:
    # - the first token of the prompt, and the first token after an adapter's prefix;
    # - virtual tokens;
    # - tokens whose logits are not finite.
    prompt_scores: list[Score | None] = field(default_factory=list)


def generate(
    model: GPT | Sequence[GPT],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    adapter_table: Tensor | None = None,
    adapter_kind: str = "rows",
    adapters: Sequence[SequenceAdapter | None] = (),
) -> list[Completion]:
    """Return the completion of each prompt.

    `model` is this rank's part of the model: one chunk, or several in the order of their layers.
    Prompt ids at or above the vocabulary size are rows of `adapter_table`. `adapter_kind` is "rows"
    for a table of input embeddings, or "prefix" for a table of keys and values. `adapters` has for
    each prompt the adapter that changes linears for it, if any; empty: no prompt has one.
    """
    completions = [Completion() for _ in prompts]
    for outputs in generate_steps(
        model,
        prompts,
        sampling,
        adapter_table=adapter_table,
        adapter_kind=adapter_kind,
        adapters=adapters,
    ):
        for output in outputs:
            completion = completions[output.row]
            completion.finish_reason = output.finish_reason or completion.finish_reason
            completion.prompt_scores += output.prompt_scores
            if output.token_id < 0:
                continue
            completion.token_ids.append(output.token_id)
            completion.logprobs.append(output.logprob)
            completion.scores += [output.score] if output.score else []
    return completions


@torch.inference_mode()
def generate_steps(
    model: GPT | Sequence[GPT],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    adapter_table: Tensor | None = None,
    adapter_kind: str = "rows",
    adapters: Sequence[SequenceAdapter | None] = (),
    dropped_rows: Container[int] = (),
    drafts: Sequence[Sequence[int]] | None = None,
    shares_prefix: bool = False,
) -> Iterator[list[TokenOutput]]:
    """Complete the prompts like `generate`; yield after each step one output per unfinished prompt.

    The caller may add the index of a prompt to `dropped_rows` between two steps; the later steps
    then skip this prompt.

    `drafts` has for each prompt the tokens with which its completion probably begins; sampling must
    be plain greedy. The first step computes the logits of prompt and draft together, and may yield
    several outputs per prompt, in order: the accepted tokens of the draft and, in place of the
    first rejected token, the token that greedy decoding gives.

    `shares_prefix`: compute the keys and values of the common prefix of all prompts only once.
    """
    if not prompts:
        return
    samplings = (
        [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    )
    chunks = pipeline.model_chunks(model)
    model = chunks[-1]  # The chunk that computes the logits, if this is the last stage.
    if adapter_table is not None and not len(adapter_table):
        adapter_table = None  # The adapter only changes linears.
    virtual_tokens = 0 if adapter_table is None else len(adapter_table)
    check_prompts(model, prompts, samplings, virtual_tokens)
    device = model.mesh.device
    drafts = [()] * len(prompts) if drafts is None else drafts
    # For prompt scores, the first step computes the logits of all prompt positions.
    needs_prompt_logits = any(params.prompt_logprobs is not None for params in samplings)
    if any(drafts):
        assert all(params.is_plain_greedy for params in samplings), "drafts need greedy sampling"
        assert not needs_prompt_logits, "prompt scores and drafts cannot be combined"
    has_prefix_kv = adapter_kind == "prefix" and adapter_table is not None
    # Adapters could act on a part of the common prefix.
    shares_prefix = shares_prefix and not (has_prefix_kv or needs_prompt_logits or any(adapters))
    shared_tokens = _common_prefix_length(prompts) if shares_prefix else 0
    token_counts = [
        len(prompt) + max(params.max_new_tokens, len(draft) - 1)
        for prompt, params, draft in zip(prompts, samplings, drafts, strict=True)
    ]
    pool, block_tables = _allocate_kv_pool(chunks, token_counts, shared_tokens)
    rows = list(range(len(prompts)))
    kv_lengths = [shared_tokens] * len(prompts)
    if shared_tokens:
        _prefill_shared_tokens(
            chunks, pool, block_tables, prompts[0][:shared_tokens], adapter_table
        )
    if has_prefix_kv:
        assert adapter_table is not None
        kv_lengths = prefix_lengths(prompts, model.config.vocab_size, virtual_tokens)
        _write_prefix_kv(chunks, pool, block_tables, kv_lengths, adapter_table)
        adapter_table = None
    # The last token of a draft needs no forward pass: the token before it predicts it.
    pending_ids = [
        [*prompt[start:], *draft[:-1]]
        for prompt, start, draft in zip(prompts, kv_lengths, drafts, strict=True)
    ]
    output_ids: list[list[int]] = [[] for _ in prompts]
    while rows:
        batch = Batch.paged(
            [len(pending_ids[row]) for row in rows],
            [kv_lengths[row] for row in rows],
            block_tables[rows],
            BLOCK_TOKENS,
        )
        if any(adapters):
            batch = replace(
                batch, adapted_rows=_adapted_rows(batch, [adapters[row] for row in rows])
            )
        # Logits are needed at the last positions of each row. They predict the tokens of its draft,
        # or its next token.
        logit_counts = [max(1, len(drafts[row])) for row in rows]
        logit_rows = _last_positions(batch, logit_counts)
        if not needs_prompt_logits:
            batch = replace(batch, logit_rows=logit_rows)
        flat_ids = torch.tensor(
            [token for row in rows for token in pending_ids[row]], device=device
        )
        logits = pipeline.forward(
            chunks, flat_ids, batch, kv=pool, virtual_embeddings=adapter_table
        )
        prompt_scores = (
            _prompt_scores(model, logits, prompts, samplings, kv_lengths)
            if needs_prompt_logits
            else {}
        )
        if logits is not None and needs_prompt_logits:
            logits = logits[logit_rows]
        needs_prompt_logits = False
        sampling_inputs = [
            _SamplingInput(samplings[row], prompts[row], output_ids[row])
            for row, count in zip(rows, logit_counts, strict=True)
            for _ in range(count)
        ]
        samples = iter(_sample_tokens(model, logits, sampling_inputs))
        draft_logprobs = _draft_logprobs(model, logits, [drafts[row] for row in rows])
        outputs = []
        unfinished_rows = []
        for row, count, logprobs in zip(rows, logit_counts, draft_logprobs, strict=True):
            row_samples = list(islice(samples, count))
            row_outputs = _verify_draft(
                row, drafts[row], row_samples, samplings[row], len(output_ids[row])
            )
            row_outputs[0] = replace(
                row_outputs[0],
                prompt_scores=prompt_scores.get(row, []),
                draft_logprobs=logprobs,
            )
            output_ids[row] += [output.token_id for output in row_outputs]
            pending_ids[row] = output_ids[row][-1:]
            # Keys and values of the rest of the draft are beyond this length. They are not read,
            # and the next tokens overwrite them.
            kv_lengths[row] = len(prompts[row]) + len(output_ids[row]) - 1
            outputs += row_outputs
            if row_outputs[-1].finish_reason is None:
                unfinished_rows.append(row)
        drafts = [()] * len(prompts)
        yield outputs
        rows = [row for row in unfinished_rows if row not in dropped_rows]


def _adapted_rows(
    batch: Batch, adapters: Sequence[SequenceAdapter | None]
) -> tuple[AdaptedRows, ...]:
    """Return the rows on which each adapter acts."""
    rows_by_adapter: dict[int, tuple[ModelAdapter, list[Tensor]]] = {}
    for adapter, start, past, length in zip(
        adapters, batch.query_starts, batch.past_lengths, batch.query_lengths, strict=True
    ):
        if adapter is None:
            continue
        first = start + max(0, adapter.acts_from - past)
        rows = torch.arange(first, start + length, device=batch.positions.device)
        if len(rows):
            rows_by_adapter.setdefault(id(adapter.terms), (adapter.terms, []))[1].append(rows)
    adapted_rows = []
    for terms, row_ranges in rows_by_adapter.values():
        adapter_rows = torch.cat(row_ranges)
        acts_on_all = len(adapter_rows) == batch.tokens
        adapted_rows.append(AdaptedRows(terms, None if acts_on_all else adapter_rows))
    return tuple(adapted_rows)


def _verify_draft(
    row: int,
    draft: Sequence[int],
    samples: Sequence[tuple[int, Score | None]],
    sampling: SamplingParams,
    output_count: int,
) -> list[TokenOutput]:
    """Return the outputs of a row: its next token, or the result of verifying its draft.

    The result is the draft's tokens up to the first one that differs from its sample, and this
    sample. `samples[i]` is valid only if all draft tokens before i are equal to their samples.
    `output_count`: the number of tokens that the row has so far.
    """
    outputs = []
    for index, (token, token_score) in enumerate(samples):
        finish_reason = (
            _finish_reason(token, output_count + index + 1, sampling) if token_score else "fault"
        )
        outputs.append(
            TokenOutput(
                row,
                -1 if finish_reason == "scored" else token,
                token_score.logprob if token_score else float("nan"),
                finish_reason,
                token_score if sampling.logprobs is not None else None,
            )
        )
        if finish_reason is not None or (draft and token != draft[index]):
            break
    return outputs


def _last_positions(batch: Batch, counts: Sequence[int]) -> Tensor:
    """Return the flat indices of the last `counts[i]` tokens of each sequence i of the batch."""
    if max(counts) == 1:
        return batch.last_rows
    ends = [
        start + length
        for start, length in zip(batch.query_starts, batch.query_lengths, strict=True)
    ]
    indices = [
        index for end, count in zip(ends, counts, strict=True) for index in range(end - count, end)
    ]
    return torch.tensor(indices, device=batch.positions.device)


def _draft_logprobs(
    model: GPT, logits: Tensor | None, drafts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probabilities of each row's draft, on all ranks.

    `logits` has one row per token of a draft, and one row for an empty draft.
    """
    if not any(drafts):
        return [[] for _ in drafts]
    tokens = [token for draft in drafts for token in draft or (0,)]
    scores = iter(_score_tokens(model, logits, tokens, [0] * len(tokens)))
    logprobs = []
    for draft in drafts:
        row_scores = list(islice(scores, max(1, len(draft))))[: len(draft)]
        logprobs.append([score.logprob if score else float("nan") for score in row_scores])
    return logprobs


def check_prompts(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    virtual_tokens: int,
) -> None:
    """Raise RequestError if a prompt is empty, is too long, or has an invalid token id."""
    context_max = model.config.max_position_embeddings
    ids_end = model.config.vocab_size + virtual_tokens
    for prompt, sampling in zip(prompts, samplings, strict=True):
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        invalid_id = next((token for token in prompt if not 0 <= token < ids_end), None)
        if invalid_id is not None:
            raise RequestError(
                f"token id {invalid_id} is outside the vocabulary of {model.config.vocab_size}"
                + (f" and the adapter's {virtual_tokens} virtual tokens" if virtual_tokens else "")
                + f"; use ids from 0 to {ids_end - 1}",
                "token_ids",
            )
        if len(prompt) + sampling.max_new_tokens > context_max:
            tokens_left = context_max - len(prompt)
            remedy = (
                f"request at most {tokens_left} new tokens"
                if tokens_left > 0
                else f"shorten the prompt by at least {1 - tokens_left} tokens"
            )
            raise RequestError(
                f"prompt ({len(prompt)} tokens) + max_new_tokens ({sampling.max_new_tokens}) = "
                f"{len(prompt) + sampling.max_new_tokens}, more than the model's context of "
                f"{context_max}; {remedy}",
                "max_new_tokens",
            )


def prefix_lengths(
    prompts: Sequence[Sequence[int]], vocab_size: int, virtual_tokens: int
) -> list[int]:
    """Return, for each prompt, the number of virtual tokens of the prefix at its beginning.

    The number is `virtual_tokens`, or 0 if the prompt has no virtual tokens. Raise RequestError if
    a prompt has only some of the prefix's virtual tokens, or has them elsewhere.
    """
    lengths = []
    for prompt in prompts:
        if max(prompt) < vocab_size:
            lengths.append(0)
            continue
        has_prefix = list(prompt[:virtual_tokens]) == list(
            range(vocab_size, vocab_size + virtual_tokens)
        )
        if not has_prefix or max(prompt[virtual_tokens:], default=vocab_size) >= vocab_size:
            raise RequestError(
                f"the prompt must begin with the prefix's {virtual_tokens} virtual tokens in "
                "order, followed by text; correct the token ids",
                "token_ids",
            )
        lengths.append(virtual_tokens)
    return lengths


def _write_prefix_kv(
    chunks: Sequence[GPT],
    pool: KVPool,
    block_tables: Tensor,
    kv_lengths: Sequence[int],
    adapter_table: Tensor,
) -> None:
    """Write the prefix's keys and values to the KV blocks of each prompt that uses the prefix."""
    mesh, layers = chunks[0].mesh, [layer for chunk in chunks for layer in chunk.layers]
    prefix_kv = prefix_shard(adapter_table, chunks[0].config, layers, mesh.tp_rank, mesh.tp)
    for row, length in enumerate(kv_lengths):
        if length:
            pool.write_tokens(block_tables[row].tolist(), 0, prefix_kv)


def _common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all prompts; 0 for a single prompt.

    The prefix lacks at least the last token of each prompt, because its logits are needed.
    """
    if len(prompts) < 2:
        return 0
    first_prompt = prompts[0]
    shared_max = min(map(len, prompts)) - 1
    for prompt in prompts[1:]:
        pairs = zip(first_prompt[:shared_max], prompt, strict=False)
        differences = (index for index, (token, other) in enumerate(pairs) if token != other)
        shared_max = next(differences, shared_max)
    return shared_max


def _prefill_shared_tokens(
    chunks: Sequence[GPT],
    pool: KVPool,
    block_tables: Tensor,
    tokens: Sequence[int],
    adapter_table: Tensor | None,
) -> None:
    """Compute the keys and values of the common prefix of all prompts.

    The sequences share the full blocks of the prefix. If its last block is not full, each sequence
    gets a copy of it.
    """
    batch = Batch.paged([len(tokens)], [0], block_tables[:1], BLOCK_TOKENS)
    batch = replace(batch, logit_rows=batch.last_rows)
    ids = torch.tensor(tokens, device=block_tables.device)
    pipeline.forward(chunks, ids, batch, kv=pool, virtual_embeddings=adapter_table)
    if len(tokens) % BLOCK_TOKENS:
        first_block, *other_blocks = block_tables[:, len(tokens) // BLOCK_TOKENS].tolist()
        pool.copy_blocks([first_block] * len(other_blocks), other_blocks)


def _allocate_kv_pool(
    chunks: Sequence[GPT], token_counts: Sequence[int], shared_tokens: int
) -> tuple[KVPool, Tensor]:
    """Return a KV pool for sequences of these numbers of tokens, and their block tables.

    All sequences share the full blocks of the first `shared_tokens` tokens.
    """
    shared_blocks = shared_tokens // BLOCK_TOKENS
    block_counts = [-(-count // BLOCK_TOKENS) - shared_blocks for count in token_counts]
    model, mesh = chunks[0], chunks[0].mesh
    layers = [layer for chunk in chunks for layer in chunk.layers]
    blocks = shared_blocks + sum(block_counts)
    pool = KVPool(model.config, layers, blocks, tp=mesh.tp, dtype=model.dtype, device=mesh.device)
    block_tables = torch.zeros(
        len(block_counts), shared_blocks + max(block_counts), dtype=torch.long
    )
    block_tables[:, :shared_blocks] = torch.arange(shared_blocks)
    first_block = shared_blocks
    for row, block_count in enumerate(block_counts):
        own_blocks = torch.arange(first_block, first_block + block_count)
        block_tables[row, shared_blocks : shared_blocks + block_count] = own_blocks
        first_block += block_count
    return pool, block_tables.to(mesh.device)


@dataclass(frozen=True)
class _SamplingInput:
    """What the sampling of a row's next token needs besides the logits."""

    sampling: SamplingParams
    prompt: Sequence[int]
    output_ids: Sequence[int]


def _sample_tokens(
    model: GPT, logits: Tensor | None, inputs: Sequence[_SamplingInput]
) -> list[tuple[int, Score | None]]:
    """Sample one token per row on the last stage; return tokens and scores on all ranks.

    A score is None if the row's logits are not finite.
    """
    next_ids = torch.zeros(len(inputs), dtype=torch.long, device=model.mesh.device)
    if logits is not None:
        next_ids = logits.argmax(-1)
        for row, row_input in enumerate(inputs):
            if not row_input.sampling.is_plain_greedy:
                position = len(row_input.prompt) + len(row_input.output_ids)
                next_ids[row] = sample_token(
                    logits[row],
                    row_input.sampling,
                    row_input.prompt,
                    row_input.output_ids,
                    position,
                )
    tokens = broadcast_from_last_stage(next_ids, model.mesh).tolist()
    top_counts = [row_input.sampling.logprobs or 0 for row_input in inputs]
    return list(zip(tokens, _score_tokens(model, logits, tokens, top_counts), strict=True))


def _prompt_scores(
    model: GPT,
    logits: Tensor | None,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    kv_lengths: Sequence[int],
) -> dict[int, list[Score | None]]:
    """Return the prompt scores by row, for the prompts that request them.

    `logits` has the logits of all prompts' positions, concatenated, without the positions of the
    prefix (the first `kv_lengths[row]` of each prompt).
    """
    scores_by_row: dict[int, list[Score | None]] = {}
    # `start + p` is the row of `logits` for position p of the current prompt. The subtraction
    # accounts for the prefix, which has no rows.
    start = 0
    for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        start -= kv_lengths[row]
        if sampling.prompt_logprobs is not None:
            positions = range(kv_lengths[row] + 1, len(prompt))
            scored_positions = [p for p in positions if prompt[p] < model.config.vocab_size]
            # The logits of position p - 1 predict the token at position p.
            previous_logits = (
                None if logits is None else logits[[start + p - 1 for p in scored_positions]]
            )
            top_counts = [sampling.prompt_logprobs] * len(scored_positions)
            scores = _score_tokens(
                model, previous_logits, [prompt[p] for p in scored_positions], top_counts
            )
            scores_by_row[row] = [None] * len(prompt)
            for position, token_score in zip(scored_positions, scores, strict=True):
                scores_by_row[row][position] = token_score
        start += len(prompt)
    return scores_by_row


def _score_tokens(
    model: GPT, logits: Tensor | None, tokens: Sequence[int], top_counts: Sequence[int]
) -> list[Score | None]:
    """Compute the score of each token on the last stage, and return the scores on all ranks.

    A score is None if the row's logits are not finite.
    """
    top_max = max(top_counts, default=0)
    score_table = torch.zeros(len(tokens), _SCORE_FIELDS + 2 * top_max, dtype=torch.float64)
    if logits is not None:
        for row, token_score in enumerate(score_tokens(logits, tokens, top_counts)):
            numbers = [
                token_score.logprob,
                token_score.rank,
                *(number for top in token_score.tops for number in top),
            ]
            score_table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        # A NaN log-probability stands for the score None.
        score_table[~logits.isfinite().all(-1).cpu(), 0] = float("nan")
    # fp64 represents ids up to 2^53 exactly, so one broadcast can send all numbers.
    score_rows = broadcast_from_last_stage(score_table.to(model.mesh.device), model.mesh).tolist()
    counts = [min(count, model.config.vocab_size) for count in top_counts]
    return [
        _unpack_score(numbers, count) for numbers, count in zip(score_rows, counts, strict=True)
    ]


def _unpack_score(numbers: Sequence[float], top_count: int) -> Score | None:
    logprob, rank, *alternatives = numbers
    if not isfinite(logprob):
        return None
    tops = tuple((int(alternatives[2 * i]), alternatives[2 * i + 1]) for i in range(top_count))
    return Score(logprob, int(rank), tops)


def _finish_reason(token: int, output_count: int, sampling: SamplingParams) -> FinishReason | None:
    if sampling.max_new_tokens == 0:
        return "scored"
    if token in sampling.stop_token_ids:
        return "stop"
    return "length" if output_count >= sampling.max_new_tokens else None
