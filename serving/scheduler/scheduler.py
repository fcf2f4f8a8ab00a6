"""Continuous-batching scheduler: plans decodes and chunked prefills within a token budget.

Continuous batching: sequences join and leave the batch between steps. Each plan first admits
waiting sequences while there are slots and blocks. It then fills one token budget: first with
decodes, then with chunked prefill. The latency class precedes the throughput class. The
outcome of a step advances its sequences, publishes the blocks that they filled, and ends finished
sequences.

The scheduler has the policy: which sequences are in a step, with how many tokens. Parts of the
policy are in `chunked_prefill` and `preemption`. The state has other owners: `WaitingQueue`
(waiting sequences and the order of tenants), `PrefixCache` (sequences that wait for a block that
another one computes), `ResourceAllocator` (running sequences with their slots, blocks and adapter
rows), `LiveSequences` (ids and deadlines), `InFlightSteps` (steps without an outcome),
`StepMessageBuilder` (the message of the step being planned) and `Sequence` (one sequence). The
scheduler and these owners change each other's state only through methods. A planned step is plain
data: this module uses no tensors, processes or clock.

In this package "row" means a row of an adapter or of the adapter pool. A row of the batch is called
a token, and a row of the block-table tensor a slot. The setting `speculate_rows_max`, a number of
tokens, is the exception.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from serving.config import CacheConfig, SchedulerConfig
from serving.messages import (
    EndReason,
    EngineStats,
    Outcome,
    SequenceOutput,
    Step,
    Submission,
    TokenScore,
)
from serving.scheduler.async_scheduling import InFlightStep, InFlightSteps
from serving.scheduler.chunked_prefill import PrefillTokenBudget, chunk_end
from serving.scheduler.live_sequences import LiveSequences
from serving.scheduler.resource_allocator import AdmissionResult, ResourceAllocator
from serving.scheduler.sequence import Sequence
from serving.scheduler.step_message_builder import StepMessageBuilder
from serving.scheduler.submission_limits import SubmissionLimits
from serving.scheduler.waiting_queue import TenantFairness, WaitingQueue

GUIDE_STUCK_MESSAGE = (
    "the guide allows none of this model's tokens next, or the search for an allowed token took "
    "too long; simplify the guide, and check that a text can match it"
)
NONFINITE_MESSAGE = (
    "the model computed values for this sequence that are not finite (NaN or infinity); the "
    "weights or the adapter's rows are damaged, or their range is too large for the dtype"
)
# Maximum number of waiting sequences that one plan skips because their adapter rows, or the block
# that they copy, are not available.
SKIPPED_MAX = 32
# Maximum number of bytes of adapters' weights, in fp32, that one step writes: beside running
# sequences, which wait for the write, and without them. On two cores of a CPU, 10 MiB take about
# 3 ms. The messages of a few steps must fit into the outbox of the socket to each rank.
LINEAR_WRITE_BYTES_MAX = 10 << 20
IDLE_WRITE_BYTES_MAX = 16 << 20
# Limit, beside running sequences, of the writes of a step that also has a prefill with an adapter
# that it writes. The running sequences wait for both; in two steps, the longer wait is shorter.
PREFILL_WRITE_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class _TokenTotals:
    """Numbers of tokens since the start, for the statistics."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    drafted: int = 0
    accepted: int = 0


