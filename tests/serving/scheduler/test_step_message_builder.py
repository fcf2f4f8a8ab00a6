"""Layout of the Step message: rows of decodes, drafts and prefill chunks in one step."""

from gpt.sampling_params import SamplingParams
from serving.messages import PrefixKVWrite, SlotInit, Submission
from serving.scheduler.resource_allocator import ResourceUpdates
from serving.scheduler.sequence import Sequence
from serving.scheduler.step_message_builder import StepMessageBuilder
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref, text_ids, virtual_ids


def running_sequence(submission: Submission, *, slot: int, matched_tokens: int = 0) -> Sequence:
    sequence = Sequence.from_submission(
        submission, arrival_order=slot, vocab_size=VOCAB_SIZE, block_tokens=4, now=0.0
    )
    block_table = [10 * slot + index for index in range(1, 5)]
    sequence.start_running(slot, [block_table], matched_tokens, now=0.0)
    return sequence


def test_a_step_has_decodes_with_drafts_then_prefill_chunks() -> None:
    decoding = [
        running_sequence(
            Submission(number, text_ids(5, number), SamplingParams(), output_tokens=[number]),
            slot=number,
            matched_tokens=5,
        )
        for number in range(2)
    ]
    prefilling = running_sequence(Submission(2, text_ids(8), SamplingParams()), slot=2)
    builder = StepMessageBuilder(VOCAB_SIZE, 16, 0)
    for sequence in decoding:
        builder.add_decode(sequence)
    builder.add_drafts([[], [7, 8]])
    builder.add_prefill(prefilling, 4)
    step = builder.build(3, ResourceUpdates())
    assert step.step_id == 3
    assert (step.slots, step.past, step.lengths) == ([0, 1, 2], [5, 5, 0], [1, 3, 4])
    assert step.token_ids == [0, 1, 7, 8, *text_ids(8)[:4]]
    assert step.draft_counts == [0, 2, 0]
    assert step.draws == [True, True, False]
    assert (builder.tokens_left, builder.prompt_tokens) == (8, 4)
    # The builder reads the sequences and leaves their counts to the scheduler.
    assert [sequence.steps_in_flight for sequence in builder.sequences] == [0, 0, 0]


def test_virtual_tokens_become_rows_of_the_adapter_pool() -> None:
    submission = Submission(
        0,
        [*virtual_ids(2), 9],
        SamplingParams(),
        adapter_ref=make_adapter_ref("task", 2),
        output_tokens=[4],
    )
    sequence = running_sequence(submission, slot=0)
    sequence.pin_adapter_rows(30)
    builder = StepMessageBuilder(VOCAB_SIZE, 16, 0)
    builder.init_slot(sequence)
    builder.add_prefill(sequence, 4)
    step = builder.build(0, ResourceUpdates())
    assert step.token_ids == [VOCAB_SIZE + 30, VOCAB_SIZE + 31, 9, 4]
    assert step.slot_inits == [SlotInit(0, submission.sampling, [-1, -1, 9], [4])]


def test_a_prefix_write_covers_the_blocks_of_its_tokens() -> None:
    submission = Submission(
        0, [*virtual_ids(6), 9], SamplingParams(), adapter_ref=make_adapter_ref("task", 6, "prefix")
    )
    sequence = running_sequence(submission, slot=0)
    sequence.plan_prefix_write(3)
    builder = StepMessageBuilder(VOCAB_SIZE, 16, 8)
    assert builder.is_empty
    builder.add_prefix_write(sequence, 3)
    assert not builder.is_empty and builder.prefix_tokens_left == 5
    step = builder.build(0, ResourceUpdates())
    assert step.prefix_writes == [PrefixKVWrite("task", 3, 3, [1, 2])]
