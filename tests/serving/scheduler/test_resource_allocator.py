"""Resource allocator: admission, growth and preemption keep every slot, block and adapter row."""

from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import (
    AdapterRef,
    AdapterRowsWrite,
    BlockTableUpdate,
    ServiceClass,
    Submission,
)
from serving.scheduler.resource_allocator import AdmissionResult, ResourceAllocator
from serving.scheduler.sequence import Sequence
from serving.scheduler.waiting_queue import TenantFairness, WaitingQueue
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref, text_ids, virtual_ids

BLOCK_TOKENS = 4


class Resources:
    """An allocator of `blocks` blocks, and the sequences that were created for it."""

    def __init__(self, blocks: int, **settings: object) -> None:
        config = ServerConfig(
            "model",
            kv_block_tokens=BLOCK_TOKENS,
            adapter_rows_max=4,
            **settings,
        )
        self.tenants = TenantFairness()
        self.waiting = WaitingQueue(self.tenants, config.scheduler_config.priority_age_s)
        self.allocator = ResourceAllocator(
            VOCAB_SIZE, 1 + blocks, config.scheduler_config, config.cache_config, self.waiting, ""
        )
        self.sequence_count = 0

    def new_sequence(
        self,
        prompt: list[int],
        *,
        service: ServiceClass = "latency",
        adapter_ref: AdapterRef | None = None,
    ) -> Sequence:
        sequence = Sequence.from_submission(
            Submission(
                self.sequence_count,
                prompt,
                SamplingParams(max_new_tokens=20),
                service=service,
                adapter_ref=adapter_ref,
            ),
            arrival_order=self.sequence_count,
            vocab_size=VOCAB_SIZE,
            block_tokens=BLOCK_TOKENS,
            now=0.0,
        )
        self.sequence_count += 1
        self.tenants.add_sequence("")
        self.allocator.compute_cache_keys(sequence)
        return sequence

    def admit(self, sequence: Sequence, *, may_pin_adapter_rows: bool = True) -> AdmissionResult:
        self.allocator.begin_admissions()
        return self.allocator.admit(
            sequence, 0.0, may_pin_adapter_rows=may_pin_adapter_rows, may_load_linears=True
        )

    def prefill(self, sequence: Sequence) -> None:
        """Plan and complete the prefill of a sequence in one step."""
        count = sequence.unplanned_prefill_tokens
        past = sequence.computed_tokens
        assert self.allocator.allocate_blocks(sequence, sequence.prefill_target, 0.0)
        sequence.plan_tokens(count, 0.0)
        self.allocator.on_prefill_planned(sequence)
        sequence.complete_step()
        sequence.advance(count, [1])
        self.allocator.on_step_applied(sequence, past)
        self.allocator.check()


def test_a_sequence_is_ready_to_decode_after_its_prefill() -> None:
    resources = Resources(8)
    sequence = resources.new_sequence(text_ids(6))
    assert resources.admit(sequence) is AdmissionResult.ADMITTED
    assert resources.allocator.next_prefills(0.0) == [sequence]
    assert resources.allocator.prefill_backlog(latency_class=True) == 6
    resources.prefill(sequence)
    assert resources.allocator.next_prefills(0.0) == []
    assert resources.allocator.next_decodes(0.0) == [sequence]
    resources.allocator.release(sequence)
    assert resources.allocator.next_decodes(0.0) == []
    assert resources.allocator.blocks_in_use == 0


def test_an_equal_prompt_is_parked_until_its_prefix_is_computed() -> None:
    resources = Resources(16)
    first = resources.new_sequence(text_ids(12))
    second = resources.new_sequence(text_ids(12))
    assert resources.admit(first) is AdmissionResult.ADMITTED
    assert resources.admit(second) is AdmissionResult.PARKED
    assert second.is_parked and len(resources.waiting) == 0
    resources.prefill(first)
    assert not second.is_parked and len(resources.waiting) == 1
    assert resources.admit(second) is AdmissionResult.ADMITTED
    assert second.computed_tokens == 11


