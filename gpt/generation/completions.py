"""Batched greedy completion of many prompts in process, with stop strings and a token budget.

The size of each batch is limited, so the memory of the KV pool is limited too. At any parallel
split, all ranks make the same call and get all completions. A text ends at a stop token or a stop
string; `StopStringDetokenizer` finds the stop strings, as in the server. The module opens no
adapter files: the caller passes the adapter's table and its kind, and prompt ids at or above the
vocabulary size select rows of the table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpt.generation.generate import generate_steps
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


def complete_prompts(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    adapter_table: Tensor | None = None,
    adapter_kind: str = "rows",
    max_new_tokens: int | Sequence[int] = NEW_TOKENS_DEFAULT,
    stop_strings: Sequence[str] = (),
    with_scores: bool = False,
    tokens_max: int = BATCH_TOKENS_MAX,
) -> list[TextCompletion]:
    """Return the greedy completion of each prompt, in the order of the prompts.

    `generate` explains `model`, `adapter_table` and `adapter_kind`. `max_new_tokens` is one limit,
    or one per prompt; it is reduced where the completion would exceed the model's context.
    `tokens_max` is the largest sum of prompt lengths and max_new_tokens in a batch of several
    prompts.
    """
    if isinstance(max_new_tokens, int):
        max_new_tokens = [max_new_tokens] * len(prompts)
    context_max = model_chunks(model)[0].config.max_position_embeddings
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
    for indices in _length_sorted_batches(sizes, tokens_max):
        detokenizers = [StopStringDetokenizer(tokenizer, stop_strings) for _ in indices]
        finished_rows: set[int] = set()
        for outputs in generate_steps(
            model,
            [prompts[index] for index in indices],
            [samplings[index] for index in indices],
            adapter_table=adapter_table,
            adapter_kind=adapter_kind,
            dropped_rows=finished_rows,
        ):
            for output in outputs:
                completion, detokenizer = completions[indices[output.row]], detokenizers[output.row]
                completion.token_ids.append(output.token_id)
                completion.logprob += output.logprob
                if output.score is not None:
                    completion.scores.append(output.score)
                completion.has_fault |= output.finish_reason == "fault"
                if output.finish_reason != "stop":
                    completion.text += detokenizer.push(output.token_id)
                if detokenizer.is_stopped:
                    finished_rows.add(output.row)
                elif output.finish_reason is not None:
                    # The remaining text may contain a stop string.
                    completion.text += detokenizer.finish()
                    completion.is_truncated = (
                        output.finish_reason == "length" and not detokenizer.is_stopped
                    )
    return completions


def _length_sorted_batches(sizes: Sequence[int], tokens_max: int) -> Iterator[list[int]]:
    """Yield batches of prompt indices whose sizes, in tokens, add up to at most `tokens_max`.

    A prompt whose size is above `tokens_max` is alone in its batch. The batches are made in
    descending order of size, so that the prompts of a batch have similar sizes.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    batch: list[int] = []
    tokens_left = tokens_max
    for index in order:
        if batch and sizes[index] > tokens_left:
            yield batch
            batch, tokens_left = [], tokens_max
        batch.append(index)
        tokens_left -= sizes[index]
    if batch:
        yield batch
