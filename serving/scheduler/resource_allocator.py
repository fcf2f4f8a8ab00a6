"""Resource allocator: slots, KV blocks and adapter rows of running sequences, from admission on.

The allocator owns the resources of running sequences, the set of all running sequences, and two
subsets: the sequences with unplanned prefill tokens, and the sequences that can decode now. It
lists the sequences of each subset in the order in which the scheduler plans them; the scheduler
decides how many tokens of each sequence are in a step. The changes that the ranks must apply are
collected in `ResourceUpdates` for the next step.

Blocks are allocated as sequences grow. If the block pool has too few blocks, `PreemptionPolicy`
chooses running sequences as victims. The allocator releases their resources and pushes them to the
waiting queue; their published blocks stay cached.

A sequence has a block table in each KV group (gpt/kv_groups.py). All groups allocate from the same
block pool. When a step has completed, the blocks behind the window of a group are freed.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto

from gpt.kv_groups import UNLIMITED_TOKENS, SequenceBlocks, blocks_behind_window
from serving.config import CacheConfig, SchedulerConfig
from serving.messages import AdapterLinearsWrite, AdapterRowsWrite, BlockTableUpdate
from serving.scheduler.adapter_memory_pool import AdapterMemoryPool
from serving.scheduler.adapter_pool import AdapterPool
from serving.scheduler.block_pool import BlockPool
from serving.scheduler.block_reservation import BlockReservation
from serving.scheduler.preemption import PreemptionPolicy
from serving.scheduler.prefix_cache import PrefixCache, PrefixMatch
from serving.scheduler.sequence import LEVELS_TO_LATENCY, SchedulingPriority, Sequence
from serving.scheduler.waiting_queue import WaitingQueue


class AdmissionResult(Enum):
    """Whether a waiting sequence was admitted, or why it was not."""

    ADMITTED = auto()
    PARKED = auto()  # Waits, outside of the queue, for KV that a running sequence computes.
    NO_ADAPTER_ROWS = auto()
    # The adapter's weights do not fit into the adapter memory, or are being written.
    NO_ADAPTER_LINEARS = auto()
    # The next step completes the write of the adapter's weights, so the prefill is in a later step.
    ADAPTER_WRITE_IN_FLIGHT = auto()
    BLOCK_COPY_IN_FLIGHT = auto()  # A step in flight writes into the block that must be copied.
    NO_SPACE = auto()  # Too few slots or blocks.


@dataclass(slots=True)
class ResourceUpdates:
    """Changes of blocks and adapter rows that the ranks must apply before the next forward pass.

    The ranks apply block clears, then block copies, then writes of keys and values (`Step`). This
    order is necessary, because both of these events can occur in one plan:

    - A cleared block is allocated again, as the target of a copy.
    - The source of a copy is a cached block. It is evicted and allocated to another sequence, which
      overwrites it.
    """

    block_clears: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target).
    adapter_writes: list[AdapterRowsWrite] = field(default_factory=list)
    linear_writes: list[AdapterLinearsWrite] = field(default_factory=list)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)


class ResourceAllocator:
    """Owns slots, blocks and adapter rows, and the running sequences that hold them.

    `blocks` is the number of KV blocks, including block 0. Preempted sequences, and parked
    sequences whose wait is over, are pushed to `waiting`. `windows`: the window of each KV group.
    `stages`: the number of steps that may be in flight; `async_scheduling` adds one.
    """

    def __init__(
        self,
        vocab_size: int,
        blocks: int,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        waiting: WaitingQueue,
        model_digest: str,
        *,
        windows: SequenceOf[int | None] = (None,),
        stages: int = 1,
        async_scheduling: bool = False,
    ) -> None:
        self._block_tokens = cache_config.kv_block_tokens
        self._age_s = scheduler_config.priority_age_s
        self._starvation_s = LEVELS_TO_LATENCY * scheduler_config.priority_age_s
        self._preemption_policy = PreemptionPolicy(scheduler_config.priority_age_s)
        self._waiting = waiting
        self._block_pool = BlockPool(blocks, len(windows))
        self._prefix_cache = PrefixCache(
            self._block_pool,
            self._block_tokens,
            vocab_size,
            model_digest,
            enabled=cache_config.prefix_cache,
            shared=cache_config.shared_prefix_cache,
            windows=windows,
        )
        self._windows = tuple(windows)
        self._sequence_blocks = SequenceBlocks(self._windows, self._block_tokens)
        # Each step in flight may have a prefill chunk of a sequence. A decode of the sequence is in
        # one step in flight, with asynchronous scheduling in two.
        self._reservation = BlockReservation(
            self._sequence_blocks,
            stages * scheduler_config.step_tokens_max + async_scheduling,
            1 + async_scheduling + scheduler_config.speculate_tokens_max,
        )
        self._adapter_rows = AdapterPool(cache_config.adapter_rows_max)
        self._adapter_memory = AdapterMemoryPool(cache_config.adapter_pages)
        self._slot_count = scheduler_config.running_requests_max
        self._free_slots = list(range(self._slot_count - 1, -1, -1))
        # Running sequences by id: all of them, and the ones with unplanned prefill tokens.
        self._running: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        # Running sequences that can decode now, by `is_latency_class` and by id. The sequence that
        # became ready first is first.
        self._ready: dict[bool, dict[int, Sequence]] = {True: {}, False: {}}
        # Running sequences of the latency class whose prefill is completely planned.
        self._latency_decoding_count = 0
        self._preemption_count = 0
        self._release_count = 0
        self._updates = ResourceUpdates()
        # Sum of `_reserved_blocks` over the running sequences; None: the sum must be computed.
        self._reserved_total: int | None = None

    # ------------------------------------------------------------------------------------ counts

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache, in tokens of a sequence that runs alone."""
        tokens = self._sequence_blocks.tokens_max(self._block_pool.capacity)
        return UNLIMITED_TOKENS if tokens is None else tokens

    @property
    def block_count(self) -> int:
        return self._block_pool.capacity

    @property
    def blocks_in_use(self) -> int:
        return self._block_pool.in_use_count

    @property
    def group_blocks_in_use(self) -> list[int]:
        """Blocks in use by KV group."""
        return self._block_pool.in_use_by_group

    @property
    def blocks_cached(self) -> int:
        return self._block_pool.cached_count

    @property
    def adapters_resident(self) -> int:
        return self._adapter_rows.resident_count + self._adapter_memory.resident_count

    @property
    def adapter_loads(self) -> int:
        """Number of times that an adapter was written into the adapter pool or adapter memory.

        Prefix adapters are written into KV blocks instead, and do not count here.
        """
        return self._adapter_rows.loads + self._adapter_memory.loads

    @property
    def adapter_evictions(self) -> int:
        return self._adapter_rows.evictions + self._adapter_memory.evictions

    @property
    def adapter_memory_bytes(self) -> int:
        return self._adapter_memory.used_bytes

    def pop_adapter_changes(self) -> dict[str, bool]:
        """Return the digests of adapters that were put on the device or evicted from it.

        The period is that since the last call. The values are described at
        `AdapterPool.pop_changes`.
        """
        return self._adapter_rows.pop_changes() | self._adapter_memory.pop_changes()

    @property
    def preemption_count(self) -> int:
        return self._preemption_count

    @property
    def release_count(self) -> int:
        """Number of times that a sequence released its resources, or reserved blocks."""
        return self._release_count

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def decoding_count(self) -> int:
        """Number of running sequences whose prefill is completely planned."""
        return len(self._running) - len(self._prefilling)

    @property
    def latency_decoding_count(self) -> int:
        return self._latency_decoding_count

    @property
    def latency_prefilling_count(self) -> int:
        return sum(sequence.is_latency_class for sequence in self._prefilling.values())

    @property
    def ready_count(self) -> int:
        """Number of sequences that can decode now."""
        return len(self._ready[True]) + len(self._ready[False])

    @property
    def has_prefills(self) -> bool:
        return bool(self._prefilling)

    def prefill_backlog(self, *, latency_class: bool) -> int:
        """Unplanned prompt tokens of the running sequences of a class."""
        return sum(
            sequence.unplanned_prefill_tokens
            for sequence in self._prefilling.values()
            if sequence.is_latency_class == latency_class
        )

    # ------------------------------------------------------------------ order of running sequences

    def next_decodes(self, now: float) -> list[Sequence]:
        """The sequences that can decode now, in order.

        Starved sequences of the throughput class come first, then the latency class, then the other
        sequences of the throughput class. A sequence is starved if no token of it was planned for
        `_starvation_s`. If fewer blocks than sequences are available, all sequences are ordered by
        scheduling priority instead.
        """
        sequences = list(self._ready[True].values())
        if self._ready[False]:
            throughput = list(self._ready[False].values())
            # `throughput` is in the order in which the sequences became ready, which is also the
            # order of `planned_at`, so starved sequences are at its front. Planning a token updates
            # `planned_at`, which ends starvation.
            starved_count = sum(
                now - other.planned_at >= self._starvation_s for other in throughput
            )
            sequences = [*throughput[:starved_count], *sequences, *throughput[starved_count:]]
        if self._block_pool.available < len(sequences) * len(self._windows):
            sequences.sort(key=self._scheduling_priority, reverse=True)
        return sequences

    def next_prefills(self, now: float) -> list[Sequence]:
        """The sequences that have unplanned prefill tokens and have not ended, in order.

        Starved sequences (`next_decodes`) and the latency class come first, as one group; the other
        sequences are the second group. Each group is in order of scheduling priority.
        """

        def prefill_priority(sequence: Sequence) -> tuple[bool, SchedulingPriority]:
            priority = self._scheduling_priority(sequence)
            is_starved = now - sequence.planned_at >= self._starvation_s
            return is_starved or priority[0], priority

        sequences = [
            sequence for sequence in self._prefilling.values() if sequence.end_reason is None
        ]
        sequences.sort(key=prefill_priority, reverse=True)
        return sequences

    def on_decodes_planned(self, sequences: list[Sequence]) -> None:
        """Remove sequences from the ready set, because a planned step decodes them."""
        for sequence in sequences:
            del self._ready[sequence.is_latency_class][sequence.sequence_id]

    def on_prefill_planned(self, sequence: Sequence) -> None:
        """Update the prefill set and the adapter rows after a prefill chunk was planned."""
        if sequence.planned_tokens >= sequence.virtual_end:
            # The planned step is the last one that reads the adapter's rows for this sequence. It
            # is safe to unpin the rows before this step runs: only admissions evict rows, and the
            # admissions of this plan are over. If a later plan evicts these rows, a later step
            # overwrites them, after this step has read them.
            self._unpin_adapter_rows(sequence)
        if not sequence.unplanned_prefill_tokens:
            del self._prefilling[sequence.sequence_id]
            self._latency_decoding_count += sequence.is_latency_class

    def on_step_applied(self, sequence: Sequence, past: int) -> None:
        """Publish the KV that a completed step computed from token `past` on.

        The sequence becomes ready to decode if it has not ended, its prefill is completely planned,
        and no other step in flight contains it.
        """
        block_tokens = self._block_tokens
        if (
            sequence.computed_tokens // block_tokens > past // block_tokens
            or past < sequence.prefill_target
        ):
            self._wake(self._prefix_cache.publish(sequence, past))
        if self._sequence_blocks.has_windows and sequence.end_reason is None:
            self._free_behind_windows(sequence)
            # From the end of the prefill on, fewer blocks are reserved for the sequence.
            self._release_count += past < sequence.prefill_target <= sequence.computed_tokens
        if (
            sequence.steps_in_flight == 0
            and sequence.end_reason is None
            and sequence.planned_tokens >= sequence.prefill_target
        ):
            self._ready[sequence.is_latency_class][sequence.sequence_id] = sequence

    def _scheduling_priority(self, sequence: Sequence) -> SchedulingPriority:
        return sequence.scheduling_priority(self._age_s)

    # ------------------------------------------------------------------------------------ admission

    def compute_cache_keys(self, sequence: Sequence) -> None:
        """Compute the prefix-cache keys of a new sequence."""
        self._prefix_cache.compute_keys(sequence)

    def begin_admissions(self) -> None:
        """Discard the sum of reserved blocks; call this before the admissions of a plan.

        Running sequences may have grown since the sum was computed.
        """
        self._reserved_total = None

    def admit(
        self, sequence: Sequence, now: float, *, may_pin_adapter_rows: bool, may_load_linears: bool
    ) -> AdmissionResult:
        """Give a waiting sequence a slot, its cached blocks and its adapter rows, if it can run.

        The sequence can run if a slot is free and the pool has enough blocks:

            `BlockReservation.blocks_needed` for its tokens - its cached blocks
            + blocks reserved for running sequences  <=  available blocks

        A sequence that needs more blocks than the pool has, because of its prefill chunks in groups
        with a window, needs all blocks: its chunks will be shorter. Sequences of lower priority are
        preempted if necessary.
        """
        prefix_match = self._prefix_cache.match_prefix(sequence)
        if self._prefix_cache.park_if_pending(sequence, prefix_match):
            return AdmissionResult.PARKED
        needs_rows = _needs_adapter_rows(sequence, prefix_match)
        if needs_rows and not (may_pin_adapter_rows and self._adapter_rows_fit(sequence)):
            return AdmissionResult.NO_ADAPTER_ROWS
        if sequence.changes_linears and not self._has_linears(sequence, may_load=may_load_linears):
            return AdmissionResult.NO_ADAPTER_LINEARS
        if sequence.changes_linears and not self._allows_prefill(sequence):
            return AdmissionResult.ADAPTER_WRITE_IN_FLIGHT
        if any(map(self._prefix_cache.has_write_in_flight, prefix_match.partial_blocks)):
            return AdmissionResult.BLOCK_COPY_IN_FLIGHT
        # The matching blocks are retained first, so that they do not count as available.
        matched_blocks = prefix_match.blocks
        self._block_pool.retain(matched_blocks)
        if not self._preempt_to_fit(sequence, prefix_match, now):
            self._block_pool.release(matched_blocks)
            return AdmissionResult.NO_SPACE
        self._start_running(sequence, prefix_match, now)
        if needs_rows:
            self._pin_adapter_rows(sequence)
        return AdmissionResult.ADMITTED

    def _start_running(self, sequence: Sequence, prefix_match: PrefixMatch, now: float) -> None:
        block_tables = prefix_match.tables
        if prefix_match.partial_blocks:
            for group, source in enumerate(prefix_match.partial_blocks):
                (target,) = self._block_pool.allocate(1, group)
                block_tables[group].append(target)
                if source != target:
                    self._updates.block_copies.append((source, target))
        sequence.start_running(self._free_slots.pop(), block_tables, prefix_match.tokens, now)
        self._running[sequence.sequence_id] = sequence
        self._prefilling[sequence.sequence_id] = sequence
        if self._reserved_total is not None:
            self._reserved_total += self._reserved_blocks(sequence)
        self._prefix_cache.announce(sequence)
        if block_tables[0]:
            self._updates.block_table_updates += [
                BlockTableUpdate(sequence.slot, 0, list(table), group)
                for group, table in enumerate(block_tables)
            ]

    def _preempt_to_fit(self, sequence: Sequence, match: PrefixMatch, now: float) -> bool:
        """Make a slot and enough blocks available for a waiting sequence; return whether they are.

        Running sequences of lower priority are preempted, but only if this frees enough resources.
        """
        if self._reserved_total is None:
            self._reserved_total = sum(
                [self._reserved_blocks(other) for other in self._running.values()]
            )
        tokens = len(sequence.tokens)
        blocks_needed = self._reservation.blocks_needed(
            tokens, tokens - match.tokens, sequence.kv_tokens_max
        )
        blocks_needed = min(blocks_needed, self._block_pool.capacity) - len(match.blocks)
        blocks_missing = blocks_needed + self._reserved_total - self._block_pool.available
        if blocks_missing <= 0 and self._free_slots:
            return True
        victims = self._preemption_policy.victims_for_admission(
            sequence,
            self._running.values(),
            blocks_missing=blocks_missing,
            blocks_gained=self._blocks_freed_by_preempting,
        )
        if not victims:
            return False
        for victim in victims:
            self._preempt(victim, now)
        self._reserved_total = None
        return True

    def can_preempt_for(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may preempt a running one, now or after steps in flight."""
        return bool(self._preemption_policy.preemptible_by(sequence, self._running.values()))

    def _blocks_freed_by_preempting(self, sequence: Sequence) -> int:
        """Number of blocks that become available if a running sequence is preempted.

        These are the blocks reserved for the sequence, and the blocks in its block table that no
        other sequence shares.
        """
        return self._reserved_blocks(sequence) + sum(
            self._block_pool.ref_count(block) == 1 for block in _blocks_of(sequence)
        )

    def _reserved_blocks(self, sequence: Sequence) -> int:
        """Number of blocks that are reserved for a running sequence, beyond its block tables.

            `BlockReservation.blocks_needed` for max(prefill_target, planned_tokens)
            - blocks in the block tables

        If the difference is negative, the number is 0.
        """
        tokens = max(sequence.prefill_target, sequence.planned_tokens)
        blocks_needed = self._reservation.blocks_needed(
            tokens, sequence.prefill_target - sequence.computed_tokens, sequence.kv_tokens_max
        )
        return max(0, blocks_needed - sequence.block_count)

    def _blocks_for(self, tokens: int) -> int:
        """Number of entries of a block table for `tokens` tokens."""
        return -(-tokens // self._block_tokens)

    # -------------------------------------------------------------------------------- adapter rows

    def _adapter_rows_fit(self, sequence: Sequence) -> bool:
        adapter_ref = sequence.submission.adapter_ref
        assert adapter_ref is not None
        return self._adapter_rows.fits(adapter_ref.digest, adapter_ref.row_count)

    def _pin_adapter_rows(self, sequence: Sequence) -> None:
        adapter_ref = sequence.submission.adapter_ref
        assert adapter_ref is not None
        row_start, must_write = self._adapter_rows.pin(adapter_ref.digest, adapter_ref.row_count)
        sequence.pin_adapter_rows(row_start)
        if must_write:
            self._updates.adapter_writes.append(AdapterRowsWrite(row_start, adapter_ref.digest))

    def _unpin_adapter_rows(self, sequence: Sequence) -> None:
        if sequence.adapter_row_start >= 0:
            assert sequence.submission.adapter_ref is not None
            self._adapter_rows.unpin(sequence.submission.adapter_ref.digest)
            sequence.unpin_adapter_rows()

    # ----------------------------------------------------------------- adapters' weights

    def begin_linear_writes(self, bytes_max: int, prefill_bytes_max: int) -> None:
        """Continue the writes of adapter weights that are in progress, before admissions.

        The limits are those of `AdapterMemoryPool.begin_step`.
        """
        self._updates.linear_writes += self._adapter_memory.begin_step(bytes_max, prefill_bytes_max)

    @property
    def writes_linears(self) -> bool:
        """Whether the next step writes adapter weights."""
        return bool(self._updates.linear_writes)

    def _has_linears(self, sequence: Sequence, *, may_load: bool) -> bool:
        """Whether the ranks have, before the next step, the adapter weights of the sequence.

        If they are not in the adapter memory, their write is begun, unless there is no space or
        `may_load` is false. The sequence has then pinned them although it waits.
        """
        adapter_ref = sequence.submission.adapter_ref
        assert adapter_ref is not None
        if sequence.adapter_page_start < 0:
            if not (may_load or self._adapter_memory.is_resident(adapter_ref)):
                return False
            page_start = self._adapter_memory.pin(adapter_ref)
            if page_start is None:
                return False
            sequence.pin_adapter_pages(page_start)
            self._updates.linear_writes += self._adapter_memory.write_pieces(adapter_ref.digest)
        return self._adapter_memory.is_written(adapter_ref.digest)

    def _allows_prefill(self, sequence: Sequence) -> bool:
        adapter_ref = sequence.submission.adapter_ref
        assert adapter_ref is not None
        return self._adapter_memory.allows_prefill(adapter_ref.digest)

    def unpin_linears(self, sequence: Sequence) -> None:
        """Unpin the adapter weights of a sequence that has ended, or that is preempted."""
        if sequence.adapter_page_start >= 0:
            assert sequence.submission.adapter_ref is not None
            self._adapter_memory.unpin(sequence.submission.adapter_ref.digest)
            sequence.unpin_adapter_pages()

    # ------------------------------------------------------------------ growth of running sequences

    def allocate_blocks(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Extend the block tables of a running sequence to `tokens` tokens.

        Preempts sequences of lower priority if necessary. Returns False, and allocates no block, if
        there are not enough blocks even then.
        """
        start = sequence.table_length
        count = self._blocks_for(tokens) - start
        if count <= 0:
            return True
        group_count = len(self._windows)
        if count * group_count > self._block_pool.available:
            self._preempt_below(sequence, count * group_count, now)
            if count * group_count > self._block_pool.available:
                return False
        new_blocks = [self._block_pool.allocate(count, group) for group in range(group_count)]
        self._updates.block_table_updates += [
            BlockTableUpdate(sequence.slot, start, blocks, group)
            for group, blocks in enumerate(new_blocks)
        ]
        sequence.append_blocks(new_blocks)
        return True

    def _free_behind_windows(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence that none of its next tokens attends to.

        The entries of the ranks' block tables become 0, so that no kernel reads what the next owner
        of a block writes, not even to mask it.
        """
        for group, window in enumerate(self._windows):
            end = blocks_behind_window(window, sequence.computed_tokens, self._block_tokens)
            start = sequence.freed_counts[group]
            if end <= start:
                continue
            blocks = sequence.remove_blocks(group, end)
            self._prefix_cache.forget_writer(sequence, blocks)
            self._block_pool.release(blocks)
            self._updates.block_table_updates.append(
                BlockTableUpdate(sequence.slot, start, [0] * len(blocks), group)
            )

    def kv_tokens_available(self, sequence: Sequence) -> int:
        """Capacity in tokens of the sequence's blocks and of all available blocks together."""
        blocks = self._block_pool.available // len(self._windows)
        return sequence.kv_capacity + blocks * self._block_tokens

    def kv_tokens_spare(self, sequence: Sequence) -> int:
        """Like `kv_tokens_available`, minus one available block for each running sequence.

        Each running sequence may need a block, in each KV group, in the next step.
        """
        blocks = self._block_pool.available // len(self._windows)
        spare_blocks = max(0, blocks - len(self._running))
        return sequence.kv_capacity + spare_blocks * self._block_tokens

    def can_grow_all(self, sequences: list[Sequence]) -> bool:
        """Whether there are blocks for one more token of each of these sequences."""
        blocks_needed = sum(
            sequence.planned_tokens == sequence.kv_capacity for sequence in sequences
        )
        return blocks_needed * len(self._windows) <= self._block_pool.available

    def _preempt_below(self, sequence: Sequence, blocks_needed: int, now: float) -> None:
        """Preempt sequences of lower priority than `sequence`.

        Stops when `blocks_needed` blocks are available, or when no victim is left.
        """
        for victim in self._preemption_policy.victims_for_growth(sequence, self._running.values()):
            if blocks_needed <= self._block_pool.available:
                return
            self._preempt(victim, now)

    # ----------------------------------------------------------------------- preemption and release

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Move a running sequence to the waiting queue; its uncached KV is computed again."""
        assert sequence.steps_in_flight == 0 and sequence.end_reason is None, (
            "preemption of a sequence that has ended or is in flight"
        )
        self._preemption_count += 1
        self.requeue(sequence, now)

    def requeue(self, sequence: Sequence, now: float) -> None:
        """Free all resources of a running sequence and push it to the waiting queue."""
        self.release(sequence)
        sequence.enqueue(now)
        self._waiting.push(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the slot, the blocks and the adapter rows of a running sequence."""
        sequence_id = sequence.sequence_id
        del self._running[sequence_id]
        self._release_count += 1
        if self._prefilling.pop(sequence_id, None) is None:
            self._ready[sequence.is_latency_class].pop(sequence_id, None)
            self._latency_decoding_count -= sequence.is_latency_class
        self._wake(self._prefix_cache.withdraw(sequence))
        if sequence.has_nonfinite_kv:
            self._clear_nonfinite_blocks(sequence)
        self._block_pool.release(_blocks_of(sequence))
        if self._sequence_blocks.has_windows:
            # The slot may get another sequence before the next step, which has these updates.
            self._updates.block_table_updates = [
                update
                for update in self._updates.block_table_updates
                if update.slot != sequence.slot
            ]
        self._free_slots.append(sequence.slot)
        self._unpin_adapter_rows(sequence)
        self.unpin_linears(sequence)
        sequence.stop_running()

    def _clear_nonfinite_blocks(self, sequence: Sequence) -> None:
        """Unpublish the blocks that may contain NaN or infinity, and let the ranks zero them."""
        start = sequence.computed_tokens // self._block_tokens
        nonfinite_blocks = [block for table in sequence.block_tables for block in table[start:]]
        for block in nonfinite_blocks:
            assert self._block_pool.ref_count(block) == 1, "a block with NaN or infinity is shared"
            self._block_pool.unpublish(block)
        self._updates.block_clears += nonfinite_blocks

    def _wake(self, sequences: list[Sequence]) -> None:
        """Move parked sequences to the waiting queue, except the ones that have ended.

        The KV for which they waited is cached now, or its computation has stopped.
        """
        for sequence in sequences:
            if sequence.end_reason is None:
                sequence.unpark()
                self._waiting.push(sequence)

    def pop_updates(self) -> ResourceUpdates:
        """Return and clear the updates since the last call, for the step that is being built."""
        updates = self._updates
        self._updates = ResourceUpdates()
        return updates

    # -------------------------------------------------------------------------------------- checks

    def check_totals(self) -> None:
        """Assert that no block and no slot is lost; compares only sums."""
        self._block_pool.check_totals(
            sum([sequence.block_count for sequence in self._running.values()])
        )
        assert len(self._free_slots) + len(self._running) == self._slot_count, "a slot is lost"

    def check(self) -> None:
        """Assert that no resource is lost or assigned twice, and that sequences are consistent."""
        self.check_totals()
        running = list(self._running.values())
        self._block_pool.check([_blocks_of(sequence) for sequence in running])
        self._prefix_cache.check(running)
        self._adapter_rows.check(sum(sequence.adapter_row_start >= 0 for sequence in running))
        self._adapter_memory.check_running(
            sum(sequence.adapter_page_start >= 0 for sequence in running)
        )
        slots = {sequence.slot for sequence in running} | set(self._free_slots)
        assert len(slots) == len(running) + len(self._free_slots), (
            "a slot is lost or assigned twice"
        )
        for sequence in running:
            sequence.check()
            is_ready = sequence.sequence_id in self._ready[sequence.is_latency_class]
            is_prefilling = sequence.sequence_id in self._prefilling
            assert is_prefilling == (sequence.unplanned_prefill_tokens > 0) and not (
                is_prefilling and is_ready
            )
            # A running sequence that is neither in flight nor prefilling is ready to decode.
            assert is_ready == (
                not is_prefilling and sequence.steps_in_flight == 0 and sequence.end_reason is None
            )
        assert self._latency_decoding_count == sum(
            sequence.is_latency_class
            for sequence in running
            if sequence.sequence_id not in self._prefilling
        )


def _needs_adapter_rows(sequence: Sequence, match: PrefixMatch) -> bool:
    """Whether the sequence's adapter rows must be in the adapter pool before it can run."""
    adapter_ref = sequence.submission.adapter_ref
    return (
        adapter_ref is not None
        and adapter_ref.has_pool_rows
        and sequence.virtual_end > match.tokens
    )


def _blocks_of(sequence: Sequence) -> list[int]:
    """The blocks in a running sequence's block tables; the blocks of later tokens come last."""
    if len(sequence.block_tables) == 1:
        return sequence.block_tables[0][sequence.freed_counts[0] :]
    return [
        block for blocks in zip(*sequence.block_tables, strict=True) for block in blocks if block
    ]