def test_a_sequence_is_not_admitted_without_blocks_for_its_prompt() -> None:
    resources = Resources(4)
    first = resources.new_sequence(text_ids(6))
    second = resources.new_sequence(text_ids(6, 1))
    assert resources.admit(first) is AdmissionResult.ADMITTED
    assert resources.admit(second) is AdmissionResult.NO_SPACE
    assert second.is_waiting and not resources.allocator.can_preempt_for(second)
    resources.allocator.check()


def test_a_latency_sequence_preempts_a_throughput_sequence_at_admission() -> None:
    resources = Resources(4)
    batch = resources.new_sequence(text_ids(6), service="throughput")
    urgent = resources.new_sequence(text_ids(6, 1))
    assert resources.admit(batch) is AdmissionResult.ADMITTED
    resources.prefill(batch)
    assert resources.allocator.can_preempt_for(urgent)
    assert resources.admit(urgent) is AdmissionResult.ADMITTED
    assert batch.is_waiting and len(resources.waiting) == 1
    assert resources.allocator.preemption_count == 1
    resources.allocator.check()


def test_growth_preempts_only_sequences_of_lower_priority() -> None:
    resources = Resources(6)
    older = resources.new_sequence(text_ids(4))
    newer = resources.new_sequence(text_ids(4, 1))
    for sequence in (older, newer):
        assert resources.admit(sequence) is AdmissionResult.ADMITTED
        resources.prefill(sequence)
    assert not resources.allocator.allocate_blocks(newer, 6 * BLOCK_TOKENS, 0.0)
    assert not older.is_waiting
    assert resources.allocator.allocate_blocks(older, 6 * BLOCK_TOKENS, 0.0)
    assert newer.is_waiting
    resources.allocator.check()


def test_adapter_rows_are_pinned_only_if_they_fit_and_the_caller_permits_it() -> None:
    resources = Resources(16)
    large = resources.new_sequence([*virtual_ids(4), 1], adapter_ref=make_adapter_ref("large", 4))
    small = resources.new_sequence([*virtual_ids(1), 2], adapter_ref=make_adapter_ref("small", 1))
    assert resources.admit(large) is AdmissionResult.ADMITTED
    assert resources.admit(small) is AdmissionResult.NO_ADAPTER_ROWS
    resources.prefill(large)
    # The rows are no longer pinned, because the complete prefill is planned.
    assert resources.admit(small, may_pin_adapter_rows=False) is AdmissionResult.NO_ADAPTER_ROWS
    assert resources.admit(small) is AdmissionResult.ADMITTED
    updates = resources.allocator.pop_updates()
    assert updates.adapter_writes == [AdapterRowsWrite(0, "large"), AdapterRowsWrite(0, "small")]


def test_updates_are_returned_once() -> None:
    resources = Resources(8)
    sequence = resources.new_sequence(text_ids(6))
    resources.admit(sequence)
    assert resources.allocator.allocate_blocks(sequence, 6, 0.0)
    updates = resources.allocator.pop_updates()
    assert updates.block_table_updates == [BlockTableUpdate(0, 0, sequence.block_tables[0])]
    assert resources.allocator.pop_updates().block_table_updates == []


def test_blocks_with_nan_are_cleared_and_not_cached() -> None:
    resources = Resources(8)
    sequence = resources.new_sequence(text_ids(6))
    resources.admit(sequence)
    assert resources.allocator.allocate_blocks(sequence, 6, 0.0)
    blocks = list(sequence.block_tables[0])
    sequence.mark_nonfinite()
    sequence.end("fault")
    resources.allocator.release(sequence)
    assert resources.allocator.pop_updates().block_clears == blocks
    assert resources.allocator.blocks_cached == 0
    resources.allocator.check()
