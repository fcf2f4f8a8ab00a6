"""Batched greedy completion of many prompts in process, with stop strings and a token budget.

Prompts run in batches of bounded size, so memory is bounded. It works at any parallel split: all
ranks make the same call and get all completions. A text ends at a stop token or a stop string,
which the same `StopStringDetokenizer` finds as in the server. The module opens no adapter files:
the caller passes the adapter's table and its kind, and prompt ids at or above the vocabulary size
are rows of the table.
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

# max_new_tokens if neither an adapter's card nor the settings define it, as in the server.
NEW_TOKENS_DEFAULT = 128
# Limit of the sum of prompt lengths and max_new_tokens in a batch.
BATCH_TOKENS_MAX = 8192


@dataclass
class TextCompletion:
    """One greedy completion; `token_ids` include the stop token, if any."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)  # If requested: one per token, with top two.
    logprob: float = 0.0  # Sum of the tokens' log-probabilities.
    is_truncated: bool = False  # Whether max_new_tokens ended the completion.
    has_fault: bool = False  # Whether the model's logits were not finite.


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
    """Complete each prompt; reduce max_new_tokens if the model's context would be exceeded."""
    new_tokens = max_new_tokens
    limits = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    context = model_chunks(model)[0].config.max_position_embeddings
    samplings = [
        SamplingParams(
            max_new_tokens=max(1, min(limit, context - len(prompt))),
            stop_token_ids=tokenizer.stop_ids,
            logprobs=2 if with_scores else None,
        )
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    completions = [TextCompletion() for _ in prompts]
    sizes = [
        len(prompt) + sampling.max_new_tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    for indices in _length_sorted_batches(sizes, tokens_max):
        detokenizers = [StopStringDetokenizer(tokenizer, stop_strings) for _ in indices]
        finished_rows: set[int] = set()
        batch = [prompts[index] for index in indices], [samplings[index] for index in indices]
        for outputs in generate_steps(
            model,
            *batch,
            adapter_table=adapter_table,
            adapter_kind=adapter_kind,
            dropped_rows=finished_rows,
        ):
            for output in outputs:
                completion, detokenizer = completions[indices[output.row]], detokenizers[output.row]
                completion.token_ids.append(output.token_id)
                completion.logprob += output.logprob
                completion.scores += [output.score] if output.score else []
                completion.has_fault |= output.finish_reason == "fault"
                if output.finish_reason != "stop":
                    completion.text += detokenizer.push(output.token_id)
                if detokenizer.is_stopped:
                    finished_rows.add(output.row)
                elif output.finish_reason is not None:
                    completion.text += detokenizer.finish()
                    completion.is_truncated = (
                        output.finish_reason == "length" and not detokenizer.is_stopped
                    )
    return completions


def _length_sorted_batches(sizes: Sequence[int], tokens_max: int) -> Iterator[list[int]]:
    """Yield batches of indices, longest first, so that the lengths in a batch are similar."""
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