class Scheduler:
    """Plans steps and commits their outcomes.

    `blocks` is the number of KV blocks, including block 0; `context_tokens_max` bounds prompt plus
    output of a sequence; `prefix_write_tokens_max` bounds the prefix adapter tokens that one step
    writes; `windows` has the window of each KV group (gpt/kv_groups.py).

    Steps must run in the order in which they were planned, and be committed in that order. At most
    `stages` steps are in flight. With `async_scheduling` one more step may be in flight: the next
    decodes of the last step's sequences, planned before the tokens of the last step are known.
    Asynchronous scheduling and speculative decoding exclude each other; `async_scheduling.py` gives
    the reasons.

    Each sequence ends with exactly one output whose `end` is set. It is returned by `add_sequence`,
    `commit` or `pop_ended`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        blocks: int,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        context_tokens_max: int,
        stages: int = 1,
        model_digest: str = "",
        prefix_write_tokens_max: int = 256,
        async_scheduling: bool = False,
        windows: Collection[int | None] = (None,),
    ) -> None:
        assert not (async_scheduling and scheduler_config.speculate_tokens_max), (
            "speculative decoding and asynchronous scheduling exclude each other"
        )
        self._vocab_size = vocab_size
        self._block_tokens = cache_config.kv_block_tokens
        self._token_budget = scheduler_config.step_tokens_max
        self._prefix_write_tokens_max = prefix_write_tokens_max
        self._stages = stages
        # A blocked admission is tried again after this time, because aging changes the admission
        # order.
        self._admission_retry_s = scheduler_config.priority_age_s / 20
        self._draft_tokens_max = scheduler_config.speculate_tokens_max  # Per sequence and step.
        # In a step that has draft tokens: maximum of (decode tokens + draft tokens).
        self._speculation_tokens_max = scheduler_config.speculate_rows_max
        self._stall_budget = PrefillTokenBudget(
            scheduler_config.prefill_stall_ms_max / 1000, cache_config.kv_block_tokens
        )
        self._tenants = TenantFairness()
        self._waiting = WaitingQueue(self._tenants, scheduler_config.priority_age_s)
        self._allocator = ResourceAllocator(
            vocab_size,
            blocks,
            scheduler_config,
            cache_config,
            self._waiting,
            model_digest,
            windows=tuple(windows),
            stages=stages,
            async_scheduling=async_scheduling,
        )
        self._limits = SubmissionLimits(
            vocab_size,
            context_tokens_max,
            self._allocator.kv_tokens,
            cache_config.adapter_rows_max,
            cache_config.adapter_pages,
        )
        self._live = LiveSequences()
        self._in_flight = InFlightSteps(stages, async_scheduling=async_scheduling)
        self._ended_outputs: list[SequenceOutput] = []
        # Admission is blocked when a waiting sequence finds too few slots or blocks, and no running
        # sequence that it may preempt. The next admission is tried when `_change_counts()` differs
        # from `_blocked_counts`, and at `_blocked_until` at the latest.
        self._blocked_counts = (0, 0)
        self._blocked_until = 0.0
        self._arrival_count = 0
        self._step_count = 0
        self._prefix_loads = 0  # Prefix adapters written into KV blocks.
        self._totals = _TokenTotals()

    # ---------------------------------------------------------------- adding and ending sequences

    def add_sequence(
        self, submission: Submission, now: float, adapter_wait_s: float = 0.0
    ) -> SequenceOutput | None:
        """Queue a sequence that arrived `adapter_wait_s` before `now`, and return None.

        If the submission is rejected, or its `output_tokens` are complete, its final output is
        returned, and nothing is queued.
        """
        sequence_id = submission.sequence_id
        assert sequence_id not in self._live, f"sequence id {sequence_id} is used twice"
        rejection = self._limits.rejection(submission)
        if rejection is not None:
            return rejection
        output_tokens = submission.output_tokens
        sampling = submission.sampling
        if output_tokens and output_tokens[-1] in sampling.stop_token_ids:
            return SequenceOutput(sequence_id, end="stop")
        if output_tokens and len(output_tokens) >= sampling.max_new_tokens:
            return SequenceOutput(sequence_id, end="length")
        sequence = Sequence.from_submission(
            submission,
            arrival_order=self._arrival_count,
            vocab_size=self._vocab_size,
            block_tokens=self._block_tokens,
            now=now,
            adapter_wait_s=adapter_wait_s,
        )
        self._arrival_count += 1
        if self._draft_tokens_max and sequence.has_stateless_sampling:
            sequence.enable_speculation(self._vocab_size)
        self._allocator.compute_cache_keys(sequence)
        self._live.add(sequence)
        self._tenants.add_sequence(submission.tenant)
        self._waiting.push(sequence)
        return None

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """End these sequences, now or after their steps in flight; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            sequence = self._live.get(sequence_id)
            if sequence is not None:
                self._end_sequence(sequence, "cancelled")

    def pop_ended(self) -> list[SequenceOutput]:
        """Final outputs of the sequences that ended outside of a step since the last call."""
        outputs = self._ended_outputs
        self._ended_outputs = []
        return outputs

    def _end_sequence(self, sequence: Sequence, end_reason: EndReason) -> None:
        """End a sequence for an external reason: a cancel or its deadline."""
        if sequence.end_reason is not None:
            return
        sequence.end(end_reason)
        if sequence.is_waiting and not sequence.is_parked:
            self._waiting.discard(sequence)
        if sequence.is_waiting:
            self._allocator.unpin_linears(sequence)
        if sequence.steps_in_flight == 0:
            self._release(sequence)
            self._ended_outputs.append(sequence.final_output())

    def _release(self, sequence: Sequence) -> None:
        """Free all resources of a sequence that has ended, and remove it from `_live`."""
        if not sequence.is_waiting:
            self._allocator.release(sequence)
        self._live.remove(sequence)
        self._tenants.remove_sequence(sequence.submission.tenant)

    # ----------------------------------------------------------------------------------- planning

    def plan(self, now: float) -> Step | None:
        """The next step. None: there is no work, or no work can start before the next outcome.

        Also ends the sequences whose deadline has passed; `pop_ended` returns their outputs.
        """
        for sequence in self._live.pop_expired(now):
            self._end_sequence(sequence, "deadline")
        if self._in_flight.is_full:
            return self._plan_early(now) if self._in_flight.can_plan_early else None
        builder = self._new_builder()
        if self._allocator.running_count:
            self._allocator.begin_linear_writes(LINEAR_WRITE_BYTES_MAX, PREFILL_WRITE_BYTES_MAX)
        else:
            self._allocator.begin_linear_writes(IDLE_WRITE_BYTES_MAX, IDLE_WRITE_BYTES_MAX)
        # Admission precedes decodes, because an admission may preempt a decoding sequence.
        if len(self._waiting) and not self._is_admission_blocked(now):
            self._admit(builder, now)
        self._plan_decodes(builder, now)
        if self._draft_tokens_max:
            self._plan_drafts(builder, now)
        self._plan_prefills(builder, now)
        if builder.is_empty and not self._allocator.writes_linears:
            return None
        return self._dispatch(builder)

    def _plan_early(self, now: float) -> Step | None:
        """Asynchronous scheduling: the step after the last planned one, whose outcome is pending.

        It has the decodes of `InFlightSteps.early_decodes`. None: there are no such decodes, there
        are too few blocks for all of them, or admissions, prefills or decodes of other sequences
        wait to be planned.
        """
        if len(self._waiting) and not self._is_admission_blocked(now):
            return None
        if self._allocator.has_prefills or self._allocator.ready_count:
            return None
        sequences = self._in_flight.early_decodes()
        if not sequences or not self._allocator.can_grow_all(sequences):
            return None
        builder = self._new_builder()
        for sequence in sequences:
            self._allocator.allocate_blocks(sequence, sequence.planned_tokens + 1, now)
            builder.add_decode(sequence, is_token_available=False)
            sequence.plan_tokens(1, now)
        return self._dispatch(builder)

    def idle_step(self) -> Step:
        """A step without sequences (a heartbeat); it is run and committed like other steps."""
        return self._dispatch(self._new_builder())

    def _new_builder(self) -> StepMessageBuilder:
        return StepMessageBuilder(
            self._vocab_size, self._token_budget, self._prefix_write_tokens_max
        )

    def _dispatch(self, builder: StepMessageBuilder) -> Step:
        step = builder.build(self._step_count, self._allocator.pop_updates())
        self._step_count += 1
        self._in_flight.append(InFlightStep(step, builder.sequences, builder.prompt_tokens))
        return step

    def _prefill_budget(self, tokens: int) -> int:
        """The number of tokens, out of `tokens`, that prefill may use.

        If no latency-class sequence decodes, prefill may use all of them.
        """
        if not self._allocator.latency_decoding_count:
            return tokens
        first_tokens_pending = (
            self._waiting.latency_count + self._allocator.latency_prefilling_count
        )
        return self._stall_budget.limit_tokens(tokens, first_tokens_pending)

    # ---------------------------------------------------------------------------------- admission

    def _is_admission_blocked(self, now: float) -> bool:
        """Whether admission is still blocked: nothing has changed, and no retry is due yet."""
        return now < self._blocked_until and self._change_counts() == self._blocked_counts

    def _block_admission(self, now: float) -> None:
        """Skip admission until resources are released, the queue changes or priorities age."""
        self._blocked_counts = self._change_counts()
        self._blocked_until = now + self._admission_retry_s

    def _change_counts(self) -> tuple[int, int]:
        return self._waiting.change_count, self._allocator.release_count

    def _admit(self, builder: StepMessageBuilder, now: float) -> None:
        """Admit waiting sequences in order, within slots, blocks, adapter rows and token budget."""
        allocator = self._allocator
        decodes = min(allocator.ready_count, self._decodes_max())
        tokens_left = self._prefill_budget(builder.tokens_left - decodes)
        latency_backlog = allocator.prefill_backlog(latency_class=True)
        throughput_backlog = allocator.prefill_backlog(latency_class=False)
        if tokens_left <= latency_backlog:
            return
        allocator.begin_admissions()
        candidates = self._waiting.candidates(now)
        skipped_sequences = list[Sequence]()
        is_full = False
        may_pin_adapter_rows = may_load_linears = True
        while (
            tokens_left > latency_backlog and not is_full and len(skipped_sequences) < SKIPPED_MAX
        ):
            # If the backlog of both classes fills the budget, only the latency class is admitted.
            latency_only = tokens_left <= latency_backlog + throughput_backlog
            sequence = candidates.pop_next(latency_only=latency_only)
            if sequence is None:
                break
            match allocator.admit(
                sequence,
                now,
                may_pin_adapter_rows=may_pin_adapter_rows,
                may_load_linears=may_load_linears,
            ):
                case AdmissionResult.ADMITTED:
                    builder.init_slot(sequence)
                    if sequence.is_latency_class:
                        latency_backlog += sequence.unplanned_prefill_tokens
                    else:
                        throughput_backlog += sequence.unplanned_prefill_tokens
                    self._count_prompt(sequence)
                case AdmissionResult.PARKED:
                    pass
                case AdmissionResult.NO_ADAPTER_ROWS:
                    # Later sequences must not take the adapter rows for which this one waits.
                    may_pin_adapter_rows = False
                    skipped_sequences.append(sequence)
                case AdmissionResult.NO_ADAPTER_LINEARS:
                    # Nor the adapter memory. They may take adapter rows: a waiting sequence that
                    # has pinned adapter memory must be able to run and to free it.
                    may_load_linears = False
                    skipped_sequences.append(sequence)
                case AdmissionResult.ADAPTER_WRITE_IN_FLIGHT | AdmissionResult.BLOCK_COPY_IN_FLIGHT:
                    skipped_sequences.append(sequence)
                case AdmissionResult.NO_SPACE:
                    is_full = True
                    skipped_sequences.append(sequence)
        for sequence in skipped_sequences:
            self._waiting.push(sequence)
        # The next plan may admit a sequence whose adapter this step writes.
        is_blocked = is_full and not allocator.writes_linears
        if is_blocked and not allocator.can_preempt_for(skipped_sequences[-1]):
            self._block_admission(now)

    def _count_prompt(self, sequence: Sequence) -> None:
        """Count the prompt and charge the tenant, only at the first admission of a sequence.

        A prefill that is repeated after a preemption is not charged.
        """
        if sequence.record_cached_tokens():
            self._totals.prompt += sequence.prompt_tokens
            self._totals.cached += sequence.cached_tokens
            self._tenants.charge(sequence.submission.tenant, sequence.unplanned_prefill_tokens)

    # --------------------------------------------------------------- decodes, drafts and prefills

    def _decodes_max(self) -> int:
        """Maximum number of decodes per step.

        Each pipeline stage runs one step. The decoding sequences are divided evenly among these
        steps.
        """
        return -(-self._allocator.decoding_count // self._stages)

    def _plan_decodes(self, builder: StepMessageBuilder, now: float) -> None:
        """Plan one token for each ready sequence, within the step's limits and the free blocks."""
        allocator = self._allocator
        decodes_max = min(self._decodes_max(), builder.tokens_left)
        planned_sequences = list[Sequence]()
        for sequence in allocator.next_decodes(now):
            if len(planned_sequences) == decodes_max:
                break
            if sequence.is_waiting:  # Preempted by a sequence of higher priority in this loop.
                continue
            past = sequence.planned_tokens
            if past == sequence.kv_capacity and not allocator.allocate_blocks(
                sequence, past + 1, now
            ):
                continue
            builder.add_decode(sequence)
            sequence.plan_tokens(1, now)
            planned_sequences.append(sequence)
        allocator.on_decodes_planned(planned_sequences)

    def _plan_drafts(self, builder: StepMessageBuilder, now: float) -> None:
        """Add draft tokens to the planned decodes, within the limit `speculate_rows_max`.

        The limit applies to decode tokens + draft tokens; it bounds the time that drafts add to a
        step. If sequences have unplanned prefill tokens, `kv_block_tokens` tokens of the token
        budget are left for prefill. Drafts do not cause preemptions.
        """
        allocator = self._allocator
        sequences = builder.sequences
        prefill_tokens = self._block_tokens if allocator.has_prefills else 0
        drafts_left = min(
            self._speculation_tokens_max - len(sequences), builder.tokens_left - prefill_tokens
        )
        if drafts_left <= 0:
            return
        drafts = [list[int]() for _ in sequences]
        candidates = list[tuple[float, int]]()
        for index, sequence in enumerate(sequences):
            acceptance_rate = sequence.draft_acceptance_rate
            if acceptance_rate is not None:
                candidates.append((-acceptance_rate, index))
        for _, index in sorted(candidates):
            sequence = sequences[index]
            past = sequence.planned_tokens
            draft_tokens = sequence.propose_drafts(min(self._draft_tokens_max, drafts_left))
            draft_tokens = draft_tokens[: max(0, allocator.kv_tokens_spare(sequence) - past)]
            allocator.allocate_blocks(sequence, past + len(draft_tokens), now)
            sequence.plan_drafts(draft_tokens)
            drafts[index] = draft_tokens
            drafts_left -= len(draft_tokens)
        if any(drafts):
            builder.add_drafts(drafts)

    def _plan_prefills(self, builder: StepMessageBuilder, now: float) -> None:
        """Plan prefill chunks within the token budget, the latency class first."""
        if not self._allocator.has_prefills:
            return
        tokens_left = self._prefill_budget(builder.tokens_left)
        for sequence in self._allocator.next_prefills(now):
            if tokens_left <= 0:
                return
            if sequence.is_waiting:  # Preempted by a sequence of higher priority in this loop.
                continue
            self._plan_prefix_write(builder, sequence, now)
            if not sequence.unwritten_prefix_tokens:
                tokens_left -= self._plan_prefill_chunk(builder, sequence, now, tokens_left)

    def _plan_prefix_write(
        self, builder: StepMessageBuilder, sequence: Sequence, now: float
    ) -> None:
        """Plan the write of the sequence's prefix adapter, up to the step's limit."""
        count = min(sequence.unwritten_prefix_tokens, builder.prefix_tokens_left)
        if count and self._allocator.allocate_blocks(
            sequence, sequence.planned_tokens + count, now
        ):
            builder.add_prefix_write(sequence, count)
            sequence.plan_prefix_write(count)
            self._prefix_loads += not sequence.unwritten_prefix_tokens

    def _plan_prefill_chunk(
        self, builder: StepMessageBuilder, sequence: Sequence, now: float, tokens_left: int
    ) -> int:
        """Plan the next prefill chunk of a sequence; returns its number of tokens."""
        allocator = self._allocator
        past = sequence.planned_tokens
        end = chunk_end(past, tokens_left, sequence.prefill_target, self._block_tokens)
        if not allocator.allocate_blocks(sequence, end, now):
            end = min(end, allocator.kv_tokens_available(sequence))
            if end <= past:
                return 0
            allocator.allocate_blocks(sequence, end, now)
        builder.add_prefill(sequence, end - past)
        sequence.plan_tokens(end - past, now)
        allocator.on_prefill_planned(sequence)
        return end - past

    # --------------------------------------------------------------------------------- committing

    def commit(self, outcome: Outcome, now: float) -> list[SequenceOutput]:
        """Apply the outcome of the oldest step in flight; returns the outputs of its sequences."""
        in_flight = self._in_flight.pop_oldest(outcome.step_id)
        step = in_flight.step
        faults = outcome.faults
        stuck = outcome.stuck
        if in_flight.sequences:
            self._stall_budget.record_step(in_flight.prompt_tokens, outcome.seconds)
        prompt_scores = iter(outcome.prompt_scores)
        outputs = []
        # Index after the current sequence's entries in `outcome.tokens` and `outcome.scores`.
        sampled_end = 0
        for index, sequence in enumerate(in_flight.sequences):
            sampled_start = sampled_end
            if step.draws[index]:
                sampled_end += 1 + len(sequence.draft_tokens)
            sampled_tokens = outcome.tokens[sampled_start:sampled_end]
            token_scores = outcome.scores[sampled_start:sampled_end]
            step_scores = next(prompt_scores) if step.prompt_score_counts[index] else []
            sequence.complete_step()
            if index in faults:
                self._handle_nonfinite(sequence, now)
            elif index in stuck:
                sequence.end("stuck", GUIDE_STUCK_MESSAGE)
            if sequence.end_reason is not None:
                if sequence.steps_in_flight == 0:
                    self._release(sequence)
                    if not sequence.is_end_reported:
                        outputs.append(sequence.final_output())
            elif not sequence.is_waiting:
                output = self._advance(
                    sequence, step.lengths[index], sampled_tokens, token_scores, step_scores, now
                )
                if output is not None:
                    outputs.append(output)
        return outputs

    def _advance(
        self,
        sequence: Sequence,
        length: int,
        sampled_tokens: list[int],
        token_scores: list[TokenScore],
        step_scores: list[TokenScore],
        now: float,
    ) -> SequenceOutput | None:
        """Apply a step to one of its sequences; returns the output, or None if there is none.

        `length` counts the sequence's tokens in the step. `token_scores` has the scores of the
        sampled tokens, and `step_scores` the scores of prompt tokens.
        """
        past = sequence.computed_tokens
        output_tokens = sequence.advance(length, sampled_tokens)
        if output_tokens:
            self._totals.output += len(output_tokens)
            self._totals.drafted += len(sampled_tokens) - 1
            self._totals.accepted += len(output_tokens) - 1
            self._tenants.charge(sequence.submission.tenant, len(output_tokens))
        self._allocator.on_step_applied(sequence, past)
        prompt_scores: list[TokenScore | None] = []
        if sequence.scored_tokens < sequence.prompt_tokens:
            prompt_scores = sequence.new_prompt_scores(step_scores, length, self._vocab_size)
        if not (output_tokens or prompt_scores or sequence.end_reason):
            return None
        if sequence.submission.sampling.logprobs is None:
            token_scores = []
        output = sequence.step_output(
            output_tokens, token_scores[: len(output_tokens)], prompt_scores, now
        )
        if sequence.end_reason is not None and sequence.steps_in_flight == 0:
            self._release(sequence)
        return output

    def _handle_nonfinite(self, sequence: Sequence, now: float) -> None:
        """End a sequence with NaN or infinity; if its step had draft tokens, requeue it instead.

        A draft token may be the cause. The requeued sequence computes its uncached KV again, and
        continues without drafts.
        """
        if sequence.draft_tokens and sequence.end_reason is None:
            sequence.reject_nonfinite_drafts()
            self._allocator.requeue(sequence, now)
        else:
            sequence.mark_nonfinite()
            sequence.end("fault", NONFINITE_MESSAGE)

    # ---------------------------------------------------------------------------------- reporting

    @property
    def sequence_kv_tokens(self) -> int:
        """Capacity of the KV cache for one sequence, in tokens."""
        return self._allocator.kv_tokens

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return len(self._live) > 0

    @property
    def stats(self) -> EngineStats:
        allocator = self._allocator
        totals = self._totals
        return EngineStats(
            waiting=len(self._live) - allocator.running_count,
            running=allocator.running_count,
            blocks=allocator.block_count,
            blocks_held=allocator.blocks_in_use,
            blocks_cached=allocator.blocks_cached,
            blocks_by_group=allocator.group_blocks_in_use,
            prompt_tokens=totals.prompt,
            cached_tokens=totals.cached,
            made_tokens=totals.output,
            preemptions=allocator.preemption_count,
            steps=self._step_count,
            adapters_resident=allocator.adapters_resident,
            adapter_loads=allocator.adapter_loads + self._prefix_loads,
            adapter_evictions=allocator.adapter_evictions,
            adapter_memory_bytes=allocator.adapter_memory_bytes,
            drafted_tokens=totals.drafted,
            accepted_tokens=totals.accepted,
        )

    def pop_adapter_changes(self) -> dict[str, bool]:
        """Return `Update.adapter_changes` since the last call: adapters by digest."""
        return self._allocator.pop_adapter_changes()

    def check(self, *, deep: bool = False) -> None:
        """Assert that no block and no slot is lost. `deep` checks each block, slot and sequence."""
        if deep:
            self._allocator.check()
            waiting = sum(sequence.is_waiting and not sequence.is_parked for sequence in self._live)
            assert waiting == len(self._waiting), "the waiting queue has a wrong length"
        self._allocator.check_totals()
