"""Sequence state: tokens, KV progress, block tables, waiting time and scheduling priority.

A sequence owns its state: other objects read its attributes, and change them only through its
methods. A preempted sequence keeps its tokens; after its next admission their keys and values are
computed again, and it generates the same tokens as without preemption. This module contains no
scheduling decisions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from serving.messages import EndReason, Phases, SequenceOutput, Submission, TokenScore
from serving.scheduler.draft_verification import verify_draft
from serving.scheduler.ngram_proposer import NgramProposer

# Aging levels after which a throughput-class sequence is treated as latency class.
LEVELS_TO_LATENCY = 6

# (treated as latency class, priority + aging level, -arrival order); the highest runs first.
SchedulingPriority = tuple[bool, int, int]


@dataclass(slots=True, eq=False)
class Sequence:
    """A submission in the scheduler: waiting while it has no slot, running while it has one."""

    submission: Submission
    arrival_order: int  # Counts all sequences; smaller arrived earlier.
    block_tokens: int  # Tokens of one KV block.
    tokens: list[int]  # Prompt and generated tokens.
    prompt_tokens: int  # Number of leading `tokens` that are the prompt.
    tokens_max: int  # Limit of prompt plus generated tokens.
    is_latency_class: bool
    # When the current or last wait began: at arrival or after a preemption. A wait ends with the
    # admission, and includes the time in which the sequence is parked.
    queued_at: float
    waited_s: float = 0.0  # Total of all completed waits.
    arrived_at: float = 0.0  # When the engine loop received the submission.
    # Time from `arrived_at` until the sequence was first queued, in which its adapter was read.
    adapter_wait_s: float = 0.0

    # Position of the first virtual token, and position after the last one; both 0: there is none.
    virtual_start: int = 0
    virtual_end: int = 0
    adapter_key: bytes = b""  # Represents the adapter in prefix-cache keys.

    block_keys: list[bytes] = field(default_factory=list)  # Prefix-cache keys of full blocks.
    # Prefix-cache keys of partial blocks: by block index, pairs of (end position, key).
    partial_keys: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)

    slot: int = -1  # -1: waiting.
    is_parked: bool = False  # Waiting for KV that another sequence computes.
    # One block table for each KV group, all of the same length. The leading entries of a group with
    # a window are 0 where the blocks were freed; `freed_counts` has their number for each group.
    block_tables: list[list[int]] = field(default_factory=list)
    freed_counts: list[int] = field(default_factory=list)
    block_count: int = 0  # Blocks in the block tables of all KV groups.
    kv_capacity: int = 0  # Tokens whose keys and values fit into the block tables.
    # Length of `tokens` at admission. The sequence is prefilling until these tokens are planned.
    prefill_target: int = 0
    # Tokens whose keys and values are computed, or will be computed by the steps in flight.
    planned_tokens: int = 0
    computed_tokens: int = 0  # Tokens whose keys and values were computed by completed steps.
    steps_in_flight: int = 0  # Steps in flight that contain this sequence.
    # Prefix adapter tokens that the steps in flight write.
    prefix_tokens_in_flight: int = 0
    # When a token of the sequence was last planned; before that, when the sequence was admitted.
    planned_at: float = 0.0
    # First row of the sequence's adapter in the adapter pool; -1: the sequence has pinned no rows.
    adapter_row_start: int = -1
    # First page of the adapter's weights in the adapter memory; -1: the sequence has
    # pinned none. A waiting sequence may have pinned them too, while they are being written.
    adapter_page_start: int = -1

    proposer: NgramProposer | None = None  # None: no speculation.
    # Draft tokens that follow the last token. A step in flight verifies them.
    draft_tokens: list[int] = field(default_factory=list)

    scored_tokens: int = 0  # Leading prompt tokens whose scores are reported or not requested.
    cached_tokens: int = -1  # Prompt tokens found in the prefix cache; -1: never admitted.
    is_start_reported: bool = False  # Whether `cached_tokens` and the phases were reported.
    # If set, the sequence has ended; it is released when no step in flight contains it.
    end_reason: EndReason | None = None
    end_message: str = ""
    # Whether a step output has reported the end. If so, steps that are still in flight must not
    # report it again.
    is_end_reported: bool = False
    has_nonfinite_kv: bool = False  # KV from `computed_tokens` on may contain NaN or infinity.
    sequence_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequence_id = self.submission.sequence_id

    @classmethod
    def from_submission(
        cls,
        submission: Submission,
        *,
        arrival_order: int,
        vocab_size: int,
        block_tokens: int,
        now: float,
        adapter_wait_s: float = 0.0,
    ) -> "Sequence":
        """A new sequence, queued at `now` after a wait of `adapter_wait_s` for its adapter."""
        prompt = submission.prompt
        output_tokens = submission.output_tokens
        sampling = submission.sampling
        # A submission with `output_tokens` resumes a sequence after its ranks, or its server, were
        # lost. The prompt scores were reported before.
        scores_prompt = sampling.prompt_logprobs is not None and not output_tokens
        virtual_start, virtual_end = _virtual_range(prompt, vocab_size)
        return cls(
            submission,
            arrival_order=arrival_order,
            block_tokens=block_tokens,
            tokens=[*prompt, *output_tokens],
            prompt_tokens=len(prompt),
            tokens_max=len(prompt) + sampling.max_new_tokens,
            is_latency_class=submission.service == "latency",
            queued_at=now,
            arrived_at=now - adapter_wait_s,
            adapter_wait_s=adapter_wait_s,
            virtual_start=virtual_start,
            virtual_end=virtual_end,
            scored_tokens=submission.unscored_tokens if scores_prompt else len(prompt),
        )

    # -------------------------------------------------------------------------------- properties

    @property
    def is_waiting(self) -> bool:
        return self.slot < 0

    @property
    def changes_linears(self) -> bool:
        """Whether the sequence's adapter changes linears."""
        adapter_ref = self.submission.adapter_ref
        return adapter_ref is not None and adapter_ref.changes_linears

    @property
    def unplanned_prefill_tokens(self) -> int:
        return self.prefill_target - self.planned_tokens

    @property
    def unwritten_prefix_tokens(self) -> int:
        """Tokens of the sequence's prefix adapter whose keys and values must still be written."""
        adapter_ref = self.submission.adapter_ref
        return (
            max(0, adapter_ref.row_count - self.planned_tokens)
            if adapter_ref is not None and adapter_ref.is_prefix
            else 0
        )

    @property
    def cache_match_max(self) -> int:
        """The largest number of leading tokens that may come from the prefix cache.

        The last token must be computed, because its logits are needed. If prompt scores are
        requested, the token before the first scored token must be computed too, and all tokens
        after it.
        """
        if self.scored_tokens < self.prompt_tokens:
            # A prompt token is scored by the logits of the token before it.
            return max(0, self.scored_tokens - 1)
        return len(self.tokens) - 1

    @property
    def kv_tokens_max(self) -> int:
        """The largest number of tokens with keys and values; the last generated token has none."""
        return max(self.prompt_tokens, self.tokens_max - 1)

    @property
    def draft_tokens_max(self) -> int:
        """Maximum number of draft tokens: after them, one sampled token fits into `tokens_max`."""
        return self.tokens_max - len(self.tokens) - 1

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Moving average of accepted / verified draft tokens; None: no speculation."""
        return None if self.proposer is None else self.proposer.acceptance_rate

    @property
    def has_stateless_sampling(self) -> bool:
        """Whether the choice of a token depends only on its logits, the seed and the position.

        Then a token may be sampled before the preceding tokens are accepted (speculation) or known
        to the scheduler (asynchronous scheduling). A guide, penalties, `min_new_tokens`, length
        decay, `no_repeat_ngram_size` and bad words of several tokens depend on earlier output.
        """
        return self.submission.guide is None and self.submission.sampling.is_stateless

    @property
    def table_length(self) -> int:
        """Number of entries of each block table."""
        return len(self.block_tables[0])

    def aging_level(self, now: float, age_s: float) -> int:
        """Priority levels gained by waiting: one for each `age_s` seconds of all waits."""
        waited = self.waited_s + (now - self.queued_at if self.is_waiting else 0.0)
        return int(waited / age_s)

    def scheduling_priority(self, age_s: float) -> SchedulingPriority:
        """Priority of a running sequence, constant while it runs; the lowest is preempted first."""
        level = int(self.waited_s / age_s)
        is_urgent = self.is_latency_class or level >= LEVELS_TO_LATENCY
        return is_urgent, self.submission.priority + level, -self.arrival_order

    def prefix_boundaries(self, vocab_size: int) -> Iterator[int]:
        """Positions where other prompts are likely to diverge from this one.

        - The start and the end of each run of virtual tokens.
        - The first token on which an adapter's weights act.
        - If the first prompt tokens need no scores: the last of these tokens. A cached prefix ends
          before it (`cache_match_max`), because its logits must be computed: they score the token
          after it.
        - The last prompt token. A cached prefix ends before it, because its logits are needed.
        - If exactly one token is generated: the position after the prompt, because the next round
          of a beam search continues there.
        """
        last = self.prompt_tokens - 1
        if self.virtual_end:
            was_virtual = False
            for position in range(self.virtual_start, self.virtual_end + 1):
                is_virtual = position < self.prompt_tokens and self.tokens[position] >= vocab_size
                if is_virtual != was_virtual and 0 < position < last:
                    yield position
                was_virtual = is_virtual
        if self.changes_linears and 0 < self.submission.adapted_from < last:
            yield self.submission.adapted_from
        if 1 < self.submission.unscored_tokens < last:
            yield self.submission.unscored_tokens - 1
        if last > 0:
            yield last
        if self.tokens_max == self.prompt_tokens + 1:
            yield self.prompt_tokens

    # ---------------------------------------------------------------------------- prefix-cache keys

    def set_adapter_key(self, key: bytes) -> None:
        self.adapter_key = key

    def append_block_key(self, key: bytes) -> None:
        """Record the key of the next full block."""
        self.block_keys.append(key)

    def add_partial_key(self, block_index: int, position: int, key: bytes) -> None:
        """Record the key of a block's content up to `position`."""
        self.partial_keys.setdefault(block_index, []).append((position, key))

    # ------------------------------------------------------------------------ waiting and running

    def enqueue(self, now: float) -> None:
        """Begin a wait in the waiting queue."""
        self.queued_at = now

    def park(self) -> None:
        self.is_parked = True

    def unpark(self) -> None:
        self.is_parked = False

    def start_running(
        self, slot: int, block_tables: list[list[int]], matched_tokens: int, now: float
    ) -> None:
        """Take a slot and blocks, which contain the KV of the first `matched_tokens` tokens.

        In the tables of groups with a window, leading entries may be 0: these blocks are not
        needed.
        """
        self.waited_s += now - self.queued_at
        self.slot = slot
        self.block_tables = block_tables
        self.freed_counts = [table.count(0) for table in block_tables]
        self.block_count = sum(map(len, block_tables)) - sum(self.freed_counts)
        self.kv_capacity = self.table_length * self.block_tokens
        self.prefill_target = len(self.tokens)
        self.planned_tokens = matched_tokens
        self.computed_tokens = matched_tokens
        self.planned_at = now

    def record_cached_tokens(self) -> bool:
        """Record the number of cached prompt tokens at the first admission.

        Returns whether this is the first admission; at a later one nothing is recorded.
        """
        if self.cached_tokens >= 0:
            return False
        self.cached_tokens = min(self.computed_tokens, self.prompt_tokens)
        return True

    def append_blocks(self, new_blocks: list[list[int]]) -> None:
        """Extend the block table of each KV group by its new blocks, equally many for each."""
        for table, blocks in zip(self.block_tables, new_blocks, strict=True):
            table += blocks
            self.block_count += len(blocks)
        self.kv_capacity = self.table_length * self.block_tokens

    def remove_blocks(self, group: int, end: int) -> list[int]:
        """Remove the blocks before entry `end` of a group's table, and return them."""
        table, start = self.block_tables[group], self.freed_counts[group]
        blocks = table[start:end]
        table[start:end] = [0] * len(blocks)
        self.freed_counts[group] = start + len(blocks)
        self.block_count -= len(blocks)
        return blocks

    def pin_adapter_rows(self, row_start: int) -> None:
        self.adapter_row_start = row_start

    def unpin_adapter_rows(self) -> None:
        self.adapter_row_start = -1

    def pin_adapter_pages(self, page_start: int) -> None:
        self.adapter_page_start = page_start

    def unpin_adapter_pages(self) -> None:
        self.adapter_page_start = -1

    def stop_running(self) -> None:
        """Give up the slot, the blocks and all computed KV; the tokens stay."""
        self.slot = -1
        self.block_tables = []
        self.freed_counts = []
        self.block_count = 0
        self.kv_capacity = 0
        self.planned_tokens = 0
        self.computed_tokens = 0
        self.prefix_tokens_in_flight = 0
        self.has_nonfinite_kv = False

    # ----------------------------------------------------------------------------- planned steps

    def plan_tokens(self, count: int, now: float) -> None:
        """Record that a new step computes the next `count` tokens."""
        self.planned_tokens += count
        self.steps_in_flight += 1
        self.planned_at = now

    def plan_drafts(self, draft_tokens: list[int]) -> None:
        """Record that the decode planned last also verifies these draft tokens in its step."""
        self.draft_tokens = draft_tokens
        self.planned_tokens += len(draft_tokens)

    def plan_prefix_write(self, count: int) -> None:
        """Record that a new step writes the next `count` tokens of the prefix adapter."""
        self.planned_tokens += count
        self.prefix_tokens_in_flight += count

    # ------------------------------------------------------------------------------- speculation

    def enable_speculation(self, vocab_size: int) -> None:
        self.proposer = NgramProposer(self.tokens, vocab_size)

    def propose_drafts(self, count_max: int) -> list[int]:
        """Draft tokens that may follow the last token, at most `count_max`."""
        if self.proposer is None:
            return []
        return self.proposer.propose(min(count_max, self.draft_tokens_max))

    def reject_nonfinite_drafts(self) -> None:
        """Drop the drafts of a step that computed NaN or infinity, and disable speculation."""
        self.draft_tokens = []
        self.proposer = None
        self.has_nonfinite_kv = True

    # --------------------------------------------------------------------------- completed steps

    def complete_step(self) -> None:
        """Record that the oldest step in flight with this sequence has completed."""
        self.steps_in_flight -= 1

    def advance(self, length: int, sampled_tokens: list[int]) -> list[int]:
        """Apply a completed step of `length` new tokens, drafts included.

        Returns the sampled tokens that are valid.
        """
        drafted_count = len(self.draft_tokens)
        valid_tokens = self.append_valid_tokens(sampled_tokens) if sampled_tokens else []
        if drafted_count:
            # Only accepted draft tokens have valid KV. The valid tokens are the accepted draft
            # tokens and one token sampled after them.
            accepted_count = len(valid_tokens) - 1
            length -= drafted_count - accepted_count
        self.computed_tokens += self.prefix_tokens_in_flight + length
        self.prefix_tokens_in_flight = 0
        if drafted_count:
            # Rejected draft tokens have left keys and values in the blocks; later tokens overwrite
            # them.
            self.planned_tokens = self.computed_tokens
        elif not valid_tokens and self.computed_tokens == self.prefill_target:
            self.end("scored")
        return valid_tokens

    def append_valid_tokens(self, sampled_tokens: list[int]) -> list[int]:
        """Verify the draft tokens; append and return the sampled tokens that are valid.

        `sampled_tokens`: one token sampled after the last token, and one after each draft token.
        """
        stop_token_ids = self.submission.sampling.stop_token_ids
        draft_tokens = self.draft_tokens
        if draft_tokens:
            tokens_left = self.tokens_max - len(self.tokens)
            sampled_tokens = verify_draft(draft_tokens, sampled_tokens, stop_token_ids, tokens_left)
            self.draft_tokens = []
            if self.proposer is not None:
                self.proposer.record_acceptance(len(draft_tokens), len(sampled_tokens) - 1)
        self.tokens += sampled_tokens
        if sampled_tokens[-1] in stop_token_ids:
            self.end_reason = "stop"
        elif len(self.tokens) == self.tokens_max:
            self.end_reason = "length"
        return sampled_tokens

    def new_prompt_scores(
        self, step_scores: list[TokenScore], length: int, vocab_size: int
    ) -> list[TokenScore | None]:
        """Record as reported, and return, the prompt scores of a completed step of `length` tokens.

        Entry i of `step_scores` is the score of the token after the step's token i. The prompt's
        first token and virtual tokens have no score. No step computes the tokens of a prefix
        adapter, so the token after them has no score either.
        """
        past = self.computed_tokens - length
        new_scores: list[TokenScore | None] = [None] if self.scored_tokens == 0 else []
        start = max(self.scored_tokens, 1)
        for position in range(start, min(self.computed_tokens, self.prompt_tokens - 1) + 1):
            is_virtual = self.tokens[position] >= vocab_size
            new_scores.append(
                None if is_virtual or position <= past else step_scores[position - 1 - past]
            )
        self.scored_tokens += len(new_scores)
        return new_scores

    def end(self, reason: EndReason, message: str = "") -> None:
        """End the sequence for this reason, unless it has ended before."""
        if self.end_reason is None:
            self.end_reason = reason
            self.end_message = message

    def mark_nonfinite(self) -> None:
        """Record that the KV from `computed_tokens` on is invalid: it may be NaN or infinity."""
        self.has_nonfinite_kv = True

    # --------------------------------------------------------------------------------- reporting

    def step_output(
        self,
        tokens: list[int],
        scores: list[TokenScore],
        prompt_scores: list[TokenScore | None],
        now: float,
    ) -> SequenceOutput:
        """The output of a step for this sequence.

        The first output with a token or an end also has the phases and the number of cached tokens.
        """
        is_start = not self.is_start_reported and bool(tokens or self.end_reason)
        if self.end_reason is not None:
            self.is_end_reported = True
        if not is_start:
            return SequenceOutput(self.sequence_id, tokens, scores, prompt_scores, self.end_reason)
        self.is_start_reported = True
        return SequenceOutput(
            self.sequence_id,
            tokens,
            scores,
            prompt_scores,
            self.end_reason,
            cached_tokens=self.cached_tokens,
            phases=self._phases(now),
        )

    def _phases(self, now: float) -> Phases:
        """The time from arrival until now, by phase. The sequence must be running."""
        queue_s = self.adapter_wait_s + self.waited_s
        return Phases(queue_s, max(0.0, now - self.arrived_at - queue_s))

    def final_output(self) -> SequenceOutput:
        """The output that reports an end without new tokens.

        It is needed after a cancel, a deadline, a fault or a stuck guide.
        """
        return SequenceOutput(self.sequence_id, end=self.end_reason, reason=self.end_message)

    def check(self) -> None:
        """Assert that the counts of a running sequence are consistent."""
        # Upper bound of the planned tokens that are not in `tokens`. Each step in flight except the
        # oldest may compute the token that the step before it samples. After the end of the
        # sequence the oldest step may do so too, because tokens sampled after the end are not
        # appended.
        has_ended = self.end_reason is not None
        unsampled_tokens = max(0, self.steps_in_flight - (not has_ended))
        unknown_tokens = len(self.draft_tokens) + unsampled_tokens
        assert (
            self.computed_tokens + self.prefix_tokens_in_flight
            <= self.planned_tokens
            <= len(self.tokens) + unknown_tokens
        )
        assert not self.draft_tokens or self.steps_in_flight == 1
        assert {len(table) * self.block_tokens for table in self.block_tables} == {self.kv_capacity}
        for table, freed_count in zip(self.block_tables, self.freed_counts, strict=True):
            assert table.count(0) == freed_count and not any(table[:freed_count])
        assert self.block_count == sum(map(len, self.block_tables)) - sum(self.freed_counts)
        assert self.planned_tokens <= self.kv_capacity


def _virtual_range(prompt: list[int], vocab_size: int) -> tuple[int, int]:
    """Positions of the first virtual token and after the last one; (0, 0): there is none."""
    if max(prompt) < vocab_size:
        return 0, 0
    virtual_positions = [position for position, token in enumerate(prompt) if token >= vocab_size]
    return virtual_positions[0], virtual_positions[-1] + 1
