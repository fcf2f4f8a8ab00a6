"""Batched greedy completion of many prompts in process, with stop strings and a token budget.

The size of each batch is limited, so the memory of the KV pool is limited too. At any parallel
split, all ranks make the same call and get all completions. A text ends at a stop token or a stop
string; `StopStringDetokenizer` finds the stop strings, as in the server. The module opens no
adapter files: the caller passes the adapter's table and its kind, and prompt ids at or above the
vocabulary size select rows of the table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpt.generation.generate import SequenceAdapter, generate_steps
from gpt.generation.reference_sampler import Score
from gpt.generation.stop_strings import StopStringDetokenizer
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import model_chunks
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import Tokenizer

# Default of max_new_tokens, as in the server.
NEW_TOKENS_DEFAULT = 128
# Largest sum of prompt lengths and max_new_tokens in a batch of several prompts.
BATCH_TOKENS_MAX = 8192
# Largest number of logits in the first step that the drafts of a batch of several prompts need; in
# fp32 they have 256 MiB.
DRAFT_LOGITS_MAX = 1 << 26


@dataclass
class TextCompletion:
    """The greedy completion of one prompt."""

    text: str = ""  # Without the stop token or the stop string.
    token_ids: list[int] = field(default_factory=list)  # Including the stop token, if any.
    # The score of each token, with the two most likely tokens. Empty without `with_scores`.
    scores: list[Score] = field(default_factory=list)
    logprob: float = 0.0  # Sum of the tokens' log-probabilities.
    is_truncated: bool = False  # Whether max_new_tokens ended the completion.
    has_fault: bool = False  # Whether logits that are not finite ended the completion.
    # The log-probability of each token of the prompt's draft. NaN: the logits were not finite.
    draft_logprobs: list[float] = field(default_factory=list)


def complete_prompts(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    adapter_table: Tensor | None = None,
    adapter_kind: str = "rows",
    adapters: Sequence[SequenceAdapter | None] = (),
    max_new_tokens: int | Sequence[int] = NEW_TOKENS_DEFAULT,
    stop_strings: Sequence[str] = (),
    with_scores: bool = False,
    tokens_max: int = BATCH_TOKENS_MAX,
    drafts: Sequence[Sequence[int]] | None = None,
    shares_prefix: bool = False,
    report_progress: Callable[[int], None] = lambda _: None,
) -> list[TextCompletion]:
    """Return the greedy completion of each prompt, in the order of the prompts.

    `generate` explains `model`, `adapter_table`, `adapter_kind` and `adapters`, and
    `generate_steps` explains `drafts` and `shares_prefix`; drafts change the speed, and the text
    only by rounding. A draft is cut at the end of the model's context. `max_new_tokens` is one
    limit, or one per prompt; it is reduced where the completion would exceed the model's context.
    `tokens_max` is the largest sum of prompt lengths and max_new_tokens in a batch of several
    prompts. `report_progress` is called
    with a number of prompts, in proportion to the completed tokens.
    """
    if isinstance(max_new_tokens, int):
        max_new_tokens = [max_new_tokens] * len(prompts)
    config = model_chunks(model)[0].config
    context_max = config.max_position_embeddings
    if drafts is None:
        drafts = [()] * len(prompts)
    # The last token of a draft needs no position of its own.
    drafts = [
        draft[: max(0, context_max - len(prompt) + 1)]
        for draft, prompt in zip(drafts, prompts, strict=True)
    ]
    samplings = [
        SamplingParams(
            max_new_tokens=max(1, min(new_tokens_max, context_max - len(prompt))),
            stop_token_ids=tokenizer.stop_ids,
            logprobs=2 if with_scores else None,
        )
        for prompt, new_tokens_max in zip(prompts, max_new_tokens, strict=True)
    ]
    completions = [TextCompletion() for _ in prompts]
    sizes = [
        len(prompt) + sampling.max_new_tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    draft_tokens_max = max(1, DRAFT_LOGITS_MAX // config.vocab_size)
    complete_tokens = 0
    for indices in _length_sorted_batches(sizes, tokens_max, drafts, draft_tokens_max):
        detokenizers = [StopStringDetokenizer(tokenizer, stop_strings) for _ in indices]
        # Rows that a stop string has ended, and rows that have ended for another reason.
        stopped_rows: set[int] = set()
        finished_rows: set[int] = set()
        for outputs in generate_steps(
            model,
            [prompts[index] for index in indices],
            [samplings[index] for index in indices],
            adapter_table=adapter_table,
            adapter_kind=adapter_kind,
            adapters=[adapters[index] for index in indices] if adapters else (),
            dropped_rows=stopped_rows,
            drafts=[drafts[index] for index in indices],
            shares_prefix=shares_prefix,
        ):
            for output in outputs:
                if output.row in stopped_rows:
                    continue  # The remaining tokens of a draft with a stop string.
                completion, detokenizer = completions[indices[output.row]], detokenizers[output.row]
                completion.draft_logprobs += output.draft_logprobs
                completion.token_ids.append(output.token_id)
                completion.logprob += output.logprob
                if output.score is not None:
                    completion.scores.append(output.score)
                completion.has_fault |= output.finish_reason == "fault"
                if output.finish_reason != "stop":
                    completion.text += detokenizer.push(output.token_id)
                if detokenizer.is_stopped:
                    stopped_rows.add(output.row)
                elif output.finish_reason is not None:
                    finished_rows.add(output.row)
                    # The remaining text may contain a stop string.
                    completion.text += detokenizer.finish()
                    completion.is_truncated = (
                        output.finish_reason == "length" and not detokenizer.is_stopped
                    )
            # A prompt that has ended counts with its limit, as if it had all of its new tokens.
            batch_tokens = sum(
                sizes[index]
                if row in stopped_rows or row in finished_rows
                else len(prompts[index]) + len(completions[index].token_ids)
                for row, index in enumerate(indices)
            )
            report_progress(len(prompts) * (complete_tokens + batch_tokens) // sum(sizes))
        complete_tokens += sum(sizes[index] for index in indices)
    return completions


def _length_sorted_batches(
    sizes: Sequence[int],
    tokens_max: int,
    drafts: Sequence[Sequence[int]],
    draft_tokens_max: int,
) -> Iterator[list[int]]:
    """Yield batches of prompt indices with limited sums of sizes and of draft lengths, in tokens.

    A prompt that exceeds one of the limits is alone in its batch. The batches are made in
    descending order of size, so that the prompts of a batch have similar sizes.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    batch: list[int] = []
    tokens_left, draft_tokens_left = tokens_max, draft_tokens_max
    for index in order:
        if batch and (sizes[index] > tokens_left or len(drafts[index]) > draft_tokens_left):
            yield batch
            batch, tokens_left, draft_tokens_left = [], tokens_max, draft_tokens_max
        batch.append(index)
        tokens_left -= sizes[index]
        draft_tokens_left -= len(drafts[index])
    if batch:
        yield batch
