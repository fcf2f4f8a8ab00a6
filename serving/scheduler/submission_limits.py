"""Submission limits: rejection of submissions that could not run even on an idle engine.

The limits are constants of the engine: vocabulary, context length, KV cache and adapter pool. A
submission within them runs as soon as resources are free; free resources are not checked here.
"""

from dataclasses import dataclass

from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import RejectionReason, SequenceOutput, Submission
from serving.scheduler.adapter_memory_pool import pages_for


@dataclass(frozen=True, slots=True)
class SubmissionLimits:
    """Limits of one sequence."""

    vocab_size: int
    context_tokens_max: int  # Prompt plus output.
    kv_tokens: int  # Capacity of the KV cache, in tokens.
    adapter_rows: int  # Size of the adapter pool, in rows.
    adapter_pages: int = 0  # Size of the adapter memory, in pages.

    def rejection(self, submission: Submission) -> SequenceOutput | None:
        """The rejection of a submission that can never run; None: the submission can run."""
        prompt = submission.prompt
        adapter_ref = submission.adapter_ref
        if not prompt:
            return _reject(submission, "the prompt is empty; it needs at least one token")
        row_count = 0 if adapter_ref is None else adapter_ref.row_count
        is_prefix = adapter_ref is not None and adapter_ref.is_prefix
        if is_prefix and not _starts_with_prefix(
            prompt, range(self.vocab_size, self.vocab_size + row_count)
        ):
            return _reject(
                submission,
                f"the adapter is a prefix of {row_count} virtual tokens; the prompt must begin "
                "with these tokens, in order, and have tokens of the vocabulary after them",
            )
        if adapter_ref is not None and pages_for(adapter_ref) > self.adapter_pages:
            return _reject(
                submission,
                f"the adapter's weights need {adapter_ref.rank_bytes} bytes, and the "
                f"adapter memory has only {self.adapter_pages * ADAPTER_PAGE_BYTES}; raise "
                "adapter_memory_mb",
                end="adapter",
            )
        if row_count > self.adapter_rows and not is_prefix:
            return _reject(
                submission,
                f"the adapter has {row_count} rows, and the adapter pool has only "
                f"{self.adapter_rows}; raise adapter_rows_max",
                end="adapter",
            )
        return self._reject_token_ids(submission, row_count) or self._reject_length(submission)

    def _reject_token_ids(self, submission: Submission, row_count: int) -> SequenceOutput | None:
        prompt = submission.prompt
        ids_end = self.vocab_size + row_count
        rows_phrase = f" and the adapter's {row_count} rows" if row_count else ""
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < ids_end:
                return _reject(
                    submission,
                    f"token id {token} is outside the vocabulary of {self.vocab_size} tokens"
                    f"{rows_phrase}; use ids from 0 to {ids_end - 1}",
                )
        for token in submission.output_tokens:
            if not 0 <= token < self.vocab_size:
                return _reject(
                    submission,
                    f"token id {token} of the output is outside the vocabulary of "
                    f"{self.vocab_size} tokens; use ids from 0 to {self.vocab_size - 1}",
                )
        return None

    def _reject_length(self, submission: Submission) -> SequenceOutput | None:
        prompt_tokens = len(submission.prompt)
        new_tokens = submission.sampling.max_new_tokens
        total_tokens = prompt_tokens + new_tokens
        # The last generated token needs no keys and values, so one token more fits.
        kv_tokens = self.kv_tokens + (new_tokens > 0)
        tokens_max = min(self.context_tokens_max, kv_tokens)
        if total_tokens <= tokens_max:
            return None
        limit_name = "KV cache" if kv_tokens < self.context_tokens_max else "context"
        return _reject(
            submission,
            f"prompt ({prompt_tokens} tokens) + max_new_tokens ({new_tokens}) = {total_tokens} "
            f"tokens, but the {limit_name} allows at most {tokens_max}; shorten the prompt or "
            f"reduce max_new_tokens by {total_tokens - tokens_max}",
        )


def _reject(
    submission: Submission, reason: str, end: RejectionReason = "refused"
) -> SequenceOutput:
    return SequenceOutput(submission.sequence_id, end=end, reason=reason)


def _starts_with_prefix(prompt: list[int], virtual_ids: range) -> bool:
    """Whether the prompt is `virtual_ids` in order, then at least one token of the vocabulary."""
    own_tokens = prompt[len(virtual_ids) :]
    return (
        prompt[: len(virtual_ids)] == list(virtual_ids)
        and bool(own_tokens)
        and max(own_tokens) < virtual_ids.start
    )
