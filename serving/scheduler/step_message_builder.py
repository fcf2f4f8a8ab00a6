"""Layout of the `Step` message: arrays of decodes, drafts and prefill chunks, and resource updates.

The scheduler (`scheduler.py`) decides which sequences a step has, and with how many tokens; the
builder lays out the arrays of the message. The builder owns the lists of the step that is being
planned, and the unused part of the step's token budgets. It reads sequences, and does not change
them.
"""

from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import PrefixKVWrite, SlotInit, Step
from serving.scheduler.resource_allocator import ResourceUpdates
from serving.scheduler.sequence import Sequence


class StepMessageBuilder:
    """The `Step` message that is being laid out.

    `tokens_left` is the unused part of the token budget, and `prefix_tokens_left` the number of
    prefix adapter tokens that the step may still write. The sequences are in the order in which
    they were added: first all decodes, then the prefill chunks.
    """

    def __init__(self, vocab_size: int, token_budget: int, prefix_write_tokens_max: int) -> None:
        self._vocab_size = vocab_size
        self.tokens_left = token_budget
        self.prefix_tokens_left = prefix_write_tokens_max
        self.prompt_tokens = 0  # Tokens of the prefill chunks.
        # Each of the next eight lists has one entry per sequence, with two exceptions: `_token_ids`
        # has one per new token, and `_draft_counts` has one per decode or is empty.
        self._sequences: list[Sequence] = []
        self._slots: list[int] = []
        self._past: list[int] = []
        self._lengths: list[int] = []
        self._token_ids: list[int] = []
        self._draws: list[bool] = []
        self._prompt_score_counts: list[int] = []
        self._draft_counts: list[int] = []
        self._slot_inits: list[SlotInit] = []
        self._prefix_writes: list[PrefixKVWrite] = []
        # Whether a sequence of the step has an adapter that changes linears.
        self._changes_linears = False

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of the step, in the step's order."""
        return list(self._sequences)

    @property
    def is_empty(self) -> bool:
        """Whether the step has no work: no tokens, no slots to initialize, no prefix to write."""
        return not (self._sequences or self._slot_inits or self._prefix_writes)

    def init_slot(self, sequence: Sequence) -> None:
        """Add the initialization of an admitted sequence's slot on the ranks."""
        submission = sequence.submission
        prompt = sequence.tokens[: sequence.prompt_tokens]
        if sequence.virtual_end:
            prompt = [token if token < self._vocab_size else -1 for token in prompt]
        output_tokens = sequence.tokens[sequence.prompt_tokens :]
        self._slot_inits.append(
            SlotInit(sequence.slot, submission.sampling, prompt, output_tokens, submission.guide)
        )

    def add_decode(self, sequence: Sequence, *, is_token_available: bool = True) -> None:
        """Add one decode of a sequence: its last token, after which a new token is sampled.

        `is_token_available=False`: the last token is still being sampled by a step in flight.
        """
        self._add_sequence(sequence)
        self._past.append(sequence.planned_tokens)
        self._lengths.append(1)
        self._token_ids.append(sequence.tokens[-1] if is_token_available else -1)
        self._draws.append(True)
        self._prompt_score_counts.append(0)
        self.tokens_left -= 1

    def add_drafts(self, drafts: list[list[int]]) -> None:
        """Add the draft tokens of each decode.

        Call this after all decodes were added, and before any prefill is added.
        """
        token_ids = list[int]()
        for last_id, draft in zip(self._token_ids, drafts, strict=True):
            token_ids += [last_id, *draft]
        self.tokens_left -= len(token_ids) - len(self._token_ids)
        self._draft_counts = [len(draft) for draft in drafts]
        self._lengths = [1 + count for count in self._draft_counts]
        self._token_ids = token_ids

    def add_prefix_write(self, sequence: Sequence, count: int) -> None:
        """Add the write of the next `count` prefix adapter tokens into the sequence's blocks."""
        adapter_ref = sequence.submission.adapter_ref
        assert adapter_ref is not None and sequence.unwritten_prefix_tokens >= count > 0, (
            "the prefix write is empty or longer than the unwritten prefix"
        )
        start = sequence.planned_tokens
        block_tokens = sequence.block_tokens
        entries = slice(start // block_tokens, -(-(start + count) // block_tokens))
        blocks, *other_blocks = [table[entries] for table in sequence.block_tables]
        self._prefix_writes.append(
            PrefixKVWrite(adapter_ref.digest, start, count, blocks, other_group_blocks=other_blocks)
        )
        self.prefix_tokens_left -= count

    def add_prefill(self, sequence: Sequence, count: int) -> None:
        """Add a prefill chunk: the next `count` tokens of a sequence."""
        past = sequence.planned_tokens
        end = past + count
        ids = sequence.tokens[past:end]
        if past < sequence.virtual_end and sequence.virtual_start < end:
            vocab_size = self._vocab_size
            row_start = sequence.adapter_row_start
            assert row_start >= 0, "virtual tokens without adapter rows in the pool"
            # vocab_size + row of the adapter becomes vocab_size + row of the adapter pool.
            ids = [token if token < vocab_size else token + row_start for token in ids]
        sampling = sequence.submission.sampling
        assert not sequence.unwritten_prefix_tokens, "prefill before the prefix was written"
        # A prompt token is scored by the logits of the token before it.
        needs_scores = (
            sequence.scored_tokens < sequence.prompt_tokens and sequence.scored_tokens <= end
        )
        self._add_sequence(sequence)
        self._past.append(past)
        self._lengths.append(count)
        self._token_ids.extend(ids)
        self._draws.append(end == len(sequence.tokens) and sampling.max_new_tokens > 0)
        self._prompt_score_counts.append(
            max(0, min(end, sequence.prompt_tokens - 1) - past) if needs_scores else 0
        )
        self.tokens_left -= count
        self.prompt_tokens += count

    def _add_sequence(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self._slots.append(sequence.slot)
        if sequence.adapter_page_start >= 0:
            self._changes_linears = True

    def build(self, step_id: int, updates: ResourceUpdates) -> Step:
        """The complete step; `updates` are applied by the ranks before its forward pass."""
        # If the step has drafts, each prefill chunk gets the draft count 0.
        prefill_count = len(self._sequences) - len(self._draft_counts) if self._draft_counts else 0
        return Step(
            step_id,
            self._slots,
            self._past,
            self._lengths,
            self._token_ids,
            self._draws,
            self._prompt_score_counts,
            self._slot_inits,
            updates.block_table_updates,
            updates.block_copies,
            updates.block_clears,
            updates.adapter_writes,
            self._draft_counts + [0] * prefill_count,
            self._prefix_writes,
            updates.linear_writes,
            *(self._adapters() if self._changes_linears else ([], [])),
        )

    def _adapters(self) -> tuple[list[int], list[int]]:
        """`Step.adapter_starts` and `Step.adapted_from` of the sequences."""
        pairs = [
            (sequence.adapter_page_start * ADAPTER_PAGE_BYTES, sequence.submission.adapted_from)
            if sequence.adapter_page_start >= 0
            else (-1, -1)
            for sequence in self._sequences
        ]
        return [start for start, _ in pairs], [position for _, position in pairs]
